"""A forest of numbers: which number follows which."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvoffload_async.tables.arrays import integers


class NumberForest:
    """Trees of the numbers below `capacity`, linked through four arrays.

    Bytes per number: 16, once used. The garbage collector traverses none of it.
    """

    __slots__ = ("_capacity", "_child", "_next", "_parent", "_previous")

    def __init__(self, capacity: int) -> None:
        """Start with roots only."""
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Make every number a root without children."""
        # Entries are one more than the number that they name; 0 names none.
        self._parent = integers(self._capacity)
        self._child = integers(self._capacity)
        self._next = integers(self._capacity)
        self._previous = integers(self._capacity)

    def parent(self, number: int) -> int | None:
        """Return a number's parent, None for a root."""
        return self._parent[number] - 1 if self._parent[number] else None

    def children(self, number: int) -> list[int]:
        """Return a number's children, the one attached last first."""
        found: list[int] = []
        child = self._child[number]
        while child:
            found.append(child - 1)
            child = self._next[child - 1]
        return found

    def attach(self, number: int, parent: int) -> None:
        """Make a number a child of another one."""
        if self._parent[number] == parent + 1:
            return
        self.detach(number)
        first = self._child[parent]
        self._parent[number] = parent + 1
        self._next[number] = first
        self._previous[number] = 0
        if first:
            self._previous[first - 1] = number + 1
        self._child[parent] = number + 1

    def detach(self, number: int) -> None:
        """Make a number a root; its children stay its children."""
        parent = self._parent[number]
        if not parent:
            return
        following, previous = self._next[number], self._previous[number]
        if previous:
            self._next[previous - 1] = following
        else:
            self._child[parent - 1] = following
        if following:
            self._previous[following - 1] = previous
        self._parent[number] = 0

    def remove(self, number: int) -> list[int]:
        """Make a number and its children roots; return the children."""
        self.detach(number)
        children = self.children(number)
        for child in children:
            self._parent[child] = 0
        self._child[number] = 0
        return children

    def below(
        self, numbers: Iterable[int], gone: Iterable[int], is_end: Callable[[int], bool]
    ) -> list[int]:
        """Return numbers and their descendants, each once, parents before children.

        Args:
            numbers: The numbers.
            gone: Numbers to leave out.
            is_end: Whether to leave a number out, with its descendants.
        """
        seen = set(gone)
        found: list[int] = []
        stack = list(numbers)
        while stack:
            number = stack.pop()
            if number in seen or is_end(number):
                continue
            seen.add(number)
            found.append(number)
            if self._child[number]:
                stack += self.children(number)
        return found
