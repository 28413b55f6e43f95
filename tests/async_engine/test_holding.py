"""What a request holds while it waits, and what a store does where not all of it fits."""

import asyncio
import contextlib

import pytest
from async_engine.worlds import (
    FAR_S,
    SCRIPTED,
    hashes,
    jump,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)

from kvoffload_async.errors import BusyError

LONG = "abcdefghij"


def retained(world):
    return world.engine.driver.planner.room.named_blocks


@on_loop
async def test_a_prompt_longer_than_the_primary_stores_the_head_that_fits_and_says_so():
    """30 s of waiting ended with "everything in it is in use", which was false."""
    async with opened(slots=4) as world:
        async with world.engine.request("w", hashes(LONG)) as request:
            assert await world.during(world.engine.store(request, list(range(10)))) == 4
            assert list(request.left_out) == list(request.keys[4:])
        async with world.engine.request("r", hashes(LONG)) as request:
            assert await world.engine.lookup(request) == 4
        await world.check_rest()


@on_loop
async def test_what_is_left_out_is_stored_as_room_comes():
    async with opened(slots=4) as world:
        await world.put("xyz")
        async with world.engine.request("r", hashes("xyz")) as reader:
            await world.engine.lookup(reader)
            async with world.engine.request("w", hashes("abcd")) as writer:
                storing = asyncio.create_task(world.engine.store(writer, [0, 1, 2, 3], 0, FAR_S))
                await turns()
                world.transport.complete()
                await turns()
                assert not world.parked, "one was stored, and the readers' blocks stay"
                assert await world.during(world.engine.load(reader, [7, 8, 9])) == 3
                assert await world.during(storing) == 4
                assert not writer.left_out
        await world.check_rest()


@on_loop
async def test_a_tail_that_finds_no_room_until_the_deadline_is_no_error():
    async with opened(slots=4) as world:
        await world.put("xyz")
        async with world.engine.request("r", hashes("xyz")) as reader:
            await world.engine.lookup(reader)
            async with world.engine.request("w", hashes("ab")) as writer:
                storing = asyncio.create_task(world.engine.store(writer, [0, 1], 0, FAR_S))
                await turns()
                world.transport.complete()
                await turns()
                await jump()
                assert await storing == 1
                assert list(writer.left_out) == list(writer.keys[1:])
        await world.check_rest()


@on_loop
async def test_a_refused_store_says_what_occupies_the_primary():
    async with opened(slots=2) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("a")) as reader,
            world.engine.request("w", hashes("x")) as writer,
            world.engine.request("v", hashes("yz")) as other,
        ):
            await world.engine.lookup(reader)
            storing = asyncio.create_task(world.engine.store(writer, [4]))
            await turns()
            says = "no room for 2 blocks in the primary's 2 slots: 1 are pinned, 1 being written"
            with pytest.raises(BusyError, match=says):
                await world.engine.store(other, [5, 6], 0, 0)
            assert await world.during(storing) == 1
        await world.check_rest()


@on_loop
async def test_a_lookup_that_is_cancelled_lets_go_of_what_it_held():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        async with world.engine.request("r", hashes("ab")) as request:
            looking = asyncio.create_task(world.engine.lookup(request, FAR_S))
            await turns()
            assert not looking.done()
            assert retained(world) == 2
            looking.cancel()
            await asyncio.wait([looking])
            assert retained(world) == 0
        await world.check_rest()


@on_loop
async def test_a_lookup_that_waits_for_room_beside_readable_blocks_is_told_when_there_is_some():
    """It asked again half a second later."""
    async with opened(slots=5) as world, contextlib.AsyncExitStack() as holders:
        await world.put("abcd")
        await world.put("e")
        holder = await holders.enter_async_context(world.engine.request("h", hashes("abcd")))
        assert await world.engine.lookup(holder) == 4
        async with world.engine.request("r", hashes("e")) as request:
            waiting = asyncio.create_task(world.engine.lookup(request, FAR_S))
            await turns()
            assert not waiting.done()
            await holders.aclose()
            await turns()
            assert waiting.done()
            assert await waiting == 1
        await world.check_rest()
