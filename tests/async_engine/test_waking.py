"""A call that waits is woken by what it waits for, and asks again for nothing else."""

import asyncio

import numpy as np
import pytest
from async_engine.worlds import (
    FAR_S,
    PROBED,
    SCRIPTED,
    SLOT_BYTES,
    content,
    hashes,
    jump,
    key,
    on_loop,
    only_in_the_tier,
    opened,
    register,
    turns,
)
from scripted_tier import Operation

from kvoffload_async.async_engine.transfers import EngineBounds
from kvoffload_async.errors import BusyError, StateError, TierUnavailableError
from kvoffload_async.facade import tier_group
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import JobResult, LookupResult

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Counted:
    """Counts how often an engine's core is asked for a block, and how often somebody is woken."""

    def __init__(self, world):
        self.keys = []
        self.waiters = world.engine._steps.waiters
        self.before = self.waiters.wake_ups
        lookup_many = world.engine.driver.planner.lookup_many

        def counted(keys, ctx, *, stop_at_miss):
            answers = lookup_many(keys, ctx, stop_at_miss=stop_at_miss)
            self.keys += keys[: len(answers)]
            return answers

        world.engine.driver.planner.lookup_many = counted

    @property
    def wake_ups(self):
        return self.waiters.wake_ups - self.before


def retained(world):
    return world.core.room.named_blocks


def in_tier(tier, text):
    """Let a probed tier have a text's blocks."""
    for end in range(1, len(text) + 1):
        tier.blocks[key(text[:end])] = np.resize(content(text[:end].encode()), SLOT_BYTES)


async def looking(world, name, text, timeout_s=FAR_S):
    async with world.engine.request(name, hashes(text)) as request:
        return await world.engine.lookup(request, timeout_s)


def start(world, name, text, timeout_s=FAR_S):
    return asyncio.create_task(looking(world, name, text, timeout_s))


async def cost_of_promotions(in_flight, length=4):
    """Return how often a block is asked for, and a request woken, if promotions end one by one."""
    blocks = in_flight * length
    slots = blocks + blocks // 8 + 2  # some are reserved for stores
    async with opened(slots=slots, tiers=[SCRIPTED], device_blocks=slots) as world:
        texts = [letter * length for letter in LETTERS[:in_flight]]
        for text in texts:
            await world.put(text, text)
        for pusher, put in zip("01", range(0, slots, 80), strict=False):  # a hash is a whole text
            await world.put(pusher * min(80, slots - put), pusher)
        counted = Counted(world)
        tasks = [start(world, text, text) for text in texts]
        await turns()
        while world.tiers[0].parked:
            world.tiers[0].finish(world.tiers[0].parked[0])
            await turns(5)
        assert [await task for task in tasks] == [length] * in_flight
        await world.check_rest()
        return len(counted.keys) / blocks, counted.wake_ups / in_flight


@on_loop
async def test_a_block_costs_as_much_among_many_requests_as_among_few():
    few, many = await cost_of_promotions(2), await cost_of_promotions(40)
    assert few == many == (2.0, 1.0), "asked for when it is looked up, and when it has landed"


@on_loop
async def test_what_is_known_is_asked_for_once_more_when_all_is_known():
    async with opened(slots=6, tiers=[SCRIPTED, SCRIPTED]) as world:
        await only_in_the_tier(world, "abcd")
        await world.put("ab", "again")
        counted = Counted(world)
        task = start(world, "r", "abcd")
        await turns()
        world.finish_everything()
        assert await task == 4
        asked = [counted.keys.count(key("abcd"[:end])) for end in range(1, 5)]
        assert asked == [2, 2, 2, 2]


