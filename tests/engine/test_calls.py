"""Lookup, load and store: what they wait for, what they return, what they raise."""

import asyncio

import numpy as np
import pytest
import torch
from engine.worlds import (
    FAR_S,
    LOAD,
    PAGE_BYTES,
    STORE,
    content,
    hashes,
    jump,
    key,
    on_loop,
    opened,
    register,
    turns,
)

from kvoffload_async.abc.transport import Transfer
from kvoffload_async.config import OffloadConfig
from kvoffload_async.engine import EngineBounds, OffloadEngine
from kvoffload_async.errors import BusyError, ClosedError, ConfigError, StateError, TransportError
from kvoffload_async.testing import Operation

SCRIPTED = {"type": "scripted"}
PROBED = {"type": "scripted", "probed": True}


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    register(monkeypatch)


# -- lookup -------------------------------------------------------------------------------------


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


async def only_in_the_tier(world, text):
    """Store a text, then push it out of the primary."""
    await world.put(text, "seed")
    slots = world.core.primary.num_slots
    await world.put("Z" * slots, "pusher")
    assert not any(world.core.primary.lookup(key(text[:i])).name == "HIT" for i in (1, len(text)))


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
            world.tiers[0].settle(load)
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
            tier.settle_all()
            await turns()
            assert [p.kind for p in tier.parked] == [Operation.LOAD]
            tier.settle_all()
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
            world.tiers[0].settle(load, error=OSError("injected"))
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
        clock = asyncio.get_running_loop()
        world.engine.manager._clock = clock.time
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
        end_step = world.engine.manager.on_schedule_end
        world.engine.manager.on_schedule_end = lambda: (steps.append(1), end_step())
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
            world.settle_everything()
            assert await waiting[0] == 2
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
            world.settle_everything()
            assert [await task for task in both] == [2, 2]
        await world.check_rest()


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
    async with opened(slots=2) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            task = asyncio.create_task(world.engine.load(request, [8, 9]))
            await turns()
        assert world.counts == {"pinned": 2}
        async with world.engine.request("s", hashes("xy")) as request:
            with pytest.raises(BusyError):
                await world.engine.store(request, [0, 1], 0, 0)
        world.settle_everything()
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
            world.settle_everything()
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
            world.transport.settle()
            assert await storing == 1
            assert await looking == 1


@on_loop
async def test_a_store_waits_for_room():
    async with opened(slots=2) as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as reader:
            await world.engine.lookup(reader)
            async with world.engine.request("w", hashes("xy")) as writer:
                storing = asyncio.create_task(world.engine.store(writer, [4, 5]))
                await turns()
                assert not world.parked
                assert await world.during(world.engine.load(reader, [8, 9])) == 2
                assert await world.during(storing) == 2
        await world.check_rest()


@on_loop
async def test_without_room_until_the_deadline_the_store_is_refused():
    async with opened(slots=2) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("ab")) as reader,
            world.engine.request("w", hashes("xy")) as writer,
        ):
            await world.engine.lookup(reader)
            storing = asyncio.create_task(world.engine.store(writer, [4, 5], 0, FAR_S))
            await turns()
            await jump()
            with pytest.raises(BusyError, match="no room"):
                await storing
            assert world.counts == {"pinned": 2}
        await world.check_rest()


# -- failures -----------------------------------------------------------------------------------


@on_loop
async def test_a_store_that_fails_leaves_nothing_readable():
    async with (
        opened(tiers=[SCRIPTED]) as world,
        world.engine.request("r", hashes("ab")) as request,
    ):
        task = asyncio.create_task(world.engine.store(request, [0, 1]))
        await turns()
        world.transport.settle(error=OSError("injected"))
        with pytest.raises(TransportError, match="OSError: injected"):
            await task
        assert await world.engine.lookup(request) == 0
        assert world.counts == {"free": 8}
        assert not world.tiers[0].parked


@on_loop
async def test_a_load_that_fails_lets_go_of_its_pins():
    async with opened() as world:
        await world.put("ab")
        async with world.engine.request("r", hashes("ab")) as request:
            await world.engine.lookup(request)
            task = asyncio.create_task(world.engine.load(request, [8, 9]))
            await turns()
            world.transport.settle(error=TransportError("injected"))
            with pytest.raises(TransportError, match="injected"):
                await task
            assert world.counts == {"free": 6, "idle": 2}
            assert await world.engine.lookup(request) == 2, "the blocks themselves are fine"
        await world.check_rest()


