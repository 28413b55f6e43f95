"""Objects that own threads and memory: a forked child cannot use them, and somebody closes them."""

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
    """Make the public calls of `owner` raise StateError in a forked child.

    The child would wait for threads that it does not have, and write into memory that it shares.
    Costs the parent's calls nothing.

    Args:
        owner: An object that owns threads or shared memory.
        closed: Its attributes, with the values that they have once it is closed: so that closing
            it does nothing in the child, which owns nothing of it.
    """
    _guarded[owner] = closed


def warn_unclosed(owner: object, closing: str) -> None:
    """Warn of an object that is collected and was never closed; for `__del__`."""
    warnings.warn(
        f"{type(owner).__name__} was never closed: use it as a context manager, or call {closing}",
        ResourceWarning,
        stacklevel=3,
        source=owner,
    )


def _refuse(what: str, *_args: object, **_kwargs: object) -> NoReturn:
    raise StateError(
        f"{what} was opened before this process was forked, and works in the parent alone; open "
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
