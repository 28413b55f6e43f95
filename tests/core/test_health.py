"""A failing tier is left alone, in the direction in which it fails; then it is tried once."""

from dataclasses import replace

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, job, k, ks
from core.world import World, stored_below

from kvoffload_async.abc.events import ProbeAnswered
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.core.index import ProbedIndex
from kvoffload_async.core.ledger import StartProbe
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    JobNotStartedError,
    RepeatedKeyError,
    TierBusyError,
    TierClosedError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownSlotError,
)
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import JobResult, Medium, ReqContext

ONE_FAULT = BreakerSettings(1, retry_after_s=5.0)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
DOWN = TierUnavailableError("down")


def test_what_fails_while_the_tier_is_closed_tells_nothing_of_it():
    health = TierHealth(ONE_FAULT)
    ended = job(0, "a")
    health.close()
    health.job_ended(ended, JobResult(0, success=False, error=DOWN), 1.0)
    health.reports_failed(DOWN)
    assert (health.loads.state, health.stores.state) == (CLOSED, CLOSED)


def test_a_try_that_the_closing_ends_leaves_the_breaker_open():
    health = health_after(DOWN, promotion=False)
    tried = replace(job(1, "b", promotion=False), submit_time=9.0)
    health.job_submitted(tried)
    assert health.stores.state is HALF_OPEN
    health.close()
    health.job_ended(tried, JobResult(1, success=False, error=DOWN), 10.0)
    assert health.stores.state is OPEN
    assert health.stores.openings == 1
    assert not health.stuck_breakers([])


def health_after(error, *, promotion):
    health = TierHealth(ONE_FAULT)
    ended = job(0, "a", promotion=promotion)
    health.job_ended(ended, JobResult(0, success=error is None, error=error), 1.0)
    return health


def fail_to_store(world, error, *, times):
    """What a tier has failed to store is pending to it, and tried again after a pause."""
    for _ in range(times):
        for _ in range(20):
            if world.running:
                break
            world.step()
        world.finish_job(failed={0}, error=error)


# -- what is a fault ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, CLOSED),
        (BlockMissingError("gone"), CLOSED),
        (CorruptBlockError("flipped"), CLOSED),
        (TierFullError("full"), CLOSED),
        (TierBusyError("busy"), CLOSED),
        (JobNotStartedError("not started"), CLOSED),
        (RepeatedKeyError("twice"), CLOSED),
        (UnknownSlotError("99"), CLOSED),
        (TierClosedError("closed"), CLOSED),
        (TierTimeoutError("late"), OPEN),
        (TierUnavailableError("down"), OPEN),
        (OSError(5, "io"), OPEN),
    ],
)
@pytest.mark.parametrize("promotion", [True, False])
def test_the_class_of_an_error_says_whether_the_tier_is_at_fault(error, state, promotion):
    health = health_after(error, promotion=promotion)
    assert (health.loads.state, health.stores.state) == (
        (state, CLOSED) if promotion else (CLOSED, state)
    )


def test_busy_is_back_pressure_and_opens_no_breaker():
    world = World(16, breaker=ONE_FAULT, pressed_tier=0)
    ctx = world.begin()
    world.store(ctx, "a")
    fail_to_store(world, TierBusyError("busy"), times=3)
    (tier,) = world.planner.tiers
    assert tier.health.stores.is_closed
    assert tier.backpressure.is_pressed
    world.wind_down()


# -- one direction ------------------------------------------------------------------------------


def test_a_tier_that_cannot_store_goes_on_loading():
    world, ctx = stored_below(8, names="x", breaker=BreakerSettings(2, retry_after_s=5.0))
    world.store(ctx, "a")
    fail_to_store(world, TierUnavailableError("read-only"), times=2)
    world.store(ctx, "b")
    assert world.running == {}
    assert world.lookup(ctx, "x") is PENDING
    world.step()
    world.finish_job()
    assert world.lookup(ctx, "x") is HIT
    world.wind_down()


def test_a_tier_that_cannot_load_goes_on_storing():
    world, ctx = stored_below(8, names="xy", breaker=ONE_FAULT)
    world.lookup(ctx, "x")
    world.step()
    world.finish_job(failed={0}, error=DOWN)
    assert world.lookup(ctx, "y") is MISS
    world.store(ctx, "a")
    assert len(world.running) == 1
    world.wind_down()


# -- the try ------------------------------------------------------------------------------------


