"""Blocks of the primary that hints of requests put at an end of the order of eviction.

    unmarked --stored at low priority--> first
    first --used by another request--> unmarked
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
_FIRST: Final = 1
_RETAINED: Final = 2
_SLOTS_A_STEP: Final = 4096
"""Maximum number of retentions that end in a step because of their time."""


class HintedBlocks:
    """The slots whose blocks are evicted first or last.

    Memory: 12 bytes per slot.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        retained: Number of slots that are retained.
    """

    def __init__(self, num_slots: int) -> None:
        """Start without marks, for a primary of `num_slots` slots."""
        self.retained = 0
        self._most = num_slots // _SHARE
        self._lists = NumberLists(num_slots, 2 * _SECONDS)
        self._list_of = integers(num_slots)
        """Slot -> 0 if unmarked, `_FIRST`, or the list that it is retained in, plus `_RETAINED`."""
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
        """Return whether a block is evicted first or last."""
        return self._list_of[slot] != 0

    # -- marks ----------------------------------------------------------------------------------

    def put_first(self, slots: Sequence[int]) -> None:
        """Mark new blocks to be evicted first, in order."""
        for slot in slots:
            self._list_of[slot] = _FIRST
        self._first.append(slots)

    def use(self, slots: Sequence[int], *, is_low: bool) -> None:
        """Unmark blocks that a request has used and that were to be evicted first.

        At low priority they only move behind the others, in order.
        """
        first = [slot for slot in slots if self._list_of[slot] == _FIRST]
        if is_low:
            self._first.move_to_end(first)
        else:
            self._first.remove(first)
            for slot in first:
                self._list_of[slot] = 0

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
                if self._end_of[which] > now_s:
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
            marked = self._list_of[slot]
            if marked == _FIRST:
                self._first.remove([slot])
                self._list_of[slot] = 0
            elif marked:
                self._unlink(slot)

    # -- inspection -----------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """Yield descriptions of the violated invariants."""
        first = list(self._first.walk())
        members = dict.fromkeys(first, _FIRST)
        for which in self._end_of:
            members |= dict.fromkeys(self._lists.walk(which), which + _RETAINED)
        marks = {slot: mark for slot, mark in enumerate(self._list_of) if mark}
        if members != marks:
            yield f"the lists have {members}, the marks are {marks}"
        if self.retained != len(marks) - len(first) or self.retained > self._most:
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
