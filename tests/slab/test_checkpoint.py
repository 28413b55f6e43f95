"""The next journal: written beside the one in use, never in the way of a store."""

import asyncio
import errno
import itertools
from collections import Counter

import pytest
from faulty_files import FaultyFileOps
from slab.stores import BLOCK, FIXED, KIB, K, is_journal, is_segment, sound

from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.slab.layout import journal_units
from kvoffload_async.tiers.slab.records import RECORD_BYTES

CAPACITY = 8192 * KIB
WHOLE = {"capacity_bytes": CAPACITY, "segment_bytes": CAPACITY}
"""All slots at once."""


def is_next(call) -> bool:
    return call.path.endswith("/journal.new")


class CountingFileOps(FaultyFileOps):
    """Counts the bytes that are written to journals, in use or not."""

    written = 0

    def pwrite(self, fd, data, offset):
        if "/journal" in self.open_fds[fd][0]:
            self.written += len(data)
        return super().pwrite(fd, data, offset)


def churn(harness, count, first=1000, at_once=16):
    """Store new blocks in address of old ones."""
    for number in range(first, first + count, at_once):
        assert harness.store([key_of(number + i) for i in range(at_once)]) == {}


@pytest.mark.parametrize("fsync", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_written_in_steps_and_says_in_the_end_what_the_old_one_said(slab_store, fsync):
    ops = CountingFileOps()
    large = {"capacity_bytes": 4 * CAPACITY, "segment_bytes": 4 * CAPACITY}
    with slab_store.open(ops, **large, fsync=fsync) as harness:
        most = 0
        for number in range(0, 16000, 32):
            before = ops.written
            churn(harness, 32, 1000 + number, 32)
            most = max(most, ops.written - before)
        slots = sum(harness.tier._store.catalog.segments.values())
        assert ops.counts()["rename"] > 2
        appended = 1 + 32 + 32 + harness.tier._allocator._budget.slots_ahead
        assert most <= 12 * appended * RECORD_BYTES, "a store pays for what it appends"
        assert 12 * appended < slots * 0.6, "that is no whole journal"
        assert slab_store.journal.stat().st_size <= journal_units(slots) * RECORD_BYTES
        sound(harness.tier)
        kept = set(harness.tier._store.catalog.keys())
        assert set(slab_store.addresses()) == kept
    assert slab_store.disk_bytes() <= 4 * CAPACITY
    with slab_store.open(**large) as harness:
        assert harness.announced() == kept


def test_its_cost_per_record_does_not_grow_with_the_store(slab_store):
    written = []
    for scale in (1, 2):
        ops = CountingFileOps()
        with slab_store.open(ops, capacity_bytes=scale * CAPACITY // 4) as harness:
            churn(harness, scale * 1000)
            written.append(ops.written / (scale * 1000))
    assert written[1] < 1.5 * written[0]


def test_it_is_on_the_device_before_it_is_renamed(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=CAPACITY) as harness:
        churn(harness, 3200)
    calls = [call.name for call in ops.calls if is_next(call)]
    last = [calls[at - 1 :: -1] for at, name in enumerate(calls) if name == "rename"]
    assert last
    assert all(before.index("fdatasync") < before.index("open") for before in last)


def test_the_one_before_is_closed_before_a_third_is_allocated(slab_store):
    """The capacity has room for two, and a full disk may have no more."""
    ops = FaultyFileOps()
    with slab_store.open(ops, **WHOLE) as harness:
        churn(harness, 8000)
    calls = [call.name for call in ops.calls if is_journal(call)]
    switches = [at for at, name in enumerate(calls) if name == "rename"]
    assert len(switches) > 2
    for at in switches[:-1]:
        assert calls.index("close", at) < calls.index("reserve", at)


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "rename", "open", "reserve"])
def test_no_store_fails_because_it_cannot_be_written_and_it_is_tried_again(
    slab_store, caplog, call
):
    ops = FaultyFileOps()
    with slab_store.open(ops, **WHOLE) as harness:
        churn(harness, 2000)
        ops.fail(errno.EIO, on=call, when=is_next, times=1)
        renames = ops.counts()["rename"]
        churn(harness, 2000, 4000)
        assert "journal compaction failed" in caplog.text
        assert ops.counts()["rename"] > renames
        sound(harness.tier)
        kept = set(harness.tier._store.catalog.keys())
    with slab_store.open(capacity_bytes=CAPACITY) as harness:
        assert harness.announced() == kept


@pytest.mark.parametrize("call", ["fdatasync", "rename"])
def test_no_store_fails_because_one_that_is_given_up_cannot_be_closed(slab_store, caplog, call):
    ops = FaultyFileOps()
    with slab_store.open(ops, **WHOLE) as harness:
        churn(harness, 2000)
        ops.fail(errno.EIO, on=call, when=is_next, times=1)
        ops.fail(errno.EIO, on="close", when=is_next, times=1)
        churn(harness, 2000, 4000)
        assert "closing a journal that is not in use failed" in caplog.text
        sound(harness.tier)


def test_no_store_fails_because_the_journal_before_cannot_be_closed(slab_store, caplog):
    ops = FaultyFileOps()
    with slab_store.open(ops, **WHOLE) as harness:
        ops.fail(errno.EIO, on="close", times=1)
        churn(harness, 4000)
        assert "closing a journal that is not in use failed" in caplog.text
        sound(harness.tier)


