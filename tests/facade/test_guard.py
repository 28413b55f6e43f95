"""What a tier's manager raises is logged, answered for, and counted where it is a fault."""

from types import SimpleNamespace

import pytest
from facade.worlds import MISS, k, ks

from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.health import BreakerSettings, BreakerState
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.facade.external import TierGuard
from kvoffload_async.types import Medium, OffloadPolicy, ReqContext, RequestOffloadingContext

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


def guarding(state, **methods):
    return TierGuard(SimpleNamespace(**methods), state, lambda: 0.0)


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_whole_requests_are_what_a_manager_asks_for_alone(state, policy):
    guard = guarding(state, on_new_request=lambda _ctx: RequestOffloadingContext(policy))
    assert guard.wants_whole_requests(CTX) is (policy is OffloadPolicy.REQUEST_LEVEL)


@pytest.mark.parametrize("is_drained", [True, False])
def test_jobs_are_given_up_unless_the_manager_says_that_they_have_ended(state, is_drained):
    given_up = []
    methods = {"drain_jobs": lambda _timeout_s: is_drained}
    methods["abandon_jobs"] = lambda: given_up.append("all")
    guarding(state, **methods).drain_jobs(1.0)
    assert given_up == ([] if is_drained else ["all"])


def test_a_drain_that_raises_is_a_fault_whatever_comes_of_giving_up(state):
    fail = RaisingManager().drain_jobs
    guarding(state, drain_jobs=fail, abandon_jobs=list).drain_jobs(1.0)
    assert state.health.loads.state is state.health.stores.state is BreakerState.OPEN


@pytest.mark.parametrize("error", [ValueError("third-party code"), SystemExit(1)])
def test_a_shutdown_that_raises_is_reported_without_the_frames_that_it_came_through(state, error):
    def shutdown(_timeout_s):
        raise error

    found = guarding(state, shutdown=shutdown).shutdown(1.0).error
    assert found.__traceback__ is None
    if isinstance(error, ValueError):
        assert found is error
    else:
        assert "broke its contract with a SystemExit" in str(found)


def test_events_that_are_none_are_logged(state, caplog):
    assert not list(guarding(state, take_events=lambda: [1]).take_events())
    assert "take_events failed" in caplog.text
    assert "broke its contract with a int" in caplog.text
