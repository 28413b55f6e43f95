"""Which blocks are resident, in which slots, how often each is pinned, and who may be evicted.

A block's state machine, encoded in one counter so that a batch costs one integer a key:

    absent  --reserve--> writing (-1)
    writing --written--> idle (0)         writing --failed--> absent
    idle    --pin------> pinned (k > 0)   pinned  --unpin (last)--> idle
    idle    --evict----> absent

A block that a tier in order is owed is *protected*: the counter has `A_DEBT` more for each such
tier, and it goes only after all that are not, or not at all; see `Primary`.

What is known of a block lies in arrays by slot: a million blocks cost no object each that the
garbage collector walks, and no step moves more than a few small parts of a table. Bytes a block at
a million, under LRU: 164 with its key of 36, 95 without; 38 more once blocks have come and gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.counters import PrimaryCounters
from kvoffload_async.core.index import KeysDecided
from kvoffload_async.core.last_to_go import LastToGo
from kvoffload_async.errors import StateError
from kvoffload_async.tables.arrays import integers
from kvoffload_async.tables.keymap import LAST_HASH_BYTE, too_short
from kvoffload_async.tables.keytable import KeyTable
from kvoffload_async.types import LookupResult, OffloadKey

WRITING: Final = -1
A_DEBT: Final = 1 << 24
PINS: Final = A_DEBT - 1
"""What of a counter is pins, unless it is `WRITING`."""


class ResidentBlocks:
    """The blocks of a cache with `num_slots` slots: what `Primary` looks up, pins and ranks.

    Thread: owner.

    Attributes:
        decided: Told of keys whose writes have ended, well or not, other than by a reset.
        counters: What it has done so far.
    """

    decided: KeysDecided | None = None

    def __init__(self, num_slots: int, policy: CachePolicy) -> None:
        """Start empty; the policy is owned from now on."""
        self._policy = policy
        self._blocks = KeyTable(num_slots)
        self._parts = self._blocks.map.parts
        self._refs = integers(num_slots)
        """Slot -> the counter of the block in it; of a free slot, whatever the last one left."""
        self._idle = 0
        """Blocks that are neither pinned nor protected."""
        self._protected = 0
        """Blocks that are protected, and not pinned."""
        self._last_to_go = LastToGo(num_slots)
        self.on_evicted: Callable[[Sequence[int]], None] | None = None
        """Told which slots are about to lose their blocks, while somebody needs to know."""
        self.counters = PrimaryCounters()

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS."""
        try:
            slot = self._parts[key[0] + key[LAST_HASH_BYTE]].get(key)
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
        self._hold(slots)
        return slots

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Undo one `pin`."""
        keys = tuple(keys)
        refs = self._refs
        slots: list[int] = []
        try:
            for key, slot in zip(keys, self._blocks.find(keys), strict=True):
                if slot is None or refs[slot] < 1 or not refs[slot] & PINS:
                    raise StateError(f"block {key.hex()} is not pinned")
                slots.append(slot)
        finally:
            self._unhold(slots)

    def protect(self, slots: Iterable[int]) -> None:
        """Have the readable blocks in these slots go last: one more tier is owed them."""
        refs = self._refs
        num_idle = 0
        for slot in slots:
            count = refs[slot]
            if not count:
                num_idle += 1
            refs[slot] = count + A_DEBT
        self._idle -= num_idle
        self._protected += num_idle

    def unprotect(self, slots: Iterable[int]) -> None:
        """Undo one `protect`."""
        refs = self._refs
        released: list[int] = []
        for slot in slots:
            count = refs[slot] - A_DEBT
            refs[slot] = count
            if not count:
                released.append(slot)
        self._idle += len(released)
        self._protected -= len(released)
        self._last_to_go.discard(released)
        self._policy.released(released)

    def readable_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the slots of those of the keys that are readable, in their order."""
        refs = self._refs
        return [s for s in self._blocks.find(keys) if s is not None and refs[s] >= 0]

    def keys_of(self, slots: Sequence[int]) -> list[OffloadKey]:
        """Return the keys of the blocks in slots that are taken."""
        return self._blocks.keys_of(slots)

    def slot_of(self, key: OffloadKey) -> int:
        """Return a resident key's slot; raises StateError if it is absent."""
        slot = self._blocks.get(key)
        if slot is None:
            raise StateError(f"block {key.hex()} is absent")
        return slot

    def key_of(self, slot: int) -> OffloadKey:
        """Return the key of the block in a slot. For invariants and inspection."""
        return self._blocks.key_of(slot)

    @property
    def policy(self) -> CachePolicy:
        """The ranking. For invariants and inspection."""
        return self._policy

    def ranked(self) -> list[OffloadKey]:
        """Return the keys that the policy ranks, the best victim first.

        For invariants and inspection.
        """
        return self._blocks.keys_of(tuple(self._policy.resident()))

    def forgotten(self) -> list[OffloadKey]:
        """Return keys that may go, but that the policy skips: there must be none.

        For invariants and inspection.
        """
        return self._blocks.keys_of([s for s in self._policy.skipped() if not self._refs[s]])

    def resident(self) -> Iterator[tuple[OffloadKey, int, int]]:
        """Iterate over (key, slot, number of pins), -1 for writing.

        For invariants and inspection.
        """
        refs = self._refs
        return (
            (key, slot, WRITING if refs[slot] < 0 else refs[slot] & PINS)
            for key, slot in self._blocks.items()
        )

    def debts(self) -> dict[int, int]:
        """Return the slots of protected blocks, and how many tiers are owed each.

        For invariants and inspection.
        """
        debts = {slot: self._refs[slot] // A_DEBT for _, slot, refs in self.resident() if refs >= 0}
        return {slot: count for slot, count in debts.items() if count}

    def _sorted_out(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey], set[int]]:
        """Return the absent ones of the keys, the readable ones, and the slots of unpinned ones."""
        refs = self._refs
        missing: list[OffloadKey] = []
        readable: list[OffloadKey] = []
        unpinned: set[int] = set()
        unique = list(dict.fromkeys(keys))
        for key, slot in zip(unique, self._blocks.find(unique), strict=True):
            if slot is None:
                missing.append(key)
            elif refs[slot] >= 0:
                readable.append(key)
                if not refs[slot] & PINS:
                    unpinned.add(slot)
        return missing, readable, unpinned

    def _hold(self, slots: Iterable[int]) -> None:
        """Pin the readable blocks in these slots, once each time that one is named."""
        refs = self._refs
        num_idle = 0
        protected: list[int] = []
        for slot in slots:
            count = refs[slot]
            if not count:
                num_idle += 1
            elif not count & PINS:
                protected.append(slot)
            refs[slot] = count + 1
        self._idle -= num_idle
        if protected:
            self._protected -= len(protected)
            self._last_to_go.discard(protected)

    def _unhold(self, slots: Iterable[int]) -> None:
        """Undo one `_hold`."""
        refs = self._refs
        num_idle = 0
        released: list[int] = []
        for slot in slots:
            count = refs[slot] - 1
            refs[slot] = count
            if not count & PINS:
                num_idle += not count
                released.append(slot)
        self._idle += num_idle
        self._protected += len(released) - num_idle
        self._policy.released(released)

    def _writing_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots = []
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is None or self._refs[slot] != WRITING:
                raise StateError(f"block {key.hex()} is not being written")
            slots.append(slot)
        return slots

    def _rank(self, accesses: Iterable[tuple[OffloadKey, bool]]) -> None:
        """Tell the policy what a request used, head to tail; absent keys are left out."""
        parts = self._parts
        slots: list[int] = []
        reused: list[bool] = []
        for key, again in accesses:
            slot = parts[key[0] + key[LAST_HASH_BYTE]].get(key)
            if slot is not None:
                slots.append(slot)
                reused.append(again)
        if self._protected:  # their turn is not what it was
            self._policy.released(self._last_to_go.discard(slots))
        self._policy.access(slots, reused)
