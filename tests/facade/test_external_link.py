"""The link of an external manager: which calls it makes, and what becomes of reports and errors."""

from types import SimpleNamespace

import pytest
from facade.worlds import HIT, MISS, k, ks

from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.errors import TierTimeoutError, TierUnavailableError
from kvoffload_async.facade.external import ExternalLink
from kvoffload_async.types import (
    JobMetadata,
    JobResult,
    Locality,
    Medium,
    OffloadingEvent,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    as_block_ids,
)

CTX = ReqContext("r")
SLOT_BYTES = 16
PLAIN = {
    "tier_type": "disk",
    "medium": Medium.STORAGE,
    "locality": Locality.LOCAL,
    "backpressure_detector": None,
    "remedies": {},
    "io_timeout_s": 30.0,
}

CALLS = {
    "on_new_request": (lambda link: link.begin_request(CTX), False, ""),
    "lookup": (lambda link: link.state.index.lookup(k(1), CTX), MISS, "loads"),
    "touch": (lambda link: (link.state.touch(ks(1), CTX), link.flush())[1], None, ""),
    "on_request_finished": (
        lambda link: (link.begin_request(CTX), link.state.finish_request(CTX), link.flush())[2],
        None,
        "",
    ),
    "get_finished_jobs": (lambda link: link.pump(), None, "loads stores"),
    "get_released_jobs": (lambda link: link.pump(), None, "loads stores"),
    "on_schedule_end": (lambda link: link.end_step(None), None, "loads stores"),
    "take_events": (lambda link: list(link.take_events()), [], ""),
    "announce_anew": (lambda link: link.announce_anew(), None, ""),
    "has_pending_work": (lambda link: link.has_pending_work(), False, ""),
    "drain_jobs": (lambda link: link.drain(1.0), False, "loads stores"),
    "abandon_jobs": (lambda link: link.abandon(), None, "loads stores"),
}
"""Method -> how it is called, what is answered when it raises, and which breakers open."""


def job_of(job_id, *numbers, is_promotion=True):
    slots = as_block_ids(range(len(numbers)))
    return JobMetadata(job_id, tuple(ks(*numbers)), slots, is_promotion, CTX, 0.0)


def raise_error(*_arguments):
    raise ValueError("third-party code")


class Manager:
    """Does nothing, but for the methods that it is given; notes its calls."""

    def __init__(self, **methods):
        self.__dict__.update(PLAIN, calls=[], methods=methods)

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return self.methods.get(name, lambda *_: ())(*arguments)

        return call


class World:
    """A link over such a manager, and the time."""

    def __init__(self, **methods):
        self.now_s = 0.0
        self.manager = Manager(**methods)
        self.link = ExternalLink(self.manager, "disk-2", SLOT_BYTES, lambda: self.now_s)
        self.state = self.link.state
        self.state.health = TierHealth(BreakerSettings(1))
        self.reports, self.releases = [], []
        self.manager.methods.setdefault("get_finished_jobs", lambda: self._taken("reports"))
        self.manager.methods.setdefault("get_released_jobs", lambda: self._taken("releases"))

    def _taken(self, name):
        taken, _ = getattr(self, name), setattr(self, name, [])
        return taken

    def start(self, *job_ids, is_promotion=True):
        for job_id in job_ids:
            self.state.submit(job_of(job_id, 1, 2, is_promotion=is_promotion))
        self.link.flush()

    def report(self, *results):
        self.reports += results
        self.link.pump()
        return [result for _, result in self.state.jobs.take_ended()]

    def release(self, *job_ids):
        self.releases += job_ids
        self.link.pump()
        return [record.job.job_id for record in self.state.jobs.take_released()]

    @property
    def calls(self):
        quiet = ("get_finished_jobs", "get_released_jobs")
        return [call for call in self.manager.calls if call[0] not in quiet]

    @property
    def open_breakers(self):
        health = self.state.health
        breakers = {"loads": health.loads, "stores": health.stores}
        return [name for name, one in breakers.items() if one.state is BreakerState.OPEN]


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CALLS)
def test_what_a_method_raises_is_logged_and_counts_if_it_tells_of_jobs_or_blocks(caplog, method):
    call, answer, open_breakers = CALLS[method]
    world = World(**{method: raise_error})
    assert call(world.link) == answer
    assert f"tier disk: {method} failed: Traceback" in caplog.text
    assert "third-party code" in caplog.text
    assert world.open_breakers == open_breakers.split()


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_a_manager_may_want_whole_requests(policy):
    world = World(on_new_request=lambda _ctx: RequestOffloadingContext(policy))
    assert world.link.begin_request(CTX) is (policy is OffloadPolicy.REQUEST_LEVEL)


