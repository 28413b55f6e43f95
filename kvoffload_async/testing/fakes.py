"""Fakes: a loop with virtual time, calls that park, and faults injected into any tier.

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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import (
    AsyncTier,
    Direction,
    TierBounds,
    TierCapabilities,
    TierEnvironment,
)
from kvoffload_async.errors import (
    BlockMissingError,
    ClosedError,
    StateError,
    TierClosedError,
    TierError,
    TierUnavailableError,
)
from kvoffload_async.runtime.loop import LoopRunner
from kvoffload_async.types import JobMetadata, OffloadKey, block_text
from kvoffload_async.waiting import until_done

T = TypeVar("T")


class InlineIo:
    """An `IoRunner` that runs every call immediately on the loop's thread."""

    async def run(self, direction: Direction, call: Callable[[], T], **_options: object) -> T:
        """See `IoRunner.run`; the options are ignored."""
        await asyncio.sleep(0)
        return call()


@dataclass(slots=True, eq=False)
class ParkedCall:
    """A blocking call that waits to be finished by the test."""

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
        """See `IoRunner.run`; the options are ignored."""
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
        parked.call = _finished  # releases what the call captured
        if error is None:
            parked.future.set_result(result)
        else:
            parked.future.set_exception(error)


def _finished() -> None:
    """Replacement for a finished call."""


class Operation(enum.Enum):
    """Operations of a scripted tier."""

    STORE = enum.auto()
    LOAD = enum.auto()
    CONTAINS = enum.auto()
    CLOSE = enum.auto()


@dataclass(slots=True, eq=False)
class ParkedOperation:
    """An operation of a tier that waits to be finished by the test.

    Attributes:
        kind: The operation.
        keys: Its blocks.
        job: Its job, for a store or load.
        task: The task that runs it, so that a test can cancel it.
        landed: Indices of the blocks already moved; see `ScriptedTier.land`.
    """

    kind: Operation
    keys: tuple[OffloadKey, ...]
    job: JobMetadata | None
    task: asyncio.Task[Any] = field(repr=False)
    future: asyncio.Future[Mapping[int, TierError]] = field(repr=False)
    landed: set[int] = field(default_factory=set)


