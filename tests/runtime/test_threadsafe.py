"""Runners over a loop that somebody else runs."""

import asyncio
import threading

import pytest

from kvoffload_async.errors import ClosedError, StateError
from kvoffload_async.runtime.loop import LoopRunner, SameLoopRunner
from kvoffload_async.testing import VirtualLoop

DEADLINE_S = 60.0


async def value_of(value):
    return value


def test_another_thread_hands_things_over_until_the_runner_is_closed():
    async def main():
        runner = LoopRunner(asyncio.get_running_loop())
        called = asyncio.Event()

        def elsewhere():
            runner.call_soon(called.set)
            value = runner.run(value_of(5), DEADLINE_S)
            runner.close()
            with pytest.raises(ClosedError):
                runner.run(value_of(6), DEADLINE_S)
            return value

        assert await asyncio.wait_for(asyncio.to_thread(elsewhere), DEADLINE_S) == 5
        assert called.is_set()

    asyncio.run(main())


def test_running_on_the_loops_own_thread_is_refused():
    async def main():
        runner = LoopRunner(asyncio.get_running_loop())
        with pytest.raises(StateError, match="own thread"):
            runner.run(value_of(1), DEADLINE_S)

    asyncio.run(main())


def test_the_loop_that_is_gone_takes_nothing():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(ClosedError):
        LoopRunner(loop).call_soon(print)


def test_the_owner_on_the_loop_needs_no_wake_up_and_hears_of_progress():
    async def main():
        loop = asyncio.get_running_loop()
        heard, called = asyncio.Event(), []
        runner = SameLoopRunner(loop, heard.set)
        runner.call_soon(called.append, "here")
        await asyncio.to_thread(runner.call_soon, called.append, "there")
        await asyncio.wait_for(asyncio.to_thread(runner.notify), DEADLINE_S)
        await asyncio.wait_for(heard.wait(), DEADLINE_S)
        assert called == ["here", "there"]

    asyncio.run(main())


def test_the_time_of_an_owner_on_the_loop_is_the_loops():
    loop = VirtualLoop()
    runner = SameLoopRunner(loop, int)
    loop.advance(40.0)
    assert runner.now_s() == 40.0
    loop.close()


def test_waiting_is_for_a_helper_thread_and_is_woken_by_progress():
    async def main():
        runner = SameLoopRunner(asyncio.get_running_loop(), int)
        done, waiting = [], threading.Event()

        def is_done():
            waiting.set()
            return bool(done)

        waiter = asyncio.create_task(
            asyncio.to_thread(runner.wait_until, is_done, DEADLINE_S), name="waiter"
        )
        assert await asyncio.to_thread(waiting.wait, DEADLINE_S)
        done.append(1)
        runner.notify()
        assert await asyncio.wait_for(waiter, DEADLINE_S)
        assert not await asyncio.to_thread(runner.wait_until, lambda: False, 0.0)
        assert runner.now_s() > 0

    asyncio.run(main())


def test_a_loop_that_has_ended_by_itself_is_closed_and_no_coroutine_is_left_unawaited():
    loop = asyncio.new_event_loop()
    runner = LoopRunner(loop)
    loop.close()
    with pytest.raises(ClosedError, match="the loop thread is closed"):
        runner.run(asyncio.sleep(0), 1.0)
