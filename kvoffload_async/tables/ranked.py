"""Lists in order of rank, from which the first evictable members are taken.

Released members are found by a heap of integers; the garbage collector does not traverse lists or
heap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import Final

from kvoffload_async.tables.arrays import MAX_NUMBERS, integers
from kvoffload_async.tables.lists import NumberLists


class IntegerHeap:
    """A min-heap of 63-bit integers. Memory per integer: 8 bytes.

    The latest integers are in a heap; when there are more than `num_loose`, they become a sorted
    array.
    """

    __slots__ = ("_loose", "_next_run", "_num_loose", "_runs", "_smallest")

    def __init__(self, num_loose: int = 1024) -> None:
        """Create an empty heap."""
        self._num_loose = num_loose
        self._next_run = 0
        self.clear()

    def __bool__(self) -> bool:
        return bool(self._loose or self._smallest)

    def __iter__(self) -> Iterator[int]:
        return chain(self._loose, *self._runs.values())

    def clear(self) -> None:
        """Remove all integers."""
        self._loose: list[int] = []
        self._runs: dict[int, array[int]] = {}
        """Number of a run -> its remaining integers, smallest last."""
        self._smallest: list[tuple[int, int]] = []
        """A heap of each run's smallest integer, with the run's number."""

    def push(self, value: int) -> None:
        """Add an integer."""
        loose = self._loose
        heappush(loose, value)
        if len(loose) > self._num_loose:
            run = array("q", sorted(loose, reverse=True))
            loose.clear()
            self._runs[self._next_run] = run
            heappush(self._smallest, (run[-1], self._next_run))
            self._next_run += 1

    def pop(self) -> int:
        """Remove and return the smallest integer; the heap must not be empty."""
        loose, smallest = self._loose, self._smallest
        if not smallest or (loose and loose[0] < smallest[0][0]):
            return heappop(loose)
        value, number = smallest[0]
        run = self._runs[number]
        run.pop()
        if run:
            heapreplace(smallest, (run[-1], number))
        else:
            heappop(smallest)
            del self._runs[number]
        return value


_NUMBER_BITS: Final = MAX_NUMBERS.bit_length() - 1
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1


class RankedLists(NumberLists):
    """`NumberLists` that pick members from the front, skipping those that must stay for now.

    A member that must stay is *skipped*: it keeps its rank, but is not checked again until it is
    released (or moved, or added again). So a member is checked at most as often as it is added,
    moved or released, regardless of the number of members that must stay.

    Checked members are in a second list, before the rest, with stamps ascending by rank; released
    ones are also in a heap by stamp. Bytes per number: 12, and 8 more while in the heap.
    """

    __slots__ = ("_heaps", "_last_stamp", "_max_stamp", "_num_ranked", "_stamps", "num_met")

    def __init__(
        self, capacity: int, num_lists: int = 1, *, max_stamp: int = (1 << 31) - 1
    ) -> None:
        """Create empty lists; renumber stamps at `max_stamp`, which is at least the capacity."""
        self._num_ranked = num_lists
        self._max_stamp = max_stamp
        super().__init__(capacity, 2 * num_lists)

    def clear(self) -> None:
        super().clear()
        self._stamps = integers(self._capacity)
        """Number -> 0 if not checked, the stamp if skipped, the negated stamp if released."""
        self._last_stamp = 0
        self._heaps = [IntegerHeap() for _ in range(self._num_ranked)]
        self.num_met = 0
        """Number of checked members; none is skipped while this is 0."""

    def walk(self, which: int = 0) -> Iterator[int]:
        return chain(super().walk(which + self._num_ranked), super().walk(which))

    def pick(self, count: int, may_leave: Callable[[int], bool], which: int = 0) -> list[int]:
        """Return the first members that may leave, at most `count`.

        They remain in the list: the caller must remove or release them next.
        """
        return self._pick(count, may_leave, which)[0]

    def take_first(
        self, count: int, may_leave: Callable[[int], bool], which: int = 0
    ) -> list[int] | None:
        """Remove the first `count` members that may leave; None, and no change, if fewer may."""
        taken, following = self._pick(count, may_leave, which)
        if len(taken) < count:
            self.release(taken, which)
            return None
        if following is None:
            self.remove(taken)
        else:
            ring = self._capacity + which
            self._after[ring] = following
            self._before[following] = ring
        return taken

    def release(self, numbers: Iterable[int], which: int = 0) -> None:
        """Allow skipped members to be checked again, at their rank; others are ignored."""
        if not self.num_met:
            return
        stamps, heap = self._stamps, self._heaps[which]
        for number in numbers:
            stamp = stamps[number]
            if stamp > 0:
                stamps[number] = -stamp
                heap.push(stamp << _NUMBER_BITS | number)

    def remove(self, numbers: Sequence[int]) -> None:
        if self.num_met:
            self._forget(numbers)
        NumberLists.remove(self, numbers)  # super() would take longer than removing a few numbers

    def move_to_end(self, numbers: Sequence[int], which: int = 0) -> None:
        if self.num_met:
            self._forget(numbers)
        NumberLists.move_to_end(self, numbers, which)

    def skipped(self) -> Iterator[int]:
        """Yield the skipped members. For inspection."""
        for which in range(self._num_ranked):
            for number in super().walk(which + self._num_ranked):
                if self._stamps[number] > 0:
                    yield number

    def violations(self) -> Iterator[str]:
        """Yield descriptions of the violated invariants."""
        num_met = 0
        for which in range(self._num_ranked):
            met = [self._stamps[number] for number in super().walk(which + self._num_ranked)]
            ascending = list(map(abs, met))
            if 0 in met or sorted(set(ascending)) != ascending:
                yield f"the stamps of list {which} do not ascend: {met}"
            if any(self._stamps[number] for number in super().walk(which)):
                yield f"a member of list {which} has a stamp, but was not checked"
            waiting = {entry >> _NUMBER_BITS for entry in self._heaps[which]}
            if not waiting.issuperset(-stamp for stamp in met if stamp < 0):
                yield f"a released member of list {which} is not in the heap"
            num_met += len(met)
        if num_met != self.num_met:
            yield f"{num_met} members were checked, but {self.num_met} counted"

    # -- internal -------------------------------------------------------------------------------

    def _pick(
        self, count: int, may_leave: Callable[[int], bool], which: int
    ) -> tuple[list[int], int | None]:
        """Like `pick`; also return the next member if exactly those before it were picked."""
        picked: list[int] = []
        if self.num_met and self._heaps[which]:
            self._pick_released(picked, count, may_leave, which)
        already = len(picked)
        num_missing = count - already
        after, ring = self._after, self._capacity + which
        number = after[ring]
        while num_missing and number != ring and may_leave(number):
            picked.append(number)
            num_missing -= 1
            number = after[number]
        if not num_missing or number == ring:
            return picked, None if already else number
        met = [*picked[already:], number]  # ends with the first that must stay
        number = after[number]
        while num_missing and number != ring:
            met.append(number)
            if may_leave(number):
                picked.append(number)
                num_missing -= 1
            number = after[number]
        self._skip(met, number, which)
        return picked, None

    def _pick_released(
        self, picked: list[int], count: int, may_leave: Callable[[int], bool], which: int
    ) -> None:
        stamps, heap = self._stamps, self._heaps[which]
        while heap and len(picked) < count:
            entry = heap.pop()
            number, stamp = entry & _NUMBER_MASK, entry >> _NUMBER_BITS
            if stamps[number] == -stamp:  # else it was moved or removed since
                stamps[number] = stamp
                if may_leave(number):
                    picked.append(number)

    def _skip(self, met: Sequence[int], following: int, which: int) -> None:
        """Move the entries just scanned, those before `following`, to the end of the checked list.

        Includes those that may leave: if they stay after all, they are released and keep their
        rank.
        """
        if self._last_stamp + len(met) > self._max_stamp:
            self._begin_stamps_anew()
        ring = self._capacity + which
        self._after[ring] = following
        self._before[following] = ring
        self.append(met, which + self._num_ranked)
        stamps, stamp = self._stamps, self._last_stamp
        for number in met:
            stamp += 1
            stamps[number] = stamp
        self._last_stamp = stamp
        self.num_met += len(met)

    def _begin_stamps_anew(self) -> None:
        stamps, last = self._stamps, 0
        for which, heap in enumerate(self._heaps):
            heap.clear()
            for number in super().walk(which + self._num_ranked):
                last += 1
                is_released = stamps[number] < 0
                stamps[number] = -last if is_released else last
                if is_released:
                    heap.push(last << _NUMBER_BITS | number)
        self._last_stamp = last

    def _forget(self, numbers: Sequence[int]) -> None:
        """Reset the stamps of members that leave or move."""
        stamps = self._stamps
        for number in numbers:
            if stamps[number]:
                stamps[number] = 0
                self.num_met -= 1
