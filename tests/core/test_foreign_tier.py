"""The state of a tier whose manager keeps its say."""

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
    with pytest.raises(StateError, match="not its job"):
        tier.answer(JobResult(0, success=False, disowned=True))
    tier.release(0)
    assert released(tier) == [0]


def test_a_second_result_of_a_job_that_the_tier_disowned_does_not_release_it():
    tier = running(0)
    tier.answer(JobResult(0, success=False, disowned=True))
    with pytest.raises(StateError, match="not its job"):
        tier.answer(JobResult(0, success=True))
    assert released(tier) == []
