"""Drives adapter and workers as a synchronous scheduler does: step by step.

`Batch` decides what a step computes. A request whose whole prompt is on the device ends. What it
found when it first started is what counts, not what it found after a preemption.

A request is in flight until every copy and every job that works for it has ended. With one in
prompt, each request therefore finds the engine at rest, and the figures are the same in every run.

A hit counts for a tier if the tier was read for this very request, and for the primary otherwise:
also where it shares a promotion that another has asked for, as the block was read only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from kvoffload_async.errors import StalledError
from kvoffload_async.facade.connector.protocol import ConnectorGeometry, KVGroup, StepOutput
from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.replay.device import FramePool
from kvoffload_async.replay.drivers.batch import Batch
from kvoffload_async.replay.drivers.request_level import RequestLevelManager
from kvoffload_async.replay.drivers.room import require_room
from kvoffload_async.replay.drivers.workers import Workers
from kvoffload_async.replay.prompt import Prompt, Stage
from kvoffload_async.replay.tally import Tally

_WAIT_S = 0.1


class StepwiseDriver:
    """Replays requests, `concurrency` in flight at once, in their order.

    Thread: owner.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        workers: Workers,
        pool: FramePool,
        tally: Tally,
        *,
        tier_names: Sequence[str],
        blocks_per_chunk: int = 1,
        num_workers: int = 1,
        blocks_per_step: int | None = None,
        concurrency: int = 1,
        verify: bool = True,
        stall_timeout_s: float = 120.0,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with nothing in flight.

        Args:
            manager: Driven by nobody else.
            workers: Over the manager's slots.
            pool: The frames of the workers' devices.
            tally: What is counted.
            tier_names: What the manager's tiers are called in the tally, in their order.
            blocks_per_chunk: Device blocks of a frame.
            num_workers: How many workers there are.
            blocks_per_step: Blocks of a request that a step computes at most; None: all.
            concurrency: Requests in flight.
            verify: Compare what is on the device, byte for byte.
            stall_timeout_s: Seconds without any progress until the replay gives up.
            should_stop: Asked before every step: whether to admit no more.
            on_step: Called after every step.
        """
        geometry = ConnectorGeometry(
            (KVGroup(1),), blocks_per_chunk, blocks_per_chunk, num_workers=num_workers
        )
        self._whole = RequestLevelManager(manager)
        self._connector = OffloadingConnectorScheduler(self._whole, geometry)
        self._manager = manager
        self._engine = manager.planner
        self._workers = workers
        self._pool = pool
        self._tally = tally
        self._tier_names = tuple(tier_names)
        self._per_block = blocks_per_chunk
        self._batch = Batch(self._connector, pool, workers.device_blocks, blocks_per_step)
        self._concurrency = concurrency
        self._verify = verify
        self._stall_timeout_s = stall_timeout_s
        self._should_stop = should_stop
        self._on_step = on_step
        self._active: dict[str, Prompt] = {}  # the one that came first, first
        self._admitted = 0
        self._seen_job_id = -1
        self._has_news = False
        self._owner_ns = 0
        self._progress: tuple[int, ...] = ()
        self._progress_at_s = time.monotonic()

    def run(self, requests: Iterable[Sequence[int]]) -> None:
        """Replay until the last request has ended, or `should_stop`.

        Raises:
            InputError: A request is larger than the device.
            StalledError: Nothing has moved for `stall_timeout_s`.
        """
        waiting = iter(requests)
        while not self._should_stop():
            is_new = self._admit(waiting)
            if not is_new and not self._has_news:
                if not self._in_flight():
                    return
                self._wait()
            self._step()
            self._on_step()

    def drain(self, timeout_s: float) -> bool:
        """End what is in flight and step until the engine is at rest; False at the deadline."""
        for prompt in self._active.values():
            prompt.stage = Stage.ENDED
            self._connector.request_finished(prompt)
        self._active.clear()
        deadline_s = time.monotonic() + timeout_s
        self._step()
        while self._connector.has_pending_push_work():
            if time.monotonic() > deadline_s:
                return False
            self._wait_briefly()
            self._step()
        return True

    # -- which requests are in flight -----------------------------------------------------------

    def _admit(self, waiting: Iterable[Sequence[int]]) -> bool:
        """Begin as many requests as may fly; return whether any was begun."""
        room = self._concurrency - self._in_flight()
        if room <= 0:
            return False
        first = self._admitted
        for block_ids in waiting:
            prompt = Prompt(self._admitted, block_ids, self._per_block)
            require_room(prompt, self._pool)
            self._admitted += 1
            self._active[prompt.request_id] = prompt
            if self._admitted - first == room:
                break
        return self._admitted > first

    def _in_flight(self) -> int:
        """Count the requests that have not ended, and those for which something still works."""
        jobs = self._engine.jobs
        if not jobs and not self._workers.has_copies:
            return len(self._active) or int(self._connector.has_pending_push_work())
        working = {job.req_context.req_id for _, job in jobs.values()}
        return len(self._active.keys() | self._workers.req_ids | working)

    def _wait(self) -> None:
        """Wait until a copy has ended or a tier has something to report, but not for ever."""
        self._wait_briefly()
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
        if progress != self._progress:
            self._progress, self._progress_at_s = progress, now_s
        elif now_s - self._progress_at_s > self._stall_timeout_s:
            raise StalledError(
                f"no progress for {self._stall_timeout_s:g} s: {len(self._active)} requests wait "
                f"and {len(self._engine.jobs)} jobs have no result"
            )

    def _wait_briefly(self) -> None:
        if self._workers.has_copies:
            self._workers.wait(_WAIT_S)
        else:
            self._manager.wait_for_progress(_WAIT_S)

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
        self._tally.stores_refused = len(self._whole.refused)
        for prompt in plan.placed:
            self._check(prompt, 0, prompt.ready)
        self._workers.begin_step(meta)
        for prompt, count in plan.blocks:
            self._compute(prompt, count)
        self._workers.end_step(meta)
        self._take_in()
        self._tally.owner_ns.append(self._owner_ns)
        self._owner_ns = 0
        self._note_promotions()

    def _compute(self, prompt: Prompt, count: int) -> None:
        """Compute the next blocks; with the last one the request ends."""
        self._has_news = True
        first, last = prompt.ready, prompt.ready + count
        if count:
            self._workers.compute(prompt.names[first:last], prompt.frames[first:last])
            self._pool.publish(prompt.ids[first:last], prompt.frames[first:last])
        prompt.ready = last
        prompt.num_computed_tokens = last * self._per_block
        if last < len(prompt.ids):
            return
        prompt.num_computed_tokens = prompt.num_tokens
        prompt.stage = Stage.ENDED
        start_ns = time.perf_counter_ns()
        self._connector.request_finished(prompt)
        self._owner_ns += time.perf_counter_ns() - start_ns
        self._pool.release(prompt.frames)
        del self._active[prompt.request_id]
        self._tally.end(prompt)

    # -- what has ended -------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Take in which copies have ended, and check what they have brought."""
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
            if prompt is None:  # stopped while it was loading
                continue
            prompt.stage = Stage.RUNNING
            if not invalid.isdisjoint(self._workers.device_blocks(prompt.frames)):
                prompt.found_beyond = 0  # it has to be computed
                prompt.num_computed_tokens = prompt.ready * self._per_block
                continue
            first, prompt.ready = prompt.ready, len(prompt.frames)
            self._check(prompt, first, prompt.ready)
            self._pool.publish(prompt.ids[first : prompt.ready], prompt.frames[first:])

    def _check(self, prompt: Prompt, first: int, last: int) -> None:
        if self._verify and last > first:
            self._workers.verify(prompt.names[first:last], prompt.frames[first:last])

    def _note_promotions(self) -> None:
        """Remember which tier is being read for which request: the jobs of the step that ended."""
        jobs = self._engine.jobs
        newest = self._seen_job_id
        for job_id in reversed(jobs):  # the latest first
            if job_id <= self._seen_job_id:
                break
            newest = max(newest, job_id)
            tier, job = jobs[job_id]
            prompt = self._active.get(job.req_context.req_id)
            if job.is_promotion and prompt is not None:
                prompt.origins.update(dict.fromkeys(job.keys, self._tier_names[tier]))
        self._seen_job_id = newest
