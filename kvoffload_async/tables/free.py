"""The free numbers below a bound."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain


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
        """Take `count` numbers; there must be that many."""
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
        """Return taken numbers; the last one is handed out first."""
        self._returned.extend(numbers)
        self.count += len(numbers)

    def reset(self, free: Iterable[int]) -> None:
        """Make exactly these numbers free; the last one is handed out first."""
        self._never_taken = self._end
        self._returned = array("i", free)
        self.count = len(self._returned)
