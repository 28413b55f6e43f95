"""A tier that is asked for every key: the planner in front of it."""

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, k, ks
from core.world import World, stored_below
from planner_invariants import BlocksTouched, FinishRequest, RequestClosed, RequestOpened

from kvoffload_async.core.ledger import StartJob
from kvoffload_async.types import ENGINE_REQ_ID, LookupResult

FOREIGN = {"kinds": {0: "external", 1: "external"}}


def test_a_block_in_a_third_partys_tier_is_promoted_and_what_is_stored_cascades():
    world, ctx = stored_below(**FOREIGN)
    assert [world.lookup(ctx, name) for name in "abx"] == [PENDING, PENDING, MISS]
    world.step()
    world.finish_job(failed={1})
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, MISS]
    world.load(ctx, "a")
    world.store(ctx, "x")
    world.finish_job()
    assert world.tiers[0].contents.keys() == set(ks("abx"))
    world.wind_down()


def test_a_third_partys_tier_that_does_not_know_does_not_stop_the_search():
    world, ctx = stored_below(tiers=2, names="a", **FOREIGN)
    world.tiers[0].is_probing = True
    assert [world.lookup(ctx, name) for name in "ax"] == [PENDING, RETRY]
    world.wind_down()


@pytest.mark.parametrize("stray", [PENDING, RETRY])
def test_a_stray_pending_hit_of_a_tier_is_a_retry_46363(stray):
    """46363: None meant both "unknown" and "on its way"."""
    world = World(**FOREIGN)
    world.tiers[0].stray = stray
    assert world.lookup(world.begin(), "a") is RETRY
    assert LookupResult.RETRY is not LookupResult.HIT_PENDING
    world.wind_down()


def test_its_manager_hears_of_the_end_of_a_request_behind_the_last_job():
    world, ctx = stored_below(names="a", **FOREIGN)
    world.lookup(ctx, "a")
    world.planner.end_step()
    world.planner.on_request_finished(world.live.pop("r"))
    effects = world.planner.tiers[0].effects
    assert [type(effect) for effect in effects] == [StartJob, FinishRequest]
    world._absorb()
    world.wind_down()


def test_a_tier_with_a_say_in_its_jobs_is_told_within_the_engines_own_request():
    world = World(8, **FOREIGN)
    world.store(world.begin("w"), "ab")
    world.finish_job()
    reader = world.begin("r")
    world.load(reader, "ab")
    world.loaded()
    world.finish(reader)
    world.step()
    assert world.touched == [(0, tuple(ks("ab")))]
    world.wind_down()
    told = [
        (type(fact), fact.req_id)
        for fact in world.history
        if isinstance(fact, RequestOpened | RequestClosed | BlocksTouched)
    ]
    assert [kind for kind, req_id in told if req_id == ENGINE_REQ_ID] == [
        RequestOpened,
        BlocksTouched,
        RequestClosed,
    ]


def test_blocks_that_an_error_of_the_managers_own_has_hit_are_stored_later():
    world = World(8, **FOREIGN)
    world.store(world.begin(), "abc")
    world.finish_job(failed={1, 2}, error=OSError(5, "io"))
    world.step()
    world.end_step()
    world.finish_job()
    assert world.tiers[0].contents.keys() == set(ks("abc"))
    world.wind_down()


def test_what_it_may_lack_is_neither_offered_to_it_nor_taken_to_have_landed():
    world, ctx = stored_below(tiers=2, names="a", kinds={0: "external"})
    world.lookup(ctx, "a")
    world.step()
    world.finish_job()
    queue = world.planner.cascades.queues[0]
    assert list(queue.slots()) == []
    world.store(ctx, "b")
    world.orphan()
    world.release()
    assert world.primary.keys_of(tuple(queue.slots())) == [k("b")]
    world.wind_down()