@pytest.mark.parametrize("is_drained", [True, False])
def test_jobs_are_given_up_unless_the_manager_says_that_they_have_ended(is_drained):
    world = World(drain_jobs=lambda _timeout_s: is_drained)
    assert world.link.drain(1.0) is is_drained
    assert (("abandon_jobs",) in world.calls) is not is_drained


@pytest.mark.parametrize("error", [ValueError("third-party code"), SystemExit(1)])
def test_a_shutdown_that_raises_is_reported_without_the_frames_that_it_came_through(error):
    def shutdown(_timeout_s):
        raise error

    found = World(shutdown=shutdown).link.close(1.0).error
    assert found.__traceback__ is None
    if isinstance(error, ValueError):
        assert found is error
    else:
        assert "broke its contract with a SystemExit" in str(found)


def test_events_that_are_none_are_logged(caplog):
    assert not list(World(take_events=lambda: [1]).link.take_events())
    assert "take_events failed" in caplog.text
    assert "broke its contract with a int" in caplog.text


def test_events_carry_the_name_of_the_tier():
    event = OffloadingEvent(ks(1), Medium.STORAGE, removed=False)
    (seen,) = World(take_events=lambda: [event]).link.take_events()
    assert (seen.keys, seen.ownership) == (event.keys, "disk-2")


# -- calls --------------------------------------------------------------------------------------


def test_a_request_begins_before_its_jobs_and_ends_behind_them():
    world = World()
    world.start(0)
    job = world.state.jobs.job_of(0)
    world.state.touch(ks(3), CTX)
    world.state.finish_request(CTX)
    world.link.flush()
    world.link.flush()
    assert world.calls == [
        ("on_new_request", CTX),
        ("submit_load", job),
        ("touch", tuple(ks(3)), CTX),
        ("on_request_finished", CTX),
    ]


def test_a_request_that_the_manager_was_not_told_of_does_not_end_there():
    world = World()
    world.state.finish_request(CTX)
    world.link.flush()
    assert not world.calls


def test_an_id_that_is_used_again_has_ended_before():
    world = World()
    again = ReqContext("r")
    world.link.begin_request(CTX)
    world.state.finish_request(CTX)
    world.link.begin_request(again)
    assert [name for name, _ in world.calls] == [
        "on_new_request",
        "on_request_finished",
        "on_new_request",
    ]


def test_calls_that_wait_are_pending_work():
    world = World()
    world.link.begin_request(CTX)
    assert not world.link.has_pending_work()
    world.state.touch(ks(1), CTX)
    assert world.link.has_pending_work()
    world.link.flush()
    assert not world.link.has_pending_work()
    world.state.finish_request(CTX)
    assert world.link.has_pending_work()


def test_every_lookup_asks_and_nothing_is_known_beside():
    world = World(lookup=lambda key, _ctx: HIT if key == k(1) else MISS)
    index = world.state.index
    assert [world.state.index.lookup(key, CTX) for key in ks(1, 2)] == [HIT, MISS]
    assert (index.lacks(ks(1, 2)), index.peek(ks(2)), index.notifies) == ([], [HIT], False)
    assert not world.state.index.is_exact


