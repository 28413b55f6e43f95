"""A third party's manager that raises or reports nonsense: no hook fails, and no batch suffers."""

import logging

import pytest
from facade.worlds import EXCLUSIVE, HIT, MISS, PENDING, Hearing, filled, k, ks

from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.errors import OffloadError, StateError, TierUnavailableError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.types import JobResult, LookupResult

ERRORS = [ValueError("drawn"), SystemExit(1)]
NO_BREAKER = BreakerSettings(fault_threshold=1_000)


class Raising(Hearing):
    """Raises out of the methods that it is told to fail in."""

    failing = frozenset()
    error = ERRORS[0]

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "failing"):

            def fail(*_args, **_kwargs):
                raise self.error

            return fail
        return super().__getattribute__(name)


METHODS = (
    "on_new_request",
    "lookup",
    "touch",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "get_released_jobs",
    "on_request_finished",
    "on_schedule_end",
    "take_events",
    "has_pending_work",
    "drain_jobs",
    "abandon_jobs",
)


def use_everything(world, *numbers):
    """A request's whole life, a reset, and what is asked between."""
    world.begin("r")
    world.store(*numbers)
    world.manager.touch(ks(*numbers), world.contexts["r"])
    answers = [world.lookup(number) for number in numbers]
    world.poll()
    world.finish_all()
    world.poll()
    list(world.manager.take_events())
    world.manager.has_pending_work()
    world.finish("r")
    world.manager.reset_cache()
    world.manager.on_reset_flushed()
    return answers


@pytest.mark.parametrize("error", ERRORS, ids=["error", "exit"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("manager_class", [Raising], ids=["external"])
def test_what_one_tier_raises_costs_the_others_nothing(worlds, manager_class, method, error):
    world = worlds(EXCLUSIVE, EXCLUSIVE, manager_class=(manager_class, SecondaryTierManager))
    bad = world.secondaries[0]
    bad.error, bad.failing = error, frozenset({method})
    assert use_everything(world, 1, 2) == [HIT, HIT]
    assert set(world.tiers[1].blocks) == set(ks(1, 2)), "the other tier has its copies"
    world.begin("again")
    for _ in range(2):  # one tier after the other
        assert world.lookup(1, "again") in (PENDING, HIT)
        world.poll()
        world.finish_all()
        world.poll()
    assert world.lookup(1, "again") is HIT
    world.finish("again")
    bad.failing = frozenset()
    world.rest()


@pytest.mark.parametrize("method", ["on_new_request", "touch", "on_schedule_end", "take_events"])
def test_a_manager_that_leaves_its_jobs_to_the_planner_is_guarded_too(worlds, method):
    def fail(self, *_args):
        raise ValueError("drawn")

    world = worlds(manager_class=type("Third", (SecondaryTierManager,), {method: fail}))
    use_everything(world, 1)


def test_errors_of_one_method_are_logged_at_a_bounded_rate(worlds, caplog):
    world = worlds(manager_class=Raising, breaker=NO_BREAKER)
    world.secondaries[0].failing = frozenset({"lookup"})
    world.begin("r")
    for number in range(100):
        world.lookup(number)
    assert caplog.text.count("lookup failed") == 1
    world.runner.advance(60.0)
    world.lookup(100)
    assert "lookup failed (99 more" in caplog.text


def test_a_tier_whose_lookups_fail_is_left_alone_and_goes_on_storing(worlds):
    world = worlds(manager_class=Raising, breaker=BreakerSettings(3, retry_after_s=60.0))
    filled(world, 1)
    bad = world.secondaries[0]
    bad.failing = frozenset({"lookup"})
    world.begin("r")
    assert [world.lookup(number) for number in range(5)] == [MISS] * 5
    bad.failing = frozenset()
    assert world.lookup(1) is MISS, "it is not asked any more"
    world.store(9)
    world.step()
    assert world.parked()
    world.finish_all()
    world.runner.advance(60.0)
    world.poll()
    assert world.lookup(1) is PENDING


def test_a_lookup_that_answers_nonsense_is_a_miss(worlds, caplog):
    world = worlds(manager_class=Raising)
    world.secondaries[0].lookup = lambda _key, _ctx: "yes"
    world.begin("r")
    assert world.lookup(1) is MISS
    assert "broke its contract with a str" in caplog.text


def reporting(world, reports):
    world.secondaries[0].get_finished_jobs = reports


def two_stores(worlds):
    world = worlds(manager_class=Raising, breaker=NO_BREAKER)
    world.begin("r")
    world.store(1)
    world.store(2)
    world.step()
    world.finish_all()
    return world


def results_of(world):
    return list(SecondaryTierManager.get_finished_jobs(world.secondaries[0]))


def test_results_that_came_before_a_generator_raised_are_taken(worlds):
    world = two_stores(worlds)
    first, second = results_of(world)

    def reports():
        yield first
        raise ValueError("midway")

    reporting(world, reports)
    world.poll()
    assert list(world.manager.planner.jobs) == [second.job_id]
    reporting(world, lambda: [second])
    world.poll()
    assert not world.manager.planner.jobs
    assert world.counts["pinned"] == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        "done",
        JobResult("0", success=True),
        JobResult([], success=True),
        JobResult(10**6, success=True),
    ],
)
def test_nonsense_among_the_results_costs_none_of_them(worlds, nonsense):
    world = two_stores(worlds)
    good = results_of(world)
    reporting(world, lambda: [nonsense, *good])
    world.poll()
    reporting(world, list)
    assert not world.manager.planner.jobs
    assert world.manager.planner.counters.job_failures == 0


