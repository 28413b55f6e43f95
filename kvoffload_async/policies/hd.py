"""HD: keeps the blocks with the most expected hits per request of occupancy, guarded by LRU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.policies.groups import GroupRanking, Worth
from kvoffload_async.policies.reuse import NUM_CLASSES, ReuseModel, bin_of
from kvoffload_async.tables.arrays import Objects, integers
from kvoffload_async.tables.forest import NumberForest
from kvoffload_async.tables.keymap import KeyTable
from kvoffload_async.tables.lists import FreeNumbers, NumberLists
from kvoffload_async.types import OffloadKey, ReqContext

GHOSTS_PER_BLOCK: Final = 4
"""Evicted blocks remembered per block of capacity: the tables must learn of reuse that the cache is
too small for, and three blocks in four never return."""
LEAST_GHOSTS: Final = 1 << 14

_KV_GROUP: Final = slice(-4, None)
"""The part of a key that names its KV-cache group."""

_ORPHANS_A_CALL: Final = 128
_ORPHANS_PER_BLOCK: Final = 2
"""Orphaned blocks that a call moves to the next victims, in addition to `_ORPHANS_A_CALL`, for each
block that leaves, so that there are always enough; a move takes a few microseconds."""

_LRU_RANK: Final = (0, 7, 8, 9, 10, 11, 1, 2, 3, 4, 5, 6)
"""Order of the classes of one request under LRU: its new tail before its known head."""


@dataclass(slots=True)
class _Gaps:
    """A request's first declined block of each KV-cache group; later blocks cannot be hit."""

    first: dict[bytes, OffloadKey] = field(default_factory=dict)