class ScriptedTier(AsyncTier):
    """A tier with real bytes that parks every operation until the test finishes it.

    Bytes move only when an operation is finished, so a slot that was reused too early shows up as
    wrong bytes.

    Attributes:
        blocks: The stored content.
        parked: Parked operations, oldest first.
        is_open: True between `open` and `close`.
        close_count: Number of calls of `close`.
        touched: Keys passed to `touch`.
    """

    def __init__(
        self,
        capabilities: TierCapabilities | None = None,
        bounds: TierBounds | None = None,
        *,
        open_error: Exception | None = None,
        close_error: Exception | None = None,
        parks_close: bool = False,
    ) -> None:
        """Create an empty tier.

        Args:
            capabilities: Default: an exclusive tier's.
            bounds: Default: `TierBounds()`.
            open_error: Raised by `open`.
            close_error: Raised by `close`.
            parks_close: Whether `close` parks, too.
        """
        self.capabilities = capabilities or TierCapabilities(exclusive=True)
        self.bounds = bounds or TierBounds()
        self.blocks: dict[OffloadKey, npt.NDArray[np.uint8]] = {}
        self.parked: list[ParkedOperation] = []
        self.is_open = False
        self.close_count = 0
        self.touched: list[OffloadKey] = []
        self._open_error = open_error
        self._close_error = close_error
        self._parks_close = parks_close
        self._env: TierEnvironment | None = None

    @property
    def env(self) -> TierEnvironment:
        """The environment passed to `open`."""
        if self._env is None:
            raise TierClosedError("the scripted tier is not open")
        return self._env

    async def open(self, env: TierEnvironment) -> None:
        """Open without parking."""
        if self._open_error is not None:
            raise self._open_error
        self._env = env
        self.is_open = True

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Park; then return the keys that are stored."""
        await self._park(Operation.CONTAINS, tuple(keys), None)
        return frozenset(key for key in keys if key in self.blocks)

    async def store(self, job: JobMetadata) -> BlockFailures:
        """Park; then return the outcome. Blocks stored despite a failure are announced."""
        try:
            return await self._park(Operation.STORE, job.keys, job)
        except BaseException:
            self.env.blocks_appeared([key for key in job.keys if key in self.blocks])
            raise

    async def load(self, job: JobMetadata) -> BlockFailures:
        """Park; then return the outcome."""
        return await self._park(Operation.LOAD, job.keys, job)

    async def close(self) -> None:
        """Close without parking, unless `parks_close`."""
        self.close_count += 1
        if self._parks_close:
            await self._park(Operation.CLOSE, (), None)
        self._env = None
        self.is_open = False
        if self._close_error is not None:
            raise self._close_error

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record the keys."""
        self.touched.extend(keys)

    def finish(
        self,
        parked: ParkedOperation,
        failures: Mapping[int, TierError] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Finish a parked operation.

        Args:
            parked: An element of `self.parked`.
            failures: Errors by block index; the other blocks' bytes move.
            error: Raise this, and move no bytes. A CancelledError cancels the operation's task.
        """
        self.parked.remove(parked)
        if isinstance(error, asyncio.CancelledError):
            parked.task.cancel()
            parked.future.set_result({})
        elif error is not None:
            parked.future.set_exception(error)
        elif parked.job is None:
            parked.future.set_result({})
        else:
            parked.future.set_result(self._move(parked, parked.job, dict(failures or {})))

    def land(self, parked: ParkedOperation, index: int) -> None:
        """Move one block of a parked store now, before it is finished."""
        if parked.job is None or parked.kind is not Operation.STORE:
            raise StateError(f"{parked.kind.name} has no block to land")
        parked.landed.add(index)
        row = np.asarray(self.env.kv_view)[parked.job.block_ids[index]]
        self.blocks.setdefault(parked.keys[index], row.copy())

    def evict(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks and announce their eviction."""
        for key in keys:
            del self.blocks[key]
        self.env.blocks_evicted(keys)

    def finish_all(self) -> None:
        """Finish all parked operations successfully, oldest first."""
        for parked in list(self.parked):
            self.finish(parked)

    def _move(
        self, parked: ParkedOperation, job: JobMetadata, failures: dict[int, TierError]
    ) -> dict[int, TierError]:
        rows = np.asarray(self.env.kv_view)
        for index, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            if index in failures or index in parked.landed:
                continue
            if parked.kind is Operation.STORE:
                self.blocks.setdefault(key, rows[slot].copy())
            elif key in self.blocks:
                rows[slot] = self.blocks[key]
            else:
                failures[index] = BlockMissingError(f"{block_text(key)} is not here")
        return failures

    async def _park(
        self, kind: Operation, keys: tuple[OffloadKey, ...], job: JobMetadata | None
    ) -> Mapping[int, TierError]:
        if kind is not Operation.CLOSE and not self.is_open:
            raise StateError(f"{kind.name} was called while the tier was not open")
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        future = asyncio.get_running_loop().create_future()
        self.parked.append(ParkedOperation(kind, keys, job, task, future))
        return await until_done(future)


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


_MAX_IDLE_TURNS = 100_000


class LeftoverTasksError(StateError):
    """A loop was closed while tasks were still pending."""


class _Selector:
    """Replaces the loop's I/O selector: it reports no events and advances virtual time."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        self._pass_time = pass_time

    def select(self, timeout: float | None) -> tuple[()]:
        self._pass_time(timeout)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time, without I/O or wake-ups from other threads.

    It is driven by asyncio (`asyncio.Runner(loop_factory=VirtualLoop)`), or by a test with
    `run_ready`, `advance` and `run_until`. An exception that asyncio would only log, such as one
    raised by a callback, is raised by the call that drives the loop.
    """

    def __init__(self) -> None:
        """Start at virtual time 0."""
        super().__init__()
        self._selector = _Selector(self._pass_time)
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

    def _pass_time(self, timeout_s: float | None) -> None:
        if self._limit_s is None:
            if timeout_s is None:
                raise StateError("deadlock: nothing is ready and no timer is set")
            self._now_s += timeout_s
            return
        self.stop()  # after this iteration
        next_s = math.inf if timeout_s is None else self._now_s + timeout_s
        self._was_idle = timeout_s != 0 and next_s > self._limit_s
        self._now_s = min(next_s, max(self._limit_s, self._now_s))

    def _process_events(self, event_list: tuple[()]) -> None:
        """Do nothing: there are no I/O events."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps."""


class VirtualRunner(LoopRunner):
    """A `LoopRunner` over a `VirtualLoop`; the owner and the loop share one thread.

    The loop runs only inside `run`, `wait_until`, `run_ready` and `advance`; between these calls
    the test is in control.
    """

    def __init__(self) -> None:
        """Create a loop at virtual time 0."""
        self.loop = VirtualLoop()
        super().__init__(self.loop)
        self.now_s = self.loop.time
        self.callbacks = 0
        """Number of `call_soon` calls, each of which would wake a loop thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """See `LoopRunner.call_soon`."""
        super().call_soon(callback, *args)
        self.callbacks += 1

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """See `LoopRunner.run`; the deadline is in virtual time."""
        try:
            self.refuse_own_thread("run()")
            if self.loop.is_closed():
                raise ClosedError("the virtual loop is closed")
        except StateError:
            coroutine.close()
            raise
        task = self.loop.create_task(coroutine, name="virtual-runner")
        if not self.loop.run_until(task.done, timeout_s):
            task.cancel()
            self.loop.run_ready()
            raise TimeoutError(f"not done after {timeout_s} virtual seconds")
        return task.result()

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """See `LoopRunner.wait_until`; the deadline is in virtual time."""
        if self.loop.is_closed():
            return is_done()
        return self.loop.run_until(is_done, timeout_s)

    def run_ready(self) -> None:
        """Run until nothing is ready, without advancing time."""
        self.loop.run_ready()

    def advance(self, seconds: float) -> None:
        """Advance virtual time, running everything that becomes ready."""
        self.loop.advance(seconds)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the loop; idempotent.

        Raises:
            LeftoverTasksError: Tasks were pending; they were cancelled, and the message names them.
        """
        if self.loop.is_closed():
            return
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        try:
            self.loop.run_until(lambda: all(task.done() for task in left), timeout_s)
        finally:
            self.loop.close()
        if left:
            names = ", ".join(sorted(task.get_name() for task in left))
            raise LeftoverTasksError(f"tasks were left on the loop: {names}")