class Unsure:
    def __bool__(self):
        raise ValueError("neither")


@pytest.mark.parametrize(
    "fields",
    [
        {"successful_keys": 3},
        {"transfer_time": "soon"},
        {"transfer_bytes": "many"},
        {"transfer_bytes": float("inf")},
        {"transfer_time": float("nan")},
        {"queue_time": -1.0},
        {"success": Unsure()},
        {"success": 1},
        {"orphaned": None},
        {"success": False, "successful_keys": frozenset(ks(7))},
        {"error": "a text"},
    ],
)
def test_a_job_whose_result_is_nonsense_has_failed(worlds, fields):
    world = two_stores(worlds)
    first, second = results_of(world)
    reporting(
        world, lambda: [JobResult(**{"job_id": first.job_id, "success": True, **fields}), second]
    )
    world.step()
    del world.secondaries[0].get_finished_jobs
    counters = world.manager.planner.counters
    assert (counters.job_results, counters.job_failures) == (2, 1)
    world.rest()  # its block is stored again
    assert (counters.job_results, counters.job_failures) == (3, 1)
    assert world.counts["pinned"] == 0


def test_a_release_of_no_job_costs_no_release(worlds, caplog):
    world = worlds(manager_class=Raising, io_timeout_s=1.0)
    world.begin("r")
    world.store(1)
    world.step()
    world.runner.advance(1.0)
    world.poll()
    assert world.counts["pinned"] == 1
    world.finish_all()
    tier = world.secondaries[0]
    reports = tier.get_released_jobs
    tier.get_released_jobs = lambda: [77, *reports()]
    world.poll()
    assert world.counts["pinned"] == 0
    assert "released job 77" in caplog.text
    del tier.get_released_jobs


def test_what_a_third_party_takes_back_too_late_is_given_up_by_a_reset(worlds):
    """Its slots stay out of use until it says that the copy has ended."""
    world = worlds(manager_class=Raising)
    filled(world, 1)
    world.begin("r")
    world.lookup(1)
    world.step()
    bad = world.secondaries[0]
    bad.failing = frozenset({"drain_jobs", "abandon_jobs"})
    world.manager.reset_cache()
    world.manager.on_reset_flushed()
    assert world.counts["held"] == 1
    world.finish_all()
    world.poll()
    assert world.counts["held"] == 0
    bad.failing = frozenset()


