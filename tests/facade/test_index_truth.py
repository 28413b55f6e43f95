"""What is known of a tier is what the tier has, in whatever order jobs and evictions come."""

import asyncio
import gc
from dataclasses import replace
from functools import partial

import pytest
from facade.bounded_tier import BoundedTier
from facade.replay_world import ReplayWorld
from facade.worlds import EXCLUSIVE, HIT, MISS, PROBED, k, ks

from kvoffload_async.registry import create_policy
from kvoffload_async.testing.harness import ManagerHarness, key_of
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier
from kvoffload_async.types import Locality, ReqContext

KIB = 1024
R = ReqContext("r")
FIELDS = {"model_name": "m"}
POLICY = partial(create_policy, "lru")


def small_slab(folder):
    return SlabTier(
        SlabSettings(
            root_dir=str(folder),
            run_config=FIELDS,
            capacity_bytes=81 * KIB + 8 * 4 * KIB,
            segment_bytes=4 * KIB,
        ),
        POLICY,
    )


def small_fs(folder):
    capacity_bytes = 26 * KIB + 4 * 12 * KIB
    settings = FsSettings(root_dir=str(folder), run_config=FIELDS, capacity_bytes=capacity_bytes)
    return FsTier(settings)


def churn(harness):
    """Store twenty times what a tier holds, in jobs of several blocks side by side."""
    for first in range(0, 800, 40):
        for job in range(8):
            numbers = range(first + 5 * job, first + 5 * job + 6)
            slots = range(6 * job, 6 * job + 6)
            harness.submit_store([key_of(number) for number in numbers], slots)
        harness.wait()
    while harness.manager.link.actor._reconciler.tasks:  # quiet is when nobody asks any more
        harness.run(asyncio.sleep(0))
    harness.collect()


def announced(harness):
    present = set()
    for event in harness.manager.take_events():
        present = present - set(event.keys) if event.removed else present | set(event.keys)
    return present


@pytest.mark.parametrize(
    "tier_of", [small_slab, lambda _: BoundedTier(4)], ids=["slab", "external"]
)
def test_the_index_of_a_full_tier_is_its_contents(tier_of, tmp_path):
    """804 blocks were indexed where 4 were held: each was added when its job ended, long gone."""
    tier = tier_of(tmp_path)
    with ManagerHarness(tier, 64, 4 * KIB, enable_kv_events=True) as harness:
        churn(harness)
        everything = [key_of(number) for number in range(801)]
        held = harness.run(tier.contains(everything))
        known = [key for key in everything if harness.manager.lookup(key, R) is HIT]
        assert set(known) == held
        assert len(harness.manager.tier_state.index) == len(held)
        assert announced(harness) == held


def test_what_is_told_of_a_full_directory_is_what_is_in_it(tmp_path):
    tier = small_fs(tmp_path)
    with ManagerHarness(tier, 64, 4 * KIB, enable_kv_events=True) as harness:
        churn(harness)
        held = harness.run(tier.contains([key_of(number) for number in range(801)]))
        assert held
        assert announced(harness) == held


@pytest.mark.parametrize("locality", list(Locality))
def test_a_store_that_engines_share_has_one_owner_in_the_events_of_all(locality, tmp_path):
    def owner_of(tier, block_bytes=4 * KIB):
        with ManagerHarness(tier, 4, block_bytes, enable_kv_events=True) as harness:
            harness.submit_store([key_of(0)], [0])
            harness.wait()
            (event,) = harness.manager.take_events()
            assert event.locality is locality
            assert event.ownership == harness.manager.ownership
            return event.ownership

    def fs(name):
        where = str(tmp_path / name)
        return FsTier(FsSettings(root_dir=where, run_config=FIELDS, locality=locality))

    owners = [owner_of(fs("a")), owner_of(fs("a")), owner_of(fs("b")), owner_of(fs("a"), 8 * KIB)]
    settings = small_slab(tmp_path / "slab")._settings
    private = owner_of(SlabTier(replace(settings, locality=locality), POLICY))
    if locality is Locality.LOCAL:
        assert {*owners, private} == {owners[0]}
    else:
        assert owners[0] == owners[1]
        assert len(set(owners)) == 3
        assert "@" not in private, "a slab is never shared"


def cancel_store(world, tier):
    """In a frame of its own: a cancelled task keeps the frames that it has left."""
    for name, task in world.job_tasks().items():
        if name.startswith(f"tier{tier}:"):
            task.cancel()


