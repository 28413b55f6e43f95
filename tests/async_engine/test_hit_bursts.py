"""Bursts of hits through a primary that is too small for all of them at once."""

import asyncio

import pytest
import torch
from async_engine.worlds import SCRIPTED, hashes, jump, on_loop, opened, turns

from kvoffload_async import OffloadEngine

SLOTS, PROMPTS, BLOCKS = 64, 6, 12


def prompt(number):
    return [(number * BLOCKS + block).to_bytes(32, "big") for block in range(BLOCKS)]


@pytest.mark.parametrize("at_once", [PROMPTS, 50])
def test_a_burst_of_hits_in_the_slab_hits_all(tmp_path, at_once):
    """Of 6 prompts of 12 blocks, all in the tier, 36 blocks of 72 were hits."""
    config = {
        "cpu_bytes_to_use": SLOTS * 4096,
        "model": "test",
        "check_invariants": True,
        "secondary_tiers": [
            {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"},
        ],
    }
    kv_caches = {"layer": torch.zeros(at_once * BLOCKS, 64, dtype=torch.uint8)}

    async def load(engine, number):
        blocks = range(number * BLOCKS, (number + 1) * BLOCKS)
        async with engine.request(f"load{number}", prompt(number)) as request:
            found = await engine.lookup(request, timeout_s=60)
            return await engine.load(request, blocks[:found], timeout_s=60)

    async def run():
        async with OffloadEngine(config, kv_caches=kv_caches) as engine:
            for number in range(at_once):
                async with engine.request(f"store{number}", prompt(number)) as request:
                    assert await engine.store(request, range(BLOCKS), timeout_s=60) == BLOCKS
        async with OffloadEngine(config, kv_caches=kv_caches) as engine:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load(engine, number)) for number in range(at_once)]
            assert engine.stats().planner.promotions_refused == 0
        return [task.result() for task in tasks]

    assert asyncio.run(run()) == [BLOCKS] * at_once


async def below(world, texts):
    """Store texts, each of which leaves the primary."""
    for text in texts:
        await world.put(text, f"seed {text}")
    await world.put("Z" * world.core.primary.num_slots, "pusher")


@on_loop
async def test_requests_that_wait_for_room_are_served_in_their_order_and_nobody_else_is_woken():
    async with opened(slots=3, tiers=[SCRIPTED]) as world:
        texts = [letter * 2 for letter in "abcdefgh"]
        await below(world, texts)
        served = []

        async def load(text, first_block):
            async with world.engine.request(text, hashes(text)) as request:
                found = await world.engine.lookup(request, timeout_s=1000.0)
                served.append((text, found))
                blocks = range(first_block, first_block + found)
                await world.engine.load(request, list(blocks), timeout_s=1000.0)

        waiters = world.engine._steps.waiters
        tasks = [asyncio.create_task(load(text, 2 * i)) for i, text in enumerate(texts)]
        await turns()
        assert [len(parked.keys) for parked in world.tiers[0].parked] == [2]
        before = waiters.wake_ups
        world.tiers[0].finish_all()
        await turns()
        assert served == [("aa", 2)]
        assert waiters.wake_ups - before <= 3, "the one that is served, and the next one"
        await world.until(lambda: all(task.done() for task in tasks))
        assert served == [(text, 2) for text in texts]
        await world.check_rest()


@on_loop
async def test_a_lookup_waits_for_room_no_longer_than_a_request_may_be_deferred():
    config = {"deferral_timeout_s": 5.0}
    async with opened(slots=3, tiers=[SCRIPTED], **config) as world:
        await below(world, ["aa", "bb"])
        async with (
            world.engine.request("first", hashes("aa")) as first,
            world.engine.request("second", hashes("bb")) as second,
        ):
            tasks = [
                asyncio.create_task(world.engine.lookup(request, timeout_s=100.0))
                for request in (first, second)
            ]
            await turns()
            assert len(world.tiers[0].parked) == 1
            await jump(6.0)
            assert [await task for task in tasks] == [0, 0]
        await world.check_rest()


@on_loop
async def test_a_lookup_that_is_cancelled_gives_its_place_to_the_next_one():
    async with opened(slots=5, tiers=[SCRIPTED]) as world:
        await below(world, ["aa", "bb", "cc"])
        async with (
            world.engine.request("first", hashes("aa")) as first,
            world.engine.request("second", hashes("bb")) as second,
            world.engine.request("third", hashes("cc")) as third,
        ):
            tasks = [
                asyncio.create_task(world.engine.lookup(request, timeout_s=100.0))
                for request in (first, second, third)
            ]
            await turns()
            tasks[1].cancel()
            await turns()
            world.tiers[0].finish_all()
            assert await tasks[0] == 2
            await turns()
            assert await world.during(tasks[2]) == 2
        await world.check_rest()


@on_loop
async def test_a_promotion_waits_for_room_where_the_tier_is_pending_all_of_the_primary():
    async with opened(slots=4, tiers=[SCRIPTED], copies_each=1) as world:
        await below(world, ["a"])
        world.fill(hashes("wxyz"), range(4))
        async with world.engine.request("full", hashes("wxyz")) as request:
            store = asyncio.create_task(world.engine.store(request, list(range(4))))
            await turns()
            world.transport.complete_all()
            await store
        async with world.engine.request("r", hashes("a")) as request:
            lookup = asyncio.create_task(world.engine.lookup(request, timeout_s=100.0))
            await turns()
            assert not lookup.done()
            assert await world.during(lookup) == 1
        await world.check_rest()
        assert world.engine.stats().tiers[0].dropped_blocks == 0
