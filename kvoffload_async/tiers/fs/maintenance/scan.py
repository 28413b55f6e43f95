"""Contents of a namespace, from one walk with subfolders in parallel."""

from __future__ import annotations

import os
import stat as stat_module
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from kvoffload_async.tiers.files.maintenance import MaintenanceIo
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX
from kvoffload_async.tiers.fs.maintenance.namespaces import FoundNamespace
from kvoffload_async.types import OffloadKey

_Entries = list[tuple[str, os.stat_result]]


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file; `disk_bytes` are allocated bytes, `modified_s` is in seconds since 1970."""

    path: str
    length_bytes: int
    disk_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class FoundBlock(FoundFile):
    """A block's file."""

    key: OffloadKey


@dataclass(slots=True)
class Scan:
    """Result of a walk.

    Attributes:
        blocks: Files with the path of a block.
        temps: Temporary files.
        unknown_files: All other files.
        folders: Block folders.
        other_folders: Other folders.
        total_bytes: Disk bytes of all files and folders.
        grown_bytes: Growth of folders beyond their first allocation.
        unreadable: Errors of folders that could not be walked.
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    temps: list[FoundFile] = field(default_factory=list)
    unknown_files: list[FoundFile] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    other_folders: list[str] = field(default_factory=list)
    total_bytes: int = 0
    grown_bytes: int = 0
    unreadable: list[str] = field(default_factory=list)

    def take_in(
        self, namespace: FoundNamespace, entries: _Entries, error: OSError | None, folder: str
    ) -> None:
        """Add the entries of a folder, and the error if they are incomplete."""
        if error is not None:
            self.unreadable.append(f"{folder}: {error.strerror or error}")
        for path, status in entries:
            self._take_in(namespace, path, status)

    def _take_in(self, namespace: FoundNamespace, path: str, status: os.stat_result) -> None:
        allocated_bytes = disk_bytes(status)
        self.total_bytes += allocated_bytes
        name = path[len(namespace.folder) + 1 :]
        if stat_module.S_ISDIR(status.st_mode):
            self.grown_bytes += max(0, allocated_bytes - status.st_blksize)
            if namespace.is_block_folder(path):
                self.folders.append(path)
            elif name and not name.startswith("."):
                self.other_folders.append(path)
            return
        if name.startswith("."):
            return
        file = (path, status.st_size, allocated_bytes, status.st_mtime)
        key = namespace.key_of(path)
        if not stat_module.S_ISREG(status.st_mode):
            self.unknown_files.append(FoundFile(*file))
        elif key is not None:
            self.blocks.append(FoundBlock(*file, key))
        elif name.endswith(TEMP_SUFFIX):
            self.temps.append(FoundFile(*file))
        else:
            self.unknown_files.append(FoundFile(*file))


async def scan_namespace(io: MaintenanceIo, namespace: FoundNamespace) -> Scan:
    """Walk over a namespace; entries removed meanwhile are skipped. Incomplete if stopped."""
    scan = Scan()
    top, error = await io.run(_list, io.ops, namespace.folder)
    scan.take_in(namespace, top, error, namespace.folder)
    folders = [
        path
        for path, status in top
        if path != namespace.folder and stat_module.S_ISDIR(status.st_mode)
    ]
    io.control.expect(len(folders))
    async with aclosing(io.share_out(iter(folders), partial(_walk, io.ops))) as walked:
        async for folder, (entries, error) in walked:
            scan.take_in(namespace, entries, error, folder)
            io.control.advance(1)
    return scan


def _list(ops: FileOps, folder: str) -> tuple[_Entries, OSError | None]:
    """Return a folder and its direct entries. Thread-safe."""
    entries: _Entries = []
    try:
        entries.append((folder, ops.stat(folder)))
        entries.extend(ops.entries(folder))
    except FileNotFoundError:
        return entries, None
    except OSError as error:
        return entries, error
    return entries, None


def _walk(ops: FileOps, folder: str) -> tuple[_Entries, OSError | None]:
    """Return all entries below a folder. Thread-safe."""
    entries: _Entries = []
    try:
        entries.extend(ops.walk(folder))
    except OSError as error:
        return entries, error
    return entries, None
