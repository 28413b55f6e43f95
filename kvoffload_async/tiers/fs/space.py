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
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.ranking import KeyRanking, placeholders
from kvoffload_async.errors import OffloadError
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.known import KnownBlocks
from kvoffload_async.tiers.fs.outcome import DiskChange, StoreItem, StoreOutcome, StoreStatus
from kvoffload_async.tiers.fs.usage import Usage, UsageFile
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIM_BATCH = 256
_ENTRY_BYTES = 4096
_ENTRIES_SHARE = 64
_MAX_ENTRIES_BYTES = 16 * _ENTRY_BYTES


class RunIo(Protocol):
    """Runs a call on an I/O thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class SpaceSettings:
    """Limits of a namespace.

    Attributes:
        capacity_bytes: Maximum disk bytes, never exceeded.
        high_watermark: Fraction of it above which background eviction starts.
        low_watermark: Fraction of it at which background eviction stops.
    """

    capacity_bytes: int
    high_watermark: float
    low_watermark: float


@dataclass(slots=True)
class Plan:
    """Room for the blocks of a job.

    Attributes:
        items: Blocks to pass to `BlockWriter.store`, each with its room.
        unplaced: Blocks without room.
        reserved_bytes: Bytes reserved in the shared count.
        operation: Its operation number in the shared count; None before it began.
    """

    items: list[StoreItem] = field(default_factory=list)
    unplaced: list[StoreItem] = field(default_factory=list)
    reserved_bytes: int = 0
    operation: int | None = None


class Space:
    """Space of one namespace as seen by one tier. Loop thread only."""

    def __init__(
        self,
        settings: SpaceSettings,
        policy: CachePolicy,
        usage: UsageFile,
        files: BlockFiles,
        *,
        block_bytes: int,
        announce: Callable[[Iterable[OffloadKey]], None],
    ) -> None:
        """Start without known blocks.

        Args:
            settings: The limits.
            policy: Ranks the known blocks; owned by this object.
            usage: The shared count.
            files: The block files.
            block_bytes: Disk bytes of a block's file.
            announce: Called with the blocks that were evicted or have vanished.
        """
        self._settings = settings
        self._policy = KeyRanking(policy)
        self._usage = usage
        self._files = files
        self._block_bytes = block_bytes
        # Tiers that open later find room for their entries, and need not evict blocks for them.
        entries_bytes = settings.capacity_bytes // _ENTRIES_SHARE // _ENTRY_BYTES * _ENTRY_BYTES
        self._limit_bytes = settings.capacity_bytes - min(entries_bytes, _MAX_ENTRIES_BYTES)
        self._announce = announce
        self._busy: Counter[OffloadKey] = Counter()
        self.blocks = KnownBlocks(self._policy, self._busy)

    @property
    def can_evict(self) -> bool:
        """Whether there is an evictable block whose room could be used."""
        return self.can_store and self._idle_count() > 0

    @property
    def can_store(self) -> bool:
        """Whether the count is complete and does not exceed a reduced capacity.

        If it does, the oldest blocks have to be evicted first, and are not all known yet.
        """
        is_over = self._usage.total_bytes > self._settings.capacity_bytes
        return self._usage.is_complete and not (is_over and self.blocks.ages is not None)

    def gauges(self) -> dict[str, float]:
        """Return the usage of the directory as last read by this process. Thread-safe."""
        return {
            "used_bytes": self._usage.total_bytes,
            "capacity_bytes": self._settings.capacity_bytes,
        }

    # -- known blocks --------------------------------------------------------------------------

    def known(self) -> frozenset[OffloadKey]:
        """Return the known blocks. For inspection."""
        return frozenset(self._policy)

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
            self._announce(vanished)
        return more

    def present(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the known ones of these blocks."""
        return [key for key in keys if key in self._policy]

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Drop blocks whose files were removed."""
        self.blocks.left(keys)
        self._policy.discard(keys)

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of blocks, first block first."""
        self._policy.access(keys)

    def loaded(self, keys: Sequence[OffloadKey]) -> None:
        """Record loaded blocks, first block first; they may be stored by another process."""
        self.blocks.learn(keys)
        self._policy.access(keys)

    def pin(self, keys: Iterable[OffloadKey]) -> None:
        """Prevent the eviction of blocks while they are read or written."""
        self._busy.update(keys)

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Release one `pin`."""
        self._busy.subtract(keys)
        released = [key for key in dict.fromkeys(keys) if not self._busy[key]]
        for key in released:
            del self._busy[key]
        self._policy.released(released)

    # -- room for a job -------------------------------------------------------------------------

    async def plan(self, items: Sequence[StoreItem], run_io: RunIo, *, squeeze: bool) -> Plan:
        """Reserve room for blocks, evicting others; `account` must be called afterwards.

        Args:
            items: Blocks to store.
            run_io: Runs a call on an I/O thread.
            squeeze: The disk is full below the capacity: every block must replace another.
        """
        plan = Plan()
        try:
            await self._fill(plan, items, run_io, squeeze=squeeze)
        except BaseException:
            await self.account(plan, [], run_io)
            raise
        return plan

    async def account(self, plan: Plan, outcomes: Sequence[StoreOutcome], run_io: RunIo) -> None:
        """Process the results of stores and update the shared count; undo untried items."""
        change = DiskChange()
        evicted: list[OffloadKey] = []
        untried = {item.index: item for item in plan.items}
        for outcome in outcomes:
            del untried[outcome.item.index]
            change += outcome.change
            self._take_in(outcome, evicted)
        for item in untried.values():
            self._take_in(StoreOutcome(item), evicted)
        if evicted:
            self._announce(evicted)
        if plan.operation is not None:
            await self.settle(plan.reserved_bytes, change, run_io, plan.operation)

    async def settle(
        self,
        released_bytes: int,
        change: DiskChange,
        run_io: RunIo,
        operation: int | None = None,
    ) -> None:
        """Update the shared count. On an error, a later update catches up, and no job fails."""
        self._usage.record(released_bytes, change, operation)
        try:
            await run_io(self._usage.tell)
        except (OSError, OffloadError) as error:
            logger.warning("the shared count was not updated: %s", str(error))

    async def _fill(
        self, plan: Plan, items: Sequence[StoreItem], run_io: RunIo, *, squeeze: bool
    ) -> None:
        new = [item for item in items if item.key not in self._policy]
        granted = 0
        if new:
            count = 0 if squeeze else len(new)
            granted = await self._reserve(plan, count, run_io)
        new = []
        for item in items:  # checked again: another job may have stored it
            if item.key in self._policy:
                plan.items.append(replace(item, may_write=False))
            else:
                new.append(item)
        roomy = max(0, min(granted, len(new), self._policy.capacity_blocks - len(self._policy)))
        # Without a complete count, the room of a victim cannot be used.
        count = min(len(new) - roomy, self._idle_count()) if self.can_evict else 0
        coming = new[: roomy + count]
        victims = self._evict([item.key for item in coming], count)
        if not victims:
            del coming[roomy:]
        plan.unplaced = new[len(coming) :]
        self.blocks.admit([item.key for item in coming])
        plan.items += coming[:roomy]
        plan.items += [
            replace(item, victim=victim)
            for item, victim in zip(coming[roomy:], victims, strict=True)
        ]

    async def _reserve(self, plan: Plan, count: int, run_io: RunIo) -> int:
        granted = 0

        def reserve() -> None:
            nonlocal granted
            if plan.operation is None:
                plan.operation = self._usage.begin()
            granted = self._usage.reserve(self._block_bytes, count, self._limit_bytes)

        try:
            await run_io(reserve)
        finally:
            plan.reserved_bytes += granted * self._block_bytes  # even if this task is cancelled
        return granted

    def _take_in(self, outcome: StoreOutcome, evicted: list[OffloadKey]) -> None:
        """Process the result of storing one block; append evicted blocks to `evicted`."""
        item, status = outcome.item, outcome.status
        if status in {StoreStatus.WRITTEN, StoreStatus.PRESENT}:
            self.blocks.admit([item.key])
        elif item.may_write or status is StoreStatus.ABSENT:
            self.forget([item.key])
            if status is StoreStatus.ABSENT:
                evicted.append(item.key)  # evicted by another process
        if item.victim is None:
            return
        self.blocks.left([item.victim])
        if outcome.victim_taken or status is StoreStatus.VICTIM_GONE:
            evicted.append(item.victim)
        else:
            self.blocks.admit([item.victim])  # its file was not used

    # -- background eviction ----------------------------------------------------------------

    def num_excess(self, usage: Usage, *, trimming: bool) -> int:
        """Return the number of blocks to evict in the background, at most one batch.

        Args:
            usage: The shared count.
            trimming: Whether eviction has begun, and continues to the low watermark.
        """
        settings = self._settings
        mark = settings.low_watermark if trimming else settings.high_watermark
        excess = max(0, usage.total_bytes - int(mark * settings.capacity_bytes))
        return min(_TRIM_BATCH, -(-excess // self._block_bytes))

    def evict_idle(self, count: int) -> list[OffloadKey]:
        """Remove up to `count` idle blocks from the policy; `remove` deletes their files."""
        return self._evict([], min(count, self._idle_count()))

    async def remove(self, victims: Sequence[OffloadKey], run_io: RunIo) -> None:
        """Delete the files of blocks removed from the policy; then update the count."""
        if not victims:
            return
        change = DiskChange()
        operation = None

        def delete() -> None:
            nonlocal change, operation
            operation = self._usage.begin()
            self._usage.read()  # publishes the operation before the disk is changed
            change = self._files.remove(victims)

        try:
            await run_io(delete)
        finally:
            self.blocks.left(victims)
            self._announce(victims)
            await self.settle(0, change, run_io, operation)

    def _idle_count(self) -> int:
        return len(self._policy) - sum(key in self._policy for key in self._busy)

    def _evict(self, coming: Sequence[OffloadKey], count: int) -> list[OffloadKey]:
        """Remove `count` idle blocks from the policy, or none; `coming` are the new blocks.

        Some of the new blocks may already have room.
        """
        busy = self._busy
        incoming = [*coming, *placeholders(count - len(coming))]
        victims = self._policy.make_room(incoming, count, lambda key: key not in busy) or []
        self.blocks.leave(victims)
        return victims


_SLICE_S = 5.0
"""Maximum time per call, so that the caller can send heartbeats."""
_PORTION = 1024


class Trimming:
    """Trims one namespace to its capacity."""

    def __init__(
        self, usage: UsageFile, space: Space, run: RunIo, folder: str, capacity_bytes: int
    ) -> None:
        """Create the object; `folder` and `capacity_bytes` appear in log messages."""
        self._usage = usage
        self._space = space
        self._run = run
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._has_warned = False
        self._is_sorted = False
        self._before_bytes = 0
        self._num_removed = 0

    async def trim(self) -> None:
        """Evict blocks down to the low watermark, or for a limited time; call again to continue.

        Raises:
            OSError: The count cannot be used.
        """
        if self._space.blocks.is_first_cycle:
            self._warn_of_waiting()
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _SLICE_S
        now = await self._run(self._usage.read)
        if not self._num_removed:
            self._before_bytes = now.total_bytes
        while victims := await self._victims(now):
            await self._space.remove(victims, self._run)
            self._num_removed += len(victims)
            now = await self._run(self._usage.read)
            if loop.time() >= until_s:
                return
        await self._end(now)

    # -- inside ---------------------------------------------------------------------------------

    def _warn_of_waiting(self) -> None:
        """Warn once that a reduced capacity takes effect only after a cycle of walks."""
        total_bytes = self._usage.total_bytes
        if self._has_warned or not self._usage.is_complete or total_bytes <= self._capacity_bytes:
            return
        self._has_warned = True
        logger.warning(
            "%s: %d bytes are stored, and capacity_bytes is %d: blocks are served, and no new ones "
            "stored until a walk over all of them has found the oldest to remove",
            self._folder,
            total_bytes,
            self._capacity_bytes,
        )

    async def _victims(self, now: Usage) -> list[OffloadKey]:
        space, ages = self._space, self._space.blocks.ages
        count = space.num_excess(now, trimming=self._num_removed > 0)
        if not count:
            return []
        if ages is not None:
            if not self._is_sorted:
                await self._run(ages.sorting())
                self._is_sorted = True
            if victims := space.blocks.take_oldest(count):
                return victims
        return space.evict_idle(count)

    async def _end(self, now: Usage) -> None:
        """Learn blocks that could not be ranked before; log removals after a reduced capacity."""
        blocks = self._space.blocks
        if blocks.ages is not None:
            rest, blocks.ages = blocks.ages.rest(), None
            for first in range(0, len(rest), _PORTION):
                surplus = blocks.learn(rest[first : first + _PORTION])
                await asyncio.sleep(0)
                await self._space.remove(surplus, self._run)
        num_removed, self._num_removed = self._num_removed, 0
        if num_removed and self._before_bytes > self._capacity_bytes:
            logger.warning(
                "%s: %d bytes were stored, and capacity_bytes is %d: %d blocks were removed, the "
                "least valuable first, and %d bytes are stored now",
                self._folder,
                self._before_bytes,
                self._capacity_bytes,
                num_removed,
                now.total_bytes,
            )
