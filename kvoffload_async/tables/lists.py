"""Lists of numbers from which any number leaves at once, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvoffload_async.tables.arrays import integers


class NumberLists:
    """`num_lists` lists of the numbers below `capacity`, doubly linked through two arrays.

    A number is in one list at most; who calls knows in which. Bytes a number: 8, in a list or not.
    """

    __slots__ = ("_after", "_before", "_capacity", "_num_lists")

    def __init__(self, capacity: int, num_lists: int = 1) -> None:
        self._capacity = capacity
        self._num_lists = num_lists
        # Each list is a ring through a number of its own, which is no member.
        self._after = integers(capacity + num_lists)
        self._before = integers(capacity + num_lists)
        self.clear()

    def clear(self) -> None:
        """Empty every list."""
        for ring in range(self._capacity, self._capacity + self._num_lists):
            self._after[ring] = self._before[ring] = ring

    def walk(self, which: int = 0) -> Iterator[int]:
        """Yield a list's numbers from its front; nothing may leave or join in the meantime."""
        after, ring = self._after, self._capacity + which
        number = after[ring]
        while number != ring:
            yield number
            number = after[number]

    def find_first(self, count: int, is_wanted: Callable[[int], bool], which: int = 0) -> list[int]:
        """Return the first numbers of a list that are wanted, so many if there are."""
        after, ring = self._after, self._capacity + which
        found: list[int] = []
        number = after[ring]
        while len(found) < count and number != ring:
            if is_wanted(number):
                found.append(number)
            number = after[number]
        return found

    def append(self, numbers: Sequence[int], which: int = 0) -> None:
        """Put numbers, which are in no list, at the end of one, in their order."""
        after, before, ring = self._after, self._before, self._capacity + which
        last = before[ring]
        for number in numbers:
            after[last] = number
            before[number] = last
            last = number
        after[last] = ring
        before[ring] = last

    def remove(self, numbers: Sequence[int]) -> None:
        """Take numbers out of the lists in which they are; none is named twice."""
        if not numbers:
            return
        after = self._after
        # What was put in together leaves together, in the same order or in the opposite one.
        if len(numbers) > 1 and after[numbers[1]] == numbers[0]:
            numbers = numbers[::-1]
        first = last = numbers[0]
        for number in islice(numbers, 1, None):
            if after[last] != number:
                self._remove_run(first, last)
                first = number
            last = number
        self._remove_run(first, last)

    def move_to_end(self, numbers: Sequence[int], which: int = 0) -> None:
        """Put numbers, which are in any lists, at the end of one, in their order."""
        self.remove(numbers)
        self.append(numbers, which)

    def _remove_run(self, first: int, last: int) -> None:
        previous, following = self._before[first], self._after[last]
        self._after[previous] = following
        self._before[following] = previous
