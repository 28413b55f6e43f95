"""Drives the connector's scheduler and workers step by step, as a synchronous scheduler does.

`Batch` decides which blocks a step computes. A request ends when its whole prompt is on the device.
Only blocks found at its first start count as hits, not those found after a preemption.

A request that arrives while `concurrency` others are in flight is queued, and prefetched. A request
is in flight until all its copies and jobs have ended. With one request in flight, each
request finds the engine idle, so the results are the same in every run.

A hit counts for a tier if the tier was read for this request, and for the primary otherwise. This
includes shared promotions, where the tier is read only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from kvoffload_async.errors import StalledError
from kvoffload_async.facade.connector.protocol import StepOutput
from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.replay.device import FramePool, Prompt, Stage, require_room
from kvoffload_async.replay.drivers import MAX_QUEUED, ROOM_S, Arrivals, ReplayOptions
from kvoffload_async.replay.drivers.workers import Workers
from kvoffload_async.replay.report import Tally
from kvoffload_async.types import (
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)


class RequestLevelManager:
    """Wraps an `OffloadingManager`, so that each request offers its blocks from the first one on.

    Thus a request's hits are neither evicted by its own new blocks nor lose recency.

    Attributes:
        short: Requests whose last offer left blocks out -> whether it found no room at all.
        num_refused: Number of ended requests whose last offer found no room at all.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self.short: dict[str, bool] = {}
        self.num_refused = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the manager's own attributes
        return getattr(self._manager, name)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request, with the policy of request-level offloading."""
        self._manager.on_new_request(req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        """Reserve slots for blocks, and record whether there was room for them."""
        granted = self._manager.prepare_store(keys, req_context, is_last=is_last)
        if granted is None or granted.keys_left_out:
            self.short[req_context.req_id] = granted is None
        else:
            self.short.pop(req_context.req_id, None)
        return granted

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request, and count it if it was refused."""
        self.num_refused += self.short.pop(req_context.req_id, False)
        self._manager.on_request_finished(req_context)


@dataclass(slots=True)
class StepPlan:
    """The work planned for one scheduler step.

    Attributes:
        placed: Requests that got frames; their `ready` blocks are present already.
        blocks: Number of blocks to compute, by request.
        names: Blocks being computed in this step or a later one.
        tokens: Tokens to compute, by request.
        new_blocks: Device blocks appended to requests' tables, by request.
        preempted: Requests that lost their frames.
        is_full: Whether no further request may be placed.
    """

    placed: list[Prompt] = field(default_factory=list)
    blocks: list[tuple[Prompt, int]] = field(default_factory=list)
    names: set[int] = field(default_factory=set)
    tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    is_full: bool = False


