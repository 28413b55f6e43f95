"""The actor that runs a tier: bounds, deadlines, cancellation, and one end for every job."""

import asyncio
import gc
import logging

import pytest

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted, JobOverdue, JobSettled
from kvoffload_async.abc.events import ProbeAnswered as Answered
from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    JobCancelledError,
    TierBusyError,
    TierClosedError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import InlineIo, Operation, ScriptedTier, VirtualRunner
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers._actor import ActorEnvironment, TierActor

IO_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 2.0
LOAD, STORE, CONTAINS = Operation.LOAD, Operation.STORE, Operation.CONTAINS


class World:
    """An actor on a virtual loop, over a tier that parks everything."""

    def __init__(self, tier=None, **bounds):
        self.tier = tier or ScriptedTier(bounds=TierBounds(**bounds))
        self.events = []
        self.runner = VirtualRunner()
        self.buffer = PrimaryBuffer(8, 4096)
        env = ActorEnvironment(self.buffer.view, InlineIo(), self.events.append)
        self.actor = TierActor(
            "t", self.tier, env, io_timeout_s=IO_TIMEOUT_S, probe_timeout_s=PROBE_TIMEOUT_S
        )

    def open(self):
        self.runner.run(self.actor.open(), 1.0)
        return self

    def start(self, job_id, numbers=(1,), *, is_promotion=False):
        keys = [key_of(n) for n in numbers]
        job = make_job(job_id, keys, range(len(keys)), is_promotion=is_promotion)
        self.runner.call_soon(self.actor.start_job, job)
        self.runner.run_ready()

    def probe(self, generation, numbers=(1,)):
        self.runner.call_soon(self.actor.start_probe, generation, [key_of(n) for n in numbers])
        self.runner.run_ready()

    def settle(self, index=0, *args, **kwargs):
        self.tier.settle(self.tier.parked[index], *args, **kwargs)
        self.runner.run_ready()

    def task(self, name):
        (task,) = [t for t in asyncio.all_tasks(self.runner.loop) if t.get_name() == name]
        return task

    def close(self, timeout_s=1.0):
        return self.runner.run(self.actor.close(timeout_s), 10.0)

    def settled(self):
        return {e.job_id: e for e in self.events if isinstance(e, JobSettled)}

    def running(self):
        return [p.job.job_id for p in self.tier.parked if p.job]


@pytest.fixture
def worlds():
    made = []

    def make(*args, **kwargs):
        made.append(World(*args, **kwargs).open())
        return made[-1]

    yield make
    for world in made:
        while world.tier.parked:
            world.tier.settle_all()
            world.runner.run_ready()
        world.runner.close()
        world.tier._env = None
        assert world.buffer.release()


# -- the mailbox --------------------------------------------------------------------------------


def test_at_most_as_many_jobs_run_at_once_as_the_bounds_allow_in_each_direction(worlds):
    world = worlds(concurrent_loads=1, concurrent_stores=2)
    for job_id in range(4):
        world.start(job_id)
    world.start(10, is_promotion=True)
    world.start(11, is_promotion=True)
    assert world.running() == [0, 1, 10]


def test_the_oldest_waiting_job_runs_when_another_ends(worlds):
    world = worlds(concurrent_stores=1)
    for job_id in range(3):
        world.start(job_id)
    world.settle()
    assert world.running() == [1]
    world.settle()
    assert world.running() == [2]


def test_waiting_stores_do_not_hold_up_a_load(worlds):
    world = worlds(concurrent_stores=1)
    for job_id in range(9):
        world.start(job_id)
    world.start(10, is_promotion=True)
    assert 10 in world.running()


def test_a_job_over_the_mailbox_bound_fails_as_busy_at_once(worlds):
    world = worlds(concurrent_stores=1, queued_jobs=2)
    for job_id in range(4):
        world.start(job_id)
    assert list(world.settled()) == [3]
    assert isinstance(world.settled()[3].job_error, TierBusyError)
    world.settle()
    world.start(4)
    assert list(world.settled()) == [3, 0]


# -- outcomes -----------------------------------------------------------------------------------


def test_a_job_settles_once_with_its_duration(worlds):
    world = worlds()
    world.start(0)
    world.runner.advance(2.5)
    world.settle()
    assert world.events == [JobSettled(0, {}, None, 2.5)]


