"""What of an existing store can be served: its files are read, and nothing is changed.

The session says whether the store was closed in order, and by a process of which boot. A process
that is killed loses nothing that it has written: the page cache has it. A machine that goes down
may lose any of it, so what the journal then says of slots need not be what is in them. The file of
the session also keeps, from one session to the next, when each block was last used.

Thread: an I/O thread; a call blocks for as long as the filesystem does.
"""

from __future__ import annotations

import errno
import logging
import os
import stat as stat_module
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.ops import FileOps, NotRegularFileError, disk_bytes, write_all
from kvoffload_async.tiers.slab.layout import (
    BAD_JOURNAL,
    JOURNAL,
    LOCK,
    MANIFEST,
    NEXT_JOURNAL,
    SESSION,
    TEMP_SUFFIX,
    Budget,
    segment_name,
    segment_number,
)
from kvoffload_async.tiers.slab.manifest import HEADER_BYTES, Manifest, SegmentHeader
from kvoffload_async.tiers.slab.places import SlotNumbers, segment_of
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    NEEDS_VERIFY,
    RecordRows,
    Records,
    Scan,
    by_part,
    keys_of,
    live_rows,
    picked,
    scan,
)
from kvoffload_async.types import OffloadKey

Uses = npt.NDArray[np.uint32]

_MAGIC: Final = b"KVSLABO1"
_HEADER = struct.Struct("<8sIIQQ40s")
_CHECK = struct.Struct("<Q")
_HEADER_BYTES: Final = 128
_SEGMENT = struct.Struct("<qq")

_CLOSED: Final = 1
_SYNCED: Final = 2


