"""Which format a namespace has.

This is version 1, without features, and of that there is no file. A release that changes what a
namespace is writes `.format` into it, before anything else, and so keeps out those that do not know
the change: this one looks for the file.

Thread: an I/O thread.
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
"""The features that this release knows; docs/formats.md says what each means."""

_MAX_BYTES: Final = 1 << 16


def check_namespace(ops: FileOps, folder: str, *, for_writing: bool) -> None:
    """Check that a namespace, which need not exist, has a format that this release knows.

    Raises:
        NewerFormatError: It has not, at least not for this purpose.
        OSError: That cannot be told.
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
        raise NewerFormatError(f"its {FILE_NAME} says nothing that this one knows") from error


def require_known_format(ops: FileOps, folder: str) -> None:
    """Check that a tier may use a namespace.

    Raises:
        ConfigError: It is of a newer release.
        OSError: That cannot be told.
    """
    try:
        check_namespace(ops, folder, for_writing=True)
    except NewerFormatError as error:
        raise ConfigError(
            f"root_dir: the blocks in {folder!r} are of a newer release: {error}; upgrade, or give "
            "another directory"
        ) from error
