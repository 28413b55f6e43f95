"""Blocks of requests that are queued are promoted before their lookup."""

import pytest
from async_engine.worlds import (
    PROBED,
    SCRIPTED,
    content,
    hashes,
    jump,
    key,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)
from scripted_tier import Operation

from kvoffload_async.errors import StateError, TierUnavailableError


def figures(world):
    (tier,) = world.engine.stats().tiers
    return tier.prefetched_blocks, tier.unused_prefetched_blocks


@on_loop
async def test_a_queued_request_finds_its_prefix_without_waiting():
    async with opened(slots=16, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abc")
        async with world.engine.request("r", hashes("abc"), prefetch=True) as request:
            await turns()
            (load,) = world.tiers[0].parked
            assert (load.kind, len(load.keys)) == (Operation.LOAD, 3)
            world.tiers[0].finish(load)
            await turns()
            assert await world.engine.lookup(request, timeout_s=0.0) == 3
            await world.during(world.engine.load(request, [20, 21, 22]))
            assert world.holds(hashes("abc"), [20, 21, 22])
        assert figures(world) == (3, 0)
        await world.check_rest()


@on_loop
async def test_the_prefetch_of_a_request_that_leaves_the_queue_was_in_vain():
    async with opened(slots=16, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abc")
        async with world.engine.request("r", hashes("abc")) as request:
            world.engine.prefetch(request)
            await turns()
            world.tiers[0].finish_all()
            await turns()
        assert figures(world) == (3, 3)
        await world.check_rest()


@on_loop
async def test_all_that_are_queued_at_once_are_served_though_nothing_else_happens():
    async with opened(slots=64, tiers=[SCRIPTED]) as world:
        for letter in "abcdefghijkl":
            await only_in_the_tier(world, letter)
        requests = [
            world.engine.request(letter, hashes(letter), prefetch=True) for letter in "abcdefghijkl"
        ]
        for request in requests:
            await request.__aenter__()
        for _ in range(5):
            await jump(0.001)
        assert len(world.core.room.early) == 12
        world.tiers[0].finish_all()
        await turns()
        for request in requests:
            await request.__aexit__(None, None, None)
        await world.check_rest()


@on_loop
async def test_prefetch_goes_on_after_the_pause_that_follows_a_failure():
    async with opened(slots=16, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abc")
        await only_in_the_tier(world, "x")
        async with (
            world.engine.request("first", hashes("abc"), prefetch=True),
            world.engine.request("second", hashes("x")) as second,
        ):
            await turns()
            (load,) = world.tiers[0].parked
            world.tiers[0].finish(load, error=TierUnavailableError("scripted"))
            await turns()
            world.engine.prefetch(second)
            await jump(1.0)
            assert not world.tiers[0].parked
            for _ in range(20):
                await jump(1.0)
            (load,) = world.tiers[0].parked
            assert len(load.keys) == 1
            world.tiers[0].finish_all()
            await turns()
        await world.check_rest()


@on_loop
async def test_a_prefetch_waits_for_existence_probes():
    async with opened(slots=16, tiers=[PROBED]) as world:
        tier = world.tiers[0]
        await turns()
        for text in ("a", "ab"):
            tier.blocks[key(text)] = content(text.encode()).repeat(128)
        async with world.engine.request("r", hashes("abc"), prefetch=True):
            await turns()
            assert [p.kind for p in tier.parked] == [Operation.CONTAINS]
            tier.finish_all()
            await turns()
            assert [(p.kind, len(p.keys)) for p in tier.parked] == [(Operation.LOAD, 2)]
            tier.finish_all()
            await turns()
        await world.check_rest()


@on_loop
async def test_a_request_that_has_ended_is_not_prefetched():
    async with opened() as world:
        async with world.engine.request("r", hashes("abc")) as request:
            pass
        with pytest.raises(StateError):
            world.engine.prefetch(request)


@on_loop
async def test_new_weights_empty_the_queue():
    async with opened(slots=16, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abc")
        async with world.engine.request("r", hashes("abc"), prefetch=True):
            world.engine.invalidate(1)
            await turns()
            assert not world.tiers[0].parked
        await world.check_rest()