def test_waiting_counts_in_a_jobs_duration(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.start(1)
    world.runner.advance(3.0)
    world.settle()
    world.settle()
    assert world.settled()[1].seconds == pytest.approx(3.0)


def test_failed_blocks_are_reported_one_by_one(worlds):
    world = worlds()
    world.start(0, [1, 2, 3])
    world.settle(0, {1: CorruptBlockError("bad")})
    assert list(world.settled()[0].failures) == [1]
    assert world.settled()[0].job_error is None


def test_a_missing_key_settles_its_job_once_42529(worlds):
    world = worlds()
    world.start(0, [1], is_promotion=True)
    world.settle()
    (event,) = world.events
    assert isinstance(event.failures[0], BlockMissingError)


def test_an_empty_job_settles_without_reaching_the_tier(worlds):
    world = worlds()
    world.start(0, [])
    world.start(1, [], is_promotion=True)
    assert not world.tier.parked
    assert [e.failures for e in world.settled().values()] == [{}, {}]


@pytest.mark.parametrize("error", [TierUnavailableError("no"), TierClosedError("no")])
def test_a_tier_error_is_passed_on_as_it_is(worlds, error):
    world = worlds()
    world.start(0)
    world.settle(0, error=error)
    assert world.settled()[0].job_error is error


@pytest.mark.parametrize(
    "error", [OSError(5, "io"), ValueError("v"), KeyError("k"), MemoryError(), GeneratorExit()]
)
def test_any_other_error_becomes_an_unavailable_tier_with_its_cause(worlds, error):
    world = worlds()
    world.start(0)
    world.settle(0, error=error)
    mapped = world.settled()[0].job_error
    assert type(mapped) is TierUnavailableError
    assert mapped.__cause__ is error
    assert type(error).__name__ in str(mapped)


def test_a_tier_that_wants_to_exit_fails_its_job_and_not_the_loop(worlds):
    world = worlds()
    world.start(0)
    world.settle(0, error=SystemExit(3))
    assert isinstance(world.settled()[0].job_error, TierUnavailableError)
    world.start(1)
    world.settle()
    assert world.settled()[1].job_error is None


@pytest.mark.parametrize(
    "outcome",
    [
        {3: TierError("x")},
        {-1: TierError("x")},
        {"0": TierError("x")},
        {0: OSError("no TierError")},
        {0: None},
        None,
        [0],
    ],
)
def test_an_outcome_that_breaks_the_contract_fails_the_whole_job(worlds, outcome):
    world = worlds()
    world.start(0, [1, 2, 3])
    parked = world.tier.parked.pop()
    parked.future.set_result(outcome)
    world.runner.run_ready()
    assert isinstance(world.settled()[0].job_error, TierUnavailableError)
    assert "contract" in str(world.settled()[0].job_error)


def test_a_failed_job_is_logged_as_an_error_but_a_missing_block_is_not(worlds, caplog):
    caplog.set_level(logging.DEBUG)
    world = worlds()
    world.start(7)
    world.settle(0, error=OSError(5, "broken disk"))
    world.start(8, is_promotion=True)
    world.settle()
    levels = {r.getMessage().split(":")[0]: r.levelname for r in caplog.records}
    assert levels.pop("Traceback (most recent call last)") == "DEBUG"
    assert levels == {"Job 7 block I/O failed": "ERROR", "Job 8 block I/O failed": "DEBUG"}


def test_an_error_that_is_kept_does_not_keep_what_its_frames_held(worlds):
    world = worlds()
    held = []

    class Big:
        pass

    async def store(job):
        big = Big()
        held.append(id(big))
        raise TierUnavailableError("mapped") from OSError(5, "io")

    world.tier.store = store
    world.start(0)
    gc.collect()
    assert isinstance(world.settled()[0].job_error.__cause__, OSError)
    assert not any(isinstance(o, Big) for o in gc.get_objects())


# -- cancellation -------------------------------------------------------------------------------


def test_a_job_whose_task_is_cancelled_before_its_first_step_settles_42529(worlds):
    world = worlds()
    job = make_job(0, [key_of(1)], [0], is_promotion=False)

    def start_and_cancel():
        world.actor.start_job(job)
        assert world.task("t:store:0").cancel()

    world.runner.call_soon(start_and_cancel)
    world.runner.run_ready()
    assert not world.tier.parked, "its body never ran"
    assert isinstance(world.settled()[0].job_error, JobCancelledError)


def test_a_job_whose_task_is_cancelled_in_flight_settles_when_its_bytes_rest(worlds):
    world = worlds()
    world.start(0)
    world.task("t:store:0").cancel()
    world.runner.run_ready()
    assert not world.events
    world.settle()
    assert isinstance(world.settled()[0].job_error, JobCancelledError)


def test_a_cancelled_job_makes_room_for_the_next(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.start(1)
    world.settle(0, error=asyncio.CancelledError())
    assert world.running() == [1]


# -- deadlines ----------------------------------------------------------------------------------


def test_a_job_that_waits_past_its_deadline_settles_without_having_run(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.runner.advance(10)
    world.start(1)
    world.runner.advance(25)
    assert [type(e) for e in world.events] == [JobOverdue], "job 0 runs, and is overdue"
    world.runner.advance(5)
    assert isinstance(world.settled()[1].job_error, TierTimeoutError)
    world.settle()
    assert not world.tier.parked, "job 1 never ran"


def test_a_job_that_runs_past_its_deadline_is_overdue_then_settles(worlds):
    world = worlds()
    world.start(0)
    world.runner.advance(IO_TIMEOUT_S)
    (overdue,) = world.events
    assert isinstance(overdue, JobOverdue)
    assert isinstance(overdue.error, TierTimeoutError)
    world.runner.advance(1000)
    assert len(world.events) == 1, "a copy in flight is not cancelled"
    world.settle()
    assert [type(e) for e in world.events] == [JobOverdue, JobSettled]


def test_an_overdue_job_still_counts_against_the_bound(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.runner.advance(IO_TIMEOUT_S)
    world.start(1)
    assert world.running() == [0]


def test_a_job_that_ends_in_time_is_never_overdue(worlds):
    world = worlds()
    world.start(0)
    world.runner.advance(IO_TIMEOUT_S - 0.1)
    world.settle()
    world.runner.advance(1000)
    assert [type(e) for e in world.events] == [JobSettled]


# -- probes -------------------------------------------------------------------------------------


def test_a_probe_is_answered_once(worlds):
    world = worlds()
    world.start(0)
    world.settle()
    world.events.clear()
    world.probe(5, [1, 2])
    world.settle()
    world.runner.advance(100)
    assert world.events == [Answered(5, frozenset({key_of(1)}))]


def test_a_hung_probe_is_answered_as_absent_at_its_deadline_and_not_again(worlds):
    world = worlds()
    world.start(0)
    world.settle()
    world.events.clear()
    world.probe(5)
    world.runner.advance(PROBE_TIMEOUT_S)
    assert world.events == [Answered(5, frozenset())]
    world.settle()
    assert len(world.events) == 1


@pytest.mark.parametrize("error", [OSError("io"), SystemExit(1), asyncio.CancelledError()])
def test_a_probe_that_fails_is_answered_as_absent(worlds, error, caplog):
    world = worlds()
    world.probe(5)
    world.settle(0, error=error)
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
    world.runner.loop.call_later(0.5, lambda: world.tier.settle(world.tier.parked[0]))
    report = world.close(1.0)
    assert report.is_clean
    assert world.settled()[0].job_error is None
    assert world.tier.close_count == 1


def test_close_fails_what_waits_first(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.start(1)
    world.runner.loop.call_later(0.5, lambda: world.tier.settle(world.tier.parked[0]))
    world.close(1.0)
    assert [e.job_id for e in world.events] == [1, 0]
    assert isinstance(world.settled()[1].job_error, TierClosedError)


def test_a_job_or_probe_that_comes_while_closing_is_answered_at_once(worlds):
    world = worlds()
    world.start(0)
    job = make_job(1, [key_of(1)], [0], is_promotion=False)
    world.runner.loop.call_later(0.2, world.actor.start_job, job)
    world.runner.loop.call_later(0.3, lambda: world.tier.settle(world.tier.parked[0]))
    world.close(1.0)
    assert [e.job_id for e in world.events] == [1, 0]
    assert isinstance(world.settled()[1].job_error, TierClosedError)


def test_close_cancels_what_does_not_end_and_waits_for_it_a_little(worlds):
    world = worlds()

    async def store(job):
        await asyncio.sleep(3600)

    world.tier.store = store
    world.start(0)
    report = world.close(1.0)
    assert report.is_clean
    assert isinstance(world.settled()[0].job_error, JobCancelledError)


def test_close_names_the_jobs_whose_copies_still_run_and_leaves_the_tier_open(worlds):
    world = worlds()
    world.start(3)
    world.start(4, is_promotion=True)
    report = world.close(1.0)
    assert set(report.unfinished_jobs) == {3, 4}
    assert isinstance(report.error, TierTimeoutError)
    assert world.tier.close_count == 0, "it is not closed under its copies"
    world.settle()
    world.settle()
    assert set(world.settled()) == {3, 4}, "a late end is still reported"


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


def test_a_failing_close_is_reported_and_not_raised(worlds):
    error = OSError("no")
    assert worlds(ScriptedTier(close_error=error)).close().error is error
    assert worlds(ScriptedTier(close_error=SystemExit(1))).close().error is not None


# -- the rest -----------------------------------------------------------------------------------


def test_a_use_of_blocks_reaches_the_tier(worlds):
    world = worlds()
    world.actor.touch([key_of(1), key_of(2)])
    assert world.tier.touched == [key_of(1), key_of(2)]


def test_a_tier_that_fails_to_note_a_use_is_only_logged(worlds, caplog):
    world = worlds()
    world.tier.touch = None
    world.actor.touch([key_of(1)])
    assert "touch failed" in caplog.text


def test_what_a_tier_announces_reaches_the_owner_in_order(worlds):
    world = worlds()
    world.tier.env.blocks_appeared([key_of(1)])
    world.tier.env.blocks_evicted([key_of(2)])
    assert world.events == [BlocksAppeared((key_of(1),)), BlocksEvicted((key_of(2),))]
