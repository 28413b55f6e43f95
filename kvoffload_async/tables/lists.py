"""Lists of numbers from which any number leaves at once, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

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

    def take_front(self, count: int, which: int = 0) -> list[int]:
        """Take the first numbers out of a list; there must be so many."""
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
        """Put numbers, which are in no list, at the end of one, in their order.

        A range of them, not an empty one, costs next to nothing.
        """
        after, before, ring = self._after, self._before, self._capacity + which
        last = before[ring]
        if isinstance(numbers, range):  # what a store has when it is opened
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
        """Take numbers out of the lists in which they are; none is named twice."""
        if not numbers:
            return
        after, before = self._after, self._before
        # What was put in together leaves together, in the same order or in the opposite one.
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
        """Put numbers, which are in any lists, at the end of one, in their order."""
        after, before, ring = self._after, self._before, self._capacity + which
        following = numbers[0] if numbers else ring
        for number in numbers:
            if number != following:
                self.remove(numbers)
                self.append(numbers, which)
                return
            following = after[number]
        if following != ring:  # neighbours already: the run moves as it is
            first, last = numbers[0], numbers[-1]
            previous = before[first]
            after[previous] = following
            before[following] = previous
            end = before[ring]
            after[end] = first
            before[first] = end
            after[last] = ring
            before[ring] = last