def failed_to_load(names="xabc"):
    """The tier was left alone, and its wait is over."""
    world, ctx = stored_below(8, names=names, breaker=ONE_FAULT)
    world.lookup(ctx, names[0])
    world.step()
    world.finish_job(failed={0}, error=DOWN)
    assert world.lookup(ctx, names[1]) is MISS
    world.step(5.0)
    return world, ctx


def test_the_try_is_one_block_and_not_the_hundred_lookups_of_a_step():
    world, ctx = failed_to_load()
    other = world.begin("other")
    for who, name in (ctx, "a"), (other, "c"):
        assert world.lookup(who, name) is PENDING
    world.step()
    assert [job.keys for _, job in world.running.values()] == [(k("a"),)]
    assert world.lookup(other, "c") is MISS, "until it ends, everything else is refused"
    world.finish_job()
    world.step()
    assert world.lookup(other, "c") is PENDING
    world.wind_down()


def test_a_try_that_fails_leaves_the_tier_alone_again():
    world, ctx = failed_to_load()
    world.lookup(ctx, "a")
    world.step()
    world.finish_job(failed={0}, error=DOWN)
    assert world.lookup(ctx, "b") is MISS
    world.step(5.0)
    assert world.lookup(ctx, "b") is PENDING
    world.wind_down()


def test_a_try_that_a_reset_has_made_void_is_repeated():
    world, ctx = failed_to_load()
    assert world.lookup(ctx, "a") is PENDING
    world.reset()
    world.flush_reset()
    assert world.lookup(ctx, "a") is PENDING
    world.wind_down()


def test_one_cascade_is_tried():
    world = World(8, breaker=ONE_FAULT)
    ctx = world.begin()
    world.store(ctx, "a")
    world.finish_job(failed={0}, error=DOWN)
    world.step(5.0)
    for name in "bcd":
        world.store(ctx, name)
    world.step()
    tried = [job.keys for _, job in world.running.values()]
    assert tried == [tuple(ks("abcd"))], "first come, first served"
    world.store(ctx, "e")
    world.step()
    assert len(world.running) == 1, "until it ends, everything else waits"
    world.finish_job()
    world.step()
    assert [job.keys for _, job in world.running.values()] == [(k("e"),)]
    world.wind_down()


# -- probes -------------------------------------------------------------------------------------


class Probed:
    """A planner over one tier that is probed."""

    def __init__(self, breaker=ONE_FAULT):
        log = EventLog(Medium.STORAGE, enabled=False)
        self.tier = TierState("tier", ProbedIndex(2), 1, log, breaker=breaker)
        primary = Primary(8, LruPolicy(8))
        self.planner = Planner(primary, [self.tier], 1000.0)
        self.ctx = ReqContext("r")
        self.planner.on_new_request(self.ctx)
        self.now_s = 0.0

    def ask(self, names):
        return [self.planner.lookup(k(name), self.ctx) for name in names]

    def step(self, seconds=1.0):
        """End the step; return the probes that it started."""
        self.planner.end_step()
        self.tier.end_step()
        self.now_s += seconds
        self.planner.begin_step(self.now_s)
        return [e for e in self.tier.take_effects() if isinstance(e, StartProbe)]

    def probe(self, names):
        assert self.ask(names) == [RETRY] * len(names)
        (probe,) = self.step()
        return probe

    def answer(self, probe, present="", error=None):
        self.tier.handle(ProbeAnswered(probe.generation, frozenset(ks(present)), error))

    @property
    def state(self):
        return self.tier.health.loads.state


def test_failed_probes_leave_the_tier_alone():
    world = Probed(BreakerSettings(3, retry_after_s=5.0))
    for name in "abc":
        world.answer(world.probe(name), error=TierTimeoutError("late"))
    assert world.state is OPEN
    assert world.ask("abcd") == [MISS] * 4


def test_a_request_that_waits_for_a_probe_is_told_at_once_when_the_tier_is_left_alone():
    world = Probed()
    first = world.probe("a")
    world.probe("b")
    world.answer(first, error=TierTimeoutError("late"))
    assert world.ask("ab") == [MISS, MISS]


def test_a_tier_that_is_left_alone_is_not_probed_until_its_try():
    world = Probed()
    first = world.probe("a")
    world.ask("b")
    world.answer(first, error=DOWN)
    assert world.step(5.0) == []
    (probe,) = world.step()
    assert probe.keys == (k("b"),), "it is tried for whoever asked"


