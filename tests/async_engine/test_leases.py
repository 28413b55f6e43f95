"""Which device blocks a request's copies occupy, and until when."""

import asyncio
import functools

import anyio
import pytest
from async_engine.worlds import FAR_S, hashes, jump, on_loop, opened, turns

from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import StateError, TransportError


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
            world.transport.complete()
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
        world.transport.complete(error=OSError("injected"))
        assert await request.released()


@on_loop
async def test_a_call_that_ends_by_itself_leaves_nothing_occupied():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        assert await request.released(0), "nothing was ever copied"
        world.fill(hashes("ab"), [0, 1])
        storing = asyncio.create_task(world.engine.store(request, [0, 1]))
        await turns()
        world.transport.complete(error=OSError("injected"))
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
        world.transport.complete()
        assert await released
        assert other.occupied_blocks == {1}
        world.finish_everything()
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
        world.transport.complete()
        await turns()
        assert len(world.parked) == 1, "the next one runs already"
        assert quiet.done()
        assert await quiet
        world.finish_everything()
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
        world.transport.complete()


# -- when_released ------------------------------------------------------------------------------


@on_loop
async def test_a_callback_comes_once_the_request_has_ended_and_its_last_copy_too():
    free = []
    async with opened() as world:
        async with world.engine.request("r", hashes("ab")) as request:
            request.when_released(free.append, "blocks")
            await turns()
            assert not free, "a copy may still begin"
            storing = asyncio.create_task(world.engine.store(request, [0, 1]))
            await turns()
            storing.cancel()
            await asyncio.wait([storing])
        await turns()
        assert not free, "the copy goes on"
        world.transport.complete(error=OSError("injected"))
        await turns()
        assert free == ["blocks"]
        request.when_released(free.append, "asked after the end")
        await turns()
        assert free == ["blocks", "asked after the end"]
    await turns()
    assert len(free) == 2


@pytest.mark.parametrize("cancelled_by", ["anyio", "asyncio"])
@on_loop
async def test_a_callback_comes_though_every_await_is_cancelled_again(cancelled_by):
    free = []
    async with opened() as world:

        async def serve():
            async with world.engine.request("r", hashes("ab")) as request:
                request.when_released(free.append, "blocks")
                try:
                    await world.engine.store(request, [0, 1])
                finally:
                    await request.released()  # cancelled as well
                    free.append("never reached")

        async def serve_in_a_scope(scope):
            with scope:
                await serve()

        scope = anyio.CancelScope()
        is_anyio = cancelled_by == "anyio"
        serving = asyncio.create_task(serve_in_a_scope(scope) if is_anyio else serve())
        await turns()
        if is_anyio:
            scope.cancel()
        while not serving.done():
            if not is_anyio:
                serving.cancel()
            await asyncio.sleep(0)
        await turns()
        assert not free
        world.transport.complete()
        await turns()
        assert free == ["blocks"]


@on_loop
async def test_blocks_of_a_copy_that_the_closing_gives_up_are_never_free(caplog):
    free, occupied = [], []
    async with opened() as world:
        async with (
            world.engine.request("r", hashes("a")) as request,
            world.engine.request("idle", hashes("b")) as idle,
        ):
            for each in (request, idle):
                each.when_released(free.append, each.ctx.req_id, if_given_up=occupied.append)
            request.when_released(free.append, "another")
            storing = asyncio.create_task(world.engine.store(request, [3], 0, FAR_S))
            await turns()
            await world.engine.close(0.1)
            assert (free, occupied) == ([], ["r"]), "the other may still compute its blocks"
            assert "request r: its device blocks stay occupied" in caplog.text
            assert "request idle" not in caplog.text
            with pytest.raises(TransportError):
                await storing
        await turns()
        assert (free, occupied) == (["idle"], ["r"]), "it has ended"
        request.when_released(free.append, "late", if_given_up=occupied.append)
        await turns()
        assert (free, occupied) == (["idle"], ["r", "late"])
        world.transport.complete()


@on_loop
async def test_an_error_of_a_callback_is_logged_and_stops_nothing(caplog):
    free = []

    def fail():
        raise RuntimeError("injected")

    async with opened() as world:
        async with world.engine.request("r", hashes("a")) as request:
            request.when_released(fail)
            request.when_released(free.append, "blocks")
        await turns()
        assert free == ["blocks"]
        assert "request r: a callback of when_released has failed" in caplog.text
        assert "injected" in caplog.text
        assert await world.put("b") == 1


@on_loop
async def test_a_coroutine_function_is_no_callback():
    queue = asyncio.Queue()
    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        for callback in (queue.put, functools.partial(queue.put, 1)):
            with pytest.raises(StateError, match="coroutine function; give a plain one"):
                request.when_released(callback)
        with pytest.raises(StateError, match="coroutine function"):
            request.when_released(queue.put_nowait, 1, if_given_up=queue.put)
    await turns()
    assert queue.empty()
