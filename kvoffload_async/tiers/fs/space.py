"""Space management under a capacity: reservations and eviction, also in the background.

The eviction policy and the known blocks are used on the loop's thread, the shared count and the
files on I/O threads. A victim is removed from the policy before its file is deleted, and from the
count only after.

Background eviction starts after the first cycle of walks; until then, only stores evict. Blocks
beyond the capacity at that time are evicted by age, oldest first; later ones in the order of the
policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import TierEnvironment
from kvoffload_async.errors import OffloadError
from kvoffload_async.policies.tenants import TenantPolicies, tenant_gauges
from kvoffload_async.tiers.files.ranking import KeyRanking, placeholders
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.known_blocks import KnownBlocks
from kvoffload_async.tiers.fs.operations import (
    STORED,
    DiskChange,
    StoreItem,
    StoreStatus,
    changes_of,
)
from kvoffload_async.tiers.fs.settings import entries_bytes
from kvoffload_async.tiers.fs.usage import Operation, Usage, UsageFile
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIM_BATCH = 256
_SLICE_S = 5.0
"""Maximum time per call of `Space.trim`, so that the caller can send heartbeats."""
_PORTION = 1024


class RunIo(Protocol):
    """Runs a call on an I/O thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(slots=True)
class Plan:
    """Room planned for the blocks of a store job.

    Attributes:
        items: Blocks to store, each with its room.
        unplaced: Blocks without room.
        operation: The operation in the shared count; None before it began.
    """

    items: list[StoreItem] = field(default_factory=list)
    unplaced: list[StoreItem] = field(default_factory=list)
    operation: Operation | None = None


