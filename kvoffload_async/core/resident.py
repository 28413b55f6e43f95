"""Which blocks are resident, in which slots, and how often each is pinned.

A block's state machine, encoded in one counter so that a batch costs one integer a key:

    absent  --reserve--> writing (-1)
    writing --written--> idle (0)         writing --failed--> absent
    idle    --pin------> pinned (k > 0)   pinned  --unpin (last)--> idle
    idle    --evict----> absent

What is known of a block lies in arrays by slot: a million blocks cost no object each that the
garbage collector walks, and no step moves more than a few small parts of a table. Bytes a block at
a million, under LRU: 160 with its key of 36, 91 without; 38 more once blocks have come and gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvoffload_async.core.counters import PrimaryCounters
from kvoffload_async.errors import StateError
from kvoffload_async.tables.arrays import integers
from kvoffload_async.tables.keymap import PART_AT, too_short
from kvoffload_async.tables.keytable import KeyTable
from kvoffload_async.types import LookupResult, OffloadKey

WRITING: Final = -1


class ResidentBlocks:
    """The blocks of a cache with `num_slots` slots: what `Primary` looks up and pins.

    Thread: owner.

    Attributes:
        counters: What it has done so far.
    """

    def __init__(self, num_slots: int) -> None:
        """Start empty."""
        self._blocks = KeyTable(num_slots)
        self._parts = self._blocks.map.parts
        self._refs = integers(num_slots)
        """Slot -> the counter of the block in it; of a free slot, whatever the last one left."""
        self._idle = 0
        self.counters = PrimaryCounters()

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS."""
        try:
            slot = self._parts[key[PART_AT]].get(key)
        except IndexError:
            raise too_short([key]) from None
        if slot is None:
            return LookupResult.MISS
        return LookupResult.HIT if self._refs[slot] >= 0 else LookupResult.HIT_PENDING

    def pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Keep readable keys in place; return their slots, in key order.

        Raises:
            StateError: A key is not readable; nothing has changed.
        """
        refs = self._refs
        slots: list[int] = []
        for slot in self._blocks.find(keys):
            if slot is None or refs[slot] < 0:
                key = keys[len(slots)]
                raise StateError(f"block {key.hex()} is not readable; look it up in this step")
            slots.append(slot)
        num_idle = 0
        for slot in slots:
            count = refs[slot]
            if not count:
                num_idle += 1
            refs[slot] = count + 1
        self._idle -= num_idle
        return slots

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Undo one `pin`."""
        keys = tuple(keys)
        refs = self._refs
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            count = 0 if slot is None else refs[slot]
            if slot is None or count < 1:
                raise StateError(f"block {key.hex()} is not pinned")
            self._idle += count == 1
            refs[slot] = count - 1

    def slot_of(self, key: OffloadKey) -> int:
        """Return a resident key's slot; raises StateError if it is absent."""
        slot = self._blocks.get(key)
        if slot is None:
            raise StateError(f"block {key.hex()} is absent")
        return slot

    def key_of(self, slot: int) -> OffloadKey:
        """Return the key of the block in a slot. For invariants and inspection."""
        return self._blocks.key_of(slot)

    def resident(self) -> Iterator[tuple[OffloadKey, int, int]]:
        """Iterate over (key, slot, reference count), -1 for writing.

        For invariants and inspection.
        """
        return ((key, slot, self._refs[slot]) for key, slot in self._blocks.items())

    def _writing_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots = []
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is None or self._refs[slot] != WRITING:
                raise StateError(f"block {key.hex()} is not being written")
            slots.append(slot)
        return slots
