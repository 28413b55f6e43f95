"""Reading an existing store and deciding which of its blocks can be served.

The session file records whether the store was closed cleanly, the boot id of the kernel, and each
block's last use. A killed process loses no completed write, because the page cache keeps it. A
machine crash may lose any write, so that the journal may not match the slots' contents.

Thread: an I/O thread; calls block as long as the filesystem does.
"""

from __future__ import annotations

import logging
import os
import stat as stat_module
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.ops import (
    FileOps,
    NotRegularFileError,
    disk_bytes,
    read_file,
    write_all,
)
from kvoffload_async.tiers.slab.addresses import SlotNumbers, segment_of
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
from kvoffload_async.tiers.slab.records import (
    HAS_DIGEST,
    KEYED,
    KNOWN_FLAGS,
    NEEDS_VERIFY,
    RecordRows,
    Records,
    Scan,
    Uses,
    by_part,
    keys_of,
    live_rows,
    picked,
    scan,
)
from kvoffload_async.types import OffloadKey

_MAGIC: Final = b"KVSLABO1"
_HEADER = struct.Struct("<8sIIQQ40s")
_CHECK = struct.Struct("<Q")
_HEADER_BYTES: Final = 128
_SEGMENT = struct.Struct("<qq")

_CLOSED: Final = 1
_SYNCED: Final = 2


@dataclass(frozen=True, slots=True)
class Session:
    """State recorded by the last process that had the store open.

    Attributes:
        boot_id: Boot id of its kernel; empty if unreadable.
        sequence: The journal's highest sequence number at the time of writing.
        is_closed: Whether the process closed the store.
        is_synced: Whether everything was then synced to the device.
        uses: Segment -> the tick of each slot's last use, as of the last close.
    """

    boot_id: str = ""
    sequence: int = 0
    is_closed: bool = False
    is_synced: bool = False
    uses: Mapping[int, Uses] = field(default_factory=dict)

    def is_trusted(self, boot_id: str, sequence: int) -> bool:
        """Return whether a journal up to this sequence number matches the slots' contents."""
        if sequence < self.sequence:
            return False  # the journal has lost its end
        if not sequence:
            return True  # the session is empty
        if self.boot_id == boot_id:
            return True
        return self.is_closed and self.is_synced and sequence == self.sequence

    def encode(self, seed: int) -> tuple[bytes, bytes]:
        """Encode the session as the header and the body of its file."""
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
        """Decode a session file; a damaged one gives an empty session, which matches no boot."""
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


def write_session(ops: FileOps, fd: int, session: Session, seed: int, *, sync: bool) -> None:
    """Overwrite a session file, header last; last uses are overwritten only at the close.

    Raises:
        OSError: Writing or syncing failed.
    """
    header, body = session.encode(seed)
    if session.is_closed:
        write_all(ops, fd, body, len(header))
    write_all(ops, fd, header, 0)
    if sync:
        ops.fdatasync(fd)


def _uses(body: memoryview, num_segments: int, check: int, seed: int) -> dict[int, Uses]:
    """Decode the ticks of a session file; empty if they are damaged."""
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


_PORTION: Final = 1 << 12
"""Blocks indexed per step; bounds how long a step holds the GIL."""

_MAX_MANIFEST_BYTES = 1 << 20
_TEMPS = {NEXT_JOURNAL, *(name + TEMP_SUFFIX for name in (MANIFEST, JOURNAL, SESSION))}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a segment file is rejected, and whether it belongs to this store."""

    why: str
    is_own: bool = False


@dataclass(slots=True)
class Folder:
    """Contents of a store's folder.

    Attributes:
        segments: Segment -> its file's size in bytes.
        refused: Segment -> why its file was rejected.
        temps: Names of temporary files left by a killed process.
        unknown_files: Names of files that are not part of a store.
        own_files: Names of the store's other files.
        allocated_bytes: Total disk usage, including the folder.
    """

    segments: dict[int, int] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    temps: list[str] = field(default_factory=list)
    unknown_files: list[str] = field(default_factory=list)
    own_files: set[str] = field(default_factory=set)
    allocated_bytes: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the folder contains no store."""
        return not (self.segments or self.own_files & {MANIFEST, JOURNAL})


