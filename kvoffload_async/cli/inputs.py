"""Strict parsers for hand-written input: JSON, YAML limited to JSON's types, and tier options.

A tier option is `TYPE:key=value,...`. Every mistake raises an error that names it.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, NoReturn

from kvoffload_async.errors import InputError

_MAX_DEPTH: Final = 32
"""Maximum nesting of objects and lists; a configuration needs five levels."""


def parse_json(text: str) -> Any:  # noqa: ANN401 - what JSON can be
    """Return the value of a JSON text.

    Raises:
        InputError: The text is not JSON, an object has a duplicate key, a number is not finite
            or too long, or the nesting is too deep.
    """
    _check_depth(_STEPS.get(found[0], 0) for found in _BRACKET_OR_STRING.finditer(text))
    try:
        return json.loads(
            text,
            object_pairs_hook=_as_object,
            parse_constant=_reject_number,
            parse_float=_as_float,
            parse_int=_as_integer,
        )
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from error


_BRACKET_OR_STRING: Final = re.compile(r'[][{}]|"(?:[^"\\]|\\.)*+"')
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def _check_depth(steps: Iterable[int]) -> None:
    """Raise InputError if objects and lists are nested too deeply.

    Call this before any recursive parser: at Python's recursion limit, unrelated finalizers and
    garbage-collector callbacks fail too.

    Args:
        steps: 1 for each start of an object or list, -1 for each end.
    """
    if any(depth > _MAX_DEPTH for depth in accumulate(steps)):
        raise InputError(f"objects and lists are nested more than {_MAX_DEPTH} deep; flatten them")


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"the key {key!r} is given twice in one object; keep one of them")
        found[key] = value
    return found


def _reject_number(text: str) -> NoReturn:
    raise InputError(f"{text} is not a JSON number; write a finite one")


def _as_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _reject_number(text if len(text) < _SHORT else text[:_SHORT] + "...")
    return value


def _as_integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise InputError(f"a number of {len(text)} digits is too large: {text[:_SHORT]}...")
    return int(text)


_SHORT: Final = 40
_MAX_DIGITS: Final = 100


def parse_yaml(text: str) -> Any:  # noqa: ANN401 - what JSON can be
    """Return the value of a YAML text, limited to JSON's types.

    Raises:
        InputError: The text is not YAML, it has an alias or a tag, a mapping has a duplicate
            key or a key that is not text, a value is not of a JSON type, the nesting is too deep,
            or PyYAML is not installed.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise InputError(
            f"YAML needs PyYAML ({error}); install kvoffload-async[yaml], or write JSON"
        ) from error
    try:
        _check_depth(_steps(text, yaml))
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), yaml)
        return parse_json(json.dumps(yaml.safe_load(text), default=_reject_type))
    except InputError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"not YAML: {' '.join(str(error).split())}") from error


def _reject_type(value: object) -> NoReturn:
    raise InputError(f"{value} is read as a {type(value).__name__}; quote it")


def _steps(text: str, yaml: Any) -> Iterator[int]:  # noqa: ANN401 - PyYAML's own
    """Yield 1 for each start of a YAML mapping or list and -1 for each end; reject aliases.

    PyYAML's parser is iterative, unlike its composer, so it can check the depth first.
    """
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):  # nested aliases expand exponentially
            raise InputError("an alias (*name) is not allowed; write the value again")
        if isinstance(event, yaml.CollectionStartEvent):
            yield 1
        elif isinstance(event, yaml.CollectionEndEvent):
            yield -1


def _check_keys(node: Any, yaml: Any) -> None:  # noqa: ANN401 - PyYAML's own
    """Reject lists with a tag, and mappings with duplicate keys or keys that are not text."""
    if isinstance(node, yaml.SequenceNode):
        if node.tag != "tag:yaml.org,2002:seq":  # else PyYAML makes tuples, and JSON lists of them
            raise InputError(f"a list has the tag {node.tag}; leave the tag out")
        for one in node.value:
            _check_keys(one, yaml)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, one in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise InputError(f"the key {key.value!r} is not text; quote it")
            if key.value in keys:
                raise InputError(f"the key {key.value!r} is given twice; keep one of them")
            keys.add(key.value)
            _check_keys(one, yaml)


def parse_tier(text: str, flag: str = "--tier") -> dict[str, Any]:
    """Return the configuration of a tier that was given as the value of `flag`.

    A value that is a JSON scalar (`4`, `0.5`, `true`, `"text"`, `null`) is parsed as JSON; any
    other value is text. A comma always ends a value, so a value with a comma needs a
    configuration file.

    Raises:
        InputError: The type is missing, or an option is not `key=value`, or is given twice. The
            message does not show the options, as their values may be secrets.
    """
    tier_type, _, rest = text.partition(":")
    if not tier_type:
        raise InputError(f"{flag}: no type; give TYPE[:key=value,...]")
    config: dict[str, Any] = {"type": tier_type}
    name = re.split("[,=]", tier_type, maxsplit=1)[0]  # without options after a comma by mistake
    for number, option in enumerate(rest.split(",") if rest else (), 1):
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise InputError(
                f"{flag} {name!r}: option {number} is not key=value; expected TYPE[:key=value,...]"
            )
        if key in config:
            raise InputError(f"{flag} {name!r}: {key!r} is given twice")
        config[key] = _scalar(value)
    return config


def _scalar(text: str) -> object:
    try:
        value = parse_json(text)
    except InputError:  # `NaN` and `Infinity` stay text too
        return text
    return text if isinstance(value, list | dict) else value
