"""What the options mean that say who may read and write what tiers on disk make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvoffload_async.config import shown
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.modes import Modes

_OCTAL: Final = re.compile(r"(?:0o)?[0-7]{3,5}")
_FILE_BITS: Final = 0o600, 0o666
_DIR_BITS: Final = 0o700, 0o2777
"""Bits that a mode must have, and those that it may have."""


def parse_modes(options: Mapping[str, Any]) -> Modes:
    """Return the permissions that `file_mode` and `dir_mode` ask for; raises ConfigError."""
    return Modes(
        _parse(options["file_mode"], "file_mode", *_FILE_BITS),
        _parse(options["dir_mode"], "dir_mode", *_DIR_BITS),
    )


def _parse(value: object, key: str, least: int, most: int) -> int | None:
    if value is None:
        return None
    mode = -1
    if isinstance(value, str) and _OCTAL.fullmatch(value):
        mode = int(value, 8)
    elif type(value) is int:
        mode = value
    if mode < 0 or mode & least != least or mode & ~most:
        raise ConfigError(
            f"{key}: {shown(value)} is not valid; give octal digits as text, with all bits of "
            f'"{least:04o}" and none that "{most:04o}" has not, such as "{least | 0o060:04o}"'
        )
    return mode
