"""Lookup, load and store: what they wait for, what they return, what they raise."""

import asyncio
import math

import pytest
import torch
from async_engine.worlds import (
    FAR_S,
    PAGE_BYTES,
    SCRIPTED,
    content,
    hashes,
    key,
    on_loop,
    opened,
    turns,
)

from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import BusyError, ClosedError, ConfigError, StateError

CONFIG = {"cpu_bytes_to_use": 4096, "block_bytes": 64, "model": "test"}

# -- load ---------------------------------------------------------------------------------------


@on_loop
async def test_a_part_of_the_prefix_can_be_loaded():
    async with opened() as world:
        await world.put("abcd")
        async with world.engine.request("r", hashes("abcd")) as request:
            assert await world.engine.lookup(request) == 4
            assert await world.during(world.engine.load(request, [30, 31])) == 2
            assert world.counts == {"free": 4, "idle": 4}
            assert world.holds(hashes("ab"), [30, 31])
            with pytest.raises(StateError, match="1 blocks are asked for, 0 are pinned"):
                await world.engine.load(request, [32])


@on_loop
async def test_loading_nothing_lets_the_prefix_go():
    async with opened() as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            assert await world.engine.load(request, []) == 0
            assert world.counts == {"free": 6, "idle": 2}


@on_loop
async def test_chunks_of_several_device_blocks():
    async with opened(per_chunk=2) as world:
        world.fill(hashes("abcd"), [4, 5, 6, 7])
        async with world.engine.request("w", hashes("XY")) as request:
            assert await world.during(world.engine.store(request, [4, 5, 6, 7])) == 2
            with pytest.raises(StateError, match="3 blocks: per_chunk=2"):
                await world.engine.store(request, [4, 5, 6])
        async with world.engine.request("r", hashes("XYZ")) as request:
            assert await world.engine.lookup(request) == 2
            assert await world.during(world.engine.load(request, [40, 41, 42, 43])) == 2
            assert world.holds(hashes("abcd"), [40, 41, 42, 43])


@on_loop
async def test_a_request_that_ends_in_mid_flight_keeps_its_pins_until_the_copy_has_landed():
    async with opened(slots=3) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            task = asyncio.create_task(world.engine.load(request, [8, 9]))
            await turns()
        assert world.counts == {"pinned": 2, "free": 1}
        world.finish_everything()
        assert await task == 2
        await world.check_rest()


@on_loop
async def test_a_prefix_that_is_let_go_in_the_line_is_not_loaded():
    async with opened(bounds=EngineBounds(concurrent_loads=1)) as world:
        await world.put("ab")
        async with world.engine.request("first", hashes("ab")) as first:
            await world.engine.lookup(first)
            loading = asyncio.create_task(world.engine.load(first, [8, 9]))
            await turns()
            async with world.engine.request("second", hashes("ab")) as second:
                await world.engine.lookup(second)
                waiting = asyncio.create_task(world.engine.load(second, [10, 11]))
                await turns()
            world.finish_everything()
            assert await loading == 2
            with pytest.raises(StateError, match="let go"):
                await waiting
        assert not world.parked
        await world.check_rest()


# -- store --------------------------------------------------------------------------------------


@on_loop
async def test_only_what_is_missing_is_copied():
    async with opened(tiers=[SCRIPTED]) as world:
        await world.put("ab")
        world.fill(hashes("abcd"), [10, 11, 12, 13])
        async with world.engine.request("r", hashes("abcd")) as request:
            task = asyncio.create_task(world.engine.store(request, [11, 12, 13], 1))
            await turns()
            (copy,) = world.parked
            assert copy.parts[0].blocks.tolist() == [12, 13]
            assert await world.during(task) == 2
            assert await world.engine.store(request, [10, 11, 12, 13]) == 0
        await world.check_rest()
        assert {key(t) for t in ("a", "ab", "abc", "abcd")} <= set(world.tiers[0].blocks)


@on_loop
async def test_a_store_is_readable_when_it_returns_and_not_before():
    async with opened() as world:
        world.fill(hashes("a"), [0])
        async with (
            world.engine.request("w", hashes("a")) as writer,
            world.engine.request("r", hashes("a")) as reader,
        ):
            storing = asyncio.create_task(world.engine.store(writer, [0]))
            looking = asyncio.create_task(world.engine.lookup(reader))
            await turns()
            assert not looking.done(), "it is on the way: worth waiting for"
            world.transport.complete()
            assert await storing == 1
            assert await looking == 1


@on_loop
async def test_a_store_waits_for_room():
    async with opened(slots=3) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as reader:
            await world.engine.lookup(reader)
            async with world.engine.request("w", hashes("xy")) as writer:
                storing = asyncio.create_task(world.engine.store(writer, [4, 5]))
                await turns()
                (copy,) = world.parked
                assert len(copy.parts[0].slots) == 1, "the slot that tickets leave to stores"
                world.transport.complete()
                await turns()
                assert not world.parked
                assert await world.during(world.engine.load(reader, [8, 9])) == 2
                assert await world.during(storing) == 2
        await world.check_rest()


