"""ARC: recency and frequency in balance, a balance that its own regrets adjust.

Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. Its names are kept: T1 and T2 hold the resident keys seen once and at least twice, B1 and
B2 the *ghosts* of those that left them; L1 = T1 + B1, L2 = T2 + B2; c is the capacity, p the size
at which T1 is aimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.tables.arrays import objects, small_integers
from kvoffload_async.tables.free import FreeNumbers
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.tables.lists import NumberLists
from kvoffload_async.types import OffloadKey

_T1, _T2, _B1, _B2 = range(4)
_GHOSTS_OF = {_T1: _B1, _T2: _B2}


class ArcPolicy(CachePolicy):
    """The paper's cases I to IV, key by key, where evicting is not always possible or needed.

    Four things differ from the paper's cache. REPLACE runs only when no slot is free (a failed
    write frees one while ghosts remain). LRU means the least recent *evictable* key, and a list
    without one leaves it to the other, whichever that is. A batch is planned whole before
    anything changes. Keys are admitted apart from their eviction, so a list is trimmed after the
    insertion that overfills it and not before, which drops the same ghosts; a T1 that fills the
    cache (case IV A, second half) needs no case of its own, as its victim's ghost is the one to go.

    Always: |T1| + |T2| <= c; |L1| <= c; |L1| + |L2| <= 2c; no key in two lists; 0 <= p <= c.

    Inside, a ghost has a number like a slot has, from c on. Bytes a slot: 51, and with a ghost for
    each block in the cache about 330.

    Attributes:
        p: Target size of `t1`, in blocks and fractions of one.

    Thread: owner.
    """

    name = "arc"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.clear()

    def clear(self) -> None:
        c = self.capacity_blocks
        self.p = 0.0
        self._lists = NumberLists(3 * c, 4)
        self._sizes = [0, 0, 0, 0]
        self._list_of = small_integers(3 * c)
        self._keys = objects(3 * c)
        self._ghosts = KeyMap(2 * c)
        self._free_ghosts = FreeNumbers(2 * c, first=c)

    @property
    def t1(self) -> Sequence[OffloadKey]:
        """Seen once. This and the others: copies, least recent first. For inspection."""
        return self._keys_in(_T1)

    @property
    def t2(self) -> Sequence[OffloadKey]:
        """Seen at least twice."""
        return self._keys_in(_T2)

    @property
    def b1(self) -> Sequence[OffloadKey]:
        """Ghosts of `t1`."""
        return self._keys_in(_B1)

    @property
    def b2(self) -> Sequence[OffloadKey]:
        """Ghosts of `t2`."""
        return self._keys_in(_B2)

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        found = self._ghosts.find(incoming)
        victims: list[int] | None
        if found.count(None) == len(found):
            victims = self._replace_by_new(len(incoming), count, is_evictable)
        else:
            victims = self._replace_by_any(found, count, is_evictable)
        if victims is not None:
            self._bury(victims)
        return victims

    def _replace_by_new(
        self, num_incoming: int, count: int, is_evictable: Callable[[int], bool]
    ) -> list[int] | None:
        """Choose victims where no incoming key has a ghost: p stays, and T1 grows by each."""
        t1 = filter(is_evictable, self._lists.walk(_T1))
        t2 = filter(is_evictable, self._lists.walk(_T2))
        len_t1 = self._sizes[_T1] + num_incoming - count
        up_to_target = min(count, max(0, int(self.p) + 1 - len_t1))
        victims = list(islice(t2, up_to_target))
        victims += islice(t1, count - len(victims))
        victims += islice(t2, count - len(victims))
        return victims if len(victims) == count else None

    def _replace_by_any(
        self, found: Sequence[int | None], count: int, is_evictable: Callable[[int], bool]
    ) -> list[int] | None:
        """Choose victims for keys of which these are the ghosts, and adapt p."""
        gone: set[int] = set()
        l1 = _Rehearsal(self._sizes, self._lists, _T1, is_evictable, gone)
        l2 = _Rehearsal(self._sizes, self._lists, _T2, is_evictable, gone)
        p = self.p
        num_free = len(found) - count
        victims: list[int] = []
        for turn, ghost in enumerate(found):
            side = None
            if ghost is not None and ghost not in gone:
                side = l1 if self._list_of[ghost] == _B1 else l2
            if side is l1:
                p = min(p + max(1.0, l2.num_ghosts / l1.num_ghosts), self.capacity_blocks)
            elif side is l2:
                p = max(p - max(1.0, l1.num_ghosts / l2.num_ghosts), 0.0)
            if turn >= num_free:
                t1_first = l1.num_resident > p or (side is l2 and l1.num_resident == p)
                victim = _replace(l1, l2) if t1_first else _replace(l2, l1)
                if victim is None:
                    return None
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
        self.p = p
        return victims

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        key_of = self._keys
        for key, slot in zip(keys, slots, strict=True):
            key_of[slot] = key
        found = self._ghosts.find(keys)
        if found.count(None) == len(found):
            self._admit_once(slots)
            return
        once: list[int] = []
        for key, slot, ghost in zip(keys, slots, found, strict=True):
            if ghost is not None:
                self._admit_once(once)
                once = []
                if key in self._ghosts:  # those admitted just now may have pushed it out
                    self._drop([ghost], self._list_of[ghost])
                    self._join(_T2, [slot])
                    continue
            once.append(slot)
        self._admit_once(once)

    def _admit_once(self, slots: Sequence[int]) -> None:
        """Admit to T1, and trim as if after each one."""
        self._join(_T1, slots)
        t1, t2, b1, b2 = self._sizes
        from_b1 = max(0, t1 + b1 - self.capacity_blocks)
        from_b2 = max(0, t1 + b1 + t2 + b2 - from_b1 - 2 * self.capacity_blocks)
        for which, count in ((_B1, from_b1), (_B2, from_b2)):
            if count:
                self._drop(list(islice(self._lists.walk(which), count)), which)

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        list_of = self._list_of
        once: list[int] = []
        again: list[int] = []
        for slot, is_reused in zip(reversed(slots), reversed(reused), strict=True):
            if list_of[slot] == _T2:
                again.append(slot)
            elif is_reused:
                list_of[slot] = _T2
                again.append(slot)
                self._sizes[_T1] -= 1
                self._sizes[_T2] += 1
            else:
                once.append(slot)
        self._lists.move_to_end(once, _T1)
        self._lists.move_to_end(again, _T2)

    def discard(self, slots: Sequence[int]) -> None:
        self._lists.remove(slots)
        for slot in slots:
            self._sizes[self._list_of[slot]] -= 1

    def resident(self) -> Iterable[int]:
        num_above_target = max(0, self._sizes[_T1] - int(self.p))
        t1 = list(self._lists.walk(_T1))
        return tuple(chain(t1[:num_above_target], self._lists.walk(_T2), t1[num_above_target:]))

    def violations(self) -> Iterable[str]:
        c = self.capacity_blocks
        t1, t2, b1, b2 = self._sizes
        if t1 + t2 > c or t1 + b1 > c or t1 + t2 + b1 + b2 > 2 * c or not 0 <= self.p <= c:
            yield f"|T1|={t1} |T2|={t2} |B1|={b1} |B2|={b2} p={self.p} c={c}"
        lists = [self._keys_in(which) for which in range(4)]
        if list(map(len, lists)) != self._sizes:
            yield f"the lists have {list(map(len, lists))} members, not {self._sizes}"
        if len(set(chain(*lists))) != sum(map(len, lists)):
            yield "a key is in two lists"
        if self._ghosts.find([*lists[_B1], *lists[_B2]]) != [
            *self._lists.walk(_B1),
            *self._lists.walk(_B2),
        ]:
            yield "a ghost is not found by its key"

    # -- the four lists -------------------------------------------------------------------------

    def _keys_in(self, which: int) -> Sequence[OffloadKey]:
        return tuple(self._keys[number] for number in self._lists.walk(which))

    def _join(self, which: int, numbers: Sequence[int]) -> None:
        self._lists.append(numbers, which)
        self._sizes[which] += len(numbers)
        list_of = self._list_of
        for number in numbers:
            list_of[number] = which

    def _bury(self, slots: Sequence[int]) -> None:
        """Make ghosts of blocks, each of that of its list."""
        ghosts = self._free_ghosts.take(len(slots))
        key_of, list_of = self._keys, self._list_of
        keys: list[OffloadKey] = []
        once: list[int] = []
        again: list[int] = []
        for slot, ghost in zip(slots, ghosts, strict=True):
            key_of[ghost] = key = key_of[slot]
            keys.append(key)
            (once if list_of[slot] == _T1 else again).append(ghost)
        self._ghosts.update(keys, ghosts)
        self._lists.remove(slots)
        self._sizes[_T1] -= len(once)
        self._sizes[_T2] -= len(again)
        self._join(_B1, once)
        self._join(_B2, again)

    def _drop(self, ghosts: Sequence[int], which: int) -> None:
        """Forget ghosts, which are in this list."""
        self._lists.remove(ghosts)
        self._sizes[which] -= len(ghosts)
        key_of = self._keys
        self._ghosts.discard([key_of[ghost] for ghost in ghosts])
        self._free_ghosts.give_back(ghosts)


class _Rehearsal:
    """L1 or L2 as a batch in the making would leave it; the lists themselves stay as they are.

    Each list is walked at most once, whatever the batch's size.

    Attributes:
        gone: Ghosts that the batch takes or drops, of either list.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        lists: NumberLists,
        resident: int,
        is_evictable: Callable[[int], bool],
        gone: set[int],
    ) -> None:
        ghosts = _GHOSTS_OF[resident]
        self.num_resident = sizes[resident]
        self.num_ghosts = sizes[ghosts]
        self._victims: Iterator[int] = filter(is_evictable, lists.walk(resident))
        self.gone = gone
        self._droppable = (ghost for ghost in lists.walk(ghosts) if ghost not in gone)

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
        # None left: the one that goes is the batch's own victim, which nobody asks for again.
        self.gone.update(islice(self._droppable, 1))


def _replace(preferred: _Rehearsal, other: _Rehearsal) -> int | None:
    victim = preferred.evict()
    return other.evict() if victim is None else victim
