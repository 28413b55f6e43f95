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
import numpy.typing as npt
import torch
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvoffload_async.errors import ConfigError


class HostTieringOffloadingSpec(TieringOffloadingSpec):
    """vLLM's spec for host memory; accepts its options, except `canonical_layout`."""

    _worker: base.OffloadingWorker | None

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
            ConfigError: The tensors are on a device, or `canonical_layout` is set.
        """
        if self._worker is None:
            if self.config.canonical_layout:
                raise ConfigError("canonical_layout: not supported here; leave it out")
            devices = {cache.tensor.device.type for cache in kv_caches.tensors}
            if devices != {"cpu"}:
                raise ConfigError(
                    f"spec_name: {type(self).__name__} needs a KV cache in host memory, but this "
                    f"one is on {', '.join(sorted(devices))}; use TieringOffloadingSpec"
                )
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = HostWorker(kv_caches, self.blocks_per_chunk, region)
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
        self,
        kv_caches: base.CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
    ) -> None:
        """Create the worker; it owns `region`, unless the constructor raises.

        Args:
            kv_caches: Tensors of shape `[num_blocks, page_bytes]`; each becomes a column of the
                region's rows, shape `[num_chunks, blocks_per_chunk, page_bytes]`.
            blocks_per_chunk: vLLM blocks per offload unit.
            region: The shared region with the primary's rows.
        """
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._pages: list[npt.NDArray[np.int8]] = []
        self._chunks: list[npt.NDArray[np.int8]] = []
        for cache in kv_caches.tensors:
            page_bytes = cache.page_size_bytes
            self._pages.append(cache.tensor.view(torch.int8).view(-1, page_bytes).numpy())
            cells = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            self._chunks.append(cells.unflatten(1, (blocks_per_chunk, page_bytes)).numpy())
        self._ended: list[base.TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: base.LoadStoreSpec
    ) -> bool:
        """Copy blocks of the KV cache into chunks of the shared region."""
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: base.LoadStoreSpec,
        dst_spec: base.GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy chunks of the shared region into blocks of the KV cache."""
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[base.TransferResult]:
        """Return the results of the jobs submitted since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: jobs end before `submit_*` returns."""

    def shutdown(self) -> None:
        """Unmap the region."""
        self._pages.clear()
        self._chunks.clear()
        if not Path(self._region.mmap_path).exists():
            self._region._creator = False  # noqa: SLF001 - avoids a warning
        self._region.cleanup()

    # -- inside ---------------------------------------------------------------------------------

    def _copy(
        self,
        job_id: int,
        blocks: base.GPULoadStoreSpec,
        chunks: base.BlockIDsLoadStoreSpec,
        *,
        is_store: bool,
    ) -> bool:
        began_s = time.perf_counter()
        size_bytes = block_at = chunk_at = 0
        per_chunk = self._blocks_per_chunk
        for size, first, refs in zip(
            blocks.group_sizes, blocks.block_indices, self._groups, strict=True
        ):
            if size == 0:
                continue
            # A group's first block may start inside its first chunk.
            number, part = np.divmod(first % per_chunk + np.arange(size), per_chunk)
            chunk = chunks.block_ids[chunk_at + number]
            block = blocks.block_ids[block_at : block_at + size]
            for ref in refs:
                page = self._pages[ref.tensor_idx][:, : ref.page_size_bytes]
                cell = self._chunks[ref.tensor_idx][:, :, : ref.page_size_bytes]
                if is_store:
                    cell[chunk, part] = page[block]
                else:
                    page[block] = cell[chunk, part]
                size_bytes += size * ref.page_size_bytes
            block_at += size
            chunk_at += int(number[-1]) + 1
        took_s = time.perf_counter() - began_s
        self._ended.append(base.TransferResult(job_id, True, size_bytes, took_s))
        return True
