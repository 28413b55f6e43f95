"""A capacity that became smaller takes the oldest blocks, once a whole cycle has seen them all."""

import asyncio
import math
import os

import pytest
from fs.directories import BLOCK, KIB, FsDirectory
from fs.spaces import ROOM_FOR_8, K, check, evicted, rescan, room_for, trim

from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.testing.harness import TierHarness
from kvoffload_async.tiers.files.ranking import KeyRanking
from kvoffload_async.tiers.fs import housekeeping as housekeeping_module
from kvoffload_async.tiers.fs.known_blocks import Ages, KnownBlocks
from kvoffload_async.tiers.fs.walk import Step


@pytest.fixture
def slow_opening(monkeypatch):
    """Opening ends before the first walk: everything is learned later."""
    monkeypatch.setattr(housekeeping_module, "_OPENING_S", 0.0)
    monkeypatch.setattr(housekeeping_module, "_STEP_S", 0.0)


def fill(directory: FsDirectory, count: int) -> list:
    """Put blocks there whose age has nothing to do with their bucket; return them by age."""
    by_age = sorted(K[:count], key=lambda key: key[::-1])
    for number, key in enumerate(by_age):
        os.utime(directory.put(key), (number, number))
    return by_age


def open_later(directory: FsDirectory, capacity_bytes: int) -> TierHarness:
    return directory.open(capacity_bytes=capacity_bytes, rescan_interval_s=3600.0)


async def stop(housekeeping) -> None:
    """End housekeeping between two steps: of one that is cancelled, nothing is learned."""
    async with housekeeping._walking:
        housekeeping._task.cancel()


async def step(housekeeping) -> None:
    async with housekeeping._walking:
        await housekeeping._take_step(lambda: False)


@pytest.mark.usefixtures("slow_opening")
def test_nothing_is_trimmed_before_a_whole_cycle_and_then_the_oldest_go(directory):
    by_age = fill(directory, 200)
    with open_later(directory, ROOM_FOR_8) as harness:
        housekeeping = harness.tier._housekeeping
        harness.run(stop(housekeeping))
        for _ in range(100):
            harness.run(step(housekeeping))
            trim(harness)
        assert directory.blocks() == set(by_age)
        assert not evicted(harness)
        while housekeeping._walk.is_in_cycle:
            harness.run(step(housekeeping))
        trim(harness)
        kept = directory.blocks()
        assert 5 < len(kept) < 40
        assert kept == set(by_age[-len(kept) :])
        rescan(harness)
        check(directory, harness, ROOM_FOR_8)


@pytest.mark.usefixtures("slow_opening")
def test_a_block_that_was_loaded_meanwhile_is_not_among_the_oldest(directory):
    by_age = fill(directory, 60)
    with open_later(directory, room_for(30)) as harness:
        harness.run(stop(harness.tier._housekeeping))
        assert harness.load(by_age[:2]) == {}
        rescan(harness)
        assert harness.load(by_age[2:4]) == {}
        trim(harness)
        gone = set(by_age) - directory.blocks()
        assert gone == set(by_age[4 : 4 + len(gone)])
        check(directory, harness, room_for(30))


@pytest.mark.usefixtures("slow_opening")
def test_while_there_is_too_much_nothing_new_is_stored_and_nothing_evicted_for_it(
    directory, caplog
):
    by_age = fill(directory, 60)
    with open_later(directory, room_for(86)) as harness:
        rescan(harness)
        trim(harness)
    assert not caplog.messages
    before_bytes = directory.disk_bytes()
    with open_later(directory, ROOM_FOR_8) as harness:
        housekeeping = harness.tier._housekeeping
        harness.run(stop(housekeeping))
        assert list(harness.store(K[300:301])) == [0]
        assert directory.blocks() == set(by_age)
        assert harness.load(by_age) == {}
        trim(harness)
        (waiting,) = caplog.messages
        assert f"{before_bytes + 4 * KIB} bytes" in waiting  # with the entry of a writer
        assert f"capacity_bytes is {ROOM_FOR_8}: blocks are served, and no new ones" in waiting
        rescan(harness)
        trim(harness)
        assert harness.store(K[300:301]) == {}
        assert K[300] in directory.blocks()
        check(directory, harness, ROOM_FOR_8)


@pytest.mark.usefixtures("slow_opening")
def test_below_the_capacity_a_store_evicts_what_is_known_before_the_first_cycle_ends(directory):
    fill(directory, 60)
    with open_later(directory, room_for(86)) as harness:
        rescan(harness)
    full_bytes = directory.disk_bytes() + 4 * KIB  # and 4 for the entry of a writer
    with open_later(directory, full_bytes) as harness:
        space = harness.tier._space
        harness.run(stop(harness.tier._housekeeping))
        while len(space._policy) < 8:
            harness.run(step(harness.tier._housekeeping))
        assert space.blocks.is_first_cycle
        assert harness.store(K[300:301]) == {}
        assert len(evicted(harness)) > 0
        rescan(harness)
        check(directory, harness, full_bytes)


def test_a_block_that_could_not_be_ranked_is_seen_again_and_evicted_once():
    ranking = KeyRanking(LruPolicy(2))
    known = KnownBlocks(ranking, (), list)
    known.learn(K[:3], {key: number for number, key in enumerate(K[:3])})
    ranking.discard(K[2:3])
    known.learn(K[:2], {key: number for number, key in enumerate(K[:2])})
    known.ages.sorting()()
    gone = []
    while victims := known.take_oldest(1):
        gone += victims
        known.left(victims)
    assert gone == K[:2]


