"""What lookups came to, by tier and reason, and how long requests waited for it."""

import pytest
from facade.worlds import EXCLUSIVE, HIT, MISS, PENDING, PROBED, RETRY, World, filled, k

from kvoffload_async import CPUPrimaryTierOffloadingManager, ReqContext
from kvoffload_async.block_io.choice import implementation
from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierUnavailableError


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


def read(here):
    return here.manager.stats()


def test_each_answer_is_counted_where_it_was_given(world):
    here = world(EXCLUSIVE, PROBED)
    here.store(1)
    assert here.lookup(1) is HIT
    assert here.lookup(2) is RETRY
    here.rest()
    assert here.lookup(2) is MISS
    stats = read(here)
    planner = stats.planner
    assert (planner.lookups, planner.hits, planner.retries) == (3, 1, 1)
    assert {reason: n for reason, n in planner.misses.items() if n} == {"absent": 1}
    assert (stats.primary.hits, stats.primary.misses) == (1, 2)
    exact, probed = stats.tiers
    told = (exact.lookups, exact.hits, exact.misses, exact.undecided)
    assert told == (1, 0, 1, 0), "it is not asked again for a block that it lacks"
    assert (probed.lookups, probed.hits, probed.misses, probed.undecided) == (2, 0, 1, 1)


def test_a_block_counts_once_a_request_however_often_it_is_asked_for(world):
    here = world(EXCLUSIVE)
    filled(here, 1)
    for _ in range(3):
        assert here.lookup(1) is PENDING
    assert (read(here).planner.block_hits, read(here).planner.pending_hits) == (0, 3)
    here.rest()
    for _ in range(3):
        assert here.lookup(1) is HIT
        assert here.lookup(2) is MISS
    planner = read(here).planner
    assert (planner.block_hits, planner.block_misses) == (1, 1)
    assert read(here).tiers[0].hits == 1, "the tier was asked once"
    here.begin("s")
    here.lookup(1, "s")
    assert read(here).planner.block_hits == 2


def test_a_hit_without_room_is_a_miss_for_want_of_room(world):
    here = world(EXCLUSIVE, num_slots=2)
    filled(here, 1, 2)
    here.prepare_store(3, 4)
    for _ in range(3):
        assert here.lookup(1) is PENDING
        here.step()
        here.runner.advance(0.5)
    assert here.lookup(1) is MISS
    assert read(here).planner.misses["no_room"] == read(here).planner.promotions_refused == 1
    here.complete_store(3, 4)


def test_a_tier_that_is_not_asked_says_why(world):
    here = world(EXCLUSIVE, PROBED)
    here.begin("none", load_tier_filter=frozenset())
    assert here.lookup(1, "none") is MISS
    stats = read(here)
    assert [tier.skipped_lookups["filtered"] for tier in stats.tiers] == [1, 1]
    assert stats.planner.misses["skipped"] == 1
    here.manager.planner.tiers[0].is_available = False
    here.lookup(2)
    assert read(here).tiers[0].skipped_lookups["unavailable"] == 1
    here.manager.planner.tiers[0].is_available = True
    here.rest()


def test_a_promotion_that_failed_is_not_tried_again_for_its_request(world):
    here = world(EXCLUSIVE)
    filled(here, 1)
    assert here.lookup(1) is PENDING
    here.step()
    here.finish_job(error=TierUnavailableError("down"))
    here.poll()
    assert here.lookup(1) is MISS
    stats = read(here)
    assert stats.tiers[0].skipped_lookups["failed"] == stats.planner.misses["skipped"] == 1
    assert stats.tiers[0].failed_jobs_by_error == {"TierUnavailableError": 1}


def test_a_tier_that_is_suspended_says_so_and_how_often_it_was(world):
    here = world(EXCLUSIVE)
    filled(here, 1, 2, 3, 4)
    for number in (1, 2, 3):
        here.lookup(number)
        here.step()
        here.finish_job(error=OSError("third-party code"))
        here.poll()
    assert here.lookup(4) is MISS
    (tier,) = read(here).tiers
    assert tier.skipped_lookups["suspended"] == 1
    assert tier.breaker_openings == {"load": 1, "store": 0}
    assert tier.breakers == {"load": "open", "store": "closed"}


def test_an_error_of_no_class_of_ours_is_counted_as_another():
    class Odd(TierUnavailableError):
        pass

    here = World(EXCLUSIVE)
    here.begin("r")
    here.store(1)
    here.step()
    here.finish_job(error=Odd("odd"))
    here.poll()
    assert read(here).tiers[0].failed_jobs_by_error == {"other": 1}
    here.end()