@on_loop
async def test_the_head_that_is_evicted_while_the_tail_comes_is_brought_back():
    """A request that waits for room behind others holds nothing, not even the head it has."""
    async with opened(slots=6, tiers=[SCRIPTED]) as world:
        await world.put("xy", "seed")
        await only_in_the_tier(world, "abcd")
        await world.put("ab", "again")
        others, task = start(world, "o", "xy"), start(world, "r", "abcd")
        await turns()
        assert retained(world) == 2
        evicted = [key("ZY"), key("ZX"), key("ZW"), key("ZV")]
        assert world.core.primary.reserve(evicted)
        world.core.primary.complete_write(evicted, success=True)
        assert world.core.primary.lookup(key("a")) is LookupResult.MISS
        (theirs,) = world.tiers[0].parked
        world.tiers[0].finish(theirs)
        assert await others == 2
        await turns()
        assert not task.done()
        assert await world.during(task) == 4
        await world.check_rest()


async def cost_of_blocks_that_come_one_by_one(length):
    """Return how often a block is asked for; all that was found is pinned meanwhile."""
    text, blocks = LETTERS[:length], range(length)
    async with (
        opened(slots=length + 8, bounds=EngineBounds(concurrent_stores=length)) as world,
        world.engine.request("w", hashes(text)) as writer,
    ):
        stores = [asyncio.create_task(world.engine.store(writer, [i], i)) for i in blocks]
        await turns()
        counted = Counted(world)
        task = start(world, "r", text)
        for found in blocks:
            await turns()
            assert retained(world) == length
            assert world.counts.get("pinned", 0) == found
            world.transport.complete()
        assert await task == length
        await asyncio.wait(stores)
        assert retained(world) == 0
        return len(counted.keys) / length


@on_loop
async def test_what_was_found_is_retained_while_the_rest_comes_and_costs_no_more_for_long_prompts():
    few = await cost_of_blocks_that_come_one_by_one(4)
    many = await cost_of_blocks_that_come_one_by_one(48)
    assert max(few, many) < 4.0, "looked up, has landed, on behalf of those found, and at the end"


@on_loop
async def test_a_promotion_that_fails_at_the_head_ends_the_lookup_at_once():
    async with opened(slots=4, tiers=[SCRIPTED, PROBED]) as world:
        exact, probed = world.tiers
        await only_in_the_tier(world, "a")
        in_tier(probed, "abc")
        probed.blocks.pop(key("a"))
        task = start(world, "r", "abc")
        await turns()
        (probe,) = probed.parked
        probed.finish(probe)
        await turns()
        (load,) = exact.parked
        assert [p.kind for p in probed.parked] == [Operation.LOAD]
        exact.finish(load, error=OSError("injected"))
        await turns()
        (asked_again,) = [p for p in probed.parked if p.kind is not Operation.LOAD]
        probed.finish(asked_again)
        await turns()
        assert task.done(), "it waits for the tail, which is of no use"
        assert await task == 0
        await world.check_rest()


@on_loop
async def test_a_probe_wakes_those_whose_keys_it_has_answered():
    async with opened(slots=4, tiers=[PROBED]) as world:
        in_tier(world.tiers[0], "a")
        counted = Counted(world)
        first = start(world, "r", "a")
        await turns()
        second = start(world, "s", "x")
        await turns()
        mine, others = world.tiers[0].parked
        world.tiers[0].finish(others)
        await turns()
        assert second.done()
        assert await second == 0
        assert not first.done()
        assert counted.keys.count(key("a")) == 1
        world.tiers[0].finish(mine)
        await turns()
        assert await world.during(first) == 1
        await world.check_rest()


@pytest.mark.parametrize("is_good", [True, False])
@on_loop
async def test_a_write_of_another_request_wakes_who_waits_for_its_blocks(is_good):
    async with (
        opened(bounds=EngineBounds(concurrent_stores=2)) as world,
        world.engine.request("w", hashes("ab")) as writer,
        world.engine.request("v", hashes("xy")) as other,
    ):
        world.fill(hashes("ab"), [0, 1])
        stores = [
            asyncio.create_task(world.engine.store(request, [0, 1])) for request in (writer, other)
        ]
        await turns()
        counted = Counted(world)
        task = start(world, "r", "ab")
        await turns()
        mine, others = world.parked
        world.transport.complete(others)
        await turns()
        assert len(counted.keys) == 2
        assert counted.wake_ups == 0
        world.transport.complete(mine, None if is_good else OSError("injected"))
        await turns()
        assert task.done(), "at once, and not when it has waited for too long"
        assert await task == (2 if is_good else 0)
        await asyncio.wait(stores)
        assert [store.exception() is None for store in stores] == [is_good, True]


