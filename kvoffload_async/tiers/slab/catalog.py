"""The in-memory index of a store: key -> address, evictable blocks, free addresses.

An address is free, claimed (being written), or occupied by a block. Loads and stores pin addresses.
A block that is dropped while pinned leaves its address *retired*: it is freed with the last pin.
Free addresses are kept as runs, so that allocations get adjacent ones if possible. Pure; used only
on the loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.policies.tenants import TenantPolicies
from kvoffload_async.tables.arrays import long_integers
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.tiers.files.ranking import KeyRanking, placeholders
from kvoffload_async.tiers.slab.addresses import (
    SlotAddress,
    SlotNumbers,
    address_of,
    joined,
    swapped,
)
from kvoffload_async.types import OffloadKey

_EXACT: Final = 64
"""Free runs up to this length have a class per length; longer runs, a class per power of two."""

_MUCH_LONGER: Final = 4
"""An allocation is not aligned in a free run at least this many times longer."""


class FreeRuns:
    """The free addresses, in maximal runs of adjacent addresses.

    Allocation is address-ordered: it takes the lowest run that is long enough. This keeps the free
    space together, while best fit leaves ever smaller fragments (P. R. Wilson et al., "Dynamic
    Storage Allocation: A Survey", 1995, section 3.5). Runs are kept in classes by length, so that
    the cost of operations hardly depends on their number.

    Lowest is by slot, then by segment: so consecutive allocations are in different files, which can
    be written in parallel.
    """

    def __init__(self, extent: int) -> None:
        """Start without free addresses.

        Args:
            extent: Length of the adjacent extents into which larger allocations are split.
        """
        self._extent = extent
        self._length_at: dict[SlotAddress, int] = {}
        """First address of a run -> its length."""
        self._first_before: dict[SlotAddress, SlotAddress] = {}
        """Address behind a run -> the run's first address."""
        self._classes: dict[int, _Class] = {}
        self.num_free = 0
        """Number of free addresses. Read-only."""

    def runs(self) -> Iterator[tuple[SlotAddress, int]]:
        """Yield every run as its first address and its length, in no order."""
        yield from self._length_at.items()

    def free(self, first: SlotAddress, count: int = 1) -> None:
        """Free a run of addresses that is not free yet."""
        self.num_free += count
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
        """Return whether there certainly is a free run of `count` addresses (at most an extent)."""
        return max(self._classes, default=0) >= _least_class(min(count, self._extent))

    def take(self, count: int) -> list[SlotAddress]:
        """Allocate addresses: for each extent a run that is long enough, else the longest.

        In a run that is not much longer than wanted, the allocation is aligned to its size, so that
        jobs of equal size leave no gaps.

        Returns:
            The addresses; those of each extent ascend.

        Raises:
            ValueError: Fewer than `count` addresses are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} addresses are wanted, {self.num_free} are free")
        taken: list[SlotAddress] = []
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
            self.num_free -= used
        for begin in range(0, len(taken), self._extent):
            taken[begin : begin + self._extent] = sorted(taken[begin : begin + self._extent])
        return taken

    def _best_for(self, count: int) -> SlotAddress:
        """Return the start of the lowest run that is certainly long enough, or of a longest one.

        Longest within its class, so up to a factor of two.
        """
        least = _least_class(count)
        fitting = [runs.lowest() for number, runs in self._classes.items() if number >= least]
        return swapped(min(fitting) if fitting else self._classes[max(self._classes)].lowest())

    def _add(self, first: SlotAddress, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        number = _class_of(length)
        runs = self._classes.get(number)
        if runs is None:
            runs = self._classes[number] = _Class()
        runs.add(swapped(first))

    def _remove(self, first: SlotAddress) -> None:
        length = self._length_at.pop(first)
        del self._first_before[first + length]
        number = _class_of(length)
        runs = self._classes[number]
        runs.firsts.discard(swapped(first))
        if not runs.firsts:
            del self._classes[number]


class _Class:
    """Runs of similar length, with fast access to the lowest.

    Attributes:
        firsts: Their first addresses, swapped.
    """

    __slots__ = ("_heap", "firsts")

    def __init__(self) -> None:
        self.firsts: set[int] = set()
        self._heap: list[int] = []
        """A heap of the first addresses; may contain those of removed runs."""

    def add(self, first: int) -> None:
        """Add a run, given by its swapped first address."""
        self.firsts.add(first)
        heapq.heappush(self._heap, first)
        if len(self._heap) > 2 * len(self.firsts) + _EXACT:
            self._heap = sorted(self.firsts)

    def lowest(self) -> int:
        """Return the swapped first address of the lowest run; there must be a run."""
        while self._heap[0] not in self.firsts:
            heapq.heappop(self._heap)
        return self._heap[0]


def _class_of(length: int) -> int:
    return length if length <= _EXACT else _EXACT + length.bit_length() - _EXACT.bit_length()


def _least_class(count: int) -> int:
    """Return the lowest class whose runs all have at least `count` addresses."""
    return count if count <= _EXACT else _class_of(count - 1) + 1


class Catalog:
    """Index of the blocks of one store. Thread: loop."""

    def __init__(self, policy: CachePolicy, piece: int, parts: Sequence[int] = ()) -> None:
        """Start without blocks, and own the policy.

        Args:
            policy: Ranks the blocks; a `TenantPolicies` if there are tenants.
            piece: The extent of `FreeRuns`.
            parts: Maximum number of blocks of each tenant.
        """
        self._parts = parts
        self._ranking = KeyRanking(policy)
        self._address_of = long_integers(policy.capacity_blocks)
        """Slot in the ranking -> address of its block."""
        self._free = FreeRuns(piece)
        self._slots: dict[int, int] = {}
        self._pins: set[SlotAddress] = set()
        self._more_pins: dict[SlotAddress, int] = {}
        """Address that is pinned more than once -> number of further pins."""
        self._passed: dict[SlotAddress, int] = {}
        """Address of a pinned block that was skipped at eviction -> its slot in the ranking."""
        self._retired: set[SlotAddress] = set()
        self._claimed: dict[SlotAddress, int] = {}
        """Claimed address -> the tenant for whom."""

    def __len__(self) -> int:
        return len(self._ranking)

    @property
    def num_free(self) -> int:
        """Number of free addresses."""
        return self._free.num_free

    @property
    def policy(self) -> CachePolicy:
        """The eviction policy. Read-only."""
        return self._ranking.policy

    @property
    def num_evictable(self) -> int:
        """Number of evictable blocks."""
        return len(self) - (len(self._pins) - len(self._retired))

    @property
    def segments(self) -> dict[int, int]:
        """Segment -> number of slots; read-only."""
        return self._slots

    def keys(self) -> KeyMap:
        """Return a copy of the key map; the caller owns it."""
        return self._ranking.map.copy()

    def items(self) -> Iterator[tuple[OffloadKey, SlotAddress]]:
        """Yield every key with its address."""
        address_of = self._address_of
        return ((key, address_of[slot]) for key, slot in self._ranking.map.items())

    def following(self, key: OffloadKey | None, count: int) -> list[OffloadKey]:
        """Return the next keys; see `KeyMap.following`."""
        return self._ranking.map.following(key, count)

    def find(self, keys: Sequence[OffloadKey]) -> list[SlotAddress | None]:
        """Return the address of each key, None for absent keys."""
        address_of = self._address_of
        return [None if slot is None else address_of[slot] for slot in self._ranking.find(keys)]

    def present(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, SlotAddress]:
        """Return the keys that are present, with their addresses."""
        found = zip(keys, self.find(keys), strict=True)
        return {key: address for key, address in found if address is not None}

    # -- segments -------------------------------------------------------------------------------

    def add_segment(self, segment: int, slots: int) -> None:
        """Add a segment whose slots are all free."""
        self._slots[segment] = slots
        self._free.free(address_of(segment, 0), slots)

    def fill(
        self,
        segments: Mapping[int, int],
        addresses: npt.NDArray[np.int64],
        portions: Iterable[tuple[npt.NDArray[np.int64], Sequence[OffloadKey]]],
    ) -> bool:
        """Add the segments and index the blocks found at opening; the catalog must be unused.

        Args:
            segments: Segment -> number of slots.
            addresses: Addresses of the blocks, least recent first.
            portions: Batches of indices and keys; see `KeyRanking.fill`.

        Returns:
            Whether the keys were distinct; otherwise the catalog is unusable.
        """
        self._slots.update(segments)
        slots = SlotNumbers(segments)
        is_free = np.ones(slots.total, dtype=np.bool_)
        is_free[slots.of(addresses)[0]] = False
        for segment, first, behind in slots.ranges():
            for start, stop in _runs(is_free[first:behind]):
                self._free.free(address_of(segment, start), stop - start)
        np.asarray(self._address_of)[: len(addresses)] = addresses
        self._ranking.fill(len(addresses), portions)
        return len(self._ranking.map) == len(addresses)

    # -- blocks ---------------------------------------------------------------------------------

    def pin(self, addresses: Collection[SlotAddress]) -> None:
        """Pin distinct addresses, so that their blocks are not evicted."""
        more = self._more_pins
        for address in self._pins.intersection(addresses):
            more[address] = more.get(address, 0) + 1
        self._pins.update(addresses)

    def unpin(self, addresses: Collection[SlotAddress]) -> None:
        """Remove one pin from each address."""
        if self._more_pins:
            addresses = [address for address in addresses if not self._is_pinned_still(address)]
        self._pins.difference_update(addresses)
        if self._passed:
            passed = self._passed
            self._ranking.policy.released([passed.pop(p) for p in addresses if p in passed])
        if self._retired:
            freed = self._retired.intersection(addresses)
            self._retired -= freed
            self._give_back(freed)

    def _is_pinned_still(self, address: SlotAddress) -> bool:
        """Remove one of an address's several pins; return False if it has only one."""
        more = self._more_pins.pop(address, 0)
        if more > 1:
            self._more_pins[address] = more - 1
        return bool(more)

    def claim(
        self, incoming: Sequence[OffloadKey], ahead: int = 0
    ) -> tuple[list[SlotAddress], list[OffloadKey], list[SlotAddress]]:
        """Claim addresses for absent keys, evicting blocks if needed.

        Args:
            incoming: The keys.
            ahead: Number of further addresses to free when blocks are evicted. Also evicts if
                enough addresses are free but scattered: evicting blocks that were stored together
                restores adjacent addresses and amortises the cost.

        Returns:
            The addresses, ascending and adjacent within an extent if possible, fewer than the keys
            if no more are available; the evicted keys, and their former addresses, parallel.
        """
        if isinstance(self._ranking.policy, TenantPolicies):
            return self._claim_in_part(self._ranking.policy, incoming, ahead)
        num_free = self._free.num_free
        count = 0
        if num_free < len(incoming) or (ahead and not self._free.has_run(len(incoming))):
            count = min(max(0, len(incoming) + ahead - num_free), self.num_evictable)
        incoming = incoming[: num_free + count]
        is_evictable = self._is_evictable if self._pins else _always
        coming = incoming
        if count > len(incoming):
            coming = [*incoming, *placeholders(count - len(incoming))]
        slots = self._ranking.policy.make_room(coming, count, is_evictable)
        victims, freed = self._removed(slots or ())
        taken = self._free.take(min(len(incoming), self._free.num_free))
        self._claimed.update(dict.fromkeys(taken, 0))
        return taken, victims, freed

    def _removed(self, slots: Sequence[int]) -> tuple[list[OffloadKey], list[SlotAddress]]:
        """Free the addresses of evicted blocks; return the keys and addresses."""
        freed = [self._address_of[slot] for slot in slots]
        victims = self._ranking.remove(slots)
        self._give_back(freed)
        return victims, freed

    def _claim_in_part(
        self, policy: TenantPolicies, incoming: Sequence[OffloadKey], ahead: int
    ) -> tuple[list[SlotAddress], list[OffloadKey], list[SlotAddress]]:
        """Like `claim`, for keys of one tenant, whose blocks keep to its part.

        A tenant that has more, since quotas were changed, loses at most twice as many blocks as it
        gets, and makes room for tenants that find no free address.
        """
        if not incoming:
            return [], [], []
        tenant, num_new = policy.tenant_of(incoming[0]), len(incoming)
        used = policy.num_blocks(tenant) + list(self._claimed.values()).count(tenant)
        part = self._parts[tenant]
        excess = min(used + num_new - part, 2 * num_new)
        evicted = self._evict(policy, tenant, incoming, excess + ahead if excess > 0 else 0)
        num_new = min(num_new, len(evicted) + max(0, part - used))
        victims, freed = self._removed(evicted)
        while self._free.num_free < num_new:
            missing = num_new - self._free.num_free
            other, over = policy.fullest(self._parts)
            slots = self._evict(
                policy, other if over else tenant, (), min(missing, over or missing)
            )
            if not slots:
                break
            keys, addresses = self._removed(slots)
            victims += keys
            freed += addresses
        taken = self._free.take(min(num_new, self._free.num_free))
        self._claimed.update(dict.fromkeys(taken, tenant))
        return taken, victims, freed

    def _evict(
        self, policy: TenantPolicies, tenant: int, incoming: Sequence[OffloadKey], count: int
    ) -> list[int]:
        """Evict up to `count` blocks of a tenant; return their slots."""
        coming = [*incoming, *placeholders(count - len(incoming))]
        return policy.evict_some(tenant, coming, count, self._is_evictable)

    def _is_evictable(self, slot: int) -> bool:
        address: SlotAddress = self._address_of[slot]
        if address in self._pins:
            self._passed[address] = slot
            return False
        return True

    def release(self, addresses: Sequence[SlotAddress]) -> None:
        """Free claimed addresses that were not used."""
        self._unclaim(addresses)
        self._give_back(addresses)

    def _unclaim(self, addresses: Iterable[SlotAddress]) -> None:
        for address in addresses:
            self._claimed.pop(address, None)

    def _give_back(self, addresses: Iterable[SlotAddress]) -> None:
        ascending = sorted(addresses)
        for run in joined(ascending, 0, len(ascending)):
            self._free.free(run.address, run.length)

    def admit(self, keys: Sequence[OffloadKey], addresses: Sequence[SlotAddress]) -> None:
        """Index blocks written to claimed addresses, ordered head to tail."""
        self._unclaim(addresses)
        address_of = self._address_of
        for slot, address in zip(self._ranking.admit(keys[::-1]), addresses[::-1], strict=True):
            address_of[slot] = address

    def remove_unpinned(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, SlotAddress]:
        """Remove blocks that are not pinned from the index; return their keys and addresses."""
        found = self.present(keys)
        gone = {key: address for key, address in found.items() if address not in self._pins}
        self._ranking.discard(list(gone))
        self._give_back(gone.values())
        return gone

    def drop(self, key: OffloadKey, address: SlotAddress) -> None:
        """Remove a pinned block from the index, if the block is still at this address."""
        if self.find([key]) == [address]:
            self._ranking.discard([key])
            self._passed.pop(address, None)
            self._retired.add(address)

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record a request's uses of blocks, ordered head to tail; absent ones are ignored."""
        self._ranking.access(keys)

    def violations(self) -> Iterable[str]:
        """Return descriptions of the violated invariants."""
        yield from self._ranking.violations()
        addresses = [address for _, address in self.items()]
        free = [address + i for address, count in self._free.runs() for i in range(count)]
        every = [address_of(n, i) for n, slots in self._slots.items() for i in range(slots)]
        if sorted([*addresses, *free, *self._claimed, *self._retired]) != sorted(every):
            yield "a slot is not exactly one of free, claimed, retired and occupied"
        if not self._more_pins.keys() <= self._pins <= {*addresses, *self._retired}:
            yield "an address is pinned that has no block"
        skipped = self._ranking.policy.skipped()
        if not self._pins.issuperset(self._address_of[slot] for slot in skipped):
            yield "an evictable block is skipped by the policy"


def _always(_slot: int) -> bool:
    return True


def _runs(is_free: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of free slots."""
    edges = np.flatnonzero(np.diff(is_free.view(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
