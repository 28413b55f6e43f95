"""The scheduler side of the connector: plans loads, stores and flushes.

Its jobs are copies between device and primary; a job ends when it has ended on every worker. Its
job ids are unrelated to those of the secondary tiers' jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvoffload_async.errors import StateError
from kvoffload_async.facade.connector.plans import (
    ends_before,
    final_tokens,
    match_prefix,
    offer_store,
    plan_load,
    plan_store,
)
from kvoffload_async.facade.connector.protocol import (
    NULL_BLOCK,
    BlockTables,
    ConnectorGeometry,
    ConnectorOutput,
    OffloadingConnectorMetadata,
    SchedulerRequest,
    StepOutput,
    TransferJobSpec,
)
from kvoffload_async.facade.connector.requests import (
    ConnectorRequest,
    DeviceContents,
    GroupState,
    Step,
)
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.types import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    JobId,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    SlidingWindow,
)


@dataclass(slots=True)
class ConnectorJob:
    """One copy between the device and the primary, on all workers.

    Attributes:
        job_id: See `JobId`.
        request: The request of the copy.
        keys: The keys of the copied chunks.
        is_store: True for device to host.
        device_blocks: The device blocks read or written, without null blocks and duplicates.
        pending_workers: Number of workers on which the job has not ended.
        has_failed: Whether the job failed on a worker.
        is_stale: Whether a reset has invalidated the keys. The manager is not told the result of a
            stale job, but its device blocks and slots are in use until it ends.
    """

    job_id: JobId
    request: ConnectorRequest
    keys: Sequence[OffloadKey]
    is_store: bool
    device_blocks: frozenset[int]
    pending_workers: int
    has_failed: bool = False
    is_stale: bool = False


class JobTable:
    """The jobs in flight, by id and by device block. Call only from the owner's thread."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._jobs: dict[JobId, ConnectorJob] = {}
        self._stale: dict[JobId, ConnectorJob] = {}
        self._by_block: dict[int, set[JobId]] = {}
        self._loading: dict[OffloadKey, JobId] = {}
        self.next_id: JobId = 0
        """The id of the next job; all lower ids have been used."""

    @property
    def has_stale(self) -> bool:
        """Whether a copy that began before a reset is still running."""
        return bool(self._stale)

    def __len__(self) -> int:
        return len(self._jobs)

    def ids(self) -> set[JobId]:
        """Return the ids of the jobs in flight that are not stale."""
        return set(self._jobs)

    def add(
        self,
        request: ConnectorRequest,
        keys: Sequence[OffloadKey],
        device: GPULoadStoreSpec,
        *,
        is_store: bool,
    ) -> JobId:
        """Register a job and its device blocks; return its id."""
        job_id = self.next_id
        self.next_id += 1
        blocks = frozenset(device.block_ids.tolist()) - {NULL_BLOCK}
        self._jobs[job_id] = ConnectorJob(
            job_id, request, keys, is_store, blocks, self._num_workers
        )
        for block in blocks:
            self._by_block.setdefault(block, set()).add(job_id)
        if not is_store:
            for key in keys:
                self._loading.setdefault(key, job_id)
        request.transfer_jobs.add(job_id)
        return job_id

    def touching(self, blocks: Iterable[int]) -> set[JobId]:
        """Return the jobs that read or write any of these device blocks and are not stale."""
        return {job_id for block in blocks for job_id in self._by_block.get(block, ())}

    def is_loading(self, keys: Iterable[OffloadKey], below: JobId) -> bool:
        """Return whether a job with an id less than `below` loads any of these keys."""
        return any(self._loading.get(key, below) < below for key in keys)

    def has_load(self, request: ConnectorRequest) -> bool:
        """Return whether a load of this request is in flight."""
        return any(not self._jobs[job_id].is_store for job_id in request.transfer_jobs)

    def worker_ended(self, job_id: JobId, count: int, *, failed: bool) -> ConnectorJob | None:
        """Record that `count` workers have ended a job; return the job once all workers have.

        Unknown ids are ignored.
        """
        job = self._jobs.get(job_id) or self._stale.get(job_id)
        if job is None:
            return None
        job.pending_workers -= count
        job.has_failed = job.has_failed or failed
        if job.pending_workers > 0:
            return None
        if job.is_stale:
            del self._stale[job_id]
        else:
            self._drop(job)
        return job

    def mark_all_stale(self) -> None:
        """Mark every job as stale, for a reset."""
        for job in list(self._jobs.values()):
            self._drop(job)
            job.is_stale = True
            self._stale[job.job_id] = job

    def _drop(self, job: ConnectorJob) -> None:
        del self._jobs[job.job_id]
        job.request.transfer_jobs.discard(job.job_id)
        for block in job.device_blocks:
            watchers = self._by_block[block]
            watchers.discard(job.job_id)
            if not watchers:
                del self._by_block[block]
        for key in job.keys:
            if self._loading.get(key) == job.job_id:
                del self._loading[key]


