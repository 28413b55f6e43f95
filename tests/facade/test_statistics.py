"""What `stats()` tells of an engine, a manager and a tier."""

import dataclasses
import inspect
import json

import pytest
from facade.worlds import EXCLUSIVE, PROBED, SLOT_BYTES, Alone, World, filled, k, scripted
from scripted_tier import ScriptedTier

from kvoffload_async import (
    CPUPrimaryTierOffloadingManager,
    OffloadingStatistics,
    ReqContext,
    statistics,
)
from kvoffload_async.core.counters import PlannerCounters, PrimaryCounters, TierCounters
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.statistics import (
    PlannerStatistics,
    PrimaryStatistics,
    SlotStatistics,
    TierStatistics,
)


@pytest.fixture
def world():
    worlds = []

    def make(*tiers, **options):
        worlds.append(World(*tiers, **options))
        worlds[-1].begin("r")
        return worlds[-1]

    yield make
    for each in worlds:
        each.end()


@pytest.mark.parametrize(
    ("counters", "shown"),
    [
        (PrimaryCounters, PrimaryStatistics),
        (TierCounters, TierStatistics),
        (PlannerCounters, PlannerStatistics),
    ],
)
def test_every_counter_is_shown_under_its_name(counters, shown):
    def names(cls):
        return {field.name for field in dataclasses.fields(cls)}

    assert names(counters) <= names(shown)


def test_every_figure_is_documented_and_nothing_can_be_changed():
    trees = [each for each in vars(statistics).values() if dataclasses.is_dataclass(each)]
    assert len(trees) == 12
    for tree in trees:
        assert tree.__dataclass_params__.frozen
        for field in dataclasses.fields(tree):
            if field.name in vars(tree).get("__annotations__", {}):
                assert f"\n    {field.name}: " in inspect.getdoc(tree)


def test_the_tree_can_be_written_as_json(world):
    stats = world(EXCLUSIVE, PROBED).manager.stats()
    assert json.loads(json.dumps(dataclasses.asdict(stats)))["tiers"][1]["name"] == "tier1"


def test_the_primary_tells_its_slots_by_use_and_what_it_has_done(world):
    here = world(num_slots=4)
    here.store(1, 2)
    here.prepare_store(3)
    manager, ctx = here.manager, here.contexts["r"]
    here.lookup(1)
    manager.prepare_load([k(1)], ctx)
    assert manager.stats().primary.slots == SlotStatistics(
        free=1, writing=1, idle=1, pinned=1, held=0
    )
    assert here.prepare_store(4, 5, 6).keys_to_store == [k(4), k(5)]
    assert here.prepare_store(6) is None
    here.complete_store(4, 5)
    read = manager.stats().primary
    assert (read.stored_blocks, read.loaded_blocks) == (4, 1)
    assert (read.evicted_blocks, read.refused_stores) == (1, 1)
    manager.complete_load([k(1)], ctx)
    here.complete_store(3, success=False)
    assert manager.stats().primary.stored_blocks == 4, "a failed store has stored nothing"


def test_a_primary_alone_tells_the_same():
    manager = CPUPrimaryTierOffloadingManager(2)
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    manager.prepare_store([k(1)], ctx)
    manager.complete_store([k(1)], ctx)
    read = manager.stats()
    assert read == OffloadingStatistics(primary=read.primary)
    assert read.primary.stored_blocks == read.primary.slots.idle == 1


def test_a_tier_tells_what_it_was_given_and_what_became_of_it(world):
    here = world(EXCLUSIVE)
    here.store(1, 2)
    (tier,) = here.manager.stats().tiers
    assert (tier.jobs_in_flight, tier.queued_jobs, tier.cascading_blocks) == (1, 1, 2)
    here.step()
    (tier,) = here.manager.stats().tiers
    assert (tier.jobs_in_flight, tier.queued_jobs) == (1, 0)
    here.finish_all()
    here.poll()
    (tier,) = here.manager.stats().tiers
    assert (tier.stored_blocks, tier.stored_bytes) == (2, 2 * SLOT_BYTES)
    assert (tier.jobs_in_flight, tier.cascading_blocks) == (0, 0)
    here.store(3)
    here.step()
    here.finish_job(error=TierUnavailableError("down"))
    here.poll()
    (tier,) = here.manager.stats().tiers
    assert (tier.failed_jobs, tier.failed_loads) == (1, 0)
    assert (tier.failed_blocks, tier.failed_bytes) == (1, SLOT_BYTES)
    planner = here.manager.stats().planner
    assert (planner.jobs_submitted, planner.job_results, planner.job_failures) == (2, 2, 1)
    assert planner.requests == 1