@on_loop
async def test_without_room_until_the_deadline_the_store_is_refused():
    async with opened(slots=3) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("ab")) as reader,
            world.engine.request("w", hashes("x")) as writer,
            world.engine.request("v", hashes("yz")) as other,
        ):
            await world.engine.lookup(reader)
            held = asyncio.create_task(world.engine.store(writer, [4], 0, FAR_S))
            await turns()
            with pytest.raises(BusyError, match="no room"):
                await world.engine.store(other, [5, 6], 0, 0.5)
            assert world.counts == {"pinned": 2, "writing": 1}
            assert await world.during(held) == 1
        await world.check_rest()


# -- misuse -------------------------------------------------------------------------------------


@on_loop
async def test_misuse_is_an_error_at_the_call():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        for blocks, first in (([0, 1, 2], 0), ([0], 2), ([0], -1)):
            with pytest.raises(StateError, match="the request has no"):
                await world.engine.store(request, blocks, first)
        with pytest.raises(StateError, match="asked for"):
            await world.engine.load(request, [0])
        with pytest.raises(StateError, match="opened only once"):
            await world.engine.__aenter__()


@on_loop
async def test_a_request_is_of_no_use_when_it_has_ended():
    async with opened() as world:
        async with world.engine.request("r", hashes("a")) as request:
            pass
        for call in (world.engine.lookup(request), world.engine.store(request, [0])):
            with pytest.raises(StateError, match="unknown or has finished"):
                await call
        async with world.engine.request("r", hashes("a")):
            pass


@on_loop
async def test_an_engine_that_is_not_open_takes_no_calls():
    engine = OffloadEngine(CONFIG, lambda _view: None)
    await engine.close()
    with pytest.raises(ClosedError):
        async with engine.request("r", []):
            pass


def test_the_configuration_is_checked_before_anything_starts():
    with pytest.raises(ConfigError, match="unknown key"):
        OffloadEngine({**CONFIG, "cpu": 1}, lambda _view: None)
    with pytest.raises(ConfigError, match="either create_transport or kv_caches"):
        OffloadEngine(CONFIG)
    tensors = {"l": torch.zeros(4, 65, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match="either"):
        OffloadEngine(CONFIG, lambda _view: None, kv_caches=tensors)
    with pytest.raises(ConfigError, match="do not hold a chunk"):
        OffloadEngine(CONFIG, kv_caches=tensors)


def test_the_size_of_a_block_follows_from_the_tensors():
    config = {"cpu_bytes_to_use": 4 * 4096, "model": "test", "blocks_per_chunk": 2}
    tensors = {"a": torch.zeros(3, 16, 2), "b": torch.zeros(3, 8, 2)}
    engine = OffloadEngine(config, kv_caches=tensors)
    assert engine._config.block_bytes == 2 * (16 + 8) * 2 * 4
    split = {"l": torch.zeros(2, 3, 16, 8)}
    with pytest.raises(ConfigError, match="give block_dim=1"):
        OffloadEngine(config, kv_caches=split)
    assert OffloadEngine(config, kv_caches=split, block_dim=1)._config.block_bytes == 2 * 2 * 512
    with pytest.raises(ConfigError, match="block_bytes: missing"):
        OffloadEngine(config, lambda _view: None)
    with pytest.raises(ConfigError, match="blocks_per_chunk"):
        OffloadEngine({**config, "blocks_per_chunk": "2"}, kv_caches=tensors)
    with pytest.raises(ConfigError, match="config: "):
        OffloadEngine(["model"], kv_caches=tensors)


@on_loop
async def test_key_and_value_may_lie_before_the_device_blocks():
    tensor = torch.arange(2 * 4 * 8, dtype=torch.uint8).reshape(2, 4, 2, 4)
    before = tensor.clone()
    config = {"cpu_bytes_to_use": 8 * 4096, "model": "test"}
    async with OffloadEngine(config, kv_caches={"l": tensor}, block_dim=1) as engine:
        async with engine.request("r", hashes("ab")) as request:
            assert await engine.store(request, [0, 1]) == 2
            assert await engine.lookup(request) == 2
            assert await engine.load(request, [2, 3]) == 2
        assert torch.equal(tensor[:, 2:], before[:, :2])


@on_loop
async def test_an_engine_over_a_callers_tensors():
    tensors = {"l": torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)}
    config = OffloadConfig.parse(
        {"cpu_bytes_to_use": 8 * 4096, "block_bytes": PAGE_BYTES, "model": "test"}
    )
    async with OffloadEngine(config, kv_caches=tensors) as engine:
        for index, block_hash in enumerate(hashes("abc")):
            tensors["l"][index] = torch.from_numpy(content(block_hash).copy())
        async with engine.request("r", hashes("abc")) as request:
            assert await engine.store(request, [0, 1, 2]) == 3
            assert await engine.lookup(request) == 3
            assert await engine.load(request, [5, 6, 7]) == 3
        assert torch.equal(tensors["l"][5:], tensors["l"][:3])