class Batch:
    """Allocates frames to waiting and running requests, in order of arrival.

    If frames run out, the latest request is preempted and restarts later. The earliest request is
    never preempted, so there is always progress. A block is computed by one request at a time:
    others wait and then find it.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self,
        connector: OffloadingConnectorScheduler,
        pool: FramePool,
        device_blocks: Callable[[Sequence[int]], list[int]],
        blocks_per_step: int | None,
    ) -> None:
        """Create a batch whose requests share the frames of a pool.

        Args:
            connector: Asked for loadable blocks, and informed of allocated device blocks.
            pool: The frames.
            device_blocks: Returns the device blocks of frames.
            blocks_per_step: Maximum blocks of a request computed per step; None: all.
        """
        self._connector = connector
        self._pool = pool
        self._device_blocks = device_blocks
        self._per_block = connector.geometry.blocks_per_chunk
        self._blocks_per_step = blocks_per_step

    def plan(self, prompts: Sequence[Prompt]) -> StepPlan:
        """Plan a step for the requests in flight, in order of arrival."""
        plan = StepPlan()
        for prompt in prompts:
            if prompt.stage is Stage.WAITING and not plan.is_full:
                self._place(prompt, plan)
            if prompt.stage is Stage.RUNNING:
                plan.names.update(prompt.ids[prompt.ready :])
                self._grow(prompt, prompts, plan)
            elif prompt.stage is Stage.LOADING:
                plan.names.update(prompt.ids[len(prompt.frames) :])
        return plan

    def _place(self, prompt: Prompt, plan: StepPlan) -> None:
        """Allocate device frames for a request's cached blocks, and start to load them."""
        if not plan.names.isdisjoint(prompt.ids):
            return  # being computed by another request; found later
        on_device = self._pool.match(prompt.ids)
        tokens, _ = self._connector.get_num_new_matched_tokens(
            prompt, len(on_device) * self._per_block
        )
        if tokens is None:
            return
        beyond = tokens // self._per_block
        others = self._pool.claim(on_device, beyond)
        if others is None:
            plan.is_full = True
            return
        prompt.frames = on_device + others
        prompt.ready = len(on_device)
        prompt.start(len(on_device), beyond)
        table = self._device_blocks(prompt.frames)
        self._connector.update_state_after_alloc(prompt, (table,), tokens)
        prompt.num_computed_tokens = (prompt.ready + beyond) * self._per_block
        prompt.stage = Stage.LOADING if tokens else Stage.RUNNING
        plan.placed.append(prompt)

    def _grow(self, prompt: Prompt, prompts: Sequence[Prompt], plan: StepPlan) -> None:
        """Allocate frames for a request's blocks that are computed in this step."""
        count = len(prompt.ids) - prompt.ready
        if self._blocks_per_step is not None:
            count = min(count, self._blocks_per_step)
        have = len(prompt.frames) - prompt.ready  # allocated for a failed load
        if count > have:
            while (frames := self._pool.claim((), count - have)) is None:
                plan.is_full = True
                victim = next(f for f in reversed(prompts) if f.stage is Stage.RUNNING)
                if victim is prompt and any(f.stage is Stage.LOADING for f in prompts):
                    return  # another request computes it; its frame can be shared then
                self._preempt(victim, plan)
                if victim is prompt:
                    return
            prompt.frames += frames
            plan.new_blocks[prompt.request_id] = (self._device_blocks(frames),)
        is_last = prompt.ready + count == len(prompt.ids)
        plan.tokens[prompt.request_id] = count * self._per_block + is_last
        plan.blocks.append((prompt, count))

    def _preempt(self, prompt: Prompt, plan: StepPlan) -> None:
        plan.preempted.append(prompt.request_id)
        self._pool.release(prompt.frames)
        prompt.frames = []
        prompt.ready = prompt.num_computed_tokens = 0
        prompt.stage = Stage.WAITING


_WAIT_S = 0.1