@on_loop
async def test_a_store_that_waits_for_room_is_not_woken_while_there_is_none():
    async with (
        opened(slots=2, bounds=EngineBounds(concurrent_stores=2)) as world,
        world.engine.request("w", hashes("ab")) as holder,
        world.engine.request("s", hashes("xy")) as waiting,
    ):
        world.fill(hashes("ab"), [0, 1])
        holding = asyncio.create_task(world.engine.store(holder, [0, 1]))
        await turns()
        storing = asyncio.create_task(world.engine.store(waiting, [2, 3], 0, FAR_S))
        await turns()
        waiters = world.engine._steps.waiters
        before = waiters.wake_ups
        for name in "pq":
            assert await looking(world, name, "no") == 0
            await turns()
        assert waiters.wake_ups == before
        world.transport.complete()
        assert await holding == 2
        await turns()
        assert world.parked, "at once"
        assert await world.during(storing) == 2


@on_loop
async def test_the_end_of_a_request_ends_its_calls():
    async with opened(slots=4, tiers=[SCRIPTED]) as world:
        await only_in_the_tier(world, "ab")
        async with world.engine.request("r", hashes("ab")) as request:
            task = asyncio.create_task(world.engine.lookup(request, FAR_S))
            await turns()
        await turns()
        with pytest.raises(StateError, match="unknown or has finished"):
            await task
        await world.check_rest()


