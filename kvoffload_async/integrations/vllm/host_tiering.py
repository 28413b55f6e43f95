"""vLLM's own `TieringOffloadingSpec` without an accelerator.

vLLM's manager, shared region and tiers run unmodified on its CPU platform. Only its worker needs a
device's streams, so vLLM refuses to create one. The worker here does the same copies between
tensors in host memory. Use it to try out and test tiers. With a device, use vLLM's own spec;
`KVOffloadSpec` supports both platforms.

    {"spec_name": "HostTieringOffloadingSpec",
     "spec_module_path": "kvoffload_async.integrations.vllm"}
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import BlockCopies
from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm.convert import kv_layout, require_announced, transfer
from kvoffload_async.integrations.vllm.options import check_no_tenants
from kvoffload_async.transport.host import Copier
from kvoffload_async.transport.layout import KVLayout


class HostTieringOffloadingSpec(TieringOffloadingSpec):
    """vLLM's spec for host memory; accepts its options."""

    _worker: base.OffloadingWorker | None

    def __init__(self, config: OffloadingConfig) -> None:
        """Check the options; raises ConfigError if there are tenants."""
        check_no_tenants(config.extra_config)
        super().__init__(config)

    def get_manager(self) -> base.OffloadingManager:
        """Return vLLM's manager; the file of the shared region has been removed by then.

        vLLM creates its scheduler after its workers, so all of them have mapped the region when the
        manager has. If the manager itself created the region, no worker has joined it yet.
        """
        manager = super().get_manager()
        region = self._scheduler_mmap
        if region is not None and not region._creator:  # noqa: SLF001 - no public attribute
            with contextlib.suppress(FileNotFoundError):
                Path(region.mmap_path).unlink()
        return manager

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        """Return this process's worker for a KV cache in host memory.

        Raises:
            ConfigError: The tensors are on a device, or unsupported.
            RuntimeError: vLLM's, if it cannot certify the `canonical_layout`.
        """
        if self._worker is None:
            is_canonical = self.config.canonical_layout
            if is_canonical:
                self._validate_canonical_refs(kv_caches)
            devices = {cache.tensor.device.type for cache in kv_caches.tensors}
            if devices != {"cpu"}:
                raise ConfigError(
                    f"spec_name: {type(self).__name__} needs a KV cache in host memory, but this "
                    f"one is on {', '.join(sorted(devices))}; use TieringOffloadingSpec"
                )
            layout = kv_layout(kv_caches, self.blocks_per_chunk, is_canonical=is_canonical)
            cell_bytes = self.kv_bytes_per_chunk if is_canonical else self.cpu_page_size_per_worker
            require_announced(layout, cell_bytes)
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                offset_bytes = 0 if is_canonical else rank * cell_bytes
                self._worker = HostWorker(layout, region, offset_bytes)
            except BaseException:
                region.cleanup()
                raise
        return self._worker


class HostWorker(base.OffloadingWorker):
    """Copies synchronously between a KV cache in host memory and the shared region.

    Background copies would compete with the computation for the same cores. When a job is
    submitted, no computation accesses its blocks.

    Not thread-safe; call only from the rank's thread.
    """

    def __init__(
        self, layout: KVLayout, region: SharedOffloadRegion, cell_offset_bytes: int = 0
    ) -> None:
        """Create the worker; it owns `region`, unless the constructor raises.

        Args:
            layout: The KV cache's tensors.
            region: The shared region with the primary's rows.
            cell_offset_bytes: Offset of this rank's cell in a row.
        """
        rows = np.asarray(region.create_kv_memoryview()).view(np.uint8)
        self._region = region
        self._layout = layout
        self._num_slots = len(rows)
        self._copier = Copier(layout, rows, cell_offset_bytes)
        self._ended: list[base.TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: base.LoadStoreSpec
    ) -> bool:
        """Copy blocks of the KV cache into chunks of the shared region."""
        return self._copy(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: base.LoadStoreSpec,
        dst_spec: base.GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy chunks of the shared region into blocks of the KV cache."""
        return self._copy(job_id, Direction.LOAD, dst_spec, src_spec)

    def get_finished(self) -> list[base.TransferResult]:
        """Return the results of the jobs submitted since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: jobs end before `submit_*` returns."""

    def shutdown(self) -> None:
        """Unmap the region."""
        self._copier.close()
        if not Path(self._region.mmap_path).exists():
            self._region._creator = False  # noqa: SLF001 - avoids a warning
        self._region.cleanup()

    # -- inside ---------------------------------------------------------------------------------

    def _copy(
        self,
        job_id: int,
        direction: Direction,
        device: base.GPULoadStoreSpec,
        host: base.LoadStoreSpec,
    ) -> bool:
        began_s = time.perf_counter()
        job = transfer(device, host)
        copies = BlockCopies(direction, job.device, job.host)
        parts = self._layout.resolve(copies, self._num_slots)
        for group, part in enumerate(parts):
            self._copier.copy(direction, group, part)
        took_s = time.perf_counter() - began_s
        size_bytes = self._layout.num_bytes(parts)
        self._ended.append(base.TransferResult(job_id, True, size_bytes, took_s))
        return True
