"""Worker side of the connector: starts copies and reports their ends."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Collection
from functools import partial

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies, Transfer, TransferOutcome, Transport
from kvoffload_async.errors import StateError, drop_tracebacks, text_of
from kvoffload_async.facade.connector.protocol import (
    ConnectorOutput,
    OffloadingConnectorMetadata,
    TransferJobSpec,
)
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.transport.completion import outcome_of
from kvoffload_async.types import JobId, TransferResult

logger = logging.getLogger(__name__)

_AWAIT_LOADS_S = 0.1
"""Maximum seconds that a step's end waits for its loads if the KV cache is in host memory."""
_FOLLOW_S = 0.5
"""Seconds that `shutdown` gives the loop's thread to report transfers that have ended."""


_Report = tuple[TransferResult, str | None]
"""A job's result, and the request id if the job is a load."""


class OffloadingConnectorWorker:
    """Runs the transfer jobs of one worker.

    Calls per step: `handle_preemptions(meta)`, before device blocks are overwritten;
    `start_kv_transfers(meta)`; the forward pass; `prepare_store_kv(meta)`, which defers this step's
    stores to the next step, so that they do not compete with sampling; `build_output()`.

    If the KV cache is in host memory, `build_output` and `get_finished` wait up to 0.1 s for the
    loads of their step: a load that ended a moment later would be seen a whole step later. They
    never wait for a device.

    A failed copy is reported as a result and raises no exception.

    Not thread-safe; call only from the worker's thread.
    """

    def __init__(self, transport: Transport, *, flush_timeout_s: float = 30.0) -> None:
        """Create the worker, which owns `transport`.

        Args:
            transport: Performs the copies.
            flush_timeout_s: Timeout of `handle_preemptions` in seconds.
        """
        self.transport = transport
        self._flush_timeout_s = flush_timeout_s
        self._loop = LoopThread("kvoffload-worker")
        self._running: dict[JobId, str | None] = {}
        self._deferred: dict[JobId, TransferJobSpec] = {}
        self._overrun: set[JobId] = set()
        """Stores whose device blocks may have been overwritten before they were copied."""
        self._new_loads: set[JobId] = set()
        """Loads since the end of the last step, if the KV cache is in host memory."""
        self._reports: list[_Report] = []
        self._ended: deque[tuple[JobId, asyncio.Task[TransferOutcome]]] = deque()
        self._tasks: dict[asyncio.Task[TransferOutcome], None] = {}
        self._closed = False

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_id: JobId, spec: TransferJobSpec) -> None:
        """Copy device blocks to slots, ordered after compute submitted so far. Non-blocking.

        Raises:
            StateError: A job with this id is running.
        """
        self._submit(job_id, spec, Direction.STORE)

    def submit_load(self, job_id: JobId, spec: TransferJobSpec, *, expedited: bool = False) -> None:
        """Copy slots to device blocks, ordered after compute submitted so far.

        Args:
            job_id: The job.
            spec: Slots and device blocks.
            expedited: Wait for the end, at most `flush_timeout_s`, because the next kernel needs
                the blocks.

        Raises:
            StateError: A job with this id is running.
        """
        self._submit(job_id, spec, Direction.LOAD)
        if self.transport.is_on_host:
            self._new_loads.add(job_id)
        if expedited:
            self.wait({job_id}, self._flush_timeout_s)

    def get_finished(self) -> list[TransferResult]:
        """At the end of a step, return the results of jobs that ended since the last call."""
        self._await_new_loads()
        return self.poll_finished()

    def poll_finished(self) -> list[TransferResult]:
        """Return the results of jobs that ended since the last call, once each. Non-blocking."""
        return [result for result, _ in self._take_reports()]

    def wait(self, job_ids: Collection[JobId], timeout: float) -> bool:
        """Wait until jobs have ended, at most `timeout` seconds; unknown ids are ignored.

        If one of the jobs is a deferred store, all deferred stores start now.

        Returns:
            Whether all of them have ended. `get_finished` still returns their results.
        """
        if not self._deferred.keys().isdisjoint(job_ids):
            self._submit_deferred()
        return self._loop.wait_until(partial(self._have_ended, job_ids), timeout)

    # -- a step ---------------------------------------------------------------------------------

    def handle_preemptions(self, meta: OffloadingConnectorMetadata) -> bool:
        """Start and await the jobs that must end before device blocks are overwritten.

        Stores still running after `flush_timeout_s` continue, but count as failed whatever their
        outcome, because the step may overwrite their source blocks.

        Returns:
            False if a load did not end within `flush_timeout_s`. It may still write to its device
            blocks; they must not be used until `wait` has returned true for it.
        """
        self._submit_deferred()
        for job_id, spec in meta.store_jobs.items():
            if job_id in meta.jobs_to_flush:
                self.submit_store(job_id, spec)
        if not meta.jobs_to_flush or self.wait(meta.jobs_to_flush, self._flush_timeout_s):
            return True
        late = [job_id for job_id in meta.jobs_to_flush if job_id in self._running]
        stores = [job_id for job_id in late if self._running[job_id] is None]
        logger.error(
            "transfer jobs %s did not end within %s s; stores among them count as failed; if the "
            "device is only slow, raise flush_timeout_s",
            late,
            self._flush_timeout_s,
        )
        self._overrun.update(stores)
        return len(stores) == len(late)

    def start_kv_transfers(self, meta: OffloadingConnectorMetadata) -> None:
        """Start the previous step's stores, then this step's loads. Non-blocking."""
        self._submit_deferred()
        for job_id, spec in meta.load_jobs.items():
            self.submit_load(job_id, spec)

    def prepare_store_kv(self, meta: OffloadingConnectorMetadata) -> None:
        """Defer this step's stores to the next step; flushed stores have already started."""
        for job_id, spec in meta.store_jobs.items():
            if job_id not in meta.jobs_to_flush:
                self._deferred[job_id] = spec

    def build_output(self) -> tuple[ConnectorOutput, set[str]]:
        """Return the jobs ended since the last call, and the ids of requests whose loads ended."""
        self._await_new_loads()
        reports = self._take_reports()
        results = [result for result, _ in reports]
        output = ConnectorOutput(
            {result.job_id: 1 for result in results},
            frozenset(result.job_id for result in results if not result.success),
        )
        return output, {req_id for _, req_id in reports if req_id is not None}

    def shutdown(self, timeout: float = 30.0) -> bool:
        """Stop loads and stores; idempotent. `get_finished` still returns results.

        Afterwards all jobs have a result; jobs whose copies still run have failed.

        Returns:
            False if a copy still runs; host and device memory must then stay allocated.
        """
        if self._closed:
            return self.transport.close(timeout)
        deadline_s = time.monotonic() + timeout
        self._submit_deferred()
        self._closed = True
        has_ended = self.transport.close(timeout)
        jobs = list(self._running)
        left_s = deadline_s - time.monotonic() if has_ended else 0.0
        if not self.wait(jobs, max(_FOLLOW_S, left_s)):
            self._loop.call_soon(self._give_up)
            self.wait(jobs, _FOLLOW_S)
        self._loop.close(_FOLLOW_S)
        return has_ended

    # -- internal -------------------------------------------------------------------------------

    def _submit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for job_id, spec in deferred.items():
            self.submit_store(job_id, spec)

    def _submit(self, job_id: JobId, spec: TransferJobSpec, direction: Direction) -> None:
        if job_id in self._running:
            raise StateError(f"job {job_id} runs already")
        self._running[job_id] = spec.req_id if direction is Direction.LOAD else None
        if self._closed:
            self._report(TransferResult(job_id, success=False))
            return
        try:
            transfer = self.transport.submit(
                BlockCopies(direction, spec.device, spec.host), self.transport.record_compute()
            )
        except BaseException as error:  # any error of any transport
            # As text: a log record with the error would keep its frames, and thus the slots, alive.
            logger.error(  # noqa: TRY400
                "%s could not be submitted; its blocks will be recomputed, or stored later:\n%s",
                _described(job_id, spec, direction),
                "".join(traceback.format_exception(error)),
            )
            drop_tracebacks(error)
            self._report(TransferResult(job_id, success=False))
            if isinstance(error, KeyboardInterrupt):  # sent by the user
                raise
        else:
            name = _described(job_id, spec, direction)
            self._loop.call_soon(self._follow, job_id, transfer, name)

    def _follow(self, job_id: JobId, transfer: Transfer, name: str) -> None:
        """Await a transfer's end in its own task. Call from the loop's thread."""
        task = asyncio.get_running_loop().create_task(outcome_of(transfer), name=name)
        self._tasks[task] = None
        task.add_done_callback(partial(self._note_end, job_id))

    def _note_end(self, job_id: JobId, task: asyncio.Task[TransferOutcome]) -> None:
        """Queue a transfer's ended task for the worker's thread. Runs on the loop's thread."""
        del self._tasks[task]
        self._ended.append((job_id, task))
        self._loop.notify()

    def _give_up(self) -> None:
        """Cancel all tasks that await transfers. Runs on the loop's thread."""
        for task in self._tasks:
            task.cancel()

    def _await_new_loads(self) -> None:
        if self._new_loads:
            loads, self._new_loads = self._new_loads, set()
            self.wait(loads, _AWAIT_LOADS_S)

    def _have_ended(self, job_ids: Collection[JobId]) -> bool:
        self._collect()
        return not any(job_id in self._running for job_id in job_ids)

    def _collect(self) -> None:
        while self._ended:
            self._report(_result(*self._ended.popleft()))

    def _report(self, result: TransferResult) -> None:
        if result.job_id in self._overrun:
            self._overrun.discard(result.job_id)
            result = TransferResult(result.job_id, success=False)
        self._reports.append((result, self._running.pop(result.job_id)))

    def _take_reports(self) -> list[_Report]:
        self._collect()
        reports, self._reports = self._reports, []
        return reports


