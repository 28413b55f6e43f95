import pytest
from core.terms import HIT, MISS, RETRY, job, k, ks

from kvoffload_async.abc.events import (
    BlocksAppeared,
    BlocksEvicted,
    JobOverdue,
    JobSettled,
    ProbeAnswered,
)
from kvoffload_async.core.effects import StartJob, StartProbe, TouchBlocks
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex, ProbedIndex
from kvoffload_async.core.port import TierPort
from kvoffload_async.errors import (
    BlockMissingError,
    IllegalTransitionError,
    StateError,
    TierClosedError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.types import Medium

LATE = TierTimeoutError("late")


def port_of(index=None):
    index = ExactIndex() if index is None else index
    return TierPort(index, 10, EventLog(Medium.STORAGE, enabled=True))


def running(*jobs, index=None):
    port = port_of(index)
    for each in jobs:
        port.submit(each)
    port.take_effects()
    return port


def answers(port, names):
    return [port.lookup(k(name), "r") for name in names]


def events(port):
    return [(sorted(event.keys), event.removed) for event in port.take_events()]


def test_a_submitted_job_is_handed_over_once():
    port = port_of()
    the_job = job(0)
    port.submit(the_job)
    assert port.has_effects
    assert port.take_effects() == [StartJob(the_job)]
    assert port.take_effects() == []
    assert port.has_pending_work


def test_a_job_of_unequal_lengths_is_not_accepted():
    port = port_of()
    with pytest.raises(StateError, match="2 keys but 1"):
        port.submit(job(0, "ab", slots=[0]))
    assert not port.has_pending_work


def test_loading_a_missing_key_gives_one_failed_result_42529():
    """42529: the load of a missing key gave no result; the job leaked and the request hung."""
    port = running(job(0, "a", promotion=True))
    port.handle(JobSettled(0, {0: BlockMissingError("a")}))
    (result,) = port.take_results()
    assert (result.success, result.successful_keys) == (False, frozenset())
    assert port.take_results() == []
    assert not port.has_pending_work


def test_an_empty_job_is_accepted_and_ends():
    port = running(job(0, ""))
    port.handle(JobSettled(0))
    assert [result.success for result in port.take_results()] == [True]


def test_a_duplicate_job_id_is_answered_and_not_started():
    port = running(job(0, "a"))
    port.submit(job(0, "b"))
    assert not port.has_effects
    assert [result.success for result in port.take_results()] == [False]
    assert port.has_pending_work


def test_a_job_reported_twice_is_a_defect_of_the_actor():
    port = running(job(0))
    port.handle(JobSettled(0))
    with pytest.raises(IllegalTransitionError):
        port.handle(JobSettled(0))


def test_a_store_makes_its_good_blocks_known():
    port = running(job(0, "ab"))
    port.handle(JobSettled(0, {1: TierUnavailableError("b")}))
    assert answers(port, "ab") == [HIT, MISS]
    assert events(port) == [(ks("a"), False)]


def test_a_store_that_failed_as_a_whole_makes_nothing_known():
    port = running(job(0, "a"))
    port.handle(JobSettled(0, job_error=TierUnavailableError("down")))
    assert answers(port, "a") == [MISS]
    assert events(port) == []


def test_a_load_forgets_what_is_gone_but_not_what_may_load_next_time():
    port = running(job(0, "ab", promotion=True))
    port.handle(BlocksAppeared(tuple(ks("ab"))))
    port.handle(JobSettled(0, {0: BlockMissingError("a"), 1: TierUnavailableError("b")}))
    assert answers(port, "ab") == [MISS, HIT]
    assert events(port) == [(ks("ab"), False), (ks("a"), True)]


@pytest.mark.parametrize(
    "event", [JobSettled(0, job_error=LATE), JobOverdue(0, LATE)], ids=["failed", "overdue"]
)
def test_a_failed_load_is_not_promoted_again_on_a_probed_tier_49328(event):
    port = running(job(0, "a", promotion=True), index=ProbedIndex(2))
    answers(port, "a")
    port.end_step()
    (probe,) = port.take_effects()
    port.handle(ProbeAnswered(probe.generation, frozenset(ks("a"))))
    assert answers(port, "a") == [HIT]
    port.handle(event)
    assert answers(port, "a") == [MISS]


def test_an_overdue_store_is_reported_at_once_and_known_when_it_lands():
    port = running(job(0, "a"))
    port.handle(JobOverdue(0, LATE))
    assert [result.disowned for result in port.take_results()] == [True]
    assert answers(port, "a") == [MISS]
    port.handle(JobSettled(0))
    assert port.take_released() == [0]
    assert port.take_results() == []
    assert answers(port, "a") == [HIT]


def test_blocks_that_the_tier_finds_and_drops_are_announced():
    port = port_of()
    port.handle(BlocksAppeared(tuple(ks("ab"))))
    port.handle(BlocksEvicted(tuple(ks("b"))))
    assert answers(port, "ab") == [HIT, MISS]
    assert events(port) == [(ks("ab"), False), (ks("b"), True)]


def test_a_step_posts_one_probe():
    port = port_of(ProbedIndex(4))
    assert answers(port, "ab") == [RETRY, RETRY]
    port.end_step()
    port.end_step()
    assert port.take_effects() == [StartProbe(1, tuple(ks("ab")))]


def test_touches_are_passed_on_unless_they_say_nothing():
    port = port_of()
    port.touch([])
    port.touch(ks("ab"))
    assert port.take_effects() == [TouchBlocks(tuple(ks("ab")))]


def test_closing_fails_queued_jobs_and_lets_running_ones_go_on():
    """The shutdown of the pool lost the results of queued jobs."""
    port = running(job(0))
    port.submit(job(1))
    port.close()
    assert not port.has_effects
    (result,) = port.take_results()
    assert (result.job_id, result.disowned) == (1, False)
    assert isinstance(result.error, TierClosedError)
    port.handle(JobSettled(0))
    assert [(r.job_id, r.success) for r in port.take_results()] == [(0, True)]


def test_a_job_after_the_shutdown_is_answered_at_once():
    port = port_of()
    port.close()
    port.submit(job(0))
    port.touch(ks("a"))
    assert not port.has_effects
    assert [result.success for result in port.take_results()] == [False]


def test_a_closed_port_waits_for_no_probe():
    """Its probe may never have been started, so that a drain would wait for ever."""
    port = port_of(ProbedIndex(4))
    answers(port, "a")
    port.end_step()
    answers(port, "b")
    assert port.has_pending_work
    port.close()
    port.end_step()
    assert not port.has_effects
    assert not port.has_pending_work


def test_abandoning_the_rest_reports_every_job_once_and_names_running_copies():
    port = running(job(0), job(1))
    port.submit(job(2))
    port.touch(ks("a"))
    port.handle(JobSettled(1))
    assert port.abandon_rest() == [0]
    results = {r.job_id: (r.success, r.disowned) for r in port.take_results()}
    assert results == {0: (False, True), 1: (True, False), 2: (False, False)}
    assert port.take_effects() == [TouchBlocks(tuple(ks("a")))]
    assert port.abandon_rest() == [0]
    assert port.take_results() == []
