import itertools

import pytest

from kvoffload_async.core import health as module
from kvoffload_async.core.health import Breaker, BreakerEvent, BreakerSettings, BreakerState

TRIED, WORKED, FAULTED = BreakerEvent.TRIED, BreakerEvent.WORKED, BreakerEvent.FAULTED
UNDECIDED = BreakerEvent.UNDECIDED


def breaker_after(*events, threshold=2, now_s=0.0):
    breaker = Breaker(BreakerSettings(threshold, retry_after_s=5.0))
    for event in events:
        breaker.note(event, now_s)
    return breaker


def test_the_table_is_total():
    assert set(module._NEXT) == set(itertools.product(BreakerState, BreakerEvent))


def test_faults_in_a_row_open_it():
    breaker = breaker_after(FAULTED)
    assert breaker.permits(0.0)
    breaker.note(FAULTED, 1.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.permits(5.9)


def test_a_success_between_faults_starts_the_count_anew():
    assert breaker_after(FAULTED, WORKED, FAULTED).state is BreakerState.CLOSED


def test_after_a_wait_one_job_is_tried():
    breaker = breaker_after(FAULTED, FAULTED)
    assert breaker.permits(5.0)
    breaker.note(TRIED, 5.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.permits(100.0)


@pytest.mark.parametrize(
    ("outcome", "state", "permitted"),
    [(WORKED, BreakerState.CLOSED, True), (FAULTED, BreakerState.OPEN, False)],
)
def test_the_tried_job_decides(outcome, state, permitted):
    breaker = breaker_after(FAULTED, FAULTED, TRIED, outcome)
    assert breaker.state is state
    assert breaker.permits(0.0) is permitted


def test_a_try_that_tells_nothing_is_repeated_at_once():
    breaker = breaker_after(FAULTED, FAULTED)
    breaker.note(TRIED, 5.0)
    breaker.note(UNDECIDED, 5.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.permits(5.0)


@pytest.mark.parametrize("outcome", [WORKED, FAULTED, UNDECIDED])
def test_once_one_is_tried_no_older_job_decides(outcome):
    breaker = breaker_after(FAULTED, FAULTED)
    breaker.note(TRIED, 5.0)
    breaker.note(outcome, 6.0, begun_s=4.9)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.note(WORKED, 6.0, begun_s=5.0)
    assert breaker.is_closed


def test_it_remembers_since_when_and_why_it_is_open():
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("drawn")

    breaker = breaker_after(FAULTED)
    breaker.note(FAULTED, 3.0, error=OSError(5, "io"))
    breaker.note(FAULTED, 4.0, error=OSError(6, "later"))
    assert (breaker.opened_at_s, breaker.reason) == (3.0, "OSError: [Errno 5] io")
    breaker = breaker_after(threshold=1)
    breaker.note(FAULTED, 0.0, error=Unspeakable())
    assert "Unspeakable" in breaker.reason


def test_good_news_from_before_it_opened_is_believed():
    breaker = breaker_after(FAULTED, FAULTED, WORKED)
    assert breaker.state is BreakerState.CLOSED
    breaker.note(FAULTED, 0.0)
    assert breaker.state is BreakerState.CLOSED
