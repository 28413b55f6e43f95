"""The record of every slot, in memory: what the journal would say if it were written anew.

An array a segment, so that a run of neighbours is one slice. A slot's record is written by whoever
puts a block there, and read by those who have it pinned; nothing here needs a lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.sealing import DIGEST_BYTES
from kvoffload_async.tiers.slab.places import Place, segment_of, slot_of
from kvoffload_async.tiers.slab.records import (
    PUT,
    RECORD,
    SUSPECT,
    Records,
    removals_of,
)
from kvoffload_async.tiers.slab.runs import joined


class RecordTable:
    """The records of the blocks that are there, and when each was last used. Thread: any."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Records, npt.NDArray[np.int64]]] = {}
        """Segment -> the record of each slot, and the tick of its last use."""
        self._ticks = itertools.count(1)
        self.has_suspects = False
        """Whether there may be blocks that must be verified in any case."""
        self.changes = 0
        """How often something has changed, uses included; about, with several threads."""

    def add_segment(self, segment: int, slots: int) -> None:
        """Add a segment, without blocks."""
        self._parts[segment] = (np.zeros(slots, dtype=RECORD), np.zeros(slots, dtype=np.int64))

    def drop_segment(self, segment: int) -> None:
        """Forget a segment and its blocks."""
        del self._parts[segment]

    def slots(self) -> dict[int, int]:
        """Return how many slots each segment has."""
        return {segment: len(records) for segment, (records, _) in self._parts.items()}

    def fill(self, live: Records) -> None:
        """Take in the records found at the start, the least recent first."""
        self.has_suspects = bool((live["flags"] & SUSPECT).any())
        ticks = np.arange(1, len(live) + 1)
        self._ticks = itertools.count(len(live) + 1)
        for segment, (records, uses) in self._parts.items():
            mine = np.flatnonzero(segment_of(live["place"]) == segment)
            slots = slot_of(live["place"])[mine]
            records[slots] = live[mine]
            uses[slots] = ticks[mine]

    def put(self, place: Place, packed: bytes) -> None:
        """Write the packed records of a run that begins at a place."""
        records = np.frombuffer(packed, dtype=RECORD)
        slot = slot_of(place)
        self._parts[segment_of(place)][0][slot : slot + len(records)] = records
        self.use(place, len(records))

    def remove(self, places: Sequence[Place]) -> list[bytes]:
        """Note that places have no block; return the records that say so, packed."""
        packed = []
        ascending = sorted(places)
        for run in joined(ascending, 0, len(ascending)):
            slot = slot_of(run.place)
            records = self._parts[segment_of(run.place)][0][slot : slot + run.count]
            packed.append(removals_of(records))
            records["kind"] = 0
        self.changes += 1
        return packed

    def forget(self, places: Sequence[Place]) -> None:
        """Note that neighbouring places have no block, whatever the table says of them."""
        slot = slot_of(places[0])
        self._parts[segment_of(places[0])][0]["kind"][slot : slot + len(places)] = 0

    def use(self, place: Place, count: int = 1) -> None:
        """Note that a run was used now."""
        slot = slot_of(place)
        self._parts[segment_of(place)][1][slot : slot + count] = next(self._ticks)
        self.changes += 1

    def digests(self, place: Place, count: int) -> bytes:
        """Return the checksums of a run, one behind the other."""
        slot = slot_of(place)
        digests = self._parts[segment_of(place)][0]["digest"][slot : slot + count]
        return digests.tobytes()

    def is_suspect(self, place: Place, count: int) -> bool:
        """Tell whether one of a run must be verified in any case."""
        slot = slot_of(place)
        flags = self._parts[segment_of(place)][0]["flags"][slot : slot + count]
        return bool((flags & SUSPECT).any())

    def records_in(self, segment: int) -> Records:
        """Return a copy of the records of the blocks in a segment."""
        records, _ = self._parts[segment]
        found: Records = records[records["kind"] == PUT]
        return found

    def num_live(self) -> int:
        """Return how many blocks there are."""
        return sum(int((r["kind"] == PUT).sum()) for r, _ in list(self._parts.values()))

    def live(self) -> Records:
        """Return a copy of all records, the least recently used first."""
        found, ticks = [np.zeros(0, dtype=RECORD)], [np.zeros(0, dtype=np.int64)]
        for records, uses in list(self._parts.values()):
            slots = np.flatnonzero(records["kind"] == PUT)
            found.append(records[slots])
            ticks.append(uses[slots])
        order = np.argsort(np.concatenate(ticks), kind="stable")
        live: Records = np.concatenate(found)[order]
        return live


def split_digests(digests: bytes) -> list[bytes]:
    """Return the single checksums of several, one behind the other."""
    starts: Iterable[int] = range(0, len(digests), DIGEST_BYTES)
    return [digests[start : start + DIGEST_BYTES] for start in starts]
