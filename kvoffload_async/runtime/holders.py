"""Who holds views of some memory, for a message: what the garbage collector sees, and no more."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
)

_MOST_NAMES = 8
_MOST_STEPS = 6
"""How far a name is looked for behind containers: each step is a pass over every object."""
_MOST_FOLLOWED = 256
"""How many containers are looked behind in a step."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, memoryview)
_CODE_OF = {
    FrameType: ("frame of", "f_code"),  # kept by an error, mostly
    CoroutineType: ("coroutine", "cr_code"),
    GeneratorType: ("generator", "gi_code"),
    AsyncGeneratorType: ("generator", "ag_code"),
}
_EXPORT = "managedbuffer"
"""What stands between memory and the views of it; the interpreter does not give the type away."""


def describe_holders(memory: object, ignored: Iterable[object] = ()) -> str:
    """Return the names of functions and types that hold a view of `memory`; never contents.

    Args:
        memory: What exports the views.
        ignored: Holders that are not worth a word.
    """
    names: dict[str, None] = {}
    known = {id(memory), *map(id, ignored)}
    links: list[object] = [memory]
    for _ in range(_MOST_STEPS):
        followed = {id(link) for link in links}
        referrers = [r for r in gc.get_referrers(*links) if r is not links and id(r) not in known]
        known.update(map(id, referrers), (id(links), id(referrers)))
        links = []
        for referrer in referrers:
            if isinstance(referrer, _CONTAINERS) or type(referrer).__name__ == _EXPORT:
                links.append(referrer)
            elif not (isinstance(referrer, FunctionType) and id(referrer.__globals__) in followed):
                names[_name_of(referrer)] = None
        del links[_MOST_FOLLOWED:]
        if not links or len(names) >= _MOST_NAMES:
            break
    # The collector sees neither arrays nor what a function has that is running.
    return ", ".join(list(names)[:_MOST_NAMES]) or "arrays, code in C or running functions"


def _name_of(holder: object) -> str:
    kind = type(holder)
    if kind in _CODE_OF:
        word, attribute = _CODE_OF[kind]
        return f"the {word} {getattr(holder, attribute).co_qualname}"
    if isinstance(holder, FunctionType):
        return f"the function {holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, ModuleType):
        return f"the module {holder.__name__}"
    return f"an object of type {kind.__module__}.{kind.__qualname__}"
