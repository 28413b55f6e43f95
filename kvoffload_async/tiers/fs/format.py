"""Format version of a namespace.

This is version 1 without features, which has no version file. A release that changes the format
writes `.format` into a namespace before anything else, to lock out releases that do not know the
change. This release checks for that file.

Run on I/O threads.
"""

from __future__ import annotations

import json
import os
from typing import Final

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.features import (
    Features,
    MalformedFormatError,
    NewerFormatError,
    check_format,
)
from kvoffload_async.tiers.files.ops import FileOps

FILE_NAME: Final = ".format"
FORMAT: Final = "kvoffload-fs"
VERSION: Final = 1
KNOWN: Final = Features()
"""Features known to this release; docs/formats.md describes them."""

_MAX_BYTES: Final = 1 << 16


def check_namespace(ops: FileOps, folder: str, *, for_writing: bool) -> None:
    """Check that the format of a namespace, if it exists, is known to this release.

    Raises:
        NewerFormatError: The format is not known, or not for this access.
        OSError: The format cannot be read.
    """
    try:
        fd = ops.open(f"{folder}/{FILE_NAME}", os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        buffer = memoryview(bytearray(_MAX_BYTES))
        content = bytes(buffer[: ops.pread_into(fd, buffer, 0)])
    finally:
        ops.close(fd)
    try:
        body = json.loads(content)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise MalformedFormatError(f"it is not of {FORMAT!r}")
        check_format(body, VERSION, KNOWN, for_writing=for_writing)
    except (ValueError, RecursionError) as error:
        raise NewerFormatError(f"its {FILE_NAME} is not known to this release") from error


def require_known_format(ops: FileOps, folder: str) -> None:
    """Check that a tier may use a namespace.

    Raises:
        ConfigError: It was written by a newer release.
        OSError: The format cannot be read.
    """
    try:
        check_namespace(ops, folder, for_writing=True)
    except NewerFormatError as error:
        raise ConfigError(
            f"root_dir: the blocks in {folder!r} are of a newer release: {error}; upgrade, or give "
            "another directory"
        ) from error