@on_loop
async def test_nothing_is_remembered_of_calls_that_have_ended():
    async with opened(slots=4, tiers=[SCRIPTED, PROBED]) as world:
        await only_in_the_tier(world, "ab")
        tasks = [start(world, name, "ab") for name in "rs"]
        await turns()
        async with world.engine.request("w", hashes("st")) as request:
            tasks.append(asyncio.create_task(world.engine.store(request, [0, 1])))
            await turns()
        async with world.engine.request("full", hashes("uv")) as request:
            with pytest.raises(BusyError):
                await world.engine.store(request, [2, 3], 0, 0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert [await world.during(task) for task in tasks[1:]] == [2, 2]
        waiters = world.engine._steps.waiters
        assert not any((waiters.everybody, waiters.by_key, waiters.for_room))


@on_loop
async def test_time_passing_wakes_who_is_deferred_for_too_long_whatever_others_do():
    async with opened(slots=4, tiers=[SCRIPTED], deferral_timeout_s=3) as world:
        await only_in_the_tier(world, "ab")
        task = start(world, "r", "ab")
        await turns()
        for name in "uvw":
            await jump(1.0)
            assert await looking(world, name, "no") == 0
            assert not task.done() or name == "w"
        await turns()
        assert await task == 0
        await world.check_rest()


class Undecided(SecondaryTierManager):
    """Knows after a while, and tells nobody."""

    def __init__(self, **common):
        super().__init__(tier=ExampleTier(), **common)
        self.answer = LookupResult.RETRY

    def lookup(self, key, req_context):
        return self.answer


@on_loop
async def test_a_tier_with_an_index_of_its_own_is_asked_again_whenever_something_happens(
    monkeypatch,
):
    register(monkeypatch, "undecided", Undecided)
    async with opened(tiers=[{"type": "undecided"}]) as world:
        task = start(world, "r", "ab")
        await turns()
        assert not task.done()
        world.engine.driver.secondary_tiers[0].answer = LookupResult.MISS
        async with world.engine.request("s", hashes("x")):
            pass
        await turns()
        assert await task == 0


class Reporting(SecondaryTierManager):
    """Has every block, and tells nobody when a load of its own has ended."""

    def __init__(self, primary_kv_view, **common):
        super().__init__(tier=ExampleTier(), primary_kv_view=primary_kv_view, **common)
        self.jobs = []
        self.is_done = False

    def lookup(self, key, req_context):
        return LookupResult.HIT

    def submit_load(self, job_metadata):
        self.jobs.append(job_metadata)

    def get_finished_jobs(self):
        ended, self.jobs = (self.jobs, []) if self.is_done else ([], self.jobs)
        return [JobResult(job.job_id, success=True) for job in ended]


@on_loop
async def test_a_tier_that_announces_no_results_is_polled_while_it_has_jobs(monkeypatch):
    register(monkeypatch, "reporting", Reporting)
    async with opened(tiers=[{"type": "reporting"}]) as world:
        task = start(world, "r", "a")
        await jump(0.1)
        assert not task.done()
        world.engine.driver.secondary_tiers[0].is_done = True
        await jump(0.1)
        assert task.done(), "long before its deadline, though nothing else has happened"
        assert await task == 1
        steps = world.engine.stats().runtime.step_seconds.count
        await jump(10.0)
        assert world.engine.stats().runtime.step_seconds.count == steps, "there is nothing to poll"


@on_loop
async def test_the_copy_of_a_store_holds_no_result_of_a_tier_back():
    """The copy left its step open, and a step that is open takes no results in."""
    async with opened(tiers=[SCRIPTED]) as world:
        async with (
            world.engine.request("a", hashes("ab")) as first,
            world.engine.request("x", hashes("xy")) as second,
        ):
            world.fill(hashes("ab"), [0, 1])
            store = asyncio.create_task(world.engine.store(first, [0, 1]))
            await turns()
            world.transport.complete()
            assert await store == 2
            await turns()
            assert len(world.core.jobs) == 1
            store = asyncio.create_task(world.engine.store(second, [2, 3], 0, FAR_S))
            await turns()
            world.tiers[0].finish_all()
            await turns()
            assert not world.core.jobs
            assert world.counts == {"free": 4, "writing": 2, "idle": 2}
            assert await world.during(store) == 2
        await world.check_rest()


class Late(Undecided):
    """Cannot be opened at first."""

    is_there = False

    def __init__(self, **common):
        if not Late.is_there:
            raise TierUnavailableError("nothing is mounted")
        super().__init__(**common)


@on_loop
async def test_a_tier_that_opens_during_a_lookup_is_asked_again_whenever_something_happens(
    monkeypatch,
):
    """The lookup waited until its deadline: it took the tier for one that tells of its answers."""
    monkeypatch.setattr(Late, "is_there", False)
    register(monkeypatch, "late", Late)
    late = {"type": "late", "required": False}
    monkeypatch.setattr(tier_group, "_LONGEST_PAUSE_S", 0.001)
    async with opened(tiers=[late, PROBED]) as world:
        task = start(world, "r", "ab")
        await turns()
        assert not task.done()
        Late.is_there = True
        thread = world.engine.driver._tiers._unopened[0]._thread
        while thread.is_alive():
            await turns()
        async with world.engine.request("s", hashes("x")):
            pass
        await turns()
        (probe,) = world.tiers[0].parked
        world.tiers[0].finish(probe)
        await turns()
        assert not task.done()
        world.engine.driver.secondary_tiers[0].answer = LookupResult.MISS
        async with world.engine.request("s", hashes("x")):
            pass
        await turns()
        assert task.done()
        assert await task == 0


@on_loop
async def test_a_store_that_waits_for_a_permit_holds_no_result_of_a_tier_back():
    """Its check whether all blocks are there left a step open, which takes no results in."""
    async with opened(tiers=[SCRIPTED], bounds=EngineBounds(concurrent_stores=1)) as world:
        async with (
            world.engine.request("a", hashes("a")) as first,
            world.engine.request("b", hashes("b")) as second,
            world.engine.request("c", hashes("c")) as third,
        ):
            world.fill(hashes("a"), [0])
            store = asyncio.create_task(world.engine.store(first, [0]))
            await turns()
            world.transport.complete()
            assert await store == 1
            await turns()
            assert len(world.core.jobs) == 1
            stores = [
                asyncio.create_task(world.engine.store(request, [block], 0, FAR_S))
                for request, block in ((second, 1), (third, 2))
            ]
            await turns()
            world.tiers[0].finish_all()
            await turns()
            assert not world.core.jobs
            assert [await world.during(store) for store in stores] == [1, 1]
        await world.check_rest()
