"""Waits that a cancellation does not cut short."""

import asyncio
import gc
import weakref
from functools import partial

import pytest
from virtual_runner import VirtualRunner

from kvoffload_async.waiting import LastingFuture, Limiter, all_done, until_done

MINUTE = 60.0


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


async def awaiter_of(future):
    """Return a task that awaits a future."""
    task = asyncio.create_task(_await(future))
    await turns()
    return task


async def _await(future):
    return await future


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_awaiter_waits_for_the_end_and_is_cancelled_then(times):
    async def check():
        future = LastingFuture()
        task = await awaiter_of(future)
        for _ in range(times):
            task.cancel()
            await turns()
        assert not task.done()
        assert not future.done()
        future.set_result(1)
        await turns()
        assert task.cancelled()
        assert future.result() == 1

    asyncio.run(check())


def test_without_a_cancellation_it_ends_as_any_future():
    async def check():
        future = LastingFuture()
        task = await awaiter_of(future)
        future.set_result(7)
        assert await task == 7
        failed = LastingFuture()
        task = await awaiter_of(failed)
        failed.set_exception(OSError("no"))
        with pytest.raises(OSError, match="no"):
            await task

    asyncio.run(check())


def test_what_is_withdrawn_is_cancelled_at_once():
    async def check():
        future = LastingFuture(lambda: True)
        task = await awaiter_of(future)
        task.cancel()
        await turns()
        assert task.cancelled()
        assert future.cancelled()

    asyncio.run(check())


def test_each_cancellation_before_the_end_withdraws_and_none_after_it():
    calls = []

    async def check():
        future = LastingFuture(lambda: calls.append(1))
        task = await awaiter_of(future)
        task.cancel()
        task.cancel()
        future.set_result(None)
        task.cancel()
        await turns()
        assert task.cancelled()

    asyncio.run(check())
    assert calls == [1, 1]


def test_an_error_that_a_cancelled_awaiter_never_sees_is_not_reported_as_forgotten():
    reported = []

    async def check():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        future = LastingFuture()
        task = await awaiter_of(future)
        task.cancel()
        future.set_exception(OSError("no"))
        await turns()
        assert task.cancelled()

    asyncio.run(check())
    gc.collect()
    assert reported == []


@pytest.mark.parametrize("end", ["result", "error", "withdrawn"])
def test_at_its_end_it_lets_go_of_what_withdraws_it(end):
    class Waiter:
        pass

    async def check():
        waiter = Waiter()
        waiter.future = LastingFuture(partial(bool, waiter))
        alive = weakref.ref(waiter)
        if end == "result":
            waiter.future.set_result(None)
        elif end == "error":
            waiter.future.set_exception(OSError)
            waiter.future.exception()
        else:
            waiter.future.cancel()
        del waiter
        return alive() is None

    gc.disable()
    try:
        assert asyncio.run(check())
    finally:
        gc.enable()


def test_all_ends_are_awaited_through_a_cancellation():
    async def check():
        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
        futures[0].set_result(None)
        task = asyncio.create_task(all_done(*futures))
        await turns()
        task.cancel()
        futures[1].set_exception(OSError("its own affair"))
        futures[1].exception()
        await turns()
        assert not task.done()
        futures[2].cancel()
        await turns()
        assert task.cancelled()
        await all_done(*futures)

    asyncio.run(asyncio.wait_for(check(), MINUTE))


def test_until_done_returns_the_result_or_raises_the_error_or_the_cancellation():
    async def check():
        async def end(how):
            await turns()
            return 1 // how

        assert await until_done(asyncio.create_task(end(1))) == 1
        with pytest.raises(ZeroDivisionError):
            await until_done(asyncio.create_task(end(0)))
        inner = asyncio.create_task(end(0))
        outer = asyncio.create_task(until_done(inner))
        await asyncio.sleep(0)
        outer.cancel()
        await asyncio.wait({outer})
        assert outer.cancelled()
        assert inner.done()
        inner = asyncio.create_task(end(1))
        inner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await until_done(inner)

    asyncio.run(asyncio.wait_for(check(), MINUTE))


def test_calls_pass_in_their_order_as_far_as_bytes_and_calls_allow():
    runner, order = VirtualRunner(), []
    limiter = Limiter(2, 100)

    async def call(name, num_bytes):
        with await limiter.acquire(num_bytes):
            order.append(name)
            await asyncio.sleep(1.0)

    async def all_calls():
        async with asyncio.TaskGroup() as group:
            for name, num_bytes in (("a", 60), ("b", 60), ("c", 10), ("d", 500)):
                group.create_task(call(name, num_bytes))

    runner.run(all_calls(), 10.0)
    assert order == ["a", "b", "c", "d"]
    assert runner.loop.time() == 3.0
    assert limiter.bytes_in_flight == 0
    runner.close()


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_who_is_cancelled_gives_back_what_it_had_and_who_waits_behind_it_goes_on(cancelled):
    runner, ended = VirtualRunner(), []
    limiter = Limiter(4, 100)

    async def call(number, num_bytes):
        with await limiter.acquire(num_bytes):
            await asyncio.sleep(1.0)
            ended.append(number)

    async def all_calls():
        loop = asyncio.get_running_loop()
        sizes = enumerate((100, 100, 50))
        tasks = [loop.create_task(call(number, size)) for number, size in sizes]
        await asyncio.sleep(0.5)
        tasks[cancelled].cancel()
        await asyncio.wait(tasks)

    runner.run(all_calls(), 10.0)
    assert ended == [number for number in range(3) if number != cancelled]
    assert limiter.bytes_in_flight == 0
    runner.close()


def test_who_is_cancelled_as_its_turn_comes_gives_it_back():
    runner = VirtualRunner()
    limiter = Limiter(1, 1)

    async def wait():
        with await limiter.acquire(1):
            raise AssertionError("it was cancelled before")

    async def all_calls():
        with await limiter.acquire(1):
            task = asyncio.get_running_loop().create_task(wait())
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        with await limiter.acquire(1):
            pass

    runner.run(all_calls(), 10.0)
    assert limiter.bytes_in_flight == 0
    runner.close()


def test_a_kept_permit_is_given_back_by_its_keeper():
    runner = VirtualRunner()
    limiter = Limiter(1)

    async def hold():
        with await limiter.acquire() as permit:
            give_back = permit.keep()
        assert limiter.try_acquire() is None
        waiting = asyncio.create_task(limiter.acquire())
        await turns()
        assert not waiting.done()
        give_back()
        with await waiting:
            assert limiter.try_acquire() is None
        assert limiter.try_acquire() is not None

    runner.run(hold(), 10.0)
    runner.close()


def test_an_opened_limiter_admits_every_caller_that_waits():
    runner = VirtualRunner()
    limiter = Limiter(1)

    async def hold():
        with await limiter.acquire():
            waiting = [asyncio.create_task(limiter.acquire()) for _ in range(3)]
            await turns()
            limiter.open()
            await asyncio.wait(waiting)
            assert all(task.exception() is None for task in waiting)

    runner.run(hold(), 10.0)
    runner.close()
