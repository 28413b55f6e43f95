"""Blocks are deleted, counted and pinned while the engine runs."""

import asyncio
import math

import pytest
from async_engine.worlds import (
    FAR_S,
    PROBED,
    SCRIPTED,
    found,
    hashes,
    jump,
    key,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)
from scripted_tier import Operation

from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.core.pins import MOST_PIN_S
from kvoffload_async.errors import ClosedError, StateError, TierUnavailableError


@on_loop
async def test_deleted_blocks_are_found_neither_in_the_primary_nor_in_a_tier():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("abc")
        report = await world.during(world.engine.cache.delete(hashes("abc")[1:]))
        assert report.is_complete
        assert report.done == {"primary": 2, "scripted": 2}
        assert world.tiers[0].blocks.keys() == {key("a")}
        assert await found(world, "abc") == 1
        stats = world.engine.stats()
        assert (stats.primary.deleted_blocks, stats.tiers[0].deleted_blocks) == (2, 2)
        await world.put("abc", "again")
        assert await found(world, "abc") == 3
        await world.check_rest()


@on_loop
async def test_blocks_that_one_tier_has_are_moved_to_another():
    async with opened(tiers=[SCRIPTED, PROBED]) as world:
        await world.put("abc")
        cache, (one, other) = world.engine.cache, [t.label for t in world.core.tiers]
        await world.during(cache.delete(hashes("abc"), [other]))
        await world.during(asyncio.create_task(world.engine.reset()))
        report = await world.during(cache.copy(hashes("abc"), other, source=one, timeout_s=FAR_S))
        assert report.done == {one: 3, other: 3}
        assert [len(tier.blocks) for tier in world.tiers] == [0, 3]
        await world.check_rest()


@on_loop
async def test_a_copy_that_may_promote_nothing_ends_in_time():
    async with opened(tiers=[SCRIPTED, PROBED]) as world:
        await world.put("abc")
        cache, other = world.engine.cache, world.core.tiers[1].label
        await world.during(cache.delete(hashes("abc"), [other]))
        await world.during(asyncio.create_task(world.engine.reset()))
        for tier in world.core.tiers:
            tier._prefetches_from_s = math.inf
        copying = asyncio.create_task(cache.copy(hashes("ab"), other, timeout_s=FAR_S))
        await turns()
        await jump(29.0)
        assert not copying.done()
        await jump(2.0)
        assert (await world.during(copying)).left == {other: 2}
        await world.check_rest()


@on_loop
async def test_a_block_that_is_loaded_is_deleted_when_its_load_has_ended():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            assert await world.during(world.engine.lookup(request)) == 2
            loading = asyncio.create_task(world.engine.load(request, [10, 11]))
            await turns()
            deleting = asyncio.create_task(world.engine.cache.delete(hashes("ab"), None, FAR_S))
            await turns()
            world.tiers[0].finish_all()
            await turns()
            assert not deleting.done()
            stats = world.engine.stats()
            assert stats.planner.deleting_blocks == 2
            assert [name for name, n in stats.cache_operations.items() if n] == ["delete"]
            assert await found(world, "ab", "other") == 0
            world.transport.complete_all()
            assert await loading == 2
            assert world.holds(hashes("ab"), [10, 11])
        assert (await world.during(deleting)).is_complete
        assert world.counts == {"free": 8}
        await world.check_rest()


@on_loop
async def test_a_prefix_that_a_lookup_has_pinned_loads_without_the_deleted_blocks():
    async with opened() as world:
        await world.put("abc")
        async with world.engine.request("r", hashes("abc")) as request:
            assert await world.engine.lookup(request) == 3
            await world.engine.cache.delete(hashes("abc")[1:])
            assert await world.during(world.engine.load(request, [10, 11, 12])) == 1
        await world.check_rest()


