"""Drives `OffloadEngine` as an asynchronous server does: one task per request.

A request that arrives while `concurrency` others are in flight is queued, and prefetched. Requests
wait in order until the device has room for the whole request, so none is ever preempted.
Blocks cached on the device are used, further ones found in the tiers are loaded, the rest is
computed, and the whole prompt is offered for storing.

A request is in flight until all its jobs have ended; see `stepwise`. A hit counts for a tier if the
block was not in the primary when the request started, or had been prefetched for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.errors import BusyError, StalledError, TransportError
from kvoffload_async.replay.device import FramePool, Prompt, require_room
from kvoffload_async.replay.drivers import MAX_QUEUED, ROOM_S, Arrivals, ReplayOptions
from kvoffload_async.replay.report import Tally
from kvoffload_async.types import LookupResult, OffloadKey

if TYPE_CHECKING:  # torch is loaded with the first memory, not before
    from kvoffload_async.transport.paged import PagedMemory

_WATCH_S = 0.05


@dataclass(slots=True)
class _Queued:
    """A request that has arrived and not started.

    Attributes:
        request: The engine's request, if it is prefetched; it ends with `stack`.
    """

    prompt: Prompt
    request: EngineRequest | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


class AsyncDriver:
    """Replays requests in order, `concurrency` in flight at once.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        memory: PagedMemory,
        pool: FramePool,
        tally: Tally,
        options: ReplayOptions,
        *,
        stall_timeout_s: float,
    ) -> None:
        """Create an idle driver; the arguments are those of `StepwiseDriver`."""
        self._engine = engine
        self._core = engine.driver
        self._memory = memory
        self._pool = pool
        self._tally = tally
        self._options = options
        self._stall_timeout_s = stall_timeout_s
        self._arrived = 0
        self._queue: deque[_Queued] = deque()
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._computing: set[int] = set()
        self._mark_ns = time.thread_time_ns()

    async def run(self, arrivals: Arrivals) -> None:
        """Replay until the last request has ended, or `should_stop`.

        Raises:
            InputError: A request is larger than the device.
            StalledError: There was no progress for `stall_timeout_s`.
        """
        tasks = {
            asyncio.create_task(self._serve(arrivals), name=f"replay:{index}")
            for index in range(self._options.concurrency)
        }
        try:
            while tasks and not self._options.should_stop():
                if arrivals.is_timed:
                    await self._prefetch(arrivals)
                done, tasks = await asyncio.wait(
                    tasks,
                    timeout=min(_WATCH_S, arrivals.next_in_s()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=self._stall_timeout_s)
            for queued in self._queue:
                await queued.stack.aclose()

    async def rest(self, timeout_s: float) -> bool:
        """Wait until the engine is idle; return False at the deadline."""
        deadline_s = time.monotonic() + timeout_s
        while not await self._engine.quiesce(_WATCH_S) or self._core.has_pending_work():
            if time.monotonic() > deadline_s:
                return False
            await self._engine.wait_for_progress(_WATCH_S)
        return True

    # -- a request ------------------------------------------------------------------------------

    async def _serve(self, arrivals: Arrivals) -> None:
        while (queued := await self._next(arrivals)) is not None:
            prompt = queued.prompt
            self._tally.waited_s.append(time.monotonic() - prompt.arrived_s)
            async with queued.stack:
                await self._enter(prompt)
                await self._replay(queued)
                found = prompt.found_on_device + prompt.found_beyond
                self._computing.difference_update(prompt.ids[found:])
                self._pool.release(prompt.frames)
                self._released.set()
            await self._follow_jobs(prompt.request_id)
            self._tally.end(prompt)
            now_ns = time.thread_time_ns()
            self._tally.owner_ns.append(max(0, now_ns - self._mark_ns))
            self._mark_ns = now_ns
            self._options.on_step()

    async def _next(self, arrivals: Arrivals) -> _Queued | None:
        """Wait for a request to start; None after the last one, or if the replay is to stop."""
        while not self._options.should_stop():
            if self._queue:
                return self._queue.popleft()
            if (prompt := self._arrive(arrivals)) is not None:
                return _Queued(prompt)
            if arrivals.has_ended:
                return None
            await asyncio.sleep(min(_WATCH_S, arrivals.next_in_s()))
        return None

    async def _prefetch(self, arrivals: Arrivals) -> None:
        """Queue the requests that have arrived, and prefetch their blocks."""
        while len(self._queue) < MAX_QUEUED and (prompt := self._arrive(arrivals)) is not None:
            queued = _Queued(prompt)
            if self._options.prefetch:
                beginning = self._engine.request(
                    prompt.request_id, prompt.block_hashes, prefetch=True
                )
                queued.request = await queued.stack.enter_async_context(beginning)
            self._queue.append(queued)

    def _arrive(self, arrivals: Arrivals) -> Prompt | None:
        """Return the next request; None: none has arrived."""
        block_ids = arrivals.take()
        if block_ids is None:
            return None
        prompt = Prompt(self._arrived, block_ids)
        require_room(prompt, self._pool)
        self._arrived += 1
        return prompt

    async def _enter(self, prompt: Prompt) -> None:
        """Acquire frames for a whole request; requests wait in order of arrival."""
        async with self._turn:
            while True:
                on_device = self._pool.match(prompt.ids)
                others = self._pool.claim(on_device, len(prompt.ids) - len(on_device))
                if others is not None:
                    break
                await self._next_release()
        prompt.frames = on_device + others
        prompt.ready = len(on_device)

    async def _next_release(self) -> None:
        """Wait until any request releases its frames."""
        self._released.clear()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._released.wait()
        except TimeoutError:
            raise StalledError(
                f"no progress for {self._stall_timeout_s:g} s: no request gives its frames away"
            ) from None

    async def _replay(self, queued: _Queued) -> None:
        prompt = queued.prompt
        on_device = prompt.ready
        self._check(prompt, 0, on_device)
        name = prompt.request_id
        begun = None if on_device else queued.request
        rest = self._engine.request(name, prompt.block_hashes[on_device:])
        async with rest if begun is None else nullcontext(begun) as request:
            absent = self._absent(request) | self._prefetched(queued.request)
            await self._load(prompt, request, absent)
            self._compute(prompt)
            if not on_device:
                await self._store(prompt, request)
        if on_device:
            async with self._engine.request(f"{name}/whole", prompt.block_hashes) as request:
                await self._store(prompt, request)

    async def _load(self, prompt: Prompt, request: EngineRequest, absent: set[OffloadKey]) -> None:
        first = prompt.ready
        while True:
            found = await self._engine.lookup(request, self._stall_timeout_s)
            if self._computing.isdisjoint(prompt.ids[first + found :]):
                break  # otherwise another request computes some: look up again
            await self._next_release()
        self._computing.update(prompt.ids[first + found :])
        frames = prompt.frames[first : first + found]
        try:
            loaded = await self._engine.load(request, self._memory.device_blocks(frames))
        except (TimeoutError, TransportError):
            await self._until_released(request)  # a copy may still write to blocks to be computed
            loaded = 0
        prompt.start(first, loaded)
        prompt.ready += loaded
        self._computing.update(prompt.ids[prompt.ready :])
        self._tally.loaded_blocks += loaded
        for key in absent.intersection(request.keys[:loaded]):
            prompt.origins[key] = self._origin(key, request)
        self._check(prompt, first, prompt.ready)
        self._pool.publish(prompt.ids[first : prompt.ready], frames[:loaded])

    def _compute(self, prompt: Prompt) -> None:
        first = prompt.ready
        start_ns = time.thread_time_ns()
        self._memory.compute(prompt.names[first:], prompt.frames[first:])
        self._mark_ns += time.thread_time_ns() - start_ns
        self._pool.publish(prompt.ids[first:], prompt.frames[first:])
        prompt.ready = len(prompt.ids)

    async def _store(self, prompt: Prompt, request: EngineRequest) -> None:
        blocks = self._memory.device_blocks(prompt.frames)
        try:
            stored = await self._engine.store(request, blocks, timeout_s=ROOM_S)
        except BusyError:
            self._tally.stores_refused += 1
        except (TimeoutError, TransportError):
            await self._until_released(request)  # a copy may still read frames to be released
        else:
            self._tally.stored_blocks += stored

    async def _until_released(self, request: EngineRequest) -> None:
        if not await request.released(self._stall_timeout_s):
            raise StalledError(f"a copy has not ended in {self._stall_timeout_s:g} s")

    def _check(self, prompt: Prompt, first: int, last: int) -> None:
        if not self._options.verify or last == first:
            return
        start_ns = time.thread_time_ns()
        wrong = self._memory.count_wrong(prompt.names[first:last], prompt.frames[first:last])
        self._mark_ns += time.thread_time_ns() - start_ns
        self._tally.verified_blocks += last - first
        self._tally.corrupt_blocks += wrong

    # -- sources of hits, and jobs in flight ---------------------------------------------

    def _absent(self, request: EngineRequest) -> set[OffloadKey]:
        """Return the keys that are not in the primary; empty without secondary tiers."""
        if not self._tally.tier_names:
            return set()
        lookup = self._core.planner.primary.lookup
        return {key for key in request.keys if lookup(key) is LookupResult.MISS}

    def _prefetched(self, request: EngineRequest | None) -> set[OffloadKey]:
        """Return the keys that are or were promoted for a request while it waited."""
        if request is None:
            return set()
        state = self._core.planner.requests[request.ctx]
        return {*state.prefetched, *(key for key, is_own in state.ticket.items() if is_own)}

    def _origin(self, key: OffloadKey, request: EngineRequest) -> str:
        """Return the name of the first tier in lookup order that has the key."""
        *others, last = zip(self._tally.tier_names, self._core.planner.tiers, strict=True)
        for name, tier in others:
            if tier.index.lookup(key, request.ctx) is LookupResult.HIT:
                return name
        return last[0]

    async def _follow_jobs(self, req_id: str) -> None:
        """Wait until a request has no jobs in flight."""
        progress, progress_at_s = -1, time.monotonic()
        planner = self._core.planner
        counters = planner.counters
        ids = {req_id, f"{req_id}/whole"}
        while any(job.req_context.req_id in ids for _, job in planner.jobs.values()):
            now_s = time.monotonic()
            if counters.job_results != progress:
                progress, progress_at_s = counters.job_results, now_s
            elif now_s - progress_at_s > self._stall_timeout_s:
                raise StalledError(
                    f"no progress for {self._stall_timeout_s:g} s: "
                    f"{len(planner.jobs)} jobs have no result"
                )
            await self._engine.wait_for_progress(_WATCH_S)