@pytest.mark.parametrize("num_calls", range(6))
@pytest.mark.parametrize("tier", [0, 1], ids=["fs", "slab"])
def test_what_a_cancelled_store_has_left_on_the_disk_is_known(tier, num_calls):
    """Whenever it is cancelled: what is there is told, and found."""
    world = ReplayWorld()
    try:
        world.begin("a")
        world.begin_copy(range(6), "a")
        world.end_copy(world.copies[0], success=True)
        world.manager.on_schedule_end()
        pool = world.host.pools[tier]
        for _ in range(num_calls):
            world.runner.run_ready()
            if pool.parked:
                pool.finish(pool.parked[0])
        world.runner.run_ready()
        cancel_store(world, tier)
        world.check()
    finally:
        gc.collect()  # a cancelled task's frames
        world.end()


def test_a_block_that_is_evicted_before_its_store_ends_is_not_known(alone):
    world = alone(enable_kv_events=True)
    world.submit(1, [1, 2])
    world.run()
    world.tier.env.blocks_evicted(ks(1))
    world.finish_job()
    world.results()
    assert [world.manager.lookup(key, R) for key in ks(1, 2)] == [MISS, HIT]
    assert [list(event.keys) for event in world.manager.take_events()] == [ks(2)]


def test_a_block_that_is_evicted_and_stored_anew_within_a_store_is_known(alone):
    world = alone()
    world.submit(1, [1, 2])
    world.run()
    world.tier.env.blocks_evicted(ks(1))
    world.tier.env.blocks_appeared(ks(1))
    world.finish_job()
    world.results()
    assert [world.manager.lookup(key, R) for key in ks(1, 2)] == [HIT, HIT]


def test_an_eviction_before_a_store_begins_does_not_count_against_it(alone):
    world = alone()
    world.submit(1, [9])
    world.run()
    world.tier.env.blocks_evicted(ks(1))
    world.submit(2, [1])
    world.run()
    world.finish_job(0)
    world.finish_job(0)
    world.results()
    assert world.manager.lookup(k(1), R) is HIT


@pytest.mark.parametrize("io_timeout_s", [30.0, 0.5], ids=["in time", "late"])
def test_an_overdue_store_knows_what_was_evicted_meanwhile(alone, io_timeout_s):
    world = alone(io_timeout_s=io_timeout_s)
    world.submit(1, [1, 2])
    world.run()
    world.host.runner.advance(1.0)
    world.tier.env.blocks_evicted(ks(1))
    world.finish_job()
    world.results()
    assert [world.manager.lookup(key, R) for key in ks(1, 2)] == [MISS, HIT]


def test_a_load_forgets_no_block_that_was_stored_while_it_ran(alone):
    world = alone()
    world.submit(1, [1, 2], is_promotion=True)
    world.run()
    load = world.tier.parked[0]
    world.submit(2, [1])
    world.run()
    world.finish_job(1)
    del world.tier.blocks[k(1)]
    world.tier.finish(load)
    world.tier.blocks[k(1)] = None
    world.host.runner.run_ready()
    world.results()
    assert [world.manager.lookup(key, R) for key in ks(1, 2)] == [HIT, MISS]


def test_a_load_of_a_block_that_goes_meanwhile_leaves_it_unknown(alone):
    world = alone()
    world.tier.env.blocks_appeared(ks(1))
    world.submit(1, [1], is_promotion=True)
    world.run()
    world.tier.env.blocks_evicted(ks(1))
    world.finish_job()
    world.results()
    assert world.manager.lookup(k(1), R) is MISS


def test_events_that_nobody_takes_are_dropped_only_where_not_every_block_is_followed(worlds):
    world = worlds(EXCLUSIVE, PROBED)
    for log in (world.primary.core.event_log, *(s.tier_state.event_log for s in world.secondaries)):
        log._bound = log._limit = 1
    world.begin("r")
    for number in range(3):
        world.store(number)
        world.rest()
    stats = world.manager.stats()
    assert [tier.events_dropped for tier in stats.tiers] == [0, 2]
    *kept, last = world.manager.take_events()
    assert (last.ownership, last.sequence, list(last.keys)) == ("tier1", 3, ks(2))
    for owner in None, "tier0":
        read = [key for event in kept if event.ownership == owner for key in event.keys]
        assert read == ks(0, 1, 2)
    world.finish("r")
