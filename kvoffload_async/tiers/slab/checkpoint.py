"""The next journal, which is written beside the one in use, a bounded step at a time.

It gets every append that the one in use gets, and in between, segment by segment, the records of
the blocks that are there. Whatever is appended comes behind what was written of the same place
before, and what is written later is as true as the append; so the last record of a place is right
at any time, and all are there once the last slot was looked at. Thread: under the journal's lock,
but for what says otherwise.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvoffload_async.tiers.files.ops import FileOps, write_all
from kvoffload_async.tiers.slab.records import (
    CHECKPOINT_FRAME_RECORDS,
    RECORD_BYTES,
    Records,
    checkpoint,
    checkpoint_units,
    frame,
)
from kvoffload_async.tiers.slab.table import RecordTable

_STEP_SLOTS: Final = 1 << 13
"""How many slots are looked at, and their records written, at a time."""

_SYNC_BYTES: Final = 8 << 20
"""How much of it may wait for the device before somebody waits for it."""


class NextJournal:
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
            for start in range(0, slots, _STEP_SLOTS):
                self._todo.append((segment, start, min(slots, start + _STEP_SLOTS)))
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
            if len(frames) >= _STEP_SLOTS * RECORD_BYTES:
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
