"""Pipeline ranks with unequal numbers of layers: processes that agree on one geometry of a row."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from engine_world import PAGE_BYTES, canonical, strided_pages
from runtime.beside import Beside, processes
from vllm.v1.kv_offload import base
from vllm_world import DEADLINE_S, keys_of, make_config, own_id, shared_files

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import KVOffloadSpec

processes.set_forkserver_preload(["pytest", KVOffloadSpec.__module__])


def config_of(rank, layers, **extra):
    """Return the configuration of a pipeline rank, as vLLM makes it from the rank's own layers."""
    ranks = len(layers)
    config = make_config(
        [], own_id("kvoffload-test-pipeline"), pp_size=ranks, world_size=ranks, rank=rank
    )
    return replace(
        config,
        worker_kv_bytes_per_block=layers[rank] * PAGE_BYTES,
        extra_config={"cpu_bytes_to_use": 98304, "check_invariants": True, **extra},
    )


def serve_rank(pipe, config, num_layers):
    """Be a rank; run the copies that the pipe brings, and report the tensors after each."""
    tensors = [strided_pages() for _ in range(num_layers)]
    for index, tensor in enumerate(tensors):
        blocks = torch.arange(len(tensor), dtype=torch.int8).unsqueeze(1)
        tensor[:] = blocks + 10 * index + config.parallel.rank
    layers = (tuple(range(num_layers)),)
    worker = KVOffloadSpec(config).get_worker(canonical(tensors, layers))
    pipe.send("mapped")
    for job_id, (name, blocks, slots) in enumerate(iter(pipe.recv, None)):
        device = base.GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        getattr(worker, name)(job_id, *((device, slots) if "store" in name else (slots, device)))
        worker.wait({job_id})
        assert [result.success for result in worker.get_finished()] == [True]
        pipe.send([bytes(tensor.contiguous().numpy()) for tensor in tensors])
    worker.shutdown()
    return "ended"


@pytest.fixture
def started():
    """Return what starts a process for each rank."""
    made = []

    def start(layers, **extra):
        for rank, count in enumerate(layers):
            made.append(Beside(serve_rank, config_of(rank, layers, **extra), count))
        assert [rank.reported() for rank in made] == ["mapped"] * len(layers)
        return made

    yield start
    for rank in made:
        rank.close()
    assert shared_files() == []


def copied(ranks, name, blocks, slots):
    """Copy between device blocks and slots in every rank; return the bytes of all tensors."""
    for rank in ranks:
        rank.go_on((name, blocks, slots))
    return [rank.reported() for rank in ranks]


def stepped(manager, is_done):
    """Step until `is_done()`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.002)  # paces the polling; nothing depends on its length
        manager.on_schedule_end(base.ScheduleEndContext((), ()))


SOURCES, TARGETS = list(range(6)), list(range(6, 12))


def pages(tensor, blocks):
    return [tensor[block * PAGE_BYTES :][:PAGE_BYTES] for block in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("has_tier", [False, True])
@pytest.mark.parametrize("layers", [(9, 5), (5, 9), (1, 8, 3)])
def test_ranks_of_unequal_layers_get_back_their_own_bytes(started, layers, has_tier, tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path), "fingerprint": "made up"}
    extra = {"secondary_tiers": [tier] if has_tier else []}
    ranks = started(layers, **extra)
    # vLLM's scheduler knows the layers of rank 0 alone.
    manager = KVOffloadSpec(config_of(0, layers, **extra)).get_manager()
    keys = keys_of(*SOURCES)
    request = base.ReqContext(req_id="r")
    manager.on_new_request(request)
    granted = manager.prepare_store(keys, request)
    assert list(granted.keys_to_store) == keys
    before = copied(ranks, "submit_store", SOURCES, granted.store_spec)
    manager.complete_store(set(keys), request)
    if has_tier:
        stepped(manager, lambda: not manager.has_pending_work())
        manager.reset_cache()
        if hasattr(manager, "on_reset_flushed"):
            manager.on_reset_flushed()
    stepped(manager, lambda: {manager.lookup(key, request).name for key in keys} == {"HIT"})
    after = copied(ranks, "submit_load", TARGETS, manager.prepare_load(keys, request))
    manager.complete_load(set(keys), request)
    for old_tensors, new_tensors in zip(before, after, strict=True):
        for old, new in zip(old_tensors, new_tensors, strict=True):
            assert pages(new, TARGETS) == pages(old, SOURCES) == pages(new, SOURCES)
            assert pages(new, TARGETS) != pages(old, TARGETS)
    manager.shutdown()
    for rank in ranks:
        rank.go_on(None)
        assert rank.reported() == "ended"


def test_a_rank_without_layers_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"rank 1 has no layers.*VLLM_PP_LAYER_PARTITION"):
        KVOffloadSpec(config_of(1, (9, 0)))
    assert shared_files() == []
