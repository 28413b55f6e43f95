"""JSON that somebody wrote by hand: read strictly, so that every mistake has its message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Final, NoReturn

_MAX_DEPTH: Final = 32
"""Of objects and lists in each other; a configuration needs five."""


class JsonInputError(ValueError):
    """A text is not what JSON allows, or what this package reads of it; the message says why."""


def parse_json(text: str) -> Any:  # noqa: ANN401 - what JSON can be
    """Return the value of a JSON text.

    Raises:
        JsonInputError: It is no JSON, an object has a key twice, a number is none that can be
            written down, or it is nested too deeply.
    """
    check_depth(_STEPS.get(found[0], 0) for found in _BRACKET_OR_STRING.finditer(text))
    try:
        value = json.loads(
            text,
            object_pairs_hook=_as_object,
            parse_constant=_reject_number,
            parse_float=_as_float,
            parse_int=_as_integer,
        )
    except JsonInputError:
        raise
    except ValueError as error:
        raise JsonInputError(f"not JSON: {error}") from error
    check_value(value)
    return value


_BRACKET_OR_STRING: Final = re.compile(r'[][{}]|"(?:[^"\\]|\\.)*+"')
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def check_depth(steps: Iterable[int]) -> None:
    """Raise JsonInputError where objects and lists are nested too deeply.

    Before anything recurses into them: at Python's limit of recursion, finalizers and callbacks of
    the garbage collector fail, too, whosever they are.

    Args:
        steps: 1 where an object or list begins, -1 where it ends.
    """
    if any(depth > _MAX_DEPTH for depth in accumulate(steps)):
        raise _too_deep()


def _too_deep() -> JsonInputError:
    return JsonInputError(f"objects and lists are nested more than {_MAX_DEPTH} deep; flatten them")


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise JsonInputError(f"the key {key!r} is given twice in one object; keep one of them")
        found[key] = value
    return found


def _reject_number(text: str) -> NoReturn:
    raise JsonInputError(f"{text} is no number that JSON has; write a finite one")


def _as_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _reject_number(text if len(text) < _SHORT else text[:_SHORT] + "...")
    return value


def _as_integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise JsonInputError(f"a number of {len(text)} digits is too large: {text[:_SHORT]}...")
    return int(text)


_SHORT: Final = 40
_MAX_DIGITS: Final = 100


def check_value(value: object) -> None:
    """Raise JsonInputError if a value is nested too deeply, or is none that JSON has."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        below: list[object] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, float) and not math.isfinite(one):
                _reject_number(str(one))
            elif not isinstance(one, str | int | float | None):
                raise JsonInputError(f"{one} is read as a {type(one).__name__}; quote it")
        if not below:
            return
        level = below
    raise _too_deep()
