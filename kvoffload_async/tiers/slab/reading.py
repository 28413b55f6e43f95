"""Reading a store's folder without changing anything: for opening it, and for looking after it.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import errno
import os
import stat as stat_module
from dataclasses import dataclass, field

import numpy as np

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.files.roots import NotRegularFileError
from kvoffload_async.tiers.slab.layout import (
    BAD_JOURNAL,
    JOURNAL,
    LOCK,
    MANIFEST,
    NEXT_JOURNAL,
    SESSION,
    TEMP_SUFFIX,
    segment_name,
    segment_number,
)
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.places import SlotNumbers
from kvoffload_async.tiers.slab.records import RecordRows, Scan, live_rows, scan
from kvoffload_async.tiers.slab.segment_header import HEADER_BYTES, SegmentHeader
from kvoffload_async.tiers.slab.session import Session

_READ_BYTES = 1 << 24
MAX_MANIFEST_BYTES = 1 << 20
_TEMPS = {NEXT_JOURNAL, *(name + TEMP_SUFFIX for name in (MANIFEST, JOURNAL, SESSION))}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a segment is not what its file's name says, and whether it is this store's at all."""

    why: str
    is_own: bool = False


@dataclass(slots=True)
class Folder:
    """What lies in a store's folder.

    Attributes:
        segments: Segment -> the bytes of its file.
        refused: Segment whose file is not what its name says -> what is wrong.
        temps: Names of files that somebody was writing when he was killed.
        unknown_files: Names of what is no part of a store.
        allocated_bytes: What all of it takes on disk, the folder included.
        has_manifest: Whether there is a manifest, readable or not.
        has_journal: Whether there is a journal.
        has_bad_journal: Whether one that could not be read was kept.
    """

    segments: dict[int, int] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    temps: list[str] = field(default_factory=list)
    unknown_files: list[str] = field(default_factory=list)
    allocated_bytes: int = 0
    has_manifest: bool = False
    has_journal: bool = False
    has_bad_journal: bool = False

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
        elif name in _TEMPS:
            found.temps.append(name)
        elif name == MANIFEST:
            found.has_manifest = True
        elif name == JOURNAL:
            found.has_journal = True
        elif name == BAD_JOURNAL:
            found.has_bad_journal = True
        elif name not in {LOCK, SESSION}:
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


def read_journal(ops: FileOps, folder: str, seed: int) -> Scan:
    """Return what a journal whose frames are bound by this seed says; no file: nothing."""
    try:
        content = read_file(ops, f"{folder}/{JOURNAL}")
    except (FileNotFoundError, NotRegularFileError):
        content = memoryview(bytearray())
    return scan(content, seed)


def live_in(found: Folder, scanned: Scan, manifest: Manifest) -> RecordRows:
    """Return which of a journal's units are of blocks that are there, in its order."""
    slots = {number: manifest.slots_in(size) for number, size in found.segments.items()}
    return live_rows(scanned, slots)


def note_uses(scanned: Scan, rows: RecordRows, session: Session) -> None:
    """Note in a journal's units when a session has used their blocks, if they do not say better.

    The journal knows the uses up to when it was written, a session those up to its end.
    """
    slots = SlotNumbers({number: len(uses) for number, uses in session.uses.items()})
    ticks = np.zeros(slots.total, dtype=np.uint32)
    for number, start, stop in slots.ranges():
        ticks[start:stop] = session.uses[number]
    index, exists = slots.of(scanned.units["place"][rows])
    mine = rows[exists]
    known = scanned.units["use"][mine]
    scanned.units["use"][mine] = np.maximum(known, ticks[index[exists]])


def by_use(scanned: Scan, rows: RecordRows) -> RecordRows:
    """Return units of blocks in the order of their last use, the least recent first."""
    ordered: RecordRows = rows[np.argsort(scanned.units["use"][rows], kind="stable")]
    return ordered


def refuse_strange_segments(ops: FileOps, folder: str, found: Folder, manifest: Manifest) -> None:
    """Move segments that are not what their names say from a folder's segments to its refused ones.

    One that cannot be read stays.
    """
    if not manifest.header_bytes:
        return
    for number, size in list(found.segments.items()):
        if not manifest.slots_in(size):
            continue  # one that was not even begun
        try:
            content = bytes(read_file(ops, f"{folder}/{segment_name(number)}", HEADER_BYTES))
        except OSError:
            continue  # then its blocks cannot be read either, and say so
        header = SegmentHeader.decode(content)
        if header is None:
            if not any(content):
                found.segments[number] = 0  # neither was this one, when the power went
                continue
            refusal = Refusal("its header is damaged, or it has none")
        elif header.store_uuid != manifest.store_uuid:
            refusal = Refusal(f"it is of the store {header.store_uuid}")
        elif header.number != number:
            refusal = Refusal(f"it is segment {header.number} of this store", is_own=True)
        else:
            continue
        found.refused[number] = refusal
        del found.segments[number]


def read_session(ops: FileOps, folder: str, seed: int) -> Session | None:
    """Return who had a store open last; None if it does not say, as those of older releases."""
    try:
        content = read_file(ops, f"{folder}/{SESSION}")
    except FileNotFoundError:
        return None
    except NotRegularFileError:
        return Session()
    return Session.decode(content, seed)


def read_file(ops: FileOps, path: str, max_bytes: int | None = None) -> memoryview:
    """Return a file's content, or its first `max_bytes`; raises OSError."""
    fd = ops.open(path, os.O_RDONLY)
    try:
        size_bytes = ops.fstat(fd).st_size
        if max_bytes is not None:
            size_bytes = min(size_bytes, max_bytes)
        buffer = np.empty(size_bytes, dtype=np.uint8).data  # writing zeros would hold up the loop
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
