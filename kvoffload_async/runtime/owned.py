"""Objects that own threads and memory: unusable in a forked child, and to be closed."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Final, NoReturn
from weakref import WeakKeyDictionary

from kvoffload_async.errors import StateError

_CLOSING: Final = frozenset({"close", "shutdown"})
_guarded: WeakKeyDictionary[object, dict[str, object]] = WeakKeyDictionary()


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
