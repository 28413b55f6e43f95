"""Numbers below a bound: the free ones, and linked lists with removal in constant time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from kvoffload_async.tables.arrays import integers


class NumberLists:
    """`num_lists` lists of the numbers below `capacity`, doubly linked through two arrays.

    A number is in at most one list; the caller knows in which. Bytes per number: 8, in a list or
    not.
    """

    __slots__ = ("_after", "_before", "_capacity", "_num_lists")

    def __init__(self, capacity: int, num_lists: int = 1) -> None:
        self._capacity = capacity
        self._num_lists = num_lists
        # Each list is a ring with a sentinel number.
        self._after = integers(capacity + num_lists)
        self._before = integers(capacity + num_lists)
        self.clear()

    def clear(self) -> None:
        """Empty all lists."""
        for ring in range(self._capacity, self._capacity + self._num_lists):
            self._after[ring] = self._before[ring] = ring

    def walk(self, which: int = 0) -> Iterator[int]:
        """Yield a list's numbers from its front; the list must not change meanwhile."""
        after, ring = self._after, self._capacity + which
        number = after[ring]
        while number != ring:
            yield number
            number = after[number]

    def take_front(self, count: int, which: int = 0) -> list[int]:
        """Remove and return the first `count` numbers of a list, which must have that many."""
        after, ring = self._after, self._capacity + which
        taken: list[int] = []
        number = after[ring]
        for _ in range(count):
            taken.append(number)
            number = after[number]
        after[ring] = number
        self._before[number] = ring
        return taken

    def append(self, numbers: Sequence[int], which: int = 0) -> None:
        """Append numbers that are in no list, in order.

        A non-empty range is appended by array operations, at almost no cost.
        """
        after, before, ring = self._after, self._before, self._capacity + which
        last = before[ring]
        if isinstance(numbers, range):  # a store's contents at opening
            first, stop = numbers.start, numbers.stop
            after[last], before[first] = first, last
            after[first : stop - 1] = np.arange(first + 1, stop, dtype=np.intc).data
            before[first + 1 : stop] = np.arange(first, stop - 1, dtype=np.intc).data
            numbers, last = (), stop - 1
        for number in numbers:
            after[last] = number
            before[number] = last
            last = number
        after[last] = ring
        before[ring] = last

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove distinct numbers from their lists."""
        if not numbers:
            return
        after, before = self._after, self._before
        # Numbers added together are usually removed together, in the same or opposite order.
        if len(numbers) > 1 and after[numbers[1]] == numbers[0]:
            numbers = numbers[::-1]
        previous = before[numbers[0]]
        following = numbers[0]
        for number in numbers:
            if following != number:  # a run has ended
                after[previous] = following
                before[following] = previous
                previous = before[number]
            following = after[number]
        after[previous] = following
        before[following] = previous

    def move_to_end(self, numbers: Sequence[int], which: int = 0) -> None:
        """Move numbers from any lists to the end of one, in order."""
        after, before, ring = self._after, self._before, self._capacity + which
        following = numbers[0] if numbers else ring
        for number in numbers:
            if number != following:
                self.remove(numbers)
                self.append(numbers, which)
                return
            following = after[number]
        if following != ring:  # already adjacent: move the whole run
            first, last = numbers[0], numbers[-1]
            previous = before[first]
            after[previous] = following
            before[following] = previous
            end = before[ring]
            after[end] = first
            before[first] = end
            after[last] = ring
            before[ring] = last


class FreeNumbers:
    """The free numbers below `capacity`; initially all of them.

    Numbers never taken are handed out first, in increasing order, then the one returned last.
    Memory per returned number: 4 bytes.
    """

    __slots__ = ("_end", "_never_taken", "_returned", "count")

    def __init__(self, capacity: int) -> None:
        self._never_taken = 0
        self._end = capacity
        self._returned = array("i")
        self.count = capacity
        """Number of free numbers."""

    def __iter__(self) -> chain[int]:
        return chain(range(self._never_taken, self._end), self._returned)

    def take(self, count: int) -> list[int]:
        """Take `count` free numbers; there must be that many."""
        self.count -= count
        numbers: list[int] = []
        start = self._never_taken
        if start < self._end:
            self._never_taken = min(self._end, start + count)
            numbers += range(start, self._never_taken)
            count -= len(numbers)
        if count:
            numbers += self._returned[: -count - 1 : -1]
            del self._returned[-count:]
        return numbers

    def give_back(self, numbers: Sequence[int]) -> None:
        """Give back taken numbers; the last one is handed out first."""
        self._returned.extend(numbers)
        self.count += len(numbers)

    def reset(self, free: Iterable[int]) -> None:
        """Make exactly these numbers free; the last one is handed out first."""
        self._never_taken = self._end
        self._returned = array("i", free)
        self.count = len(self._returned)