@on_loop
async def test_a_copy_that_cannot_begin_is_a_failure_like_any_other():
    async with opened() as world:
        await world.put("ab")
        world.transport.refusal = RuntimeError("no stream")
        async with world.engine.request("r", hashes("abc")) as request:
            await world.engine.lookup(request)
            for call in (
                world.engine.load(request, [8, 9]),
                world.engine.store(request, [0], 2),
            ):
                with pytest.raises(TransportError, match="no stream"):
                    await call
            assert world.counts == {"free": 6, "idle": 2}
        await world.check_rest()


@on_loop
async def test_device_blocks_that_do_not_exist_are_a_failure_too():
    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        with pytest.raises(TransportError, match="no device block"):
            await world.engine.store(request, [64])
        with pytest.raises(TransportError, match="could not begin"):
            await world.engine.store(request, ["x"])
        assert world.counts == {"free": 8}


@on_loop
async def test_a_transfer_that_raises_is_a_failure_too():
    class OddError(BaseException):
        pass

    class Odd(Transfer):
        def __init__(self, error):
            self.error = error

        async def outcome(self):
            raise self.error

        def synchronize(self, timeout_s):
            return True

    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        for error in (KeyError("odd"), OddError("odd")):
            world.transport.odd = Odd(error)
            with pytest.raises(TransportError, match="odd"):
                await world.engine.store(request, [0])
            assert world.counts == {"free": 8}


@on_loop
async def test_a_defect_of_the_core_reaches_everybody_who_waits():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        end_step = world.engine.manager.on_schedule_end

        def defective():
            end_step()
            raise StateError("a defect")

        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.lookup(request))
            await turns(1)
            world.engine.manager.on_schedule_end = defective
            await turns()
            with pytest.raises(StateError, match="the engine has failed: a defect"):
                await task
            with pytest.raises(StateError, match="has failed"):
                await world.engine.lookup(request)
            world.engine.manager.on_schedule_end = end_step
        loop = asyncio.get_running_loop()
        assert [str(c["exception"]) for c in loop.unhandled] == ["a defect"]
        loop.unhandled.clear()
        await world.calm()


# -- deadlines, lines ---------------------------------------------------------------------------


@on_loop
async def test_a_call_that_gives_up_leaves_the_copy_and_its_place_alone():
    async with opened(bounds=EngineBounds(concurrent_stores=1)) as world:
        async with world.engine.request("r", hashes("ab")) as request:
            late = asyncio.create_task(world.engine.store(request, [0], 0, FAR_S))
            await turns()
            await jump()
            with pytest.raises(TimeoutError):
                await late
            assert world.counts == {"free": 7, "writing": 1}
            assert not await world.engine.quiesce(0)
            behind = asyncio.create_task(world.engine.store(request, [1], 1))
            await turns()
            assert len(world.parked) == 1, "the device is still busy with the first"
            world.transport.settle()
            assert await world.during(behind) == 1
            assert await world.engine.quiesce()
            assert await world.engine.lookup(request) == 2
        await world.check_rest()


@on_loop
async def test_quiescing_waits_for_the_last_copy():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        stores = [asyncio.create_task(world.engine.store(request, [i], i)) for i in range(2)]
        await turns()
        quiet = asyncio.create_task(world.engine.quiesce())
        await turns()
        world.transport.settle()
        await turns()
        assert not quiet.done()
        world.transport.settle()
        assert await quiet
        assert [await task for task in stores] == [1, 1]


@on_loop
async def test_who_watches_the_engine_is_woken_by_news_and_else_at_the_deadline():
    async with opened() as world, world.engine.request("r", hashes("a")) as request:
        world.fill(hashes("a"), [0])
        store = asyncio.create_task(world.engine.store(request, [0]))
        watcher = asyncio.create_task(world.engine.wait_for_progress(FAR_S))
        await turns()
        assert not watcher.done()
        world.transport.settle()
        await turns()
        assert watcher.done()
        assert await store == 1
        patient = asyncio.create_task(world.engine.wait_for_progress(FAR_S))
        await turns()
        assert not patient.done()
        await jump()
        assert patient.done()
    with pytest.raises(ClosedError):
        await world.engine.wait_for_progress(FAR_S)


