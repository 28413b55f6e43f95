"""Which slots are free, as runs: who asks for many gets neighbours where there are some."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload_async.tiers.slab.places import Place, segment_of


class FreeRuns:
    """The free places, in maximal runs of neighbours.

    Runs are kept in classes by the power of two below their length, so that taking and giving
    back cost the same however many there are.
    """

    def __init__(self) -> None:
        self._length_at: dict[Place, int] = {}
        """First place of a run -> its length."""
        self._first_before: dict[Place, Place] = {}
        """Place behind a run -> its first."""
        self._classes: dict[int, dict[Place, None]] = {}
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

    def take(self, count: int) -> list[Place]:
        """Take places: one run that is long enough if there is one, else the longest; ascending.

        Raises:
            ValueError: There are not that many.
        """
        if count > self._num_free:
            raise ValueError(f"{count} places are wanted, {self._num_free} are free")
        taken: list[Place] = []
        while count:
            first = self._best_for(count)
            length = self._length_at[first]
            used = min(length, count)
            self._remove(first)
            if used < length:
                self._add(first + used, length - used)
            taken += range(first, first + used)
            count -= used
            self._num_free -= used
        taken.sort()
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
        """Return the first place of a run that is surely long enough, or else of a longest one.

        Longest up to its class: within a factor of two.
        """
        wanted = (count - 1).bit_length()
        longer = [level for level in self._classes if level >= wanted]
        level = min(longer) if longer else max(self._classes)
        return next(iter(self._classes[level]))

    def _add(self, first: Place, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        self._classes.setdefault(length.bit_length() - 1, {})[first] = None

    def _remove(self, first: Place) -> None:
        length = self._length_at.pop(first)
        del self._first_before[first + length]
        level = length.bit_length() - 1
        members = self._classes[level]
        del members[first]
        if not members:
            del self._classes[level]
