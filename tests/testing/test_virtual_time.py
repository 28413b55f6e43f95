"""The virtual loop: time that passes by itself, and nothing that goes unnoticed."""

import asyncio

import pytest
from virtual_runner import LeftoverTasksError, VirtualRunner

from kvoffload_async.errors import ClosedError, StateError
from kvoffload_async.testing import VirtualLoop


@pytest.fixture
def runner():
    with VirtualRunner() as runner:
        yield runner


async def sleep_then(seconds, value):
    await asyncio.sleep(seconds)
    return value


def test_an_hour_passes_in_no_time(runner):
    assert runner.run(sleep_then(3600.0, "done"), 4000.0) == "done"
    assert runner.now_s() == 3600.0


def test_days_pass_too(runner):
    assert runner.run(sleep_then(1e7, "done"), 2e7) == "done"
    assert runner.now_s() == pytest.approx(1e7)


def test_timers_run_in_order_at_their_times(runner):
    seen = []
    for delay in (3.0, 1.0, 2.0):
        runner.loop.call_later(delay, lambda delay=delay: seen.append((delay, runner.now_s())))
    runner.advance(2.5)
    assert seen == [(1.0, 1.0), (2.0, 2.0)]
    assert runner.now_s() == 2.5
    runner.advance(0.5)
    assert seen[-1] == (3.0, 3.0)


def test_what_is_ready_runs_without_time_passing(runner):
    seen = []
    runner.loop.call_later(1.0, seen.append, "later")
    runner.call_soon(lambda: runner.loop.call_soon(seen.append, "now"))
    runner.run_ready()
    assert seen == ["now"]
    assert runner.now_s() == 0.0


def test_time_stands_still_between_calls(runner):
    runner.run_ready()
    runner.advance(0.0)
    assert runner.now_s() == 0.0


def test_time_passes_though_nothing_is_to_be_done(runner):
    runner.advance(5.0)
    assert runner.now_s() == 5.0


def test_run_gives_up_at_its_virtual_deadline_and_cancels(runner):
    cancelled = []

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(1)

    with pytest.raises(TimeoutError, match="7"):
        runner.run(hang(), 7.0)
    assert cancelled
    assert runner.now_s() == 7.0


def test_run_raises_what_the_coroutine_raised(runner):
    async def fail():
        raise OSError("boom")

    with pytest.raises(OSError, match="boom"):
        runner.run(fail(), 1.0)


def test_run_from_inside_the_loop_is_refused(runner):
    async def nested():
        return runner.run(sleep_then(0, 1), 1.0)

    with pytest.raises(StateError, match="deadlock"):
        runner.run(nested(), 1.0)


def test_wait_until_steps_to_the_moment_or_to_its_deadline(runner):
    done = []
    runner.loop.call_later(2.0, done.append, 1)
    assert not runner.wait_until(lambda: bool(done), 1.5)
    assert runner.now_s() == 1.5
    assert runner.wait_until(lambda: bool(done), 1.5)
    assert runner.now_s() == 2.0
    runner.notify()


def test_wait_until_asks_once_more_at_its_deadline(runner):
    assert runner.wait_until(lambda: runner.now_s() >= 1.0, 1.0)


def test_an_exception_out_of_a_callback_is_raised_and_not_only_logged(runner):
    runner.call_soon(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.run_ready()
    runner.run_ready()


def test_a_complaint_without_an_exception_is_raised_too(runner):
    runner.call_soon(lambda: runner.loop.call_exception_handler({"message": "odd"}))
    with pytest.raises(StateError, match="odd"):
        runner.run_ready()


def test_a_loop_that_spins_is_found_out(runner):
    def spin():
        runner.loop.call_soon(spin)

    runner.call_soon(spin)
    with pytest.raises(StateError, match="busy loop"):
        runner.run_ready()


def test_closing_with_tasks_left_names_them_and_ends_them():
    runner = VirtualRunner()
    task = runner.loop.create_task(sleep_then(100, None), name="forgotten")
    runner.run_ready()
    with pytest.raises(LeftoverTasksError, match="forgotten"):
        runner.close()
    assert task.cancelled()
    runner.close()


def test_a_closed_runner_refuses_work():
    runner = VirtualRunner()
    runner.close()
    with pytest.raises(ClosedError):
        runner.call_soon(print)
    with pytest.raises(ClosedError):
        runner.run(sleep_then(0, 1), 1.0)
    assert runner.wait_until(lambda: True, 1.0)


def test_asyncio_can_drive_the_loop_itself():
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(sleep_then(3600, "done")) == "done"


def test_a_deadlock_under_asyncio_is_an_error_and_not_a_hang():
    loop = VirtualLoop()
    task = loop.create_task(asyncio.Event().wait(), name="waits for ever")
    with pytest.raises(StateError, match="deadlock"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_ready()
    loop.close()


def test_wake_ups_are_counted(runner):
    for _ in range(3):
        runner.call_soon(int)
    assert runner.callbacks == 3
