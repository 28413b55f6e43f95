"""vLLM's own tiers under `KVOffloadSpec`: blocks come back, and a fault costs that tier alone."""

import importlib.util
import inspect
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import PAGE_BYTES
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs import manager as vllms_fs
from vllm_world import SLOT_BYTES, content_of, keys_of, make_config, own_id

from kvoffload_async.errors import ConfigError
from kvoffload_async.integrations.vllm import KVOffloadSpec
from kvoffload_async.integrations.vllm.tier_adapter import AdaptedTierManager

KEYS = keys_of(1, 2, 3, 4)
BLOCKS = [[0, 1, 2, 3]]
TENSORS = SLOT_BYTES // PAGE_BYTES
needs_helper = pytest.mark.skipif(
    importlib.util.find_spec("vllm.fs_io_C") is None,
    reason="this build of vLLM lacks fs_io_C, the C helper of its fs tier",
)
VLLMS_THREADS = ("vllm_kv_py_fs", "vllm_offloading_lookup", "kvoffload-ask")


@pytest.fixture
def vllms(tmp_path):
    """The JSON of vLLM's `fs` tier, for our engine."""
    return {
        "type": "FileSystemTierManager",
        "module_path": "vllm.v1.kv_offload.tiering.fs.manager",
        "root_dir": str(tmp_path),
        "n_read_threads": 2,
        "n_write_threads": 2,
    }


@pytest.fixture(autouse=True)
def no_thread_of_a_tier_is_left():
    yield
    left = [one.name for one in threading.enumerate() if one.name.startswith(VLLMS_THREADS)]
    assert left == []


def stored(world):
    """Store four blocks; return their bytes, with other bytes on the device and no primary."""
    before = world.fill(1)
    world.store(KEYS, BLOCKS)
    world.finish_jobs()
    world.manager.reset_cache()
    world.fill(2)
    return before


def loads(world, before):
    world.load(KEYS, BLOCKS)
    return all(
        torch.equal(then[:4], now[:4])
        for rank, tensors in enumerate(before)
        for then, now in zip(tensors, world.tensors[rank], strict=True)
    )


def counters_of(world):
    return world.manager.manager.planner.tiers[0].counters


@needs_helper
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_come_back_from_vllms_fs_tier(pair, vllms, ranks):
    world = pair([vllms], ranks=ranks)
    before = stored(world)
    assert loads(world, before)
    assert (counters_of(world).stored_blocks, counters_of(world).loaded_blocks) == (4, 4)
    assert world.final(keys_of(9)) == ["MISS"]


def test_another_engine_finds_the_blocks(pair, vllms):
    first = pair([vllms])
    before = stored(first)
    first.close()
    assert loads(pair([vllms]), before)


def test_vllms_own_engine_and_ours_serve_each_others_files(pair, serving, vllms, theirs):
    other = serving(theirs)
    assert other.store(KEYS[:2]) == KEYS[:2]
    other.finish_jobs()
    world = pair([vllms], num_tensors=TENSORS, groups=(tuple(range(TENSORS)),))
    world.load(KEYS[:2], [[0, 1]])
    for block, key in enumerate(KEYS[:2]):
        pages = np.concatenate([tensor[block].numpy() for tensor in world.tensors[0]])
        assert np.array_equal(pages, content_of(key))
    world.store(KEYS[2:3], [[1]])
    world.finish_jobs()
    assert np.array_equal(other.load(KEYS[2:3])[KEYS[2]], content_of(KEYS[1]))


@needs_helper
@pytest.mark.parametrize("bad", [0, 2])
def test_a_file_that_is_too_short_costs_its_block_and_those_behind_it(pair, vllms, tmp_path, bad):
    world = pair([vllms])
    stored(world)
    (path,) = tmp_path.rglob(f"{KEYS[bad][:-4].hex()}.bin")
    path.write_bytes(b"x")
    request = world.request()
    world.until(lambda: not {"RETRY", "HIT_PENDING"} & {*world.lookups(KEYS, request)})
    assert world.lookups(KEYS, request) == ["HIT"] * bad + ["MISS"] * (4 - bad)
    assert counters_of(world).failed_loads == 1


def test_a_store_that_fails_suspends_the_tier_and_nothing_else(pair, vllms, monkeypatch):
    def fail(*_arguments):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(vllms_fs, "batch_store_block", fail)
    world = pair([vllms], extra={"breaker_fault_threshold": 1})
    before = world.fill(1)
    world.store(KEYS, BLOCKS)
    world.step()
    world.until(lambda: counters_of(world).failed_jobs == 1)
    assert world.manager.manager.stats().tiers[0].breakers["store"] == "open"
    world.fill(2)
    assert loads(world, before)