class HdPolicy(CachePolicy):
    """Evicts by learnt hit density of classes; two sampled shadow caches choose between it and LRU.

    The victim is the tail of the group with the lowest expected hits per request for which it would
    occupy a slot; see `ReuseTables`. Blocks offered for a store compete likewise, and are declined
    if they are worth the least. Where a block leaves, its descendants in prompts cannot be hit any
    more: they go first, the tail foremost. Of thousands, each call moves some, heads before tails,
    and meanwhile the last one moved is foremost.

    A declined block is stored in no tier either. So blocks of classes that a tier stores are not
    declined: they are admitted with their worth, and so are evicted first.

    Until their request ends, stored blocks have a provisional class, from its prompt so far; blocks
    that were stored for no request rank as if used now.

    Memory per slot: about 130 bytes, and 600 with its four ghosts.

    Thread: owner.

    Attributes:
        model: The known blocks and the estimates of their reuse.
        ranking: The occupied slots.
        duel: The shadows; they determine whether the order is by density or LRU's.
        tiers_store: Whether some tier stores blocks of a class.
    """

    name = "hd"
    follows_requests = True

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.tiers_store: Callable[[int], bool] = _never
        num_ghosts = max(GHOSTS_PER_BLOCK * capacity_blocks, LEAST_GHOSTS)
        self.model = ReuseModel(capacity_blocks, num_ghosts)
        self.clear()

    def clear(self) -> None:
        c = self.capacity_blocks
        self.model.clear()
        self.duel = Duel(c)
        self.ranking = GroupRanking(c)
        self._keys = Objects()
        self._numbers = integers(c)
        """Slot -> number of its block in the model, plus one; 0: no request has used it yet."""
        self._chains = NumberForest(c)
        self._now = self.model.clock + 1
        """Number of the request that ends next."""
        self._offered: dict[OffloadKey, int] = {}
        """Class of each block of the latest offer."""
        self._may_decline = False

    # -- stores ---------------------------------------------------------------------------------

    def declines(
        self,
        request: ReqContext,
        keys: Sequence[OffloadKey],
        missing: Sequence[OffloadKey],
        free: int | None,
        is_evictable: Callable[[int], bool],
    ) -> Collection[OffloadKey]:
        model = self.model
        prompt = model.prompt(request.key_positions, keys)
        classes = model.classes(missing, prompt)
        self._offered = dict(zip(missing, classes, strict=True))
        self._may_decline = free is not None
        if free is None or len(missing) <= free or not self.duel.is_density:
            return ()
        wanted = {
            kind
            for kind in set(classes)
            if any(map(self.tiers_store, (kind, *model.may_become(kind, prompt))))
        }
        gaps = request.get_scratch(_Gaps) or _Gaps()
        first = {group: key for group, key in gaps.first.items() if key not in self._offered}
        offers = [key for key, kind in self._offered.items() if kind not in wanted]
        kept = [key for key in offers if key[_KV_GROUP] not in first]
        deficit = len(missing) - len(offers) + len(kept) - free
        if deficit > 0 and kept:
            least = self._least_of(kept, deficit, is_evictable)
            for key in kept:
                if key in least:
                    first.setdefault(key[_KV_GROUP], key)
        if not first:
            return ()
        gaps.first = first
        request.put_scratch(gaps)
        return _behind(first, offers)

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        if not count:
            return []
        self._put_orphans_first(count)
        victims = self.ranking.take(count, is_evictable, self._worth)
        if victims is not None:
            self._leave(victims)
        return victims

    def released(self, slots: Sequence[int]) -> None:
        self.ranking.release(slots)

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self._keys.update(slots, keys)
        offered, self._offered = self._offered, {}
        others = [key for key in keys if key not in offered]
        if others:
            prompt = self.model.prompt({}, others)
            offered.update(zip(others, self.model.classes(others, prompt), strict=True))
        self._form([offered[key] for key in keys], slots, self._now)

    # -- uses -----------------------------------------------------------------------------------

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        if slots:
            self.request_ended(ReqContext(""), self._keys.find(slots), slots, reused)

    def request_ended(
        self,
        request: ReqContext,
        keys: Sequence[OffloadKey],
        slots: Sequence[int | None],
        reused: Sequence[bool],
    ) -> None:
        model = self.model
        prompt = model.prompt(request.key_positions, keys)
        classes, numbers = model.record(keys, prompt, [slot is not None for slot in slots])
        self.ranking.remove([slot for slot in slots if slot is not None])
        self._form(classes, slots, self._now)
        for slot, number in zip(slots, numbers, strict=False):
            if slot is not None:
                self._numbers[slot] = number + 1
        self._link(keys, slots)
        self.duel.record(keys, classes, self._now, self._density, may_decline=self._is_declinable)
        self._now = model.clock + 1

    def discard(self, slots: Sequence[int]) -> None:
        self.ranking.remove(slots)
        self._leave(slots)

    # -- inspection -----------------------------------------------------------------------------

    def resident(self) -> Iterable[int]:
        return tuple(self.ranking.walk(self._worth))

    def skipped(self) -> Iterable[int]:
        return tuple(self.ranking.skipped())

    def violations(self) -> Iterable[str]:
        yield from self.ranking.violations()
        yield from self.model.violations()
        yield from self.duel.violations()

    # -- inside ---------------------------------------------------------------------------------

    def _worth(self, kind: int, time: int) -> tuple[float, int]:
        if self.duel.is_density:
            return self._density(kind, time)
        return time, _LRU_RANK[kind]

    def _density(self, kind: int, time: int) -> tuple[float, int]:
        return self.model.tables.density[kind][bin_of(self._now - time)], time

    def _is_declinable(self, kind: int) -> bool:
        return self._may_decline and not self.tiers_store(kind)

    def _least_of(
        self, offered: Sequence[OffloadKey], count: int, is_evictable: Callable[[int], bool]
    ) -> set[OffloadKey]:
        """Return the offered blocks among the `count` least worthy offered or resident blocks."""
        by_class: dict[int, list[OffloadKey]] = {}
        for key in offered:
            by_class.setdefault(self._offered[key], []).append(key)
        offers = [(self._density(kind, self._now), len(group)) for kind, group in by_class.items()]
        _, counts = self.ranking.pick(count, is_evictable, self._density, offers)
        return {
            key
            for group, num_declined in zip(by_class.values(), counts, strict=True)
            for key in group[len(group) - num_declined :]
        }

    def _form(self, classes: Sequence[int], slots: Sequence[int | None], time: int) -> None:
        by_class: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        for kind, slot in zip(classes, slots, strict=True):
            if slot is not None:
                by_class[kind].append(slot)
        for kind, group in enumerate(by_class):
            if group:
                self.ranking.form(kind, time, group)

    def _leave(self, slots: Sequence[int]) -> None:
        """Turn the blocks in `slots`, which are no longer ranked, into ghosts."""
        numbers = self._numbers
        self.model.release([numbers[slot] - 1 for slot in slots if numbers[slot]])
        for slot in slots:
            numbers[slot] = 0
            self._chains.leave(slot)
        self._put_orphans_first(len(slots))

    def _put_orphans_first(self, num_gone: int) -> None:
        """Move blocks behind an evicted one in their prompt, heads first, to the next victims."""
        chains = self._chains
        useless: list[int] = []
        for _ in range(_ORPHANS_A_CALL + _ORPHANS_PER_BLOCK * num_gone):
            slot = chains.take_orphan()
            if slot is None:
                break
            chains.leave(slot)  # so those behind it are orphans too
            useless.append(slot)
        self.ranking.put_first(useless)

    def _link(self, keys: Sequence[OffloadKey], slots: Sequence[int | None]) -> None:
        """Chain a request's blocks; the next victims are those behind an absent one."""
        chains = self._chains
        previous: dict[bytes, int | None] = {}
        unreachable: list[int] = []
        for key, slot in zip(keys, slots, strict=True):
            group = key[_KV_GROUP]
            if group not in previous:
                previous[group] = slot
                if slot is not None and chains.has_orphans:
                    chains.detach(slot)
                continue
            before = previous[group]
            if before is None:
                if slot is not None:
                    chains.detach(slot)
                    unreachable.append(slot)
                continue
            if slot is not None:
                chains.attach(slot, before)
            previous[group] = slot
        self.ranking.put_first(unreachable)


