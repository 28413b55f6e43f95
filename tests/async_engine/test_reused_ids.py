"""Requests with the same id, and copies that end after a reset."""

import asyncio

from async_engine.worlds import hashes, on_loop, opened, turns

from kvoffload_async.types import LookupResult


@on_loop
async def test_an_id_is_used_again_while_a_copy_of_an_older_request_runs():
    async with opened() as world:
        world.fill(hashes("ab"), [0, 1])
        async with world.engine.request("r", hashes("a")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
        async with world.engine.request("r", hashes("ab")) as request:
            beside = asyncio.create_task(world.engine.store(request, [0, 1]))
            await turns()
            world.finish_everything()
            assert [await storing, await beside] == [1, 1]
            assert await world.engine.lookup(request) == 2
        await world.check_rest()


@on_loop
async def test_requests_with_the_same_id_may_live_side_by_side():
    async with opened() as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("ab")) as one,
            world.engine.request("r", hashes("ab")) as other,
        ):
            assert await world.engine.lookup(one) == 2
            assert await world.engine.lookup(other) == 2
            assert await world.during(world.engine.load(one, [8, 9])) == 2
            assert world.counts["pinned"] == 2, "the other one's"
        await world.check_rest()


@on_loop
async def test_a_copy_from_before_a_reset_makes_nothing_readable():
    async with opened() as world:
        world.fill(hashes("a"), [0])
        async with world.engine.request("r", hashes("a")) as request:
            before = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            world.engine.driver.reset_cache_now()
            after = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            world.transport.complete(world.parked[0])
            await turns()
            (key,) = request.keys
            assert world.core.lookup(key, request.ctx) is LookupResult.HIT_PENDING
            world.finish_everything()
            await before
            assert await after == 1
            assert world.core.lookup(key, request.ctx) is LookupResult.HIT
        await world.check_rest()


@on_loop
async def test_a_prefix_from_before_a_reset_is_unpinned_once():
    async with opened() as world:
        await world.put("a")
        async with (
            world.engine.request("r", hashes("a")) as one,
            world.engine.request("w", hashes("a")) as other,
        ):
            assert await world.engine.lookup(one) == 1
            world.engine.driver.reset_cache_now()
            assert await world.during(world.engine.store(other, [0])) == 1
            assert await world.engine.lookup(one) == 1
            assert world.counts["pinned"] == 1
        await world.check_rest()