@on_loop
async def test_statistics_tell_of_tiers_and_copies_also_after_the_close():
    async with opened(tiers=[SCRIPTED]) as world, world.engine.request("r", hashes("ab")) as r:
        task = asyncio.create_task(world.engine.store(r, [0, 1]))
        await turns()
        read = world.engine.stats()
        assert (read.copies, read.waiting_stores, read.primary.slots.writing) == (1, 0, 2)
        assert read.planner.requests == 1
        world.transport.complete()
        assert await task == 2
        assert world.engine.stats().copies == 0
        await world.calm()
        assert world.engine.stats().tiers[0].stored_blocks == 2
        engine = world.engine
    assert engine.stats().tiers[0].stored_blocks == 2


def test_an_engine_that_was_never_opened_has_no_statistics():
    config = {"cpu_bytes_to_use": 4096, "block_bytes": 4096, "model": "m"}
    with pytest.raises(ClosedError, match="not open"):
        OffloadEngine(config, create_transport=lambda _view: None).stats()


# -- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [math.nan, -1, math.inf, "1", None])
@on_loop
async def test_a_timeout_that_is_no_time_is_an_error_before_anything_starts(timeout_s):
    async with opened() as world:
        await world.put("ab")
        engine = world.engine
        async with engine.request("r", hashes("ab")) as request:
            assert await engine.lookup(request) == 2
            calls = [
                engine.lookup(request, timeout_s),
                engine.load(request, [8, 9], timeout_s),
                engine.store(request, [8, 9], 0, timeout_s),
                engine.quiesce(timeout_s),
                engine.wait_for_progress(timeout_s),
                request.released(timeout_s),
            ]
            if timeout_s is not None:  # there None means the configuration's
                calls += [engine.reset(timeout_s), engine.close(timeout_s)]
            for call in calls:
                with pytest.raises(StateError, match=r"timeout_s: .* is not valid; give seconds"):
                    await call
            assert not world.parked
            assert await world.during(engine.load(request, [8, 9])) == 2, "all is as it was"


@on_loop
async def test_a_timeout_of_any_length_is_a_time():
    timeout_s = 10**400
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        assert await world.during(world.engine.store(request, [8, 9], 0, timeout_s)) == 2
        assert await world.engine.lookup(request, timeout_s) == 2
        assert await world.engine.quiesce(timeout_s)
        await world.engine.reset(timeout_s)
        await world.engine.close(timeout_s)


@on_loop
async def test_a_device_block_is_given_once():
    async with opened() as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            assert await world.engine.lookup(request) == 2
            for call in (world.engine.load, world.engine.store):
                with pytest.raises(StateError, match="device_blocks: 7 is given twice"):
                    await call(request, [7, 7])
            assert await world.during(world.engine.load(request, (i for i in (7, 8)))) == 2
            assert world.holds(hashes("ab"), [7, 8])


@on_loop
async def test_arguments_of_another_type_are_errors_that_name_them():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        for blocks in (7, None, "ab", [1.0, 2], [None]):
            with pytest.raises(StateError, match="device_blocks are numbers"):
                await world.engine.store(request, blocks)
        for first in (1.5, "1", None):
            with pytest.raises(StateError, match=r"first_block: .* give an index"):
                await world.engine.store(request, [1], first)
        for block_hashes in (None, 5, b"abc", ["a"], [5], [bytearray(b"abc")]):
            with pytest.raises(StateError, match=r"block_hashes: .* bytes"):
                async with world.engine.request("s", block_hashes):
                    pass


def test_bounds_and_tensors_of_another_type_are_refused():
    for bounds in ("x", 5, {}):
        with pytest.raises(ConfigError, match=r"bounds: .* give an EngineBounds"):
            OffloadEngine(CONFIG, lambda _view: None, bounds)
    for name in ("concurrent_loads", "concurrent_stores", "waiting_calls", "unread_events"):
        for limit in (math.nan, 1.5, "2", None, -1):
            with pytest.raises(ConfigError, match=rf"{name}: .* give an integer of at least"):
                EngineBounds(**{name: limit})
    tensors = {"l": torch.zeros(4, 8, dtype=torch.uint8)}
    for block_dim in ("x", 0.5, -1):
        with pytest.raises(ConfigError, match="block_dim="):
            OffloadEngine(CONFIG, kv_caches=tensors, block_dim=block_dim)
