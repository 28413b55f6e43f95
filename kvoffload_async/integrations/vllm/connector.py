"""Extends vLLM's offloading connector: reports failed loads, loses no stores, batches lookups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.integrations.vllm.tenants import TenantManager
from kvoffload_async.integrations.vllm.worker import KVOffloadWorker
from kvoffload_async.types import JobId, LookupResult, OffloadKey, SlidingWindow

_ABSENT = {LookupResult.MISS, LookupResult.RETRY}


class BatchedLookups:
    """Batched versions of two lookup methods of vLLM's scheduler, which ask block by block.

    Call only from the scheduler's thread.
    """

    def __init__(self, manager: KVOffloadManager) -> None:
        """Look blocks up in `manager`."""
        self._manager = manager

    def replace_in(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's scheduler of offloading
        """Replace the two lookup methods of a scheduler.

        Not if its events describe themselves: then vLLM records each block that is looked up.
        """
        if not scheduler._events_tracker.self_describing_enabled:  # noqa: SLF001 - see version.py
            scheduler._maximal_prefix_lookup = self.maximal_prefix  # noqa: SLF001
            scheduler._sliding_window_lookup = self.sliding_window  # noqa: SLF001

    def maximal_prefix(
        self,
        keys: Iterable[OffloadKey],
        req_context: base.ReqContext,
        req: Any,  # noqa: ANN401 - not used
        group_config: Any,  # noqa: ANN401 - not used
        start_chunk_idx: int,
    ) -> int | None:
        """Return how many leading blocks can be loaded; None: ask again later."""
        blocks = keys if isinstance(keys, list) else list(keys)
        found, is_deferred = self._manager.lookup_prefix(blocks, req_context)
        return None if is_deferred else found

    def sliding_window(
        self,
        keys: Sequence[OffloadKey],
        sliding_window_size: int,
        req_context: base.ReqContext,
        initial_window_size: int | None = None,
    ) -> int | None:
        """Return the end of the last run of blocks that fills a window; None: ask again later.

        A run at the start of `keys` may be shorter. Blocks are looked up from the right, up to the
        first one of the run. Behind the first gap, the run needs only `sliding_window_size` blocks.
        """
        needed = initial_window_size or sliding_window_size
        length, start = 0, len(keys)
        is_pending = is_deferred = False
        while start and length < needed:
            window = keys[max(0, start - needed + length) : start]
            for answer in self._manager.lookup_many(window[::-1], req_context):
                start -= 1
                if answer in _ABSENT:
                    is_deferred = is_deferred or answer is LookupResult.RETRY
                    length, is_pending, needed = 0, False, sliding_window_size
                    continue
                length += 1
                is_pending = is_pending or answer is LookupResult.HIT_PENDING
                if length == needed:
                    break
        return None if is_deferred or is_pending else start + length


class KVOffloadConnector(OffloadingConnector):
    """Reports requests with failed loads, so that vLLM applies `kv_load_failure_policy`.

    vLLM's own connector cannot report them and aborts the engine instead. Also offers again what a
    store had no room for, until the request ends, looks blocks up in batches, and has those of
    queued requests promoted ahead. Only for `KVOffloadSpec`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own, unchanged
        super().__init__(*args, **kwargs)
        self._loading: dict[JobId, str] = {}
        self._failing: KVOffloadWorker | None = None
        manager = getattr(self.connector_scheduler, "manager", None)
        self._tenants = manager if isinstance(manager, TenantManager) else None
        self._again: KVOffloadManager | None = None
        self._device_blocks: Any = None  # vLLM's block pool
        if isinstance(manager, KVOffloadManager) and manager.offers_again:
            self._again = manager
            BatchedLookups(manager).replace_in(self.connector_scheduler)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: ANN401 - as above
        """Remember the device's blocks: those are not promoted ahead that it has already."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._device_blocks = gpu_block_pool

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - as above
        """Begin a request; its blocks are promoted while it is queued.

        Only for models with one group of full attention, and others with chunks as long. Not if
        vLLM's events describe themselves: a block would be announced before vLLM has looked it up,
        and without its description.
        """
        if self._tenants is not None:
            self._tenants.salts[request.request_id] = request.cache_salt
        super().on_new_request(request)
        if self._again is None or request.skip_reading_prefix_cache:
            return
        if self.connector_scheduler._events_tracker.self_describing_enabled:  # noqa: SLF001
            return
        config = self.connector_scheduler.config
        groups = config.kv_group_configs
        full = [group for group in groups if group.sliding_window_size_in_chunks is None]
        tokens_per_chunk, *others = {group.tokens_per_chunk for group in groups}
        if len(full) != 1 or others:
            return
        status = self.connector_scheduler._req_status[request.request_id]  # noqa: SLF001
        status.update_offload_keys()
        on_device = self._num_on_device(request, full[0].group_idx) * config.tokens_per_hash
        start = on_device // tokens_per_chunk
        end = (request.num_tokens - (len(groups) > 1)) // tokens_per_chunk
        if status.max_load_tokens is not None:
            end = min(end, start + status.max_load_tokens // tokens_per_chunk)
        keys = [tuple(group.offload_keys[start:end]) for group in status.group_states]
        windows = [
            SlidingWindow(keys[number], group.load_window_size_in_chunks(0))
            for number, group in enumerate(groups)
            if group is not full[0]
        ]
        self._again.prefetch(keys[groups.index(full[0])], status.req_context, windows)

    def _num_on_device(self, request: Any, group: int) -> int:  # noqa: ANN401 - as above
        """Return how many leading blocks of a request are in vLLM's own prefix cache."""
        if self._device_blocks is None:
            return 0
        find = self._device_blocks.get_cached_block
        hashes = takewhile(lambda block_hash: find(block_hash, [group]), request.block_hashes)
        return sum(1 for _ in hashes)

    def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - as above
        """Return a step's jobs; blocks that a store left out are offered again in the next step."""
        manager = self._again
        if manager is None:
            return super().build_connector_meta(scheduler_output)
        manager.ended = scheduler_output.finished_req_ids or ()
        meta = super().build_connector_meta(scheduler_output)
        for req_id, keys in manager.take_left_out().items():
            self._offer_again(req_id, frozenset(keys))
        return meta

    def _offer_again(self, req_id: str, left_out: Collection[OffloadKey]) -> None:
        """Reset vLLM's position after a request's stored chunks to the first chunk left out."""
        status = self.connector_scheduler._req_status[req_id]  # noqa: SLF001 - see version.py
        for group in status.group_states:
            stored = group.offload_keys[: group.next_stored_chunk_idx]
            indices = (index for index, key in enumerate(stored) if key in left_out)
            group.next_stored_chunk_idx = next(indices, group.next_stored_chunk_idx)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Create the worker and enable its reporting of failed loads.

        Raises:
            ConfigError: The spec is not `KVOffloadSpec`.
        """
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker.worker
        if not isinstance(worker, KVOffloadWorker):
            raise ConfigError(
                'spec_name: KVOffloadConnector needs "KVOffloadSpec"; '
                'use "kv_connector": "OffloadingConnector" with other specs'
            )
        worker.reports_failed_loads = True
        self._failing = worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as above
        """Start this step's loads, and record the requests that they belong to."""
        for job_id, job in self._connector_metadata.load_jobs.items():
            if not getattr(job, "sync", False):  # 0.33: the others are waited for in this step
                self._loading[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers have ended, and the requests whose loads failed."""
        results = super().get_transfer_results(finished_req_ids)
        failed = self._failing.take_failed_loads() if self._failing is not None else set()
        results.failed_recving |= {self._loading[job_id] for job_id in failed}
        ended = results.finished_recving
        self._loading = {
            job: req_id for job, req_id in self._loading.items() if req_id not in ended
        }
        return results


# MultiConnector finds the class of statistics from another process by its registered name.
KVConnectorFactory.register_connector("KVOffloadConnector", __name__, "KVOffloadConnector")
