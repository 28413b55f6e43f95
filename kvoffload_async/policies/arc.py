"""ARC: balances recency and frequency, and adapts the balance to hits on evicted keys.

Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4, with its names: T1 and T2 hold the resident keys seen once and at least twice, B1 and B2
the *ghosts* of keys evicted from them; L1 = T1 + B1, L2 = T2 + B2; c is the capacity, p the target
size of T1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.tables.arrays import PART_BITS, PART_MASK, Objects, small_integers
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.tables.lists import FreeNumbers, NumberLists
from kvoffload_async.tables.ranked import RankedLists
from kvoffload_async.types import OffloadKey

_ONCE, _AGAIN = range(2)


class ArcPolicy(CachePolicy):
    """ARC: cases I to IV of the paper, key by key, extended for pinned blocks and free slots.

    There are four differences from the paper. REPLACE runs only if no slot is free (a failed write
    frees one while ghosts remain). LRU means the least recent *evictable* key; if a list has none,
    the other list is used. A batch is planned completely before anything changes. Admission is
    separate from eviction, so a list is trimmed after the insertion that overfills it instead of
    before, which drops the same ghosts; a T1 that fills the cache (case IV A, second half) needs no
    special case, because its victim's ghost is dropped.

    Invariants: |T1| + |T2| <= c; |L1| <= c; |L1| + |L2| <= 2c; no key in two lists; 0 <= p <= c.

    Ghosts are numbered below 2c, as slots are below c. Memory per slot: 55 bytes, or about 330 with
    a ghost for each block in the cache.

    Attributes:
        p: Target size of T1 in blocks, fractional.

    Thread: owner.
    """

    name = "arc"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.clear()

    def clear(self) -> None:
        c = self.capacity_blocks
        self.p = 0.0
        self._lists = RankedLists(c, 2)
        """T1 and T2."""
        self._sizes = [0, 0]
        self._list_of = small_integers(c)
        self._keys = Objects()
        self._ghost_lists = NumberLists(2 * c, 2)
        """B1 and B2."""
        self._ghost_sizes = [0, 0]
        self._ghost_list_of = small_integers(2 * c)
        self._ghost_keys = Objects()
        self._ghosts = KeyMap(2 * c)
        self._free_ghosts = FreeNumbers(2 * c)

    def lists(self) -> tuple[tuple[OffloadKey, ...], ...]:
        """Return the keys of T1, T2, B1 and B2, least recent first. For inspection."""
        which = _ONCE, _AGAIN
        resident = [tuple(self._keys.find(self._lists.walk(each))) for each in which]
        ghosts = [tuple(self._ghost_keys.find(self._ghost_lists.walk(each))) for each in which]
        return (*resident, *ghosts)

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        found = self._ghosts.find(incoming)
        if found.count(None) == len(found):
            return self._replace_by_new(len(incoming), count, is_evictable)
        return self._replace_by_any(found, count, is_evictable)

    def _replace_by_new(
        self, num_incoming: int, count: int, is_evictable: Callable[[int], bool]
    ) -> list[int] | None:
        """Evict victims when no incoming key has a ghost: p stays, and T1 grows by each key."""
        lists = self._lists
        up_to_target = min(count, int(self.p) + 1 - (self._sizes[_ONCE] + num_incoming - count))
        if up_to_target <= 0:
            up_to_target = 0
            t1 = lists.take_first(count, is_evictable, _ONCE)
            if t1 is not None:
                self._bury(t1, _ONCE)
                return t1
        t2 = lists.pick(up_to_target, is_evictable, _AGAIN)
        t1 = lists.pick(count - len(t2), is_evictable, _ONCE)
        if len(t1) + len(t2) < count:
            lists.release(t2, _AGAIN)
            t2 = lists.pick(count - len(t1), is_evictable, _AGAIN)
            if len(t1) + len(t2) < count:
                lists.release(t1, _ONCE)
                lists.release(t2, _AGAIN)
                return None
        for victims, which in (t1, _ONCE), (t2, _AGAIN):
            lists.remove(victims)
            self._bury(victims, which)
        return [*t2[:up_to_target], *t1, *t2[up_to_target:]]

    def _replace_by_any(
        self, found: Sequence[int | None], count: int, is_evictable: Callable[[int], bool]
    ) -> list[int] | None:
        """Evict victims when some incoming keys have ghosts, given by `found`, and adapt p."""
        t1 = self._lists.pick(count, is_evictable, _ONCE)
        t2 = self._lists.pick(count, is_evictable, _AGAIN)
        sizes = tuple(zip(self._sizes, self._ghost_sizes, strict=True))
        gone: set[int] = set()
        l1 = _Rehearsal(sizes[_ONCE], t1, self._ghost_lists.walk(_ONCE), gone)
        l2 = _Rehearsal(sizes[_AGAIN], t2, self._ghost_lists.walk(_AGAIN), gone)
        p = self.p
        num_free = len(found) - count
        victims: list[int] = []
        for turn, ghost in enumerate(found):
            side = None
            if ghost is not None and ghost not in gone:
                side = l2 if self._ghost_list_of[ghost] else l1
                p = self._adapted(p, l1.num_ghosts, l2.num_ghosts, in_b1=side is l1)
            if turn >= num_free:
                t1_first = l1.num_resident > p or (side is l2 and l1.num_resident == p)
                victim = _replace(l1, l2) if t1_first else _replace(l2, l1)
                if victim is None:
                    break
                victims.append(victim)
            if side is not None and ghost is not None:
                side.take_ghost(ghost)
                l2.num_resident += 1
            else:
                l1.num_resident += 1
                if len(l1) > self.capacity_blocks:
                    l1.drop_ghost()
                elif len(l1) + len(l2) > 2 * self.capacity_blocks:
                    l2.drop_ghost()
        self._lists.release(t1, _ONCE)
        self._lists.release(t2, _AGAIN)
        if len(victims) < count:
            return None
        self.p = p
        self._lists.remove(victims)
        for which in _ONCE, _AGAIN:
            self._bury([slot for slot in victims if self._list_of[slot] == which], which)
        return victims

    def _adapted(self, p: float, num_b1: int, num_b2: int, *, in_b1: bool) -> float:
        if in_b1:
            return min(p + max(1.0, num_b2 / num_b1), self.capacity_blocks)
        return max(p - max(1.0, num_b1 / num_b2), 0.0)

    def released(self, slots: Sequence[int]) -> None:
        if self._lists.num_met:
            list_of = self._list_of
            for which in _ONCE, _AGAIN:
                self._lists.release((slot for slot in slots if list_of[slot] == which), which)

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self._keys.update(slots, keys)
        found = self._ghosts.find(keys)
        if found.count(None) == len(found):
            self._admit_once(slots)
            return
        once: list[int] = []
        for key, slot, ghost in zip(keys, slots, found, strict=True):
            if ghost is not None:
                self._admit_once(once)
                once = []
                if key in self._ghosts:  # earlier admissions may have dropped it
                    self._ghost_lists.remove([ghost])
                    self._drop([ghost], self._ghost_list_of[ghost])
                    self._join(_AGAIN, [slot])
                    continue
            once.append(slot)
        self._admit_once(once)

    def _admit_once(self, slots: Sequence[int]) -> None:
        """Admit new keys to T1, and trim the lists as if after each key."""
        self._join(_ONCE, slots)
        (t1, t2), (b1, b2) = self._sizes, self._ghost_sizes
        surplus = t1 + b1 - self.capacity_blocks
        if surplus > 0:
            self._drop(self._ghost_lists.take_front(surplus, _ONCE), _ONCE)
            b1 -= surplus
        surplus = t1 + b1 + t2 + b2 - 2 * self.capacity_blocks
        if surplus > 0:
            self._drop(self._ghost_lists.take_front(surplus, _AGAIN), _AGAIN)

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        list_of = self._list_of
        once: list[int] = []
        again: list[int] = []
        for slot, is_reused in zip(reversed(slots), reversed(reused), strict=True):
            if list_of[slot] == _AGAIN:
                again.append(slot)
            elif is_reused:
                list_of[slot] = _AGAIN
                again.append(slot)
                self._sizes[_ONCE] -= 1
                self._sizes[_AGAIN] += 1
            else:
                once.append(slot)
        self._lists.move_to_end(once, _ONCE)
        self._lists.move_to_end(again, _AGAIN)

    def discard(self, slots: Sequence[int]) -> None:
        self._lists.remove(slots)
        for slot in slots:
            self._sizes[self._list_of[slot]] -= 1

    def resident(self) -> Iterable[int]:
        num_above_target = max(0, self._sizes[_ONCE] - int(self.p))
        t1 = list(self._lists.walk(_ONCE))
        t2 = self._lists.walk(_AGAIN)
        return tuple(chain(t1[:num_above_target], t2, t1[num_above_target:]))

    def skipped(self) -> Iterable[int]:
        return tuple(self._lists.skipped())

    def violations(self) -> Iterable[str]:
        c = self.capacity_blocks
        (t1, t2), (b1, b2) = self._sizes, self._ghost_sizes
        if t1 + t2 > c or t1 + b1 > c or t1 + t2 + b1 + b2 > 2 * c or not 0 <= self.p <= c:
            yield f"|T1|={t1} |T2|={t2} |B1|={b1} |B2|={b2} p={self.p} c={c}"
        lists = self.lists()
        if list(map(len, lists)) != [t1, t2, b1, b2]:
            yield f"the lists have {list(map(len, lists))} members, not {[t1, t2, b1, b2]}"
        if len(set(chain(*lists))) != sum(map(len, lists)):
            yield "a key is in two lists"
        for which, ghosts in enumerate(lists[2:]):
            if self._ghosts.find(ghosts) != list(self._ghost_lists.walk(which)):
                yield "a ghost is not found by its key"
        yield from self._lists.violations()

    # -- the four lists -------------------------------------------------------------------------

    def _join(self, which: int, slots: Sequence[int]) -> None:
        self._lists.append(slots, which)
        self._sizes[which] += len(slots)
        list_of = self._list_of
        for slot in slots:
            list_of[slot] = which

    def _bury(self, slots: Sequence[int], which: int) -> None:
        """Turn blocks evicted from a list into ghosts."""
        if not slots:
            return
        ghosts = self._free_ghosts.take(len(slots))
        keys = self._keys.find(slots)
        parts, list_of = self._ghost_keys.parts, self._ghost_list_of
        for key, ghost in zip(keys, ghosts, strict=True):
            parts[ghost >> PART_BITS][ghost & PART_MASK] = key
            list_of[ghost] = which
        self._ghosts.update(keys, ghosts)
        self._ghost_lists.append(ghosts, which)
        self._sizes[which] -= len(slots)
        self._ghost_sizes[which] += len(slots)

    def _drop(self, ghosts: Sequence[int], which: int) -> None:
        """Drop ghosts of a list."""
        self._ghost_sizes[which] -= len(ghosts)
        self._ghosts.discard(self._ghost_keys.find(ghosts))
        self._free_ghosts.give_back(ghosts)


class _Rehearsal:
    """L1 or L2 during the planning of a batch; the lists themselves do not change.

    Attributes:
        gone: Ghosts taken or dropped by the batch, of either list.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        victims: Iterable[int],
        ghosts: Iterable[int],
        gone: set[int],
    ) -> None:
        """Start with the current sizes, and the evictable victims and ghosts in order of rank."""
        self.num_resident, self.num_ghosts = sizes
        self._victims = iter(victims)
        self.gone = gone
        self._droppable = (ghost for ghost in ghosts if ghost not in gone)

    def __len__(self) -> int:
        return self.num_resident + self.num_ghosts

    def evict(self) -> int | None:
        victim = next(self._victims, None)
        if victim is not None:
            self.num_resident -= 1
            self.num_ghosts += 1
        return victim

    def take_ghost(self, ghost: int) -> None:
        self.num_ghosts -= 1
        self.gone.add(ghost)

    def drop_ghost(self) -> None:
        self.num_ghosts -= 1
        # If none is left, the batch's own victim becomes the dropped ghost, which needs no record.
        self.gone.update(islice(self._droppable, 1))


def _replace(preferred: _Rehearsal, other: _Rehearsal) -> int | None:
    victim = preferred.evict()
    return other.evict() if victim is None else victim
