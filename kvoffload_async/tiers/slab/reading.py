"""Reading a store's folder without changing anything: for opening it, and for looking after it.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import errno
import os
import stat as stat_module
from dataclasses import dataclass, field

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.files.roots import NotRegularFileError
from kvoffload_async.tiers.slab.layout import (
    JOURNAL,
    LOCK,
    MANIFEST,
    TEMP_SUFFIX,
    segment_number,
)
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.records import RecordRows, Scan, live_rows, scan, seed_of

_READ_BYTES = 1 << 24
MAX_MANIFEST_BYTES = 1 << 20


@dataclass(slots=True)
class Folder:
    """What lies in a store's folder.

    Attributes:
        segments: Segment -> the bytes of its file.
        temps: Names of files that somebody was writing when he was killed.
        unknown_files: Names of what is no part of a store.
        allocated_bytes: What all of it takes on disk, the folder included.
        has_manifest: Whether there is a manifest, readable or not.
        has_journal: Whether there is a journal.
    """

    segments: dict[int, int] = field(default_factory=dict)
    temps: list[str] = field(default_factory=list)
    unknown_files: list[str] = field(default_factory=list)
    allocated_bytes: int = 0
    has_manifest: bool = False
    has_journal: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no store has been begun here."""
        return not (self.segments or self.has_manifest or self.has_journal)


def list_folder(ops: FileOps, folder: str) -> Folder:
    """Look what is there; a folder that is not there is empty."""
    found = Folder()
    if ops.exists(folder):
        found.allocated_bytes += disk_bytes(ops.stat(folder))
    for path, status in ops.walk(folder):
        found.allocated_bytes += disk_bytes(status)
        name = path.removeprefix(f"{folder}/")
        number = segment_number(name)
        if not stat_module.S_ISREG(status.st_mode):
            found.unknown_files.append(name)
        elif number is not None:
            found.segments[number] = status.st_size
        elif name in {MANIFEST + TEMP_SUFFIX, JOURNAL + TEMP_SUFFIX}:
            found.temps.append(name)
        elif name == MANIFEST:
            found.has_manifest = True
        elif name == JOURNAL:
            found.has_journal = True
        elif name != LOCK:
            found.unknown_files.append(name)
    return found


def read_manifest(ops: FileOps, folder: str, *, for_writing: bool = True) -> Manifest | None:
    """Return the manifest; None if there is none.

    Raises:
        NewerFormatError: It is of a newer release; see `Manifest.decode`.
        UnreadableManifestError: It is damaged.
        OSError: It cannot be read.
    """
    try:
        content = read_file(ops, f"{folder}/{MANIFEST}", MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return Manifest.decode(bytes(content), for_writing=for_writing)


def read_journal(ops: FileOps, folder: str, layout: str) -> Scan:
    """Return what the journal of a store with this layout says; one that is no file: nothing."""
    try:
        content: bytes | memoryview = read_file(ops, f"{folder}/{JOURNAL}")
    except (FileNotFoundError, NotRegularFileError):
        content = b""
    return scan(content, seed_of(layout))


def live_in(found: Folder, scanned: Scan, slot_bytes: int) -> RecordRows:
    """Return which of a scan's records are of blocks that are there, the oldest first."""
    slots = {number: size // slot_bytes for number, size in found.segments.items()}
    return live_rows(scanned.records, slots)


def read_file(ops: FileOps, path: str, max_bytes: int | None = None) -> memoryview:
    """Return a file's content, or its first `max_bytes`; raises OSError."""
    fd = ops.open(path, os.O_RDONLY)
    try:
        length = ops.fstat(fd).st_size
        buffer = memoryview(bytearray(length if max_bytes is None else min(length, max_bytes)))
        done = 0
        while done < len(buffer):
            count = ops.pread_into(fd, buffer[done : done + _READ_BYTES], done)
            if count == 0:
                break
            done += count
        return buffer[:done]
    except MemoryError as error:  # whoever makes a file with holes can claim any length
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path) from error
    finally:
        ops.close(fd)
