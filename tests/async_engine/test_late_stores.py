"""Every block that was stored reaches the tier, however little of it can be on its way at once."""

import asyncio

import pytest
import torch
from async_engine.worlds import SCRIPTED, Tier, hashes, jump, on_loop, opened, register, turns

from kvoffload_async import OffloadEngine
from kvoffload_async.errors import TierUnavailableError

BLOCKS = 2048


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    register(monkeypatch)


def config_over(root):
    return {
        "cpu_bytes_to_use": (BLOCKS + 64) * 4096,
        "block_bytes": 64,
        "model": "test",
        "secondary_tiers": [{"type": "slab", "root_dir": str(root), "capacity_bytes": "64MiB"}],
    }


def test_all_blocks_of_a_store_reach_the_slab_before_the_engine_is_closed(tmp_path):
    """2,048 blocks were reported as stored, 480 reached the slab, and nobody was told."""
    block_hashes = [number.to_bytes(32, "big") for number in range(BLOCKS)]
    kv_caches = {"layer": torch.zeros(BLOCKS, 64, dtype=torch.uint8)}

    async def store():
        async with OffloadEngine(config_over(tmp_path), kv_caches=kv_caches) as engine:
            async with engine.request("r", block_hashes) as request:
                assert await engine.store(request, range(BLOCKS)) == BLOCKS
            (tier,) = engine.driver.planner.tiers
        return tier.counters

    async def open_again():
        async with OffloadEngine(config_over(tmp_path), kv_caches=kv_caches) as engine:
            (tier,) = engine.driver.planner.tiers
            return len(tier.index)

    counters = asyncio.run(store())
    assert (counters.stored_blocks, counters.dropped_blocks) == (BLOCKS, 0)
    assert counters.late_blocks >= BLOCKS - (BLOCKS + 64) // 2
    assert asyncio.run(open_again()) == BLOCKS


@on_loop
async def test_late_blocks_go_on_although_nobody_asks_the_engine_anything():
    async with opened(slots=8, tiers=[SCRIPTED], copies_each=2) as world:
        blocks = list(range(6))
        world.fill(hashes("abcdef"), blocks)
        async with world.engine.request("r", hashes("abcdef")) as request:
            await world.during(world.engine.store(request, blocks))
        for _ in range(10):
            await turns()
            world.finish_everything()
        assert len(Tier.made[0].blocks) == 6


@on_loop
async def test_a_tier_that_has_failed_is_tried_again_although_nobody_asks_the_engine_anything():
    async with opened(tiers=[SCRIPTED]) as world:
        world.fill(hashes("ab"), [0, 1])
        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.store(request, [0, 1]))
            await turns()
            world.transport.complete_all()
            await task
        await turns()
        (tier,) = world.tiers
        tier.finish(tier.parked[0], error=TierUnavailableError("down"))
        await turns()
        assert not tier.parked
        await jump(1.0)
        assert [len(parked.keys) for parked in tier.parked] == [2]


@on_loop
async def test_closing_does_not_wait_for_a_tier_that_is_out_of_order():
    async with opened(tiers=[SCRIPTED], breaker_fault_threshold=1) as world:
        world.fill(hashes("ab"), [0, 1])
        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.store(request, [0, 1]))
            await turns()
            world.transport.complete_all()
            await task
        await turns()
        (tier,) = world.tiers
        tier.finish(tier.parked[0], error=TierUnavailableError("down"))
        await turns()
        assert not world.engine.driver.has_pending_work()
