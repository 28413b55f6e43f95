"""The journal: which block lies where, on disk.

Written by the threads that store, one append a job, under a lock. Removals are noted, and written
before the slots that they free are written to again: whoever is about to do that calls `flush`.

When half of the log is full, the next journal is begun beside it (`Compaction`). Every append then
writes a part of that as well, in proportion to itself: so much that it is complete before the log
is full. `compact_step`, which no store waits for, syncs it and renames it over the other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.ops import FileOps, sync_folder, write_all
from kvoffload_async.tiers.slab.layout import JOURNAL, NEXT_JOURNAL, journal_units, log_units
from kvoffload_async.tiers.slab.places import SlotAddress, joined, place_of, segment_of, slot_of
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
    checkpoint,
    checkpoint_units,
    frame,
    picked,
    places_of,
    removal_records,
)

MAX_USE: Final = (1 << 32) - 1
_HALVED_FROM: Final = 1 << 31
_HEAD_BYTES: Final = 4
_REPLAY_SLOTS: Final = 1 << 14
"""Slots that one step takes in: nobody waits longer than that for the interpreter."""

Uses = npt.NDArray[np.uint32]
"""The tick of each slot's last use, shape `[slots]`."""


class _Part:
    """The records of one segment.

    Attributes:
        heads: The first four bytes of each record: kind, bytes of the key, flags. 0: no block.
        digests: The checksum of each.
        keys: The key of each, zeros behind it; as wide as the longest one so far.
        uses: The tick of each one's last use.
    """

    __slots__ = ("_digest_bytes", "digests", "heads", "keys", "uses")

    def __init__(self, slots: int) -> None:
        self.heads: npt.NDArray[np.uint32] = np.zeros(slots, dtype=np.uint32)
        self.digests = np.zeros((slots, DIGEST_BYTES), dtype=np.uint8)
        self.keys = np.zeros((slots, 0), dtype=np.uint8)
        self.uses: Uses = np.zeros(slots, dtype=np.uint32)
        self._digest_bytes = self.digests.reshape(-1).data

    def put(self, slot: int, packed: bytes) -> None:
        columns = np.frombuffer(packed, dtype=np.uint8).reshape(-1, RECORD_BYTES)
        self._widen(max(packed[1::RECORD_BYTES]))
        self._take(slice(slot, slot + len(columns)), columns)

    def fill(self, slots: npt.NDArray[np.int64], records: Records) -> None:
        self._widen(int(records["key_bytes"].max()))
        self._take(slots, records.view(np.uint8).reshape(-1, RECORD_BYTES))
        self.uses[slots] = records["use"]

    def _take(self, slots: slice | npt.NDArray[np.int64], columns: npt.NDArray[np.uint8]) -> None:
        self.keys[slots] = columns[:, KEY_AT : KEY_AT + self.keys.shape[1]]
        self.digests[slots] = columns[:, DIGEST_AT : DIGEST_AT + DIGEST_BYTES]
        self.heads[slots] = columns[:, :_HEAD_BYTES].copy().view(np.uint32)[:, 0]

    def _widen(self, key_bytes: int) -> None:
        slots, width = self.keys.shape
        if key_bytes > width:
            wider = np.zeros((slots, key_bytes), dtype=np.uint8)
            wider[:, :width] = self.keys
            self.keys = wider

    def stored_digests(self, slot: int, count: int) -> bytes:
        return bytes(self._digest_bytes[slot * DIGEST_BYTES : (slot + count) * DIGEST_BYTES])

    def records(self, segment: int, start: int, stop: int) -> Records:
        """Return the records of the blocks in a range of slots."""
        heads = self.heads[start:stop].copy()
        slots = np.flatnonzero(heads)
        records: Records = np.zeros(len(slots), dtype=RECORD)
        columns = records.view(np.uint8).reshape(-1, RECORD_BYTES)
        columns[:, :_HEAD_BYTES] = heads[slots].view(np.uint8).reshape(-1, _HEAD_BYTES)
        slots += start
        records["place"] = slots + place_of(segment, 0)
        records["use"] = self.uses[slots]
        columns[:, DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = self.digests[slots]
        columns[:, KEY_AT : KEY_AT + self.keys.shape[1]] = self.keys[slots]
        return records


class RecordTable:
    """The records of the blocks that are there, and when each was last used. Thread: any."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self.tick = 1
        """Of the next use; about, with several threads."""
        self.has_unverified = False
        """Whether there may be blocks that must be verified in any case."""

    def add_segment(self, segment: int, slots: int) -> None:
        """Add a segment, without blocks."""
        self._parts[segment] = _Part(slots)

    def drop_segment(self, segment: int) -> None:
        """Forget a segment and its blocks."""
        del self._parts[segment]

    def slots(self) -> dict[int, int]:
        """Return how many slots each segment has."""
        return {segment: len(part.heads) for segment, part in list(self._parts.items())}

    def fill(self, units: Records, rows: RecordRows) -> None:
        """Take in those of a journal's records that are of blocks."""
        last_use = 0
        for start in range(0, len(rows), _REPLAY_SLOTS):
            records = picked(units, rows[start : start + _REPLAY_SLOTS])
            segments = segment_of(records["place"])
            for segment in _distinct(segments):
                is_mine = segments == segment
                mine = records if is_mine.all() else picked(records, np.flatnonzero(is_mine))
                self._parts[segment].fill(slot_of(mine["place"]), mine)
            self.has_unverified = self.has_unverified or bool(
                (records["flags"] & NEEDS_VERIFY).any()
            )
            last_use = max(last_use, int(records["use"].max()))
        self.tick = max(self.tick, min(last_use + 1, MAX_USE))

    def put(self, place: SlotAddress, packed: bytes) -> None:
        """Write the packed records of a run that begins at a place."""
        self._parts[segment_of(place)].put(slot_of(place), packed)
        self.use(place, len(packed) // RECORD_BYTES)

    def remove(self, places: Sequence[SlotAddress]) -> bytes:
        """Note that places have no block; return the records that say so."""
        ascending = sorted(places)
        for run in joined(ascending, 0, len(ascending)):
            slot = slot_of(run.place)
            self._parts[segment_of(run.place)].heads[slot : slot + run.length] = 0
        return removal_records(ascending)

    def use(self, place: SlotAddress, count: int = 1) -> None:
        """Note that a run was used now."""
        slot = slot_of(place)
        self._parts[segment_of(place)].uses[slot : slot + count] = self.tick
        self.tick = min(self.tick + 1, MAX_USE)

    def halve_uses(self) -> None:
        """Make room for more ticks, if there soon is none; the order is kept, but for the last bit.

        To be called before all records are written: those on disk still have the old ticks.
        """
        if self.tick >= _HALVED_FROM:
            for part in list(self._parts.values()):
                part.uses >>= np.uint32(1)
            self.tick >>= 1

    def uses(self) -> dict[int, Uses]:
        """Return the ticks of each segment's slots, as they are and go on changing."""
        return {segment: part.uses for segment, part in list(self._parts.items())}

    def digests(self, place: SlotAddress, count: int) -> bytes:
        """Return the checksums of a run, one behind the other."""
        return self._parts[segment_of(place)].stored_digests(slot_of(place), count)

    def needs_verify(self, place: SlotAddress, count: int) -> bool:
        """Tell whether one of a run must be verified in any case."""
        slot = slot_of(place)
        heads = self._parts[segment_of(place)].heads[slot : slot + count]
        return bool((heads >> np.uint32(16) & np.uint32(NEEDS_VERIFY)).any())

    def records_in(self, segment: int) -> Records:
        """Return the records of the blocks in a segment."""
        part = self._parts[segment]
        return part.records(segment, 0, len(part.heads))

    def records_between(self, segment: int, start: int, stop: int) -> Records:
        """Return the records of the blocks in some slots; none if the segment is gone."""
        part = self._parts.get(segment)
        return np.zeros(0, dtype=RECORD) if part is None else part.records(segment, start, stop)

    def num_live(self) -> int:
        """Return how many blocks there are."""
        return sum(int(np.count_nonzero(part.heads)) for part in list(self._parts.values()))

    def live(self) -> Records:
        """Return all records, the least recently used first. For inspection."""
        found = [np.zeros(0, dtype=RECORD), *(self.records_in(segment) for segment in self._parts)]
        records: Records = np.concatenate(found)
        return records[np.argsort(records["use"], kind="stable")]


def split_digests(digests: bytes) -> list[bytes]:
    """Return the single checksums of several, one behind the other."""
    starts: Iterable[int] = range(0, len(digests), DIGEST_BYTES)
    return [digests[start : start + DIGEST_BYTES] for start in starts]


def _distinct(numbers: npt.NDArray[np.integer]) -> list[int]:
    """Return each number once; `np.unique` imports a module when it is first called."""
    ascending = np.sort(numbers)
    is_first = np.concatenate([ascending[:1] == ascending[:1], ascending[1:] != ascending[:-1]])
    distinct: list[int] = ascending[is_first].tolist()
    return distinct


_COMPACTION_SLOTS: Final = 1 << 13
"""How many slots are looked at, and their records written, at a time."""

_SYNC_BYTES: Final = 8 << 20
"""How much of it may wait for the device before somebody waits for it."""


class Compaction:
    """A journal that is not in use yet.

    Attributes:
        fd: Its file, open.
        size_bytes: How long it is.
        sequence: The number of its last frame.
        synced_bytes: How much of it is on the device.
        is_syncing: Whether a thread waits for the device without the journal's lock.
        is_abandoned: Whether it will never be in use; who is syncing closes it then.
    """

    def __init__(
        self, ops: FileOps, path: str, table: RecordTable, seed: int, max_units: int
    ) -> None:
        """Make the file, all of its space allocated; raises OSError.

        Args:
            ops: The system calls.
            path: Of the file; what is there is replaced.
            table: What is to be written.
            seed: Of the frames.
            max_units: Allocated; no more is written.
        """
        self._ops = ops
        self._table = table
        self._seed = seed
        self._max_units = max_units
        self._todo: deque[tuple[int, int, int]] = deque()
        self.num_slots = 0
        """How many there were to look at."""
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
        """Allocate more; raises OSError."""
        self._ops.reserve(self.fd, max_units * RECORD_BYTES)
        self._max_units = max_units

    def begin(self, sequence: int) -> None:
        """Begin with the blocks that are there now, with numbers higher than this one."""
        self.sequence = sequence
        self.has_begun = True
        self._table.halve_uses()
        for segment, slots in self._table.slots().items():
            for start in range(0, slots, _COMPACTION_SLOTS):
                self._todo.append((segment, start, min(slots, start + _COMPACTION_SLOTS)))
            self.num_slots += slots

    @property
    def is_complete(self) -> bool:
        """Whether everything is in it that is in the journal in use."""
        return not self._todo

    @property
    def unsynced_bytes(self) -> int:
        """How much is not on the device."""
        return self.size_bytes - self.synced_bytes

    @property
    def is_due(self) -> bool:
        """Whether it is time to wait for the device, or to put it in use."""
        if self.is_syncing or not self.has_begun:
            return False
        return self.is_complete or self.unsynced_bytes >= _SYNC_BYTES

    def fits(self, units: int) -> bool:
        """Tell whether an append of so many units fits, beside all that is still to be written."""
        left = checkpoint_units(self.num_slots - self.num_seen)
        return self.size_bytes // RECORD_BYTES + left + units <= self._max_units

    def advance(self, body: bytes, num_seen: int) -> None:
        """Append records, and go on until so many slots have been looked at; raises OSError."""
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
            frames += self._framed(self._table.records_between(segment, start, middle))
            if len(frames) >= _COMPACTION_SLOTS * RECORD_BYTES:
                self._write(frames)
                frames = bytearray()
        if frames:
            self._write(frames)

    def _framed(self, records: Records) -> bytes:
        frames = list(checkpoint(self.sequence + 1, records, self._seed))
        self.sequence += len(frames)
        return b"".join(frames)

    def _write(self, frames: bytearray) -> None:
        self.size_bytes += write_all(self._ops, self.fd, frames, self.size_bytes)

    def sync(self) -> None:
        """Wait until what is written now is on the device. Thread: any; raises OSError."""
        size_bytes = self.size_bytes
        self._ops.fdatasync(self.fd)
        self.synced_bytes = size_bytes


logger = logging.getLogger(__name__)

_LEAST_SHARE = 32
"""A journal is written anew at the opening where less room than this part of it is left."""

_POLL_S = 0.02
"""How often an append without room looks whether anybody still waits for it."""


class Journal:
    """The open journal of one store. Thread: any; `note_removed` never waits."""

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
        """Describe it; `open` comes first.

        Args:
            ops: The system calls.
            folder: The store's.
            directory_identity: Of that folder; nothing is written once it is another.
            table: What it says; kept up to date here.
            seed: Binds it to the store.
            fdatasync: Wait for the device at the end of every append.
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
        """How long it may become, and how much of that is left when the next one is begun."""
        self._begin_units = 0
        """How long it may become before the next one is begun."""
        self._next: Compaction | None = None
        self._next_from_units = 0  # how long this one was when that was begun
        self._replaced: list[int] = []
        """Files that are not in use any more; closing them frees their space, which takes time."""
        self._is_folder_synced = False
        self._skipped = 0  # appends that have failed since the last one that did not
        self.sequence = 0
        """The highest number that a frame has or had."""

    def open(self, end_bytes: int, sequence: int, *, anew: bool) -> bool:
        """Open the file behind what was found in it; what is torn there is cut off.

        Args:
            end_bytes: Where the good part ends.
            sequence: The highest number in it.
            anew: Write everything anew, so that nobody sees the damage in it any more.

        Returns:
            Whether nothing of the damage is left, if there was any.

        Raises:
            OSError: The file cannot be had, or not be cut.
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
                if anew or is_full:
                    self._rewrite()
            except OSError as error:
                logger.warning("the journal cannot be written anew yet: %s", str(error))
                return not anew
        return True

    def reserve(self, slots: int) -> None:
        """Allocate what a store with so many slots needs; raises OSError."""
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
        """Note that the folder has a new file, of which later appends speak."""
        self._is_folder_synced = False

    def note_removed(self, places: Sequence[SlotAddress]) -> None:
        """Note that blocks are gone; they are so on disk after the next `commit` or `flush`."""
        # Taken out of the table first: who writes it anew must not find there what is noted.
        if places:
            self._removed.append(self._table.remove(places))

    def note_gone(self, records: Records) -> None:
        """Note the same of blocks that are not in the table, given their records."""
        if len(records):
            self._removed.append(removal_records(places_of(records)))

    def flush(self, is_awaited: Callable[[], bool]) -> None:
        """Write the removals noted so far; see `commit`."""
        if self._removed:
            self.commit((), is_awaited)

    def commit(self, puts: Sequence[PackedRun], is_awaited: Callable[[], bool]) -> None:
        """Write the removals noted so far and these puts, in one append.

        Where there is no room before the next journal is on the device, it waits for that as long
        as a job still waits for this: so the job's deadline is that of the wait as well.

        Raises:
            OSError: Nothing was written; the removals are still noted.
        """
        with self._mutex:
            while True:
                noted = len(self._removed)
                removed = itertools.islice(self._removed, noted)
                body = b"".join([*removed, *(packed for _, packed in puts)])
                if not body:
                    return
                has_room = self._end_units + len(body) // RECORD_BYTES < self._max_units
                if has_room or self._next is None or not self._next.is_syncing:
                    break
                if not is_awaited():
                    raise OSError(errno.ETIMEDOUT, "the next journal does not reach the device")
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
        """Whether removals are noted that are not written yet."""
        return bool(self._removed)

    @property
    def needs_compaction(self) -> bool:
        """Whether `compact_step` has work; approximate while another thread appends."""
        return self._next is not None and self._next.is_due

    def compact_step(self) -> None:
        """Put the next journal in use once it is on the device: to be called when nobody waits."""
        with self._mutex:
            following = self._next
            if following is None or not following.is_due:
                return
            following.is_syncing = True
        failure: OSError | None = None
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
                self._try_to_switch()
            replaced, self._replaced = self._replaced, []
        for fd in replaced:
            self._close_unused(fd)

    def sync(self) -> None:
        """Wait until all that was appended is on the device; raises OSError."""
        self._ops.fdatasync(self._opened())

    def close(self) -> None:
        """Close the files; idempotent. What is noted and not written comes back at the opening."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        following = self._next
        self._drop_next()
        self._close_replaced()
        self._ops.close(fd)
        if following is not None:
            with contextlib.suppress(OSError):
                self._directory_identity.check()  # else it would be another store's
                self._ops.unlink(self._next_path)

    # -- inside, under the lock -----------------------------------------------------------------

    def _put(self, puts: Sequence[PackedRun]) -> None:
        for place, packed in puts:
            self._table.put(place, packed)

    def _orphan(self, puts: Sequence[PackedRun]) -> None:
        """Take back puts that may or may not be on disk; their removals are written as any are."""
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
            # What is left of the frame, if it is whole, must not count: it is overwritten by one
            # with a higher number, and made no frame until then.
            self._skipped += 1
            with contextlib.suppress(OSError):
                self._ops.pwrite(fd, memoryview(bytes(RECORD_BYTES)), end_bytes)
            raise
        self._skipped = 0
        self._end_units += len(framed) // RECORD_BYTES

    def _advance(self, body: bytes) -> None:
        """Go on with the next journal after an append; a failure is that of the next one alone."""
        if self._end_units < self._begin_units:
            return
        try:
            following = self._prepare()
            if not following.has_begun:
                following.begin(self.sequence)
                self._next_from_units = self._end_units
                body = b""  # its blocks are among those that are there
            room = max(1, self._max_units - self._next_from_units)
            used = self._end_units - self._next_from_units  # of it; half, and it is complete
            following.advance(body, -(-2 * used * following.num_slots // room))
        except OSError as error:
            self._abandon(error)

    def _rewrite(self, body: bytes = b"") -> None:
        """Complete the next journal and put it in use now, with a last append."""
        self._check()  # else it could be put in the place of another store's
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
                self._switch(following)
            except OSError as error:
                self._abandon(error)  # what was lost may only be what was written before
                if is_new:
                    raise
            else:
                break
        self._close_replaced()
        self._sync_names()
        with contextlib.suppress(OSError):  # it is tried again when it is needed
            self._prepare()

    def _sync_names(self) -> None:
        """See to it that what is appended is found again, if that matters; raises OSError."""
        if self._fdatasync and not self._is_folder_synced:
            sync_folder(self._ops, self._path.rpartition("/")[0])
            self._is_folder_synced = True

    def _try_to_switch(self) -> None:
        """Put the next journal, which is on the device, in use; its failure is nobody's."""
        following = self._next
        if following is None:
            return
        try:
            self._check()
            if self._fdatasync and following.unsynced_bytes:
                following.sync()  # what was appended since has been reported as stored
            self._switch(following)
            self._prepare()
        except OSError as error:
            self._abandon(error)

    def _switch(self, following: Compaction) -> None:
        self._ops.rename(self._next_path, self._path)
        self._next = None
        self._replaced.append(self._opened())
        self._fd = following.fd
        self.sequence = following.sequence
        self._skipped = 0
        self._end_units = following.size_bytes // RECORD_BYTES
        self._begin_units = self._max_units - self._window_units
        self._is_folder_synced = False

    def _limit(self, slots: int) -> None:
        self._max_units, self._window_units = journal_units(slots), log_units(slots) // 2
        self._begin_units = self._max_units - self._window_units

    def _prepare(self) -> Compaction:
        """Return the next journal; a new one has all its space allocated. Raises OSError."""
        if self._next is None:
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(self._next_path)
            self._next = Compaction(
                self._ops, self._next_path, self._table, self._seed, self._max_units
            )
        return self._next

    def _abandon(self, error: OSError) -> None:
        logger.warning("the journal cannot be written anew yet: %s", str(error))
        self._drop_next()
        self._begin_units = (self._end_units + self._max_units) // 2

    def _drop_next(self) -> None:
        """Give the next journal up: its bytes, once one was lost, prove nothing any more."""
        following, self._next = self._next, None
        if following is not None and following.is_syncing:
            following.is_abandoned = True
        elif following is not None:
            self._close_unused(following.fd)

    def _close_replaced(self) -> None:
        while self._replaced:
            self._close_unused(self._replaced.pop())

    def _close_unused(self, fd: int) -> None:
        """Close a journal that no block depends on: that it fails is no job's failure."""
        try:
            self._ops.close(fd)
        except OSError as error:
            logger.warning("closing a journal that is not in use failed: %s", str(error))

    def _check(self) -> None:
        """Raise an OSError if what is written would not be found again."""
        self._directory_identity.check()
        self._directory_identity.check_file(self._opened(), JOURNAL)

    def _opened(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the journal is closed")
        return self._fd
