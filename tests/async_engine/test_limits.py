"""Failures of tiers and copies, deadlines, and bounded lines."""

import asyncio

import pytest
from async_engine.worlds import (
    FAR_S,
    LOAD,
    SCRIPTED,
    STORE,
    hashes,
    jump,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)

from kvoffload_async.abc.transport import Transfer
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import BusyError, ClosedError, ConfigError, StateError, TransportError

# -- failures -----------------------------------------------------------------------------------


@on_loop
async def test_a_store_that_fails_leaves_nothing_readable():
    async with (
        opened(tiers=[SCRIPTED]) as world,
        world.engine.request("r", hashes("ab")) as request,
    ):
        task = asyncio.create_task(world.engine.store(request, [0, 1]))
        await turns()
        world.transport.complete(error=OSError("injected"))
        with pytest.raises(TransportError, match="OSError: injected"):
            await task
        assert await world.engine.lookup(request) == 0
        assert world.counts == {"free": 8}
        assert not world.tiers[0].parked


@on_loop
async def test_a_load_that_fails_lets_go_of_its_pins():
    async with opened() as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            task = asyncio.create_task(world.engine.load(request, [8, 9]))
            await turns()
            world.transport.complete(error=TransportError("injected"))
            with pytest.raises(TransportError, match="injected"):
                await task
            assert world.counts == {"free": 6, "idle": 2}
            assert await world.engine.lookup(request) == 2, "the blocks themselves are fine"
        await world.check_rest()


@on_loop
async def test_a_copy_that_cannot_begin_is_a_failure_like_any_other():
    async with opened() as world:
        await world.put("ab")
        world.transport.refusal = RuntimeError("no stream")
        async with world.engine.request("r", hashes("abc")) as request:
            await world.engine.lookup(request)
            for call in (
                world.engine.load(request, [8, 9]),
                world.engine.store(request, [0], 2),
            ):
                with pytest.raises(TransportError, match="no stream"):
                    await call
            assert world.counts == {"free": 6, "idle": 2}
        await world.check_rest()


@on_loop
async def test_device_blocks_that_do_not_exist_are_a_failure_too():
    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        with pytest.raises(TransportError, match="no device block"):
            await world.engine.store(request, [64])
        with pytest.raises(StateError, match="numbers of device blocks"):
            await world.engine.store(request, ["x"])
        assert world.counts == {"free": 8}


@on_loop
async def test_a_transfer_that_raises_is_a_failure_too():
    class OddError(BaseException):
        pass

    class Odd(Transfer):
        def __init__(self, error):
            self.error = error

        async def outcome(self):
            raise self.error

        def synchronize(self, timeout_s):
            return True

    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        for error in (KeyError("odd"), OddError("odd")):
            world.transport.odd = Odd(error)
            with pytest.raises(TransportError, match="odd"):
                await world.engine.store(request, [0])
            assert world.counts == {"free": 8}


@on_loop
async def test_a_defect_of_the_core_reaches_everybody_who_waits():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        end_step = world.engine.driver.on_schedule_end

        def defective():
            end_step()
            raise StateError("a defect")

        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.lookup(request))
            await turns(1)
            world.engine.driver.on_schedule_end = defective
            await turns()
            with pytest.raises(StateError, match="the engine has failed: a defect"):
                await task
            with pytest.raises(StateError, match="has failed"):
                await world.engine.lookup(request)
            world.engine.driver.on_schedule_end = end_step
        loop = asyncio.get_running_loop()
        assert {str(c["exception"]) for c in loop.unhandled} == {"a defect"}
        loop.unhandled.clear()
        await world.calm()


@on_loop
async def test_a_tier_that_is_left_alone_is_tried_again_at_the_loops_time():
    breaker = {"breaker_fault_threshold": 1, "breaker_retry_s": FAR_S}
    async with opened(slots=4, tiers=[SCRIPTED], **breaker) as world:
        await only_in_the_tier(world, "ab")
        (tier,) = world.tiers
        async with world.engine.request("failing", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.lookup(request))
            await turns()
            tier.finish(tier.parked[0], error=OSError("injected"))
            assert await task == 0
        async with world.engine.request("early", hashes("ab")) as request:
            await jump(FAR_S - 1)
            assert await world.engine.lookup(request) == 0
        async with world.engine.request("later", hashes("ab")) as request:
            await jump(1.0)
            task = asyncio.create_task(world.engine.lookup(request))
            await turns()
            assert [len(load.keys) for load in tier.parked] == [2], "one job is the try"
            assert await world.during(task) == 2
            assert await world.during(world.engine.lookup(request)) == 2, "which has worked"
        await world.check_rest()


