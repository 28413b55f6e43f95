"""Cached blocks are managed through the manager, between a scheduler's steps."""

import os
import time

import pytest
from facade.worlds import HIT, MISS, RETRY, World, filled, k, ks

from kvoffload_async.abc.tier import TierCapabilities
from kvoffload_async.core import deletions, planner
from kvoffload_async.core.deletions import KEYS_A_STEP, MOST_KEYS
from kvoffload_async.errors import (
    BusyError,
    ClosedError,
    StateError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.facade.cache import MOST_OPERATIONS
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs import walk
from kvoffload_async.types import ReqContext

EXACT = TierCapabilities(exclusive=True, deletes=True)
LISTED = TierCapabilities(exclusive=False, deletes=True, lists=True)
PROBED = TierCapabilities(exclusive=False, deletes=True)


class Overriding(SecondaryTierManager):
    """A third party's manager."""

    def on_new_request(self, req_context):
        return super().on_new_request(req_context)

    def submit_store(self, job_metadata):
        super().submit_store(job_metadata)


def progress(world, operation, steps=20):
    for _ in range(steps):
        world.step()
        world.finish_all()
        if operation.is_done:
            break
    return operation.report


def test_a_deletion_begins_at_the_end_of_the_step():
    world = World(EXACT)
    world.begin("r")
    world.store(1, 2)
    world.rest()
    assert world.lookup(1) is HIT
    operation = world.manager.cache.delete(ks(1))
    assert world.lookup(1) is HIT, "the step has found it"
    world.load(1)
    world.step()
    assert world.lookup(1) is MISS
    assert progress(world, operation).is_complete
    assert world.tiers[0].blocks.keys() == {k(2)}
    world.end()


def test_the_keys_of_a_large_deletion_are_checked_when_it_is_asked_for(monkeypatch):
    world = World(EXACT)
    world.begin("r")
    checked = []
    monkeypatch.setattr(planner, "require_keys", checked.extend)
    operation = world.manager.cache.delete(ks(*range(4 * KEYS_A_STEP)))
    with monkeypatch.context() as patched:
        patched.setattr(deletions, "MOST_DELETIONS", 0)
        for _ in range(3):
            world.step()
        assert not operation.is_done, "it waits for others to end"
    world.step()
    assert len(checked) <= KEYS_A_STEP, "the step that begins it does not go through its keys"
    assert progress(world, operation).is_complete
    world.end()


def test_operations_and_their_blocks_are_bounded():
    world = World(EXACT)
    cache = world.manager.cache
    with pytest.raises(BusyError, match="at most 24 on 1048576; wait for some of them"):
        cache.count([k(1)] * (MOST_KEYS + 1))
    operations = [cache.delete([k(number)]) for number in range(MOST_OPERATIONS)]
    with pytest.raises(BusyError, match="operations on 24 are under way"):
        cache.count([k(1)])
    for operation in operations:
        assert progress(world, operation).is_complete
    assert progress(world, cache.count([k(1)])).is_complete
    world.end()


def test_a_managers_scheduler_has_work_until_an_operation_can_only_wait():
    world = World(EXACT)
    world.manager.cache.delete(ks(1))
    assert world.manager.has_pending_work()
    world.step()
    assert world.manager.has_pending_work(), "the tier deletes"
    world.rest()
    world.end()


def test_a_third_partys_manager_cannot_delete_and_is_not_counted():
    world = World(EXACT, EXACT, manager_class=(SecondaryTierManager, Overriding))
    cache = world.manager.cache
    with pytest.raises(StateError, match="tier1 cannot delete blocks"):
        cache.delete(ks(1))
    report = progress(world, cache.count(ks(1)))
    assert report.left == {"primary": 0, "tier0": 0, "tier1": 1}
    assert report.errors == {"tier1": "its manager has no operation 'contains'"}
    world.end()


@pytest.mark.parametrize("capabilities", [EXACT, LISTED])
def test_a_tier_is_cleared_and_not_used_meanwhile(capabilities):
    world = World(capabilities)
    filled(world, 1, 2, 3)
    operation = world.manager.cache.clear(["tier0"])
    world.step()
    world.begin("r")
    assert [world.lookup(number) for number in (1, 9)] == [MISS, MISS]
    assert world.manager.stats().tiers[0].skipped_lookups["clearing"] > 0
    world.store(4)
    world.step()
    assert not [parked for parked in world.parked() if parked.job], "nothing is stored"
    report = progress(world, operation)
    assert report.done == {"tier0": 3}
    assert report.is_complete
    world.runner.advance(1.0)
    world.rest()
    assert world.tiers[0].blocks.keys() == {k(4)}, "what was pending has been stored"
    assert [world.lookup(number) for number in (1, 4)] in ([MISS, HIT], [RETRY, HIT])
    world.end()


def test_clearing_waits_for_stores_under_way():
    world = World(EXACT)
    world.begin("r")
    world.store(1)
    world.step()
    operation = world.manager.cache.clear(["tier0"])
    world.step()
    world.step()
    assert [parked.kind.name for parked in world.parked()] == ["STORE"]
    assert progress(world, operation).is_complete
    assert not world.tiers[0].blocks
    world.end()


def test_a_reset_reaches_only_the_tiers_that_it_names(caplog):
    world = World(EXACT, EXACT)
    filled(world, 1, 2)
    with pytest.raises(StateError, match="is not valid"):
        world.manager.reset_cache(tiers=["disk"])
    world.begin("r")
    world.store(3)
    world.rest()
    caplog.clear()
    caplog.set_level("INFO", "kvoffload_async")
    world.manager.reset_cache(tiers=["tier1"])
    (line,) = caplog.messages
    assert line == (
        "reset: the primary is empty, which had 1 block; tiers that are cleared: tier1; tiers that "
        "keep their blocks: tier0"
    )
    world.manager.on_reset_flushed()
    world.rest()
    assert world.tiers[0].blocks.keys() == set(ks(1, 2, 3))
    assert not world.tiers[1].blocks
    world.end()


def test_a_listing_that_fails_ends_the_clearing():
    world = World(LISTED)
    filled(world, 1)
    operation = world.manager.cache.clear(["tier0"])
    world.step()
    world.finish_job(error=TierUnavailableError("down"))
    report = progress(world, operation)
    assert operation.is_done
    assert (report.left, report.errors) == ({"tier0": 1}, {"tier0": "down"})
    world.begin("r")
    assert world.lookup(1) is RETRY, "it is in use again"
    world.end()


@pytest.mark.parametrize("ends", [True, False])
def test_clearing_ends_although_a_tier_lists_further_pages_for_ever(ends, monkeypatch):
    limit_s = 3600.0 if ends else float("inf")
    monkeypatch.setattr("kvoffload_async.facade.cache._CLEARING_S", limit_s)
    world = World(LISTED)
    filled(world, 1)

    async def one_more(cursor, _count):
        return [], str(int(cursor or 0) + 1)

    monkeypatch.setattr(world.tiers[0], "list_keys", one_more)
    world.runner.advance(5000.0)
    operation = world.manager.cache.clear(["tier0"])
    world.step()
    assert not operation.is_done, "an idle engine's last step was long ago"
    for _ in range(20):
        world.step()
        world.runner.advance(300.0)
    assert operation.is_done is ends
    if ends:
        assert operation.report.left == {"tier0": 1}
        assert "not empty after 3600 seconds" in operation.report.errors["tier0"]
        world.begin("r")
        assert world.lookup(1) is RETRY, "it is in use again"
    world.end()


def test_tiers_that_cannot_be_cleared_or_listed_are_refused():
    world = World(PROBED, EXACT)
    cache = world.manager.cache
    with pytest.raises(StateError, match="'tier0' cannot list and delete its blocks"):
        cache.clear(["tier0"])
    with pytest.raises(StateError, match="'primary' is no tier"):
        cache.clear(["primary", "tier1"])
    with pytest.raises(StateError, match="'tier0' cannot list its blocks"):
        cache.list_keys("tier0")
    with pytest.raises(StateError, match="cursor: 'x'"):
        cache.list_keys("tier1", "x")
    world.end()


@pytest.mark.parametrize("place", ["primary", "tier0", "tier1"])
def test_every_block_of_a_place_is_listed(place, monkeypatch):
    monkeypatch.setattr("kvoffload_async.facade.cache.KEYS_A_STEP", 3)
    world = World(EXACT, LISTED)
    world.begin("r")
    world.store(*range(7))
    world.rest()
    world.tiers[1].page = 3
    keys, cursor = [], None
    for _ in range(5):
        operation = world.manager.cache.list_keys(place, cursor)
        report = progress(world, operation)
        keys += report.keys
        if (cursor := report.cursor) is None:
            break
    assert sorted(keys) == sorted(ks(*range(7)))
    world.end()


def test_pins_by_the_manager_keep_blocks_until_their_time():
    world = World(num_slots=8)
    world.begin("r")
    world.store(1, 2)
    world.runner.advance(100.0)
    assert world.manager.cache.pin(ks(1, 2), 10.0) == 2
    world.step()
    assert world.counts["pinned"] == 2
    assert 9.0 < world.manager.wakes_in_s() <= 10.0
    world.runner.advance(11.0)
    world.step()
    assert world.counts["pinned"] == 0
    world.end()


def test_a_deletion_under_way_ends_incomplete_when_the_manager_is_shut_down():
    world = World(EXACT)
    filled(world, 1)
    operation = world.manager.cache.delete(ks(1), ["tier0"])
    world.manager.on_schedule_end()
    world.end()
    assert operation.is_done
    assert operation.report.left == {"tier0": 1}
    with pytest.raises(ClosedError):
        world.manager.finish(operation, 1.0)


@pytest.mark.parametrize("tier", ["slab", "fs", "example"])
def test_a_block_is_deleted_from_a_real_tier_without_a_scheduler(tmp_path, tier):
    options = {
        "slab": {"root_dir": str(tmp_path), "capacity_bytes": 4 << 20},
        "fs": {"root_dir": str(tmp_path)},
        "example": {},
    }
    config = {
        "cpu_bytes_to_use": 8 * 4096,
        "block_bytes": 4096,
        "model": "m",
        "secondary_tiers": [{"type": tier, **options[tier]}],
    }
    keys = [key_of(number) for number in range(3)]
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        ctx = ReqContext("r")
        manager.on_new_request(ctx)
        output = manager.prepare_store(keys, ctx)
        manager.complete_store(output.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        while manager.has_pending_work():
            manager.on_schedule_end()
            manager.wait_for_progress(0.02)
        report = manager.finish(manager.cache.count(keys), 60.0)
        assert report.done == {"primary": 3, tier: 3}
        report = manager.finish(manager.cache.delete(keys[:2]), 60.0)
        assert report.is_complete
        report = manager.finish(manager.cache.count(keys), 60.0)
        assert report.done == {"primary": 1, tier: 1}
        assert manager.finish(manager.cache.list_keys(tier), 60.0).keys == keys[2:]
        assert manager.finish(manager.cache.clear([tier]), 60.0).is_complete
        assert manager.finish(manager.cache.count(keys, [tier]), 60.0).done == {tier: 0}


def test_a_file_whose_name_is_too_long_for_a_block_ends_neither_clearing_nor_engine(tmp_path):
    config = {
        "cpu_bytes_to_use": 8 * 4096,
        "block_bytes": 4096,
        "model": "m",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}],
    }
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        manager.on_schedule_end()
        (folder,) = tmp_path.glob("*_r0")
        planted = folder / "ab" / f"{'ab' * 100}_g0.bin"
        planted.parent.mkdir(exist_ok=True)
        planted.write_bytes(bytes(4096))
        assert manager.finish(manager.cache.clear(["fs"]), 60.0).is_complete
        assert not manager.finish(manager.cache.list_keys("fs"), 60.0).keys
        assert planted.exists()


