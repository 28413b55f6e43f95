"""The on-disk journal, which maps addresses to keys.

Written by the store threads, one append per job, under a lock. Removals are buffered, and written
before the freed slots are overwritten: a writer calls `flush` first.

When half of the log is full, the next journal is begun in a second file (`Compaction`). Every
append then also writes a proportional part of it, so that it is complete before the log is full.
`compact_step` syncs it and renames it over the current journal, without blocking stores.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.ops import FileOps, sync_folder, write_all
from kvoffload_async.tiers.slab.addresses import (
    SlotAddress,
    address_of,
    joined,
    segment_of,
    slot_of,
)
from kvoffload_async.tiers.slab.layout import JOURNAL, NEXT_JOURNAL, journal_units, log_units
from kvoffload_async.tiers.slab.records import (
    CHECKPOINT_FRAME_RECORDS,
    DIGEST_AT,
    KEY_AT,
    NEEDS_VERIFY,
    RECORD,
    RECORD_BYTES,
    PackedRun,
    RecordRows,
    Records,
    Uses,
    addresses_of,
    checkpoint,
    checkpoint_units,
    frame,
    picked,
    removal_records,
)

MAX_USE: Final = (1 << 32) - 1
_HALVED_FROM: Final = 1 << 31
_HEAD_BYTES: Final = 4
_REPLAY_SLOTS: Final = 1 << 14
"""Slots loaded per step; bounds how long a step holds the GIL."""


class _Part:
    """The records of one segment, in columns.

    Attributes:
        heads: First four bytes of each record: kind, key length, flags. 0: no block.
        digests: Checksum of each block, `[slots, DIGEST_BYTES]`.
        keys: Key of each block, zero-padded to the longest one so far.
        uses: Tick of each block's last use.
    """

    __slots__ = ("digests", "heads", "keys", "uses")

    def __init__(self, slots: int) -> None:
        self.heads: npt.NDArray[np.uint32] = np.zeros(slots, dtype=np.uint32)
        self.digests = np.zeros((slots, DIGEST_BYTES), dtype=np.uint8)
        self.keys = np.zeros((slots, 0), dtype=np.uint8)
        self.uses: Uses = np.zeros(slots, dtype=np.uint32)

    def put(self, slots: slice | npt.NDArray[np.int64], records: Records) -> None:
        """Set the records of some slots."""
        self._widen(int(records["key_bytes"].max()))
        columns = records.view(np.uint8).reshape(-1, RECORD_BYTES)
        self.keys[slots] = columns[:, KEY_AT : KEY_AT + self.keys.shape[1]]
        self.digests[slots] = columns[:, DIGEST_AT : DIGEST_AT + DIGEST_BYTES]
        self.heads[slots] = columns[:, :_HEAD_BYTES].copy().view(np.uint32)[:, 0]
        self.uses[slots] = records["use"]

    def _widen(self, key_bytes: int) -> None:
        slots, width = self.keys.shape
        if key_bytes > width:
            wider = np.zeros((slots, key_bytes), dtype=np.uint8)
            wider[:, :width] = self.keys
            self.keys = wider

    def records(self, segment: int, start: int, stop: int | None) -> Records:
        """Return the records of the blocks in a range of slots."""
        heads = self.heads[start:stop].copy()
        slots = np.flatnonzero(heads)
        records: Records = np.zeros(len(slots), dtype=RECORD)
        columns = records.view(np.uint8).reshape(-1, RECORD_BYTES)
        columns[:, :_HEAD_BYTES] = heads[slots].view(np.uint8).reshape(-1, _HEAD_BYTES)
        slots += start
        records["address"] = slots + address_of(segment, 0)
        records["use"] = self.uses[slots]
        columns[:, DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = self.digests[slots]
        columns[:, KEY_AT : KEY_AT + self.keys.shape[1]] = self.keys[slots]
        return records


class RecordTable:
    """Records and last uses of the existing blocks. Thread: any."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self.tick = 1
        """Tick of the next use; approximate with several threads."""
        self.has_unverified = False
        """Whether there may be blocks that need verification."""

    def add_segment(self, segment: int, slots: int) -> None:
        """Add a segment without blocks."""
        self._parts[segment] = _Part(slots)

    def slots(self) -> dict[int, int]:
        """Return the number of slots of each segment."""
        return {segment: len(part.heads) for segment, part in list(self._parts.items())}

    def fill(self, units: Records, rows: RecordRows) -> None:
        """Load the records `rows` of a scanned journal."""
        last_use = 0
        for start in range(0, len(rows), _REPLAY_SLOTS):
            records = picked(units, rows[start : start + _REPLAY_SLOTS])
            segments = segment_of(records["address"])
            for segment in set(segments.tolist()):
                is_mine = segments == segment
                mine = records if is_mine.all() else picked(records, np.flatnonzero(is_mine))
                self._parts[segment].put(slot_of(mine["address"]), mine)
            self.has_unverified = self.has_unverified or bool(
                (records["flags"] & NEEDS_VERIFY).any()
            )
            last_use = max(last_use, int(records["use"].max()))
        self.tick = max(self.tick, min(last_use + 1, MAX_USE))

    def put(self, address: SlotAddress, packed: bytes) -> None:
        """Set the packed records of consecutive slots, the first at `address`."""
        slot, records = slot_of(address), np.frombuffer(packed, dtype=RECORD)
        self._parts[segment_of(address)].put(slice(slot, slot + len(records)), records)
        self.use(address, len(records))

    def remove(self, addresses: Sequence[SlotAddress]) -> bytes:
        """Remove the blocks at these addresses; return their packed removal records."""
        ascending = sorted(addresses)
        for run in joined(ascending, 0, len(ascending)):
            slot = slot_of(run.address)
            self._parts[segment_of(run.address)].heads[slot : slot + run.length] = 0
        return removal_records(ascending)

    def use(self, address: SlotAddress, count: int = 1) -> None:
        """Record a use of a run of blocks at the current tick."""
        slot = slot_of(address)
        self._parts[segment_of(address)].uses[slot : slot + count] = self.tick
        self.tick = min(self.tick + 1, MAX_USE)

    def halve_uses(self) -> None:
        """Halve all ticks if they may overflow; only the lowest bit of the order is lost.

        Call it before rewriting all records: those on disk keep the old ticks.
        """
        if self.tick >= _HALVED_FROM:
            for part in list(self._parts.values()):
                part.uses >>= np.uint32(1)
            self.tick >>= 1

    def uses(self) -> dict[int, Uses]:
        """Return each segment's live array of ticks."""
        return {segment: part.uses for segment, part in list(self._parts.items())}

    def digests(self, address: SlotAddress, count: int) -> bytes:
        """Return the concatenated checksums of a run of blocks."""
        slot = slot_of(address)
        return self._parts[segment_of(address)].digests[slot : slot + count].tobytes()

    def needs_verify(self, address: SlotAddress, count: int) -> bool:
        """Return whether any block of a run needs verification."""
        slot = slot_of(address)
        heads = self._parts[segment_of(address)].heads[slot : slot + count]
        return bool((heads >> np.uint32(16) & np.uint32(NEEDS_VERIFY)).any())

    def records_in(self, segment: int, start: int = 0, stop: int | None = None) -> Records:
        """Return the records of the blocks in a range of slots."""
        return self._parts[segment].records(segment, start, stop)

    def num_live(self) -> int:
        """Return the number of blocks."""
        return sum(int(np.count_nonzero(part.heads)) for part in list(self._parts.values()))


