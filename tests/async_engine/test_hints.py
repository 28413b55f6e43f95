"""Hints as arguments of a request of the engine, and in the parameters that its client gives."""

import asyncio

import pytest
from async_engine.worlds import SCRIPTED, hashes, jump, on_loop, opened

from kvoffload_async.errors import ConfigError
from kvoffload_async.hints import HINTS_KEY, LOAD_TIERS_KEY
from kvoffload_async.types import Hints, Priority


async def stored(world, text, **arguments):
    """Return how many blocks a request with hints stores."""
    blocks = list(range(len(text)))
    async with world.engine.request("r", hashes(text), **arguments) as request:
        return await world.during(world.engine.store(request, blocks))


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 4),
        ({"hints": {"max_offload_tokens": 0}}, 0),
        ({"hints": {"max_offload_tokens": 40}, "tokens_per_block": 16}, 2),
        ({"kv_transfer_params": {HINTS_KEY: {"max_offload_tokens": 0}}}, 0),
        ({"kv_transfer_params": {HINTS_KEY: {"max_offload_tokens": 40}}}, 0),
        (
            {
                "kv_transfer_params": {HINTS_KEY: {"max_offload_tokens": 40}},
                "tokens_per_block": 16,
            },
            2,
        ),
        ({"kv_transfer_params": {HINTS_KEY: {"max_offload_tokens": -1}}}, 4),
    ],
)
@on_loop
async def test_a_limit_of_stored_tokens_holds_in_primary_and_tiers(arguments, count):
    async with opened(tiers=[SCRIPTED]) as world:
        assert await stored(world, "abcd", **arguments) == count
        stats = world.engine.stats()
        assert (stats.primary.stored_blocks, stats.primary.withheld_blocks) == (count, 4 - count)
        assert stats.tiers[0].stored_blocks + stats.tiers[0].cascading_blocks <= count


@on_loop
async def test_retained_blocks_survive_later_requests():
    async with opened(slots=8) as world:
        await stored(world, "ab", hints={"retain_s": 600, "priority": "high"})
        for text in ("cdefgh", "ijklmn"):
            await stored(world, text)
        async with world.engine.request("again", hashes("ab")) as request:
            assert await world.engine.lookup(request) == 2
        assert world.engine.stats().primary.hinted_blocks == 2
        assert world.engine.stats().primary.hints == {"applied": 2, "unknown": 0, "invalid": 0}


@on_loop
async def test_retention_begins_at_the_end_of_the_request_and_ends_by_time():
    async with opened() as world:
        async with world.engine.request("r", hashes("a"), hints={"retain_s": 60}) as request:
            await world.during(world.engine.store(request, [0]))
            await jump(50)
        for seconds, count in (50, 1), (11, 0):
            await jump(seconds)
            world.core.begin_step(asyncio.get_running_loop().time())
            assert world.engine.stats().primary.hinted_blocks == count


@on_loop
async def test_the_hints_of_the_program_override_those_of_the_client():
    async with opened() as world:
        params = {HINTS_KEY: {"priority": "low", "retain_s": 5}}
        async with world.engine.request("r", [], params, hints={"priority": "high"}) as request:
            assert request.ctx.hints == Hints(Priority.HIGH, 5.0)


@pytest.mark.parametrize(
    "arguments",
    [{"load_tier_filter": ()}, {"kv_transfer_params": {LOAD_TIERS_KEY: []}}],
)
@pytest.mark.parametrize("prefetch", [False, True])
@on_loop
async def test_a_request_may_exclude_tiers_from_its_loads(arguments, prefetch):
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        await world.during(world.engine.reset())
        call = world.engine.request("r", hashes("ab"), prefetch=prefetch, **arguments)
        async with call as request:
            await world.calm()
            assert await world.during(world.engine.lookup(request)) == 0
        assert world.engine.stats().tiers[0].loaded_blocks == 0
        async with world.engine.request("all", hashes("ab")) as request:
            assert await world.during(world.engine.lookup(request)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hints": {"retain_s": -1}}, "hints: retain_s: -1 is not valid; it must be a number"),
        ({"hints": {"retain": 1}}, "hints: unknown key 'retain'"),
        ({"hints": "high"}, "hints: 'high' is not valid; give a mapping"),
        ({"hints": {"max_offload_tokens": 5}}, "tokens_per_block: missing"),
        ({"tokens_per_block": 0}, "tokens_per_block: 0 is not valid; it must be an integer"),
        ({"load_tier_filter": ["cpu"]}, "load_tier_filter: .* is not valid; give a set of"),
    ],
)
@on_loop
async def test_an_invalid_argument_is_an_error_and_no_request_begins(arguments, message):
    async with opened() as world:
        with pytest.raises(ConfigError, match=message):
            async with world.engine.request("r", hashes("a"), **arguments):
                pass
        assert world.engine.stats().planner.requests == 0
