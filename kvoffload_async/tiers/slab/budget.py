"""How many slots fit into a capacity, with everything that lies beside them on disk.

All of it in bytes as the filesystem allocates them. A slot costs itself, its share of the
segment's extent tree, its records in two journals, the one in use and the next, and four bytes of
the session's file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvoffload_async.tiers.slab.places import MAX_SLOTS
from kvoffload_async.tiers.slab.records import RECORD_BYTES, checkpoint_units
from kvoffload_async.tiers.slab.segment_header import HEADER_BYTES

PAGE_BYTES = 4096
"""What slots, and O_DIRECT, are aligned to."""

_FIXED_BYTES = 16 * PAGE_BYTES
"""Two folders, the lock, the session, the manifest and its successor, the journals' roundings and
extents."""

_SEGMENT_BYTES = PAGE_BYTES + 64
"""A segment's first extent block, and its name in the folder."""

_USE_BYTES = 4
"""What the session's file has of a slot."""

_EXTENT_BYTES = 60
"""Two extents of 12 bytes a slot, in leaves that splitting has left half empty, and some."""

_MIN_LOG_UNITS = 32
"""So that a journal that is short is not written anew all the time."""

_AHEAD_SHARE = 16
"""Which part of a store may stand empty, at most, so that jobs find neighbours."""

_MOST_AHEAD = 256
"""Enough that evicting costs a job next to nothing."""

_MOST_AHEAD_BYTES = 32 << 20
"""Where blocks are large, neighbours gain nothing."""

_LEAST_AHEAD = 16
"""Fewer make no neighbours for a job."""


_LEAST_STRIPE = 16
"""A store with fewer slots than this for each stripe has one segment."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The arithmetic of one store.

    Attributes:
        capacity_bytes: What may be allocated on disk.
        slot_bytes: Bytes of a slot.
        segment_slots: Slots of a full segment.
        most_slots: How many slots there can be; by rounding it may be one more.
        stripes: How many segments are made at once, so that as many can be written at once.
        header_bytes: Bytes of a segment's header.
    """

    capacity_bytes: int
    slot_bytes: int
    segment_slots: int
    most_slots: int
    stripes: int = 1
    header_bytes: int = HEADER_BYTES

    @classmethod
    def of(
        cls, capacity_bytes: int, block_bytes: int, segment_bytes: int, stripes: int = 1
    ) -> Budget:
        """Return the budget of a capacity; one without `most_slots` is too small for a block."""
        slot_bytes = slot_bytes_of(block_bytes)
        segment_slots = min(max(1, segment_bytes // slot_bytes), MAX_SLOTS)
        plain = _filled(cls(capacity_bytes, slot_bytes, segment_slots, 0))
        if stripes == 1 or plain.most_slots < stripes * _LEAST_STRIPE:
            return plain
        segment_slots = min(segment_slots, -(-plain.most_slots // stripes))
        return _filled(cls(capacity_bytes, slot_bytes, segment_slots, 0, stripes))

    def cost(self, segments: Collection[int]) -> int:
        """Return the most that segments of so many slots, and all beside them, can allocate."""
        return self.cost_of(sum(segments), len(segments))

    def cost_of(self, slots: int, num_segments: int) -> int:
        """Return what `cost` does, of that many slots in that many segments."""
        return (
            _FIXED_BYTES
            + slots * (self.slot_bytes + _EXTENT_BYTES + _USE_BYTES)
            + num_segments * (_SEGMENT_BYTES + self.header_bytes)
            + 2 * journal_units(slots) * RECORD_BYTES
        )

    def next_segment(self, segments: Collection[int], max_slots: int | None = None) -> int:
        """Return how many slots one more segment may have; 0 if none is left."""
        most = self.segment_slots
        return self.fitting(segments, most if max_slots is None else min(most, max_slots))

    def fitting(self, segments: Collection[int], most: int) -> int:
        """Return how many slots, of so many at most, have room in one more segment."""
        low, high = 0, most + 1
        while high - low > 1:
            slots = (low + high) // 2
            if self.cost([*segments, slots]) <= self.capacity_bytes:
                low = slots
            else:
                high = slots
        return low

    @property
    def slots_ahead(self) -> int:
        """How many slots are made free before they must be, once one must."""
        most = min(_MOST_AHEAD, _MOST_AHEAD_BYTES // self.slot_bytes)
        ahead = min(most, self.most_slots // _AHEAD_SHARE)
        return ahead if ahead >= _LEAST_AHEAD else 0

    @property
    def least_bytes(self) -> int:
        """The smallest capacity that holds a block."""
        return Budget(0, self.slot_bytes, 1, 1).cost([1])


def _filled(budget: Budget) -> Budget:
    """Return a budget with the most slots that it has room for."""
    low, high = 0, budget.capacity_bytes // budget.slot_bytes + 1
    while high - low > 1:
        slots = (low + high) // 2
        larger = replace(budget, most_slots=slots)
        num_segments = -(-slots // budget.segment_slots)
        if larger.cost_of(slots, num_segments) <= budget.capacity_bytes:
            low = slots
        else:
            high = slots
    return replace(budget, most_slots=low)


def journal_units(slots: int) -> int:
    """Return how many units are allocated for a journal of a store with so many slots.

    Those of a checkpoint of all of them, and half as many for the log behind it.
    """
    return checkpoint_units(slots) + log_units(slots)


def log_units(slots: int) -> int:
    """Return how many of these are for the log."""
    return max(_MIN_LOG_UNITS, slots // 2)


def slot_bytes_of(block_bytes: int) -> int:
    """Return the bytes of a slot: a block's, rounded up to whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