def split_digests(digests: bytes) -> list[bytes]:
    """Split concatenated checksums."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


_COMPACTION_SLOTS: Final = 1 << 13
"""Slots scanned and written per step of a compaction."""

_SYNC_BYTES: Final = 8 << 20
"""Unsynced bytes of the next journal at which its sync becomes due."""


class Compaction:
    """The next journal, while it is being written.

    Attributes:
        fd: Descriptor of its file.
        size_bytes: Bytes written.
        sequence: Sequence number of its last frame.
        synced_bytes: Bytes known to be on the device.
        is_syncing: Whether a thread is syncing it without the journal's lock.
        is_abandoned: Whether it was given up; the syncing thread then closes it.
    """

    def __init__(
        self, ops: FileOps, path: str, table: RecordTable, seed: int, max_units: int
    ) -> None:
        """Create the journal's file and preallocate its space.

        Args:
            ops: System calls.
            path: Path of the file; an existing one is replaced.
            table: The records to write.
            seed: Seed of the frames' checksums.
            max_units: Units to allocate; no more are written.

        Raises:
            OSError: The file cannot be created or allocated.
        """
        self._ops = ops
        self._table = table
        self._seed = seed
        self._max_units = max_units
        self._todo: deque[tuple[int, int, int]] = deque()
        self.num_slots = 0
        """Number of slots to scan."""
        self.num_seen = 0
        self.has_begun = False
        self.sequence = 0
        self.size_bytes = 0
        self.synced_bytes = 0
        self.is_syncing = False
        self.is_abandoned = False
        self.fd = ops.create_anew(path)
        try:
            ops.reserve(self.fd, max_units * RECORD_BYTES)
        except OSError:
            ops.close(self.fd)
            raise

    def grow(self, max_units: int) -> None:
        """Allocate more space, for `max_units` units in total.

        Raises:
            OSError: They cannot be allocated.
        """
        self._ops.reserve(self.fd, max_units * RECORD_BYTES)
        self._max_units = max_units

    def begin(self, sequence: int) -> None:
        """Start copying the current records, in frames with sequence numbers above `sequence`."""
        self.sequence = sequence
        self.has_begun = True
        self._table.halve_uses()
        for segment, slots in self._table.slots().items():
            for start in range(0, slots, _COMPACTION_SLOTS):
                self._todo.append((segment, start, min(slots, start + _COMPACTION_SLOTS)))
            self.num_slots += slots

    @property
    def is_complete(self) -> bool:
        """Whether the next journal contains all records of the current journal."""
        return not self._todo

    @property
    def unsynced_bytes(self) -> int:
        """Number of bytes not known to be on the device."""
        return self.size_bytes - self.synced_bytes

    @property
    def is_due(self) -> bool:
        """Whether the next journal should be synced or put into use."""
        if self.is_syncing or not self.has_begun:
            return False
        return self.is_complete or self.unsynced_bytes >= _SYNC_BYTES

    def fits(self, units: int) -> bool:
        """Return whether an append of `units` units fits, after the records yet to be written."""
        left = checkpoint_units(self.num_slots - self.num_seen)
        return self.size_bytes // RECORD_BYTES + left + units <= self._max_units

    def advance(self, body: bytes, num_seen: int) -> None:
        """Append records, and copy existing ones until `num_seen` slots have been scanned.

        Raises:
            OSError: Writing failed.
        """
        frames = bytearray()
        if body:
            self.sequence += 1
            frames += frame(self.sequence, body, self._seed)
        num_seen = -(-num_seen // CHECKPOINT_FRAME_RECORDS) * CHECKPOINT_FRAME_RECORDS
        while self._todo and self.num_seen < num_seen:
            segment, start, stop = self._todo.popleft()
            middle = min(stop, start + num_seen - self.num_seen)
            if middle < stop:
                self._todo.appendleft((segment, middle, stop))
            self.num_seen += middle - start
            records = self._table.records_in(segment, start, middle)
            for framed in checkpoint(self.sequence + 1, records, self._seed):
                frames += framed
                self.sequence += 1
            if len(frames) >= _COMPACTION_SLOTS * RECORD_BYTES:
                self._write(frames)
                frames = bytearray()
        if frames:
            self._write(frames)

    def _write(self, frames: bytearray) -> None:
        self.size_bytes += write_all(self._ops, self.fd, frames, self.size_bytes)

    def sync(self) -> None:
        """Sync the bytes written so far. Thread: any.

        Raises:
            OSError: Syncing failed.
        """
        size_bytes = self.size_bytes
        self._ops.fdatasync(self.fd)
        self.synced_bytes = size_bytes


logger = logging.getLogger(__name__)

_LEAST_SHARE = 32
"""A journal is compacted at opening if its space left is less than a checkpoint divided by this."""

_POLL_S = 0.02
"""Seconds between checks whether an append that waits for space is still awaited."""


class Journal:
    """The open journal of one store. Thread: any; `note_removed` never blocks."""

    def __init__(
        self,
        ops: FileOps,
        folder: str,
        directory_identity: DirectoryIdentity,
        table: RecordTable,
        seed: int,
        *,
        fdatasync: bool,
    ) -> None:
        """Configure the journal; call `open` next.

        Args:
            ops: System calls.
            folder: Path of the store.
            directory_identity: Identity of that folder; writes fail once it was replaced.
            table: The records of existing blocks; updated here.
            seed: Seed of the frames' checksums.
            fdatasync: Sync after every append.
        """
        self._ops = ops
        self._path = f"{folder}/{JOURNAL}"
        self._next_path = f"{folder}/{NEXT_JOURNAL}"
        self._directory_identity = directory_identity
        self._table = table
        self._seed = seed
        self._fdatasync = fdatasync
        self._mutex = threading.Condition()
        self._removed: deque[bytes] = deque()
        self._fd: int | None = None
        self._end_units = 0
        self._max_units = self._window_units = 0
        """Maximum number of units, and how many are left when compaction begins."""
        self._begin_units = 0
        """Number of units at which compaction begins."""
        self._next: Compaction | None = None
        self._next_from_units = 0  # size in units when the compaction began
        self._is_folder_synced = False
        self._skipped = 0  # failed appends since the last successful one
        self.sequence = 0
        """The highest sequence number used so far."""

    def open(self, end_bytes: int, sequence: int, *, compact_now: bool) -> bool:
        """Open the journal for appending, and cut off a torn tail.

        Args:
            end_bytes: End of the valid frames.
            sequence: Highest sequence number in them.
            compact_now: Compact now, to persist the verification marks.

        Returns:
            Whether the marks, if any, are on disk.

        Raises:
            OSError: The file cannot be opened or truncated.
        """
        self.sequence = sequence
        self._fd = self._ops.open_own(self._path, os.O_RDWR)
        self._end_units = end_bytes // RECORD_BYTES
        if self._ops.fstat(self._fd).st_size != end_bytes:
            self._ops.truncate(self._fd, end_bytes)
        self._limit(sum(self._table.slots().values()))
        left_units = self._max_units - self._end_units
        is_full = left_units < checkpoint_units(self._table.num_live()) // _LEAST_SHARE
        with self._mutex:
            try:
                self._ops.reserve(self._fd, self._max_units * RECORD_BYTES)
                self._prepare()
                if compact_now or is_full:
                    self._rewrite()
            except OSError as error:
                logger.warning("journal compaction failed: %s", str(error))
                return not compact_now
        return True

    def reserve(self, slots: int) -> None:
        """Allocate the journal space for a store with `slots` slots.

        Raises:
            OSError: It cannot be allocated.
        """
        units = journal_units(slots)
        with self._mutex:
            if units <= self._max_units:
                return
            self._check()
            self._ops.reserve(self._opened(), units * RECORD_BYTES)
            if self._next is not None:
                self._next.grow(units)
            self._limit(slots)

    def note_new_file(self) -> None:
        """Record that the folder has a new file, to be synced before appends that refer to it."""
        self._is_folder_synced = False

    def note_removed(self, addresses: Sequence[SlotAddress]) -> None:
        """Remove blocks from the table; the next `commit` or `flush` writes their removals."""
        # Update the table first: a concurrent compaction must not write these blocks.
        if addresses:
            self._removed.append(self._table.remove(addresses))

    def note_gone(self, records: Records) -> None:
        """Buffer removals of blocks that are not in the table, given by their records."""
        if len(records):
            self._removed.append(removal_records(addresses_of(records)))

    def flush(self, is_awaited: Callable[[], bool]) -> None:
        """Write the buffered removals; see `commit`."""
        if self._removed:
            self.commit((), is_awaited)

    def commit(self, puts: Sequence[PackedRun], is_awaited: Callable[[], bool]) -> None:
        """Write the buffered removals and these puts in one append.

        If there is no space until the next journal is synced, wait as long as a job awaits this
        call: so the job's deadline bounds the wait.

        Raises:
            OSError: Nothing was written; the removals stay buffered.
        """
        with self._mutex:
            while True:
                noted = len(self._removed)
                removed = itertools.islice(self._removed, noted)
                body = b"".join([*removed, *[packed for _, packed in puts]])
                if not body:
                    return
                has_room = self._end_units + len(body) // RECORD_BYTES < self._max_units
                if has_room or self._next is None or not self._next.is_syncing:
                    break
                if not is_awaited():
                    raise OSError(errno.ETIMEDOUT, "syncing the next journal timed out")
                self._mutex.wait(_POLL_S)
            try:
                if has_room:
                    self._append(body)
                    self._put(puts)
                    self._advance(body)
                else:
                    self._put(puts)
                    self._rewrite(body)
            except OSError:
                self._orphan(puts)
                raise
            for _ in range(noted):
                self._removed.popleft()

    @property
    def has_removals(self) -> bool:
        """Whether there are buffered removals."""
        return bool(self._removed)

    @property
    def needs_compaction(self) -> bool:
        """Whether `compact_step` has work; approximate during concurrent appends."""
        return self._next is not None and self._next.is_due

    def compact_step(self) -> None:
        """Sync the next journal, and put it into use if complete; call it when no job waits."""
        with self._mutex:
            following = self._next
            if following is None or not following.is_due:
                return
            following.is_syncing = True
        failure: OSError | None = None
        replaced: int | None = None
        try:
            following.sync()
        except OSError as error:
            failure = error
        with self._mutex:
            following.is_syncing = False
            self._mutex.notify_all()
            if following.is_abandoned:
                self._close_unused(following.fd)
            elif failure is not None:
                self._abandon(failure)
            elif following.is_complete:
                replaced = self._try_to_switch(following)
        if replaced is not None:
            self._close_unused(replaced)  # outside the lock, because it is slow
            with self._mutex:
                try:
                    self._prepare()  # only now: the capacity has room for two journals
                except OSError as error:
                    self._abandon(error)

    def sync(self) -> None:
        """Sync all appends to the device.

        Raises:
            OSError: Syncing failed.
        """
        self._ops.fdatasync(self._opened())

    def close(self) -> None:
        """Close the files; idempotent. Unwritten removals are undone at the next opening."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        following = self._next
        self._drop_next()
        self._ops.close(fd)
        if following is not None:
            with contextlib.suppress(OSError):
                self._directory_identity.check()  # it could be another store's
                self._ops.unlink(self._next_path)

    # -- internal, under the lock ---------------------------------------------------------------

    def _put(self, puts: Sequence[PackedRun]) -> None:
        for address, packed in puts:
            self._table.put(address, packed)

    def _orphan(self, puts: Sequence[PackedRun]) -> None:
        """Remove the blocks of a failed append from the table; write their removals later."""
        for first, packed in puts:
            count = len(packed) // RECORD_BYTES
            self._removed.append(self._table.remove(range(first, first + count)))

    def _append(self, body: bytes) -> None:
        fd = self._opened()
        self._check()
        framed = frame(self.sequence + 1, body, self._seed, self._skipped)
        end_bytes = self._end_units * RECORD_BYTES
        self.sequence += 1
        try:
            self._sync_names()
            write_all(self._ops, fd, framed, end_bytes)
            if self._fdatasync:
                self._ops.fdatasync(fd)
        except OSError:
            # A complete frame left on disk must not become valid: overwrite its header now; the
            # next append uses a higher number.
            self._skipped += 1
            with contextlib.suppress(OSError):
                self._ops.pwrite(fd, memoryview(bytes(RECORD_BYTES)), end_bytes)
            raise
        self._skipped = 0
        self._end_units += len(framed) // RECORD_BYTES

    def _advance(self, body: bytes) -> None:
        """Advance the compaction after an append; its failure does not affect the append."""
        if self._end_units < self._begin_units:
            return
        try:
            following = self._prepare()
            if not following.has_begun:
                following.begin(self.sequence)
                self._next_from_units = self._end_units
                body = b""  # its blocks are already in the table
            room = max(1, self._max_units - self._next_from_units)
            used = self._end_units - self._next_from_units  # complete when half is used
            following.advance(body, -(-2 * used * following.num_slots // room))
        except OSError as error:
            self._abandon(error)

    def _rewrite(self, body: bytes = b"") -> None:
        """Complete the next journal synchronously and put it into use, with a last append."""
        self._check()  # do not replace another store's journal
        if not self._prepare().fits(1 + len(body) // RECORD_BYTES):
            self._drop_next()
        while True:
            following = self._prepare()
            if is_new := not following.has_begun:
                following.begin(self.sequence)
                body = b""
            try:
                following.advance(body, following.num_slots)
                following.sync()
                replaced = self._switch(following)
            except OSError as error:
                self._abandon(error)  # the sync may fail for earlier writes: retry
                if is_new:
                    raise
            else:
                break
        self._close_unused(replaced)
        self._sync_names()
        with contextlib.suppress(OSError):  # retried when needed
            self._prepare()

    def _sync_names(self) -> None:
        """Sync the folder if new files must survive a power failure.

        Raises:
            OSError: Syncing failed.
        """
        if self._fdatasync and not self._is_folder_synced:
            sync_folder(self._ops, self._path.rpartition("/")[0])
            self._is_folder_synced = True

    def _try_to_switch(self, following: Compaction) -> int | None:
        """Put the synced next journal into use; on failure, abandon it.

        Returns:
            The descriptor of the replaced journal, to be closed.
        """
        try:
            self._check()
            if self._fdatasync and following.unsynced_bytes:
                following.sync()  # appends since then were reported as stored
            return self._switch(following)
        except OSError as error:
            self._abandon(error)
            return None

    def _switch(self, following: Compaction) -> int:
        """Put the next journal into use; return the descriptor of the replaced one."""
        self._ops.rename(self._next_path, self._path)
        self._next = None
        replaced, self._fd = self._opened(), following.fd
        self.sequence = following.sequence
        self._skipped = 0
        self._end_units = following.size_bytes // RECORD_BYTES
        self._begin_units = self._max_units - self._window_units
        self._is_folder_synced = False
        return replaced

    def _limit(self, slots: int) -> None:
        self._max_units, self._window_units = journal_units(slots), log_units(slots) // 2
        self._begin_units = self._max_units - self._window_units

    def _prepare(self) -> Compaction:
        """Return the next journal; create and preallocate it if needed.

        Raises:
            OSError: It cannot be created.
        """
        if self._next is None:
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(self._next_path)
            self._next = Compaction(
                self._ops, self._next_path, self._table, self._seed, self._max_units
            )
        return self._next

    def _abandon(self, error: OSError) -> None:
        logger.warning("journal compaction failed: %s", str(error))
        self._drop_next()
        self._begin_units = (self._end_units + self._max_units) // 2

    def _drop_next(self) -> None:
        """Abandon the next journal: after a failed sync its contents are unreliable."""
        following, self._next = self._next, None
        if following is not None and following.is_syncing:
            following.is_abandoned = True
        elif following is not None:
            self._close_unused(following.fd)

    def _close_unused(self, fd: int) -> None:
        """Close a journal file that is not in use, which frees its space; log failures."""
        try:
            self._ops.close(fd)
        except OSError as error:
            logger.warning("closing a journal that is not in use failed: %s", str(error))

    def _check(self) -> None:
        """Check that folder and journal file were not replaced.

        Raises:
            OSError: One of them was replaced or deleted.
        """
        self._directory_identity.check()
        self._directory_identity.check_file(self._opened(), JOURNAL)

    def _opened(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the journal is closed")
        return self._fd