def list_folder(ops: FileOps, folder: str) -> Folder:
    """List a store's folder; a missing folder is empty."""
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
        elif name in {MANIFEST, JOURNAL, BAD_JOURNAL, LOCK, SESSION}:
            found.own_files.add(name)
        else:
            found.unknown_files.append(name)
    return found


def read_manifest(ops: FileOps, folder: str, *, for_writing: bool = True) -> Manifest | None:
    """Return the manifest; None if there is none.

    Raises:
        NewerFormatError: It was written by a newer release; see `Manifest.decode`.
        UnreadableManifestError: It is damaged.
        OSError: It cannot be read.
    """
    try:
        content = read_file(ops, f"{folder}/{MANIFEST}", _MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return Manifest.decode(bytes(content), for_writing=for_writing)


def read_journal(ops: FileOps, folder: str, seed: int) -> Scan:
    """Scan a journal whose checksums have this seed; a missing file is an empty journal."""
    return scan(read_if_there(ops, f"{folder}/{JOURNAL}"), seed)


def live_in(found: Folder, scanned: Scan, manifest: Manifest) -> RecordRows:
    """Return the indices of the journal's units whose blocks exist, in journal order."""
    slots = {number: manifest.slots_in(size) for number, size in found.segments.items()}
    return live_rows(scanned, slots)


def note_uses(scanned: Scan, rows: RecordRows, session: Session) -> None:
    """Update the last uses in a journal's units from a session, where the session's are newer.

    The journal has uses up to its last write, a session up to its close.
    """
    slots = SlotNumbers({number: len(uses) for number, uses in session.uses.items()})
    ticks = np.zeros(slots.total, dtype=np.uint32)
    for number, start, stop in slots.ranges():
        ticks[start:stop] = session.uses[number]
    index, exists = slots.of(scanned.units["address"][rows])
    mine = rows[exists]
    known = scanned.units["use"][mine]
    scanned.units["use"][mine] = np.maximum(known, ticks[index[exists]])


def mark_for_verification(scanned: Scan, rows: RecordRows, session: Session) -> bool:
    """Mark units whose blocks need verification; return whether the journal is trusted.

    These are the blocks recorded before damage, and all blocks of an untrusted journal.
    """
    is_trusted = session.is_trusted(boot_id(), scanned.sequence)
    marked = rows[rows < scanned.damage_at] if is_trusted else rows
    scanned.units["flags"][marked] |= np.uint16(NEEDS_VERIFY)
    return is_trusted


def is_last_of_key(scanned: Scan, rows: RecordRows) -> npt.NDArray[np.bool_]:
    """Return for each row whether it is the last record of its key.

    Duplicates exist only after damage.
    """
    last: dict[OffloadKey, int] = {}
    in_order = np.sort(rows)
    for start in range(0, len(rows), _PORTION):
        part = in_order[start : start + _PORTION]
        last.update(zip(keys_of(picked(scanned.units, part)), part.tolist(), strict=True))
    return np.isin(rows, np.fromiter(last.values(), dtype=np.int64))


def by_use(scanned: Scan, rows: RecordRows) -> RecordRows:
    """Sort units of blocks by last use, least recent first."""
    ordered: RecordRows = rows[np.argsort(scanned.units["use"][rows], kind="stable")]
    return ordered


def refuse_strange_segments(ops: FileOps, folder: str, found: Folder, manifest: Manifest) -> None:
    """Move segments whose header does not match their file name to `found.refused`.

    Segments that cannot be read are not moved.
    """
    for number, size in list(found.segments.items()):
        if not manifest.slots_in(size):
            continue  # an empty segment without a header
        try:
            content = bytes(read_file(ops, f"{folder}/{segment_name(number)}", HEADER_BYTES))
        except OSError:
            continue  # reads of its blocks will fail as well
        header = SegmentHeader.decode(content)
        if header is None:
            if not any(content):
                found.segments[number] = 0  # a power failure before the header was written
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
    """Return the session of the last process that had the store open."""
    return Session.decode(read_if_there(ops, f"{folder}/{SESSION}"), seed)


def read_if_there(ops: FileOps, path: str) -> memoryview:
    """Return a file's content; empty if there is no such file."""
    try:
        return read_file(ops, path)
    except (FileNotFoundError, NotRegularFileError):
        return memoryview(bytearray())


def replace_file(ops: FileOps, path: str, parts: Iterable[bytes]) -> None:
    """Replace a file atomically: write and sync a temporary file, then rename it."""
    fd = ops.create_anew(path + TEMP_SUFFIX)
    try:
        offset = 0
        for part in parts:
            offset += write_all(ops, fd, part, offset)
        ops.fdatasync(fd)
    finally:
        ops.close(fd)
    ops.rename(path + TEMP_SUFFIX, path)


logger = logging.getLogger(__name__)


class Recovery:
    """Decides which blocks of one store may be served, after shrinking the store to its capacity.

    Attributes:
        scanned: The journal, with blocks that need verification marked.
        rows: Units of the blocks that may be served, least recently used first.
        gone: Units of the blocks that must not be served.
        needs_verify: Whether the journal must be rewritten to persist the verification marks.
        budget: The budget, reduced by the space of kept unusable files.
        session: The last process's session, if recorded.
    """

    def __init__(
        self,
        ops: FileOps,
        folder: str,
        found: Folder,
        manifest: Manifest,
        budget: Budget,
        *,
        verify: bool,
        is_keyed: bool,
    ) -> None:
        """Read and shrink the store.

        Args:
            ops: System calls.
            folder: Path of the store.
            found: Contents of the folder; updated when files are removed.
            manifest: The store's manifest.
            budget: Limits on the size; segments beyond it are removed.
            verify: Whether every block is verified, and so needs a checksum.
            is_keyed: Whether checksums must be made with the integrity key.

        Raises:
            OSError: The store cannot be read or changed.
        """
        self._ops = ops
        self._folder = folder
        self._found = found
        self._manifest = manifest
        scanned = self.scanned = read_journal(ops, folder, manifest.journal_seed)
        if is_unreadable(scanned):
            self._keep_bad_journal()
        self.session = read_session(ops, folder, manifest.journal_seed)
        kept_bytes = self._refuse_segments()
        if BAD_JOURNAL in found.own_files:
            kept_bytes += disk_bytes(ops.stat(f"{folder}/{BAD_JOURNAL}"))
        self.budget = replace(budget, capacity_bytes=budget.capacity_bytes - kept_bytes)
        rows = live_in(found, scanned, manifest)
        note_uses(scanned, rows, self.session)
        if self._fit(rows):
            rows = live_in(found, scanned, manifest)
        is_trusted = mark_for_verification(scanned, rows, self.session)
        servable = _servable(scanned.units["flags"][rows], verify=verify, is_keyed=is_keyed)
        self.rows = by_use(scanned, rows[servable])
        self.gone = rows[~servable]
        self.needs_verify = scanned.is_damaged or not is_trusted
        self._report(len(rows), is_trusted=is_trusted)

    def records(self, rows: RecordRows) -> Records:
        """Return a copy of the journal's units at `rows`."""
        return picked(self.scanned.units, rows)

    def keys(self) -> Iterator[tuple[RecordRows, list[OffloadKey]]]:
        """Yield the servable blocks in batches: indices into `rows`, and the keys.

        Keys of the same part of a `KeyMap` are adjacent.
        """
        order = by_part(self.scanned.units, self.rows)
        for start in range(0, len(order), _PORTION):
            which = order[start : start + _PORTION]
            yield which, keys_of(self.records(self.rows[which]))

    def in_order(self) -> RecordRows:
        """Return the rows of servable blocks in ascending order."""
        is_row = np.zeros(len(self.scanned.units), dtype=np.bool_)
        is_row[self.rows] = True
        return np.flatnonzero(is_row)

    def drop_doubles(self) -> None:
        """Keep only the last record of each key."""
        is_last = is_last_of_key(self.scanned, self.rows)
        self.gone = np.concatenate([self.gone, self.rows[~is_last]])
        self.rows = self.rows[is_last]

    # -- internal -------------------------------------------------------------------------------

    def _keep_bad_journal(self) -> None:
        """Rename an unreadable journal, to keep it for diagnosis."""
        path = f"{self._folder}/{JOURNAL}"
        self._cut(path)  # frees the preallocated space
        self._ops.rename(path, f"{self._folder}/{BAD_JOURNAL}")
        self._found.own_files.add(BAD_JOURNAL)
        slots = sum(map(self._manifest.slots_in, self._found.segments.values()))
        logger.error(
            "%s: the journal (%d bytes) is unreadable: it is kept as %s, and the %d slots "
            "of the store are empty",
            self._folder,
            self.scanned.units.nbytes,
            BAD_JOURNAL,
            slots,
        )

    def _refuse_segments(self) -> int:
        """Reject segments of other stores; delete misnamed segments of this store.

        Returns:
            Disk usage of the rejected files that are kept, in bytes.
        """
        before = replace(self._found, segments=dict(self._found.segments))
        refuse_strange_segments(self._ops, self._folder, self._found, self._manifest)
        if not self._found.refused:
            return 0
        kept = 0
        for number, refusal in self._found.refused.items():
            name = segment_name(number)
            if refusal.is_own:
                self._ops.unlink(f"{self._folder}/{name}")
            else:
                kept += disk_bytes(self._ops.stat(f"{self._folder}/{name}"))
            logger.error(
                "%s: %s is not used: %s; it is %s",
                self._folder,
                name,
                refusal.why,
                "removed" if refusal.is_own else "kept",
            )
        everything = len(live_in(before, self.scanned, self._manifest))
        logger.error(
            "%s: %d of %d blocks are dropped with unusable segments",
            self._folder,
            everything - len(live_in(self._found, self.scanned, self._manifest)),
            everything,
        )
        return kept

    def _fit(self, rows: RecordRows) -> bool:
        """Remove slots to fit a reduced capacity.

        Segments with the oldest average last use are removed first; the last one is truncated
        instead.

        Returns:
            Whether slots had to be removed.
        """
        budget, scanned = self.budget, self.scanned
        slots = {n: self._manifest.slots_in(size) for n, size in self._found.segments.items()}
        if budget.cost(slots.values()) <= budget.capacity_bytes:
            return False
        rows = by_use(scanned, rows)
        of = segment_of(scanned.units["address"][rows])
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
            "%s: the capacity is smaller than the store: %d of %d blocks, %d bytes, are "
            "dropped, from the least recently used segments",
            self._folder,
            len(rows) - num_left,
            len(rows),
            (len(rows) - num_left) * self._manifest.block_bytes,
        )
        return True

    def _cut(self, path: str, size_bytes: int | None = None) -> None:
        """Truncate a file; without a size, free the space preallocated behind its end."""
        fd = self._ops.open(path, os.O_RDWR)
        try:
            if size_bytes is None:
                size_bytes = self._ops.fstat(fd).st_size
            self._ops.truncate(fd, size_bytes)
        finally:
            self._ops.close(fd)

    def _report(self, num_blocks: int, *, is_trusted: bool) -> None:
        scanned = self.scanned
        if scanned.is_damaged:
            logger.warning(
                "%s: %d bytes of the journal are damaged, and frames are missing in %d more "
                "places; blocks stored before are verified",
                self._folder,
                scanned.lost_bytes,
                scanned.num_gaps,
            )
        if not is_trusted and num_blocks:
            logger.warning(
                "%s: the store was not closed before a machine crash, or its journal has "
                "lost its end: its %d blocks are verified, and %d without a checksum are dropped",
                self._folder,
                num_blocks,
                len(self.gone),
            )


def is_unreadable(scanned: Scan) -> bool:
    """Return whether a journal has data but no readable frame.

    A journal whose only frame is torn does not count, because a kill can leave it.
    """
    if scanned.end_bytes or not len(scanned.units) or scanned.is_torn:
        return False
    return bool(scanned.units.view(np.uint8).any())


def _servable(
    flags: npt.NDArray[np.uint16], *, verify: bool, is_keyed: bool
) -> npt.NDArray[np.bool_]:
    """Return which blocks may be served: those that need verification must have a checksum.

    Blocks whose checksum another key or a newer release made are not served, even unverified.
    """
    servable: npt.NDArray[np.bool_] = flags & HAS_DIGEST != 0
    if not verify:
        servable |= flags & NEEDS_VERIFY == 0
    servable &= (flags & KEYED != 0) == is_keyed
    servable &= flags & ~np.uint16(KNOWN_FLAGS) == 0
    return servable
