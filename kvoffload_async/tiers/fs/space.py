"""Space management under a capacity: reservations and eviction.

The eviction policy and the known blocks are used on the loop's thread, the shared count and the
files on I/O threads. A victim is removed from the policy before its file is deleted, and from the
count only after.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.ranking import KeyRanking, placeholders
from kvoffload_async.errors import OffloadError
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.counts import Usage
from kvoffload_async.tiers.fs.known import KnownBlocks
from kvoffload_async.tiers.fs.outcome import DiskChange, StoreItem, StoreOutcome, StoreStatus
from kvoffload_async.tiers.fs.usage import UsageFile
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRIM_BATCH = 256
_ENTRIES_BYTES = 256
_GROWTH_STEPS = 2


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
        folder_bytes: int,
        announce: Callable[[Iterable[OffloadKey]], None],
    ) -> None:
        """Start without known blocks.

        Args:
            settings: The limits.
            policy: Ranks the known blocks; owned by this object.
            usage: The shared count.
            files: The block files.
            block_bytes: Disk bytes of a block's file.
            folder_bytes: Disk bytes of a new folder.
            announce: Called with the blocks that were evicted or have vanished.
        """
        self._settings = settings
        self._policy = KeyRanking(policy)
        self._usage = usage
        self._files = files
        self._block_bytes = block_bytes
        # A block may need a leaf folder and its parent, and folders grow with their
        # entries, in steps that may coincide.
        self._folders_bytes = 2 * folder_bytes + (_ENTRIES_BYTES if folder_bytes else 0)
        self._unit_bytes = block_bytes + self._folders_bytes
        self._limit_bytes = settings.capacity_bytes - _GROWTH_STEPS * folder_bytes
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
        try:
            await run_io(partial(self._usage.settle, released_bytes, change, operation))
        except (OSError, OffloadError) as error:
            logger.warning("the shared count was not updated: %s", str(error))

    async def _fill(
        self, plan: Plan, items: Sequence[StoreItem], run_io: RunIo, *, squeeze: bool
    ) -> None:
        new = [item for item in items if item.key not in self._policy]
        granted = 0
        if new:
            count = 0 if squeeze else len(new)
            granted = await self._reserve(plan, self._unit_bytes, count, run_io)
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
        replacing = [
            replace(item, victim=victim)
            for item, victim in zip(coming[roomy:], victims, strict=True)
        ]
        plan.items += replacing
        if replacing and self._folders_bytes:
            await self._pay_folders(plan, replacing, run_io, squeeze=squeeze)

    async def _pay_folders(
        self, plan: Plan, replacing: list[StoreItem], run_io: RunIo, *, squeeze: bool
    ) -> None:
        """Reserve room for folders, which replacing a victim's file may need in addition.

        Items of `replacing` (the last of the plan) without such room are removed from the plan.
        """
        unpaid = len(replacing)
        if not squeeze:
            unpaid -= await self._reserve(plan, self._folders_bytes, unpaid, run_io)
        if not unpaid:
            return
        spare = min(-(-unpaid * self._folders_bytes // self._block_bytes), self._idle_count())
        if spare:
            await self.remove(self._evict([], spare), run_io)
            unpaid -= await self._reserve(plan, self._folders_bytes, unpaid, run_io)
        if not unpaid:
            return
        given_up = replacing[-unpaid:]
        await self.remove([item.victim for item in given_up if item.victim is not None], run_io)
        paid = await self._reserve(plan, self._unit_bytes, unpaid, run_io)
        given_up = [replace(item, victim=None) for item in given_up]
        plan.items[-unpaid:] = given_up[:paid]
        plan.unplaced += given_up[paid:]
        self.forget([item.key for item in given_up[paid:]])

    async def _reserve(self, plan: Plan, unit_bytes: int, count: int, run_io: RunIo) -> int:
        granted = 0

        def reserve() -> None:
            nonlocal granted
            if plan.operation is None:
                plan.operation = self._usage.begin()
            granted = self._usage.reserve(unit_bytes, count, self._limit_bytes)

        try:
            await run_io(reserve)
        finally:
            plan.reserved_bytes += granted * unit_bytes  # even if this task is cancelled
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
        excess = max(0, usage.total_bytes - int(mark * self._limit_bytes))
        # Assumes that folders are freed, too; if not, the next batch continues.
        return min(_TRIM_BATCH, -(-excess // self._unit_bytes))

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
