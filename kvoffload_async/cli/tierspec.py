"""A secondary tier on the command line: `TYPE:key=value,...`."""

from __future__ import annotations

from typing import Any

from kvoffload_async.cli.json_input import JsonInputError, parse_json
from kvoffload_async.errors import InputError


def parse_tier(text: str, flag: str = "--tier") -> dict[str, Any]:
    """Return a tier's configuration; `flag` is where the text was given.

    A value is what JSON says where it is a JSON scalar (`4`, `0.5`, `true`, `"text"`, `null`), else
    the text itself. A comma always ends a value; what needs one goes into a configuration file.

    Raises:
        InputError: There is no type, or an option is not `key=value`, or comes twice.
    """
    tier_type, _, rest = text.partition(":")
    if not tier_type:
        raise InputError(f"{flag} {text!r}: no type; give TYPE[:key=value,...]")
    config: dict[str, Any] = {"type": tier_type}
    for option in rest.split(",") if rest else ():
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise InputError(f"{flag} {text!r}: expected key=value, got {option!r}")
        if key in config:
            raise InputError(f"{flag} {text!r}: {key!r} is given twice")
        config[key] = _scalar(value)
    return config


def _scalar(text: str) -> object:
    try:
        value = parse_json(text)
    except JsonInputError:  # `NaN` and `Infinity` among them: they stay text
        return text
    return text if isinstance(value, list | dict) else value
