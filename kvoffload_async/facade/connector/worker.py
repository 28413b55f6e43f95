"""The worker's side of offloading: starts copies, and says when they have ended."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from functools import partial

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies, Transfer, TransferOutcome, Transport
from kvoffload_async.facade.connector.protocol import (
    ConnectorOutput,
    OffloadingConnectorMetadata,
    TransferJobSpec,
)
from kvoffload_async.runtime.loop_thread import LoopThread
from kvoffload_async.types import JobId, TransferResult


class OffloadingConnectorWorker:
    """Performs the jobs of one worker.

    A step: `handle_preemptions(meta)` before any device block may be overwritten;
    `start_kv_transfers(meta)`; the forward pass; `prepare_store_kv(meta)`, which keeps this
    step's stores for the next one, so that they do not compete with sampling; `build_output()`.

    Thread: the worker's, for all of it.
    """

    def __init__(self, transport: Transport, *, flush_timeout_s: float = 30.0) -> None:
        """Own `transport` from now on.

        Args:
            transport: Where copies are made.
            flush_timeout_s: Seconds that `handle_preemptions` waits at most.
        """
        self._transport = transport
        self._flush_timeout_s = flush_timeout_s
        self._loop = LoopThread("kvoffload-worker")
        self._transfers: dict[JobId, Transfer] = {}
        self._deferred: dict[JobId, TransferJobSpec] = {}
        self._ended: deque[tuple[JobId, asyncio.Task[TransferOutcome]]] = deque()
        self._tasks: set[asyncio.Task[TransferOutcome]] = set()
        self._loading: dict[JobId, str] = {}
        self._closed = False

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_id: JobId, spec: TransferJobSpec) -> None:
        """Copy device blocks to slots, behind what has been computed so far. Never waits."""
        self._submit(job_id, spec, Direction.STORE)

    def submit_load(self, job_id: JobId, spec: TransferJobSpec, *, expedited: bool = False) -> None:
        """Copy slots to device blocks, behind what has been computed so far.

        Args:
            job_id: The job.
            spec: What to copy.
            expedited: Wait for the end, at most `flush_timeout_s`: the next kernel needs it.
        """
        self._loading[job_id] = spec.req_id
        self._submit(job_id, spec, Direction.LOAD)
        if expedited:
            self.wait({job_id}, self._flush_timeout_s)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, each once. Never waits."""
        results = []
        while self._ended:
            job_id, task = self._ended.popleft()
            self._transfers.pop(job_id, None)
            results.append(_result(job_id, task))
        return results

    def wait(self, job_ids: Collection[JobId], timeout: float) -> bool:
        """Wait until jobs have ended, at most `timeout` seconds; unknown ids are ignored.

        Returns:
            Whether all of them have. Their results are left for `get_finished`.
        """
        deadline_s = time.monotonic() + timeout
        known = [self._transfers[job_id] for job_id in job_ids if job_id in self._transfers]
        ended = [t.synchronize(max(0.0, deadline_s - time.monotonic())) for t in known]
        return all(ended)

    # -- a step ---------------------------------------------------------------------------------

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> bool:
        """Expedite and drain what must end before device blocks are overwritten.

        Returns:
            False if some did not end within `flush_timeout_s`; they go on.
        """
        self._submit_deferred()
        for job_id, spec in meta.store_jobs.items():
            if job_id in meta.jobs_to_flush:
                self.submit_store(job_id, spec)
        return not meta.jobs_to_flush or self.wait(meta.jobs_to_flush, self._flush_timeout_s)

    def start_kv_transfers(self, meta: OffloadingConnectorMetadata) -> None:
        """Start the stores of the step before, then this step's loads. Never waits."""
        self._submit_deferred()
        for job_id, spec in meta.load_jobs.items():
            self.submit_load(job_id, spec)

    def prepare_store_kv(self, meta: OffloadingConnectorMetadata) -> None:
        """Keep this step's stores for the next step."""
        for job_id, spec in meta.store_jobs.items():
            if job_id not in meta.jobs_to_flush:
                self._deferred[job_id] = spec

    def build_output(self) -> tuple[ConnectorOutput, set[str]]:
        """Return what ended since the last call, and the requests whose load has ended."""
        results = self.get_finished()
        loaded = {self._loading.pop(result.job_id, None) for result in results}
        output = ConnectorOutput(
            {result.job_id: 1 for result in results},
            frozenset(result.job_id for result in results if not result.success),
        )
        return output, {req_id for req_id in loaded if req_id is not None}

    def shutdown(self, timeout: float = 30.0) -> bool:
        """End both directions; idempotent. Results are still there for `get_finished`.

        Returns:
            False if a copy still runs: then host and device memory must stay.
        """
        if self._closed:
            return True
        self._closed = True
        self._submit_deferred()
        ended = self._transport.close(timeout)
        self._loop.wait_until(lambda: len(self._ended) == len(self._transfers), timeout)
        self._loop.close(timeout)
        return ended

    # -- inside ---------------------------------------------------------------------------------

    def _submit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for job_id, spec in deferred.items():
            self.submit_store(job_id, spec)

    def _submit(self, job_id: JobId, spec: TransferJobSpec, direction: Direction) -> None:
        transfer = self._transport.submit(
            BlockCopies(direction, spec.device, spec.host), self._transport.record_compute()
        )
        self._transfers[job_id] = transfer
        self._loop.call_soon(self._follow, job_id, transfer)

    def _follow(self, job_id: JobId, transfer: Transfer) -> None:
        """Await a transfer's end in a task of its own. Thread: loop."""
        task = asyncio.get_running_loop().create_task(transfer.outcome(), name=f"transfer:{job_id}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._followed, job_id))

    def _followed(self, job_id: JobId, task: asyncio.Task[TransferOutcome]) -> None:
        """Thread: loop."""
        self._tasks.discard(task)
        self._ended.append((job_id, task))
        self._loop.notify()


def _result(job_id: JobId, task: asyncio.Task[TransferOutcome]) -> TransferResult:
    if task.cancelled() or task.exception() is not None:
        return TransferResult(job_id, success=False)
    outcome = task.result()
    return TransferResult(job_id, outcome.error is None, outcome.num_bytes, outcome.seconds)


def summed(outputs: Collection[ConnectorOutput]) -> ConnectorOutput:
    """Return the outputs of several workers as one."""
    completed: dict[JobId, int] = {}
    failed: set[JobId] = set()
    for output in outputs:
        for job_id, count in output.completed.items():
            completed[job_id] = completed.get(job_id, 0) + count
        failed.update(output.failed)
    return ConnectorOutput(completed, frozenset(failed))
