"""Resetting the cache, and other weights: what was there is not served any more."""

import asyncio

import pytest
from async_engine.worlds import (
    FAR_S,
    SCRIPTED,
    SLOT_BYTES,
    found,
    hashes,
    jump,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)
from scripted_tier import Operation

from kvoffload_async.errors import ClosedError, ConfigError, InvalidatedError

# -- reset --------------------------------------------------------------------------------------


@on_loop
async def test_a_reset_empties_the_primary_and_no_tier():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        await world.engine.reset()
        assert world.counts == {"free": 8}
        assert await found(world, "ab") == 2, "promoted again"
        await world.check_rest()


@on_loop
async def test_a_reset_waits_for_copies_and_jobs_while_the_loop_turns():
    async with opened(tiers=[SCRIPTED]) as world:
        async with world.engine.request("w", hashes("a")) as request:
            world.fill(hashes("a"), [0])
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            resetting = asyncio.create_task(world.engine.reset(FAR_S))
            await turns()
            assert not resetting.done()
            world.transport.complete()
            assert await storing == 1
            await turns()
            (cascade,) = world.tiers[0].parked
            assert not resetting.done()
            world.tiers[0].finish(cascade)
            await resetting
        assert world.counts == {"free": 8}
        assert await found(world, "a") == 1
        await world.check_rest()


@on_loop
async def test_during_a_reset_loads_and_stores_wait_and_nothing_is_promoted():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "a")
        await world.put("b", "resident")
        async with (
            world.engine.request("w", hashes("wx")) as writer,
            world.engine.request("r", hashes("b")) as reader,
        ):
            world.fill(hashes("wx"), [0, 1])
            storing = asyncio.create_task(world.engine.store(writer, [0, 1]))
            await turns()
            resetting = asyncio.create_task(world.engine.reset(FAR_S))
            await turns()
            async with world.engine.request("p", hashes("a")) as promoting:
                assert await world.engine.lookup(promoting) == 0
            assert await world.engine.lookup(reader) == 1
            late = asyncio.create_task(world.engine.store(reader, [2]))
            loading = asyncio.create_task(world.engine.load(reader, [9]))
            await turns()
            assert len(world.parked) == 1
            await world.during(resetting)
            assert await storing == 2
            with pytest.raises(InvalidatedError, match="'r'"):
                await loading
            assert await world.during(late) == 1
        await world.check_rest()


