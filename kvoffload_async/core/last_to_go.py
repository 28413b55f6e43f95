"""The order in which blocks that a tier is owed are evicted, once nothing else is left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvoffload_async.tables.arrays import small_integers
from kvoffload_async.tables.lists import NumberLists


class LastToGo:
    """Slots that the policy would have had go, had a tier not been owed their blocks.

    In the order in which it asked for them, which is that of its ranking. It asks for each once
    until that is released, so nobody goes through what must stay. Bytes a slot: 9, once used.
    """

    def __init__(self, num_slots: int) -> None:
        """Start empty, over the slots of the primary."""
        self._num_slots = num_slots
        self._in_order: NumberLists | None = None
        self._is_member = small_integers(0)

    def note(self, slot: int) -> None:
        """Put a slot at the end."""
        if self._in_order is None:
            self._in_order = NumberLists(self._num_slots)
            self._is_member = small_integers(self._num_slots)
        if self._is_member[slot]:
            self._in_order.remove([slot])
        self._is_member[slot] = 1
        self._in_order.append([slot])

    def discard(self, slots: Sequence[int]) -> list[int]:
        """Take out those of the slots that are members; return these."""
        if self._in_order is None:
            return []
        is_member = self._is_member
        members = [slot for slot in slots if is_member[slot]]
        for slot in members:
            is_member[slot] = 0
        self._in_order.remove(members)
        return members

    def first(self, count: int) -> list[int]:
        """Return the first members."""
        return [] if self._in_order is None else list(islice(self._in_order.walk(), count))

    def clear(self) -> None:
        """Take everything out."""
        self._in_order = None
