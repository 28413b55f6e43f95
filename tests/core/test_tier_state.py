import pytest
from core.terms import HIT, MISS, RETRY, figures_of, job, k, ks, released, results

from kvoffload_async.abc.events import (
    AnnouncementRefused,
    BlocksAppeared,
    BlocksEvicted,
    JobFinished,
    JobOverdue,
    ProbeAnswered,
)
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex, ProbedIndex
from kvoffload_async.core.ledger import StartJob, StartProbe, TouchBlocks
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    StateError,
    TierClosedError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.types import Medium, ReqContext

LATE = TierTimeoutError("late")


def tier_of(index=None):
    index = ExactIndex() if index is None else index
    return TierState("tier", index, 10, EventLog(Medium.STORAGE, enabled=True))


def running(*jobs, index=None):
    tier = tier_of(index)
    for each in jobs:
        tier.submit(each)
    tier.take_effects()
    return tier


def answers(tier, names):
    return tier.lookup_many(ks(names), ReqContext("r"), stop_at_miss=False)


def events(tier):
    return [(sorted(event.keys), event.removed) for event in tier.take_events()]


def test_a_submitted_job_is_handed_over_once():
    tier = tier_of()
    the_job = job(0)
    tier.submit(the_job)
    assert tier.effects
    assert tier.take_effects() == [StartJob(the_job)]
    assert tier.take_effects() == []
    assert tier.has_pending_work


def test_a_job_of_unequal_lengths_is_not_accepted():
    tier = tier_of()
    with pytest.raises(StateError, match="2 keys but 1"):
        tier.submit(job(0, "ab", slots=[0]))
    assert not tier.has_pending_work


def test_a_duplicate_job_id_is_answered_and_not_started():
    tier = running(job(0, "a"))
    tier.submit(job(0, "b"))
    assert not tier.effects
    assert [result.success for result in results(tier)] == [False]
    assert tier.has_pending_work


def test_a_store_makes_its_good_blocks_known():
    tier = running(job(0, "ab"))
    tier.handle(JobFinished(0, {1: TierUnavailableError("b")}))
    assert answers(tier, "ab") == [HIT, MISS]
    assert events(tier) == [(ks("a"), False)]


def test_a_store_that_failed_as_a_whole_makes_nothing_known():
    tier = running(job(0, "a"))
    tier.handle(JobFinished(0, job_error=TierUnavailableError("down")))
    assert answers(tier, "a") == [MISS]
    assert events(tier) == []


def test_a_load_forgets_what_is_gone_but_not_what_may_load_next_time():
    tier = running(job(0, "ab", promotion=True))
    tier.handle(BlocksAppeared(tuple(ks("ab"))))
    tier.handle(JobFinished(0, {0: BlockMissingError("a"), 1: TierUnavailableError("b")}))
    assert answers(tier, "ab") == [MISS, HIT]
    assert events(tier) == [(ks("ab"), False), (ks("a"), True)]


@pytest.mark.parametrize(
    "event", [JobFinished(0, job_error=LATE), JobOverdue(0, LATE)], ids=["failed", "overdue"]
)
def test_a_failed_load_is_not_promoted_again_on_a_probed_tier_49328(event):
    tier = running(job(0, "a", promotion=True), index=ProbedIndex(2))
    answers(tier, "a")
    tier.end_step()
    (probe,) = tier.take_effects()
    tier.handle(ProbeAnswered(probe.generation, frozenset(ks("a"))))
    assert answers(tier, "a") == [HIT]
    tier.handle(event)
    assert answers(tier, "a") == [MISS]


def test_an_overdue_store_is_reported_at_once_and_known_when_it_lands():
    tier = running(job(0, "a"))
    tier.handle(JobOverdue(0, LATE))
    assert [result.orphaned for result in results(tier)] == [True]
    assert answers(tier, "a") == [MISS]
    tier.handle(JobFinished(0))
    assert released(tier) == [0]
    assert results(tier) == []
    assert answers(tier, "a") == [HIT]


def test_blocks_that_the_tier_finds_and_drops_are_announced():
    tier = tier_of()
    tier.handle(BlocksAppeared(tuple(ks("ab"))))
    tier.handle(BlocksEvicted(tuple(ks("b"))))
    assert answers(tier, "ab") == [HIT, MISS]
    assert events(tier) == [(ks("ab"), False), (ks("b"), True)]


def test_a_step_posts_one_probe():
    tier = tier_of(ProbedIndex(4))
    assert answers(tier, "ab") == [RETRY, RETRY]
    tier.end_step()
    tier.end_step()
    assert tier.take_effects() == [StartProbe(1, tuple(ks("ab")))]


def test_touches_are_passed_on_unless_they_say_nothing():
    tier = tier_of()
    tier.touch([])
    tier.touch(ks("ab"))
    assert tier.take_effects() == [TouchBlocks(tuple(ks("ab")))]