@on_loop
async def test_jobs_that_have_not_ended_at_the_deadline_are_given_up():
    async with opened(tiers=[SCRIPTED]) as world:
        world.fill(hashes("a"), [0])
        async with world.engine.request("w", hashes("a")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            world.transport.complete()
            assert await storing == 1
        resetting = asyncio.create_task(world.engine.reset(FAR_S))
        await turns()
        await jump()
        await resetting
        assert world.counts == {"free": 7, "held": 1}
        world.finish_everything()
        await turns()
        assert world.counts == {"free": 8}
        await world.check_rest()


@on_loop
async def test_a_copy_that_has_not_ended_at_the_deadline_forbids_the_reset():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            loading = asyncio.create_task(world.engine.load(request, [8, 9], 3 * FAR_S))
            await turns()
            resetting = asyncio.create_task(world.engine.reset(FAR_S))
            await turns()
            behind = asyncio.create_task(world.engine.reset(FAR_S / 2))
            await turns()
            await jump(FAR_S / 2 + 1)
            with pytest.raises(TimeoutError):
                await behind
            await jump()
            with pytest.raises(TimeoutError, match="primary was not reset"):
                await resetting
            assert world.counts == {"free": 6, "pinned": 2}
            assert await world.during(loading) == 2
            assert not world.core.promotions_paused
            assert world.holds(hashes("ab"), [8, 9])
        await world.check_rest()


@on_loop
async def test_what_a_request_had_pinned_is_gone_and_can_be_looked_up_again():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            assert await world.engine.lookup(request) == 2
            await world.engine.reset()
            with pytest.raises(InvalidatedError, match="compute its blocks"):
                await world.engine.load(request, [8, 9])
            assert await world.engine.load(request, []) == 0
            assert await world.during(world.engine.lookup(request)) == 2
            assert await world.during(world.engine.load(request, [8, 9])) == 2
        await world.check_rest()


@on_loop
async def test_a_reset_under_a_close_ends():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("a")
        async with world.engine.request("w", hashes("x")) as request:
            storing = asyncio.create_task(world.engine.store(request, [0]))
            await turns()
            world.transport.complete()
            await storing
            resetting = asyncio.create_task(world.engine.reset(FAR_S))
            await turns()
            await world.during(world.engine.close())
            with pytest.raises(ClosedError):
                await resetting
        with pytest.raises(ClosedError):
            await world.engine.reset()


# -- generations --------------------------------------------------------------------------------


@on_loop
async def test_no_block_of_another_generation_is_served_from_anywhere():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        await world.put("xy", "resident")
        world.engine.invalidate(2)
        for text in ("ab", "xy"):
            assert await found(world, text) == 0, text
        assert await world.put("ab", "anew") == 2
        assert await found(world, "ab") == 2
        world.engine.invalidate("3")
        assert await found(world, "ab") == 0
        await world.check_rest()


@on_loop
async def test_a_request_in_flight_finds_nothing_and_stores_nothing_of_the_old_generation():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("abc")) as request:
            assert await world.engine.lookup(request) == 2
            world.engine.invalidate(2)
            assert world.counts == {"free": 6, "idle": 2}
            with pytest.raises(InvalidatedError):
                await world.engine.load(request, [8, 9])
            assert await world.engine.lookup(request) == 0
            assert await world.engine.load(request, []) == 0
            assert await world.engine.store(request, [0, 1, 2]) == 0
        assert not world.parked
        await world.check_rest()


@on_loop
async def test_what_is_on_the_way_when_the_generation_changes_is_not_served():
    async with opened(slots=6, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        await world.put("x", "resident")
        async with (
            world.engine.request("p", hashes("ab")) as promoting,
            world.engine.request("l", hashes("x")) as loading,
            world.engine.request("s", hashes("st")) as storing,
        ):
            await world.engine.lookup(loading)
            world.fill(hashes("st"), [0, 1])
            lookup = asyncio.create_task(world.engine.lookup(promoting, FAR_S))
            load = asyncio.create_task(world.engine.load(loading, [9]))
            store = asyncio.create_task(world.engine.store(storing, [0, 1]))
            await turns()
            assert [p.kind for p in world.tiers[0].parked] == [Operation.LOAD]
            assert len(world.parked) == 2
            world.engine.invalidate("new weights")
            await turns()
            assert await lookup == 0, "at once: there is nothing to wait for"
            with pytest.raises(InvalidatedError):
                await world.during(load)
            assert await world.during(store) == 2
        for text in ("ab", "x", "st"):
            assert await found(world, text) == 0, text
        await world.check_rest()


@on_loop
async def test_the_generation_of_the_configuration_is_that_of_the_call():
    async with opened(tiers=[SCRIPTED]) as world:
        world.engine.invalidate(7)
        await world.put("a")
        kept = dict(world.tiers[0].blocks)
    for generation, blocks in ((7, 1), ("7", 1), (8, 0), (None, 0)):
        async with opened(tiers=[SCRIPTED], generation=generation) as world:
            tier = world.tiers[0]
            for block_key, block in kept.items():
                assert len(block) == SLOT_BYTES
                tier.blocks[block_key] = block
            tier.env.blocks_appeared(kept)
            await turns()
            assert await found(world, "a") == blocks, generation
            await world.check_rest()


@on_loop
async def test_what_is_no_label_changes_nothing():
    async with opened() as world:
        await world.put("a")
        for label in ("", "\n", None, True, 1.5):
            with pytest.raises(ConfigError, match="generation"):
                world.engine.invalidate(label)
        assert await found(world, "a") == 1
    with pytest.raises(ClosedError):
        world.engine.invalidate(1)
