"""Workers of a replay: each has its own device memory and runs the copies of its jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload_async.errors import StalledError
from kvoffload_async.facade.connector.protocol import (
    ConnectorGeometry,
    ConnectorOutput,
    KVGroup,
    OffloadingConnectorMetadata,
)
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker, summed
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.report import Tally
from kvoffload_async.types import JobId

if TYPE_CHECKING:  # torch is loaded with the first memory, not before
    from kvoffload_async.transport.paged import BlockNames, PagedMemory


@dataclass(slots=True)
class _Copy:
    """A job in flight: its request, number of blocks, and number of workers still copying."""

    req_id: str
    num_blocks: int
    is_store: bool
    pending: int
    has_failed: bool = False


class Workers:
    """All workers of an engine, in lockstep.

    Not thread-safe; call only from the scheduler's thread.

    Attributes:
        geometry: The geometry of their devices: a frame is a chunk.
    """

    def __init__(
        self, spec: TieringOffloadingSpec, memories: Sequence[PagedMemory], tally: Tally
    ) -> None:
        """Start a worker for each device memory; `tally` counts the copies."""
        self._memories = memories
        self._tally = tally
        per_chunk = spec.config.blocks_per_chunk
        self.geometry = ConnectorGeometry(
            (KVGroup(1),), per_chunk, per_chunk, num_workers=len(memories)
        )
        self._copies: dict[JobId, _Copy] = {}
        self._workers: list[OffloadingConnectorWorker] = [
            spec.create_handlers(memory.kv_caches, worker_index=index, runtime=memory.runtime)
            for index, memory in enumerate(memories)
        ]

    @property
    def req_ids(self) -> set[str]:
        """Ids of the requests with copies in flight."""
        return {copy.req_id for copy in self._copies.values()}

    @property
    def has_copies(self) -> bool:
        """Whether a copy is in flight."""
        return bool(self._copies)

    def device_blocks(self, frames: Sequence[int]) -> list[int]:
        """Return the device blocks of frames; they are the same on every device."""
        return self._memories[0].device_blocks(frames)

    # -- a step ---------------------------------------------------------------------------------

    def begin_step(self, meta: OffloadingConnectorMetadata) -> None:
        """Await the copies that block overwriting device blocks in this step, and start its loads.

        Raises:
            StalledError: A copy that must end first did not end in time.
        """
        for jobs, is_store in ((meta.load_jobs, False), (meta.store_jobs, True)):
            for job_id, job in jobs.items():
                num_blocks = len(job.device.block_ids) // self.geometry.blocks_per_chunk
                self._copies[job_id] = _Copy(job.req_id, num_blocks, is_store, len(self._workers))
        for worker in self._workers:
            if not worker.handle_preemptions(meta):
                raise StalledError("a load that the step must wait for does not end")
            worker.start_kv_transfers(meta)

    def compute(self, names: BlockNames, frames: Sequence[int]) -> None:
        """Compute blocks, by writing their expected content on every device."""
        for memory in self._memories:
            memory.compute(names, frames)

    def end_step(self, meta: OffloadingConnectorMetadata) -> None:
        """Prepare the step's stores, which start in the next step."""
        for worker in self._workers:
            worker.prepare_store_kv(meta)

    def verify(self, names: BlockNames, frames: Sequence[int]) -> None:
        """Compare blocks on every device with their expected content; count mismatches."""
        wrong = max(memory.count_wrong(names, frames) for memory in self._memories)
        self._tally.verified_blocks += len(frames)
        self._tally.corrupt_blocks += wrong

    # -- ended copies ---------------------------------------------------------------------------

    def take_output(self) -> tuple[ConnectorOutput, list[str]]:
        """Return the jobs that ended since the last call, and the requests whose loads ended.

        A load has ended when all workers have ended it, failed or not.
        """
        output = summed([worker.build_output()[0] for worker in self._workers])
        loaded: list[str] = []
        for job_id, count in output.completed.items():
            copy = self._copies[job_id]
            copy.pending -= count
            copy.has_failed |= job_id in output.failed
            if copy.pending:
                continue
            del self._copies[job_id]
            if not copy.is_store:
                loaded.append(copy.req_id)
            if not copy.has_failed:
                self._count(copy)
        return output, loaded

    def wait(self, timeout_s: float) -> None:
        """Wait until the oldest copy has ended, with a timeout."""
        oldest: Collection[JobId] = (next(iter(self._copies)),)
        for worker in self._workers:
            worker.wait(oldest, timeout_s)

    def shutdown(self, timeout_s: float) -> None:
        """Wait for every copy and shut the workers down."""
        for worker in self._workers:
            worker.shutdown(timeout_s)

    def _count(self, copy: _Copy) -> None:
        if copy.is_store:
            self._tally.stored_blocks += copy.num_blocks
        else:
            self._tally.loaded_blocks += copy.num_blocks
