"""Copies between device and host, with bounded concurrency, each tracked until it ends.

Callers wait for a permit until their deadline; the number of waiting callers is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies, Transfer, TransferOutcome, Transport
from kvoffload_async.core.counters import Histogram
from kvoffload_async.core.recorder import RequestRecorder
from kvoffload_async.errors import BusyError, ClosedError, ConfigError, TransportError, text_of
from kvoffload_async.runtime.loop import clock_of
from kvoffload_async.statistics import EngineStatistics, OffloadingStatistics
from kvoffload_async.timeline import DEVICE, TransferDirection
from kvoffload_async.transport.completion import failed, outcome_of
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, ReqContext, as_block_ids
from kvoffload_async.waiting import Limiter, Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """Concurrency limits of an engine.

    Attributes:
        concurrent_loads: Maximum concurrent loads to the device; further ones wait for a permit.
        concurrent_stores: Maximum concurrent stores from the device, with a separate limiter.
        waiting_calls: Maximum loads waiting for a permit, and maximum stores waiting for a permit
            or room; one more raises BusyError.
        unread_events: Events buffered per reader; beyond that it gets the contents again instead.
    """

    concurrent_loads: int = 4
    concurrent_stores: int = 4
    waiting_calls: int = 1024
    unread_events: int = 4096

    def __post_init__(self) -> None:
        """Raise ConfigError for a limit that is not an integer, or too low."""
        for name, limit in asdict(self).items():
            least = 0 if name == "waiting_calls" else 1
            if not isinstance(limit, int) or limit < least:
                raise ConfigError(
                    f"{name}: {limit!r} is not valid; give an integer of at least {least}"
                )


_WAYS: Final[dict[Direction, TransferDirection]] = {
    Direction.LOAD: "load",
    Direction.STORE: "store",
}

Ended = Callable[[BaseException | None], None]
"""Called once when a copy has ended, with its error or None."""


class Transfers:
    """Runs copies; loads and stores have separate limiters, so that neither starves the other.

    Not thread-safe; call only from the event loop's thread.

    Attributes:
        running: The copies under way.
    """

    def __init__(
        self,
        transport: Transport,
        bounds: EngineBounds,
        *,
        recorder: RequestRecorder | None = None,
        block_bytes: int = 0,
    ) -> None:
        """Create the limiters; `recorder` records each copy, at `block_bytes` per block."""
        self._transport = transport
        self._recorder = recorder
        self._block_bytes = block_bytes
        self._num_copies = 0
        loop = asyncio.get_running_loop()
        self.running = RunningTransfers(loop)
        self._clock = clock_of(loop)
        self._durations = {Direction.LOAD: Histogram(), Direction.STORE: Histogram()}
        self._failed_copies = 0
        self._limiters = {
            Direction.LOAD: Limiter(bounds.concurrent_loads),
            Direction.STORE: Limiter(bounds.concurrent_stores),
        }
        self._most_waiting = bounds.waiting_calls
        self._num_waiting = dict.fromkeys(self._limiters, 0)

    async def permit(self, direction: Direction, deadline_s: float, ctx: ReqContext) -> Permit:
        """Wait for a permit; BusyError if too many calls wait, TimeoutError at the deadline."""
        limiter = self._limiters[direction]
        if (free := limiter.try_acquire()) is not None:
            return free
        if self._recorder is not None:
            self._recorder.advance(self._clock())
            self._recorder.note(ctx, "waits", reason=f"other {_WAYS[direction]}s to end")
        with self.waiting(direction):
            async with asyncio.timeout_at(deadline_s):
                return await limiter.acquire()

    @contextmanager
    def waiting(self, direction: Direction) -> Iterator[None]:
        """Count a waiting call inside the `with` block; BusyError if too many calls wait."""
        if self._num_waiting[direction] >= self._most_waiting:
            raise BusyError(f"too many {_WAYS[direction]}s are waiting")
        self._num_waiting[direction] += 1
        try:
            yield
        finally:
            self._num_waiting[direction] -= 1

    async def run(
        self,
        direction: Direction,
        device_blocks: Sequence[int],
        host: CPULoadStoreSpec,
        *,
        ctx: ReqContext,
        permit: Permit,
        ended: Callable[[bool], None],
        deadline_s: float,
    ) -> None:
        """Start a copy and wait for its end. The copy keeps the permit even if the caller leaves.

        Args:
            direction: LOAD or STORE.
            device_blocks: Device blocks of whole chunks.
            host: Primary slots, one per chunk.
            ctx: The request of the copy.
            permit: Held by the caller.
            ended: Called once with the success when the copy has ended.
            deadline_s: When the caller stops waiting, on the loop's clock.

        Raises:
            TimeoutError: The deadline passed; the copy continues.
            TransportError: The copy failed or could not start.
        """

        def landed(error: BaseException | None) -> None:
            self._durations[direction].observe(self._clock() - began_s)
            self._failed_copies += error is not None
            release()
            if record_end is not None:
                record_end(error)
            ended(error is None)

        began_s = self._clock()
        record_end: Ended | None = None
        if self._recorder is not None:
            record_end = self._record(ctx, direction, len(host.block_ids), began_s)
        try:
            device = GPULoadStoreSpec(as_block_ids(device_blocks), (len(device_blocks),), (0,))
            copies = BlockCopies(direction, device, host)
            transfer = self._transport.submit(copies, self._transport.record_compute())
            landing = self.running.start(transfer, landed)
        except BaseException as error:
            self._failed_copies += 1
            if record_end is not None:
                record_end(error)
            ended(False)
            if isinstance(error, KeyboardInterrupt):  # the user's
                raise
            raise TransportError(f"the copy could not begin: {text_of(error)}") from error
        release = permit.keep()
        async with asyncio.timeout_at(deadline_s):
            outcome = await asyncio.shield(landing)
        if outcome.error is not None:
            raise TransportError(text_of(outcome.error)) from outcome.error

    def stats(self, manager: OffloadingStatistics, missed_events: int) -> EngineStatistics:
        """Return the driver's statistics extended by copies, waiting calls and missed events."""
        return EngineStatistics(
            primary=manager.primary,
            tiers=manager.tiers,
            planner=manager.planner,
            copies=len(self.running),
            waiting_loads=self._num_waiting[Direction.LOAD],
            waiting_stores=self._num_waiting[Direction.STORE],
            runtime=manager.runtime,
            cache_operations=manager.cache_operations,
            missed_events=missed_events,
            failed_copies=self._failed_copies,
            load_copy_seconds=self._durations[Direction.LOAD].read(),
            store_copy_seconds=self._durations[Direction.STORE].read(),
        )

    def _record(
        self, ctx: ReqContext, direction: Direction, num_blocks: int, began_s: float
    ) -> Ended:
        """Record the start of a copy; return a function that records its end."""
        recorder = self._recorder
        assert recorder is not None  # noqa: S101 - for the type checker
        copy_id, num_bytes = self._num_copies, num_blocks * self._block_bytes
        self._num_copies += 1
        recorder.advance(began_s)
        recorder.job_started(ctx, copy_id, DEVICE, _WAYS[direction], (num_blocks, num_bytes))

        def record_end(error: BaseException | None) -> None:
            now_s = self._clock()
            recorder.advance(now_s)
            recorder.job_ended(
                ctx,
                copy_id,
                DEVICE,
                landed_blocks=0 if error else num_blocks,
                num_bytes=0 if error else num_bytes,
                seconds=now_s - began_s,
                error=error,
            )

        return record_end

    def stop(self) -> None:
        """Grant all waiting calls a permit; they then raise ClosedError."""
        for limiter in self._limiters.values():
            limiter.open()