def test_during_a_reset_and_after_the_limit_nothing_is_promoted(world):
    here = world(EXCLUSIVE, deferral_timeout_s=1.0)
    filled(here, 1)
    here.manager.planner.promotions_paused = True
    assert here.lookup(1) is MISS
    here.manager.planner.promotions_paused = False
    assert here.lookup(1) is PENDING
    here.step()
    here.runner.advance(2.0)
    assert here.lookup(1) is MISS
    assert here.lookup(2) is MISS
    misses = read(here).planner.misses
    assert (misses["paused"], misses["expired"]) == (1, 2)
    here.rest()


def test_corrupt_missing_and_evicted_blocks_are_told_apart(world):
    here = world(EXCLUSIVE)
    filled(here, 1, 2, 3)
    for number in (1, 2, 3):
        here.lookup(number)
    here.step()
    here.finish_job(failures={0: CorruptBlockError("a"), 1: BlockMissingError("b")})
    here.poll()
    here.tiers[0]._env.blocks_evicted([k(3)])
    here.poll()
    (tier,) = read(here).tiers
    assert (tier.corrupt_blocks, tier.missing_blocks, tier.evicted_blocks) == (1, 1, 1)
    assert tier.failed_blocks == 2


def test_the_time_until_a_request_is_decided_is_that_from_its_first_lookup(world):
    here = world(EXCLUSIVE)
    filled(here, 1)
    here.lookup(1)
    here.step()
    here.runner.advance(2.0)
    here.finish_all()
    here.step()
    assert here.lookup(1) is HIT
    assert read(here).planner.decision_seconds.count == 0, "the filler has asked nothing"
    here.load(1)
    here.finish("r")
    seconds = read(here).planner.decision_seconds
    assert (seconds.count, seconds.sum_s) == (1, 2.0)


def test_the_time_of_a_job_is_parted_in_queue_and_copy(world):
    here = world(EXCLUSIVE)
    here.store(1)
    here.step()
    here.runner.advance(3.0)
    here.finish_all()
    here.poll()
    (tier,) = read(here).tiers
    store = tier.store_seconds
    assert (store.total.sum_s, store.queue.sum_s, store.copy.sum_s) == (3.0, 0.0, 3.0)
    assert tier.load_seconds.total.count == 0


def test_a_job_that_never_began_has_neither_queue_nor_copy(world):
    here = world(EXCLUSIVE)
    here.store(1)
    here.secondaries[0].link.actor._closing = True
    here.step()
    here.poll()
    store = read(here).tiers[0].store_seconds
    assert (store.total.count, store.queue.count, store.copy.count) == (1, 0, 0)


def test_what_is_dropped_says_why(world):
    here = world(EXCLUSIVE, num_slots=4, copies_each=1, write_back="drop")
    here.store(1, 2, 3, 4)
    here.store(5)
    assert read(here).tiers[0].dropped == {"evicted": 1, "reset": 0, "closed": 0, "deleted": 0}
    here.manager.reset_cache_now()
    assert read(here).tiers[0].dropped == {"evicted": 1, "reset": 3, "closed": 0, "deleted": 0}
    here.manager.on_reset_flushed()
    here.finish_all()


def test_steps_and_hand_overs_are_measured(world):
    here = world(EXCLUSIVE)
    before = read(here).runtime
    here.store(1)
    here.rest()
    runtime = read(here).runtime
    assert runtime.step_seconds.count == before.step_seconds.count + 10
    assert runtime.loop_lag_seconds.count == runtime.wake_ups == before.wake_ups + 1
    assert runtime.python.count(".") == 2


def test_it_is_said_what_moves_payload(world, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_NATIVE", "")
    assert read(world(EXCLUSIVE)).runtime.block_io == implementation().name
    for without in ("0", "unclear"):
        monkeypatch.setenv("KVOFFLOAD_NATIVE", without)
        assert read(world(EXCLUSIVE)).runtime.block_io == "python"


def test_the_primary_tells_its_bytes(world):
    here = world(EXCLUSIVE, num_slots=4)
    here.store(1)
    primary = read(here).primary
    assert (primary.num_slots, primary.capacity_bytes, primary.used_bytes) == (4, 128, 32)


def test_a_primary_alone_counts_its_lookups():
    manager = CPUPrimaryTierOffloadingManager(2)
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    manager.prepare_store([k(1), k(2)], ctx)
    manager.complete_store([k(1)], ctx)
    assert [manager.lookup(k(number), ctx) for number in (1, 2, 3)] == [HIT, PENDING, MISS]
    primary = manager.stats().primary
    assert (primary.lookups, primary.hits, primary.pending_hits, primary.misses) == (3, 1, 1, 1)
    assert primary.capacity_bytes == 0, "there is no memory behind it"
