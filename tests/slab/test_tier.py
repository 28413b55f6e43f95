"""What a `slab` tier keeps, evicts and finds again, and with which options."""

import asyncio
import errno
import os

import pytest
from faulty_files import FaultyFileOps, is_direct
from slab.stores import BLOCK, FIXED, KIB, K, SlabStore, entered, is_segment, sound

from kvoffload_async.abc.events import BlocksEvicted
from kvoffload_async.errors import (
    TierFullError,
)
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.slab.addresses import segment_of, slot_of
from kvoffload_async.tiers.slab.layout import Budget, segment_name

# -- the capacity, and who goes -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_least_recent_block_goes_and_its_owner_learns_it(slab_store, policy):
    with slab_store.open(policy=policy, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        tier = harness.tier
        number = 0
        while not any(isinstance(e, BlocksEvicted) for e in harness.events):
            assert harness.store([K[number]]) == {}
            number += 1
        total = number - 1
        assert harness.contains(K) == set(K[1:number])
        assert harness.announced() & {K[0]} == set()
        harness.load([K[1]])
        tier.touch([K[2]])
        assert harness.store(K[40:42]) == {}
        assert harness.contains(K[:5]) == {K[1], K[2]}
        assert len(tier._store.catalog) == total
        sound(tier)


@pytest.mark.parametrize("keys_per_job", [24, 13])
def test_a_full_store_makes_room_for_several_jobs_at_once_and_keeps_neighbours(
    slab_store, keys_per_job
):
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=4 << 20, segment_bytes=4 << 20) as harness:
        ahead = harness.tier._allocator._budget.slots_ahead
        assert ahead > 2 * keys_per_job
        stored = num_jobs = num_evictions = most_calls = 0
        while num_evictions < 40:
            keys = [key_of(stored + i) for i in range(keys_per_job)]
            stored += keys_per_job
            before = len(harness.events), len(ops.calls)
            assert harness.store(keys) == {}
            evicted = [e for e in harness.events[before[0] :] if isinstance(e, BlocksEvicted)]
            num_evictions += len(evicted)
            assert all(len(event.keys) <= keys_per_job + ahead for event in evicted)
            if num_evictions:
                num_jobs += 1
                most_calls = max(most_calls, ops.counts(before[1])["pwritev"])
        assert num_jobs > 1.5 * num_evictions
        assert most_calls <= 2
        recent = [key_of(stored - 1 - i) for i in range(10 * keys_per_job)]
        assert harness.contains(recent) == set(recent), "what goes ahead is the least recent, too"
        sound(harness.tier)


def test_a_store_that_may_still_grow_evicts_nothing_for_the_sake_of_neighbours(slab_store):
    with slab_store.open(capacity_bytes=4 << 20, segment_bytes=256 * KIB) as harness:
        assert harness.tier._allocator._budget.slots_ahead
        for first in range(0, 700, 7):
            assert harness.store([key_of(first + i) for i in range(7)]) == {}
        assert not any(isinstance(event, BlocksEvicted) for event in harness.events)