@on_loop
async def test_a_deletion_outlives_its_call():
    async with opened(tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        report = await world.engine.cache.delete(hashes("ab"), ["scripted"], timeout_s=0)
        assert report.left == {"scripted": 2}
        assert not report.is_complete
        await turns()
        (deleting,) = world.tiers[0].parked
        world.tiers[0].finish(deleting, error=TierUnavailableError("down"))
        await turns()
        assert await found(world, "ab") == 0, "it is not served although it is still there"
        await jump(1.0)
        (again,) = world.tiers[0].parked
        assert again.kind is Operation.DELETE
        await world.calm()
        assert not {key("a"), key("ab")} & world.tiers[0].blocks.keys()
        await world.check_rest()


@on_loop
async def test_blocks_are_counted_where_they_are():
    async with opened(slots=4, tiers=[SCRIPTED, PROBED]) as world:
        await only_in_the_tier(world, "ab")
        world.tiers[1].blocks.pop(key("a"))
        report = await world.during(world.engine.cache.count(hashes("abc")))
        assert report.is_complete
        assert report.done == {"primary": 0, "scripted": 2, "scripted-2": 1}
        counting = asyncio.create_task(world.engine.cache.count(hashes("ab"), ["scripted-2"]))
        await turns()
        world.tiers[1].finish(world.tiers[1].parked[0], error=TierUnavailableError("down"))
        report = await counting
        assert report.errors == {"scripted-2": "down"}
        assert not report.is_complete
        await world.check_rest()


@on_loop
async def test_pinned_blocks_stay_for_their_time():
    async with opened(slots=8) as world:
        await world.put("ab")
        assert world.engine.cache.pin(hashes("ab"), 60) == 2
        assert world.engine.cache.pin(hashes("xy"), 60) == 0, "they are not there"
        await turns()
        await world.put("Z" * 6, "pusher")
        assert world.engine.stats().planner.pinned_blocks == 2
        assert await found(world, "ab") == 2
        await jump(61.0)
        assert world.counts.get("pinned") is None
        await world.put("Y" * 8, "pusher")
        assert await found(world, "ab") == 0
        await world.check_rest()


@on_loop
async def test_pins_are_bounded_and_end_by_unpin_deletion_and_reset():
    async with opened(slots=12) as world:
        await world.put("abcdef")
        cache = world.engine.cache
        assert cache.pin(hashes("abcdef"), MOST_PIN_S) == 3, "a quarter of the primary"
        assert cache.unpin(hashes("a")) == 1
        assert cache.pin(hashes("abcdef")[3:], 1.0) == 1
        assert (await cache.delete(hashes("ab")[1:])).is_complete
        assert world.engine.stats().planner.pinned_blocks == 2
        await world.engine.reset()
        assert world.engine.stats().planner.pinned_blocks == 0
        for duration_s in (0, -1.0, MOST_PIN_S + 1, float("nan"), float("inf")):
            with pytest.raises(StateError, match="duration_s"):
                cache.pin(hashes("a"), duration_s)
        await world.check_rest()


@on_loop
async def test_an_operation_that_a_single_step_ends_returns_at_once():
    async with opened(tiers=[]) as world:
        cache = world.engine.cache
        for operation in (
            cache.count(hashes("a"), ["primary"], FAR_S),
            cache.delete(hashes("a"), ["primary"], FAR_S),
            cache.list_keys("primary", None, FAR_S),
        ):
            managing = asyncio.create_task(operation)
            await turns()
            assert managing.done(), "it waits for nobody"
            assert (await managing).is_complete


@on_loop
async def test_a_reset_reaches_the_tiers_that_it_names():
    async with opened(tiers=[SCRIPTED, SCRIPTED]) as world:
        await world.put("ab")
        assert await world.engine.reset() is None
        assert await found(world, "ab") == 2
        await world.calm()
        with pytest.raises(StateError, match="is not valid"):
            await world.engine.reset(tiers=["disk"])
        report = await world.during(world.engine.reset(tiers=["scripted"]))
        assert report.is_complete
        assert [len(tier.blocks) for tier in world.tiers] == [0, 2]
        await world.check_rest()


@on_loop
async def test_what_is_stored_while_a_reset_waits_is_not_in_the_tiers_that_it_names():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        (tier,) = world.tiers
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            loading = asyncio.create_task(world.engine.load(request, [8, 9], FAR_S))
            await turns()
            resetting = asyncio.create_task(world.engine.reset(FAR_S, ["scripted"]))
            for number in range(12):
                world.engine.cache.unpin([])  # makes a step
                await turns()
                tier.finish_all()
                if number == 8:
                    world.core.cascades.defer(0, [key("a"), key("ab")])  # such as reused ones
            await world.during(loading)
        report = await world.during(resetting)
        assert report.is_complete
        assert not tier.blocks
        await world.check_rest()


@on_loop
async def test_bad_arguments_are_refused_before_anything_is_deleted():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        cache = world.engine.cache
        world.core.tiers[0].deletes = False
        with pytest.raises(StateError, match="scripted cannot delete blocks"):
            await cache.delete(hashes("ab"))
        with pytest.raises(
            StateError, match=r"places: \['disk'\] is not valid; .*primary, scripted"
        ):
            await cache.delete(hashes("ab"), ["disk"])
        with pytest.raises(StateError, match="places: 'primary'"):
            await cache.count(hashes("ab"), "primary")
        with pytest.raises(StateError, match="block_hashes"):
            await cache.delete(["text"])
        with pytest.raises(StateError):
            await cache.delete(hashes("ab"), ["primary"], timeout_s=-1)
        assert await found(world, "ab") == 2
        assert (await cache.delete(hashes("ab"), ["primary"])).done == {"primary": 2}
        await world.check_rest()
    with pytest.raises(ClosedError):
        await cache.count(hashes("ab"))
    with pytest.raises(ClosedError):
        _ = OffloadEngine({"cpu_bytes_to_use": 1 << 20, "block_bytes": 64, "model": "m"}, id).cache
