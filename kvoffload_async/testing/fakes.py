"""Fakes: a loop with virtual time, parked calls, and faults injected into any tier.

The loop never sleeps and needs no thread: when nothing is ready, time jumps to the next timer. A
test that waits for an hour takes a millisecond, and its schedule is deterministic.

The test decides when, and with which outcome, each parked call ends. A parked call behaves like a
copy in flight: cancelling its task does not end it. A call that the test does not finish hangs.

Faults are drawn per job from a seed.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import AsyncTier, Direction, TierEnvironment
from kvoffload_async.errors import StateError, TierError, TierUnavailableError
from kvoffload_async.types import JobMetadata, OffloadKey
from kvoffload_async.waiting import until_done

T = TypeVar("T")


class InlineIo:
    """An `IoRunner` that runs every call immediately on the loop's thread."""

    async def run(self, direction: Direction, call: Callable[[], T], **_options: object) -> T:
        """Run a call now; the options are ignored. See `IoRunner.run`."""
        await asyncio.sleep(0)
        return call()


@dataclass(slots=True, eq=False)
class ParkedCall:
    """A blocking call that is parked until the test finishes it."""

    direction: Direction
    call: Callable[[], Any]
    future: asyncio.Future[Any] = field(repr=False)


class ScriptedIo:
    """An `IoRunner` that parks every call until the test finishes it.

    Attributes:
        parked: Parked calls, oldest first.
    """

    def __init__(self) -> None:
        """Start without parked calls."""
        self.parked: list[ParkedCall] = []

    async def run(self, direction: Direction, call: Callable[[], T], **_options: object) -> T:
        """Park a call; the options are ignored. See `IoRunner.run`."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.parked.append(ParkedCall(direction, call, future))
        return await until_done(future)

    def finish(
        self, parked: ParkedCall, error: Exception | None = None, *, after_run: bool = False
    ) -> None:
        """Finish a parked call: run it now, or fail it without running it.

        Args:
            parked: An element of `self.parked`.
            error: Raise this instead of running the call.
            after_run: With `error`: run the call first, then raise.
        """
        self.parked.remove(parked)
        if error is None or after_run:
            try:
                result = parked.call()
            except Exception as raised:  # noqa: BLE001 - becomes the call's outcome
                error = error or raised
        parked.call = lambda: None  # releases what the call captured
        if error is None:
            parked.future.set_result(result)
        else:
            parked.future.set_exception(error)


class Fault(enum.Enum):
    """Kinds of faults that a job can have."""

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
        """Return the wrapped tier's `opening_s`."""
        return self.inner.opening_s(block_bytes)

    async def open(self, env: TierEnvironment) -> None:
        """Open the wrapped tier."""
        await self.inner.open(env)

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Query the wrapped tier for stored keys."""
        return await self.inner.contains(keys)

    async def longest_prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> Sequence[int]:
        """Query the wrapped tier for the longest stored prefixes."""
        return await self.inner.longest_prefixes(chains)

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Store through the wrapped tier, with the job's fault."""
        return await self._perform(job)

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Load through the wrapped tier, with the job's fault."""
        return await self._perform(job)

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        """Return the wrapped tier's answer."""
        return await self.inner.delete(keys)

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return the wrapped tier's answer."""
        return await self.inner.list_keys(cursor, count)

    async def list_older(
        self, cursor: str | None, count: int, age_s: float
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """Return the wrapped tier's answer."""
        return await self.inner.list_older(cursor, count, age_s)

    async def close(self) -> None:
        """Close the wrapped tier."""
        await self.inner.close()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Forward the use of blocks to the wrapped tier."""
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
        """Wait for `release`; a cancellation is delayed until then."""
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


_MAX_IDLE_TURNS = 100_000


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time, without I/O or wake-ups from other threads.

    It is driven by asyncio (`asyncio.Runner(loop_factory=VirtualLoop)`), or by a test with
    `run_ready`, `advance` and `run_until`. An exception that asyncio would only log, such as one
    raised by a callback, is raised by the call that drives the loop.
    """

    def __init__(self) -> None:
        """Start at virtual time 0."""
        super().__init__()
        self._selector = SimpleNamespace(select=self._pass_time)
        self._now_s = 0.0
        self._limit_s: float | None = None
        self._was_idle = False
        self._unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self._unhandled.append(context))

    def time(self) -> float:
        """Return virtual seconds since the loop was created."""
        return self._now_s

    def run_ready(self) -> None:
        """Run until nothing is ready, without advancing time."""
        self._run_to(lambda: False, self._now_s)

    def advance(self, seconds: float) -> None:
        """Advance time, running everything that becomes ready."""
        self._run_to(lambda: False, self._now_s + seconds)

    def run_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Advance time until `is_done()`; return False after `timeout_s` virtual seconds."""
        return self._run_to(is_done, self._now_s + timeout_s)

    def _run_to(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        idle_turns = 0
        while not is_done():
            before_s = self._now_s
            self._turn(limit_s)
            if self._was_idle:
                return is_done()
            idle_turns = idle_turns + 1 if self._now_s == before_s else 0
            if idle_turns > _MAX_IDLE_TURNS:
                raise StateError(f"{idle_turns} iterations without time passing: busy loop")
        return True

    def _turn(self, limit_s: float) -> None:
        """Run one iteration of the loop, in which time may jump, at most to `limit_s`."""
        self._limit_s = limit_s
        try:
            self.run_forever()
        finally:
            self._limit_s = None
        if self._unhandled:
            context = self._unhandled.pop(0)
            error = context.get("exception")
            raise error if error is not None else StateError(str(context["message"]))

    def _pass_time(self, timeout_s: float | None) -> tuple[()]:
        """Replace the selector of I/O events: advance virtual time, and return no events."""
        if self._limit_s is None:
            if timeout_s is None:
                raise StateError("deadlock: nothing is ready and no timer is set")
            self._now_s += timeout_s
            return ()
        self.stop()  # after this iteration
        next_s = math.inf if timeout_s is None else self._now_s + timeout_s
        self._was_idle = timeout_s != 0 and next_s > self._limit_s
        self._now_s = min(next_s, max(self._limit_s, self._now_s))
        return ()

    def _process_events(self, event_list: tuple[()]) -> None:
        """Do nothing: there are no I/O events."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps."""