@dataclass(frozen=True, slots=True)
class Session:
    """What is known of the last process that had the store open.

    Attributes:
        boot_id: Of the kernel that it ran on; empty if that cannot be read.
        sequence: The journal's highest number when this was written.
        is_closed: Whether the process closed the store.
        is_synced: Whether, then, everything was on the device.
        uses: Segment -> the tick of each slot's last use, when the store was last closed.
    """

    boot_id: str = ""
    sequence: int = 0
    is_closed: bool = False
    is_synced: bool = False
    uses: Mapping[int, Uses] = field(default_factory=dict)

    def is_trusted(self, boot_id: str, sequence: int) -> bool:
        """Tell whether what a journal up to this number says of slots is what is in them."""
        if sequence < self.sequence:
            return False  # its end is gone
        if not sequence:
            return True  # it says nothing
        if self.boot_id == boot_id:
            return True
        return self.is_closed and self.is_synced and sequence == self.sequence

    def encode(self, seed: int) -> tuple[bytes, bytes]:
        """Return the header, and what follows it."""
        body = b"".join(
            _SEGMENT.pack(number, len(uses)) + uses.astype("<u4").tobytes()
            for number, uses in self.uses.items()
        )
        flags = _CLOSED * self.is_closed | _SYNCED * self.is_synced
        check = xxhash.xxh3_64_intdigest(body, seed)
        boot = self.boot_id.encode()[:40]
        fields = _HEADER.pack(_MAGIC, flags, len(self.uses), self.sequence, check, boot)
        header = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields, seed))
        return header.ljust(_HEADER_BYTES, b"\0"), body

    @classmethod
    def decode(cls, content: bytes | memoryview, seed: int) -> Self:
        """Return what a file says; one that is damaged is of no boot."""
        if len(content) < _HEADER_BYTES:
            return cls()
        magic, flags, num_segments, sequence, body_check, boot = _HEADER.unpack_from(content)
        (check,) = _CHECK.unpack_from(content, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(content[: _HEADER.size], seed):
            return cls()
        uses = _uses(memoryview(content)[_HEADER_BYTES:], num_segments, body_check, seed)
        return cls(
            boot.rstrip(b"\0").decode(errors="replace"),
            sequence,
            bool(flags & _CLOSED),
            bool(flags & _SYNCED),
            uses,
        )


def write_header(ops: FileOps, fd: int, session: Session, seed: int) -> None:
    """Write a session over the one in a file, whose uses stay; it is on the device then.

    Raises:
        OSError: It is not.
    """
    header, _ = session.encode(seed)
    write_all(ops, fd, header, 0)
    ops.fdatasync(fd)


def write_session(ops: FileOps, fd: int, session: Session, seed: int, *, sync: bool) -> None:
    """Write a session over the one in a file, its header last; raises OSError."""
    header, body = session.encode(seed)
    write_all(ops, fd, body, len(header))
    write_all(ops, fd, header, 0)
    if sync:
        ops.fdatasync(fd)


def _uses(body: memoryview, num_segments: int, check: int, seed: int) -> dict[int, Uses]:
    """Return the ticks in a file; none if they are not those that were written."""
    uses: dict[int, Uses] = {}
    end = 0
    for _ in range(num_segments):
        if end + _SEGMENT.size > len(body):
            return {}
        number, slots = _SEGMENT.unpack_from(body, end)
        start = end + _SEGMENT.size
        end = start + 4 * slots
        if not slots >= 0 or end > len(body):
            return {}
        uses[number] = np.frombuffer(body[start:end], dtype="<u4")
    return uses if xxhash.xxh3_64_intdigest(body[:end], seed) == check else {}


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


def read_session(ops: FileOps, folder: str, seed: int) -> Session:
    """Return what a store says of the process that had it open last."""
    try:
        content = read_file(ops, f"{folder}/{SESSION}")
    except (FileNotFoundError, NotRegularFileError):
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


logger = logging.getLogger(__name__)

_PORTION: Final = 1 << 12
"""Blocks that one step takes in: nobody waits longer than that for the interpreter."""


@dataclass(slots=True)
class Recovered:
    """What a store has.

    Attributes:
        scanned: The journal; suspect blocks are marked in its units.
        rows: The units of the blocks that may be served, the least recently used first.
        gone: The units of those that may not.
        needs_verify: Whether the journal has to be written anew, so that nobody trusts it later.
        budget: With what is kept of a journal that could not be read taken off.
        session: What is known of the last process that had the store open.
    """

    scanned: Scan
    rows: RecordRows
    gone: RecordRows
    needs_verify: bool
    budget: Budget
    session: Session

    def records(self, rows: RecordRows) -> Records:
        """Return some of the units."""
        return picked(self.scanned.units, rows)

    def keys(self) -> Iterator[tuple[RecordRows, list[OffloadKey]]]:
        """Yield which of the blocks that may be served, and their keys: all of them, in portions.

        Keys that are in one part of a `KeyMap` come together.
        """
        order = by_part(self.scanned.units, self.rows)
        for start in range(0, len(order), _PORTION):
            which = order[start : start + _PORTION]
            yield which, keys_of(self.records(self.rows[which]))

    def in_order(self) -> RecordRows:
        """Return the rows, ascending."""
        is_row = np.zeros(len(self.scanned.units), dtype=np.bool_)
        is_row[self.rows] = True
        return np.flatnonzero(is_row)

    def drop_doubles(self) -> None:
        """Keep one record of each key, the one that comes last in the journal.

        Several there are only after damage.
        """
        last: dict[OffloadKey, int] = {}
        in_order = self.in_order()
        for start in range(0, len(in_order), _PORTION):
            part = in_order[start : start + _PORTION]
            last.update(zip(keys_of(self.records(part)), part.tolist(), strict=True))
        is_kept = np.zeros(len(self.scanned.units), dtype=np.bool_)
        is_kept[np.fromiter(last.values(), dtype=np.int64)] = True
        is_last = is_kept[self.rows]
        self.gone = np.concatenate([self.gone, self.rows[~is_last]])
        self.rows = self.rows[is_last]


class Recovery:
    """Reads one store, and brings it below its capacity."""

    def __init__(self, ops: FileOps, folder: str, found: Folder, manifest: Manifest) -> None:
        """Describe it.

        Args:
            ops: The system calls.
            folder: The store's.
            found: What lies there; what is given up is taken out.
            manifest: The store's.
        """
        self._ops = ops
        self._folder = folder
        self._found = found
        self._manifest = manifest

    def run(self, budget: Budget, *, verify: bool, is_keyed: bool) -> Recovered:
        """Find out what may be served; raises OSError.

        Args:
            budget: Segments that are more than it allows are given up.
            verify: Whether every block is verified, so that each needs a checksum.
            is_keyed: Whether that must be made with the integrity key.
        """
        seed = self._manifest.journal_seed
        scanned = read_journal(self._ops, self._folder, seed)
        if is_unreadable(scanned):
            self._keep_bad_journal(scanned)
        if self._found.has_bad_journal:
            kept = disk_bytes(self._ops.stat(f"{self._folder}/{BAD_JOURNAL}"))
            budget = replace(budget, capacity_bytes=budget.capacity_bytes - kept)
        session = read_session(self._ops, self._folder, seed)
        kept = self._refuse_segments(scanned)
        budget = replace(budget, capacity_bytes=budget.capacity_bytes - kept)
        rows = live_in(self._found, scanned, self._manifest)
        note_uses(scanned, rows, session)
        if self._fit(budget, scanned, rows):
            rows = live_in(self._found, scanned, self._manifest)
        is_trusted = session.is_trusted(boot_id(), scanned.sequence)
        suspect = rows[rows < scanned.damage_at] if is_trusted else rows
        scanned.units["flags"][suspect] |= np.uint16(NEEDS_VERIFY)
        servable = _servable(scanned.units["flags"][rows], verify=verify, is_keyed=is_keyed)
        recovered = Recovered(
            scanned,
            by_use(scanned, rows[servable]),
            rows[~servable],
            scanned.is_damaged or not is_trusted,
            budget,
            session,
        )
        self._report(recovered, len(suspect), is_trusted=is_trusted)
        return recovered

    # -- inside ---------------------------------------------------------------------------------

    def _keep_bad_journal(self, scanned: Scan) -> None:
        """Keep a journal of which nothing can be read, for whoever may find out why."""
        path = f"{self._folder}/{JOURNAL}"
        self._cut(path)  # what is allocated behind its end
        self._ops.rename(path, f"{self._folder}/{BAD_JOURNAL}")
        self._found.has_journal, self._found.has_bad_journal = False, True
        slots = sum(map(self._manifest.slots_in, self._found.segments.values()))
        logger.error(
            "%s: nothing of the journal, %d bytes, can be read: it is kept as %s, and the %d slots "
            "of the store are empty",
            self._folder,
            scanned.units.nbytes,
            BAD_JOURNAL,
            slots,
        )

    def _refuse_segments(self, scanned: Scan) -> int:
        """Refuse segments that are not this store's; those that are, under a wrong name, go.

        Returns:
            What those that stay take on disk.
        """
        before = replace(self._found, segments=dict(self._found.segments))
        refuse_strange_segments(self._ops, self._folder, self._found, self._manifest)
        if not self._found.refused:
            return 0
        kept = 0
        everything = len(live_in(before, scanned, self._manifest))
        left = len(live_in(self._found, scanned, self._manifest))
        for number, refusal in self._found.refused.items():
            name = segment_name(number)
            if refusal.is_own:
                self._ops.unlink(f"{self._folder}/{name}")
            else:
                kept += disk_bytes(self._ops.stat(f"{self._folder}/{name}"))
            logger.error(
                "%s: %s is refused: %s; it is %s",
                self._folder,
                name,
                refusal.why,
                "removed" if refusal.is_own else "left alone",
            )
        logger.error(
            "%s: %d of %d blocks are dropped with refused segments",
            self._folder,
            everything - left,
            everything,
        )
        return kept

    def _fit(self, budget: Budget, scanned: Scan, rows: RecordRows) -> bool:
        """Give up slots for which a capacity that has become smaller has no room.

        Of the segments, those whose blocks were used the longest ago, on average, go first; the
        last one is only made shorter.

        Returns:
            Whether that had to be.
        """
        slots = {n: self._manifest.slots_in(size) for n, size in self._found.segments.items()}
        if budget.cost(slots.values()) <= budget.capacity_bytes:
            return False
        rows = by_use(scanned, rows)
        of = segment_of(scanned.units["place"][rows])
        value = {n: float(np.flatnonzero(of == n).mean()) if n in of else -1.0 for n in slots}
        for number in sorted(slots, key=lambda number: (value[number], -number)):
            if budget.cost(slots.values()) <= budget.capacity_bytes:
                break
            most = slots.pop(number)
            left = budget.fitting(slots.values(), most)
            path = f"{self._folder}/{segment_name(number)}"
            if left:
                slots[number] = left
                self._found.segments[number] = self._manifest.offset_of(left)
                self._cut(path, self._found.segments[number])
            else:
                del self._found.segments[number]
                self._ops.unlink(path)
        num_left = len(live_in(self._found, scanned, self._manifest))
        logger.warning(
            "%s: the capacity is smaller than what is there: %d of %d blocks, %d bytes, are "
            "dropped, those of the segments that were used the longest ago first",
            self._folder,
            len(rows) - num_left,
            len(rows),
            (len(rows) - num_left) * self._manifest.block_bytes,
        )
        return True

    def _cut(self, path: str, size_bytes: int | None = None) -> None:
        """Make a file shorter; without a size, free what is allocated behind its end."""
        fd = self._ops.open(path, os.O_RDWR)
        try:
            if size_bytes is None:
                size_bytes = self._ops.fstat(fd).st_size
            self._ops.truncate(fd, size_bytes)
        finally:
            self._ops.close(fd)

    def _report(self, recovered: Recovered, num_unverified: int, *, is_trusted: bool) -> None:
        scanned = recovered.scanned
        if scanned.is_damaged:
            logger.warning(
                "%s: %d bytes of the journal are damaged; blocks stored before are verified (in %d "
                "more places frames are missing)",
                self._folder,
                scanned.lost_bytes,
                scanned.num_gaps,
            )
        if not is_trusted and num_unverified:
            logger.warning(
                "%s: the store was not closed before the machine went down, or its journal has "
                "lost its end: its %d blocks are verified, and %d without a checksum are dropped",
                self._folder,
                num_unverified,
                len(recovered.gone),
            )


def is_unreadable(scanned: Scan) -> bool:
    """Tell whether a journal has something, and nothing of it can be read.

    One whose only frame is torn is none of those: that is what a kill leaves.
    """
    if scanned.end_bytes or not len(scanned.units) or scanned.is_torn:
        return False
    return bool(scanned.units.view(np.uint8).any())


def _servable(
    flags: npt.NDArray[np.uint16], *, verify: bool, is_keyed: bool
) -> npt.NDArray[np.bool_]:
    """Return which blocks may be served: what must be verified needs a checksum, by the key."""
    servable: npt.NDArray[np.bool_] = flags & HAS_DIGEST != 0
    if not verify:
        servable |= flags & NEEDS_VERIFY == 0
    servable &= (flags & KEYED != 0) == is_keyed
    return servable
