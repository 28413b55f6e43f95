"""Which device blocks a request's copies occupy, and until when."""

import asyncio

import pytest
from async_engine.worlds import FAR_S, hashes, jump, on_loop, opened, turns

from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import TransportError


@on_loop
async def test_a_load_that_gave_up_occupies_its_blocks_until_its_copy_has_ended():
    async with opened() as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            loading = asyncio.create_task(world.engine.load(request, [8, 9], FAR_S))
            await turns()
            await jump()
            with pytest.raises(TimeoutError):
                await loading
            assert request.occupied_blocks == {8, 9}
            released = asyncio.create_task(request.released(2 * FAR_S))
            await turns()
            assert not released.done()
            world.transport.settle()
            assert await released
            assert request.occupied_blocks == frozenset()


@on_loop
async def test_a_store_that_was_cancelled_occupies_only_what_it_copies():
    async with opened() as world:
        await world.put("a")
        world.fill(hashes("abc"), [4, 5, 6])
        async with world.engine.request("r", hashes("abc")) as request:
            storing = asyncio.create_task(world.engine.store(request, [4, 5, 6]))
            await turns()
            storing.cancel()
            await asyncio.wait([storing])
            assert request.occupied_blocks == {5, 6}
        assert request.occupied_blocks == {5, 6}, "the request's end changes nothing"
        assert not await request.released(0)
        world.transport.settle(error=OSError("injected"))
        assert await request.released()


@on_loop
async def test_a_call_that_ends_by_itself_leaves_nothing_occupied():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        assert await request.released(0), "nothing was ever copied"
        world.fill(hashes("ab"), [0, 1])
        storing = asyncio.create_task(world.engine.store(request, [0, 1]))
        await turns()
        world.transport.settle(error=OSError("injected"))
        with pytest.raises(TransportError):
            await storing
        assert not request.occupied_blocks
        world.transport.refusal = RuntimeError("no stream")
        with pytest.raises(TransportError):
            await world.engine.store(request, [0, 1])
        assert not request.occupied_blocks


@on_loop
async def test_waiting_for_one_request_does_not_wait_for_others():
    bounds = EngineBounds(concurrent_stores=2)
    async with (
        opened(bounds=bounds) as world,
        world.engine.request("r", hashes("a")) as mine,
        world.engine.request("s", hashes("x")) as other,
    ):
        stores = [
            asyncio.create_task(world.engine.store(r, [i])) for i, r in enumerate((mine, other))
        ]
        await turns()
        released = asyncio.create_task(mine.released(FAR_S))
        await turns()
        world.transport.settle()
        assert await released
        assert other.occupied_blocks == {1}
        world.settle_everything()
        assert [await store for store in stores] == [1, 1]


@on_loop
async def test_quiescing_does_not_wait_for_copies_that_begin_later():
    async with (
        opened(bounds=EngineBounds(concurrent_stores=1)) as world,
        world.engine.request("r", hashes("abcd")) as request,
    ):
        stores = [asyncio.create_task(world.engine.store(request, [i], i)) for i in range(4)]
        await turns()
        quiet = asyncio.create_task(world.engine.quiesce(FAR_S))
        await turns()
        world.transport.settle()
        await turns()
        assert len(world.parked) == 1, "the next one runs already"
        assert quiet.done()
        assert await quiet
        world.settle_everything()
        for store in stores:
            await world.during(store)


@on_loop
async def test_a_copy_that_the_closing_gives_up_is_never_released():
    async with opened(slots=2) as world:
        async with world.engine.request("r", hashes("a")) as request:
            storing = asyncio.create_task(world.engine.store(request, [3], 0, FAR_S))
            await turns()
            waiting = asyncio.create_task(request.released(FAR_S))
            quiet = asyncio.create_task(world.engine.quiesce(FAR_S))
            await turns()
            await world.engine.close(0.1)
            assert not await waiting
            assert not await quiet
            assert request.occupied_blocks == {3}
            with pytest.raises(TransportError):
                await storing
        world.transport.settle()
