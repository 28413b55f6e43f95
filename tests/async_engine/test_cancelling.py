"""A call that is cancelled leaves nothing half-owned."""

import asyncio
import itertools

import pytest
from async_engine.worlds import (
    SCRIPTED,
    hashes,
    on_loop,
    opened,
    seed,
    turns,
)

from kvoffload_async.abc.transport import Transfer
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import BusyError, TransportError


async def look(world, request):
    await world.engine.lookup(request)


async def look_and_load(world, request):
    found = await world.engine.lookup(request)
    await world.engine.load(request, list(range(20, 20 + found)))


async def store(world, request):
    world.fill(hashes(request.text), range(30, 30 + len(request.text)))
    await world.engine.store(request, list(range(30, 30 + len(request.text))))


async def whole(world, request):
    await look_and_load(world, request)
    await store(world, request)


@pytest.mark.parametrize("text", ["ab", "xy", "qrs"])
@pytest.mark.parametrize("call", [look, look_and_load, store, whole])
@on_loop
async def test_cancelling_at_any_point_leaves_nothing_half_owned(call, text):
    for moment in itertools.count():
        async with opened(slots=4, tiers=[SCRIPTED]) as world:
            await seed(world)

            async def serve(world=world):
                async with world.engine.request("r", hashes(text)) as request:
                    request.text = text
                    await call(world, request)

            task = asyncio.create_task(serve())
            for turn in range(moment):
                await turns(1)
                if turn % 4 == 3:  # slower than the calls, so that they are met waiting
                    world.finish_everything()
            was_done = task.done()
            task.cancel()
            await turns()
            assert task.done(), "a cancelled call returns at once"
            await world.check_rest()
            await check_contents(world, text)
        if was_done:
            return


async def check_contents(world, text):
    """Whatever is readable is right."""
    async with world.engine.request("check", hashes(text)) as request:
        found = await world.during(world.engine.lookup(request))
        blocks = list(range(50, 50 + found))
        assert await world.during(world.engine.load(request, blocks)) == found
        assert world.holds(hashes(text)[:found], blocks)
        if text == "ab":
            assert found == 2
    await world.check_rest()


@on_loop
async def test_a_cancelled_store_goes_on_and_its_slot_is_not_given_away():
    async with opened(slots=2, reserved=0) as world:
        world.fill(hashes("ab"), [0, 1])
        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.store(request, [0, 1]))
            await turns()
            task.cancel()
            await turns()
            assert task.cancelled()
            assert world.counts == {"writing": 2}
            async with world.engine.request("s", hashes("xy")) as other:
                with pytest.raises(BusyError):
                    await world.engine.store(other, [4, 5], 0, 0)
            world.transport.complete()
            await turns()
            assert await world.engine.lookup(request) == 2
        await world.check_rest()


@on_loop
async def test_a_cancelled_load_keeps_its_pins_until_the_bytes_have_stopped():
    async with opened(slots=2, reserved=0) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            task = asyncio.create_task(world.engine.load(request, [8, 9]))
            await turns()
            task.cancel()
            await turns()
            assert world.counts == {"pinned": 2}
            world.transport.complete()
            await turns()
            assert world.counts == {"idle": 2}
        await world.check_rest()


@on_loop
async def test_cancelling_every_task_of_the_loop_ends_no_copy():
    async with opened() as world:
        world.fill(hashes("a"), [0])
        async with world.engine.request("r", hashes("a")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            for _ in range(2):
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await turns()
            assert storing.cancelled()
            assert world.counts == {"free": 7, "writing": 1}
            world.transport.complete()
            await turns()
            assert await world.engine.lookup(request) == 1


@on_loop
async def test_a_cancelled_place_in_line_is_given_on():
    async with opened(bounds=EngineBounds(concurrent_stores=1)) as world:
        async with world.engine.request("r", hashes("abc")) as request:
            tasks = [asyncio.create_task(world.engine.store(request, [i], i)) for i in range(3)]
            await turns()
            tasks[1].cancel()
            await turns()
            world.transport.complete()
            assert await tasks[0] == 1
            assert await world.during(tasks[2]) == 1
        await world.check_rest()


class CancelsItself(Transfer):
    """Says whenever it is asked that it was cancelled."""

    asked = 0

    async def outcome(self):
        self.asked += 1
        raise asyncio.CancelledError

    def synchronize(self, timeout_s):
        return True


@on_loop
async def test_a_transport_that_cancels_a_copy_by_itself_has_failed_it_and_is_not_asked_for_ever():
    async with opened() as world:
        world.transport.odd = transfer = CancelsItself()
        async with world.engine.request("r", hashes("a")) as request:
            with pytest.raises(TransportError, match="by itself"):
                await world.engine.store(request, [0])
        assert transfer.asked == 1
        assert world.counts == {"free": 8}