def test_loaded_blocks_are_counted_where_they_come_from(world):
    here = world(EXCLUSIVE, EXCLUSIVE)
    filled(here, 1, 2)
    here.lookup(1)
    here.lookup(2)
    here.rest()
    first, second = here.manager.stats().tiers
    assert (first.loaded_blocks, first.loaded_bytes) == (2, 2 * SLOT_BYTES)
    assert (second.loaded_blocks, second.stored_blocks) == (0, 2)


def test_what_a_tier_does_not_take_is_counted(world):
    here = world(EXCLUSIVE, copies_each=2)
    here.store(1, 2, 3)
    (tier,) = here.manager.stats().tiers
    assert (tier.pending_blocks, tier.dropped_blocks) == (1, 0)
    here.manager.reset_cache_now()
    (tier,) = here.manager.stats().tiers
    assert (tier.pending_blocks, tier.dropped_blocks, tier.dropped_bytes) == (0, 1, SLOT_BYTES)


def test_an_overdue_job_shows_until_its_copy_has_ended(world):
    here = world(EXCLUSIVE, io_timeout_s=1.0)
    here.store(1)
    here.step()
    here.runner.advance(2.0)
    here.poll()
    (tier,) = here.manager.stats().tiers
    assert (tier.overdue_jobs, tier.jobs_in_flight, tier.failed_jobs) == (1, 0, 1)
    here.finish_all()
    here.poll()
    assert here.manager.stats().tiers[0].overdue_jobs == 0


def test_a_tier_that_is_left_alone_says_so(world):
    here = world(EXCLUSIVE)
    for number in range(3):
        assert here.manager.stats().tiers[0].breakers["store"] == "closed"
        here.store(number)
        here.step()
        here.finish_job(error=TierUnavailableError("down"))
        here.poll()
        here.runner.advance(5.0)  # until it is tried again
    assert here.manager.stats().tiers[0].breakers["store"] == "open"


def test_a_probe_is_outstanding_until_it_is_answered(world):
    here = world(PROBED)
    here.lookup(1)
    here.step()
    assert here.manager.stats().tiers[0].probes_outstanding == 1
    here.rest()
    assert here.manager.stats().tiers[0].probes_outstanding == 0


def test_events_that_nobody_reads_are_counted(world):
    here = world(PROBED)
    here.secondaries[0].tier_state.event_log._bound = 1
    for number in range(3):
        here.store(number)
    here.rest()
    assert here.manager.stats().tiers[0].events_dropped == 2


def test_tiers_of_one_type_are_told_apart(world):
    here = world(EXCLUSIVE, EXCLUSIVE)
    assert [tier.name for tier in here.manager.stats().tiers] == ["tier0", "tier1"]


def test_a_tier_without_a_planner_counts_too():
    alone = Alone()
    alone.submit(0, (1, 2))
    alone.submit(1, (3,))
    alone.run()
    alone.finish_job()
    alone.finish_job(error=OSError("injected"))
    alone.results()
    read = alone.manager.stats()
    assert (read.stored_blocks, read.stored_bytes) == (2, 2 * 16)
    assert (read.failed_blocks, read.failed_jobs) == (1, 1)
    alone.end()
    assert alone.manager.stats().stored_blocks == 2, "also when it is closed"


class TellingTier(ScriptedTier):
    fails = False

    def gauges(self):
        if self.fails:
            raise SystemExit(3) if self.fails == "exit" else RuntimeError("third-party code")
        return {"connections": 3}


@pytest.mark.parametrize("failure", [True, "exit"])
def test_a_tier_may_tell_figures_of_its_own_and_fail_at_it(world, caplog, failure):
    here = world(TellingTier(EXCLUSIVE), scripted())
    assert [tier.gauges for tier in here.manager.stats().tiers] == [{"connections": 3}, {}]
    here.tiers[0].fails = failure
    for _ in range(2):
        assert here.manager.stats().tiers[0].gauges == {}
    assert caplog.text.count("gauges() failed") == 1
