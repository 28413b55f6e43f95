"""The record of every slot, in memory: what the journal would say if it were written anew.

Arrays a segment, so that a run of neighbours is one slice. A slot's record is written by whoever
puts a block there, and read by those who have it pinned; nothing here needs a lock. Bytes a slot:
24 and the length of the longest key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.slab.places import Place, place_of, segment_of, slot_of
from kvoffload_async.tiers.slab.records import (
    DIGEST_AT,
    KEY_AT,
    RECORD,
    RECORD_BYTES,
    SUSPECT,
    RecordRows,
    Records,
    picked,
    removal_records,
)
from kvoffload_async.tiers.slab.runs import joined

MAX_USE: Final = (1 << 32) - 1
_HALVED_FROM: Final = 1 << 31
_HEAD_BYTES: Final = 4
_STEP_SLOTS: Final = 1 << 14
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
        self.has_suspects = False
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
        for start in range(0, len(rows), _STEP_SLOTS):
            records = picked(units, rows[start : start + _STEP_SLOTS])
            segments = segment_of(records["place"])
            for segment in np.unique(segments).tolist():
                is_mine = segments == segment
                mine = records if is_mine.all() else picked(records, np.flatnonzero(is_mine))
                self._parts[segment].fill(slot_of(mine["place"]), mine)
            self.has_suspects = self.has_suspects or bool((records["flags"] & SUSPECT).any())
            last_use = max(last_use, int(records["use"].max()))
        self.tick = max(self.tick, min(last_use + 1, MAX_USE))

    def put(self, place: Place, packed: bytes) -> None:
        """Write the packed records of a run that begins at a place."""
        self._parts[segment_of(place)].put(slot_of(place), packed)
        self.use(place, len(packed) // RECORD_BYTES)

    def remove(self, places: Sequence[Place]) -> bytes:
        """Note that places have no block; return the records that say so."""
        ascending = sorted(places)
        for run in joined(ascending, 0, len(ascending)):
            slot = slot_of(run.place)
            self._parts[segment_of(run.place)].heads[slot : slot + run.length] = 0
        return removal_records(ascending)

    def use(self, place: Place, count: int = 1) -> None:
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

    def digests(self, place: Place, count: int) -> bytes:
        """Return the checksums of a run, one behind the other."""
        return self._parts[segment_of(place)].stored_digests(slot_of(place), count)

    def is_suspect(self, place: Place, count: int) -> bool:
        """Tell whether one of a run must be verified in any case."""
        slot = slot_of(place)
        heads = self._parts[segment_of(place)].heads[slot : slot + count]
        return bool((heads >> np.uint32(16) & np.uint32(SUSPECT)).any())

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
