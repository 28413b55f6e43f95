"""Ranking by groups: the blocks of one class that one request used last are ranked together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from kvoffload_async.policies.reuse import NUM_CLASSES
from kvoffload_async.tables.arrays import integers, long_integers, small_integers
from kvoffload_async.tables.lists import FreeNumbers

Worth = Callable[[int, int], tuple[float, int]]
"""Returns a group's worth from its class and its request's time; the least is evicted first."""

_FIRST: Final = 1
"""The list whose members are evicted first; the lists of groups follow."""
_SKIPPED: Final = -1
_RETURNED: Final = -2
_NUMBER_BITS: Final = 32
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1


class GroupRanking:
    """Ranks the occupied numbers below `capacity` in groups; a group's tail is evicted first.

    Of each class, the oldest and the newest group are compared; so a choice looks at a constant
    number of groups. Members that must stay are skipped until they are released, and keep their
    rank in their group. A group whose members were all skipped returns to the end of its class that
    is nearer to its age.

    A released member returns to an end of its group's list if its rank is beyond all others there;
    else to a heap, from which it moves to the list's tail when the members behind it have left. So
    it takes logarithmic time, in whichever order members are released.

    Bytes per number: 57, once used; while it is in a heap, 48 more, which the garbage collector
    traverses. It traverses none of the rest.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Remove all members."""
        count = self._capacity
        # Entries are one more than the number that they name; 0 names none.
        self._before = integers(count)
        self._after = integers(count)
        self._list_of = integers(count)
        """Number -> its list; 0: none; `_SKIPPED`, or `_RETURNED`: in the heap of its list."""
        self._group_of = integers(count)
        """Number -> list of its group; 0 in the list that is evicted first."""
        self._stamps = long_integers(count)
        """Number -> its rank in its list; the greatest is evicted first."""
        self._last_stamp = 0
        num_lists = count + _FIRST + 1
        self._free = FreeNumbers(count)
        self._heads = integers(num_lists)
        self._tails = integers(num_lists)
        self._sizes = integers(num_lists)
        """Group -> number of its members, skipped ones included."""
        self._kinds = small_integers(num_lists)
        self._times = integers(num_lists)
        self._older = integers(num_lists)
        self._newer = integers(num_lists)
        self._oldest = [0] * NUM_CLASSES
        self._newest = [0] * NUM_CLASSES
        self._returned: dict[int, list[int]] = {}
        """List -> heap of released members that rank before the list's tail, last rank first.

        An entry of a member that was removed is stale, and stays until it is foremost."""
        self.num_skipped = 0

    # -- members --------------------------------------------------------------------------------

    def form(self, kind: int, time: int, numbers: Sequence[int]) -> None:
        """Form a group of one or more numbers that are no members yet, head to tail."""
        group = self._free.take(1)[0] + _FIRST + 1
        self._kinds[group] = kind
        self._times[group] = time
        self._sizes[group] = len(numbers)
        for number in numbers:
            self._group_of[number] = group
        self._append(numbers, group)

    def put_first(self, numbers: Sequence[int]) -> None:
        """Move members from their groups to the list that is evicted first, last member first."""
        self.remove(numbers)
        self._append(numbers, _FIRST)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove members."""
        before, after, list_of = self._before, self._after, self._list_of
        for number in numbers:
            which = list_of[number]
            if which == _SKIPPED:
                self.num_skipped -= 1
            elif which != _RETURNED:
                previous, following = before[number], after[number]
                if previous:
                    after[previous - 1] = following
                else:
                    self._heads[which] = following
                if following:
                    before[following - 1] = previous
                else:
                    self._set_tail(which, previous)
            list_of[number] = 0
            self._leave_group(number)

    def release(self, numbers: Sequence[int]) -> None:
        """Allow skipped members to be chosen again, at their rank; others are ignored."""
        if not self.num_skipped:
            return
        for number in numbers:
            if self._list_of[number] == _SKIPPED:
                self.num_skipped -= 1
                self._insert(number)

    # -- victims --------------------------------------------------------------------------------

    def take(self, count: int, may_leave: Callable[[int], bool], worth: Worth) -> list[int] | None:
        """Remove and return the `count` least worthy members among those that may leave.

        If there are fewer, change nothing and return None.
        """
        chosen = self._choose(count, may_leave, worth, (), [])
        if len(chosen) < count:
            self._restore(chosen)
            return None
        for number in chosen:
            self._list_of[number] = 0
            self._leave_group(number)
        return chosen

    def pick(
        self,
        count: int,
        may_leave: Callable[[int], bool],
        worth: Worth,
        offered: Sequence[tuple[tuple[float, int], int]] = (),
    ) -> tuple[list[int], list[int]]:
        """Choose the `count` least worthy among the members and the offered blocks.

        Nothing changes, except that members that may not leave are skipped.

        Args:
            count: Number of choices; fewer are made if too few members may leave.
            may_leave: Whether a member may be chosen.
            worth: Worth of a group.
            offered: Groups of blocks that are no members, by worth and number of blocks.

        Returns:
            The members, first first, and the number of blocks chosen from each offered group.
        """
        declined = [0] * len(offered)
        chosen = self._choose(count, may_leave, worth, offered, declined)
        self._restore(chosen)
        return chosen, declined

    # -- inspection -----------------------------------------------------------------------------

    def walk(self, worth: Worth) -> Iterator[int]:
        """Yield all members, best victim first. Linear."""
        groups, stamps = self._group_of, self._stamps
        members = [number for number in range(self._capacity) if self._list_of[number]]
        worths: dict[int, tuple[tuple[float, int], int]] = {0: ((-inf, 0), 0)}
        for group in {groups[number] for number in members} - {0}:
            kind = self._kinds[group]
            worths[group] = (worth(kind, self._times[group]), kind)
        yield from sorted(
            members, key=lambda number: (worths[groups[number]], groups[number], -stamps[number])
        )

    def skipped(self) -> Iterator[int]:
        """Yield the skipped members. Linear."""
        return (n for n in range(self._capacity) if self._list_of[n] == _SKIPPED)

    def violations(self) -> Iterator[str]:
        """Yield descriptions of the violated invariants."""
        sizes = [0] * len(self._sizes)
        num_skipped = 0
        for number in range(self._capacity):
            if self._list_of[number]:
                sizes[self._group_of[number]] += 1
                num_skipped += self._list_of[number] == _SKIPPED
        if sizes[_FIRST + 1 :] != list(self._sizes[_FIRST + 1 :]):
            yield "a group has another number of members than counted"
        if self._free.count + sum(map(bool, sizes[_FIRST + 1 :])) != self._capacity:
            yield "a group without members is not free"
        if num_skipped != self.num_skipped:
            yield f"{num_skipped} members are skipped, but {self.num_skipped} counted"
        listed = {group for group, tail in enumerate(self._tails) if tail} - {_FIRST}
        chained: list[int] = []
        for kind in range(NUM_CLASSES):
            group = self._oldest[kind]
            while group:
                chained.append(group)
                group = self._newer[group]
        if any(map(self._is_overdue, self._returned)):
            yield "a released member ranks behind the tail of its list"
        if set(chained) != listed or len(chained) != len(listed):
            yield "the classes have other groups than those with members to choose"

    # -- inside ---------------------------------------------------------------------------------

    def _choose(
        self,
        count: int,
        may_leave: Callable[[int], bool],
        worth: Worth,
        offered: Sequence[tuple[tuple[float, int], int]],
        declined: list[int],
    ) -> list[int]:
        """Unlink and return the chosen members; count chosen offered blocks in `declined`."""
        chosen: list[int] = []
        offers = sorted(((each, i) for i, (each, _) in enumerate(offered)), reverse=True)
        worths = [self._least_of(kind, worth) for kind in range(NUM_CLASSES)]
        while count:
            each, kind, group = min(worths)
            which = _FIRST if self._tails[_FIRST] else group
            if not which:
                break
            if which != _FIRST and offers and offers[-1][0] < each:
                index = offers.pop()[1]
                declined[index] = min(count, offered[index][1])
                count -= declined[index]
                continue
            before = len(chosen)
            self._unlink_tail(which, count, may_leave, chosen)
            count -= len(chosen) - before
            if which != _FIRST and not self._tails[which]:
                worths[kind] = self._least_of(kind, worth)
        return chosen

    def _least_of(self, kind: int, worth: Worth) -> tuple[tuple[float, int], int, int]:
        """Return the worth, class and group of the less worthy of a class's end groups."""
        oldest, newest = self._oldest[kind], self._newest[kind]
        if not oldest:
            return _NO_GROUP
        least = worth(kind, self._times[oldest])
        if newest != oldest:
            other = worth(kind, self._times[newest])
            if other < least:
                return other, kind, newest
        return least, kind, oldest

    def _unlink_tail(
        self, which: int, count: int, may_leave: Callable[[int], bool], chosen: list[int]
    ) -> None:
        """Unlink up to `count` members that may leave from the tail of a list."""
        before, list_of = self._before, self._list_of
        number = self._tails[which]
        heap = self._returned.get(which)
        while number and count:
            if may_leave(number - 1):
                chosen.append(number - 1)
                count -= 1
            else:
                list_of[number - 1] = _SKIPPED
                self.num_skipped += 1
            number = before[number - 1]
            if heap:
                number = self._pull(which, number)
        if number:
            self._after[number - 1] = 0
        else:
            self._heads[which] = 0
        self._set_tail(which, number)

    def _restore(self, chosen: Sequence[int]) -> None:
        """Put members that were unlinked back, in the order that they had."""
        for number in reversed(chosen):
            self._insert(number)

    def _append(self, numbers: Sequence[int], which: int) -> None:
        """Append numbers to a list, behind all ranks given so far."""
        stamps, stamp = self._stamps, self._last_stamp
        for number in numbers:
            stamp += 1
            stamps[number] = stamp
            self._link(number, which, self._tails[which], 0)
        self._last_stamp = stamp

    def _insert(self, number: int) -> None:
        """Link a member into its list at its rank, or put it into the list's heap."""
        stamps, which = self._stamps, self._group_of[number] or _FIRST
        stamp, head, tail = stamps[number], self._heads[which], self._tails[which]
        if not tail or stamps[tail - 1] < stamp:
            self._link(number, which, tail, 0)
        elif stamps[head - 1] > stamp:
            self._link(number, which, 0, head)
        else:
            self._list_of[number] = _RETURNED
            heap = self._returned.setdefault(which, [])
            if len(heap) > 2 * self._capacity:  # half of them are stale
                heap[:] = [entry for entry in heap if self._entry(entry)[0]]
                heapify(heap)
            heappush(heap, number - (stamp << _NUMBER_BITS))

    def _pull(self, which: int, tail: int) -> int:
        """Link the foremost member of a list's heap behind `tail` if it ranks there.

        Returns:
            The tail of the list then.
        """
        heap = self._returned[which]
        while heap:
            stamp, number = self._entry(heap[0])
            if stamp and tail and self._stamps[tail - 1] > stamp:
                return tail
            heappop(heap)
            if stamp:
                self._list_of[number] = which
                self._before[number], self._after[number] = tail, 0
                if tail:
                    self._after[tail - 1] = number + 1
                else:
                    self._heads[which] = number + 1
                return number + 1
        del self._returned[which]
        return tail

    def _is_overdue(self, which: int) -> bool:
        """Return whether the foremost member of a list's heap ranks behind the list's tail."""
        tail = self._tails[which]
        foremost = max((self._entry(entry)[0] for entry in self._returned[which]), default=0)
        return foremost > (self._stamps[tail - 1] if tail else 0)

    def _entry(self, entry: int) -> tuple[int, int]:
        """Return the stamp and the number in a heap's entry; the stamp is 0 if it is stale."""
        number = entry & _NUMBER_MASK
        stamp = (number - entry) >> _NUMBER_BITS
        is_valid = self._list_of[number] == _RETURNED and self._stamps[number] == stamp
        return (stamp if is_valid else 0), number

    def _link(self, number: int, which: int, previous: int, following: int) -> None:
        """Link a number into a list between two others; 0 stands for an end."""
        self._list_of[number] = which
        self._before[number], self._after[number] = previous, following
        if following:
            self._before[following - 1] = number + 1
        else:
            if not previous and which != _FIRST:
                self._enter_class(which)
            self._tails[which] = number + 1
        if previous:
            self._after[previous - 1] = number + 1
        else:
            self._heads[which] = number + 1

    def _set_tail(self, which: int, tail: int) -> None:
        if which in self._returned:
            tail = self._pull(which, tail)
        self._tails[which] = tail
        if not tail and which != _FIRST:
            kind, older, newer = self._kinds[which], self._older[which], self._newer[which]
            if older:
                self._newer[older] = newer
            else:
                self._oldest[kind] = newer
            if newer:
                self._older[newer] = older
            else:
                self._newest[kind] = older

    def _enter_class(self, group: int) -> None:
        kind = self._kinds[group]
        oldest, newest = self._oldest[kind], self._newest[kind]
        if oldest and self._times[group] < self._times[oldest]:
            self._older[group], self._newer[group] = 0, oldest
            self._older[oldest] = group
            self._oldest[kind] = group
            return
        self._older[group], self._newer[group] = newest, 0
        if newest:
            self._newer[newest] = group
        else:
            self._oldest[kind] = group
        self._newest[kind] = group

    def _leave_group(self, number: int) -> None:
        group = self._group_of[number]
        if group:
            self._group_of[number] = 0
            self._sizes[group] -= 1
            if not self._sizes[group]:
                self._free.give_back([group - _FIRST - 1])
                self._returned.pop(group, None)


_NO_GROUP: Final = ((inf, 0), 0, 0)
