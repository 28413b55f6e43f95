"""What a tier's manager raises is logged, answered for, and counted where it is a fault."""

import pytest
from facade.worlds import MISS, k, ks

from kvoffload_async.core.breaker import BreakerSettings, BreakerState
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.facade.guard import TierGuard
from kvoffload_async.types import Medium, ReqContext

CTX = ReqContext("r")


CALLS = {
    "on_new_request": (lambda guard: guard.wants_whole_requests(CTX), False, ""),
    "lookup": (lambda guard: guard.lookup(k(1), CTX), MISS, "loads"),
    "touch": (lambda guard: guard.touch(ks(1), CTX), None, ""),
    "on_request_finished": (lambda guard: guard.finish_request(CTX), None, ""),
    "get_finished_jobs": (lambda guard: list(guard.finished_jobs()), [], "loads stores"),
    "get_released_jobs": (lambda guard: list(guard.released_jobs()), [], "loads stores"),
    "on_schedule_end": (lambda guard: guard.end_step(None), None, "loads stores"),
    "take_events": (lambda guard: list(guard.take_events()), [], ""),
    "has_pending_work": (lambda guard: guard.has_pending_work(), False, ""),
    "drain_jobs": (lambda guard: guard.drain_jobs(1.0), None, "loads stores"),
    "abandon_jobs": (lambda guard: guard.abandon_jobs(), None, "loads stores"),
}
"""Method -> how it is called, what is answered when it raises, and which breakers open."""


class RaisingManager:
    """Raises out of every method."""

    def __getattr__(self, name):
        def fail(*_arguments):
            raise ValueError("third-party code")

        return fail


@pytest.fixture
def state():
    log = EventLog(Medium.STORAGE, enabled=False)
    return TierState("disk", ExactIndex(), 1, log, breaker=BreakerSettings(1))


@pytest.fixture
def guard(state):
    return TierGuard(RaisingManager(), state, lambda: 0.0)


@pytest.mark.parametrize("method", CALLS)
def test_what_a_method_raises_is_logged_and_counts_if_it_tells_of_jobs_or_blocks(
    guard, state, caplog, method
):
    call, answer, open_breakers = CALLS[method]
    assert call(guard) == answer
    assert f"tier disk: {method} failed: Traceback" in caplog.text
    assert "third-party code" in caplog.text
    breakers = {"loads": state.health.loads, "stores": state.health.stores}
    found = [name for name, breaker in breakers.items() if breaker.state is BreakerState.OPEN]
    assert found == open_breakers.split()


def test_jobs_that_cannot_be_drained_are_given_up(guard, caplog):
    guard.drain_jobs(1.0)
    assert "abandon_jobs failed" in caplog.text


def test_events_that_are_none_are_logged_and_the_others_taken(state, caplog):
    class Manager:
        def take_events(self):
            return iter([1])

    assert not list(TierGuard(Manager(), state, lambda: 0.0).take_events())
    assert "take_events failed" in caplog.text
    assert "broke its contract with a int" in caplog.text
