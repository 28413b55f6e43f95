"""Stores that wait for room in the primary, and what others can do meanwhile."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from async_engine.worlds import (
    FAR_S,
    SCRIPTED,
    hashes,
    jump,
    on_loop,
    only_in_the_tier,
    opened,
    turns,
)

from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import BusyError, ClosedError, TransportError


def storing(world, request, blocks, first=0):
    return asyncio.create_task(world.engine.store(request, blocks, first, FAR_S))


@on_loop
async def test_a_store_of_what_is_present_needs_nothing_that_stores_without_room_wait_for():
    async with opened(slots=2, reserved=0) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("ab")) as reader,
            world.engine.request("w", hashes("wxyz")) as writer,
            world.engine.request("again", hashes("ab")) as again,
        ):
            assert await world.engine.lookup(reader) == 2
            stores = [storing(world, writer, [block], block) for block in range(4)]
            await turns()
            assert world.engine.stats().waiting_stores == 4
            assert await world.engine.store(again, [8, 9], 0, FAR_S) == 0
            assert not again.left_out
            await jump()
            for store in stores:
                with pytest.raises(BusyError, match="no room"):
                    await store
            assert world.engine.stats().waiting_stores == 0
        await world.check_rest()


@on_loop
async def test_a_store_of_what_is_present_or_on_its_way_waits_for_no_copy():
    async with opened(bounds=EngineBounds(concurrent_stores=1)) as world:
        await world.put("a")
        async with (
            world.engine.request("w", hashes("ab")) as writer,
            world.engine.request("again", hashes("ab")) as again,
        ):
            first = storing(world, writer, [1], 1)
            await turns()
            assert len(world.parked) == 1
            assert await world.engine.store(again, [0, 1], 0, FAR_S) == 0
            assert await world.during(first) == 1
        await world.check_rest()


@on_loop
async def test_a_store_that_finds_room_does_not_wait_for_one_that_finds_none():
    async with opened(slots=2, reserved=0, bounds=EngineBounds(concurrent_stores=1)) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("a")) as reader,
            world.engine.request("long", hashes("xyz")) as long,
            world.engine.request("short", hashes("s")) as short,
        ):
            assert await world.engine.lookup(reader) == 1
            rest = storing(world, long, [0, 1, 2])
            await turns()
            world.transport.complete()
            await turns()
            assert world.engine.stats().waiting_stores == 1, "its own block is not to make room"
            assert await world.during(storing(world, short, [3])) == 1
            await turns()
            world.transport.complete_all()
            await turns()
            await jump()
            assert await rest == 2, "the short one's block has made room for another"
        await world.check_rest()


@on_loop
async def test_stores_that_wait_for_room_are_bounded_and_served_in_their_order():
    async with opened(slots=2, reserved=0, bounds=EngineBounds(waiting_calls=3)) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("ab")) as reader,
            world.engine.request("w", hashes("wxyz")) as writer,
        ):
            assert await world.engine.lookup(reader) == 2
            stores = [storing(world, writer, [block], block) for block in range(3)]
            await turns()
            with pytest.raises(BusyError, match="too many stores are waiting"):
                await world.engine.store(writer, [3], 3)
            loading = asyncio.create_task(world.engine.load(reader, [8, 9]))
            await turns()
            world.transport.complete()
            assert await loading == 2
            await turns()
            assert [copy.parts[0].blocks.tolist() for copy in world.parked] == [[0], [1]]
            assert [await world.during(store) for store in stores[:2]] == [1, 1]
            stores[2].cancel()
            await asyncio.wait(stores)
        await world.check_rest()


@on_loop
async def test_room_wakes_those_who_can_take_it_and_no_others():
    async with opened(slots=2, reserved=0, bounds=EngineBounds(waiting_calls=100)) as world:
        await world.put("ab")
        async with (
            world.engine.request("r", hashes("ab")) as reader,
            world.engine.request("w", [bytes([number]) * 8 for number in range(100)]) as writer,
        ):
            assert await world.engine.lookup(reader) == 2
            stores = [storing(world, writer, [0], number) for number in range(100)]
            await turns()
            waiters = world.engine._steps.waiters
            before = waiters.wake_ups
            loading = asyncio.create_task(world.engine.load(reader, [8, 9]))
            await turns()
            world.transport.complete()
            await loading
            await turns()
            assert len(world.parked) == 2
            assert waiters.wake_ups - before <= 5, "98 were not woken in vain"
            assert not any(store.done() for store in stores)
            for store in stores:
                store.cancel()
            await asyncio.wait(stores)
        await world.check_rest()


@on_loop
async def test_a_store_that_goes_away_when_it_is_its_turn_passes_the_room_on():
    async with opened(slots=1) as world:
        await world.put("a")
        async with (
            world.engine.request("r", hashes("a")) as reader,
            world.engine.request("w", hashes("xyz")) as writer,
        ):
            assert await world.engine.lookup(reader) == 1
            stores = [storing(world, writer, [block], block) for block in range(3)]
            await turns()
            waiters = world.engine._steps.waiters
            loading = asyncio.create_task(world.engine.load(reader, [8]))
            await turns()
            world.transport.complete()
            while len(waiters.for_room) == 3:
                await turns(1)
            stores[0].cancel()
            await turns()
            assert [copy.parts[0].blocks.tolist() for copy in world.parked] == [[1]]
            assert await world.during(stores[1]) == 1
            assert await loading == 1
            stores[2].cancel()
            await asyncio.wait(stores)
        await world.check_rest()


@on_loop
async def test_closing_ends_stores_that_wait_for_room_beside_copies_that_hang():
    async with opened(slots=2, reserved=0, bounds=EngineBounds(concurrent_stores=1)) as world:
        async with (
            world.engine.request("w", hashes("ab")) as writer,
            world.engine.request("v", hashes("xyz")) as other,
        ):
            hung = storing(world, writer, [0, 1])
            await turns()
            stores = [storing(world, other, [block], block) for block in range(3)]
            await turns()
            await world.engine.close(0.1)
            await asyncio.wait([hung, *stores])
            assert isinstance(hung.exception(), TransportError)
            assert all(isinstance(store.exception(), ClosedError) for store in stores)
        world.transport.complete()


@pytest.mark.parametrize("passed", range(8))
@on_loop
async def test_a_block_whose_promotion_fails_just_before_it_is_stored_is_copied(passed):
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "a")
        async with (
            world.engine.request("r", hashes("a")) as reader,
            world.engine.request("w", hashes("a")) as writer,
        ):
            lookup = asyncio.create_task(world.engine.lookup(reader, FAR_S))
            await turns()
            (load,) = world.tiers[0].parked
            world.tiers[0].finish(load, error=OSError("injected"))
            await turns(passed)
            world.fill(hashes("a"), [1])
            await world.during(world.engine.store(writer, [1], 0, FAR_S))
            await world.during(lookup)
            assert await world.during(world.engine.lookup(writer)) == 1
            await world.during(world.engine.load(writer, [2]))
            assert world.holds(hashes("a"), [2])
        await world.check_rest()


class Visited(Sequence):
    """Device blocks that count how often one of them is read."""

    def __init__(self, blocks):
        self.blocks = list(blocks)
        self.count = 0

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        found = self.blocks[index]
        self.count += len(found) if isinstance(index, slice) else 1
        return found


@on_loop
async def test_a_store_reads_each_device_block_a_few_times_however_many_there_are():
    """Each key's blocks were cut from a slice up to the end: 1.3 s for 40,000 blocks."""
    num_blocks = 512
    names = [number.to_bytes(8, "big") for number in range(num_blocks)]
    async with opened(slots=num_blocks, device_blocks=num_blocks) as world:
        blocks = Visited(range(num_blocks))
        async with world.engine.request("w", names) as writer:
            stored = await world.during(world.engine.store(writer, blocks, 0, FAR_S))
        assert stored == num_blocks
        assert blocks.count <= 4 * num_blocks
        await world.check_rest()