def _never(_: int) -> bool:
    return False


def _behind(first: dict[bytes, OffloadKey], offers: Sequence[OffloadKey]) -> Collection[OffloadKey]:
    """Return the offered keys from the first declined key of their KV-cache group on."""
    found: set[OffloadKey] = set()
    declined_groups = {group for group, key in first.items() if key not in offers}
    for key in offers:
        group = key[_KV_GROUP]
        if first.get(group) == key:
            declined_groups.add(group)
        if group in declined_groups:
            found.add(key)
    return found


LARGEST_SAMPLED_PART: Final = 8
"""One block in eight is sampled: the shadows cost an eighth, and still see hits every second."""
_LEAST_SHADOW_BLOCKS: Final = 256
"""Minimum blocks of a shadow: a small cache is sampled more, as small shadows differ by chance."""
_HALF_LIFE_BLOCKS: Final = 60_000
"""Number of block references after which a hit counts half: minutes on a busy host."""
_MARGIN: Final = 0.002
"""Minimum lead, in hit ratio, of the density order to take over; less is noise on our traces."""
_LEAST_LEAD: Final = 8
"""Minimum lead, in hits, of the density order to take over; less is chance."""


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
        """Start with empty shadows of a cache of `capacity_blocks` blocks."""
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
        """Record the blocks that a request has used, head to tail, with the class of each.

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
    """A simulated cache: keys without payload."""

    def __init__(self, capacity: int) -> None:
        self.table = KeyTable(capacity)
        self.free = FreeNumbers(capacity)

    def add(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Assign free numbers to absent keys; there must be enough."""
        numbers = self.free.take(len(keys))
        self.table.add(keys, numbers)
        return numbers

    def evict(self, numbers: Sequence[int]) -> None:
        """Forget the keys with these numbers."""
        self.table.remove(numbers)
        self.free.give_back(numbers)


class _LruShadow(_Shadow):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._capacity = capacity
        self._oldest_first = NumberLists(capacity)

    def use(self, keys: Sequence[OffloadKey]) -> int:
        """Record the keys used by a request, head to tail; return the cached prefix's length."""
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
        """Record the keys used by a request, head to tail; return the cached prefix's length."""
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
