"""The adapter's own jobs: copies between device and primary, until every worker has ended them.

Job ids here are a different namespace from those of the secondary tiers' jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvoffload_async.facade.connector.protocol import NULL_BLOCK
from kvoffload_async.facade.connector.requests import ConnectorRequest
from kvoffload_async.types import JobId, OffloadKey


@dataclass(slots=True)
class ConnectorJob:
    """One copy.

    Attributes:
        job_id: See `JobId`.
        request: The request that it is for.
        keys: What is copied.
        is_store: Device to host.
        device_blocks: The device blocks that it touches, without nulls and duplicates.
        pending_workers: Workers that have not ended it.
        has_failed: Whether one of them failed.
        is_stale: Whether a reset has invalidated its keys: only its end is awaited.
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
    """The jobs in flight, and which device blocks they touch. Thread: owner."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._jobs: dict[JobId, ConnectorJob] = {}
        self._stale: dict[JobId, ConnectorJob] = {}
        self._by_block: dict[int, set[JobId]] = {}
        self._loading: dict[OffloadKey, JobId] = {}
        self._next_id: JobId = 0

    @property
    def next_id(self) -> JobId:
        """The id of the job that comes next; everything below it exists or has existed."""
        return self._next_id

    @property
    def has_stale(self) -> bool:
        """Whether a copy from before a reset has not ended."""
        return bool(self._stale)

    def __len__(self) -> int:
        return len(self._jobs)

    def ids(self) -> set[JobId]:
        """Return the ids of the jobs in flight, without stale ones."""
        return set(self._jobs)

    def add(
        self,
        request: ConnectorRequest,
        keys: Sequence[OffloadKey],
        device_blocks: Iterable[int],
        *,
        is_store: bool,
    ) -> JobId:
        """Register a job; from now on its device blocks are watched."""
        job_id = self._next_id
        self._next_id += 1
        blocks = frozenset(device_blocks) - {NULL_BLOCK}
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
        """Return the jobs that touch any of these device blocks, without stale ones."""
        return {job_id for block in blocks for job_id in self._by_block.get(block, ())}

    def is_loading(self, keys: Iterable[OffloadKey], below: JobId) -> bool:
        """Tell whether a job with an id below this one loads any of these keys."""
        return any(self._loading.get(key, below) < below for key in keys)

    def has_load(self, request: ConnectorRequest) -> bool:
        """Tell whether a load of this request is in flight."""
        return any(not self._jobs[job_id].is_store for job_id in request.transfer_jobs)

    def worker_ended(self, job_id: JobId, count: int, *, failed: bool) -> ConnectorJob | None:
        """Note that workers ended a job; return it if now all have. Unknown ids are ignored."""
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
        """Mark every job stale."""
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