@dataclass(slots=True)
class ConnectorCounters:
    """Counters of the connector.

    Attributes:
        loaded_tokens: Tokens of started loads.
        stored_blocks: Chunks of started stores.
        stores_refused: Store offers for which the primary had no room.
        stores_cut: Store offers of which only a prefix fitted.
        lost_blocks: Chunks of requests that ended before the primary had room for them.
        failed_loads: Loads that failed.
        failed_stores: Stores that failed.
    """

    loaded_tokens: int = 0
    stored_blocks: int = 0
    stores_refused: int = 0
    stores_cut: int = 0
    lost_blocks: int = 0
    failed_loads: int = 0
    failed_stores: int = 0


class OffloadingConnectorScheduler:
    """Drives an `OffloadingManager` for a scheduler. Only `reset_cache` may block.

    Calls per step: `get_num_new_matched_tokens` and, directly after it, `update_state_after_alloc`
    for each request to start; `build_connector_meta`; then `update_connector_output` with the
    workers' reports, and `take_invalid_blocks`. `request_finished` may be called between any two
    of these.

    Not thread-safe; call only from the owner's (the scheduler's) thread.
    """

    def __init__(self, manager: OffloadingManager, geometry: ConnectorGeometry) -> None:
        """Take control of `manager`; other callers may only shut it down."""
        self.manager = manager
        self.geometry = geometry
        self.counters = ConnectorCounters()
        self._requests: dict[str, ConnectorRequest] = {}
        self._jobs = JobTable(geometry.num_workers)
        self._contents = DeviceContents()
        self._step = Step()
        self._ending: list[ConnectorRequest] = []
        self._invalid_blocks: set[int] = set()
        self._least_load_tokens = min(map(geometry.tokens_per_chunk, range(len(geometry.groups))))

    # -- a request starts -----------------------------------------------------------------------

    def on_new_request(self, request: SchedulerRequest, num_computed_tokens: int = 0) -> None:
        """Have the blocks of a request that is queued promoted before its first lookup.

        Optional. Only with one group of full attention, and windows whose chunks are as long.

        Args:
            request: A request that the scheduler has queued.
            num_computed_tokens: Tokens from its start that are present on the device.
        """
        geometry = self.geometry
        groups = range(len(geometry.groups))
        full = [group for group in groups if geometry.chunks_per_window(group) is None]
        tokens_per_chunk, *others = {*map(geometry.tokens_per_chunk, groups)}
        if len(full) != 1 or others:
            return
        state = self._known(request)
        state.extend_keys(geometry)
        start = num_computed_tokens // tokens_per_chunk
        end = self._load_limit(request, num_computed_tokens) // tokens_per_chunk
        keys = [tuple(group.keys[start:end]) for group in state.groups]
        windows = [
            SlidingWindow(keys[group], size)
            for group in groups
            if (size := geometry.chunks_per_window(group)) is not None
        ]
        self.manager.prefetch(keys[full[0]], state.ctx, windows)

    def get_num_new_matched_tokens(
        self, request: SchedulerRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many further tokens can be loaded, and whether they are loaded asynchronously.

        Args:
            request: A request to start or restart; it has no device blocks of its own.
            num_computed_tokens: Tokens from its start that are present on the device.

        Returns:
            (None, False) if the answer is pending: repeat the call in the next step. (0, False)
            if there is nothing to load. (n, True) if n tokens can be loaded: allocate device
            blocks for them, call `update_state_after_alloc`, and delay the request until the load
            ends. The last token of a request is never loaded.
        """
        state = self._known(request)
        state.restart(num_computed_tokens)
        if state.transfer_jobs or state.has_ended:  # ended: an earlier request with this id
            return None, False
        if not state.may_load:
            return 0, False
        state.extend_keys(self.geometry)
        limit = self._load_limit(request, num_computed_tokens)
        match = match_prefix(state, self.geometry, num_computed_tokens, limit, self.manager)
        if match.is_deferred:
            return None, False
        tokens = match.tokens - num_computed_tokens
        if tokens < self._least_load_tokens:
            return 0, False
        # Wait for other requests that load these blocks: the device may share them afterwards. But
        # not for loads that began later, or requests with a common prefix would load it in turn.
        if state.waits_below is None:
            state.waits_below = self._jobs.next_id
        if self._jobs.is_loading(match.keys, below=state.waits_below):
            return None, False
        state.offered_tokens = tokens
        return tokens, True

    def update_state_after_alloc(
        self, request: SchedulerRequest, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """Set the device blocks of a request; if tokens are to be loaded, prepare the load.

        Blocks before a sliding window are not filled, even if the scheduler keeps them. They are
        not stored, and no other request may find them in the device's prefix cache.

        Args:
            request: The request.
            blocks: Its complete block tables.
            num_external_tokens: The tokens just offered by `get_num_new_matched_tokens`; 0 to
                decline, also when another source provides the tokens. Its blocks are not stored,
                nor what other requests compute that find them in the device's prefix cache.

        Raises:
            StateError: The number differs from the offer, or the block tables are too short.
        """
        state = self._known(request)
        if num_external_tokens not in {0, state.offered_tokens}:
            raise StateError(
                f"request {request.request_id!r} was offered {state.offered_tokens} tokens, not "
                f"{num_external_tokens}"
            )
        state.offered_tokens = 0
        state.loaded_tokens = num_external_tokens
        state.waits_below = None
        # With or without a load, this step writes the blocks after the computed ones.
        for group, table in zip(self.geometry.groups, blocks, strict=True):
            self._step.note_allocated(table[state.local_tokens // group.tokens_per_block :])
        self._step.placed_req_ids.add(request.request_id)
        state.set_blocks(blocks)
        if num_external_tokens:
            self._prepare_load(state, state.local_tokens + num_external_tokens)
        else:
            self._step.computed_req_ids.add(request.request_id)

    # -- the end of a step ----------------------------------------------------------------------

    def build_connector_meta(self, output: StepOutput) -> OffloadingConnectorMetadata:
        """End the step; return the transfer jobs for the workers."""
        step = self._step
        self._update_tables(output)
        for req_id in output.preempted_req_ids:
            self._preempt(req_id)
        final_stores = self._final_stores()
        # Only now: what has ended is stored before the step overwrites its blocks.
        self._contents.unfilled |= step.allocated
        running_stores = self._running_stores(output)
        # Flush earlier jobs that use a block allocated in this step, but not this step's own
        # loads, nor stores of blocks that it computes.
        step.flush |= (
            self._jobs.touching(step.allocated) - step.load_jobs.keys() - running_stores.keys()
        )
        if self._requests and all(s.request.is_finished() for s in self._requests.values()):
            # All requests have ended, so there may be no further step: flush all jobs.
            step.flush |= self._jobs.ids()
        store_jobs = final_stores | running_stores
        meta = OffloadingConnectorMetadata(step.load_jobs, store_jobs, frozenset(step.flush))
        for state in self._ending:
            self._signal_finish(state)
        self._ending.clear()
        self._step = Step()
        self.manager.on_schedule_end(
            ScheduleEndContext(
                frozenset(step.computed_req_ids), frozenset(output.preempted_req_ids)
            )
        )
        return meta

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Apply the workers' reports. A job ends when it has ended on all workers."""
        for job_id, count in output.completed.items():
            job = self._jobs.worker_ended(job_id, count, failed=job_id in output.failed)
            if job is None:
                continue
            if not job.is_stale:
                self._end_job(job)
            elif not self._jobs.has_stale:
                self.manager.on_reset_flushed()
            if job.is_store:
                continue
            if not job.has_failed:
                # Others may have the blocks that a preemption during the load took away.
                held = {block for group in job.request.groups for block in group.block_ids}
                self._contents.unfilled -= job.device_blocks & held
                continue
            # The request may have ended; what it has besides is still stored.
            invalid = job.request.load_failed(self.geometry)
            if not job.request.has_ended:
                self._invalid_blocks |= invalid

    def take_invalid_blocks(self) -> set[int]:
        """Remove and return the device blocks that failed loads left unfilled.

        Their requests must recompute them; decrease `num_computed_tokens` before the next call
        of `build_connector_meta`. Such a request is not offered loads again.
        """
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    # -- a request ends -------------------------------------------------------------------------

    def request_finished(self, request: SchedulerRequest) -> tuple[bool, None]:
        """End a request; always return (False, None): the scheduler may free its blocks at once.

        Running stores are flushed before their blocks are reused; its last full chunk is stored
        with this step. Keep only the blocks of a load in flight allocated until the load ends.
        """
        state = self._known(request)
        if not state.has_ended:
            state.has_ended = True
            self._ending.append(state)
        return False, None

    # -- resets ---------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the primary, between steps. Running requests store again from their start.

        Blocks only for secondary tiers; copies in flight continue and are flushed with the next
        step. No store or promotion starts before these copies have ended, because they still use
        freed slots.
        """
        self._step.flush |= self._jobs.ids()
        self._jobs.mark_all_stale()
        for state in list(self._requests.values()):
            if state.has_ended:
                self._signal_finish(state)
            state.store_anew(self.geometry)
        self.manager.reset_cache()
        if not self._jobs.has_stale:
            self.manager.on_reset_flushed()

    def has_pending_push_work(self) -> bool:
        """Return whether the scheduler must run steps even if it has no request to schedule."""
        return bool(
            self._jobs or self._jobs.has_stale or self._ending or self.manager.has_pending_work()
        )

    # -- internal: requests ---------------------------------------------------------------------

    def _load_limit(self, request: SchedulerRequest, num_computed_tokens: int) -> int:
        """Return how many leading tokens may be present once a request's load has ended."""
        limit = request.num_tokens - 1
        if self.geometry.max_load_tokens is not None:
            limit = min(limit, num_computed_tokens + self.geometry.max_load_tokens)
        return limit

    def _known(self, request: SchedulerRequest) -> ConnectorRequest:
        state = self._requests.get(request.request_id)
        if state is None:
            hints = getattr(request, "kv_hints", None)
            ctx = ReqContext(request.request_id, request.kv_transfer_params, kv_hints=hints)
            policy = self.manager.on_new_request(ctx).policy
            groups = [GroupState() for _ in self.geometry.groups]
            state = ConnectorRequest(request, ctx, policy, groups, self.manager.generation)
            self._requests[request.request_id] = state
        return state

    def _signal_finish(self, state: ConnectorRequest) -> None:
        if not state.finish_signalled:
            state.finish_signalled = True
            self.manager.on_request_finished(state.ctx)
        self._drop_if_idle(state)

    def _drop_if_idle(self, state: ConnectorRequest) -> None:
        req_id = state.ctx.req_id
        idle = state.finish_signalled and not state.transfer_jobs
        if idle and self._requests.get(req_id) is state:  # not a newer request with this id
            del self._requests[req_id]

    def _preempt(self, req_id: str) -> None:
        state = self._requests.get(req_id)
        if state is None:
            return
        self._step.flush |= state.transfer_jobs - self._step.load_jobs.keys()
        if req_id not in self._step.placed_req_ids:  # keep tables that were set in this step
            state.restart(0)

    def _update_tables(self, output: StepOutput) -> None:
        step = self._step
        for req_id, tables in output.block_tables.items():
            state = self._requests.get(req_id)
            for index, table in enumerate(tables):
                old = [] if state is None else state.groups[index].block_ids[: len(table)]
                step.note_allocated(b for b, was in zip_longest(table, old) if b != was)
        for tables in output.new_blocks.values():
            for table in tables:
                step.note_allocated(table)
        if self.geometry.has_windows:  # otherwise a step costs no time per queued request
            for req_id, state in self._requests.items():
                # The blocks of an ended request remain valid until this step runs.
                if req_id not in step.placed_req_ids and not state.has_ended:
                    state.drop_stale_blocks(step.allocated, self.geometry)
        for req_id in output.block_tables.keys() & self._requests.keys():
            step.placed_req_ids.add(req_id)
            self._requests[req_id].set_blocks(output.block_tables[req_id])
        for req_id in output.new_blocks.keys() & self._requests.keys():
            self._requests[req_id].append_blocks(output.new_blocks[req_id])

    # -- internal: jobs -------------------------------------------------------------------------

    def _prepare_load(self, state: ConnectorRequest, total_tokens: int) -> None:
        plan = plan_load(state, self.geometry, total_tokens)
        host = self.manager.prepare_load(plan.keys, state.ctx)
        if not isinstance(host, CPULoadStoreSpec):
            raise StateError(
                f"{type(self.manager).__name__} has no primary in host memory to load from"
            )
        job_id = self._jobs.add(state, plan.keys, plan.device, is_store=False)
        self._step.load_jobs[job_id] = TransferJobSpec(plan.device, host, state.ctx.req_id)
        self.counters.loaded_tokens += total_tokens - state.local_tokens
        if state.policy is OffloadPolicy.BLOCK_LEVEL:
            for index, group in enumerate(state.groups):
                group.next_chunk = total_tokens // self.geometry.tokens_per_chunk(index)

    def _final_stores(self) -> dict[JobId, TransferJobSpec]:
        """Offer the manager the remaining chunks of ended requests, for the last time.

        Called before `_running_stores`, so that they get room first.
        """
        jobs: dict[JobId, TransferJobSpec] = {}
        for state in self._ending:
            # Not after a reset, which signals the end at once; not if the request was aborted
            # during its load, because its blocks are incomplete.
            if not state.finish_signalled and not self._jobs.has_load(state):
                state.room_watch.clear()
                left_out = self._store(state, final_tokens(state.request), jobs)
                self.counters.lost_blocks += len(left_out)
        return jobs

    def _running_stores(self, output: StepOutput) -> dict[JobId, TransferJobSpec]:
        """Offer the chunks that running requests will have computed after this step."""
        jobs: dict[JobId, TransferJobSpec] = {}
        for req_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(req_id)
            if state is not None and not state.has_ended:
                self._contents.note_computed(state, self.geometry, scheduled)
                self._store(state, state.request.num_computed_tokens + scheduled, jobs)
        return jobs

    def _store(
        self, state: ConnectorRequest, tokens: int, jobs: dict[JobId, TransferJobSpec]
    ) -> Sequence[OffloadKey]:
        """Offer a request's unstored chunks; return the keys that the primary had no room for.

        If the last offer was granted only in part, offer at most as many chunks as may fit now.
        """
        if self._jobs.has_stale:
            return ()  # copies from before a reset may still use the slots
        watch = state.room_watch
        new_room = watch.most_blocks(self.manager.room_made)
        if new_room == 0:
            return ()
        state.extend_keys(self.geometry)
        offer = offer_store(state, self.geometry, self._contents, tokens, new_room)
        left_out: Sequence[OffloadKey] = ()
        if offer.keys:
            granted = self.manager.prepare_store(offer.keys, state.ctx, is_last=state.has_ended)
            if granted is None:
                self.counters.stores_refused += 1
                watch.blocks_left_out(self.manager.room_made)
                return offer.keys
            watch.blocks_placed(len(granted.keys_to_store), self.manager.room_made)
            left_out = granted.keys_left_out
            self.counters.stores_cut += bool(left_out)
            if granted.keys_to_store:
                plan = plan_store(state, self.geometry, offer.ends, granted.keys_to_store)
                job_id = self._jobs.add(state, plan.keys, plan.device, is_store=True)
                jobs[job_id] = TransferJobSpec(plan.device, granted.store_spec, state.ctx.req_id)
                self.counters.stored_blocks += len(plan.keys)
        if left_out:
            watch.blocks_left_out(self.manager.room_made)
        elif not offer.is_limited:
            watch.clear()
        ends = ends_before(state, self.geometry, offer.ends, left_out)
        for group, end in zip(state.groups, ends, strict=True):
            group.next_chunk = max(group.next_chunk, end)
        return left_out

    def _end_job(self, job: ConnectorJob) -> None:
        if job.is_store:
            self.counters.failed_stores += job.has_failed
            self.manager.complete_store(job.keys, job.request.ctx, not job.has_failed)
        else:
            self.counters.failed_loads += job.has_failed
            self.manager.complete_load(job.keys, job.request.ctx)
        self._drop_if_idle(job.request)