def spelled_out(slots, num_segments):
    """What a store takes, in bytes: everything beside the blocks has its reason here."""
    small_files = 16 * 4096  # folders, lock, session, manifest and its successor, roundings
    beside_a_slot = 2 * 12 + 36 + 4  # two extents in leaves that are half empty; its last use
    beside_a_segment = 4096 + 4096 + 64  # header, first extent block, name
    journal = slots + -(-slots // 64) + max(32, slots // 2)  # records, their frames' headers, log
    return (
        small_files
        + slots * (BLOCK + beside_a_slot)
        + num_segments * beside_a_segment
        + 2 * journal * 128  # the one in use, and the next
    )


def test_the_capacity_is_never_exceeded_and_nearly_used(slab_store):
    capacity = 2048 * KIB
    with slab_store.open(capacity_bytes=capacity, segment_bytes=200 * KIB) as harness:
        largest = 0
        for first in range(0, 1200, 24):
            keys = [key_of(1000 + first + i) for i in range(24)]
            assert harness.store(keys) == {}
            largest = max(largest, slab_store.disk_bytes())
            assert slab_store.disk_bytes() <= capacity
        segments = harness.tier._store.catalog.segments
        slots = sum(segments.values())
        assert spelled_out(slots, len(segments)) <= capacity
        assert spelled_out(slots + 1, len(segments) + 1) > capacity, "there is no room for one more"
        ahead = harness.tier._allocator._budget.slots_ahead
        assert len(harness.tier._store.catalog) >= slots - ahead
        assert largest > 0.94 * capacity, (
            "what is reckoned with is used, also where folders are free"
        )
        sound(harness.tier)
    assert slab_store.disk_bytes() <= capacity
    with slab_store.open(capacity_bytes=capacity, segment_bytes=200 * KIB) as harness:
        assert harness.load(keys) == {}
        assert slab_store.disk_bytes() <= capacity


@pytest.mark.parametrize(
    ("block", "share"), [(4 * KIB, 0.9), (64 * KIB, 0.99), (1024 * KIB, 0.999)]
)
def test_what_lies_beside_the_blocks_of_a_large_store_takes_its_share_and_no_more(block, share):
    capacity = 10 << 30
    assert Budget.of(capacity, block, 1 << 30).most_slots * block > share * capacity


class MeasuringFileOps(FaultyFileOps):
    """Measures the disk whenever a new journal lies beside the old one."""

    def __init__(self, slab_store: SlabStore) -> None:
        super().__init__()
        self._slab_store = slab_store
        self.sizes: list[int] = []

    def rename(self, source: str, target: str) -> None:
        self.sizes.append(self._slab_store.disk_bytes())
        super().rename(source, target)


def test_the_capacity_has_room_for_the_old_journal_and_the_new(slab_store):
    capacity = 6 << 20
    ops = MeasuringFileOps(slab_store)
    options = {"capacity_bytes": capacity, "segment_bytes": 2 << 20}
    with slab_store.open(ops, num_slots=100, **options) as harness:
        keys = [key_of(number) for number in range(4000)]
        harness.fill(keys[:100], range(100))
        for first in range(0, 4000, 100):
            job = make_job(first, keys[first : first + 100], range(100), is_promotion=False)
            assert harness.run(harness.tier.store(job)) == {}
        sound(harness.tier)
    assert len(ops.sizes) > 4
    assert 0.96 * capacity < max(ops.sizes) <= capacity


def test_a_job_larger_than_the_store_keeps_its_head(slab_store):
    with slab_store.open(capacity_bytes=FIXED + 16 * BLOCK) as harness:
        failures = harness.store(K[:60])
        kept = 60 - len(failures)
        assert sorted(failures) == list(range(kept, 60))
        assert all(isinstance(error, TierFullError) for error in failures.values())
        assert harness.contains(K) == set(K[:kept])
        assert harness.load(K[:kept]) == {}
        sound(harness.tier)


def test_a_block_that_is_being_loaded_or_is_part_of_the_job_is_not_evicted(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        failures = harness.store(K[:60])
        count = 60 - len(failures)
        oldest = K[count - 1]  # tails go first
        hang = ops.hang(on="preadv", times=1)

        async def both():
            load = asyncio.create_task(
                harness.tier.load(make_job(900, [oldest], [60], is_promotion=True))
            )
            await entered(hang)
            keys = [K[1], *K[60 : 60 + count]]
            stored = await harness.tier.store(
                make_job(901, keys, range(len(keys)), is_promotion=False)
            )
            hang.release()
            return await load, stored

        harness.fill([K[1], *K[60 : 60 + count]], range(count + 1))
        loaded, stored = harness.run(both())
        assert loaded == {}
        assert harness.holds(oldest, 60)
        assert len(stored) == 2, "two blocks could not go"
        assert harness.contains([oldest, K[1]]) == {oldest, K[1]}
        sound(harness.tier)


def test_a_smaller_capacity_gives_segments_back_and_a_larger_one_adds_some(slab_store):
    with slab_store.open(capacity_bytes=1024 * KIB) as harness:
        for first in range(0, 80, 40):
            harness.store(K[first : first + 40])
        before = harness.contains(K)
    with slab_store.open(capacity_bytes=300 * KIB) as harness:
        assert slab_store.disk_bytes() <= 300 * KIB
        left = harness.announced()
        assert set() < left < before
        assert harness.load(sorted(left)) == {}
        sound(harness.tier)
        assert harness.store(K[:50:2]) == {}
        assert slab_store.disk_bytes() <= 300 * KIB
    with slab_store.open(capacity_bytes=2048 * KIB) as harness:
        assert harness.store(K[:60]) == {}
        assert harness.contains(K[:60]) == set(K[:60])
        sound(harness.tier)


def test_segments_of_another_size_are_used_as_they_are(slab_store):
    with slab_store.open(segment_bytes=64 * KIB) as harness:
        harness.store(K[:20])
    with slab_store.open(segment_bytes=256 * KIB) as harness:
        assert harness.load(K[:20]) == {}
        assert harness.store(K[20:80]) == {}
        assert harness.load(K[20:80]) == {}
        assert set(harness.tier._store.catalog.segments.values()) == {16, 64}


# -- bypassing the page cache, waiting for the device ---------------------------------------------


@pytest.mark.parametrize("block", [BLOCK, 5000])
def test_direct_io_moves_the_same_bytes(tmp_path, block):
    slab_store = SlabStore(tmp_path, block_bytes=block)
    ops = FaultyFileOps()
    with slab_store.open(ops, direct_io=True) as harness:
        assert harness.store(K[:7], [9, 8, 3, 4, 5, 30, 20]) == {}
        assert harness.load(K[:7], range(40, 47)) == {}
        assert all(harness.holds(K[i], 40 + i) for i in range(7))
        moves = [call for call in ops.calls if call.name in {"pwritev", "preadv"}]
        assert (
            all(is_direct(call) for call in moves) or not harness.tier._store.segments._direct.flag
        )
    with slab_store.open() as harness:
        assert harness.load(K[:7]) == {}


@pytest.mark.parametrize("on", ["open", "pwritev", "preadv"])
def test_direct_io_that_does_not_work_is_given_up_with_one_warning(slab_store, caplog, on):
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on=on, when=is_direct)
    with slab_store.open(ops, direct_io=True) as harness:
        assert harness.store(K[:20]) == {}
        assert harness.load(K[:20]) == {}
    assert [r for r in caplog.messages if "direct I/O does not work" in r] == [
        r for r in caplog.messages if "direct I/O" in r
    ][:1]
    assert not ops.open_fds


def test_with_fdatasync_blocks_are_on_the_device_before_they_are_journalled(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, fsync=True) as harness:
        before = len(ops.calls)
        assert harness.store(K[:20]) == {}
        names = [(c.name, is_segment(c)) for c in ops.calls[before:] if c.name != "open"]
        assert names.index(("fdatasync", True)) > names.index(("pwritev", True))
        assert names.index(("pwrite", False)) > names.index(("fdatasync", True))
        assert names[-1] == ("fdatasync", False)


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_segment_that_ends_behind_a_blocks_bytes_and_within_its_slot_has_the_block(
    tmp_path, direct_io
):
    slab_store = SlabStore(tmp_path, block_bytes=5000)
    with slab_store.open(direct_io=direct_io) as harness:
        assert harness.store(K[:4]) == {}
        ((address, key), *_) = sorted(
            ((p, k) for k, p in slab_store.addresses().items()), reverse=True
        )
        path = slab_store.folder / segment_name(segment_of(address))
        end = slab_store.size_of(slot_of(address)) + 5000
        os.truncate(path, end)
        assert harness.load(K[:4]) == {}
        os.truncate(path, end - 1)
        failures = harness.load(K[:4])
        assert {K[index] for index in failures} == {key}


def test_jobs_that_grow_are_moved_past_the_page_cache_in_memory_that_is_long_enough(tmp_path):
    slab_store = SlabStore(tmp_path, block_bytes=5000)  # no whole pages: by way of aligned memory
    with slab_store.open(direct_io=True) as harness:
        for count in 1, 4, 2, 8:
            keys = [key_of(100 * count + number) for number in range(count)]
            assert harness.store(keys) == {}
            assert harness.load(keys) == {}
            assert all(harness.holds(key, slot) for slot, key in enumerate(keys))


# -- pins and removals ----------------------------------------------------------------------------


def test_a_pinned_block_is_not_evicted_until_its_last_pin_is_gone(slab_store):
    with slab_store.open(capacity_bytes=FIXED + 16 * BLOCK) as harness:
        tier = harness.tier
        harness.store(K[:2])
        tier.pin([K[0], K[50]])  # one of them is not stored
        tier.pin([K[0]])
        for number in range(2, 40):
            harness.store([K[number]])
        assert harness.contains(K[:2]) == {K[0]}
        tier.unpin([K[0]])
        for number in range(2, 40):
            harness.store([K[number]])
        assert harness.contains(K[:1]) == {K[0]}
        tier.unpin([K[0], K[50]])
        tier.unpin([K[0]])  # one too many
        for number in range(2, 40):
            harness.store([K[number]])
        assert harness.contains(K[:1]) == set()
        assert not tier._pinned
        sound(tier)


def test_a_discarded_block_is_gone_also_after_a_restart_unless_it_was_pinned(slab_store):
    with slab_store.open() as harness:
        tier = harness.tier
        harness.store(K[:4])
        tier.pin([K[1]])
        tier.discard([K[0], K[0], K[1], K[9]])
        assert harness.contains(K[:4]) == set(K[1:4])
        assert [e.keys for e in harness.events if isinstance(e, BlocksEvicted)] == [(K[0],)]
        tier.unpin([K[1]])
        sound(tier)
        assert harness.store(K[4:6]) == {}
    with slab_store.open() as harness:
        assert harness.contains(K[:6]) == set(K[1:6])
        sound(harness.tier)
    tier.pin([K[1]])  # closed: no effect
    tier.unpin([K[1]])
    tier.discard([K[1]])
