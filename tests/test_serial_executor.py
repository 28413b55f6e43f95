"""Calls that share a thread: none suffers from another."""

import asyncio
import threading

import pytest

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import TierBusyError, TierUnavailableError
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.waiting import SerialExecutor

WAIT_S = 60.0


class World:
    """A shared thread of a pool, and one call that hangs until it is released."""

    def __init__(self, pool):
        self.pool = pool
        self.handed_over = 0
        self.refusal = None
        self.shared = SerialExecutor("test", self.hand_over)
        self.entered, self.release = threading.Event(), threading.Event()
        self.made = []

    async def hand_over(self, call):
        if self.refusal is not None:
            raise self.refusal
        self.handed_over += 1
        await self.pool.run(Direction.STORE, call)

    def hang(self):
        self.entered.set()
        self.release.wait(WAIT_S)
        return "hung"

    def note(self, item):
        self.made.append(item)
        return item

    def begin(self, call):
        return asyncio.create_task(self.shared.run(call))

    def begin_all(self, items):
        return [self.begin(lambda item=item: self.note(item)) for item in items]


async def results(tasks):
    return [await task for task in tasks]


def run(scenario):
    async def perform():
        pool = IoPool(2, 2, 1)
        world = World(pool)
        try:
            await asyncio.wait_for(scenario(world), WAIT_S)
        finally:
            world.release.set()
            await world.shared.close()
            assert pool.close(WAIT_S) == 0

    asyncio.run(perform())


def test_calls_that_wait_together_are_one_hand_over_and_each_has_its_own_result():
    async def scenario(world):
        assert await results(world.begin_all(range(5))) == list(range(5))
        assert world.handed_over == 1

    run(scenario)


def test_a_call_that_fails_costs_the_others_nothing():
    def fail():
        raise OSError("bad")

    async def scenario(world):
        before, bad, after = *world.begin_all("a"), world.begin(fail), *world.begin_all("b")
        with pytest.raises(OSError, match="bad"):
            await bad
        assert await results([before, after]) == ["a", "b"]

    run(scenario)


def test_a_call_that_hangs_holds_up_neither_what_was_before_it_nor_what_comes_behind():
    async def scenario(world):
        tasks = [*world.begin_all("ab"), world.begin(world.hang), *world.begin_all("cd")]
        assert await results([*tasks[:2], *tasks[3:]]) == list("abcd")
        assert not tasks[2].done()
        assert await results(world.begin_all("ef")) == list("ef")
        world.release.set()
        assert await tasks[2] == "hung"

    run(scenario)


def test_a_call_that_hangs_is_cancelled_once_it_has_ended_and_one_behind_it_at_once():
    async def scenario(world):
        hung, behind = world.begin(world.hang), *world.begin_all("a")
        while not world.entered.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0)
        for task in (hung, behind):
            task.cancel()
        await asyncio.wait({behind})
        assert behind.cancelled()
        assert not hung.done()
        world.release.set()
        await asyncio.wait({hung})
        assert hung.cancelled()
        assert not world.made

    run(scenario)


def test_without_a_thread_all_that_wait_are_told():
    async def scenario(world):
        world.refusal = TierBusyError("full")
        for task in world.begin_all("ab"):
            with pytest.raises(TierBusyError, match="full"):
                await task
        world.refusal = RuntimeError("broken")
        with pytest.raises(TierUnavailableError, match="broken"):
            await world.begin_all("c")[0]
        world.refusal = None
        assert await world.begin_all("d")[0] == "d"
        assert world.made == ["d"]

    run(scenario)