@pytest.mark.parametrize("capabilities", [EXACT, PROBED])
def test_blocks_of_the_primary_are_copied_to_a_tier(capabilities):
    world = World(EXACT, capabilities)
    world.begin("r")
    world.store(1, 2)
    world.rest()
    world.tiers[1].blocks.clear()
    world.manager.planner.tiers[1].index.deleted(ks(1, 2))
    operation = world.manager.cache.copy(ks(1, 2, 9), "tier1")
    report = progress(world, operation)
    assert operation.is_done
    assert (report.done, report.left) == ({"tier1": 2}, {"tier1": 1}), "9 is nowhere"
    assert world.tiers[1].blocks.keys() == set(ks(1, 2))
    world.end()


def test_blocks_are_listed_by_their_age_where_a_tier_knows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(walk, "_MOST_EXAMINED", 1)  # pages without a key, too
    config = {
        "cpu_bytes_to_use": 8 * 4096,
        "block_bytes": 4096,
        "model": "m",
        "secondary_tiers": [
            {"type": "fs", "root_dir": str(tmp_path / "fs")},
            {"type": "slab", "root_dir": str(tmp_path / "slab"), "capacity_bytes": "16MiB"},
            {"type": "object", "url": f"file://{tmp_path}/object"},
        ],
    }
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        ctx = ReqContext("r")
        keys = sorted(manager.generation.key(bytes([number]) * 16, 0) for number in range(8))
        manager.on_new_request(ctx)
        output = manager.prepare_store(keys, ctx)
        manager.complete_store(output.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        while manager.has_pending_work():
            manager.on_schedule_end()
            manager.wait_for_progress(0.02)
        for path in tmp_path.rglob("*"):
            if any((bytes([number]) * 16).hex() in f"{path}".replace("/", "") for number in (1, 5)):
                os.utime(path, (0, time.time() - 1000))

        def listed(place, **options):
            found, cursor = [], None
            while True:
                operation = manager.cache.list_keys(place, cursor, **options)
                report = manager.finish(operation, 60.0)
                assert report.is_complete, report.errors
                found += report.keys
                if (cursor := report.cursor) is None:
                    return found

        for place in ("fs", "object"):
            assert listed(place) == keys
            assert listed(place, older_than_s=500) == [keys[1], keys[5]]
            assert not listed(place, older_than_s=5000)
            with pytest.raises(StateError, match="older_than_s: -1 is not valid"):
                manager.cache.list_keys(place, None, -1)
        for place in ("primary", "slab"):
            with pytest.raises(StateError, match=r"does not know the ages .* fs, object here does"):
                manager.cache.list_keys(place, None, 5)


def only_in_tier0(*numbers, target=EXACT, source=EXACT, **options):
    world = World(source, target, **options)
    filled(world, *numbers)
    world.tiers[1].blocks.clear()
    world.manager.planner.tiers[1].index.deleted(ks(*numbers))
    return world


@pytest.mark.parametrize("capabilities", [EXACT, PROBED])
def test_blocks_that_only_another_tier_has_are_promoted_and_copied(capabilities):
    numbers = range(1, 25)
    world = only_in_tier0(*numbers, target=capabilities, source=capabilities, num_slots=32)
    operation = world.manager.cache.copy(ks(*numbers, 99), "tier1")
    sizes = []
    while not operation.is_done:
        world.step()
        sizes += [len(parked.keys) for parked in world.parked(0) if parked.kind.name == "LOAD"]
        world.finish_all()
    assert sizes == [world.manager.planner.room.most_early] * 3, "no more at once than its share"
    report = operation.report
    assert (report.done, report.left) == ({"tier1": 24}, {"tier1": 1})
    assert world.tiers[1].blocks.keys() == set(ks(*numbers))
    source = world.manager.stats().tiers[0]
    assert (source.prefetched_blocks, source.unused_prefetched_blocks) == (24, 0)
    assert not world.manager.planner.requests
    world.rest()
    world.end()


def test_a_move_between_tiers_takes_blocks_that_the_primary_lacks():
    world = only_in_tier0(1, 2, 3)
    operation = world.manager.cache.copy(ks(1, 2, 3), "tier1", source="tier0")
    report = progress(world, operation, steps=40)
    assert report.done == {"tier1": 3, "tier0": 3}
    assert (len(world.tiers[0].blocks), len(world.tiers[1].blocks)) == (0, 3)
    world.end()


def test_a_copy_promotes_nothing_while_a_request_needs_the_room_and_then_leaves_the_rest():
    world = only_in_tier0(1, 2, 3)
    planner = world.manager.planner
    planner.room.most_early = 1
    contexts = [ReqContext(f"queued-{number}") for number in range(2)]
    for ctx, number in zip(contexts, (2, 3), strict=True):
        world.manager.on_new_request(ctx)
        planner.prefetch(ks(number), ctx)
        if number == 2:
            blocked = world.manager.cache.copy(ks(1), "tier1")
            world.step()
    assert [parked.keys for parked in world.parked(0)] == [tuple(ks(2))]
    world.finish_all()
    world.manager.on_request_finished(contexts[0])
    world.poll()
    assert [parked.keys for parked in world.parked(0)] == [tuple(ks(3))], "the copy comes last"
    world.finish_all()
    world.step()
    assert not world.manager.cache.has_work
    assert 0 < world.manager.wakes_in_s() <= 1
    world.runner.advance(31)
    report = progress(world, blocked)
    assert blocked.is_done
    assert report.left == {"tier1": 1}
    assert planner.prefetcher.queued == {}
    world.manager.on_request_finished(contexts[1])
    world.end()


def test_a_failed_promotion_leaves_the_block_and_suspends_no_tier():
    world = only_in_tier0(1, 2)
    operation = world.manager.cache.copy(ks(1, 2), "tier1", source="tier0")
    world.step()
    world.step()
    world.finish_job(0, error=TierUnavailableError("down"))
    report = progress(world, operation, steps=40)
    assert operation.is_done
    assert report.left == {"tier1": 2, "tier0": 0}
    assert len(world.tiers[0].blocks) == 2
    assert world.manager.stats().tiers[0].breakers["load"] == "closed"
    world.end()


def test_a_shutdown_ends_a_copy_that_promotes_blocks():
    world = only_in_tier0(1, 2)
    world.manager.cache.copy(ks(1, 2), "tier1")
    world.step()
    world.step()
    assert world.parked(0)
    world.end()


def test_a_deletion_ends_the_promotion_of_a_copy():
    world = only_in_tier0(1, 2)
    copy = world.manager.cache.copy(ks(1, 2), "tier1")
    world.step()
    world.step()
    assert world.parked(0)
    deletion = world.manager.cache.delete(ks(1))
    assert progress(world, deletion).is_complete
    report = progress(world, copy)
    assert copy.is_done
    assert report.done == {"tier1": 1}
    assert not any(k(1) in tier.blocks for tier in world.tiers)
    world.end()


def test_a_reset_ends_the_promotion_of_a_copy():
    world = only_in_tier0(1, 2)
    operation = world.manager.cache.copy(ks(1, 2), "tier1")
    world.step()
    world.step()
    assert world.parked(0)
    world.finish_all()
    world.manager.reset_cache()
    report = progress(world, operation, steps=40)
    assert operation.is_done
    assert report.left == {"tier1": 2}
    world.manager.on_reset_flushed()
    world.end()


@pytest.mark.parametrize("capabilities", [EXACT, PROBED])
@pytest.mark.parametrize("source", ["primary", "tier0"])
def test_a_moved_block_leaves_its_source_once_the_tier_has_it(source, capabilities):
    world = World(EXACT, capabilities)
    world.begin("r")
    world.store(1, 2)
    world.rest()
    world.tiers[1].blocks.clear()
    world.manager.planner.tiers[1].index.deleted(ks(1, 2))
    operation = world.manager.cache.copy(ks(1, 2), "tier1", source=source)
    for _ in range(4):
        world.step()
    assert [parked.kind.name for parked in world.parked(1)] == ["STORE"], "it waits for the copy"
    world.finish_job(1, failures={1: TierFullError("no room")})
    report = progress(world, operation)
    assert operation.is_done
    moved = {key for key in ks(1, 2) if key in world.tiers[1].blocks}
    assert len(moved) == 1
    assert report.done == {"tier1": 1, source: 1}
    assert report.left == {"tier1": 1, source: 0}
    if source == "tier0":
        assert world.tiers[0].blocks.keys() == set(ks(1, 2)) - moved
    in_primary = world.manager.planner.primary.lookup_many(ks(1, 2))
    assert in_primary.count(HIT) == (1 if source == "primary" else 2)
    world.end()


def test_a_block_that_nobody_confirms_is_not_moved():
    world = World(EXACT, PROBED)
    world.begin("r")
    world.store(1)
    world.rest()
    operation = world.manager.cache.copy(ks(1), "tier1", source="tier0")
    world.step()
    world.finish_job(1)
    world.step()
    world.step()
    world.finish_job(1, error=TierUnavailableError("down"))
    report = progress(world, operation)
    assert operation.is_done
    assert report.errors == {"tier1": "down"}
    assert world.tiers[0].blocks.keys() == {k(1)}
    for bad in ({"tier": "primary"}, {"tier": "tier1", "source": "tier1"}, {"tier": "disk"}):
        with pytest.raises(StateError, match="is not valid"):
            world.manager.cache.copy(ks(1), **bad)
    world.end()


@pytest.mark.parametrize("capabilities", [EXACT, PROBED])
def test_a_block_that_is_moved_both_ways_at_once_stays_in_one_tier(capabilities):
    world = World(capabilities, capabilities)
    world.begin("r")
    world.store(1)
    world.rest()
    there = world.manager.cache.copy(ks(1), "tier1", source="tier0")
    back = world.manager.cache.copy(ks(1), "tier0", source="tier1")
    reports = [progress(world, operation) for operation in (there, back)]
    assert there.is_done
    assert back.is_done
    assert [k(1) in tier.blocks for tier in world.tiers] == [False, True]
    assert reports[1].left == {"tier0": 0, "tier1": 1}
    world.end()


@pytest.mark.parametrize("capabilities", [EXACT, LISTED])
def test_a_block_stays_in_its_source_if_its_target_is_cleared_meanwhile(capabilities):
    world = World(EXACT, capabilities)
    world.begin("r")
    world.store(1)
    world.rest()
    move = world.manager.cache.copy(ks(1), "tier1", source="tier0")
    world.step()
    world.step()
    world.finish_all()  # the tier has said that it has it
    clear = world.manager.cache.clear(["tier1"])
    assert progress(world, clear).is_complete
    progress(world, move)
    assert move.is_done
    assert [k(1) in tier.blocks for tier in world.tiers] == [True, False]
    world.end()


def test_clearing_that_waits_for_other_deletions_makes_no_steps(monkeypatch):
    monkeypatch.setattr(deletions, "MOST_KEYS", 600)
    world = World(EXACT, EXACT)
    filled(world, 1, 2)
    cache = world.manager.cache
    stuck = cache.delete(ks(*range(11, 610)), ["tier0"])
    world.step()
    clear = cache.clear(["tier1"])
    world.step()
    world.step()
    assert not cache.has_work
    assert world.manager.wakes_in_s() > 0
    assert progress(world, stuck).is_complete
    assert progress(world, clear).done == {"tier1": 2}
    world.end()


def test_a_step_looks_up_none_of_the_blocks_again_whose_copies_it_waits_for(monkeypatch):
    world = World(EXACT, num_slots=64)
    world.begin("r")
    numbers = range(64)
    world.store(*numbers)
    world.rest()
    world.tiers[0].blocks.clear()
    world.manager.planner.tiers[0].index.deleted(ks(*numbers))
    copy = world.manager.cache.copy(ks(*numbers), "tier0")
    world.step()
    looked_up = []
    is_storing = world.manager.planner.cascades.is_storing
    monkeypatch.setattr(
        world.manager.planner.cascades,
        "is_storing",
        lambda index, keys: looked_up.extend(keys) or is_storing(index, keys),
    )
    for _ in range(10):
        world.step()
    assert 0 < len(looked_up) <= 40
    assert progress(world, copy).is_complete
    world.end()
