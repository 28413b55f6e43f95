"""What `lookup` answers, how long it waits, and what it keeps."""

import asyncio
import gc

import numpy as np
import pytest
from async_engine.worlds import (
    FAR_S,
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

from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import StateError
from kvoffload_async.types import ReqContext


@on_loop
async def test_what_was_stored_is_found_and_loaded():
    async with opened() as world:
        assert await world.put("abc") == 3
        async with world.engine.request("r", hashes("abcd")) as request:
            assert await world.engine.lookup(request) == 3
            assert request.prefix_blocks == 3
            assert world.counts == {"free": 5, "pinned": 3}
            assert await world.during(world.engine.load(request, [10, 11, 12])) == 3
            assert world.holds(hashes("abc"), [10, 11, 12])
            assert world.counts == {"free": 5, "idle": 3}
        await world.check_rest()


@on_loop
async def test_nothing_is_found_at_once():
    async with opened() as world, world.engine.request("r", hashes("abc")) as request:
        assert await world.engine.lookup(request) == 0
        assert await world.engine.load(request, []) == 0


@on_loop
async def test_a_lookup_waits_for_promotions():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abc")
        async with world.engine.request("r", hashes("abc")) as request:
            task = asyncio.create_task(world.engine.lookup(request))
            await turns()
            (load,) = world.tiers[0].parked
            assert load.kind is Operation.LOAD
            assert len(load.keys) == 3, "one job for the whole prefix"
            assert not task.done()
            world.tiers[0].finish(load)
            assert await task == 3
            await world.during(world.engine.load(request, [20, 21, 22]))
            assert world.holds(hashes("abc"), [20, 21, 22])
        await world.check_rest()


@on_loop
async def test_a_lookup_waits_for_existence_probes():
    async with opened(slots=4, tiers=[PROBED]) as world:
        tier = world.tiers[0]
        await turns()
        for text in ("a", "ab"):
            tier.blocks[key(text)] = np.resize(content(text.encode()), 4096)
        async with world.engine.request("r", hashes("abc")) as request:
            task = asyncio.create_task(world.engine.lookup(request))
            await turns()
            assert [p.kind for p in tier.parked] == [Operation.CONTAINS]
            tier.finish_all()
            await turns()
            assert [p.kind for p in tier.parked] == [Operation.LOAD]
            tier.finish_all()
            assert await task == 2
        await world.check_rest()


@on_loop
async def test_a_promotion_that_fails_shortens_the_prefix():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abcd")
        async with world.engine.request("r", hashes("abcd")) as request:
            task = asyncio.create_task(world.engine.lookup(request))
            await turns()
            (load,) = world.tiers[0].parked
            world.tiers[0].finish(load, error=OSError("injected"))
            assert await task == 0
        await world.check_rest()


@on_loop
async def test_at_the_deadline_the_readable_prefix_is_taken():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "abc")
        await world.put("ab", "again")
        async with world.engine.request("r", hashes("abc")) as request:
            task = asyncio.create_task(world.engine.lookup(request, FAR_S))
            await turns()
            assert len(world.tiers[0].parked) == 1
            assert not task.done()
            await jump()
            assert await task == 2
        await world.check_rest()


@on_loop
async def test_a_deadline_of_zero_never_waits():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        async with world.engine.request("r", hashes("ab")) as request:
            assert await world.engine.lookup(request, 0) == 0
        await world.check_rest()


@on_loop
async def test_the_cores_limit_on_deferrals_ends_a_lookup_too():
    async with opened(slots=4, tiers=[SCRIPTED], deferral_timeout_s=1) as world:
        await only_in_the_tier(world, "ab")
        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.lookup(request, FAR_S))
            await turns()
            await jump(1.5)
            assert await task == 0
            assert world.core.counters.deferrals_expired == 1
        await world.check_rest()


@on_loop
async def test_who_waits_does_not_spin():
    async with opened(slots=4, tiers=[SCRIPTED], bounds=EngineBounds(concurrent_stores=2)) as world:
        await only_in_the_tier(world, "ab")
        steps = []
        end_step = world.engine.driver.on_schedule_end
        world.engine.driver.on_schedule_end = lambda: (steps.append(1), end_step())
        async with (
            world.engine.request("r", hashes("ab")) as request,
            world.engine.request("s", hashes("stuv")) as storing,
        ):
            waiting = [
                asyncio.create_task(world.engine.lookup(request, FAR_S)),
                asyncio.create_task(world.engine.store(storing, [0, 1, 2, 3], 0, FAR_S)),
            ]
            await turns(500)
            assert not any(task.done() for task in waiting)
            assert len(steps) < 5
            assert await world.during(waiting[0]) == 2
            await world.during(world.engine.load(request, [8, 9]))
            assert await world.during(waiting[1]) == 4
        await world.check_rest()


@on_loop
async def test_a_second_lookup_lets_go_of_what_the_first_has_pinned():
    async with opened() as world:
        await world.put("abc")
        async with world.engine.request("r", hashes("abc")) as request:
            assert await world.engine.lookup(request) == 3
            assert await world.engine.lookup(request) == 3
            assert world.counts == {"free": 5, "pinned": 3}
        await world.check_rest()


@on_loop
async def test_two_lookups_of_one_request_at_once_pin_once():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        async with world.engine.request("r", hashes("ab")) as request:
            both = [asyncio.create_task(world.engine.lookup(request)) for _ in range(2)]
            await turns()
            world.finish_everything()
            assert [await task for task in both] == [2, 2]
        await world.check_rest()


@on_loop
async def test_a_hash_that_comes_twice_is_one_block_wherever_it_is_found():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "a")
        once, twice = hashes("a"), [*hashes("a"), b"missing", *hashes("a")]
        async with world.engine.request("r", twice) as request:
            found = asyncio.create_task(world.engine.lookup(request))
            await turns()
            world.tiers[0].finish_all()
            assert await found == len(once)
        await world.check_rest()


@on_loop
async def test_a_request_is_refused_whose_hashes_no_tier_can_keep():
    async with opened() as world:
        for unfit, reason in ((b"", "is too short"), (b"x" * 93, "is too long")):
            with pytest.raises(StateError, match=reason):
                async with world.engine.request("r", [b"fit", unfit]):
                    pass
        await world.check_rest()


@on_loop
async def test_block_numbers_that_are_no_integers_are_refused():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        for blocks in ([0.5, 1.7], ["0", "1"], [0, 1 << 40]):
            with pytest.raises(StateError, match="device_blocks"):
                await world.engine.store(request, blocks)


# -- what stays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ab", "xy"])
@on_loop
async def test_requests_that_only_look_up_and_never_wait_do_not_stay(text):
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        before = num_contexts()
        for number in range(1000):
            async with world.engine.request(f"r{number}", hashes(text)) as request:
                await world.engine.lookup(request)
        assert num_contexts() < before + 100, "the requests of a step whose end did not come"


def num_contexts():
    gc.collect()
    return sum(isinstance(thing, ReqContext) for thing in gc.get_objects())


@on_loop
async def test_a_request_that_looks_up_again_and_again_does_not_grow():
    async with opened() as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            for _ in range(1000):
                await world.engine.lookup(request)
        assert len(world.core.room.found) < 200
