"""vLLM's offloading connector, extended to report failed loads and to lose no stores."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm.lookups import BatchedLookups
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.integrations.vllm.worker import KVOffloadWorker
from kvoffload_async.types import JobId, OffloadKey


class KVOffloadConnector(OffloadingConnector):
    """Reports requests with failed loads, so that vLLM applies `kv_load_failure_policy`.

    vLLM's own connector cannot report them and aborts the engine instead. Also offers again what a
    store had no room for, until the request ends, and looks blocks up in batches. Only for
    `KVOffloadSpec`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own, unchanged
        super().__init__(*args, **kwargs)
        self._loading: dict[JobId, str] = {}
        self._failing: KVOffloadWorker | None = None
        manager = getattr(self.connector_scheduler, "manager", None)
        self._again: KVOffloadManager | None = None
        if isinstance(manager, KVOffloadManager) and manager.offers_again:
            self._again = manager
            BatchedLookups(manager).replace_in(self.connector_scheduler)

    def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ANN401 - as above
        """Return a step's jobs; have what a store left out offered again in the next step."""
        manager = self._again
        if manager is None:
            return super().build_connector_meta(scheduler_output)
        manager.ended = scheduler_output.finished_req_ids or ()
        meta = super().build_connector_meta(scheduler_output)
        for req_id, keys in manager.take_left_out().items():
            self._offer_again(req_id, frozenset(keys))
        return meta

    def _offer_again(self, req_id: str, left_out: Collection[OffloadKey]) -> None:
        """Move vLLM's marks of what a request has stored back before what was left out."""
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
        """Start this step's loads, and remember their requests."""
        for job_id, job in self._connector_metadata.load_jobs.items():
            if not getattr(job, "sync", False):  # 0.33: the others are waited for in this step
                self._loading[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers have ended, and those whose loads failed."""
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
