"""Worker side of the engine under vLLM: copies between vLLM's KV cache and the shared primary."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import numpy as np
from vllm.v1.kv_offload import base

from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.facade.connector.protocol import TransferJobSpec
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.runtime.shared_region import SharedBuffer
from kvoffload_async.transport.choice import create_transport
from kvoffload_async.transport.layout import KVLayout
from kvoffload_async.types import BlockIds, JobId, TransferResult

logger = logging.getLogger(__name__)

SCHEDULER = 0
"""Participant number of the scheduler in the shared memory; worker `rank` is number `rank + 1`."""

FAILED = 1
"""Value in `SharedBuffer.slot_flags`: the store into the slot failed."""

INCOMPLETE = 2
"""Value in `SharedBuffer.slot_flags`: vLLM stored a chunk without all of its blocks."""


class KVOffloadWorker(base.OffloadingWorker):
    """Runs vLLM's transfer jobs of one rank, on CUDA streams or its own threads.

    vLLM 0.32 and 0.33 abort on a failed job. Therefore a failed store is reported as ended and
    flagged in the shared memory, and the manager then drops its blocks. A failed load cannot be
    hidden, because its request would read bytes that were never loaded: it is returned by
    `take_failed_loads` if the connector calls that, and raises an error otherwise.

    Not thread-safe; call only from the rank's thread.

    Attributes:
        reports_failed_loads: Whether the connector calls `take_failed_loads` after every
            `get_finished`.
    """

    def __init__(
        self,
        layout: KVLayout,
        buffer: SharedBuffer,
        *,
        cell_offset_bytes: int,
        timeout_s: float,
        state_groups: Collection[int] = (),
    ) -> None:
        """Create the worker. It owns `buffer`, which is released if the constructor fails.

        Args:
            layout: vLLM's tensors.
            buffer: The primary.
            cell_offset_bytes: Offset of this rank's cell in a slot.
            timeout_s: Timeout of `wait` and `shutdown` in seconds.
            state_groups: Indices of the KV-cache groups whose chunks need only their last block.

        Raises:
            ConfigError: The device is unusable, or a slot is too small.
        """
        self._buffer = buffer
        self._timeout_s = timeout_s
        try:
            transport = create_transport(layout, buffer.view, cell_offset_bytes=cell_offset_bytes)
        except BaseException:
            buffer.release()
            raise
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._state_groups = frozenset(state_groups)
        self._copies = OffloadingConnectorWorker(transport, flush_timeout_s=timeout_s)
        self._slots: dict[JobId, BlockIds] = {}
        self._expedited: set[JobId] = set()
        self._ended: list[TransferResult] = []
        self._failed_loads: set[JobId] = set()
        self.reports_failed_loads = False
        self._shares_with_scheduler = False
        self._is_closed = False

    def submit_store(
        self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: base.LoadStoreSpec
    ) -> bool:
        """Copy device blocks to slots. Non-blocking.

        vLLM also stores chunks of which a sliding window has let some blocks go. The manager drops
        them, because their keys stand for the whole chunk.

        Raises:
            ConfigError: The scheduler is on another host.
        """
        self._require_scheduler()
        job = convert.transfer(src_spec, dst_spec)
        self._flag(self._incomplete(job), INCOMPLETE)
        self._slots[job_id] = job.host.block_ids
        self._copies.submit_store(job_id, job)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: base.LoadStoreSpec,
        dst_spec: base.GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy slots to device blocks. Non-blocking.

        Args:
            job_id: The job.
            src_spec: The slots.
            dst_spec: The device blocks.
            expedited: The current step's forward pass reads the blocks. vLLM calls `wait` next, so
                a failure must be raised there and not reported at the step's end.

        Raises:
            ConfigError: The scheduler is on another host.
        """
        self._require_scheduler()
        if expedited:
            self._expedited.add(job_id)
        self._copies.submit_load(job_id, convert.transfer(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[base.TransferResult]:
        """Return the jobs that ended since the last call.

        For a KV cache in host memory, waits up to 0.1 s for the loads of this step, which vLLM's
        own worker copies synchronously. Never waits for a device.

        Raises:
            TransportError: A load failed, and the connector does not call `take_failed_loads`.
        """
        self._collect(self._copies.get_finished())
        ended, self._ended = self._ended, []
        return [convert.transfer_result(result) for result in ended]

    def take_failed_loads(self) -> set[JobId]:
        """Return the ids of failed loads among the jobs that `get_finished` returned, once each."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def wait(self, job_ids: Collection[JobId]) -> None:
        """Wait until jobs have ended; unknown ids are ignored.

        Raises:
            TransportError: Some copies are still running at the deadline; vLLM would overwrite
                their device blocks next. Or an expedited load failed.
        """
        if not self._copies.wait(job_ids, self._timeout_s):
            raise TransportError(
                f"copies of the jobs {sorted(job_ids)} have not ended within {self._timeout_s} s: "
                "the device hangs, or drain_timeout_s is too short"
            )
        self._collect(self._copies.poll_finished())

    def shutdown(self) -> None:
        """Wait for running copies, then unmap the memory; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._copies.shutdown(self._timeout_s):
            self._buffer.release()
        else:
            logger.warning("copies are still running: the shared primary stays mapped")

    # -- inside ---------------------------------------------------------------------------------

    def _require_scheduler(self) -> None:
        """Check that the scheduler, which has sent a job, has mapped the same memory as this rank.

        A rank on another host has created memory of its own, which nobody else reads.
        """
        if not self._shares_with_scheduler and not self._buffer.has_arrived(SCHEDULER):
            raise ConfigError(
                "spec_name: KVOffloadSpec needs all workers on the scheduler's host, as they share "
                "its memory, and this worker is on another host; place all ranks of a replica on "
                "one host"
            )
        self._shares_with_scheduler = True

    def _collect(self, finished: Iterable[TransferResult]) -> None:
        """Keep the results of finished copies, and handle failed copies."""
        for result in finished:
            slots = self._slots.pop(result.job_id, None)
            was_expedited = result.job_id in self._expedited
            self._expedited.discard(result.job_id)
            self._ended.append(result)
            if result.success:
                continue
            if slots is not None:
                self._flag(slots, FAILED)
            elif self.reports_failed_loads and not was_expedited:
                self._failed_loads.add(result.job_id)
            else:
                raise TransportError(
                    f"load job {result.job_id} has failed, and vLLM's OffloadingConnector cannot be"
                    ' told; with "kv_connector": "KVOffloadConnector" and '
                    '"kv_connector_module_path": "kvoffload_async.integrations.vllm" its request '
                    "would have been computed instead"
                )

    def _incomplete(self, job: TransferJobSpec) -> BlockIds:
        """Return those slots of a store job that may hold a chunk with missing blocks.

        vLLM says which block of a group is the first one, and how many there are. So if only the
        first chunk lacks its first blocks, the others are whole; otherwise none can be trusted.
        """
        per_chunk = self._blocks_per_chunk
        incomplete: list[BlockIds] = []
        start = 0
        device, slots = job.device, job.host.block_ids
        groups = zip(device.group_sizes, device.block_indices, strict=True)
        for index, (size, first) in enumerate(groups):
            skipped = first % per_chunk if size else 0
            end = start - (-(size + skipped) // per_chunk)
            if index not in self._state_groups:
                lacks_more = (size + skipped) % per_chunk
                incomplete.append(slots[start : end if lacks_more else start + bool(skipped)])
            start = end
        if start != len(slots):
            return slots
        return np.concatenate(incomplete) if incomplete else slots[:0]

    def _flag(self, slots: BlockIds, value: int) -> None:
        for slot in slots.tolist():
            self._buffer.slot_flags[slot] = value
