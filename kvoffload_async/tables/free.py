"""Which of the numbers below a bound are free."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain


class FreeNumbers:
    """The free ones of the numbers below `capacity`; at the start all of them.

    Those that were never taken are handed out first, in increasing order, then the one that was
    given back last. Bytes a number that was given back: 4.
    """

    __slots__ = ("_end", "_never_taken", "_returned", "count")

    def __init__(self, capacity: int) -> None:
        self._never_taken = 0
        self._end = capacity
        self._returned = array("i")
        self.count = capacity
        """How many are free."""

    def __iter__(self) -> chain[int]:
        return chain(range(self._never_taken, self._end), self._returned)

    def take(self, count: int) -> list[int]:
        """Take so many; there must be."""
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
        """Give taken ones back, the one to be handed out first at the end."""
        self._returned.extend(numbers)
        self.count += len(numbers)

    def reset(self, free: Iterable[int]) -> None:
        """Make these and no others free, the one to be handed out first at the end."""
        self._never_taken = self._end
        self._returned = array("i", free)
        self.count = len(self._returned)
