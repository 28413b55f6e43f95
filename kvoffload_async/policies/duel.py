"""A duel of two orders of eviction: which would have had more prefix hits on a sample of blocks?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final
from zlib import crc32

from kvoffload_async.policies.groups import GroupRanking, Worth
from kvoffload_async.policies.reuse import NUM_CLASSES
from kvoffload_async.tables.keymap import KeyTable
from kvoffload_async.tables.lists import FreeNumbers, NumberLists
from kvoffload_async.types import OffloadKey

LARGEST_SAMPLED_PART: Final = 8
"""One block in eight is sampled: the shadows cost an eighth, and still see hits every second."""
_LEAST_SHADOW_BLOCKS: Final = 256
"""Of a small cache a larger part is sampled: small shadows differ by chance."""
_HALF_LIFE_BLOCKS: Final = 60_000
"""References, of all blocks, after which a hit counts half: minutes of a busy host."""
_MARGIN: Final = 0.002
"""Lead, in hit ratio, with which an order takes over; less is noise on the traces measured."""
_LEAST_LEAD: Final = 8
"""Lead, in hits, with which the order by density takes over at least: less is chance."""


class Duel:
    """Two shadow caches of an eighth of the capacity, fed with one block in eight.

    Both decline and evict by the rules of the cache itself. What counts is the head of a request's
    sampled blocks that a shadow finds: an order may find more blocks, and still shorter heads.

    Memory: that of an eighth of the cache's blocks, twice, without payload.

    Thread: owner.

    Attributes:
        lead: Prefix hits of the density order beyond those of LRU, fading.
        total: References sampled, fading likewise.
        is_density: Whether the order by density leads; at first, and while neither leads, the order
            stays.
    """

    def __init__(self, capacity_blocks: int) -> None:
        """Start with empty shadows of a cache of so many blocks."""
        part = capacity_blocks // _LEAST_SHADOW_BLOCKS
        self.sampled_part = max(1, min(LARGEST_SAMPLED_PART, part))
        shadow_blocks = capacity_blocks // self.sampled_part
        self._lru = _LruShadow(shadow_blocks)
        self._density = _DensityShadow(shadow_blocks)
        self.lead = 0.0
        self.total = 0.0
        self.is_density = False

    def record(
        self,
        keys: Sequence[OffloadKey],
        classes: Sequence[int],
        time: int,
        density: Worth,
        *,
        may_decline: Callable[[int], bool],
    ) -> None:
        """Record the uses of a request, head to tail, with the class of each block.

        Args:
            keys: The keys, without duplicates.
            classes: The class of each block.
            time: Number of the request.
            density: Worth of a group.
            may_decline: Whether new blocks of a class may be declined.
        """
        sample = [
            (key, kind)
            for key, kind in zip(keys, classes, strict=True)
            if not crc32(key) % self.sampled_part  # not `hash`, which varies between processes
        ]
        if not sample:
            return
        fade = 0.5 ** (self.sampled_part * len(sample) / _HALF_LIFE_BLOCKS)
        hits = self._density.use(sample, time, density, may_decline=may_decline)
        lru_hits = self._lru.use([key for key, _ in sample])
        self.lead = self.lead * fade + hits - lru_hits
        self.total = self.total * fade + len(sample)
        if self.lead > max(_MARGIN * self.total, _LEAST_LEAD):
            self.is_density = True
        elif self.lead < 0:
            self.is_density = False

    def violations(self) -> Iterator[str]:
        """Yield descriptions of the violated invariants."""
        yield from self._density.ranking.violations()


class _Shadow:
    """Keys of a cache without payload."""

    def __init__(self, capacity: int) -> None:
        self.table = KeyTable(capacity)
        self.free = FreeNumbers(capacity)

    def add(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Number absent keys, for which there is room."""
        numbers = self.free.take(len(keys))
        self.table.add(keys, numbers)
        return numbers

    def evict(self, numbers: Sequence[int]) -> None:
        """Forget keys."""
        self.table.remove(numbers)
        self.free.give_back(numbers)


class _LruShadow(_Shadow):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._capacity = capacity
        self._oldest_first = NumberLists(capacity)

    def use(self, keys: Sequence[OffloadKey]) -> int:
        """Record a request's uses, head to tail; return the length of the head that was found."""
        found = self.table.find(keys)
        hits = [number for number in found if number is not None]
        self._oldest_first.remove(hits)
        new = [key for key, number in zip(keys, found, strict=True) if number is None]
        del new[self._capacity - len(hits) :]
        surplus = len(new) - self.free.count
        if surplus > 0:
            self.evict(self._oldest_first.take_front(surplus))
        self.add(new)
        present = [number for number in self.table.find(keys) if number is not None]
        self._oldest_first.append(present[::-1])
        return _head(found)


class _DensityShadow(_Shadow):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.ranking = GroupRanking(capacity)

    def use(
        self,
        sample: Sequence[tuple[OffloadKey, int]],
        time: int,
        density: Worth,
        *,
        may_decline: Callable[[int], bool],
    ) -> int:
        """Record a request's uses, head to tail; return the length of the head that was found."""
        hits: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        new: list[list[OffloadKey]] = [[] for _ in range(NUM_CLASSES)]
        found = self.table.find([key for key, _ in sample])
        for (key, kind), number in zip(sample, found, strict=True):
            if number is None:
                new[kind].append(key)
            else:
                hits[kind].append(number)
        num_hits = sum(map(len, hits))
        for numbers in hits:
            self.ranking.remove(numbers)
        surplus = len(sample) - num_hits - self.free.count
        if surplus > 0:
            kinds = [kind for kind in range(NUM_CLASSES) if new[kind] and may_decline(kind)]
            offers = [(density(kind, time), len(new[kind])) for kind in kinds]
            victims, declined = self.ranking.pick(surplus, _anything, density, offers)
            for kind, count in zip(kinds, declined, strict=True):
                del new[kind][len(new[kind]) - count :]
            self.ranking.remove(victims)
            self.evict(victims)
        for kind in range(NUM_CLASSES):
            members = hits[kind] + self.add(new[kind][: self.free.count])
            if members:
                self.ranking.form(kind, time, members)
        return _head(found)


def _head(found: Sequence[int | None]) -> int:
    return found.index(None) if None in found else len(found)


def _anything(_: int) -> bool:
    return True
