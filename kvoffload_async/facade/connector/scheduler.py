"""The scheduler's side of offloading: what to load, what to store, what must not be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvoffload_async.errors import StateError
from kvoffload_async.facade.connector.jobs import ConnectorJob, JobTable
from kvoffload_async.facade.connector.matching import match_prefix
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
from kvoffload_async.facade.connector.requests import ConnectorRequest
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.types import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    JobId,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    as_block_ids,
)


@dataclass(slots=True)
class _Step:
    """What has gathered in the step under way."""

    load_jobs: dict[JobId, TransferJobSpec] = field(default_factory=dict)
    flush: set[JobId] = field(default_factory=set)
    allocated: set[int] = field(default_factory=set)
    new_req_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ConnectorCounters:
    """What the adapter has done so far."""

    loaded_tokens: int = 0
    stored_blocks: int = 0
    stores_refused: int = 0
    failed_loads: int = 0
    failed_stores: int = 0


class OffloadingConnectorScheduler:
    """Drives an `OffloadingManager` for a scheduler. No method waits.

    The order of a step: `get_num_new_matched_tokens` and `update_state_after_alloc` for requests
    that are to start; `request_finished` for those that end; `build_connector_meta`, which is the
    last; and `update_connector_output` with what the workers report, before the next step.

    Thread: owner, the scheduler's.
    """

    def __init__(self, manager: OffloadingManager, geometry: ConnectorGeometry) -> None:
        """Drive `manager`, which nobody else may call but to shut it down."""
        self.manager = manager
        self.geometry = geometry
        self.counters = ConnectorCounters()
        self._requests: dict[str, ConnectorRequest] = {}
        self._jobs = JobTable(geometry.num_workers)
        self._step = _Step()
        self._finished_now: list[ConnectorRequest] = []
        self._invalid_blocks: set[int] = set()
        self._stale_below: JobId = 0
        self._reset_fence: dict[JobId, int] = {}

    # -- a request starts -----------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: SchedulerRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens past the computed ones can be loaded, and whether to wait.

        Returns:
            (None, False) if it is not known yet: ask again in the next step. (0, False) if there
            is nothing to load. (n, True) if n tokens can be loaded: allocate device blocks for
            them, call `update_state_after_alloc`, and let the request wait for the load. The
            last token of a request is never among them.
        """
        state = self._known(request)
        state.restart(num_computed_tokens)
        if state.transfer_jobs:
            return None, False
        state.extend_keys(self.geometry)
        limit = request.num_tokens - 1
        if self.geometry.max_load_tokens is not None:
            limit = min(limit, num_computed_tokens + self.geometry.max_load_tokens)
        match = match_prefix(
            state,
            self.geometry,
            num_computed_tokens,
            limit,
            lambda key: self.manager.lookup(key, state.ctx),
        )
        if match.is_deferred:
            return None, False
        tokens = match.tokens - num_computed_tokens
        smallest = min(group.tokens_per_block for group in self.geometry.groups)
        if tokens < smallest:
            return 0, False
        if self._jobs.is_loading(match.keys):
            return None, False  # another request is loading a part of it: share, do not repeat
        return tokens, True

    def update_state_after_alloc(
        self, request: SchedulerRequest, blocks: BlockTables, num_external_tokens: int
    ) -> None:
        """Learn the device blocks of a request; if tokens are to be loaded, prepare the load.

        Args:
            request: The request.
            blocks: Its whole block tables, a sequence a group.
            num_external_tokens: What `get_num_new_matched_tokens` offered and was accepted; 0
                also when another source provides them.

        Raises:
            StateError: A load of this request is in flight.
        """
        state = self._known(request)
        # Also without a load: the blocks are about to be overwritten by somebody.
        for table in blocks:
            self._step.allocated.update(block for block in table if block != NULL_BLOCK)
        state.set_blocks(blocks)
        if not num_external_tokens:
            return
        if state.transfer_jobs:
            raise StateError(f"request {request.request_id!r} has transfers in flight already")
        self._prepare_load(state, state.local_tokens + num_external_tokens)

    # -- the end of a step ----------------------------------------------------------------------

    def build_connector_meta(self, output: StepOutput) -> OffloadingConnectorMetadata:
        """End the step: return what the workers are to do."""
        step = self._step
        self._update_tables(output)
        for req_id in output.preempted_req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                step.flush.update(state.transfer_jobs - step.load_jobs.keys())
        step.flush.update(self._jobs.touching(step.allocated) - step.load_jobs.keys())
        store_jobs = self._store_jobs(output)
        if self._requests and all(s.request.is_finished() for s in self._requests.values()):
            # There may be no further step: everything is expedited, in both directions.
            step.flush.update(self._jobs.ids())
        meta = OffloadingConnectorMetadata(step.load_jobs, store_jobs, frozenset(step.flush))
        for state in self._finished_now:
            self._signal_finish(state)
        self._finished_now.clear()
        self._step = _Step()
        self.manager.on_schedule_end(
            ScheduleEndContext(frozenset(step.new_req_ids), frozenset(output.preempted_req_ids))
        )
        return meta

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Take in what the workers report. A job counts as ended once all of them have."""
        for job_id, count in output.completed.items():
            if job_id < self._stale_below:
                self._fence_ended(job_id, count)
                continue
            job = self._jobs.worker_ended(job_id, count, failed=job_id in output.failed)
            if job is not None:
                self._job_ended(job)

    def take_invalid_blocks(self) -> set[int]:
        """Detach the device blocks that a failed load left without their bytes.

        Their requests must compute them anew.
        """
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    # -- a request ends -------------------------------------------------------------------------

    def request_finished(self, request: SchedulerRequest) -> tuple[bool, None]:
        """End a request: (False, None), so that its device blocks are freed at once.

        Blocks that are still being copied stay watched; its last full block is stored with this
        step.
        """
        state = self._known(request)
        state.extend_keys(self.geometry)
        self._finished_now.append(state)
        return False, None

    # -- resets ---------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the primary, between steps. Survivors store again from the start."""
        self._step.flush.update(self._jobs.ids())
        for state in list(self._requests.values()):
            if state.request.is_finished():
                self._signal_finish(state)
        self._reset_fence.update(self._jobs.clear())
        self._stale_below = self._jobs.next_id
        for state in self._requests.values():
            state.transfer_jobs.clear()
            for group in state.groups:
                group.next_chunk = 0
        self._requests = {
            req_id: state for req_id, state in self._requests.items() if not state.finish_signalled
        }
        self.manager.reset_cache()
        if not self._reset_fence:
            self.manager.on_reset_flushed()

    def has_pending_push_work(self) -> bool:
        """Tell whether steps are needed although no request is scheduled."""
        return bool(self._jobs) or bool(self._reset_fence) or self.manager.has_pending_work()

    # -- inside: requests -----------------------------------------------------------------------

    def _known(self, request: SchedulerRequest) -> ConnectorRequest:
        state = self._requests.get(request.request_id)
        if state is None:
            ctx = ReqContext(request.request_id, request.kv_transfer_params)
            policy = self.manager.on_new_request(ctx).policy
            state = ConnectorRequest(request, ctx, policy, len(self.geometry.groups))
            self._requests[request.request_id] = state
            self._step.new_req_ids.add(request.request_id)
        return state

    def _signal_finish(self, state: ConnectorRequest) -> None:
        if not state.finish_signalled:
            state.finish_signalled = True
            self.manager.on_request_finished(state.ctx)
        self._drop_if_idle(state)

    def _drop_if_idle(self, state: ConnectorRequest) -> None:
        if state.finish_signalled and not state.transfer_jobs:
            self._requests.pop(state.ctx.req_id, None)

    def _update_tables(self, output: StepOutput) -> None:
        for req_id, tables in output.block_tables.items():
            if req_id in self._requests:
                self._requests[req_id].set_blocks(tables)
            self._note_allocated(tables)
        for req_id, tables in output.new_blocks.items():
            if req_id in self._requests:
                self._requests[req_id].append_blocks(tables)
            self._note_allocated(tables)
        empty = [()] * len(self.geometry.groups)
        for req_id, state in self._requests.items():
            if req_id not in output.block_tables:
                kept: BlockTables = output.new_blocks.get(req_id, empty)
                state.drop_stale_blocks(self._step.allocated, kept)

    def _note_allocated(self, tables: BlockTables) -> None:
        for table in tables:
            self._step.allocated.update(block for block in table if block != NULL_BLOCK)

    # -- inside: loads --------------------------------------------------------------------------

    def _prepare_load(self, state: ConnectorRequest, total_tokens: int) -> None:
        keys: list[OffloadKey] = []
        blocks: list[int] = []
        sizes: list[int] = []
        indices: list[int] = []
        for index, group in enumerate(state.groups):
            first, ids = self._load_blocks(state, index, total_tokens)
            per_chunk = self.geometry.blocks_per_chunk
            if ids:
                keys += group.keys[first // per_chunk : -(-(first + len(ids)) // per_chunk)]
            blocks += ids
            sizes.append(len(ids))
            indices.append(first)
            if state.policy is OffloadPolicy.BLOCK_LEVEL:
                group.next_chunk = total_tokens // self.geometry.tokens_per_chunk(index)
        host = self.manager.prepare_load(keys, state.ctx)
        if not isinstance(host, CPULoadStoreSpec):
            raise StateError(f"{type(self.manager).__name__} loads from no primary in host memory")
        job_id = self._jobs.add(state, keys, blocks, is_store=False)
        device = GPULoadStoreSpec(as_block_ids(blocks), tuple(sizes), tuple(indices))
        self._step.load_jobs[job_id] = TransferJobSpec(device, host, state.ctx.req_id)
        self.counters.loaded_tokens += total_tokens - state.local_tokens

    def _load_blocks(
        self, state: ConnectorRequest, index: int, total_tokens: int
    ) -> tuple[int, list[int]]:
        """Return the first logical device block to load and the ids from there on.

        A sliding window's blocks begin where it still has any: the nulls before are skipped.
        """
        tokens = self.geometry.groups[index].tokens_per_block
        first = state.local_tokens // tokens
        last = -(-total_tokens // tokens)
        table = state.groups[index].block_ids
        while first < last and table[first] == NULL_BLOCK:
            first += 1
        return first, table[first:last]

    # -- inside: stores -------------------------------------------------------------------------

    def _store_jobs(self, output: StepOutput) -> dict[JobId, TransferJobSpec]:
        jobs: dict[JobId, TransferJobSpec] = {}
        for req_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(req_id)
            if state is None or state.request.is_finished():
                continue
            state.extend_keys(self.geometry)
            self._store(state, state.request.num_computed_tokens + scheduled, jobs)
        for state in self._finished_now:
            if state.finish_signalled:
                continue  # a reset came first
            self._store(state, _final_tokens(state.request), jobs)
        return jobs

    def _store(
        self, state: ConnectorRequest, tokens: int, jobs: dict[JobId, TransferJobSpec]
    ) -> None:
        """Store the chunks that are full after this step and were not stored before."""
        request = state.request
        bounds = [tokens, request.num_tokens]
        if self.geometry.max_offload_tokens is not None:
            bounds.append(self.geometry.max_offload_tokens)
        if self.geometry.offload_prompt_only:
            bounds.append(request.num_prompt_tokens)
        ends = [
            self._storable_chunks(state, index, min(bounds)) for index in range(len(state.groups))
        ]
        offered = [
            group.keys[chunk]
            for group, end in zip(state.groups, ends, strict=True)
            for chunk in range(group.next_chunk, end)
            if self._is_whole(group.block_ids, chunk)
        ]
        if not offered:
            return
        granted = self.manager.prepare_store(offered, state.ctx)
        if granted is None:
            self.counters.stores_refused += 1
            return  # nothing was stored, so nothing advances: offered again in the next step
        if granted.keys_to_store:
            job_id, spec = self._store_job(state, ends, granted.keys_to_store, granted.store_spec)
            jobs[job_id] = spec
            self.counters.stored_blocks += len(granted.keys_to_store)
        for group, end in zip(state.groups, ends, strict=True):
            group.next_chunk = max(group.next_chunk, end)

    def _storable_chunks(self, state: ConnectorRequest, index: int, tokens: int) -> int:
        """Return how many chunks are full, keyed and allocated."""
        group = state.groups[index]
        allocated = len(group.block_ids) // self.geometry.blocks_per_chunk
        return min(tokens // self.geometry.tokens_per_chunk(index), len(group.keys), allocated)

    def _is_whole(self, block_ids: Sequence[int], chunk: int) -> bool:
        per_chunk = self.geometry.blocks_per_chunk
        return NULL_BLOCK not in block_ids[chunk * per_chunk : (chunk + 1) * per_chunk]

    def _store_job(
        self,
        state: ConnectorRequest,
        ends: Sequence[int],
        keys: Sequence[OffloadKey],
        host: CPULoadStoreSpec,
    ) -> tuple[JobId, TransferJobSpec]:
        """Make the job that copies exactly the accepted keys' device blocks."""
        per_chunk = self.geometry.blocks_per_chunk
        accepted = set(keys)
        blocks: list[int] = []
        sizes: list[int] = []
        indices: list[int] = []
        for group, end in zip(state.groups, ends, strict=True):
            chunks = [c for c in range(group.next_chunk, end) if group.keys[c] in accepted]
            for chunk in chunks:
                blocks += group.block_ids[chunk * per_chunk : (chunk + 1) * per_chunk]
            sizes.append(len(chunks) * per_chunk)
            indices.append(chunks[0] * per_chunk if chunks else 0)
        job_id = self._jobs.add(state, keys, blocks, is_store=True)
        device = GPULoadStoreSpec(as_block_ids(blocks), tuple(sizes), tuple(indices))
        return job_id, TransferJobSpec(device, host, state.ctx.req_id)

    # -- inside: completions --------------------------------------------------------------------

    def _job_ended(self, job: ConnectorJob) -> None:
        state = job.request
        if job.is_store:
            self.counters.failed_stores += job.has_failed
            self.manager.complete_store(job.keys, state.ctx, not job.has_failed)
        else:
            self.manager.complete_load(job.keys, state.ctx)
            if job.has_failed:
                self.counters.failed_loads += 1
                self._invalid_blocks.update(job.device_blocks)
        self._drop_if_idle(state)

    def _fence_ended(self, job_id: JobId, count: int) -> None:
        left = self._reset_fence.get(job_id)
        if left is None:
            return
        if left > count:
            self._reset_fence[job_id] = left - count
            return
        del self._reset_fence[job_id]
        if not self._reset_fence:
            self.manager.on_reset_flushed()


def _final_tokens(request: SchedulerRequest) -> int:
    """Return how many tokens of an ended request have KV: not that of the last sampled one."""
    return min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1))