class StepwiseDriver:
    """Replays requests in order, `concurrency` in flight at once.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        workers: Workers,
        pool: FramePool,
        tally: Tally,
        options: ReplayOptions,
        *,
        stall_timeout_s: float,
        blocks_per_step: int | None = None,
    ) -> None:
        """Create an idle driver.

        Args:
            manager: The manager, used by this driver only.
            workers: Workers on the manager's slots.
            pool: The frames of the workers' devices.
            tally: Counts of the replay.
            options: Settings of the replay.
            stall_timeout_s: Seconds without progress before the replay fails.
            blocks_per_step: Maximum blocks of a request computed per step; None: all.
        """
        self._whole = RequestLevelManager(manager)
        self._connector = OffloadingConnectorScheduler(
            cast("OffloadingManager", self._whole), workers.geometry
        )
        self._manager = manager
        self._engine = manager.planner
        self._workers = workers
        self._pool = pool
        self._tally = tally
        self._options = options
        self._stall_timeout_s = stall_timeout_s
        self._per_block = workers.geometry.blocks_per_chunk
        self._batch = Batch(self._connector, pool, workers.device_blocks, blocks_per_step)
        self._queue: dict[str, Prompt] = {}  # have arrived and wait
        self._active: dict[str, Prompt] = {}  # in order of arrival
        self._stays_until_s: dict[str, float] = {}
        self._arrived = 0
        self._seen_job_id = -1
        self._has_news = False
        self._owner_ns = 0
        self._progress: tuple[int, ...] = ()
        self._progress_at_s = time.monotonic()

    def run(self, arrivals: Arrivals) -> None:
        """Replay until the last request has ended, or `should_stop`.

        Raises:
            InputError: A request is larger than the device.
            StalledError: There was no progress for `stall_timeout_s`.
        """
        while not self._options.should_stop():
            is_new = self._admit(arrivals)
            if not is_new and not self._has_news:
                is_idle = not self._in_flight()
                if is_idle and arrivals.has_ended:
                    return
                self._wait(min(_WAIT_S, arrivals.next_in_s()), is_idle=is_idle)
            self._step()
            self._options.on_step()

    def drain(self, timeout_s: float) -> bool:
        """Finish requests in flight and step until the engine is idle; False at the deadline."""
        for prompt in (*self._active.values(), *self._queue.values()):
            prompt.stage = Stage.ENDED
            self._connector.request_finished(prompt)
        self._active.clear()
        self._queue.clear()
        deadline_s = time.monotonic() + timeout_s
        self._step()
        while self._connector.has_pending_push_work():
            if time.monotonic() > deadline_s:
                return False
            self._wait_briefly(_WAIT_S)
            self._step()
        return True

    # -- requests in flight -----------------------------------------------------------

    def _admit(self, arrivals: Arrivals) -> bool:
        """Queue arrived requests, and start some up to the concurrency limit; True if any was."""
        room = max(0, self._options.concurrency - self._in_flight())
        prefetches = arrivals.is_timed and self._options.prefetch
        first, most = self._arrived, MAX_QUEUED if arrivals.is_timed else room
        while len(self._queue) < most and (block_ids := arrivals.take()) is not None:
            prompt = Prompt(self._arrived, block_ids, self._per_block)
            require_room(prompt, self._pool)
            self._arrived += 1
            self._queue[prompt.request_id] = prompt
            if prefetches and len(self._queue) > room:
                self._connector.on_new_request(prompt)
        starting = list(islice(self._queue, room))
        for req_id in starting:
            prompt = self._active[req_id] = self._queue.pop(req_id)
            self._tally.waited_s.append(time.monotonic() - prompt.arrived_s)
        return self._arrived > first or bool(starting)

    def _in_flight(self) -> int:
        """Count the requests that have started, and have not ended or still have jobs."""
        jobs = self._engine.jobs
        if not jobs and not self._workers.has_copies:
            return len(self._active) or int(self._connector.has_pending_push_work())
        working = {job.req_context.req_id for _, job in jobs.values()}
        return len((self._active.keys() | self._workers.req_ids | working) - self._queue.keys())

    def _wait(self, timeout_s: float, *, is_idle: bool) -> None:
        """Wait until a copy ends or a tier has results; raises StalledError unless idle."""
        self._wait_briefly(timeout_s)
        now_s = time.monotonic()
        counters = self._engine.counters
        tally = self._tally
        progress = (
            counters.jobs_submitted,
            counters.job_results,
            tally.requests,
            tally.loaded_blocks,
            tally.stored_blocks,
        )
        if is_idle or progress != self._progress:
            self._progress, self._progress_at_s = progress, now_s
        elif now_s - self._progress_at_s > self._stall_timeout_s:
            raise StalledError(
                f"no progress for {self._stall_timeout_s:g} s: "
                f"{len(self._active)} requests wait "
                f"and {len(self._engine.jobs)} jobs have no result"
            )

    def _wait_briefly(self, timeout_s: float) -> None:
        if self._workers.has_copies:
            self._workers.wait(timeout_s)
        else:
            self._manager.wait_for_progress(timeout_s)

    # -- one step -------------------------------------------------------------------------------

    def _step(self) -> None:
        self._has_news = False
        self._take_in()
        start_ns = time.perf_counter_ns()
        plan = self._batch.plan(list(self._active.values()))
        meta = self._connector.build_connector_meta(
            StepOutput(plan.tokens, plan.new_blocks, preempted_req_ids=plan.preempted)
        )
        self._owner_ns += time.perf_counter_ns() - start_ns
        self._tally.preemptions += len(plan.preempted)
        for prompt in plan.placed:
            self._check(prompt, 0, prompt.ready)
        self._workers.begin_step(meta)
        for prompt, count in plan.blocks:
            self._compute(prompt, count)
        self._workers.end_step(meta)
        self._take_in()
        self._tally.stores_refused = self._whole.num_refused
        self._tally.owner_ns.append(self._owner_ns)
        self._owner_ns = 0
        self._note_promotions()

    def _compute(self, prompt: Prompt, count: int) -> None:
        """Compute a request's next blocks; after the last one, end it unless it waits for room."""
        first, last = prompt.ready, prompt.ready + count
        if count:
            self._has_news = True
            self._workers.compute(prompt.names[first:last], prompt.frames[first:last])
            self._pool.publish(prompt.ids[first:last], prompt.frames[first:last])
        prompt.ready = last
        prompt.num_computed_tokens = last * self._per_block
        if last < len(prompt.ids) or self._waits_for_room(prompt.request_id):
            return
        self._has_news = True
        self._stays_until_s.pop(prompt.request_id, None)
        prompt.num_computed_tokens = prompt.num_tokens
        prompt.stage = Stage.ENDED
        start_ns = time.perf_counter_ns()
        self._connector.request_finished(prompt)
        self._owner_ns += time.perf_counter_ns() - start_ns
        self._pool.release(prompt.frames)
        del self._active[prompt.request_id]
        self._tally.end(prompt)

    def _waits_for_room(self, req_id: str) -> bool:
        """Return whether a computed request stays in flight, to offer its blocks again."""
        if req_id not in self._whole.short:
            return False
        now_s = time.monotonic()
        return now_s < self._stays_until_s.setdefault(req_id, now_s + ROOM_S)

    # -- ended copies -------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Process ended copies, and verify the loaded blocks."""
        output, loaded = self._workers.take_output()
        if not output.completed:
            return
        self._has_news = True
        start_ns = time.perf_counter_ns()
        self._connector.update_connector_output(output)
        invalid = self._connector.take_invalid_blocks()
        self._owner_ns += time.perf_counter_ns() - start_ns
        for req_id in loaded:
            prompt = self._active.get(req_id)
            if prompt is None:  # stopped during its load
                continue
            prompt.stage = Stage.RUNNING
            if not invalid.isdisjoint(self._workers.device_blocks(prompt.frames)):
                prompt.found_beyond = 0  # the load failed; compute the blocks
                prompt.num_computed_tokens = prompt.ready * self._per_block
                continue
            first, prompt.ready = prompt.ready, len(prompt.frames)
            self._check(prompt, first, prompt.ready)
            self._pool.publish(prompt.ids[first : prompt.ready], prompt.frames[first:])

    def _check(self, prompt: Prompt, first: int, last: int) -> None:
        if self._options.verify and last > first:
            self._workers.verify(prompt.names[first:last], prompt.frames[first:last])

    def _note_promotions(self) -> None:
        """Record the source tier of each request's promotions submitted in the ended step."""
        jobs = self._engine.jobs
        newest = self._seen_job_id
        for job_id in reversed(jobs):  # newest first
            if job_id <= self._seen_job_id:
                break
            newest = max(newest, job_id)
            tier, job = jobs[job_id]
            req_id = job.req_context.req_id
            prompt = self._active.get(req_id) or self._queue.get(req_id)
            if job.is_promotion and prompt is not None:
                prompt.origins.update(dict.fromkeys(job.keys, self._tally.tier_names[tier]))
        self._seen_job_id = newest