@on_loop
async def test_a_line_is_bounded_and_first_come_first_served():
    bounds = EngineBounds(concurrent_stores=1, waiting_calls=2)
    async with opened(bounds=bounds) as world, world.engine.request("r", hashes("abcd")) as request:
        tasks = [asyncio.create_task(world.engine.store(request, [i], i)) for i in range(3)]
        await turns()
        with pytest.raises(BusyError, match="too many stores are waiting"):
            await world.engine.store(request, [3], 3)
        for index in range(3):
            (copy,) = world.parked
            assert copy.parts[0].blocks.tolist() == [index]
            world.transport.settle()
            assert await tasks[index] == 1
        assert await world.during(world.engine.store(request, [3], 3)) == 1


@on_loop
async def test_waiting_in_line_counts_towards_the_deadline():
    async with (
        opened(bounds=EngineBounds(concurrent_stores=1)) as world,
        world.engine.request("r", hashes("ab")) as request,
    ):
        first = asyncio.create_task(world.engine.store(request, [0], 0, 10 * FAR_S))
        await turns()
        second = asyncio.create_task(world.engine.store(request, [1], 1, FAR_S))
        await turns()
        await jump()
        with pytest.raises(TimeoutError):
            await second
        assert await world.during(first) == 1
        assert world.counts == {"free": 7, "idle": 1}


@on_loop
async def test_loads_and_stores_do_not_starve_each_other():
    bounds = EngineBounds(concurrent_loads=1, concurrent_stores=1)
    async with opened(bounds=bounds) as world:
        await world.put("a")
        async with (
            world.engine.request("r", hashes("a")) as reader,
            world.engine.request("w", hashes("wxyz")) as writer,
        ):
            await world.engine.lookup(reader)
            stores = [asyncio.create_task(world.engine.store(writer, [i], i)) for i in range(4)]
            await turns()
            load = asyncio.create_task(world.engine.load(reader, [9]))
            await turns()
            assert [copy.direction for copy in world.parked] == [STORE, LOAD]
            world.transport.settle(world.parked[1])
            assert await load == 1
            for store in stores:
                assert await world.during(store) == 1


@pytest.mark.parametrize(
    "bound",
    [
        {"concurrent_loads": 0},
        {"concurrent_stores": 0},
        {"unread_events": 0},
        {"waiting_calls": -1},
    ],
)
def test_bounds_under_which_nothing_could_happen_are_refused(bound):
    with pytest.raises(ConfigError, match=next(iter(bound))):
        EngineBounds(**bound)


# -- misuse -------------------------------------------------------------------------------------


@on_loop
async def test_misuse_is_an_error_at_the_call():
    async with opened() as world, world.engine.request("r", hashes("ab")) as request:
        with pytest.raises(StateError, match="known already"):
            async with world.engine.request("r", hashes("ab")):
                pass
        for blocks, first in (([0, 1, 2], 0), ([0], 2), ([0], -1)):
            with pytest.raises(StateError, match="the request has no"):
                await world.engine.store(request, blocks, first)
        with pytest.raises(StateError, match="asked for"):
            await world.engine.load(request, [0])
        with pytest.raises(StateError, match="opened once"):
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
    engine = OffloadEngine({"cpu_bytes_to_use": 4096, "block_bytes": 64}, lambda _view: None)
    await engine.close()
    with pytest.raises(ClosedError):
        async with engine.request("r", []):
            pass


def test_the_configuration_is_checked_before_anything_starts():
    config = {"cpu_bytes_to_use": 4096, "block_bytes": 64}
    with pytest.raises(ConfigError, match="unknown key"):
        OffloadEngine({**config, "cpu": 1}, lambda _view: None)
    with pytest.raises(ConfigError, match="either create_transport or kv_caches"):
        OffloadEngine(config)
    tensors = {"l": torch.zeros(4, 65, dtype=torch.uint8)}
    with pytest.raises(ConfigError, match="either"):
        OffloadEngine(config, lambda _view: None, kv_caches=tensors)
    with pytest.raises(ConfigError, match="do not hold a chunk"):
        OffloadEngine(config, kv_caches=tensors)


@on_loop
async def test_an_engine_over_a_callers_tensors():
    tensors = {"l": torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)}
    config = OffloadConfig.parse({"cpu_bytes_to_use": 8 * 4096, "block_bytes": PAGE_BYTES})
    async with OffloadEngine(config, kv_caches=tensors) as engine:
        for index, block_hash in enumerate(hashes("abc")):
            tensors["l"][index] = torch.from_numpy(content(block_hash).copy())
        async with engine.request("r", hashes("abc")) as request:
            assert await engine.store(request, [0, 1, 2]) == 3
            assert await engine.lookup(request) == 3
            assert await engine.load(request, [5, 6, 7]) == 3
        assert torch.equal(tensors["l"][5:], tensors["l"][:3])
