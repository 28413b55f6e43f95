"""Checks and initialisation of a namespace before a tier uses it.

The format of a namespace is version 1 without features, which has no version file. A release that
changes the format writes `.format` into a namespace before anything else, to lock out releases that
do not know the change. This release checks for that file.

Run on I/O threads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import Final

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.features import (
    Features,
    MalformedFormatError,
    NewerFormatError,
    check_format,
)
from kvoffload_async.tiers.files.ops import FileOps, read_file, write_all
from kvoffload_async.tiers.fs.layout import FOLDERS, TEMP_SUFFIX
from kvoffload_async.tiers.fs.operations import Verify
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER, BlockWriter

logger = logging.getLogger(__name__)

FILE_NAME: Final = ".format"
FORMAT: Final = "kvoffload-fs"
VERSION: Final = 1
KNOWN: Final = Features()
"""Format features known to this release; docs/formats.md describes them."""

_MAX_BYTES: Final = 1 << 16
_CREATE: Final = os.O_WRONLY | os.O_CREAT
_PROBE: Final = "user.kvoffload.probe"


def check_namespace(ops: FileOps, folder: str, *, for_writing: bool) -> None:
    """Check that the format of a namespace, if it exists, is known to this release.

    Raises:
        NewerFormatError: The format is not known, or not for this access.
        OSError: The format cannot be read.
    """
    try:
        content = bytes(read_file(ops, f"{folder}/{FILE_NAME}", _MAX_BYTES))
    except FileNotFoundError:
        return
    try:
        body = json.loads(content)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise MalformedFormatError(f"{FILE_NAME} does not name the format {FORMAT!r}")
        check_format(body, VERSION, KNOWN, for_writing=for_writing)
    except (ValueError, RecursionError) as error:
        raise NewerFormatError(f"its {FILE_NAME} is not known to this release") from error


def enter_namespace(files: BlockWriter) -> None:
    """Create the folders of a namespace, and register as a writer.

    Raises:
        OSError: The directory cannot be created or written.
        ConfigError: The filesystem lacks a feature that `verify` requires, or a newer release has
            written the directory.
    """
    ops, folder, verify = files.ops, files.namespace.folder, files.settings.verify
    ops.make_folders(folder)
    try:
        check_namespace(ops, folder, for_writing=True)
    except NewerFormatError as error:
        raise ConfigError(
            f"root_dir: the blocks in {folder!r} are of a newer release: {error}; upgrade, or give "
            "another directory"
        ) from error
    files.writers.register()  # before any other file: temporary ones name their writer
    _write_config(files)
    if not files.namespace.is_vllms:  # its 4096 times 256 folders are made when a block needs them
        paths = {f"{folder}/{name}" for name in FOLDERS}
        for path in sorted(paths.difference(path for path, _ in ops.entries(folder))):
            with contextlib.suppress(FileExistsError):
                ops.mkdir_own(path)
    if verify is Verify.OFF:
        ops.close(ops.open_own(f"{folder}/{UNVERIFIED_MARKER}", os.O_WRONLY))
    if verify is Verify.REQUIRED:
        _require_attributes(files)
    files.sync_root()


def _write_config(files: BlockWriter) -> None:
    """Write the run configuration to a file, for information only; errors are logged."""
    ops, namespace = files.ops, files.namespace
    path = namespace.config_path
    temp = f"{namespace.folder}/config.json.{files.writers.writer_id}.0{TEMP_SUFFIX}"
    text = json.dumps(namespace.fields, indent=2, sort_keys=True)
    try:
        ops.make_folders(path.rpartition("/")[0])
        if ops.exists(path):
            return
        with ops.opened(temp, _CREATE) as fd:
            write_all(ops, fd, text.encode(), 0)
        ops.rename(temp, path)
    except OSError as error:
        logger.warning("%s is not written: %s", path, str(error))
        files.discard_temp(temp)


def _require_attributes(files: BlockWriter) -> None:
    ops = files.ops
    probe = f"{files.namespace.folder}/probe.bin.{files.writers.writer_id}.0{TEMP_SUFFIX}"
    try:
        with ops.opened(probe, _CREATE) as fd:
            why = _lack_of_attributes(ops, fd)
    finally:
        files.discard_temp(probe)
    if why:
        raise ConfigError(
            f"verify: 'required' needs extended attributes, which {probe!r} cannot have ({why}); "
            "use 'when_present', or another filesystem"
        )


def _lack_of_attributes(ops: FileOps, fd: int) -> str:
    """Return why a file cannot have an extended attribute; empty if it can."""
    try:
        ops.set_xattr(fd, _PROBE, b"1")
    except OSError as error:
        return str(error)
    return "" if ops.get_xattr(fd, _PROBE) == b"1" else "they cannot be read"