# -- reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_promotion", [True, False])
def test_the_ledger_makes_the_result_from_what_is_reported(is_promotion):
    world = World()
    world.start(0, is_promotion=is_promotion)
    world.now_s = 5.0
    (result,) = world.report(JobResult(0, success=True, transfer_time=3.0, queue_time=1.0))
    assert result == JobResult(
        0, success=True, transfer_time=3.0, queue_time=1.0, transfer_bytes=2 * SLOT_BYTES
    )


def test_a_job_whose_time_is_not_reported_is_measured():
    world = World()
    world.start(0)
    world.now_s = 5.0
    (result,) = world.report(JobResult(0, success=True))
    assert (result.transfer_time, result.queue_time) == (5.0, None)


def test_a_part_that_landed_is_told_apart_and_other_failures_are_of_the_whole_job():
    world = World()
    world.start(0, 1, 2)
    down = TierUnavailableError("down")
    part = world.report(JobResult(0, False, frozenset(ks(1)), error=down))
    none = world.report(JobResult(1, False, error=down))
    contradiction = world.report(JobResult(2, False, frozenset(ks(1, 2))))
    assert [(r.successful_keys, r.error, r.transfer_bytes) for r in (*part, *none)] == [
        (frozenset(ks(1)), down, SLOT_BYTES),
        (frozenset(), down, 0),
    ]
    (result,) = contradiction
    assert (result.success, result.successful_keys) == (False, frozenset())
    assert "reported job 2 as failed without an error" in str(result.error)


def test_a_job_is_overdue_once_and_its_late_report_says_that_its_copy_has_ended(caplog):
    world = World()
    world.start(0)
    world.now_s = 59.0
    assert world.report() == []
    world.now_s = 60.0
    (result,) = world.report()
    assert (result.orphaned, type(result.error)) == (True, TierTimeoutError)
    assert (
        "has not reported the load of 2 blocks for request r (job 0) within 60.0 s" in caplog.text
    )
    assert world.report() == []
    world.report(JobResult(0, success=True))
    assert world.release() == [0]
    world.report(JobResult(0, success=True))
    assert "job 0, which is not its job" in caplog.text


def test_only_jobs_that_are_under_way_and_old_enough_are_overdue():
    world = World()
    world.start(0)
    world.report(JobResult(0, success=False, orphaned=True))
    world.now_s = 60.0
    world.state.submit(job_of(1, 1))
    assert world.report() == []


def test_a_job_that_its_manager_orphaned_is_ended_by_a_release_alone(caplog):
    world = World()
    world.start(0)
    (result,) = world.report(JobResult(0, True, frozenset(ks(1)), orphaned=True))
    assert (result.success, result.successful_keys, result.orphaned) == (False, None, True)
    world.report(JobResult(0, success=True))
    assert "job 0, which is not its job" in caplog.text
    assert world.state.jobs.orphaned_count == 1
    assert world.release(0) == [0]
    assert world.release(0) == []
    assert "released job 0, which is not its job" in caplog.text


def test_a_job_that_both_gave_up_is_released_once():
    world = World()
    world.start(0)
    assert world.state.abandon_rest() == [0]
    world.report(JobResult(0, success=False, orphaned=True))
    assert world.state.jobs.orphaned_count == 1
    assert world.release(0) == [0]


def test_a_refused_job_has_its_result_at_once():
    world = World(submit_load=raise_error)
    world.start(0)
    ((_, result),) = world.state.jobs.take_ended()
    assert str(result.error) == "disk refused the job: ValueError: third-party code"
    assert not result.orphaned


def test_an_invalid_report_fails_its_job():
    world = World()
    world.start(0)
    (result,) = world.report(JobResult(0, success=1))
    assert str(result.error).startswith("disk sent an invalid report: ")
    assert not world.report(SimpleNamespace(job_id=7), SimpleNamespace(job_id=[]))
