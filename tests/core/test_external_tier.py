"""A tier whose manager keeps its say: its state, and the planner in front of it."""

from dataclasses import replace

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, job, k, ks, released, results
from core.tiers import ExternalTier
from core.world import World, stored_below
from planner_invariants import BlocksTouched, RequestClosed, RequestOpened

from kvoffload_async.core.ledger import FinishRequest, StartJob, refused
from kvoffload_async.errors import IllegalTransitionError, StateError, TierUnavailableError
from kvoffload_async.types import ENGINE_REQ_ID, JobResult, LookupResult

DOWN = TierUnavailableError("down")
FOREIGN = {"kinds": {0: "external", 1: "external"}}


def running(*job_ids):
    tier = ExternalTier("tier").state
    for job_id in job_ids:
        tier.submit(job(job_id))
    tier.take_effects()
    return tier


def test_a_job_that_the_tier_cannot_answer_fails():
    tier = running(0)
    tier.fail(0, DOWN)
    (result,) = results(tier)
    assert (result.success, result.error, result.orphaned) == (False, DOWN, False)
    with pytest.raises(IllegalTransitionError):
        tier.fail(0, DOWN)


@pytest.mark.parametrize("late", [JobResult(0, success=True), refused(job(0), DOWN)])
def test_a_late_result_of_a_job_that_was_given_up_says_that_its_copy_has_ended(late):
    tier = running(0)
    assert tier.abandon_rest() == [0]
    assert [result.orphaned for result in results(tier)] == [True]
    tier.answer(late)
    assert released(tier) == [0]
    with pytest.raises(StateError, match="not its job"):
        tier.answer(late)


def test_a_job_that_was_given_up_by_both_is_released_once():
    tier = running(0)
    tier.abandon_rest()
    tier.answer(JobResult(0, success=False, orphaned=True))
    assert released(tier) == []
    tier.release(0)
    assert released(tier) == [0]
    with pytest.raises(StateError, match="not its job"):
        tier.answer(JobResult(0, success=False, orphaned=True))


def test_only_jobs_that_are_old_enough_and_under_way_are_given_up():
    tier = ExternalTier("tier").state
    for job_id, submitted_s in enumerate([1.0, 2.0, 2.5]):
        tier.submit(replace(job(job_id), submit_time=submitted_s))
        if job_id != 1:
            continue
        tier.take_effects()
    tier.fail(0, DOWN)
    (error,) = tier.give_up(2.5, 30.0)
    assert "job 1" in str(error)
    failed, late = results(tier)
    assert (failed.error, failed.orphaned) == (DOWN, False)
    assert (late.error, late.orphaned) == (error, True)
    assert tier.give_up(2.5, 30.0) == []
    tier.take_effects()
    assert tier.give_up(2.0, 30.0) == [], "it is younger than that"
    assert len(tier.give_up(2.5, 30.0)) == 1


def test_a_second_result_of_a_job_that_the_tier_orphaned_does_not_release_it():
    tier = running(0)
    tier.answer(JobResult(0, success=False, orphaned=True))
    with pytest.raises(StateError, match="not its job"):
        tier.answer(JobResult(0, success=True))
    assert released(tier) == []


def test_a_third_partys_tier_has_nothing_to_measure():
    tier = ExternalTier("theirs").state
    assert tier.cost_gated is None
    assert tier.knowledge is None


# -- the planner in front of it -----------------------------------------------------------------


def test_a_block_in_a_third_partys_tier_is_promoted_and_what_is_stored_cascades():
    world, ctx = stored_below(**FOREIGN)
    assert [world.lookup(ctx, name) for name in "abx"] == [PENDING, PENDING, MISS]
    world.step()
    world.settle(failed={1})
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, MISS]
    world.load(ctx, "a")
    world.store(ctx, "x")
    world.settle()
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
    world.finish(ctx)
    world.planner.end_step()
    effects = world.planner.tiers[0].effects
    assert [type(effect) for effect in effects] == [StartJob, FinishRequest]
    world._absorb()
    world.wind_down()


def test_a_tier_with_a_say_in_its_jobs_is_told_within_the_engines_own_request():
    world = World(8, **FOREIGN)
    world.store(world.begin("w"), "ab")
    world.settle()
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


def test_a_job_reported_twice_or_by_the_wrong_manager_is_a_defect():
    world = World(tiers=2, **FOREIGN)
    world.store(world.begin(), "a")
    with pytest.raises(StateError, match="'tier1' reported job 0"):
        world.planner.tiers[1].answer(JobResult(0, success=True))
    world.planner.tiers[0].answer(JobResult(0, success=True))
    with pytest.raises(StateError, match="'tier0' reported job 0"):
        world.planner.tiers[0].answer(JobResult(0, success=True))


def test_only_an_orphaned_job_is_released_and_only_by_its_manager():
    world = World(tiers=2, **FOREIGN)
    world.store(world.begin(), "a")
    with pytest.raises(StateError, match="'tier0' released job 0"):
        world.planner.tiers[0].release(0)
    world.orphan(0)
    with pytest.raises(StateError, match="'tier1' released job 0"):
        world.planner.tiers[1].release(0)
    world.release(0)
    with pytest.raises(StateError, match="'tier0' released job 0"):
        world.planner.tiers[0].release(0)
    world.wind_down()


def test_nothing_has_landed_while_the_copy_still_runs_whatever_the_tier_says():
    world, ctx = stored_below(names="ab", **FOREIGN)
    [world.lookup(ctx, name) for name in "ab"]
    world.step()
    world.orphan(0, landed=frozenset(ks("a")))
    world.check()
    assert world.primary.counts["held"] == 2
    world.release()
    world.wind_down()


def test_blocks_that_an_error_of_the_managers_own_has_hit_are_stored_later():
    world = World(8, **FOREIGN)
    world.store(world.begin(), "abc")
    world.settle(failed={1, 2}, error=OSError(5, "io"))
    world.step()
    world.end_step()
    world.settle()
    assert world.tiers[0].contents.keys() == set(ks("abc"))
    world.wind_down()


def test_what_it_may_lack_is_neither_offered_to_it_nor_taken_to_have_landed():
    world, ctx = stored_below(tiers=2, names="a", kinds={0: "external"})
    world.lookup(ctx, "a")
    world.step()
    world.settle()
    queue = world.planner.cascades.queues[0]
    assert list(queue.slots()) == []
    world.store(ctx, "b")
    world.orphan()
    world.release()
    assert world.primary.keys_of(tuple(queue.slots())) == [k("b")]
    world.wind_down()