def test_one_whose_bytes_were_lost_is_begun_in_a_new_file(slab_store):
    """A later wait for the same file would say that all is well."""
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=CAPACITY) as harness:
        churn(harness, 2000)
        ops.fail(errno.EIO, on="fdatasync", when=is_next, times=1)
        churn(harness, 2000, 4000)
    names = [call.name for call in ops.calls if is_next(call)]
    rest = names[names.index("close") :]  # which is of one that is given up: before a rename
    assert rest.index("open") < rest.index("rename")


def test_all_of_its_space_is_allocated_before_there_are_slots_for_its_blocks(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=CAPACITY) as harness:
        churn(harness, 400)
        slots = sum(harness.tier._store.catalog.segments.values())
        for path in (slab_store.journal, slab_store.folder / "journal.new"):
            assert path.stat().st_blocks * 512 >= journal_units(slots) * RECORD_BYTES
        ops.fail(errno.ENOSPC, on="reserve", when=lambda call: call.path.endswith("/journal"))
        for first in range(0, 60, 20):
            assert harness.store(K[first : first + 20]) == {}, "it need not grow"


def test_a_job_that_the_rest_of_the_journal_has_no_room_for_is_stored(slab_store):
    with slab_store.open(capacity_bytes=FIXED + 64 * BLOCK, num_slots=64) as harness:
        for first in range(0, 600, 40):
            keys = [key_of(2000 + first + i) for i in range(40)]
            assert harness.store(keys) == {}
            assert set(keys) <= set(slab_store.addresses())
        sound(harness.tier)


def test_a_journal_with_next_to_no_room_left_is_written_anew_at_the_opening(slab_store):
    ops = FaultyFileOps()
    ops.fail(errno.EIO, on="pwrite", when=is_next)  # from the first on: none is under way later
    with slab_store.open(ops, **WHOLE) as harness:
        journal = harness.tier._store.journal
        for number in itertools.count():
            churn(harness, 1, number, 1)
            if journal._max_units - journal._end_units < len(harness.tier._store.catalog) // 40:
                break
        kept = set(harness.tier._store.catalog.keys())
    full_bytes = slab_store.journal.stat().st_size
    with slab_store.open(**WHOLE) as harness:
        assert slab_store.journal.stat().st_size < 0.8 * full_bytes
        assert harness.announced() == kept
    with slab_store.open(ops := FaultyFileOps(), **WHOLE) as harness:
        assert not ops.counts()["rename"], "only where there is need"


# -- waiting for the device -----------------------------------------------------------------------


def crowded(harness, ops):
    """Have the next journal wait for the device until a job has no room in the one in use.

    Returns the hanging wait, the task that stores that job, and its keys.
    """
    hang = ops.hang(on="fdatasync", when=is_next, times=1)
    waiters = harness.tier._store.journal._mutex._waiters

    async def crowd():
        numbers = itertools.count()
        while True:
            number = next(numbers)
            keys = [key_of(1000 + 4 * number + i) for i in range(4)]
            job = make_job(900 + number, keys, range(4), is_promotion=False)
            task = asyncio.create_task(harness.tier.store(job))
            while not (task.done() or waiters):  # noqa: ASYNC110 - another thread waits
                await asyncio.sleep(0)
            if not task.done():
                return task, keys
            assert await task == {}

    return hang, *harness.run(crowd())


def test_a_job_without_room_is_stored_as_soon_as_the_next_journal_is_on_the_device(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, **WHOLE, io_threads=3) as harness:
        hang, task, keys = crowded(harness, ops)
        hang.release()

        async def ended():
            return await task

        assert harness.run(ended()) == {}
        assert harness.load(keys) == {}
        sound(harness.tier)


def test_a_job_without_room_ends_when_it_is_cancelled_also_if_the_device_hangs(slab_store):
    """Its deadline is the only one; see also `_POLL_S`."""
    ops = FaultyFileOps()
    with slab_store.open(ops, **WHOLE, io_threads=3) as harness:
        hang, task, keys = crowded(harness, ops)
        task.cancel()

        async def ended():
            with pytest.raises(asyncio.CancelledError):
                await task

        harness.run(ended())
        assert not harness.contains(keys)
        hang.release()
        sound(harness.tier)


def test_what_was_written_before_a_failed_wait_is_lost_whoever_asks_next(slab_store):
    """The kernel tells of bytes that it could not write once, and forgets them."""
    ops = FaultyFileOps()
    with slab_store.open(ops, fsync=True) as harness:
        assert harness.store(K[:4]) == {}
        segments = harness.tier._store.segments
        before = segments.sync_failures
        ops.fail(errno.EIO, on="fdatasync", when=is_segment, times=1)
        assert len(harness.store(K[4:8])) == 4
        with pytest.raises(OSError, match="concurrent sync"):
            segments.sync([0], before)
        segments.sync([0], segments.sync_failures)
        assert harness.store(K[4:8]) == {}
        sound(harness.tier)
        assert set(slab_store.addresses()) == set(K[:8])


def test_an_append_that_failed_leaves_no_gap_in_the_numbers(slab_store, caplog):
    ops = FaultyFileOps()
    with slab_store.open(ops, fsync=True) as harness:
        for number in range(12):
            if number % 3 == 2:
                ops.fail(errno.EIO, on="fdatasync", when=is_journal, times=1)
            harness.store([K[number]])
        kept = set(slab_store.addresses())
    assert len(kept) == 8
    with slab_store.open() as harness:
        assert harness.announced() == kept
    assert Counter("damaged" in text for text in caplog.messages)[True] == 0