def test_closing_fails_queued_jobs_and_lets_running_ones_go_on():
    """The shutdown of the pool lost the results of queued jobs."""
    tier = running(job(0))
    tier.submit(job(1))
    tier.close()
    assert not tier.effects
    (result,) = results(tier)
    assert (result.job_id, result.orphaned) == (1, False)
    assert isinstance(result.error, TierClosedError)
    tier.handle(JobFinished(0))
    assert [(r.job_id, r.success) for r in results(tier)] == [(0, True)]


def test_a_job_after_the_shutdown_is_answered_at_once():
    tier = tier_of()
    tier.close()
    tier.submit(job(0))
    tier.touch(ks("a"))
    assert not tier.effects
    assert [result.success for result in results(tier)] == [False]


def test_a_closed_tier_waits_for_no_probe():
    """Its probe may never have been started, so that a drain would wait for ever."""
    tier = tier_of(ProbedIndex(4))
    answers(tier, "a")
    tier.end_step()
    answers(tier, "b")
    assert tier.has_pending_work
    tier.close()
    tier.end_step()
    assert not tier.effects
    assert not tier.has_pending_work


def test_abandoning_the_rest_reports_every_job_once_and_names_running_copies():
    tier = running(job(0), job(1))
    tier.submit(job(2))
    tier.touch(ks("a"))
    tier.handle(JobFinished(1))
    assert tier.abandon_rest() == [0]
    reported = {r.job_id: (r.success, r.orphaned) for r in results(tier)}
    assert reported == {0: (False, True), 1: (True, False), 2: (False, False)}
    assert tier.take_effects() == [TouchBlocks(tuple(ks("a")))]
    assert tier.abandon_rest() == [0]
    assert results(tier) == []


def test_what_a_load_missed_and_was_stored_since_stays_known():
    tier = running(job(0, "ab", promotion=True))
    tier.handle(JobOverdue(0, LATE))
    tier.handle(BlocksAppeared(tuple(ks("b"))))
    tier.submit(job(1, "a"))
    tier.take_effects()
    tier.handle(JobFinished(1))
    gone = {0: BlockMissingError("a"), 1: BlockMissingError("b")}
    tier.handle(JobFinished(0, gone, outdated=frozenset(ks("a"))))
    assert answers(tier, "ab") == [HIT, MISS]
    assert events(tier) == [([k("b")], False), ([k("a")], False), ([k("b")], True)]


def test_what_went_while_it_was_stored_is_not_known():
    tier = running(job(0, "ab"))
    tier.handle(BlocksEvicted(tuple(ks("a"))))
    tier.handle(JobFinished(0, outdated=frozenset(ks("a"))))
    assert answers(tier, "ab") == [MISS, HIT]


def test_refused_announcements_are_counted():
    tier = tier_of()
    tier.handle(AnnouncementRefused(3))
    tier.handle(AnnouncementRefused(1))
    assert tier.counters.refused_keys == 4


def test_what_jobs_met_and_how_long_they_took_is_counted():
    tier = running(job(0, "abc", promotion=True), job(1, "d"))
    bad = {0: BlockMissingError("a"), 1: CorruptBlockError("b"), 2: TierUnavailableError("c")}
    tier.handle(JobFinished(0, bad, seconds=3.0, queue_s=1.0))
    tier.handle(JobFinished(1, seconds=2.0))
    read = figures_of(tier)
    assert (read.missing_blocks, read.corrupt_blocks) == (1, 1)
    loads, stores = read.load_seconds, read.store_seconds
    assert [(part.count, part.sum_s) for part in (loads.total, loads.queue, loads.copy)] == [
        (1, 3.0),
        (1, 1.0),
        (1, 2.0),
    ]
    assert [part.count for part in (stores.total, stores.queue, stores.copy)] == [1, 0, 0]


def test_a_job_counts_as_finished_when_its_result_exists_whoever_takes_it():
    tier = running(job(0), job(1))
    tier.handle(JobFinished(0))
    tier.handle(JobOverdue(1, LATE))
    read = figures_of(tier)
    assert (read.submitted_jobs, read.finished_jobs, read.jobs_in_flight) == (2, 2, 0)
    assert read.failed_jobs == 1
    assert len(results(tier)) == 2
    assert figures_of(tier) == read
    assert tier.health.loads.is_closed, "without a planner, no breaker is consulted"


def test_the_blocks_of_a_job_count_until_its_copy_has_ended_with_and_without_a_planner():
    tier = running(job(0, "abc"), job(1, "de", promotion=True), job(2, "f", promotion=True))
    tier.submit(job(1, "g"))
    assert (tier.cascading_blocks, tier.promotion_slots) == (3, 3), "the id of `g` is in use"
    tier.handle(JobFinished(0))
    tier.handle(JobOverdue(1, LATE))
    assert (tier.cascading_blocks, tier.promotion_slots) == (0, 3), "a late copy goes on"
    tier.handle(JobFinished(1))
    tier.abandon_rest()
    assert (tier.cascading_blocks, tier.promotion_slots) == (0, 1)
    tier.handle(JobFinished(2))
    assert (tier.cascading_blocks, tier.promotion_slots) == (0, 0)
