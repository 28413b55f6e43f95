"""Blocks of the primary that hints of requests put at an end of the order of eviction.

    unmarked --stored at low priority--> low --end of such a request--> first
    low or first --used by a request of another priority--> unmarked
    unmarked --used by a request that retains--> retained
    retained --time, share exceeded, or no others left to evict--> unmarked
    any --evicted, or write failed--> unmarked

Retained blocks are in lists by priority and by the second in which their retention ends, so that
neither a step nor a use of a block depends on the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice
from math import ceil
from typing import Final

from kvoffload_async.tables.arrays import integers
from kvoffload_async.tables.lists import NumberLists
from kvoffload_async.types import MOST_RETAIN_S

_SHARE: Final = 4
"""At most one slot in four is retained."""
_SECONDS: Final = MOST_RETAIN_S + 2
"""Number of lists per priority: the ends of two retentions in one list are the same second."""
_LOW: Final = 1
_FIRST: Final = 2
_RETAINED: Final = 3
_SLOTS_A_STEP: Final = 2048
"""Maximum number of retentions that end in a step because of their time."""


class HintedBlocks:
    """The slots whose blocks are evicted first or last.

    Memory: 20 bytes per slot.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        retained: Number of slots that are retained.
        num_low: Number of slots whose blocks were stored at low priority, and used at no other.
    """

    def __init__(self, num_slots: int, most: int | None = None) -> None:
        """Start without marks, for a primary of `num_slots` slots, `most` of which may be used."""
        self.retained = 0
        self.num_low = 0
        self._most = (num_slots if most is None else most) // _SHARE
        self._lists = NumberLists(num_slots, 2 * _SECONDS)
        self._list_of = integers(num_slots)
        """Slot -> 0 if unmarked, `_LOW`, `_FIRST`, or `_RETAINED` plus the list that it is in."""
        self._first = NumberLists(num_slots)
        self._ends: tuple[list[int], list[int]] = ([], [])
        """By priority: a heap of the seconds in which retentions end, or would have ended."""
        self._end_of: dict[int, int] = {}
        """List -> its second, if that is in the heap."""

    @property
    def has_first(self) -> bool:
        """Whether there are blocks to be evicted first."""
        return any(True for _ in self._first.walk())

    def is_retained(self, slot: int) -> bool:
        """Return whether a block is evicted last."""
        return self._list_of[slot] >= _RETAINED

    def is_marked(self, slot: int) -> bool:
        """Return whether a block has any mark."""
        return self._list_of[slot] != 0

    # -- marks ----------------------------------------------------------------------------------

    def note_low(self, slots: Sequence[int]) -> None:
        """Mark new blocks as stored at low priority; they are evicted first once `use` says so."""
        for slot in slots:
            self._list_of[slot] = _LOW
        self.num_low += len(slots)

    def use(self, slots: Sequence[int], *, is_low: bool) -> None:
        """Record the blocks that a request has used, at its end.

        Those stored at low priority are now evicted first, in the given order and after those of
        earlier requests; or, if the request had another priority, no longer.
        """
        list_of = self._list_of
        self._first.remove([slot for slot in slots if list_of[slot] == _FIRST])
        low = [slot for slot in slots if list_of[slot] in {_LOW, _FIRST}]
        for slot in low:
            list_of[slot] = _FIRST if is_low else 0
        if is_low:
            self._first.append(low)
        else:
            self.num_low -= len(low)

    def retain(
        self, slots: Sequence[int], now_s: float, seconds: float, *, is_high: bool
    ) -> list[int]:
        """Retain unmarked or retained blocks; the longest retention and highest priority count.

        Args:
            slots: Their slots, in the order of eviction: tail first.
            now_s: The time, in seconds.
            seconds: Seconds until the retention ends, at most `MOST_RETAIN_S`.
            is_high: Whether the priority is high.

        Returns:
            Slots whose retention ends now, because others exceed the share.
        """
        end = ceil(now_s + seconds)
        moved: dict[tuple[bool, int], list[int]] = {}
        for slot in slots:
            marks = is_high, end
            which = self._list_of[slot] - _RETAINED
            if which >= 0:
                marks = is_high or which >= _SECONDS, max(end, self._end_of[which])
                self._unlink(slot)
            moved.setdefault(marks, []).append(slot)
        for (high, last), group in moved.items():
            which = high * _SECONDS + last % _SECONDS
            if which not in self._end_of:
                self._end_of[which] = last
                heappush(self._ends[high], last)
            for slot in group:
                self._list_of[slot] = which + _RETAINED
            self._lists.append(group, which)
            self.retained += len(group)
        return self.give_up(self.retained - self._most, lambda _: True)

    # -- the end of marks -----------------------------------------------------------------------

    def expire(self, now_s: float) -> list[int]:
        """End retentions whose time has come, a bounded number per call; return their slots."""
        ended: list[int] = []
        for high, heap in enumerate(self._ends):
            while heap and heap[0] <= now_s and len(ended) < _SLOTS_A_STEP:
                ended += self._end_first(high, _SLOTS_A_STEP - len(ended), lambda _: True)
        return ended

    def give_up(self, count: int, is_evictable: Callable[[int], bool]) -> list[int]:
        """End retentions early, lower priority and earlier end first; return their slots.

        Args:
            count: Number of evictable blocks among them; fewer if there are no more.
            is_evictable: Whether a block may be evicted now.
        """
        ended: list[int] = []
        for high, heap in enumerate(self._ends):
            while heap and count > 0:
                slots = self._end_first(high, count, is_evictable)
                count -= sum(map(is_evictable, slots))
                ended += slots
        return ended

    def first(self, count: int, is_evictable: Callable[[int], bool]) -> list[int]:
        """Return up to `count` evictable blocks to be evicted first, which stay marked.

        Blocks that are in use are moved behind the others, so that a call checks few of them.
        """
        found: list[int] = []
        in_use: list[int] = []
        for slot in islice(self._first.walk(), 2 * count):
            (found if is_evictable(slot) else in_use).append(slot)
        self._first.move_to_end(in_use)
        return found[:count]

    def forget(self, slots: Sequence[int]) -> None:
        """Unmark slots whose blocks leave the primary."""
        for slot in slots:
            mark = self._list_of[slot]
            if mark >= _RETAINED:
                self._unlink(slot)
            elif mark:
                if mark == _FIRST:
                    self._first.remove([slot])
                self.num_low -= 1
                self._list_of[slot] = 0

    # -- inspection -----------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """Yield descriptions of the violated invariants."""
        members = dict.fromkeys(self._first.walk(), _FIRST)
        for which in self._end_of:
            members |= dict.fromkeys(self._lists.walk(which), which + _RETAINED)
        marks = {slot: mark for slot, mark in enumerate(self._list_of) if mark >= _FIRST}
        num_low = sum(mark in {_LOW, _FIRST} for mark in self._list_of)
        if num_low != self.num_low:
            yield f"{self.num_low} blocks are counted as stored at low priority, not {num_low}"
        if members != marks:
            yield f"the lists have {members}, the marks are {marks}"
        if self.retained != sum(map(self.is_retained, marks)) or self.retained > self._most:
            yield f"{self.retained} blocks are counted as retained, of {self._most}"
        if sorted(self._end_of.values()) != sorted(chain(*self._ends)):
            yield f"the heaps have {self._ends}, the lists {self._end_of}"

    # -- internal -------------------------------------------------------------------------------

    def _end_first(self, high: int, count: int, is_evictable: Callable[[int], bool]) -> list[int]:
        """End retentions of the earliest second, up to `count` evictable blocks."""
        heap = self._ends[high]
        which = high * _SECONDS + heap[0] % _SECONDS
        ended: list[int] = []
        for slot in self._lists.walk(which):
            if not count:
                break
            ended.append(slot)
            count -= is_evictable(slot)
        else:
            heappop(heap)
            del self._end_of[which]
        self._lists.remove(ended)
        for slot in ended:
            self._list_of[slot] = 0
        self.retained -= len(ended)
        return ended

    def _unlink(self, slot: int) -> None:
        self._lists.remove([slot])
        self._list_of[slot] = 0
        self.retained -= 1
