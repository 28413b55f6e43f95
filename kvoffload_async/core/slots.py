"""The slots of the primary buffer: which are free, which are taken, which wait for a late copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload_async.errors import InvariantError
from kvoffload_async.tables.free import FreeNumbers

_FREE, _TAKEN, _HELD = range(3)


class SlotPool:
    """Hands out `num_slots` slots.

    A slot is free, taken, or *held*: no longer anybody's, but a disowned copy may still touch
    it, so that it must not be handed out before the copy has ended.

    Never-used slots are handed out first, in increasing order, so that a fresh pool gives
    neighbouring rows, which tiers can join into one call.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._states = bytearray(num_slots)
        self._free = FreeNumbers(num_slots)
        self._holds: dict[int, int] = {}

    @property
    def free_count(self) -> int:
        """Slots that `allocate` can hand out."""
        return self._free.count

    @property
    def retained_count(self) -> int:
        """Slots that wait for a disowned copy."""
        return len(self._holds)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots.

        Raises:
            InvariantError: Fewer are free.
        """
        if count > self._free.count:
            raise InvariantError(f"{count} slots asked for, {self._free.count} free")
        slots = self._free.take(count)
        states = self._states
        for slot in slots:
            states[slot] = _TAKEN
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give taken slots back."""
        states = self._states
        for slot in slots:
            if states[slot] != _TAKEN:  # asked here: a call a slot takes longer than the rest
                self._expect(slot, _TAKEN)
            states[slot] = _FREE
        self._free.give_back(slots)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep taken slots from everybody until `release`."""
        for slot in slots:
            self._expect(slot, _TAKEN)
            self._states[slot] = _HELD
            self._holds[slot] = 1

    def release(self, slots: Iterable[int]) -> None:
        """Undo one hold of each slot; after the last one the slot is free."""
        for slot in slots:
            self._expect(slot, _HELD)
            self._holds[slot] -= 1
            if not self._holds[slot]:
                del self._holds[slot]
                self._states[slot] = _FREE
                self._free.give_back([slot])

    def reset(self, still_touched: Iterable[int]) -> None:
        """Free every slot but the held ones and `still_touched`, each entry one more hold."""
        for slot in still_touched:
            self._holds[slot] = self._holds.get(slot, 0) + 1
        self._states = bytearray(self.num_slots)
        for slot in self._holds:
            self._states[slot] = _HELD
        every = reversed(range(self.num_slots))
        self._free.reset(slot for slot in every if slot not in self._holds)

    def free_slots(self) -> list[int]:
        """Return the free slots. For invariants and inspection."""
        return list(self._free)

    def retained_slots(self) -> list[int]:
        """Return the held slots. For invariants and inspection."""
        return list(self._holds)

    def _expect(self, slot: int, state: int) -> None:
        if self._states[slot] != state:
            raise InvariantError(f"slot {slot} is in state {self._states[slot]}, not {state}")
