"""The actor that runs a tier: bounds, deadlines, cancellation, and one end for every job."""

import asyncio
import gc
import logging
import weakref
from functools import partial

import pytest
from tiers.actors import IO_TIMEOUT_S

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted, JobFinished, JobOverdue
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    JobCancelledError,
    JobNotStartedError,
    TierBusyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.testing.harness import key_of, make_job

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
    world.finish_job()
    assert world.running() == [1]
    world.finish_job()
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
    assert list(world.finished()) == [3]
    assert isinstance(world.finished()[3].job_error, TierBusyError)
    world.finish_job()
    world.start(4)
    assert list(world.finished()) == [3, 0]


def test_many_small_jobs_run_where_few_large_ones_do(worlds):
    world = worlds(concurrent_stores=1, concurrent_blocks=4)
    for job_id, numbers in enumerate([(1, 2), (3,), (4,), (5,)]):
        world.start(job_id, numbers)
    assert world.running() == [0, 1, 2], "four blocks; the next job would be the fifth"
    world.finish_job()
    assert world.running() == [1, 2, 3]
    world.start(4, range(10, 15))
    world.start(5, [20])
    assert world.running() == [1, 2, 3], "nobody overtakes a large job"
    for _ in range(3):
        world.finish_job()
    assert world.running() == [4], "a large job runs, alone"
    world.finish_job()
    assert world.running() == [5]


# -- outcomes -----------------------------------------------------------------------------------


def test_a_job_finishes_once_with_its_duration(worlds):
    world = worlds()
    world.start(0)
    world.runner.advance(2.5)
    world.finish_job()
    assert world.events == [JobFinished(0, {}, None, 2.5)]


def test_a_job_finishes_before_an_eviction_that_follows_it_at_once(worlds):
    world = worlds()
    world.start(0)
    (parked,) = world.tier.parked
    evict = partial(world.tier.env.blocks_evicted, parked.keys)
    parked.future.add_done_callback(lambda _: world.runner.loop.call_soon(evict))
    world.finish_job()
    assert world.events == [JobFinished(0, {}, None, 0.0), BlocksEvicted(parked.keys)]


