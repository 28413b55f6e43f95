"""The actor that runs a tier: probes, opening, and the ordered close."""

import asyncio

import pytest
from scripted_tier import ScriptedTier
from tiers.actors import PROBE_TIMEOUT_S, World

from kvoffload_async.abc.events import ProbeAnswered as Answered
from kvoffload_async.errors import (
    ConfigError,
    TierClosedError,
    TierTimeoutError,
)
from kvoffload_async.testing.harness import key_of, make_job

# -- probes -------------------------------------------------------------------------------------


def test_a_probe_is_answered_once(worlds):
    world = worlds()
    world.start(0)
    world.finish_job()
    world.events.clear()
    world.probe(5, [1, 2])
    world.finish_job()
    world.runner.advance(100)
    assert world.events == [Answered(5, frozenset({key_of(1)}))]


def test_a_hung_probe_is_answered_as_absent_at_its_deadline_and_not_again(worlds):
    world = worlds()
    world.start(0)
    world.finish_job()
    world.events.clear()
    world.probe(5)
    world.runner.advance(PROBE_TIMEOUT_S)
    assert world.events == [Answered(5, frozenset())]
    world.finish_job()
    assert len(world.events) == 1


@pytest.mark.parametrize("error", [OSError("io"), SystemExit(1), asyncio.CancelledError()])
def test_a_probe_that_fails_is_answered_as_absent(worlds, error, caplog):
    world = worlds()
    world.probe(5)
    world.finish_job(0, error=error)
    assert world.events == [Answered(5, frozenset())]
    assert "probe 5" in caplog.text


def test_a_probe_whose_answer_breaks_the_contract_counts_as_absent(worlds, caplog):
    world = worlds()

    async def contains(keys):
        return None

    world.tier.contains = contains
    world.probe(5)
    assert world.events == [Answered(5, frozenset())]
    assert "returned None" in caplog.text


def test_a_probe_after_close_is_answered_as_absent_at_once(worlds):
    world = worlds()
    world.close()
    world.probe(5)
    assert world.events == [Answered(5, frozenset())]


# -- opening and closing ------------------------------------------------------------------------


def test_a_tier_that_fails_to_open_is_closed_and_the_error_goes_on():
    tier = ScriptedTier(open_error=ConfigError("root_dir: is a file"))
    world = World(tier)
    with pytest.raises(ConfigError, match="root_dir"):
        world.open()
    assert tier.close_count == 1
    world.runner.close()


def test_a_failing_close_after_a_failed_open_does_not_hide_the_first_error(caplog):
    tier = ScriptedTier(open_error=ConfigError("first"), close_error=OSError("second"))
    world = World(tier)
    with pytest.raises(ConfigError, match="first"):
        world.open()
    assert "second" in caplog.text
    world.runner.close()


def test_close_lets_running_jobs_end_and_then_closes_the_tier(worlds):
    world = worlds()
    world.start(0)
    world.runner.loop.call_later(0.5, lambda: world.tier.finish(world.tier.parked[0]))
    report = world.close(1.0)
    assert report.is_clean
    assert world.finished()[0].job_error is None
    assert world.tier.close_count == 1


def test_close_fails_what_waits_first(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.start(1)
    world.runner.loop.call_later(0.5, lambda: world.tier.finish(world.tier.parked[0]))
    world.close(1.0)
    assert [e.job_id for e in world.events] == [1, 0]
    assert isinstance(world.finished()[1].job_error, TierClosedError)


def test_a_job_or_probe_that_comes_while_closing_is_answered_at_once(worlds):
    world = worlds()
    world.start(0)
    job = make_job(1, [key_of(1)], [0], is_promotion=False)
    world.runner.loop.call_later(0.2, world.actor.start_job, job)
    world.runner.loop.call_later(0.3, lambda: world.tier.finish(world.tier.parked[0]))
    world.close(1.0)
    assert [e.job_id for e in world.events] == [1, 0]
    assert isinstance(world.finished()[1].job_error, TierClosedError)


def test_close_cancels_what_does_not_end_and_waits_for_it_a_little(worlds):
    world = worlds()

    async def store(job):
        await asyncio.sleep(3600)

    world.tier.store = store
    world.start(0)
    report = world.close(1.0)
    assert report.is_clean
    assert isinstance(world.finished()[0].job_error, TierClosedError)


def test_what_close_cancels_ends_in_the_order_in_which_it_began(worlds):
    world = worlds(concurrent_stores=20)

    async def store(job):
        await asyncio.sleep(3600)

    world.tier.store = store
    for job_id in range(20):
        world.start(job_id)
    assert world.close(1.0).is_clean
    assert list(world.finished()) == list(range(20))


def test_close_names_the_jobs_whose_copies_still_run_and_leaves_the_tier_open(worlds):
    world = worlds()
    world.start(3)
    world.start(4, is_promotion=True)
    report = world.close(1.0)
    assert set(report.unfinished_jobs) == {3, 4}
    assert isinstance(report.error, TierTimeoutError)
    assert world.tier.close_count == 0, "it is not closed under its copies"
    world.finish_job()
    world.finish_job()
    assert set(world.finished()) == {3, 4}, "a late end is still reported"


def test_close_waits_for_probes_too_and_says_when_one_hangs(worlds):
    world = worlds()
    world.probe(1)
    report = world.close(1.0)
    assert not report.unfinished_jobs
    assert isinstance(report.error, TierTimeoutError)


def test_close_is_bounded_when_the_tiers_own_close_hangs(worlds):
    world = worlds(ScriptedTier(parks_close=True))
    report = world.close(1.0)
    assert isinstance(report.error, TierTimeoutError)
    assert world.runner.now_s() == pytest.approx(1.0)


def test_jobs_that_end_late_and_a_hanging_close_share_one_deadline(worlds):
    world = worlds(ScriptedTier(parks_close=True))
    world.start(1)
    world.runner.loop.call_later(0.9, lambda: world.tier.finish(world.tier.parked[0]))
    report = world.close(1.0)
    assert not report.unfinished_jobs
    assert isinstance(report.error, TierTimeoutError)
    assert 1.0 <= world.runner.now_s() <= 1.2  # what is left of the second, or a moment


def test_a_failing_close_is_reported_and_not_raised(worlds):
    error = OSError("no")
    assert worlds(ScriptedTier(close_error=error)).close().error is error
    assert worlds(ScriptedTier(close_error=SystemExit(1))).close().error is not None
