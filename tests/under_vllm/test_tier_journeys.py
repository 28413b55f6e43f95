"""Our tiers under vLLM's own `TieringOffloadingManager` and shared region, byte for byte."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm_world import PolledFsTier, content_of, keys_of

from kvoffload_async.errors import ConfigError


def files_below(root):
    return sorted(path.stem for path in Path(root).rglob("*.bin"))


def names_of(keys):
    return sorted(f"{key[:-4].hex()}_g0" for key in keys)


def test_stored_blocks_cascade_and_come_back_after_eviction(serving, tier):
    world = serving(tier)
    first, others = keys_of(*range(4)), keys_of(*range(10, 18))
    assert world.store(first) == first
    world.finish_jobs()
    assert world.store(others) == others, "eight slots: the first four were evicted"
    world.finish_jobs()
    assert world.holds(first)
    assert world.holds(others[:2] + first[2:])


def test_a_reset_waits_for_the_tier_and_loses_no_block_that_it_has(serving, tier):
    world = serving(tier)
    keys = keys_of(*range(6))
    world.store(keys)
    world.reset()
    world.rows[:] = 0
    assert world.holds(keys)


def test_every_stored_block_is_a_file_of_its_own(serving, fs):
    world = serving(fs)
    keys = keys_of(*range(4))
    world.store(keys)
    world.finish_jobs()
    assert files_below(fs["root_dir"]) == names_of(keys)


def test_data_parallel_replicas_have_a_slab_each_below_one_directory(serving, slab):
    replicas = [serving(slab, data_parallel_index=index) for index in range(2)]
    for index, world in enumerate(replicas):
        world.store(keys_of(index))
        world.reset()
    assert [world.holds(keys_of(index)) for index, world in enumerate(replicas)] == [True, True]
    assert replicas[0].load(keys_of(1)) == {}


def test_a_slab_that_another_engine_has_open_is_refused(serving, slab):
    serving(slab)
    with pytest.raises(ConfigError, match="root_dir"):
        serving(slab)


def test_a_slab_of_another_run_configuration_is_refused_where_the_user_says_so(serving, slab):
    serving(slab).shutdown()
    with pytest.raises(ConfigError, match="on_mismatch"):
        serving({**slab, "on_mismatch": "fail"}, groups=2)


def test_a_block_that_is_used_outlives_those_that_are_not(serving, slab):
    world = serving({**slab, "capacity_bytes": "2 MiB", "segment_bytes": "256 KiB"})
    request = world.request()
    for first in range(0, 400, 4):
        world.store(keys_of(*range(first, first + 4)))
        world.on(world.manager.touch, keys_of(0), request)
        world.finish_jobs()
    world.reset()
    world.rows[:] = 0
    assert world.holds(keys_of(0))
    assert world.load(keys_of(1)) == {}


def test_a_slab_keeps_within_its_capacity(serving, slab):
    world = serving({**slab, "capacity_bytes": "2 MiB", "segment_bytes": "256 KiB"})
    for first in range(0, 400, 8):
        world.store(keys_of(*range(first, first + 8)))
        world.finish_jobs()
    disk = sum(path.stat().st_blocks * 512 for path in Path(slab["root_dir"]).rglob("*"))
    assert 1 << 20 < disk <= 2 << 20
    assert world.holds(keys_of(399))


def test_blocks_survive_a_restart(serving, tier):
    keys = keys_of(*range(5))
    first = serving(tier)
    first.store(keys)
    first.finish_jobs()
    first.shutdown()
    assert serving(tier).holds(keys)


def test_a_damaged_block_is_recomputed_and_the_others_are_served(serving, fs):
    world = serving(fs)
    keys = keys_of(1, 2, 3)
    world.store(keys)
    world.reset()
    path = Path(world.tier.file_mapper.get_file_name(keys[1]))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    found = world.load(keys)
    assert found.keys() == {keys[0], keys[2]}
    assert all(np.array_equal(rows, content_of(key)) for key, rows in found.items())
    assert not path.exists()


def test_a_bad_block_costs_no_other_of_its_job_wherever_it_stands(serving, fs):
    world = serving(fs)
    keys = keys_of(1, 2, 3)
    world.store(keys)
    world.reset()
    Path(world.tier.file_mapper.get_file_name(keys[0])).write_bytes(b"short")
    assert world.load(keys).keys() == set(keys[1:])


def test_two_tiers_each_get_every_block(serving, fs, tmp_path):
    roots = [str(tmp_path / name) for name in ("a", "b")]
    world = serving(*({**fs, "root_dir": root} for root in roots))
    keys = keys_of(1, 2)
    world.store(keys)
    world.finish_jobs()
    assert files_below(roots[0]) == files_below(roots[1]) == names_of(keys)
    world.reset()
    for path in Path(roots[0]).rglob("*.bin"):
        path.unlink()
    assert world.holds(keys), "what the first tier lost, the second serves"


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_stores_loads_and_resets_serves_the_right_bytes(serving, tier, seed):
    draw = random.Random(seed)
    world = serving(tier, slots=6)
    stored = set()
    for _ in range(40):
        keys = keys_of(*draw.sample(range(16), draw.randint(1, 4)))
        action = draw.random()
        if action < 0.5:
            stored |= set(world.store(keys))
        elif action < 0.95:
            for key, rows in world.load(keys).items():
                assert key in stored
                assert np.array_equal(rows, content_of(key))
        else:
            world.reset()
        if draw.random() < 0.5:
            world.step()
    world.finish_jobs()
    for key in stored:
        assert world.holds([key])


def test_the_calls_may_come_from_any_thread_one_at_a_time(serving, tier):
    world = serving(tier)
    draw = random.Random(7)
    idents = set()

    def hop(method, *args):
        def noted():
            idents.add(threading.get_ident())
            return method(*args)

        return draw.choice(threads).submit(noted).result(20)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        threads = [one, other]
        world.call = hop
        keys = keys_of(*range(6))
        world.store(keys[:3])
        world.store(keys[3:])
        world.finish_jobs()
        world.reset()
        world.rows[:] = 0
        assert world.holds(keys)
        assert len(idents) == 2
        hop(world.tier.drain_jobs)
        hop(world.tier.shutdown)
        world.call = lambda method, *args: method(*args)


def test_shutdown_gives_the_primarys_memory_back(serving, tier):
    world = serving(tier, tier | {"root_dir": tier["root_dir"] + "/second"})
    world.store(keys_of(1, 2))
    region = world.spec._scheduler_mmap
    mapping, path = region.mmap_obj, Path(region.mmap_path)
    assert path.exists()
    world.shutdown()
    assert mapping.closed, "a cast of the view was left"
    assert not path.exists()


def test_shutdown_twice_is_shutdown_once(serving, tier):
    world = serving(tier)
    world.tier.shutdown()
    world.tier.shutdown()


def test_a_tier_that_cannot_open_leaves_nothing_of_the_primary_behind(serving, tier):
    def regions():
        return set(Path("/dev/shm").glob(f"vllm_offload_kvoffload-test-{os.getpid()}-*"))

    before = regions()
    with pytest.raises(ConfigError, match="root_dir"):
        serving(tier, tier | {"root_dir": "/dev/null/nowhere"})
    assert regions() == before


@pytest.mark.skipif(
    not hasattr(SecondaryTierManager, "tolerates_off_thread_polling"),
    reason="this vLLM polls from one thread only",
)
def test_vllms_own_second_thread_may_poll_the_tier(serving, fs):
    world = serving({**fs, "type": "PolledFsTier", "module_path": "vllm_world"})
    names = PolledFsTier.polled_by = set()
    keys = keys_of(*range(6))
    for _ in range(10):
        world.store(keys)
        world.reset()
        world.rows[:] = 0
        assert world.holds(keys)
    world.until(lambda: "vllm_offload_tier_poll" in names)
    assert len(names) == 2