def test_a_block_that_could_not_be_ranked_and_is_used_is_not_among_the_oldest():
    ranking = KeyRanking(LruPolicy(2))
    known = KnownBlocks(ranking, (), list)
    known.learn(K[:3], {key: number for number, key in enumerate(K[:3])})
    ranking.discard(K[2:3])
    known.learn(K[:1])
    known.ages.sorting()()
    assert known.take_oldest(3) == K[1:2]


def test_opening_looks_at_everything_in_as_many_steps_as_that_takes(directory, monkeypatch):
    monkeypatch.setattr(housekeeping_module, "_STEP_S", 0.0)
    by_age = fill(directory, 20)
    with open_later(directory, room_for(41)) as harness:
        assert set(harness.tier._space._policy) == set(by_age)
        assert not harness.tier._space.blocks.is_first_cycle


def test_blocks_that_cannot_be_ranked_are_removed_when_they_are_found_later(directory):
    with open_later(directory, ROOM_FOR_8) as harness:
        space = harness.tier._space
        assert space.blocks.ages is None
        fill(directory, 60)
        rescan(harness)
        assert len(space._policy) == ROOM_FOR_8 // BLOCK
        assert set(space._policy) == directory.blocks()
        trim(harness)
        check(directory, harness, ROOM_FOR_8)


def test_what_a_step_has_found_is_learned_with_turns_for_others_between(directory, monkeypatch):
    monkeypatch.setattr(housekeeping_module, "_PORTION", 1)
    monkeypatch.setattr("kvoffload_async.tiers.fs.known_blocks._SLOTS_AT_ONCE", 1)
    with open_later(directory, room_for(30)) as harness:
        housekeeping, space = harness.tier._housekeeping, harness.tier._space
        seen, ends = [], asyncio.Event()

        async def others() -> None:
            while not ends.is_set():
                if (known := len(space._policy)) not in seen:
                    seen.append(known)
                await asyncio.sleep(0)

        async def learn(step) -> None:
            task = asyncio.create_task(others())
            await asyncio.sleep(0)
            await housekeeping._learn(space, step)
            ends.set()
            await task

        harness.run(learn(Step(found=dict.fromkeys(K[:5], 1.0))))
        assert seen == [0, 1, 2, 3, 4, 5]
        space.blocks.begin_cycle()
        seen.clear()
        ends.clear()
        harness.run(learn(Step(ends_cycle=True)))  # none of them is there
        assert seen == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "case",
    [
        (True, 10.0, 0.0, 50.0),
        (True, 10.0, 2.0, 98.0),
        (True, 0.0, 0.0, 0.02),
        (False, 10.0, 0.0, 0.02),
        (False, 10.0, 2.0, 2.0),
    ],
)
def test_walks_rest_by_what_they_cost_and_less_while_nothing_can_be_stored(
    directory, monkeypatch, case
):
    is_known, took_s, cpu_s, rest_s = case
    with open_later(directory, room_for(30)) as harness:
        housekeeping = harness.tier._housekeeping
        housekeeping._usage.is_complete = is_known

        def rest() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio.get_running_loop(), "time", lambda: 1000.0)
                housekeeping._rest(1000.0 - took_s, cpu_s)
            assert housekeeping._next_step_s == pytest.approx(1000.0 + rest_s)

        harness.on_loop(rest)


def test_until_all_blocks_have_been_seen_walks_take_more_of_a_cpu(directory):
    with open_later(directory, room_for(30)) as harness:
        housekeeping = harness.tier._housekeeping
        assert housekeeping._is_known
        harness.tier._space.blocks.is_first_cycle = True
        assert not housekeeping._is_known


def test_trimming_goes_on_where_it_was_left(directory, monkeypatch):
    monkeypatch.setattr("kvoffload_async.tiers.fs.space._SLICE_S", -math.inf)
    monkeypatch.setattr("kvoffload_async.tiers.fs.space._TRIM_BATCH", 3)
    by_age = fill(directory, 60)
    with open_later(directory, ROOM_FOR_8) as harness:
        harness.run(stop(harness.tier._housekeeping))
        rescan(harness)
        assert harness.tier._space.blocks.ages is not None
        before = directory.blocks()
        trim(harness)
        assert before - directory.blocks() == set(by_age[len(by_age) - len(before) :][:3])
        while directory.disk_bytes() > 0.95 * ROOM_FOR_8:
            trim(harness)
        trim(harness)
        kept = directory.blocks()
        assert kept == set(by_age[-len(kept) :])
        assert harness.tier._space.blocks.ages is None
        check(directory, harness, ROOM_FOR_8)


def test_ages_are_sorted_over_slots_and_over_blocks_that_have_none():
    ages = Ages()
    ages.note(K[:3], [4, 0, 2], {K[0]: 5.0, K[1]: 3.0, K[2]: 1.0})
    ages.held.update({K[3]: 2.0, K[4]: 4.0, K[5]: 6.0})
    ages.sorting()()
    ages.note(K[6:7], [0], {})  # another block has the slot since
    assert ages.take(2) == ([2], [K[3]])
    assert ages.take(2) == ([], [K[4]])
    assert list(ages.held) == [K[5]]
    assert ages.take(1) == ([4], [])
    assert ages.take(BLOCK) == ([], [K[5]])
    assert ages.take(BLOCK) == ([], [])
