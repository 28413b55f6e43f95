"""The slots of the primary buffer: which are free, which are taken, which wait for a late copy."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload_async.errors import InvariantError

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
        self._never_used = 0
        self._returned: list[int] = []
        self._holds: dict[int, int] = {}

    @property
    def free_count(self) -> int:
        """Slots that `allocate` can hand out."""
        return self.num_slots - self._never_used + len(self._returned)

    @property
    def held_count(self) -> int:
        """Slots that wait for a disowned copy."""
        return len(self._holds)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots.

        Raises:
            InvariantError: Fewer are free.
        """
        if count > self.free_count:
            raise InvariantError(f"{count} slots asked for, {self.free_count} free")
        fresh = min(count, self.num_slots - self._never_used)
        slots = list(range(self._never_used, self._never_used + fresh))
        self._never_used += fresh
        if count > fresh:
            cut = len(self._returned) - (count - fresh)
            slots += reversed(self._returned[cut:])
            del self._returned[cut:]
        for slot in slots:
            self._states[slot] = _TAKEN
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Give taken slots back."""
        for slot in slots:
            self._expect(slot, _TAKEN)
            self._states[slot] = _FREE
            self._returned.append(slot)

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
                self._returned.append(slot)

    def reset(self, still_touched: Iterable[int]) -> None:
        """Free every slot but the held ones and `still_touched`, each entry one more hold."""
        for slot in still_touched:
            self._holds[slot] = self._holds.get(slot, 0) + 1
        self._states = bytearray(self.num_slots)
        for slot in self._holds:
            self._states[slot] = _HELD
        self._never_used = self.num_slots
        self._returned = [s for s in reversed(range(self.num_slots)) if s not in self._holds]

    def free_slots(self) -> list[int]:
        """Return the free slots. For laws and inspection."""
        return [*range(self._never_used, self.num_slots), *self._returned]

    def held_slots(self) -> list[int]:
        """Return the held slots. For laws and inspection."""
        return list(self._holds)

    def _expect(self, slot: int, state: int) -> None:
        if self._states[slot] != state:
            raise InvariantError(f"slot {slot} is in state {self._states[slot]}, not {state}")