def test_a_queued_probe_is_pending_work_unless_no_step_would_start_it():
    world = Probed()
    world.ask("a")
    assert world.tier.has_pending_work
    first, second = world.probe("a"), world.probe("b")
    world.ask("c")
    world.answer(first, error=DOWN)
    assert world.tier.has_pending_work, "an answer is still to come"
    world.answer(second)
    assert not world.tier.has_pending_work
    world.step(5.0)
    assert world.tier.has_pending_work


def test_one_probe_is_tried_and_decides():
    world = Probed()
    world.answer(world.probe("a"), error=DOWN)
    world.step(5.0)
    trial = world.probe("bc")
    assert world.state is HALF_OPEN
    assert world.ask("bcd") == [MISS] * 3
    assert world.step() == []
    world.answer(trial, "b")
    assert world.state is CLOSED
    assert world.ask("b") == [PENDING]


def test_a_probe_that_fails_as_a_try_leaves_the_tier_alone_again():
    world = Probed()
    world.answer(world.probe("a"), error=DOWN)
    world.step(5.0)
    world.answer(world.probe("b"), error=DOWN)
    assert world.state is OPEN


def test_a_probe_from_before_the_try_does_not_decide():
    world = Probed()
    old = world.probe("a")
    world.answer(world.probe("b"), error=DOWN)
    world.step(5.0)
    trial = world.probe("c")
    world.answer(old)
    assert world.state is HALF_OPEN
    world.answer(trial)
    assert world.state is CLOSED


def test_a_reset_keeps_the_probe_that_is_the_try():
    world = Probed()
    world.answer(world.probe("a"), error=DOWN)
    world.step(5.0)
    world.probe("b")
    world.planner.reset_cache()
    assert world.state is HALF_OPEN


def test_a_promotion_is_the_try_once_it_is_submitted_though_an_older_probe_is_outstanding():
    world = Probed()
    world.answer(world.probe("ab"), "b")
    old = world.probe("c")
    late = job(0, "x", promotion=True)
    world.tier.health.job_ended(late, JobResult(0, success=False, error=DOWN), world.now_s)
    world.step(5.0)
    assert world.ask("b") == [PENDING]
    world.planner.reset_cache()
    assert world.state is OPEN, "no promotion was submitted"
    world.planner.reset_flushed()
    assert world.ask("b") == [PENDING]
    world.answer(old)
    world.step()
    assert world.state is HALF_OPEN
    assert not world.tier.health.stuck_breakers(list(world.tier.jobs.unreported()))


def test_probes_that_work_do_not_excuse_loads_that_fail():
    world = Probed(BreakerSettings(2, retry_after_s=5.0))
    for number in range(2):
        world.answer(world.probe([number]), [number])
        late = job(0, [number], promotion=True)
        world.tier.health.job_ended(late, JobResult(0, success=False, error=DOWN), world.now_s)
    assert world.state is OPEN


def test_a_probe_that_the_shutdown_ends_is_no_fault():
    world = Probed()
    world.answer(world.probe("a"), error=TierClosedError("closed"))
    assert world.state is CLOSED


def test_without_a_planner_nobody_reads_the_breakers():
    tier = TierState(
        "tier", ProbedIndex(1), 1, EventLog(Medium.STORAGE, enabled=False), breaker=ONE_FAULT
    )
    for name in "ab":
        assert tier.index.lookup(k(name), ReqContext("r")) is RETRY
        tier.end_step()
        (probe,) = tier.take_effects()
        tier.handle(ProbeAnswered(probe.generation, frozenset(), DOWN))


def test_a_fault_outside_of_any_job_counts_where_it_belongs():
    health = TierHealth(ONE_FAULT)
    health.lookup_failed(OSError(5, "io"))
    assert (health.loads.state, health.stores.state) == (OPEN, CLOSED)
    health.reports_failed(OSError(5, "io"))
    assert (health.loads.state, health.stores.state) == (OPEN, OPEN)


def test_before_the_first_step_faults_count_from_the_beginning_of_time():
    loads, reports = TierHealth(ONE_FAULT), TierHealth(ONE_FAULT)
    loads.lookup_failed(OSError(5, "io"))
    reports.reports_failed(OSError(5, "io"))
    for breaker in loads.loads, reports.loads, reports.stores:
        assert not breaker.permits(4.9)
        assert breaker.permits(5.0)


def test_a_tier_that_is_not_open_is_skipped():
    world, ctx = stored_below(8, names="x")
    (tier,) = world.planner.tiers
    tier.is_available = False
    assert world.lookup(ctx, "x") is MISS
    world.store(ctx, "a")
    assert world.running == {}
    tier.is_available = True
    assert world.lookup(ctx, "x") is PENDING
    world.wind_down()