class Space:
    """Manages the space of one namespace for one tier. Loop thread only."""

    def __init__(
        self,
        policy: CachePolicy,
        usage: UsageFile,
        files: BlockFiles,
        env: TierEnvironment,
        *,
        capacity_bytes: int,
        block_bytes: int,
        parts: Sequence[int] = (),
    ) -> None:
        """Start without known blocks.

        Args:
            policy: Ranks the known blocks; owned by this object.
            usage: The shared count.
            files: The block files.
            env: Told of the blocks of other processes or runs that were found, and of those that
                were evicted or have vanished.
            capacity_bytes: Maximum disk bytes, never exceeded.
            block_bytes: Disk bytes of a block's file.
            parts: Maximum number of blocks of each tenant, if the policy is a `TenantPolicies`.
        """
        self._parts = parts
        self._tenants = policy if isinstance(policy, TenantPolicies) else None
        self._capacity_bytes = capacity_bytes
        self._policy = KeyRanking(policy)
        self._usage = usage
        self._files = files
        self._block_bytes = block_bytes
        # Tiers that open later find room for their entries, and need not evict blocks for them.
        self._limit_bytes = capacity_bytes - entries_bytes(capacity_bytes)
        self._announce_gone = env.blocks_evicted
        self._busy: Counter[OffloadKey] = Counter()
        """Block -> number of its pins."""
        self._passed: set[OffloadKey] = set()
        """Busy blocks that the policy was not allowed to evict."""
        self.blocks = KnownBlocks(self._policy, self._busy, env.blocks_appeared)
        self._has_warned = False
        self._is_sorted = False
        self._before_bytes = 0
        self._num_trimmed = 0
        """Blocks evicted in the background since the high watermark was exceeded."""

    def can_evict(self, count: int) -> bool:
        """Return whether `count` blocks can be evicted and their room can be used."""
        return self.can_store and self._num_idle(count) >= count

    @property
    def can_store(self) -> bool:
        """Whether the shared count is complete and does not exceed a reduced capacity.

        If it does, the oldest blocks have to be evicted first, and are not all known yet.
        """
        is_over = self._usage.total_bytes > self._capacity_bytes
        return self._usage.is_complete and not (is_over and self.blocks.ages is not None)

    def gauges(self) -> dict[str, int]:
        """Return the usage of the directory as last read by this process. Thread-safe."""
        return {"used_bytes": self._usage.total_bytes, "capacity_bytes": self._capacity_bytes}

    def tenant_gauges(self) -> dict[str, int]:
        """Return the bytes of each tenant's known blocks. Thread-safe."""
        return tenant_gauges(self._policy.policy, self._block_bytes)

    # -- known blocks --------------------------------------------------------------------------

    def drop_vanished(self, first: int, unwalked: Container[int]) -> int | None:
        """Drop some of the blocks that a complete cycle of walks has not seen.

        Args:
            first: Slot to start at; 0 for the first call.
            unwalked: Buckets that the cycle could not walk.

        Returns:
            Slot to continue at; None when done.
        """
        vanished, more = self.blocks.vanished(first, unwalked)
        if vanished:
            self.forget(vanished)
            self._announce_gone(vanished)
        return more

    def idle(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return the known blocks among these keys that no job uses, each with its slot."""
        found = zip(keys, self._policy.find(keys), strict=True)
        return {key: slot for key, slot in found if slot is not None and key not in self._busy}

    def drop_removed(
        self, expected: Mapping[OffloadKey, int], removed: Sequence[OffloadKey]
    ) -> None:
        """Drop blocks that other processes removed: `removed` has those of `expected` by `idle`.

        Blocks that a job has used meanwhile are skipped.
        """
        gone = [key for key, slot in self.idle(removed).items() if slot == expected[key]]
        if gone:
            self.forget(gone)
            self._announce_gone(gone)

    def present(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys whose blocks are known."""
        return [key for key in keys if key in self._policy]

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Drop blocks whose files were removed."""
        self.blocks.left(keys)
        self._policy.discard(keys)

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of blocks, ordered head to tail."""
        self._policy.access(keys)

    def loaded(self, keys: Sequence[OffloadKey]) -> None:
        """Record loaded blocks, ordered head to tail; another process may have stored them."""
        slots = self.blocks.seen(keys)
        self._policy.policy.access(slots, [True] * len(slots))

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Prevent the removal of blocks that are pinned, read or written, until `unpin`."""
        self._busy.update(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Remove one pin from each of these blocks."""
        unpin(self._busy, keys)
        if released := [key for key in self._passed.intersection(keys) if key not in self._busy]:
            self._passed.difference_update(released)
            self._policy.released(released)

    # -- room for a job -------------------------------------------------------------------------

    async def plan(
        self, items: Sequence[StoreItem], run_io: RunIo, check: Callable[[], None], *, squeeze: bool
    ) -> Plan:
        """Reserve room for blocks, evicting others if needed; `account` must be called afterwards.

        Args:
            items: Blocks to store.
            run_io: Runs a call on an I/O thread.
            check: Called there before room is reserved; what it raises is raised.
            squeeze: The disk is full below the capacity: every block must replace another.
        """
        plan = Plan()
        try:
            keys = [item.key for item in items]
            granted, num_new = 0, self._policy.find(keys).count(None)
            if num_new:
                limit_bytes = 0 if squeeze else self._limit_bytes
                replacing = self._num_replacing(keys)

                def begin() -> None:  # noted in the plan also if the wait for it is cancelled
                    check()
                    unit_bytes = self._block_bytes
                    plan.operation = self._usage.begin(unit_bytes, num_new, limit_bytes, replacing)

                await run_io(begin)
            if plan.operation is not None:
                granted = plan.operation.reserved_bytes // self._block_bytes
            new: list[StoreItem] = []
            # Looked up again: another job may have stored it.
            for item, slot in zip(items, self._policy.find(keys), strict=True):
                item.may_write = slot is None
                (new if item.may_write else plan.items).append(item)
            roomy = max(0, min(granted, len(new), self._policy.capacity_blocks - len(self._policy)))
            # Without a complete count, the room of a victim cannot be used.
            count = self._num_idle(min(len(new), num_new) - roomy) if self.can_evict(1) else 0
            surplus: Sequence[OffloadKey] = ()
            if self._tenants is not None:
                parted = self._place_in_parts(self._tenants, new, roomy, count)
                coming, roomy, victims, surplus = parted
                placed = {item.key for item in coming}
                plan.unplaced = [item for item in new if item.key not in placed]
            else:
                coming = new[: roomy + count]
                victims = self._evict([item.key for item in coming], count)
                if not victims:
                    del coming[roomy:]
                plan.unplaced = new[len(coming) :]
            self.blocks.admit([item.key for item in coming])
            for item, victim in zip(coming[roomy:], victims, strict=True):
                item.victim = victim
            plan.items += coming
            await self.remove(surplus, run_io)
        except BaseException:
            await self.account(plan, run_io)
            raise
        return plan

    def _num_replacing(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of the absent keys must replace blocks of their tenants."""
        if self._tenants is None:
            return 0
        found = zip(keys, self._policy.find(keys), strict=True)
        new = Counter(self._tenants.tenant_of(key) for key, slot in found if slot is None)
        over = [
            min(count, max(0, self._tenants.num_blocks(tenant) + count - self._parts[tenant]))
            for tenant, count in new.items()
        ]
        return sum(over)

    def _place_in_parts(
        self, tenants: TenantPolicies, new: Sequence[StoreItem], roomy: int, most: int
    ) -> tuple[list[StoreItem], int, list[OffloadKey], list[OffloadKey]]:
        """Place the blocks of each tenant in its part: in free room, or for a victim.

        A tenant that has more, since quotas were changed, loses a further block for each that it
        stores, and makes room for tenants that find none.

        Args:
            tenants: The policy.
            new: The blocks.
            roomy: Number of them for which there is room.
            most: Maximum number of victims.

        Returns:
            The blocks that are stored, first those without a victim; the number of these; the
            victims of the others; and further victims.
        """
        placed: list[StoreItem] = []
        replacing: list[StoreItem] = []
        victims: list[OffloadKey] = []
        surplus: list[OffloadKey] = []
        for tenant in dict.fromkeys([tenants.tenant_of(item.key) for item in new]):
            own = [item for item in new if tenants.tenant_of(item.key) == tenant]
            excess = tenants.num_blocks(tenant) + len(own) - self._parts[tenant]
            num_free = min(roomy - len(placed), len(own) - min(len(own), max(0, excess)))
            keys = [item.key for item in own[num_free:]]
            over = min(len(keys), max(0, excess))
            found = self._evict_of(tenants, tenant, keys, min(over, most - len(victims)))
            if (lacking := min(len(keys) - over, most - len(victims) - len(found))) > 0:
                other, num_over = tenants.fullest(self._parts)
                chosen = (other, min(lacking, num_over)) if num_over else (tenant, lacking)
                found += self._evict_of(tenants, chosen[0], keys, chosen[1])
            placed += own[:num_free]
            replacing += own[num_free : num_free + len(found)]
            victims += found
            if most:
                further = min(len(found), max(0, excess - len(own)))
                surplus += self._evict_of(tenants, tenant, keys, further)
        return placed + replacing, len(placed), victims, surplus

    def _evict_of(
        self, tenants: TenantPolicies, tenant: int, coming: Sequence[OffloadKey], count: int
    ) -> list[OffloadKey]:
        """Remove up to `count` idle blocks of a tenant from the policy."""
        keys_of = self._policy.keys_of
        incoming = [*coming, *placeholders(count - len(coming))]
        slots = tenants.evict_some(
            tenant, incoming, count, lambda slot: self._is_idle(keys_of([slot])[0])
        )
        victims = self._policy.remove(slots)
        self.blocks.leave(victims)
        return victims

    async def account(self, plan: Plan, run_io: RunIo) -> None:
        """Process the results of a store, roll back untried items, and update the shared count."""
        kept: list[OffloadKey] = []
        dropped: list[OffloadKey] = []
        evicted: list[OffloadKey] = []
        victims: list[OffloadKey] = []
        for item in plan.items:
            status = item.status
            if status in STORED:
                kept.append(item.key)
            elif item.may_write or status is StoreStatus.ABSENT:
                dropped.append(item.key)
                if status is StoreStatus.ABSENT:
                    evicted.append(item.key)  # by another process
            if item.victim is not None:
                victims.append(item.victim)
                is_gone = item.freed_bytes is not None or status is StoreStatus.VICTIM_GONE
                (evicted if is_gone else kept).append(item.victim)
        self.forget(dropped)
        self.blocks.left(victims)
        self.blocks.admit(kept)
        if evicted:
            self._announce_gone(evicted)
        if plan.operation is not None:
            await self.settle(plan.operation, changes_of(plan.items), run_io)

    def operation(self) -> Operation:
        """Return an operation without reserved room, for a job that may remove a few blocks."""
        return Operation(self._usage.marks)

    async def settle(
        self, operation: Operation, changes: Sequence[DiskChange], run_io: RunIo
    ) -> None:
        """End an operation, and update the shared count."""
        self._usage.end(operation, changes)
        await self._report(run_io)

    async def _report(self, run_io: RunIo) -> None:
        """Update the shared count. On an error, a later update catches up, and no job fails."""
        try:
            await run_io(self._usage.report)
        except (OSError, OffloadError) as error:
            logger.warning("the shared count was not updated: %s", str(error))

    # -- background eviction ----------------------------------------------------------------

    async def trim(self, run_io: RunIo) -> None:
        """Evict blocks down to the low watermark, or for a limited time; call again to continue.

        Raises:
            OSError: The count cannot be used.
        """
        if self.blocks.is_first_cycle:
            self._warn_of_waiting()
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _SLICE_S
        now = await run_io(self._usage.read)
        if not self._num_trimmed:
            self._before_bytes = now.total_bytes
        while victims := await self._take_excess(now, run_io):
            await self.remove(victims, run_io)
            self._num_trimmed += len(victims)
            now = await run_io(self._usage.read)
            if loop.time() >= until_s:
                return
        await self._end_trimming(now, run_io)

    def withdraw(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Remove the idle blocks from the policy and return them; `remove` deletes their files.

        Blocks that are not known yet are included.
        """
        idle = [key for key in keys if key not in self._busy]
        self._policy.discard(idle)
        self.blocks.leave(idle)
        return idle

    async def remove(self, victims: Sequence[OffloadKey], run_io: RunIo) -> None:
        """Delete the files of blocks removed from the policy; then update the count."""
        if not victims:
            return

        def delete() -> None:
            operation = self._usage.begin(self._block_bytes, len(victims))
            self._usage.end(operation, self._files.remove(victims))

        try:
            await run_io(delete)
        finally:
            self.blocks.left(victims)
            self._announce_gone(victims)
            await self._report(run_io)

    def evict_idle(self, count: int) -> list[OffloadKey]:
        """Remove up to `count` idle blocks from the policy; `remove` deletes their files."""
        if self._tenants is None:
            return self._evict([], self._num_idle(count))
        tenant, over = self._tenants.fullest(self._parts)
        portion = max(1, count // len(self._parts))  # then another may be the fullest
        return self._evict_of(self._tenants, tenant, (), min(count, over or portion))

    def num_excess(self, now: Usage) -> int:
        """Return the number of blocks to evict in the background, at most one batch.

        Eviction begins above the high watermark, and continues to the low one.
        """
        settings = self._files.settings
        mark = settings.low_watermark if self._num_trimmed else settings.high_watermark
        excess_bytes = max(0, now.total_bytes - int(mark * self._capacity_bytes))
        return min(_TRIM_BATCH, -(-excess_bytes // self._block_bytes))

    async def _take_excess(self, now: Usage, run_io: RunIo) -> list[OffloadKey]:
        """Remove the next blocks to evict from the policy: the oldest, if their ages are known."""
        count, ages = self.num_excess(now), self.blocks.ages
        if not count:
            return []
        if ages is not None:
            if not self._is_sorted:
                await run_io(ages.sorting())
                self._is_sorted = True
            if victims := self.blocks.take_oldest(count):
                return victims
        return self.evict_idle(count)

    async def _end_trimming(self, now: Usage, run_io: RunIo) -> None:
        """Add blocks that could not be ranked before; log removals due to a reduced capacity."""
        blocks = self.blocks
        if blocks.ages is not None:
            held, blocks.ages = blocks.ages.held, None
            rest = sorted(held, key=held.__getitem__)  # oldest first
            for first in range(0, len(rest), _PORTION):
                surplus = blocks.learn(rest[first : first + _PORTION])
                await asyncio.sleep(0)
                await self.remove(self.withdraw(surplus), run_io)
        num_trimmed, self._num_trimmed = self._num_trimmed, 0
        if num_trimmed and self._before_bytes > self._capacity_bytes:
            logger.warning(
                "%s: %d bytes were stored, and capacity_bytes is %d: %d blocks were removed, the "
                "least valuable first, and %d bytes are stored now",
                self._files.namespace.folder,
                self._before_bytes,
                self._capacity_bytes,
                num_trimmed,
                now.total_bytes,
            )

    def _warn_of_waiting(self) -> None:
        """Warn once that a reduced capacity takes effect only after a cycle of walks."""
        total_bytes = self._usage.total_bytes
        if self._has_warned or not self._usage.is_complete or total_bytes <= self._capacity_bytes:
            return
        self._has_warned = True
        logger.warning(
            "%s: %d bytes are stored, and capacity_bytes is %d: blocks are served, and no new ones "
            "stored until a walk over all of them has found the oldest to remove",
            self._files.namespace.folder,
            total_bytes,
            self._capacity_bytes,
        )

    # -- inside ---------------------------------------------------------------------------------

    def _num_idle(self, most: int) -> int:
        """Return the number of known blocks that are not busy, at most `most`."""
        num = len(self._policy) - len(self._busy)
        if num < most:  # some of the busy blocks may not be known
            num += self._policy.find(list(self._busy)).count(None)
        return min(num, most)

    def _evict(self, coming: Sequence[OffloadKey], count: int) -> list[OffloadKey]:
        """Remove `count` idle blocks from the policy, or none, to make room for blocks `coming`.

        Some of the new blocks may already have room.
        """
        incoming = [*coming, *placeholders(count - len(coming))]
        victims = self._policy.make_room(incoming, count, self._is_idle) or []
        self.blocks.leave(victims)
        return victims

    def _is_idle(self, key: OffloadKey) -> bool:
        if key not in self._busy:
            return True
        self._passed.add(key)
        return False


def unpin(pins: Counter[OffloadKey], keys: Iterable[OffloadKey]) -> None:
    """Remove one pin from each of these blocks, if it has one."""
    for key in keys:
        if pins[key] > 1:
            pins[key] -= 1
        else:
            pins.pop(key, None)