def test_waiting_counts_in_a_jobs_duration(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.start(1)
    world.runner.advance(3.0)
    world.finish_job()
    world.finish_job()
    assert world.finished()[1].seconds == pytest.approx(3.0)


def test_failed_blocks_are_reported_one_by_one(worlds):
    world = worlds()
    world.start(0, [1, 2, 3])
    world.finish_job(0, {1: CorruptBlockError("bad")})
    assert list(world.finished()[0].failures) == [1]
    assert world.finished()[0].job_error is None


def test_a_missing_key_finishes_its_job_once_42529(worlds):
    world = worlds()
    world.start(0, [1], is_promotion=True)
    world.finish_job()
    (event,) = world.events
    assert isinstance(event.failures[0], BlockMissingError)


def test_an_empty_job_finishes_without_reaching_the_tier(worlds):
    world = worlds()
    world.start(0, [])
    world.start(1, [], is_promotion=True)
    assert not world.tier.parked
    assert [e.failures for e in world.finished().values()] == [{}, {}]


@pytest.mark.parametrize("error", [TierUnavailableError("no"), TierClosedError("no")])
def test_a_tier_error_is_passed_on_as_it_is(worlds, error):
    world = worlds()
    world.start(0)
    world.finish_job(0, error=error)
    assert world.finished()[0].job_error is error


@pytest.mark.parametrize(
    "error", [OSError(5, "io"), ValueError("v"), KeyError("k"), MemoryError(), GeneratorExit()]
)
def test_any_other_error_becomes_an_unavailable_tier_with_its_cause(worlds, error):
    world = worlds()
    world.start(0)
    world.finish_job(0, error=error)
    mapped = world.finished()[0].job_error
    assert type(mapped) is TierUnavailableError
    assert mapped.__cause__ is error
    assert type(error).__name__ in str(mapped)


def test_a_tier_that_wants_to_exit_fails_its_job_and_not_the_loop(worlds):
    world = worlds()
    world.start(0)
    world.finish_job(0, error=SystemExit(3))
    assert isinstance(world.finished()[0].job_error, TierUnavailableError)
    world.start(1)
    world.finish_job()
    assert world.finished()[1].job_error is None


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
    assert isinstance(world.finished()[0].job_error, TierUnavailableError)
    assert "contract" in str(world.finished()[0].job_error)


def test_that_a_tier_is_full_is_logged_once_a_minute_with_a_count(worlds, caplog):
    world = worlds()
    for job_id in range(100):
        world.start(job_id)
        world.finish_job(0, error=TierFullError("no room"))
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    world.runner.run(asyncio.sleep(60.0), 61.0)
    world.start(200)
    world.finish_job(0, error=TierFullError("no room"))
    first, second = [record.getMessage() for record in caplog.records]
    assert "no room (no blocks are stored until" in first
    assert "no room (99 more since the last such line) (no blocks" in second


def test_a_failed_job_is_logged_as_an_error_but_a_missing_block_is_not(worlds, caplog):
    caplog.set_level(logging.DEBUG)
    world = worlds()
    world.start(7)
    world.finish_job(0, error=OSError(5, "broken disk"))
    world.start(8, is_promotion=True)
    world.finish_job()
    levels = {r.getMessage().split(" failed after ")[0]: r.levelname for r in caplog.records}
    assert [levels.pop(text) for text in list(levels) if text.startswith("Traceback")] == ["DEBUG"]
    assert sorted((text.split(": ")[1].split(" (")[1], at) for text, at in levels.items()) == [
        ("job 7)", "ERROR"),
        ("job 8)", "DEBUG"),
    ]
    assert all(" of 1 blocks for request " in text for text in levels)


def test_an_error_that_is_kept_does_not_keep_what_its_frames_held(worlds):
    world = worlds()
    held = []

    class Big:
        pass

    async def store(job):
        big = Big()
        held.append(weakref.ref(big))
        raise TierUnavailableError("mapped") from OSError(5, "io")

    world.tier.store = store
    world.start(0)
    gc.collect()
    assert isinstance(world.finished()[0].job_error.__cause__, OSError)
    assert held[0]() is None


# -- cancellation -------------------------------------------------------------------------------


def test_a_job_whose_task_is_cancelled_before_its_first_step_finishes_42529(worlds):
    world = worlds()
    job = make_job(0, [key_of(1)], [0], is_promotion=False)

    def start_and_cancel():
        world.actor.start_job(job)
        assert world.task("t:store:0").cancel()

    world.runner.call_soon(start_and_cancel)
    world.runner.run_ready()
    assert not world.tier.parked, "its body never ran"
    assert isinstance(world.finished()[0].job_error, JobCancelledError)


def test_a_job_whose_task_is_cancelled_in_flight_finishes_when_its_bytes_rest(worlds):
    world = worlds()
    world.start(0)
    world.task("t:store:0").cancel()
    world.runner.run_ready()
    assert not world.events
    world.finish_job()
    assert isinstance(world.finished()[0].job_error, JobCancelledError)


def test_a_cancelled_job_makes_room_for_the_next(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.start(1)
    world.finish_job(0, error=asyncio.CancelledError())
    assert world.running() == [1]


# -- deadlines ----------------------------------------------------------------------------------


def test_a_job_that_waits_past_its_deadline_finishes_without_having_run(worlds):
    world = worlds(concurrent_stores=1)
    world.start(0)
    world.runner.advance(10)
    world.start(1)
    world.runner.advance(25)
    assert [type(e) for e in world.events] == [JobOverdue], "job 0 runs, and is overdue"
    world.runner.advance(5)
    assert isinstance(world.finished()[1].job_error, TierTimeoutError)
    world.finish_job()
    assert not world.tier.parked, "job 1 never ran"


def test_a_job_queued_until_its_deadline_behind_others_that_end_is_not_the_tiers_fault(worlds):
    world = worlds(concurrent_stores=1)
    for job_id in range(3):
        world.start(job_id)
    world.runner.advance(IO_TIMEOUT_S / 2)
    world.finish_job()
    world.runner.advance(IO_TIMEOUT_S / 2)
    error = world.finished()[2].job_error
    assert isinstance(error, JobNotStartedError)
    assert "not started" in str(error)


@pytest.mark.parametrize(
    "failure", [TierUnavailableError("down"), JobNotStartedError("queued in the tier"), None]
)
def test_a_job_queued_until_its_deadline_behind_a_tier_that_hangs_or_fails_is_its_fault(
    worlds, failure
):
    world = worlds(concurrent_stores=1)
    for job_id in range(3):
        world.start(job_id)
    world.runner.advance(IO_TIMEOUT_S / 2)
    if failure is not None:
        world.finish_job(failures={0: failure})
    world.runner.advance(IO_TIMEOUT_S / 2)
    assert type(world.finished()[2].job_error) is TierTimeoutError


def test_a_job_that_runs_past_its_deadline_is_overdue_then_finishes(worlds):
    world = worlds()
    world.start(0)
    world.runner.advance(IO_TIMEOUT_S)
    (overdue,) = world.events
    assert isinstance(overdue, JobOverdue)
    assert isinstance(overdue.error, TierTimeoutError)
    world.runner.advance(1000)
    assert len(world.events) == 1, "a copy in flight is not cancelled"
    world.finish_job()
    assert [type(e) for e in world.events] == [JobOverdue, JobFinished]


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
    world.finish_job()
    world.runner.advance(1000)
    assert [type(e) for e in world.events] == [JobFinished]


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


def test_a_tier_tells_of_many_blocks_in_portions_and_in_order(worlds):
    world = worlds()
    keys = [key_of(number) for number in range(2500)]
    world.tier.env.blocks_evicted(keys)
    assert [len(event.keys) for event in world.events] == [1024, 1024, 452]
    assert [key for event in world.events for key in event.keys] == keys


def test_a_map_of_what_a_tier_holds_goes_to_the_owner_as_it_is(worlds):
    world = worlds()
    held = KeyMap()
    held.update([key_of(1), key_of(2)], [10, 20])
    world.tier.env.blocks_appeared(held)
    (event,) = world.events
    assert event.keys is held
