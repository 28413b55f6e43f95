"""Which slots are free, as runs: who asks for many gets neighbours where there are some."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from kvoffload_async.tiers.slab.places import Place, place_of, segment_of, slot_of

_EXACT: Final = 64
"""Up to this length, runs are told apart exactly; above, by the power of two below it."""

_MUCH_LONGER: Final = 4
"""How many times as long as wanted a run is of which it does not matter what is left."""


class FreeRuns:
    """The free places, in maximal runs of neighbours.

    Who takes gets the lowest run that is long enough: in address order, what is left over stays
    together, where the shortest that fits leaves ever smaller scraps (P. R. Wilson et al.,
    "Dynamic Storage Allocation: A Survey", 1995, section 3.5). Runs are kept in classes by length,
    so that taking and giving back cost about the same however many there are.

    Lowest is the lowest slot of any segment, not the lowest segment: so what is taken one after
    the other lies in different files, which can be written at once.
    """

    def __init__(self, extent: int) -> None:
        """Start without a place.

        Args:
            extent: How many neighbours are worth having; who takes more gets extents of so many.
        """
        self._extent = extent
        self._length_at: dict[Place, int] = {}
        """First place of a run -> its length."""
        self._first_before: dict[Place, Place] = {}
        """Place behind a run -> its first."""
        self._classes: dict[int, _Class] = {}
        self._num_free = 0

    def __len__(self) -> int:
        return self._num_free

    def runs(self) -> Iterator[tuple[Place, int]]:
        """Yield every run as its first place and its length, in no order."""
        yield from self._length_at.items()

    def free(self, first: Place, count: int = 1) -> None:
        """Give back a run of places that is not free."""
        self._num_free += count
        behind = first + count
        before = self._first_before.get(first)
        if before is not None:
            self._remove(before)
            first = before
        if behind in self._length_at:
            length = self._length_at[behind]
            self._remove(behind)
            behind += length
        self._add(first, behind - first)

    def has_run(self, count: int) -> bool:
        """Tell whether there surely is a run of so many, or of an extent if that is less."""
        return max(self._classes, default=0) >= _least_class(min(count, self._extent))

    def take(self, count: int) -> list[Place]:
        """Take places: for each extent a run that is long enough if there is one, else the longest.

        Of a run that is not much longer, what begins at a multiple of the count: so jobs of one
        size leave nothing between them.

        Returns:
            The places; those of each extent ascend.

        Raises:
            ValueError: There are not that many.
        """
        if count > self._num_free:
            raise ValueError(f"{count} places are wanted, {self._num_free} are free")
        taken: list[Place] = []
        while count:
            wanted = min(count, self._extent)
            first = self._best_for(wanted)
            length = self._length_at[first]
            used = min(length, wanted)
            start = first
            if length < _MUCH_LONGER * used and -first % used + used <= length:
                start += -first % used
            self._remove(first)
            if start > first:
                self._add(first, start - first)
            if start + used < first + length:
                self._add(start + used, first + length - start - used)
            taken += range(start, start + used)
            count -= used
            self._num_free -= used
        for begin in range(0, len(taken), self._extent):
            taken[begin : begin + self._extent] = sorted(taken[begin : begin + self._extent])
        return taken

    def drop_segment(self, segment: int) -> int:
        """Forget the free places of a segment; return how many they were."""
        gone = [first for first in self._length_at if segment_of(first) == segment]
        count = 0
        for first in gone:
            count += self._length_at[first]
            self._remove(first)
        self._num_free -= count
        return count

    def _best_for(self, count: int) -> Place:
        """Return the first place of the lowest run that is surely long enough, or of a longest one.

        Longest up to its class: within a factor of two.
        """
        least = _least_class(count)
        fitting = [runs.lowest() for number, runs in self._classes.items() if number >= least]
        return _swapped(min(fitting) if fitting else self._classes[max(self._classes)].lowest())

    def _add(self, first: Place, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        number = _class_of(length)
        runs = self._classes.get(number)
        if runs is None:
            runs = self._classes[number] = _Class()
        runs.add(_swapped(first))

    def _remove(self, first: Place) -> None:
        length = self._length_at.pop(first)
        del self._first_before[first + length]
        number = _class_of(length)
        runs = self._classes[number]
        runs.firsts.discard(_swapped(first))
        if not runs.firsts:
            del self._classes[number]


class _Class:
    """Runs of about one length; the lowest is found fast.

    Attributes:
        firsts: Their first places, swapped.
    """

    __slots__ = ("_heap", "firsts")

    def __init__(self) -> None:
        self.firsts: set[int] = set()
        self._heap: list[int] = []
        """These, and some that have gone."""

    def add(self, first: int) -> None:
        """Add a run."""
        self.firsts.add(first)
        heapq.heappush(self._heap, first)
        if len(self._heap) > 2 * len(self.firsts) + _EXACT:
            self._heap = sorted(self.firsts)

    def lowest(self) -> int:
        """Return the lowest of them; there is one."""
        while self._heap[0] not in self.firsts:
            heapq.heappop(self._heap)
        return self._heap[0]


def _swapped(place: int) -> int:
    """Return a place with its segment in the lower bits, or that place again."""
    return place_of(slot_of(place), segment_of(place))


def _class_of(length: int) -> int:
    return length if length <= _EXACT else _EXACT + length.bit_length() - _EXACT.bit_length()


def _least_class(count: int) -> int:
    """Return the lowest class of which every run has so many places."""
    return count if count <= _EXACT else _class_of(count - 1) + 1
