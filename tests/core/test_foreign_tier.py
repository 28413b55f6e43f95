"""The state of a tier whose manager keeps its say."""

from dataclasses import replace

import pytest
from core.terms import MISS, job, released, results

from kvoffload_async.core.foreign_tier import ForeignTierState
from kvoffload_async.core.ledger import refused
from kvoffload_async.errors import IllegalTransitionError, StateError, TierUnavailableError
from kvoffload_async.types import JobResult

DOWN = TierUnavailableError("down")


class Silent:
    def lookup(self, key, req_context):
        return MISS


def running(*job_ids):
    tier = ForeignTierState("tier", Silent())
    for job_id in job_ids:
        tier.submit(job(job_id))
    tier.take_effects()
    return tier


def test_a_job_that_the_tier_cannot_answer_fails():
    tier = running(0)
    tier.fail(0, DOWN)
    (result,) = results(tier)
    assert (result.success, result.error, result.disowned) == (False, DOWN, False)
    with pytest.raises(IllegalTransitionError):
        tier.fail(0, DOWN)


@pytest.mark.parametrize("late", [JobResult(0, success=True), refused(job(0), DOWN)])
def test_a_late_result_of_a_job_that_was_given_up_says_that_its_copy_has_ended(late):
    tier = running(0)
    assert tier.abandon_rest() == [0]
    assert [result.disowned for result in results(tier)] == [True]
    tier.answer(late)
    assert released(tier) == [0]
    with pytest.raises(StateError, match="not its job"):
        tier.answer(late)


def test_a_job_that_was_given_up_by_both_is_released_once():
    tier = running(0)
    tier.abandon_rest()
    tier.answer(JobResult(0, success=False, disowned=True))
    assert released(tier) == []
    tier.release(0)
    assert released(tier) == [0]
    with pytest.raises(StateError, match="not its job"):
        tier.answer(JobResult(0, success=False, disowned=True))


def test_only_jobs_that_are_old_enough_and_under_way_are_given_up():
    tier = ForeignTierState("tier", Silent())
    for job_id, submitted_s in enumerate([1.0, 2.0, 2.5]):
        tier.submit(replace(job(job_id), submit_time=submitted_s))
        if job_id != 1:
            continue
        tier.take_effects()
    tier.fail(0, DOWN)
    (error,) = tier.give_up(2.5, 30.0)
    assert "job 1" in str(error)
    failed, late = results(tier)
    assert (failed.error, failed.disowned) == (DOWN, False)
    assert (late.error, late.disowned) == (error, True)
    assert tier.give_up(2.5, 30.0) == []
    tier.take_effects()
    assert tier.give_up(2.0, 30.0) == [], "it is younger than that"
    assert len(tier.give_up(2.5, 30.0)) == 1


def test_a_second_result_of_a_job_that_the_tier_disowned_does_not_release_it():
    tier = running(0)
    tier.answer(JobResult(0, success=False, disowned=True))
    with pytest.raises(StateError, match="not its job"):
        tier.answer(JobResult(0, success=True))
    assert released(tier) == []
