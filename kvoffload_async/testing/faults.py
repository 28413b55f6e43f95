"""A wrapper that injects faults into any tier, drawn per job from a seed."""

from __future__ import annotations

import asyncio
import enum
import errno
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import AsyncTier, TierEnvironment
from kvoffload_async.errors import TierError, TierUnavailableError
from kvoffload_async.types import JobMetadata, OffloadKey
from kvoffload_async.waiting import until_done


class Fault(enum.Enum):
    """Faults of a job."""

    NONE = enum.auto()
    IO_ERROR_BEFORE = enum.auto()
    """Raises OSError before any byte has moved."""
    IO_ERROR_AFTER = enum.auto()
    """Raises OSError after all bytes have moved."""
    SOME_BLOCKS = enum.auto()
    """Some blocks fail, the others succeed."""
    SLOW = enum.auto()
    """Takes `slow_s` longer."""
    HANG = enum.auto()
    """Blocks until `FaultyTier.release`, ignoring cancellation, like a system call."""
    CANCELLED = enum.auto()
    """The job's task is cancelled while it runs."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Assigns faults to jobs, as a function of the seed and the job's id alone.

    Attributes:
        seed: Equal seeds give equal faults, whatever the order of the jobs.
        weights: Relative probability of each fault; faults without a weight never occur.
        slow_s: Additional seconds of a slow job.
        by_job: Faults fixed by job id.
    """

    seed: int = 0
    weights: Mapping[Fault, float] = field(default_factory=lambda: {Fault.NONE: 1.0})
    slow_s: float = 0.01
    by_job: Mapping[int, Fault] = field(default_factory=dict)

    def fault_of(self, job: JobMetadata) -> Fault:
        """Return the fault of a job."""
        if job.job_id in self.by_job:
            return self.by_job[job.job_id]
        drawn = self._random(job).choices(list(self.weights), list(self.weights.values()))
        return drawn[0]

    def failed_blocks(self, job: JobMetadata) -> list[int]:
        """Return the indices of a job's blocks that fail under `SOME_BLOCKS`: at least one."""
        count = len(job.keys)
        draw = self._random(job)
        return sorted(draw.sample(range(count), draw.randint(1, count))) if count else []

    def _random(self, job: JobMetadata) -> random.Random:
        return random.Random(f"{self.seed}:{job.job_id}")


class FaultyTier(AsyncTier):
    """Wraps a tier and injects a plan's faults into its stores and loads."""

    def __init__(self, tier: AsyncTier, plan: FaultPlan | None = None) -> None:
        """Wrap and own `tier`; without a plan no fault occurs."""
        self.inner = tier
        self.plan = plan or FaultPlan()
        self.capabilities = tier.capabilities
        self.bounds = tier.bounds
        self.injected: list[tuple[int, Fault]] = []
        """(job id, fault) in the order in which the jobs began, without `NONE`."""
        self._hung: list[asyncio.Future[None]] = []
        self._released = False

    def opening_s(self, block_bytes: int) -> float:
        """Return the wrapped tier's value."""
        return self.inner.opening_s(block_bytes)

    async def open(self, env: TierEnvironment) -> None:
        """Open the wrapped tier."""
        await self.inner.open(env)

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Query the wrapped tier."""
        return await self.inner.contains(keys)

    async def longest_prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> Sequence[int]:
        """Query the wrapped tier."""
        return await self.inner.longest_prefixes(chains)

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Store through the wrapped tier, with the job's fault."""
        return await self._perform(job)

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Load through the wrapped tier, with the job's fault."""
        return await self._perform(job)

    async def close(self) -> None:
        """Close the wrapped tier."""
        await self.inner.close()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Forward to the wrapped tier."""
        self.inner.touch(keys)

    def describe(self) -> str:
        """Return the wrapped tier's description, marked as faulty."""
        return f"{self.inner.describe()} (with faults)"

    def release(self) -> None:
        """Resume all hung jobs, and let later ones pass. Call from the loop's thread."""
        self._released = True
        for release in self._hung:
            if not release.done():
                release.set_result(None)

    async def _perform(self, job: JobMetadata) -> BlockFailures:
        fault = self.plan.fault_of(job)
        if fault is not Fault.NONE:
            self.injected.append((job.job_id, fault))
        if fault is Fault.SOME_BLOCKS:
            return await self._perform_some(job)
        if fault is Fault.IO_ERROR_BEFORE:
            raise _io_error(job)
        if fault is Fault.HANG:
            await self._hang()
        elif fault is Fault.SLOW:
            await asyncio.sleep(self.plan.slow_s)
        elif fault is Fault.CANCELLED:
            _cancel_this_task()
            await asyncio.sleep(0)
        outcome = await self._forward(job)
        if fault is Fault.IO_ERROR_AFTER:
            raise _io_error(job)
        return outcome

    async def _forward(self, job: JobMetadata) -> BlockFailures:
        operation = self.inner.load if job.is_promotion else self.inner.store
        return await operation(job)

    async def _perform_some(self, job: JobMetadata) -> BlockFailures:
        """Run the job without its failing blocks; map failures back to the job's indices."""
        failed = self.plan.failed_blocks(job)
        failures: dict[int, TierError] = {
            i: TierUnavailableError(f"injected: block {i} of job {job.job_id}") for i in failed
        }
        kept = [i for i in range(len(job.keys)) if i not in failures]
        if kept:
            keys = tuple(job.keys[i] for i in kept)
            part = replace(job, keys=keys, block_ids=job.block_ids[kept])
            outcome = await self._forward(part)
            failures.update({kept[i]: error for i, error in outcome.items()})
        return failures

    async def _hang(self) -> None:
        """Wait for the release; a cancellation is delayed until then."""
        release: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._released:
            release.set_result(None)
        self._hung.append(release)
        try:
            await until_done(release)
        finally:
            self._hung.remove(release)


def _io_error(job: JobMetadata) -> OSError:
    return OSError(errno.EIO, f"injected: job {job.job_id}")


def _cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    task.cancel()
