"""A heap of many integers that the garbage collector does not traverse."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain


class IntegerHeap:
    """A min-heap of 63-bit integers. Memory per integer: 8 bytes.

    The latest integers are in a heap; when there are more than `num_loose`, they become a sorted
    array.
    """

    __slots__ = ("_loose", "_next_run", "_num_loose", "_runs", "_smallest")

    def __init__(self, num_loose: int = 1024) -> None:
        """Start empty."""
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
        """Remove and return the smallest; the heap must not be empty."""
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
