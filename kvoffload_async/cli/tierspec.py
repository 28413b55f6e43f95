"""A secondary tier on the command line: `TYPE:key=value,...`."""

from __future__ import annotations

import re
from typing import Any, Final

from kvoffload_async.cli.json_input import JsonInputError, parse_json
from kvoffload_async.config import HIDDEN, without_user_info
from kvoffload_async.errors import InputError

_SECRET: Final = re.compile("((?:secret|password|token|account_key|sas_key)[a-z_]*=)[^,]*")


def parse_tier(text: str, flag: str = "--tier") -> dict[str, Any]:
    """Return a tier's configuration; `flag` is where the text was given.

    A value is what JSON says where it is a JSON scalar (`4`, `0.5`, `true`, `"text"`, `null`), else
    the text itself. A comma always ends a value; what needs one goes into a configuration file.

    Raises:
        InputError: There is no type, or an option is not `key=value`, or comes twice.
    """
    shown = _SECRET.sub(rf"\1{HIDDEN}", without_user_info(text))
    tier_type, _, rest = text.partition(":")
    if not tier_type:
        raise InputError(f"{flag} {shown!r}: no type; give TYPE[:key=value,...]")
    config: dict[str, Any] = {"type": tier_type}
    for option in rest.split(",") if rest else ():
        key, equals, value = option.partition("=")
        if not key or not equals:
            got = without_user_info(option)
            raise InputError(f"{flag} {shown!r}: expected key=value, got {got!r}")
        if key in config:
            raise InputError(f"{flag} {shown!r}: {key!r} is given twice")
        config[key] = _scalar(value)
    return config


def _scalar(text: str) -> object:
    try:
        value = parse_json(text)
    except JsonInputError:  # `NaN` and `Infinity` among them: they stay text
        return text
    return text if isinstance(value, list | dict) else value
