"""A forest whose nodes are numbers."""

from __future__ import annotations

from kvoffload_async.tables.arrays import integers


class NumberForest:
    """Trees of the numbers below `capacity`, in two arrays; each operation takes constant time.

    Where a number leaves, its children are *orphans* until they are taken, attached or detached.

    Bytes per number: 16, once used. The garbage collector traverses none of it.
    """

    __slots__ = ("_after", "_before", "_capacity", "_orphans")

    def __init__(self, capacity: int) -> None:
        """Start with every number as a root."""
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Make every number a root without children."""
        # Children of one parent are a ring with a sentinel, and so are the orphans. A link is one
        # more than the number in it; those of sentinels follow. 0 in `_after`: in no ring.
        self._orphans = 2 * self._capacity + 1
        self._after = integers(self._orphans + 1)
        self._before = integers(self._orphans + 1)

    @property
    def has_orphans(self) -> bool:
        """Whether there are orphans."""
        return self._after[self._orphans] not in {0, self._orphans}

    def attach(self, number: int, parent: int) -> None:
        """Make a number the first child of another one."""
        link, ring = number + 1, self._ring_of(parent)
        if self._before[link] == ring and self._after[link]:
            return
        self.detach(number)
        self._put_front(link, link, ring)

    def detach(self, number: int) -> None:
        """Make a number a root that is no orphan; it keeps its children."""
        link = number + 1
        following, previous = self._after[link], self._before[link]
        if following:
            self._after[previous] = following
            self._before[following] = previous
            self._after[link] = 0

    def leave(self, number: int) -> None:
        """Make a number a root without children; its former children become the first orphans."""
        self.detach(number)
        ring = self._ring_of(number)
        first = self._after[ring]
        if first not in {0, ring}:
            self._put_front(first, self._before[ring], self._orphans)
        self._after[ring] = 0

    def take_orphan(self) -> int | None:
        """Make the first orphan a root and return it; None if there is none."""
        if not self.has_orphans:
            return None
        number = self._after[self._orphans] - 1
        self.detach(number)
        return number

    def _ring_of(self, parent: int) -> int:
        return self._capacity + 1 + parent

    def _put_front(self, first: int, last: int, ring: int) -> None:
        following = self._after[ring] or ring
        self._after[ring], self._before[first] = first, ring
        self._after[last], self._before[following] = following, last
