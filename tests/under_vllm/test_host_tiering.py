"""The worker that lets vLLM's own spec run on a CPU puts every byte where vLLM's would."""

import ctypes
import itertools
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm_world import MODULE, SLOT_BYTES, make_config

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import HostTieringOffloadingSpec
from kvoffload_async.integrations.vllm.convert import kv_layout
from kvoffload_async.integrations.vllm.host_tiering import HostWorker

BLOCKS, CHUNKS, PAGE_BYTES, USED_BYTES = 40, 24, 48, 40
GROUPS = ((0, 1), (2,))  # the tensors of each group
numbers = itertools.count()


def name():
    return f"host-tiering-{os.getpid()}-{next(numbers)}"


def make_caches(random):
    """Tensors of random bytes whose pages end in padding."""
    count = sum(len(group) for group in GROUPS)
    tensors = [
        base.CanonicalKVCacheTensor(
            torch.from_numpy(random.integers(-128, 128, (BLOCKS, PAGE_BYTES), np.int8)), PAGE_BYTES
        )
        for _ in range(count)
    ]
    refs = [[base.CanonicalKVCacheRef(index, USED_BYTES) for index in group] for group in GROUPS]
    return base.CanonicalKVCaches(tensors, refs)


@contextmanager
def make_worker(caches, per_chunk):
    row_bytes = -(-len(caches.tensors) * PAGE_BYTES * per_chunk // 4096) * 4096
    region = SharedOffloadRegion(name(), CHUNKS, 0, row_bytes, row_bytes)
    for _ in caches.tensors:  # for the addresses
        region.create_next_worker_view(PAGE_BYTES * per_chunk)
    worker = HostWorker(kv_layout(caches, per_chunk), region)
    try:
        yield worker, region
    finally:
        worker.shutdown()


@dataclass(frozen=True)
class Moved:
    """The blocks of one group that a job is about, from anywhere in a chunk on."""

    blocks: list[int]
    first: int
    chunks: list[int]


@st.composite
def jobs(draw):
    per_chunk = draw(st.integers(1, 4))
    blocks, chunks = draw(st.permutations(range(BLOCKS))), draw(st.permutations(range(CHUNKS)))
    moved = []
    for _ in GROUPS:
        size, first = draw(st.integers(0, 9)), draw(st.integers(0, 11))
        span = -(-(first % per_chunk + size) // per_chunk) if size else 0
        moved.append(Moved(blocks[:size], first, chunks[:span]))
        blocks, chunks = blocks[size:], chunks[span:]
    return per_chunk, moved


def addresses(view, per_chunk, moved):
    """Where vLLM's own worker puts the blocks in a tensor's column of the region."""
    found = np.empty(len(moved.blocks), np.uint64)
    if moved.blocks:
        chunks = np.array(moved.chunks, np.int32)
        compute_sub_block_ptrs(chunks, per_chunk, found, view, moved.first % per_chunk)
    return found.tolist()


@given(job=jobs(), seed=st.integers(0, 2**32 - 1))
def test_blocks_go_where_vllms_own_worker_puts_them_and_come_back_and_nothing_else_moves(job, seed):
    per_chunk, moved = job
    random = np.random.default_rng(seed)
    caches = make_caches(random)
    arrays = [cache.tensor.numpy() for cache in caches.tensors]
    stored = [array.copy() for array in arrays]
    device = base.GPULoadStoreSpec(
        [block for one in moved for block in one.blocks],
        [len(one.blocks) for one in moved],
        [one.first for one in moved],
    )
    host = CPULoadStoreSpec([chunk for one in moved for chunk in one.chunks])
    with make_worker(caches, per_chunk) as (worker, region):
        assert worker.submit_store(1, device, host)
        for group, one in zip(GROUPS, moved, strict=True):
            for index in group:
                where = addresses(region._views[index], per_chunk, one)
                for block, address in zip(one.blocks, where, strict=True):
                    assert ctypes.string_at(address, PAGE_BYTES) == stored[index][block].tobytes()

        noise = random.integers(-128, 128, (BLOCKS, PAGE_BYTES), np.int8)
        for array in arrays:
            array[:] = noise
        assert worker.submit_load(2, host, device, expedited=True)
        for group, one in zip(GROUPS, moved, strict=True):
            for index in group:
                expected = noise.copy()
                expected[one.blocks] = stored[index][one.blocks]
                assert np.array_equal(arrays[index], expected)

        size_bytes = sum(len(g) * len(m.blocks) for g, m in zip(GROUPS, moved, strict=True))
        size_bytes *= PAGE_BYTES
        ended = [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()]
        assert ended == [(1, True, size_bytes), (2, True, size_bytes)]
        assert worker.get_finished() == []


def make_specs(tmp_path, **changes):
    """The instances of the scheduler's and of the worker's process."""
    tier = {"type": "FsTier", "module_path": MODULE, "root_dir": str(tmp_path)}
    config = replace(make_config([tier], name()), **changes)
    return HostTieringOffloadingSpec(config), HostTieringOffloadingSpec(config)


def make_slots(size_bytes=SLOT_BYTES):
    return base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(torch.zeros(4, size_bytes, dtype=torch.int8), size_bytes)],
        [[base.CanonicalKVCacheRef(0, size_bytes)]],
    )


def files_of(spec):
    return list(Path("/dev/shm").glob(f"*{spec.config.engine_id}*"))


def test_region_has_no_file_once_worker_and_scheduler_have_mapped_it(tmp_path, caplog):
    scheduler, rank = make_specs(tmp_path)
    worker = rank.get_worker(make_slots())
    assert files_of(rank)
    manager = scheduler.get_manager()
    try:
        assert files_of(rank) == []
        assert rank.get_worker(make_slots()) is worker
    finally:
        worker.shutdown()
        manager.shutdown()
    assert "Failed to unlink" not in caplog.text


def test_region_that_no_worker_has_joined_keeps_its_file_until_the_manager_ends(tmp_path):
    scheduler, _ = make_specs(tmp_path)
    manager = scheduler.get_manager()
    assert files_of(scheduler)
    manager.shutdown()
    assert files_of(scheduler) == []


def test_a_canonical_layout_that_vllm_does_not_certify_is_refused_before_anything_is_mapped(
    tmp_path,
):
    _, rank = make_specs(tmp_path, canonical_layout=True)
    with pytest.raises(RuntimeError, match="could not be certified for canonical offload"):
        rank.get_worker(make_slots())
    assert files_of(rank) == []


def test_tensors_of_a_device_are_refused_before_anything_is_mapped(tmp_path):
    _, rank = make_specs(tmp_path)
    caches = make_slots()
    caches.tensors[0].tensor = caches.tensors[0].tensor.to("meta")
    with pytest.raises(ConfigError, match="is on meta; use TieringOffloadingSpec"):
        rank.get_worker(caches)
    assert files_of(rank) == []


def test_tensors_larger_than_announced_are_refused_and_leave_no_file(tmp_path):
    _, rank = make_specs(tmp_path)
    with pytest.raises(ConfigError, match="takes 8200 bytes, and vLLM announced 8192"):
        rank.get_worker(make_slots(SLOT_BYTES + 8))
    assert files_of(rank) == []
