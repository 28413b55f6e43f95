"""What a store does that outruns the tiers."""

import asyncio

import pytest
import torch
from async_engine.worlds import SCRIPTED, hashes, jump, key, on_loop, opened, turns

from kvoffload_async import OffloadEngine, TieringOffloadingSpec
from kvoffload_async.errors import BusyError, ConfigError, TierUnavailableError

SLOTS, BLOCKS, A_REQUEST = 256, 2048, 128


@pytest.mark.parametrize(("write_back", "arrives"), [(None, True), ("wait", True), ("drop", False)])
def test_a_burst_through_a_small_primary_arrives_in_the_slab(tmp_path, write_back, arrives):
    """Of 2,048 blocks that were stored through 256 slots, 512 to 1,536 reached an idle slab."""
    config = {
        "cpu_bytes_to_use": SLOTS * 4096,
        "model": "test",
        "write_back": write_back,
        "secondary_tiers": [
            {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"},
        ],
    }
    kv_caches = {"layer": torch.zeros(A_REQUEST, 64, dtype=torch.uint8)}

    async def store():
        async with OffloadEngine(config, kv_caches=kv_caches) as engine:
            for first in range(0, BLOCKS, A_REQUEST):
                numbers = range(first, first + A_REQUEST)
                block_hashes = [number.to_bytes(32, "big") for number in numbers]
                async with engine.request(str(first), block_hashes) as request:
                    assert await engine.store(request, range(A_REQUEST), timeout_s=60) == A_REQUEST
            (tier,) = engine.driver.planner.tiers
        return tier

    tier = asyncio.run(store())
    assert tier.counters.stored_blocks + tier.counters.dropped_blocks == BLOCKS
    assert (tier.counters.dropped_blocks == 0) >= arrives


async def crowded(world, text="abcd"):
    """Fill the primary with blocks that the tier has not stored; each copy there is parked."""
    blocks = range(len(text))
    world.fill(hashes(text), blocks)
    async with world.engine.request("full", hashes(text)) as request:
        task = asyncio.create_task(world.engine.store(request, list(blocks)))
        await turns()
        world.transport.complete_all()
        await task
    await turns()


@on_loop
async def test_a_store_waits_until_the_tier_has_taken_what_it_is_pending():
    async with opened(slots=4, tiers=[SCRIPTED], copies_each=1) as world:
        await crowded(world)
        world.fill(hashes("x"), [9])
        async with world.engine.request("r", hashes("x")) as request:
            task = asyncio.create_task(world.engine.store(request, [9]))
            await turns()
            assert not task.done()
            assert not world.parked
            (tier,) = world.tiers
            tier.finish_all()
            await turns()
            world.transport.complete_all()
            assert await task == 1
        await world.check_rest()
        assert set(tier.blocks) == {key("abcd"[: i + 1]) for i in range(4)} | {key("x")}


@on_loop
async def test_a_store_waits_no_longer_than_its_deadline():
    async with opened(slots=4, tiers=[SCRIPTED], copies_each=1) as world:
        await crowded(world)
        async with world.engine.request("r", hashes("x")) as request:
            task = asyncio.create_task(world.engine.store(request, [9], timeout_s=5.0))
            await turns()
            await jump(6.0)
            with pytest.raises(BusyError, match="which tiers have still to store: 3;"):
                await task
            assert request.left_out == request.keys
        await world.check_rest()
        assert len(world.tiers[0].blocks) == 4


@on_loop
async def test_a_store_does_not_wait_for_a_tier_that_has_failed():
    config = {"copies_each": 1, "breaker_fault_threshold": 1, "breaker_retry_s": 50.0}
    async with opened(slots=4, tiers=[SCRIPTED], **config) as world:
        await crowded(world)
        async with world.engine.request("r", hashes("x")) as request:
            task = asyncio.create_task(world.engine.store(request, [9]))
            await turns()
            (tier,) = world.tiers
            tier.finish(tier.parked[0], error=TierUnavailableError("down"))
            await turns()
            world.transport.complete_all()
            assert await task == 1
        assert world.engine.stats().tiers[0].dropped_blocks == 1


@on_loop
async def test_a_store_that_may_drop_waits_for_no_tier():
    config = {"copies_each": 1, "write_back": "drop"}
    async with opened(slots=4, tiers=[SCRIPTED], **config) as world:
        await crowded(world)
        async with world.engine.request("r", hashes("x")) as request:
            task = asyncio.create_task(world.engine.store(request, [9]))
            await turns()
            world.transport.complete_all()
            assert await task == 1
        await world.check_rest()
        assert world.engine.stats().tiers[0].dropped_blocks == 1


def test_an_unknown_way_is_refused_with_the_nearest_one():
    config = {"cpu_bytes_to_use": 4096, "block_bytes": 64, "model": "test"}
    with pytest.raises(ConfigError, match=r"write_back: 'dorp' .* \(did you mean 'drop'\?\)"):
        OffloadEngine({**config, "write_back": "dorp"}, create_transport=print)
    with pytest.raises(ConfigError, match="write_back: 3 is unknown; allowed: wait, drop"):
        OffloadEngine({**config, "write_back": 3}, create_transport=print)


@on_loop
async def test_a_store_goes_on_when_the_last_slot_of_a_failed_tier_is_looked_at(monkeypatch):
    monkeypatch.setattr("kvoffload_async.core.cascades._SLOTS_A_STEP", 1)
    config = {"copies_each": 1, "breaker_fault_threshold": 1, "breaker_retry_s": 50.0}
    monkeypatch.setattr(TieringOffloadingSpec, "accepts_prefixes", False)
    async with opened(slots=4, tiers=[SCRIPTED], **config) as world:
        await crowded(world)
        async with world.engine.request("r", hashes("wxyz")) as request:
            task = asyncio.create_task(world.engine.store(request, [9, 10, 11, 12]))
            await turns()
            (tier,) = world.tiers
            tier.finish(tier.parked[0], error=TierUnavailableError("down"))
            for _ in range(5):
                await jump(0.1)
                world.transport.complete_all()
            assert task.done()
            assert await task == 4