@on_loop
async def test_a_store_offers_again_only_as_many_blocks_as_room_was_made_for():
    """Each turn of the loop with room for one block offered all that were left."""
    text, held = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefgh"
    async with opened(slots=len(held)) as world:
        for letter in held:
            await world.put(letter)
        async with contextlib.AsyncExitStack() as readers:
            for letter in held:
                reader = await readers.enter_async_context(
                    world.engine.request(letter, hashes(letter))
                )
                assert await world.engine.lookup(reader) == 1
            async with world.engine.request("w", hashes(text)) as writer:
                offers = []
                prepare_store = world.engine.driver.planner.prepare_store

                def counted(keys, ctx):
                    offers.append(len(keys))
                    return prepare_store(keys, ctx)

                world.engine.driver.planner.prepare_store = counted
                storing_all = storing(world, writer, list(range(len(text))))
                await turns()
                await readers.aclose()
                assert await world.during(storing_all) == len(held)
                assert offers[0] == len(text)
                assert sum(offers[1:]) <= 3 * len(held)
                assert list(writer.left_out) == list(writer.keys[len(held) :])
        await world.check_rest()


@on_loop
async def test_a_long_lookup_beside_a_stream_of_stores_ends_at_once():
    """Each slot that a tier had taken over went to the next store, as long as there was one."""
    text, loop = "abcdefghijkl", asyncio.get_running_loop()

    async def store_one(number):
        async with world.engine.request(f"w{number}", [b"stream%8d" % number]) as writer:
            await world.engine.store(writer, [20], 0, FAR_S)

    async with opened(slots=16, tiers=[SCRIPTED], copies_each=None) as world:
        await only_in_the_tier(world, text)
        (tier,) = world.tiers
        stores = [asyncio.create_task(store_one(number)) for number in range(32)]
        while world.core.primary.room:
            await turns()
            world.transport.complete_all()
        async with world.engine.request("r", hashes(text)) as reader:
            began_s = loop.time()
            lookup = asyncio.create_task(world.engine.lookup(reader, FAR_S))
            while not lookup.done():
                assert loop.time() - began_s < 1.0
                stores += [asyncio.create_task(store_one(len(stores) + more)) for more in (0, 1)]
                await turns()
                world.transport.complete_all()
                for parked in tier.parked[:1]:
                    tier.finish(parked)
                await jump(0.01)
            assert await lookup == len(text)
            assert await world.during(world.engine.load(reader, range(len(text)))) == len(text)
        for store in stores:
            await world.during(store)
        assert world.core.counters.deferrals_expired == 0
        await world.check_rest()