def test_a_copy_that_hangs_is_overdue_and_keeps_its_slots_until_it_ends(pair, vllms, monkeypatch):
    hangs = threading.Event()

    def hang(*_arguments):
        hangs.wait(60)

    monkeypatch.setattr(vllms_fs, "batch_store_block", hang)
    world = pair([{**vllms, "io_timeout_s": 0.01}])
    jobs = world.manager.manager.planner.tiers[0].jobs
    try:
        world.store(KEYS, BLOCKS)
        world.until(lambda: jobs.orphaned_count == 1)
        assert world.manager.manager.planner.primary.counts["pinned"] == 4
    finally:
        hangs.set()
    world.until(lambda: jobs.orphaned_count == 0)
    assert world.manager.manager.planner.primary.counts["pinned"] == 0


def test_what_is_under_way_is_stored_before_an_engine_ends(pair, vllms, tmp_path):
    world = pair([vllms])
    before = world.fill(1)
    world.store(KEYS, BLOCKS)
    world.close()
    assert len([*tmp_path.rglob("*.bin")]) == 4
    again = pair([vllms])
    again.fill(2)
    assert loads(again, before)


def test_the_events_of_a_tier_have_its_name(pair, vllms):
    world = pair([{**vllms, "enable_kv_events": True, "locality": "REMOTE"}], events=True)
    world.store(KEYS[:1], [[0]])
    world.finish_jobs()
    (event,) = [one for one in world.manager.take_events() if one.ownership is not None]
    assert (list(event.keys), event.removed) == (KEYS[:1], False)
    assert (event.medium, event.locality) == (base.Medium.STORAGE, base.Locality.REMOTE)
    assert event.ownership == "FileSystemTierManager"


@needs_helper
def test_vllms_tier_may_stand_behind_one_of_ours(pair, vllms):
    world = pair([{"type": "example"}, vllms])
    before = stored(world)
    assert [tier.counters.stored_blocks for tier in world.manager.manager.planner.tiers] == [4, 4]
    assert loads(world, before)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"root_dir": None}, r"root_dir: missing"),
        ({"rot_dir": "/"}, r"unknown key 'rot_dir' \(did you mean 'root_dir'"),
        ({"n_read_threads": "many"}, r"n_read_threads: 'many' is not valid; it must be an integer"),
        ({"type": "NoTier"}, r"has no attribute 'NoTier'"),
    ],
    ids=str,
)
def test_a_configuration_is_checked_before_anything_is_opened(vllms, changed, message):
    tier = {key: value for key, value in {**vllms, **changed}.items() if value is not None}
    world = make_config([], own_id("kvoffload-test-config"))
    extra = {"cpu_bytes_to_use": "64KiB", "secondary_tiers": [tier]}
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]: .*" + message):
        KVOffloadSpec(replace(world, extra_config=extra))
    assert not [*Path(vllms["root_dir"]).iterdir()]


@pytest.mark.parametrize(
    ("module", "name"), [("p2p", "P2PSecondaryTierManager"), ("kvcr", "KVCRSecondaryTierManager")]
)
def test_tiers_that_serve_other_engines_are_refused(module, name):
    path = f"vllm.v1.kv_offload.tiering.{module}.manager"
    try:
        import_module(path)
    except ImportError as error:
        pytest.skip(f"the tier's own library is not installed: {error}")
    world = make_config([], own_id("kvoffload-test-config"))
    extra = {
        "cpu_bytes_to_use": "64KiB",
        "secondary_tiers": [{"type": name, "module_path": path}],
    }
    with pytest.raises(ConfigError, match=r"serves blocks to other engines"):
        KVOffloadSpec(replace(world, extra_config=extra))


def test_every_method_of_vllms_contract_that_its_manager_calls_is_mapped():
    source = inspect.getsource(AdaptedTierManager)
    not_mapped = {
        *("build_metric_definitions", "config_info", "get_stats"),
        "serve_external_requests",
    }
    methods = {name for name, member in vars(SecondaryTierManager).items() if callable(member)}
    methods = {name for name in methods if not name.startswith("_")} - not_mapped
    assert methods <= {name for name in methods if name in vars(AdaptedTierManager)}
    assert all(f"_idle.{name}" in source for name in methods - {"drain_jobs", "shutdown"})
