"""Guards of objects that own threads and memory: closed once, unusable in a forked child."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, Generic, NoReturn, Self, TypeVar
from weakref import WeakKeyDictionary

from kvoffload_async.errors import StateError, TierTimeoutError

T = TypeVar("T")

_CLOSING: Final = frozenset({"close", "shutdown"})
_guarded: WeakKeyDictionary[object, dict[str, object]] = WeakKeyDictionary()


_GRACE_S: Final = 10.0
"""Seconds by which closing may exceed its deadline to end threads."""


class Closing(Generic[T]):
    """Closes an object once, even if several threads ask for it.

        OPEN    --run-->         CLOSING   by the calling thread; other callers wait for it
        CLOSING --returned-->    CLOSED    with the outcome, which all callers get
        CLOSING --raised-->      OPEN      the error reaches those who waited; `run` tries again

    Thread-safe. In a forked child, replace it by `closed`: the lock may have been held.
    """

    def __init__(self) -> None:
        """Start in the state OPEN."""
        self._lock = threading.Lock()
        self._attempt: Future[T] | None = None
        """The running or the successful attempt to close."""
        self._closer = 0
        self._until_s = 0.0

    @classmethod
    def closed(cls, outcome: T) -> Self:
        """Return a `Closing` in the state CLOSED, with an outcome."""
        closing = cls()
        closing._attempt = Future()
        closing._attempt.set_result(outcome)
        return closing

    def run(self, close: Callable[[float], T], timeout_s: float) -> T:
        """Close the object, or wait until another thread has closed it; return the outcome.

        Args:
            close: Closes it, within about the time that it is given.
            timeout_s: Seconds for closing. A later caller waits for the first one's time.

        Raises:
            StateError: Called out of `close`, which cannot wait for itself.
            TierTimeoutError: Another thread has not closed it in its time, and goes on.
        """
        own: Future[T] = Future()
        with self._lock:
            attempt = self._attempt
            if attempt is None:
                self._attempt = own
                self._closer = threading.get_ident()
                self._until_s = time.monotonic() + timeout_s + _GRACE_S
        if attempt is not None:
            return self._outcome_of(attempt)
        try:
            outcome = close(timeout_s)
        except BaseException as error:
            self._attempt = None
            own.set_exception(error)
            raise
        own.set_result(outcome)
        return outcome

    def _outcome_of(self, attempt: Future[T]) -> T:
        """Wait for another thread's attempt to close; return its outcome."""
        if not attempt.done() and self._closer == threading.get_ident():
            raise StateError("closing runs on this thread already; the first call finishes it")
        if not wait([attempt], max(0.0, self._until_s - time.monotonic())).done:
            raise TierTimeoutError(
                "another thread is still closing this object after its timeout; the memory "
                "that the object uses must stay allocated"
            )
        return attempt.result()


def guard_forks(owner: object, **closed: object) -> None:
    """Make public methods of `owner` raise StateError in a forked child.

    The child would wait for threads that it does not have, and write to shared memory. Has no cost
    in the parent.

    Args:
        owner: An object that owns threads or shared memory.
        closed: Attributes and their values in the closed state, so that closing it in the child has
            no effect.
    """
    _guarded[owner] = closed


def warn_unclosed(owner: object, closing: str) -> None:
    """Warn about an object that is collected without having been closed; for `__del__`."""
    warnings.warn(
        f"{type(owner).__name__} was never closed: use it as a context manager, or call {closing}",
        ResourceWarning,
        stacklevel=3,
        source=owner,
    )


def _refuse(what: str, *_args: object, **_kwargs: object) -> NoReturn:
    raise StateError(
        f"{what} was opened before this process was forked, and works only in the parent; open "
        'one in the child, or start the child with the "spawn" method'
    )


def _in_child() -> None:
    for owner, closed in list(_guarded.items()):
        refuse = partial(_refuse, f"this {type(owner).__name__}")
        for name in dir(type(owner)):
            if callable(getattr(type(owner), name)) and name not in _CLOSING and name[0] != "_":
                vars(owner)[name] = refuse
        vars(owner).update(closed)


os.register_at_fork(after_in_child=_in_child)
