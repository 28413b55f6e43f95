"""The record of every slot, in memory: what the journal would say if it were written anew.

An array a segment, so that a run of neighbours is one slice: of bytes where a job passes, which
costs a fraction of what a slice of an array does. A slot's record is written by whoever puts a
block there, and read by those who have it pinned; nothing here needs a lock.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.slab.places import Place, segment_of, slot_of
from kvoffload_async.tiers.slab.records import (
    DIGEST_AT,
    PUT,
    RECORD,
    RECORD_BYTES,
    SUSPECT,
    Records,
    digests_of,
    removals_of,
)
from kvoffload_async.tiers.slab.runs import joined

_TICK_BYTES: Final = 8
_WORD_BYTES: Final = 8


class _Part:
    """The records of one segment.

    Attributes:
        records: The record of each slot.
        digests: The checksum in each record once more, where those of a run are one slice.
        uses: The tick of each one's last use.
    """

    __slots__ = ("_digest_bytes", "_record_bytes", "_use_bytes", "digests", "records", "uses")

    def __init__(self, slots: int) -> None:
        self.records: Records = np.zeros(slots, dtype=RECORD)
        self.digests = np.zeros((slots, DIGEST_BYTES // _WORD_BYTES), dtype=np.uint64)
        self.uses: npt.NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._record_bytes = self.records.view(np.uint8).data
        self._digest_bytes = self.digests.reshape(-1).view(np.uint8).data
        self._use_bytes = self.uses.view(np.uint8).data

    def put(self, slot: int, packed: bytes) -> None:
        start = slot * RECORD_BYTES
        self._record_bytes[start : start + len(packed)] = packed
        digests = digests_of(packed)
        start = slot * DIGEST_BYTES
        self._digest_bytes[start : start + len(digests)] = digests

    def fill(self, slots: npt.NDArray[np.int64], records: Records) -> None:
        self.records[slots] = records
        words = self.records.view(np.uint64).reshape(len(self.records), -1)
        first = DIGEST_AT // _WORD_BYTES
        self.digests[:] = words[:, first : first + self.digests.shape[1]]

    def stored_digests(self, slot: int, count: int) -> bytes:
        return bytes(self._digest_bytes[slot * DIGEST_BYTES : (slot + count) * DIGEST_BYTES])

    def remove(self, slot: int, count: int) -> bytes:
        """Note that slots have no block; return the records that say so, packed."""
        start, stop = slot * RECORD_BYTES, (slot + count) * RECORD_BYTES
        removals = removals_of(self._record_bytes[start:stop])
        self._record_bytes[start:stop:RECORD_BYTES] = bytes(count)
        return removals

    def use(self, slot: int, count: int, tick: int) -> None:
        start, stop = slot * _TICK_BYTES, (slot + count) * _TICK_BYTES
        self._use_bytes[start:stop] = tick.to_bytes(_TICK_BYTES, sys.byteorder) * count


class RecordTable:
    """The records of the blocks that are there, and when each was last used. Thread: any."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self._ticks = itertools.count(1)
        self.has_suspects = False
        """Whether there may be blocks that must be verified in any case."""
        self.changes = 0
        """How often something has changed, uses included; about, with several threads."""

    def add_segment(self, segment: int, slots: int) -> None:
        """Add a segment, without blocks."""
        self._parts[segment] = _Part(slots)

    def drop_segment(self, segment: int) -> None:
        """Forget a segment and its blocks."""
        del self._parts[segment]

    def slots(self) -> dict[int, int]:
        """Return how many slots each segment has."""
        return {segment: len(part.records) for segment, part in self._parts.items()}

    def fill(self, live: Records) -> None:
        """Take in the records found at the start, the least recent first."""
        self.has_suspects = bool((live["flags"] & SUSPECT).any())
        ticks = np.arange(1, len(live) + 1)
        self._ticks = itertools.count(len(live) + 1)
        for segment, part in self._parts.items():
            mine = np.flatnonzero(segment_of(live["place"]) == segment)
            slots = slot_of(live["place"])[mine]
            part.fill(slots, live[mine])
            part.uses[slots] = ticks[mine]

    def put(self, place: Place, packed: bytes) -> None:
        """Write the packed records of a run that begins at a place."""
        self._parts[segment_of(place)].put(slot_of(place), packed)
        self.use(place, len(packed) // RECORD_BYTES)

    def remove(self, places: Sequence[Place]) -> list[bytes]:
        """Note that places have no block; return the records that say so, packed."""
        packed = []
        ascending = sorted(places)
        for run in joined(ascending, 0, len(ascending)):
            part = self._parts[segment_of(run.place)]
            packed.append(part.remove(slot_of(run.place), run.length))
        self.changes += 1
        return packed

    def forget(self, places: Sequence[Place]) -> None:
        """Note that neighbouring places have no block, whatever the table says of them."""
        self._parts[segment_of(places[0])].remove(slot_of(places[0]), len(places))

    def use(self, place: Place, count: int = 1) -> None:
        """Note that a run was used now."""
        self._parts[segment_of(place)].use(slot_of(place), count, next(self._ticks))
        self.changes += 1

    def digests(self, place: Place, count: int) -> bytes:
        """Return the checksums of a run, one behind the other."""
        return self._parts[segment_of(place)].stored_digests(slot_of(place), count)

    def is_suspect(self, place: Place, count: int) -> bool:
        """Tell whether one of a run must be verified in any case."""
        slot = slot_of(place)
        flags = self._parts[segment_of(place)].records["flags"][slot : slot + count]
        return bool((flags & SUSPECT).any())

    def records_in(self, segment: int) -> Records:
        """Return a copy of the records of the blocks in a segment."""
        records = self._parts[segment].records
        found: Records = records[records["kind"] == PUT]
        return found

    def num_live(self) -> int:
        """Return how many blocks there are."""
        parts = list(self._parts.values())
        return sum(int((part.records["kind"] == PUT).sum()) for part in parts)

    def live(self) -> Records:
        """Return a copy of all records, the least recently used first."""
        found, ticks = [np.zeros(0, dtype=RECORD)], [np.zeros(0, dtype=np.int64)]
        for part in list(self._parts.values()):
            slots = np.flatnonzero(part.records["kind"] == PUT)
            found.append(part.records[slots])
            ticks.append(part.uses[slots])
        order = np.argsort(np.concatenate(ticks), kind="stable")
        live: Records = np.concatenate(found)[order]
        return live


def split_digests(digests: bytes) -> list[bytes]:
    """Return the single checksums of several, one behind the other."""
    starts: Iterable[int] = range(0, len(digests), DIGEST_BYTES)
    return [digests[start : start + DIGEST_BYTES] for start in starts]