def _described(job_id: JobId, spec: TransferJobSpec, direction: Direction) -> str:
    num_blocks = len(spec.host.block_ids)
    what = direction.name.lower()
    return f"{what} of {num_blocks} blocks for request {spec.req_id} (transfer job {job_id})"


def _result(job_id: JobId, task: asyncio.Task[TransferOutcome]) -> TransferResult:
    if task.cancelled():  # by `_give_up`
        return TransferResult(job_id, success=False)
    error = task.exception() or task.result().error
    if error is not None:
        drop_tracebacks(error)  # before it is logged, as logs may be kept
        logger.error(
            "%s failed: %s; its blocks will be recomputed, or stored later",
            task.get_name(),
            text_of(error),
        )
        return TransferResult(job_id, success=False)
    outcome = task.result()
    return TransferResult(job_id, True, outcome.num_bytes, outcome.seconds)


def summed(outputs: Collection[ConnectorOutput]) -> ConnectorOutput:
    """Return the sum of several workers' outputs."""
    completed: dict[JobId, int] = {}
    failed: set[JobId] = set()
    for output in outputs:
        for job_id, count in output.completed.items():
            completed[job_id] = completed.get(job_id, 0) + count
        failed.update(output.failed)
    return ConnectorOutput(completed, frozenset(failed))
