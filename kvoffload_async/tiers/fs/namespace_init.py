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
from dataclasses import dataclass
from typing import Final

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.features import (
    Features,
    MalformedFormatError,
    NewerFormatError,
    check_format,
)
from kvoffload_async.tiers.files.ops import FileOps, read_file
from kvoffload_async.tiers.fs.layout import FOLDERS, TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.operations import Verify
from kvoffload_async.tiers.fs.usage import FILE_BYTES
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER, BlockWriter

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
        content = bytes(read_file(ops, f"{folder}/{FILE_NAME}", _MAX_BYTES))
    except FileNotFoundError:
        return
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


@dataclass(frozen=True, slots=True)
class Footprint:
    """Disk usage of a block on a filesystem.

    Attributes:
        block_bytes: Disk bytes of a block, in whole filesystem blocks.
        least_bytes: Minimum capacity for one block.
    """

    block_bytes: int
    least_bytes: int

    @classmethod
    def of(cls, folder: os.stat_result, row_bytes: int) -> Footprint:
        """Return the footprint of blocks of `row_bytes`, given the status of a folder there."""
        grain = max(512, folder.st_blksize)
        block_bytes = -(-row_bytes // grain) * grain
        count_bytes = -(-FILE_BYTES // grain) * grain
        return cls(block_bytes, block_bytes + count_bytes + grain)  # with this writer's entry

    def check(self, capacity_bytes: int) -> None:
        """Check that the capacity fits a block; raises ConfigError."""
        if capacity_bytes < self.least_bytes:
            raise ConfigError(
                f"capacity_bytes: {capacity_bytes} holds no block of {self.block_bytes} bytes "
                f"in addition to the count; give at least {self.least_bytes}"
            )


logger = logging.getLogger(__name__)

_CREATE = os.O_WRONLY | os.O_CREAT
_PROBE = "user.kvoffload.probe"


def enter_namespace(
    ops: FileOps,
    namespace: Namespace,
    writers: WriterRegistry,
    writer: BlockWriter,
    verify: Verify,
) -> None:
    """Create the folders, and register.

    Raises:
        OSError: The directory cannot be created or written.
        ConfigError: The filesystem lacks a feature that `verify` requires, or a newer release has
            changed the directory's format.
    """
    ops.make_folders(namespace.folder)
    require_known_format(ops, namespace.folder)
    writers.register()  # before any other file: temporary ones name their writer
    _write_config(ops, namespace, writer)
    if not namespace.is_vllms:  # whose 4096 times 256 folders are made when a block needs them
        paths = {f"{namespace.folder}/{name}" for name in FOLDERS}
        for path in sorted(paths.difference(path for path, _ in ops.entries(namespace.folder))):
            with contextlib.suppress(FileExistsError):
                ops.mkdir_own(path)
    if verify is Verify.OFF:
        marker = f"{namespace.folder}/{UNVERIFIED_MARKER}"
        ops.close(ops.open_own(marker, os.O_WRONLY))
    if verify is Verify.REQUIRED:
        _require_attributes(ops, namespace, writer)
    writer.sync_root()


def _write_config(ops: FileOps, namespace: Namespace, writer: BlockWriter) -> None:
    """Write the run configuration to a file, for information only; errors are logged."""
    path = namespace.config_path
    temp = f"{namespace.folder}/config.json.{writer.writer_id}.0{TEMP_SUFFIX}"
    text = json.dumps(namespace.fields, indent=2, sort_keys=True)
    try:
        ops.make_folders(path.rpartition("/")[0])
        if ops.exists(path):
            return
        fd = ops.open(temp, _CREATE)
        try:
            written = ops.pwrite(fd, memoryview(text.encode()), 0)
        finally:
            ops.close(fd)
        if written == len(text):
            ops.rename(temp, path)
        else:
            writer.discard(temp)
    except OSError as error:
        logger.warning("%s is not written: %s", path, str(error))
        writer.discard(temp)


def _require_attributes(ops: FileOps, namespace: Namespace, writer: BlockWriter) -> None:
    probe = f"{namespace.folder}/probe.bin.{writer.writer_id}.0{TEMP_SUFFIX}"
    fd = ops.open(probe, _CREATE)
    try:
        if why := _lack_of_attributes(ops, fd):
            raise ConfigError(
                f"verify: 'required' needs extended attributes, which {probe!r} cannot have "
                f"({why}); use 'when_present', or another filesystem"
            )
    finally:
        ops.close(fd)
        writer.discard(probe)


def _lack_of_attributes(ops: FileOps, fd: int) -> str:
    """Return why a file cannot have an attribute; empty if it can."""
    try:
        ops.set_xattr(fd, _PROBE, b"1")
    except OSError as error:
        return str(error)
    return "" if ops.get_xattr(fd, _PROBE) == b"1" else "they cannot be read"
