"""One eviction policy for each tenant, so that no tenant's blocks are evicted for another's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.errors import ConfigError
from kvoffload_async.tables.arrays import integers, small_integers
from kvoffload_async.tables.lists import FreeNumbers
from kvoffload_async.types import OffloadKey, ReqContext

MAX_TENANTS = 255


def divide(capacity: int, quotas: Sequence[int | None]) -> list[int]:
    """Return each tenant's part of a capacity: its quota, or an equal share of what quotas leave.

    No part is 0.

    Raises:
        ValueError: The capacity is less than the quotas, with 1 for each tenant without one.
    """
    rest = capacity - sum(quota for quota in quotas if quota is not None)
    num_sharing = quotas.count(None)
    if rest < num_sharing:
        raise ValueError(f"the quotas leave {rest} of {capacity} to {num_sharing} other tenants")
    parts: list[int] = []
    for quota in quotas:
        part = rest // num_sharing if quota is None else quota
        if quota is None:
            rest, num_sharing = rest - part, num_sharing - 1
        parts.append(part)
    return parts


@dataclass(frozen=True)
class TenantQuotas:
    """The quotas of tenants in bytes.

    Attributes:
        quota_bytes: Each tenant's quota; None: an equal share of what the quotas leave.
        tenant_of: Returns the index of a key's tenant.
    """

    quota_bytes: Sequence[int | None]
    tenant_of: Callable[[OffloadKey], int]

    def grouped(self, keys: Sequence[OffloadKey], indices: Sequence[int]) -> list[list[int]]:
        """Group indices of keys by tenant, in order."""
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(self.tenant_of(keys[index]), []).append(index)
        return list(groups.values())

    def blocks(self, capacity_blocks: int, block_bytes: int, key: str) -> list[int]:
        """Return each tenant's part of a capacity in blocks.

        Raises:
            ConfigError: The capacity is too small, or a quota for a block; names the option `key`.
        """
        quotas = [None if quota is None else quota // block_bytes for quota in self.quota_bytes]
        if 0 in quotas:
            raise ConfigError(
                f"quota_bytes: {self.quota_bytes[quotas.index(0)]} holds no block of {block_bytes} "
                "bytes; give at least that"
            )
        try:
            return divide(capacity_blocks, quotas)
        except ValueError as error:
            raise ConfigError(
                f"{key}: {capacity_blocks} blocks of {block_bytes} bytes: {error}; lower "
                f"quota_bytes of a tenant, or raise {key}"
            ) from error

    def policies(
        self, create: Callable[[int], CachePolicy], capacity_blocks: int
    ) -> TenantPolicies:
        """Return a policy in which each tenant may have any part of the capacity.

        So a store that was written under other quotas can be taken over as it is.
        """
        own = [create(capacity_blocks) for _ in self.quota_bytes]
        return TenantPolicies(capacity_blocks, own, self.tenant_of)


class TenantPolicies(CachePolicy):
    """Ranks each tenant's blocks with a policy of its own, by numbers below that one's capacity.

    A batch of `make_room` or `declines` is of one tenant, whose blocks alone are its victims.
    Memory per slot: 9 bytes, besides the policies'.

    Thread: owner.
    """

    name = "tenants"

    def __init__(
        self,
        capacity_blocks: int,
        policies: Sequence[CachePolicy],
        tenant_of: Callable[[OffloadKey], int],
    ) -> None:
        """Take ownership of the policies, by tenant, at most `MAX_TENANTS`.

        Args:
            capacity_blocks: See `CachePolicy`.
            policies: Each tenant's policy; its capacity is the most blocks that the tenant may
                have.
            tenant_of: Returns the index of a key's tenant.
        """
        super().__init__(capacity_blocks)
        self.policies = tuple(policies)
        self.tenant_of = tenant_of
        self.follows_requests = any(each.follows_requests for each in policies)  # type: ignore[misc]
        self.clear()

    def clear(self) -> None:
        self._tenant_at = small_integers(self.capacity_blocks)
        self._number_at = integers(self.capacity_blocks)
        self._slots = [integers(each.capacity_blocks) for each in self.policies]
        self._free = [FreeNumbers(each.capacity_blocks) for each in self.policies]
        for policy in self.policies:
            policy.clear()

    def num_blocks(self, tenant: int) -> int:
        """Return the number of a tenant's resident blocks."""
        return self.policies[tenant].capacity_blocks - self._free[tenant].count

    def declines(
        self,
        request: ReqContext,
        keys: Sequence[OffloadKey],
        missing: Sequence[OffloadKey],
        free: int | None,
        is_evictable: Callable[[int], bool],
    ) -> Collection[OffloadKey]:
        tenant = self.tenant_of(missing[0])
        test = self._test(tenant, is_evictable)
        return self.policies[tenant].declines(request, keys, missing, free, test)

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        if not incoming:
            return []
        return self.evict(self.tenant_of(incoming[0]), incoming, count, is_evictable)

    def evict(
        self,
        tenant: int,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        """Evict `count` blocks of a tenant; see `make_room`."""
        test = self._test(tenant, is_evictable)
        victims = self.policies[tenant].make_room(incoming, count, test)
        if victims is None:
            return None
        self._free[tenant].give_back(victims)
        slots = self._slots[tenant]
        return [slots[number] for number in victims]

    def counts(self) -> list[int]:
        """Return the number of each tenant's resident blocks."""
        return list(map(self.num_blocks, range(len(self.policies))))

    def fullest(self, parts: Sequence[int]) -> tuple[int, int]:
        """Return the tenant that has the most of its part, and by how many blocks it exceeds it."""
        shares = [count / part for count, part in zip(self.counts(), parts, strict=True)]
        tenant = shares.index(max(shares))
        return tenant, max(0, self.num_blocks(tenant) - parts[tenant])

    def evict_some(
        self,
        tenant: int,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int]:
        """Evict up to `count` blocks of a tenant, at most as many as are incoming."""
        evicted: list[int] = []
        portion = count = min(count, self.num_blocks(tenant))
        while portion and len(evicted) < count:
            slots = self.evict(tenant, incoming, min(portion, count - len(evicted)), is_evictable)
            evicted += slots or ()
            portion = portion if slots else portion // 2
        return evicted

    def _test(self, tenant: int, is_evictable: Callable[[int], bool]) -> Callable[[int], bool]:
        slots = self._slots[tenant]
        return lambda number: is_evictable(slots[number])

    def released(self, slots: Sequence[int]) -> None:
        for tenant, numbers, _ in self._grouped(slots, slots):
            self.policies[tenant].released(numbers)

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        groups: dict[int, tuple[list[OffloadKey], list[int]]] = {}
        for key, slot in zip(keys, slots, strict=True):
            own_keys, own_slots = groups.setdefault(self.tenant_of(key), ([], []))
            own_keys.append(key)
            own_slots.append(slot)
        for tenant, (own_keys, own_slots) in groups.items():
            numbers = self._free[tenant].take(len(own_slots))
            slot_of = self._slots[tenant]
            for slot, number in zip(own_slots, numbers, strict=True):
                self._tenant_at[slot] = tenant
                self._number_at[slot] = number
                slot_of[number] = slot
            self.policies[tenant].admit(own_keys, numbers)

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        for tenant, numbers, own_reused in self._grouped(slots, reused):
            self.policies[tenant].access(numbers, own_reused)

    def request_ended(
        self,
        request: ReqContext,
        keys: Sequence[OffloadKey],
        slots: Sequence[int | None],
        reused: Sequence[bool],
    ) -> None:
        groups: dict[int, tuple[list[OffloadKey], list[int | None], list[bool]]] = {}
        for key, slot, again in zip(keys, slots, reused, strict=True):
            own_keys, numbers, own_reused = groups.setdefault(self.tenant_of(key), ([], [], []))
            own_keys.append(key)
            numbers.append(None if slot is None else self._number_at[slot])
            own_reused.append(again)
        for tenant, (own_keys, numbers, own_reused) in groups.items():
            self.policies[tenant].request_ended(request, own_keys, numbers, own_reused)

    def discard(self, slots: Sequence[int]) -> None:
        for tenant, numbers, _ in self._grouped(slots, slots):
            self.policies[tenant].discard(numbers)
            self._free[tenant].give_back(numbers)

    def resident(self) -> Iterable[int]:
        return chain.from_iterable(
            [slots[number] for number in policy.resident()]
            for slots, policy in zip(self._slots, self.policies, strict=True)
        )

    def skipped(self) -> Iterable[int]:
        return chain.from_iterable(
            [slots[number] for number in policy.skipped()]
            for slots, policy in zip(self._slots, self.policies, strict=True)
        )

    def violations(self) -> Iterable[str]:
        for tenant, policy in enumerate(self.policies):
            yield from policy.violations()
            ranked = list(policy.resident())
            if len(ranked) != self.num_blocks(tenant):
                yield f"tenant {tenant} has {self.num_blocks(tenant)} blocks, {len(ranked)} ranked"
            for number in ranked:
                slot = self._slots[tenant][number]
                if (self._tenant_at[slot], self._number_at[slot]) != (tenant, number):
                    yield f"slot {slot} is another block's than number {number} of {tenant}"

    def _grouped(
        self, slots: Sequence[int], others: Sequence[bool] | Sequence[int]
    ) -> Iterator[tuple[int, list[int], list[bool]]]:
        """Yield each tenant of some slots, with their numbers and what belongs to each slot."""
        groups: dict[int, tuple[list[int], list[bool]]] = {}
        for slot, other in zip(slots, others, strict=True):
            numbers, own = groups.setdefault(self._tenant_at[slot], ([], []))
            numbers.append(self._number_at[slot])
            own.append(bool(other))
        for tenant, (numbers, own) in groups.items():
            yield tenant, numbers, own


def tenant_gauges(policy: CachePolicy, block_bytes: int) -> dict[str, int]:
    """Return the bytes used by each tenant, by name of a gauge; empty without tenants."""
    counts = policy.counts() if isinstance(policy, TenantPolicies) else ()
    return {f"tenant_{tenant}_bytes": count * block_bytes for tenant, count in enumerate(counts)}
