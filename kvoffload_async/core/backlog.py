"""What one tier is owed: blocks whose cascade has found no room, by the slot in which they lie.

unmarked --add--> owed --began--> under way --ended well, or given up--> unmarked
owed --forget (evicted)--> unmarked            under way --ended badly--> owed, last in line

What a tier in order is owed is protected: it is evicted last, or not at all. A tier that is out of
order wants nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.tables.arrays import small_integers
from kvoffload_async.tables.lists import NumberLists

_OWED: Final = 1
_UNDER_WAY: Final = 2
_A_TRY: Final = 4
"""A mark is one byte: what a block is, and `_A_TRY` more for each time it has failed."""
_PROTECTED: Final = 128

_MOST_TRIES: Final = 8
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_SLOTS_A_STEP: Final = 4096
"""How many slots a step looks at when the tier has failed, or works again."""

Protect = Callable[[Sequence[int]], object]
"""Protects the blocks in slots from eviction, or stops doing so."""


class Backlog:
    """The blocks that one tier is owed, the oldest first; what is not resident is not in here.

    Bytes a slot of the primary: 9, owed or not, and nothing that the garbage collector walks.

    Attributes:
        count: How many blocks are owed.
        since_s: Since when some have been, without a break.
        new_blocks: How many were added since the step began by stores of the step itself.
        is_shut: Whether the tier was out of order when it was asked last.
        is_wanted: Whether the tier is in order: what it is owed is protected.
        paused_until_s: When the tier, which has refused or failed, is tried again.
    """

    def __init__(self, num_slots: int, protect: Protect, unprotect: Protect) -> None:
        """Start empty, over the primary's slots."""
        self._protect = protect
        self._unprotect = unprotect
        self._num_heeded = num_slots
        self._oldest_first = NumberLists(num_slots)
        self._marks = small_integers(num_slots)
        self._pause_s = _FIRST_PAUSE_S
        self.count = 0
        self.since_s = 0.0
        self.new_blocks = 0
        self.is_shut = False
        self.is_wanted = True
        self.paused_until_s = 0.0

    # -- blocks ---------------------------------------------------------------------------------

    def add(self, slots: Iterable[int], now_s: float) -> int:
        """Owe the blocks in these slots, but for those on their way; return how many are new."""
        marks = self._marks
        new = [slot for slot in slots if not marks[slot] & (_OWED | _UNDER_WAY)]
        for slot in new:
            marks[slot] |= _OWED
        self._append(new, now_s)
        return len(new)

    def oldest(self, count: int) -> list[int]:
        """Return the slots of the blocks that have been owed for the longest."""
        return list(islice(self._oldest_first.walk(), count))

    def began(self, slots: Sequence[int]) -> None:
        """Learn that a copy of the blocks in these slots is under way."""
        marks = self._marks
        if self.count:
            owed = [slot for slot in slots if marks[slot] & _OWED]
            self._remove(owed)
            for slot in owed:
                marks[slot] -= _OWED
        for slot in slots:
            marks[slot] |= _UNDER_WAY

    def ended(self, slots: Iterable[int]) -> None:
        """Learn that their copy has ended, and that nothing follows from it."""
        marks = self._marks
        if not self.count:
            for slot in slots:
                marks[slot] = 0
            return
        for slot in slots:
            marks[slot] &= _OWED | _PROTECTED  # since an earlier copy of the same block has ended

    def failed(self, slots: Sequence[int], now_s: float, *, counts: bool) -> int:
        """Owe them again after a copy that failed; return how many are given up instead.

        Args:
            slots: Where the blocks lie.
            now_s: The time.
            counts: Whether that was one of the tries that each block has.
        """
        marks = self._marks
        again: list[int] = []
        given_up = 0
        for slot in slots:
            mark = marks[slot] & ~_UNDER_WAY
            if mark & _OWED:
                pass
            elif mark + _A_TRY * counts < _MOST_TRIES * _A_TRY:
                mark += _A_TRY * counts + _OWED
                again.append(slot)
            else:
                mark = 0
                given_up += 1
            marks[slot] = mark
        self._append(again, now_s)
        return given_up

    def forget(self, slots: Iterable[int]) -> int:
        """Learn that the blocks in these slots were evicted; return how many had been owed."""
        marks = self._marks
        lost = [slot for slot in slots if marks[slot]]
        self._remove(lost)
        for slot in lost:
            marks[slot] = 0
        return len(lost)

    def clear(self) -> int:
        """Forget everything; return how many blocks were owed."""
        lost = self.count
        self._stop_protecting(list(self._oldest_first.walk()))
        self._oldest_first.clear()
        self._marks = small_integers(len(self._marks))
        self.count = self.new_blocks = 0
        self.is_shut = False
        self.resume()
        return lost

    # -- protection -----------------------------------------------------------------------------

    @property
    def is_heeding(self) -> bool:
        """Whether more calls of `heed` are needed."""
        return self._num_heeded < len(self._marks)

    def heed(self, *, is_wanted: bool) -> None:
        """Protect what is owed, or stop doing so, as far as a step may take: slot by slot."""
        if is_wanted != self.is_wanted:
            self.is_wanted = is_wanted
            self._num_heeded = 0
        if not self.is_heeding:
            return
        marks = self._marks
        slots = range(self._num_heeded, min(self._num_heeded + _SLOTS_A_STEP, len(marks)))
        self._num_heeded = slots.stop
        owed = [slot for slot in slots if marks[slot] & _OWED]
        if not is_wanted:
            self._stop_protecting(owed)
            return
        owed = [slot for slot in owed if not marks[slot] & _PROTECTED]
        for slot in owed:
            marks[slot] |= _PROTECTED
        self._protect(owed)

    # -- pauses ---------------------------------------------------------------------------------

    def pause(self, now_s: float) -> None:
        """Leave the tier alone for a moment, which grows from one pause to the next."""
        if now_s >= self.paused_until_s:
            self.paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def resume(self) -> None:
        """Try the tier at once: it has just stored something."""
        self.paused_until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    # -- looking --------------------------------------------------------------------------------

    def slots(self) -> Iterator[int]:
        """Iterate over the slots of what is owed, the oldest first. For invariants."""
        return self._oldest_first.walk()

    def protected(self) -> Iterator[int]:
        """Iterate over the slots of what is protected. For invariants."""
        return (slot for slot, mark in enumerate(self._marks) if mark & _PROTECTED)

    def violations(self, under_way: set[int]) -> Iterator[str]:
        """Return which of its own invariants do not hold, in words. For inspection.

        Args:
            under_way: The slots whose copies to the tier may still run.
        """
        owed = set(self._oldest_first.walk())
        if len(owed) != self.count:
            yield f"{self.count} blocks are counted as owed, but {len(owed)} are"
        for slot, mark in enumerate(self._marks):
            if bool(mark & _OWED) != (slot in owed):
                yield f"slot {slot} has mark {mark}, but is {'' if slot in owed else 'not '}owed"
            if mark & _UNDER_WAY and slot not in under_way:
                yield f"slot {slot} is marked as under way, but no copy reads it"
            if mark and not mark & (_OWED | _UNDER_WAY):
                yield f"slot {slot} has mark {mark}, but is neither owed nor under way"
            if mark & _PROTECTED and slot not in owed:
                yield f"slot {slot} is protected, but not owed"
            if slot in owed and not self.is_heeding and self.is_wanted != bool(mark & _PROTECTED):
                yield f"slot {slot} has mark {mark}, but is_wanted is {self.is_wanted}"

    # -- inside ---------------------------------------------------------------------------------

    def _append(self, slots: Sequence[int], now_s: float) -> None:
        if not slots:
            return
        if not self.count:
            self.since_s = now_s
        self._oldest_first.append(slots)
        self.count += len(slots)
        if self.is_wanted:
            for slot in slots:
                self._marks[slot] |= _PROTECTED
            self._protect(slots)

    def _remove(self, slots: Sequence[int]) -> None:
        self._oldest_first.remove(slots)
        self.count -= len(slots)
        self._stop_protecting(slots)

    def _stop_protecting(self, slots: Sequence[int]) -> None:
        marks = self._marks
        protected = [slot for slot in slots if marks[slot] & _PROTECTED]
        for slot in protected:
            marks[slot] -= _PROTECTED
        self._unprotect(protected)
