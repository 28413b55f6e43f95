"""Calls that are shared: who is served by which, and what becomes of those who go."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.testing.fakes import VirtualLoop
from kvoffload_async.waiting import Coalescer


class World:
    """A grouped call whose calls end when the test says so."""

    def __init__(self):
        self.grouped = Coalescer("test", self.call, self.run)
        self.taken = []
        self.running = []

    def call(self, items, is_awaited):
        self.taken.append(list(items))
        self.is_awaited = is_awaited

    async def run(self, call):
        call()
        future = asyncio.get_running_loop().create_future()
        self.running.append(future)
        await asyncio.shield(future)

    def end(self, index=0, error=None):
        future = self.running.pop(index)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def add(self, item):
        return asyncio.create_task(self.grouped.add(item))


async def run_ready():
    for _ in range(6):
        await asyncio.sleep(0)


def run(scenario):
    async def perform():
        world = World()
        await scenario(world)
        await run_ready()
        while world.running:
            world.end()
            await run_ready()
        await world.grouped.close()

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(perform())
    finally:
        loop.close()


def test_who_comes_while_a_call_is_made_is_served_by_the_next_together():
    async def scenario(world):
        tasks = [world.add(1)]
        await run_ready()
        tasks += [world.add(2), world.add(3)]
        await run_ready()
        assert world.taken == [[1]]
        world.end()
        await run_ready()
        assert world.taken == [[1], [2, 3]]
        assert [task.done() for task in tasks] == [True, False, False]
        world.end()
        await run_ready()
        assert [task.result() for task in tasks] == [None] * 3

    run(scenario)


def test_what_a_call_raises_is_of_those_whom_it_served():
    async def scenario(world):
        first = world.add(1)
        await run_ready()
        second = world.add(2)
        error = OSError("full")
        world.end(error=error)
        await run_ready()
        world.end()
        assert (await first, await second) == (error, None)

    run(scenario)


def test_who_is_cancelled_before_the_call_is_left_out():
    async def scenario(world):
        world.add(1)
        await run_ready()
        second, third = world.add(2), world.add(3)
        await run_ready()
        second.cancel()
        await run_ready()
        assert second.cancelled()
        world.end()
        await run_ready()
        assert world.taken == [[1], [3]]
        world.end()
        assert await third is None

    run(scenario)


def test_who_is_cancelled_during_the_call_waits_for_its_end():
    async def scenario(world):
        task = world.add(1)
        await run_ready()
        assert world.is_awaited()
        for _ in range(2):
            task.cancel()
            await run_ready()
            assert not task.done()
            assert not world.is_awaited()
        world.end()
        await run_ready()
        assert task.cancelled()

    run(scenario)


def test_a_call_that_hangs_is_not_waited_for_and_no_more_than_a_few_are_begun():
    async def scenario(world):
        tasks = []
        for number in range(5):
            tasks.append(world.add(number))
            await asyncio.sleep(1)
        assert world.taken == [[0], [1], [2]]
        world.end(1)
        await asyncio.sleep(0.1)
        assert world.taken[3:] == [[3, 4]]
        assert [task.done() for task in tasks] == [False, True, False, False, False]

    run(scenario)


def test_who_waits_learns_that_the_service_was_cancelled():
    async def scenario(world):
        task = world.add(1)
        await run_ready()
        for service in world.grouped._tasks:
            service.cancel()
        assert isinstance(await task, asyncio.CancelledError)

    run(scenario)


@given(st.lists(st.sampled_from(["add", "end", "fail", "cancel", "sleep"]), max_size=40))
def test_everybody_is_served_once(steps):
    async def scenario(world):
        tasks = []
        for step in steps:
            if step == "add":
                tasks.append(world.add(len(tasks)))
            elif step == "cancel" and tasks:
                tasks[len(tasks) // 2].cancel()
            elif step == "sleep":
                await asyncio.sleep(0.3)
            elif world.running and step in {"end", "fail"}:
                world.end(-1, OSError() if step == "fail" else None)
            await run_ready()
        while world.running:
            world.end()
            await run_ready()
        assert all(task.done() for task in tasks)
        served = [item for items in world.taken for item in items]
        assert len(set(served)) == len(served)
        assert {i for i, task in enumerate(tasks) if not task.cancelled()} <= set(served)

    run(scenario)


@pytest.mark.parametrize("count", [1, 3])
def test_closing_waits_for_the_calls(count):
    async def scenario(world):
        tasks = [world.add(number) for number in range(count)]
        await run_ready()
        closing = asyncio.create_task(world.grouped.close())
        await run_ready()
        assert not closing.done()
        world.end()
        await closing
        assert all([await task is None for task in tasks])

    run(scenario)