@dataclass(slots=True, eq=False)
class _Running:
    """A running copy between the device and the primary.

    Attributes:
        transfer: The transport's transfer.
        ended: Called at the end.
        landed: Awaited by the caller.
        task: Awaits the transfer.
        has_ended: Whether the copy has ended; never set for a copy that was given up.
    """

    transfer: Transfer
    ended: Ended
    landed: asyncio.Future[TransferOutcome]
    task: asyncio.Task[TransferOutcome] = field(init=False)
    has_ended: bool = False


class RunningTransfers:
    """Tracks every copy to its end, independent of its caller.

    A running copy is never cancelled: a caller's cancellation does not reach it, and a cancelled
    tracking task is replaced.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: dict[_Running, None] = {}  # ordered by start

    def __len__(self) -> int:
        return len(self._running)

    def start(self, transfer: Transfer, ended: Ended) -> asyncio.Future[TransferOutcome]:
        """Track a transfer; the returned future never raises, and cancelling it has no effect."""
        running = _Running(transfer, ended, self._loop.create_future())
        self._follow(running)
        self._running[running] = None
        return running.landed

    async def quiesce(self, timeout_s: float) -> bool:
        """Wait until the copies now under way have ended; return False at the deadline."""
        copies = list(self._running)
        if copies and timeout_s > 0:
            await asyncio.wait([copy.landed for copy in copies], timeout=timeout_s)
        return all(copy.has_ended for copy in copies)

    def abandon(self) -> None:
        """Stop tracking all copies: their callers get a ClosedError; `ended` is never called."""
        error = ClosedError("the engine was closed before the copy had ended")
        abandoned, self._running = self._running, {}
        for running in abandoned:
            running.landed.set_result(TransferOutcome(0, error=error))
            running.task.cancel()

    def _follow(self, running: _Running) -> None:
        running.task = self._loop.create_task(outcome_of(running.transfer), name="kvoffload:copy")
        running.task.add_done_callback(partial(self._followed, running))

    def _followed(self, running: _Running, task: asyncio.Task[TransferOutcome]) -> None:
        error = None if task.cancelled() else task.exception()
        if running not in self._running:  # abandoned
            return
        if task.cancelled() and task.cancelling():
            self._follow(running)  # the task was cancelled, not the copy
            return
        if task.cancelled():  # tracking it again would give the same result
            error = TransportError("the transport has cancelled the copy by itself")
        outcome = task.result() if error is None else failed(error)
        del self._running[running]
        running.has_ended = True
        try:
            running.ended(outcome.error)
        finally:
            running.landed.set_result(outcome)