# -- shutdown -----------------------------------------------------------------------------------


def shut_down(world):
    """Shut down a world whose first tier does not take part; return the error."""
    world.rows = None
    try:
        world.manager.shutdown(1.0)
    except OffloadError as error:
        return error
    finally:
        for tier in world.secondaries:
            SecondaryTierManager.shutdown(tier, 1.0)
        world.primary.shutdown()
        world.runner.close()
    return None


@pytest.mark.parametrize("error", ERRORS, ids=["error", "exit"])
def test_a_shutdown_that_raises_cuts_no_other_short(worlds, error):
    world = worlds(EXCLUSIVE, EXCLUSIVE, manager_class=(Raising, SecondaryTierManager))
    world.secondaries[0].error = error
    world.secondaries[0].failing = frozenset({"shutdown"})
    assert "did not shut down" in str(shut_down(world))
    assert world.tiers[1].close_count == 1


def test_a_shutdown_that_reports_nonsense_is_an_error(worlds):
    world = worlds(manager_class=Raising)
    world.secondaries[0].shutdown = lambda _timeout: "fine"
    assert "with a str" in str(shut_down(world))


def test_a_shutdown_that_returns_nothing_is_well(worlds):
    world = worlds(manager_class=Raising)
    tier = world.secondaries[0]
    tier.shutdown = lambda timeout: SecondaryTierManager.shutdown(tier, timeout) and None
    assert shut_down(world) is None


@pytest.mark.parametrize("method", ["get_finished_jobs", "get_released_jobs"])
def test_a_wrong_report_does_not_cut_a_shutdown_short(worlds, method):
    world = worlds(EXCLUSIVE, EXCLUSIVE, manager_class=(Raising, SecondaryTierManager))
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_all()
    world.secondaries[0].failing = frozenset({method})
    shut_down(world)
    assert world.tiers[1].close_count == 1
    counters = world.manager.planner.counters
    assert counters.jobs_submitted == counters.job_results == 2


# -- what is the scheduler's --------------------------------------------------------------------


def test_misuse_by_the_scheduler_still_raises(worlds):
    world = worlds(manager_class=Raising)
    world.begin("r")
    with pytest.raises(StateError):
        world.manager.on_new_request(world.contexts["r"])
    with pytest.raises(StateError):
        world.manager.prepare_load(ks(1), world.contexts["r"])


# -- what is said of it -------------------------------------------------------------------------


def test_a_breaker_that_opens_and_closes_is_logged_once_with_the_reason(worlds, caplog):
    caplog.set_level(logging.WARNING, "kvoffload_async.facade.tier_group")
    world = worlds(breaker=BreakerSettings(1, retry_after_s=5.0))
    world.begin("r")
    for number in range(3):  # it fails, and so do two tries
        world.store(number)
        world.poll()
        world.finish_job(error=TierUnavailableError("no such device"))
        world.poll()
        world.runner.advance(5.0)
        world.poll()
    world.store(8)
    world.step()
    world.finish_job()
    world.poll()
    said = [r.getMessage() for r in caplog.records if r.name.endswith("tier_group")]
    assert said == [
        (
            "tier tier0: stores are suspended, and tried again after 5.0 s: no such device; the "
            "engine runs without this tier's stores; fix the cause above"
        ),
        "tier tier0: stores resumed after 15.0 s",
    ]


def test_a_hit_is_still_a_hit_beside_it(worlds):
    world = worlds(manager_class=Raising)
    world.begin("r")
    world.store(1)
    world.secondaries[0].failing = frozenset(METHODS)
    assert world.lookup(1) is HIT
    assert world.manager.planner.primary.lookup(k(1)) is LookupResult.HIT
    world.load(1)
    world.secondaries[0].failing = frozenset()