# -- deadlines, lines ---------------------------------------------------------------------------


@on_loop
async def test_a_call_that_gives_up_leaves_the_copy_and_its_place_alone():
    async with opened(bounds=EngineBounds(concurrent_stores=1)) as world:
        async with world.engine.request("r", hashes("ab")) as request:
            late = asyncio.create_task(world.engine.store(request, [0], 0, FAR_S))
            await turns()
            await jump()
            with pytest.raises(TimeoutError):
                await late
            assert world.counts == {"free": 7, "writing": 1}
            assert not await world.engine.quiesce(0)
            behind = asyncio.create_task(world.engine.store(request, [1], 1))
            await turns()
            assert len(world.parked) == 1, "the device is still busy with the first"
            world.transport.complete()
            assert await world.during(behind) == 1
            assert await world.engine.quiesce()
            assert await world.engine.lookup(request) == 2
        await world.check_rest()


@on_loop
async def test_quiescing_waits_for_the_last_copy():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        stores = [asyncio.create_task(world.engine.store(request, [i], i)) for i in range(2)]
        await turns()
        quiet = asyncio.create_task(world.engine.quiesce())
        await turns()
        world.transport.complete()
        await turns()
        assert not quiet.done()
        world.transport.complete()
        assert await quiet
        assert [await task for task in stores] == [1, 1]


@on_loop
async def test_who_watches_the_engine_is_woken_by_news_and_else_at_the_deadline():
    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        world.fill(hashes("a"), [0])
        store = asyncio.create_task(world.engine.store(request, [0]))
        watcher = asyncio.create_task(world.engine.wait_for_progress(FAR_S))
        await turns()
        assert not watcher.done()
        world.transport.complete()
        await turns()
        assert watcher.done()
        assert await store == 1
        patient = asyncio.create_task(world.engine.wait_for_progress(FAR_S))
        await turns()
        assert not patient.done()
        await jump()
        assert patient.done()
    with pytest.raises(ClosedError):
        await world.engine.wait_for_progress(FAR_S)


@on_loop
async def test_a_line_is_bounded_and_first_come_first_served():
    bounds = EngineBounds(concurrent_stores=1, waiting_calls=2)
    async with opened(bounds=bounds) as world, world.engine.request("r", hashes("abcd")) as request:
        tasks = [asyncio.create_task(world.engine.store(request, [i], i)) for i in range(3)]
        await turns()
        with pytest.raises(BusyError, match="too many stores are waiting"):
            await world.engine.store(request, [3], 3)
        for index in range(3):
            (copy,) = world.parked
            assert copy.parts[0].blocks.tolist() == [index]
            world.transport.complete()
            assert await tasks[index] == 1
        assert await world.during(world.engine.store(request, [3], 3)) == 1


@on_loop
async def test_waiting_in_line_counts_towards_the_deadline():
    async with (
        opened(bounds=EngineBounds(concurrent_stores=1)) as world,
        world.engine.request("r", hashes("ab")) as request,
    ):
        first = asyncio.create_task(world.engine.store(request, [0], 0, 10 * FAR_S))
        await turns()
        second = asyncio.create_task(world.engine.store(request, [1], 1, FAR_S))
        await turns()
        await jump()
        with pytest.raises(TimeoutError):
            await second
        assert await world.during(first) == 1
        assert world.counts == {"free": 7, "idle": 1}


@on_loop
async def test_loads_and_stores_do_not_starve_each_other():
    bounds = EngineBounds(concurrent_loads=1, concurrent_stores=1)
    async with opened(bounds=bounds) as world:
        await world.put("a")
        async with (
            world.engine.request("r", hashes("a")) as reader,
            world.engine.request("w", hashes("wxyz")) as writer,
        ):
            await world.engine.lookup(reader)
            stores = [asyncio.create_task(world.engine.store(writer, [i], i)) for i in range(4)]
            await turns()
            load = asyncio.create_task(world.engine.load(reader, [9]))
            await turns()
            assert [copy.direction for copy in world.parked] == [STORE, LOAD]
            world.transport.complete(world.parked[1])
            assert await load == 1
            for store in stores:
                assert await world.during(store) == 1


@pytest.mark.parametrize(
    "bound",
    [
        {"concurrent_loads": 0},
        {"concurrent_stores": 0},
        {"unread_events": 0},
        {"waiting_calls": -1},
    ],
)
def test_bounds_under_which_nothing_could_happen_are_refused(bound):
    with pytest.raises(ConfigError, match=next(iter(bound))):
        EngineBounds(**bound)
