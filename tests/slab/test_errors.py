"""Blocks that do not verify, and system calls that fail."""

import asyncio
import contextlib
import errno
import itertools
import os

import pytest
from faulty_files import FaultyFileOps
from slab.stores import (
    BLOCK,
    FIXED,
    KIB,
    K,
    SlabStore,
    entered,
    flip,
    is_journal,
    is_segment,
    sound,
)

from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    TierClosedError,
    TierUnavailableError,
)
from kvoffload_async.testing.harness import make_job
from kvoffload_async.tiers.slab.layout import segment_name
from kvoffload_async.tiers.slab.records import RECORD_BYTES
from kvoffload_async.types import LookupResult, ReqContext

# -- verifying ------------------------------------------------------------------------------------


def test_a_damaged_block_is_gone_for_good_and_can_be_stored_again(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:4])
        slab_store.damage(K[2])
        failures = harness.load(K[:4])
        assert list(failures) == [2]
        assert isinstance(failures[2], CorruptBlockError)
        assert set(slab_store.addresses()) == {K[0], K[1], K[3]}, "its removal is journalled"
        assert isinstance(harness.load([K[2]])[0], BlockMissingError)
        assert harness.store([K[2]]) == {}
        assert harness.load(K[:4], range(30, 34)) == {}
        sound(harness.tier)


def test_a_removal_that_cannot_be_journalled_now_is_journalled_later(slab_store, caplog):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:3])
        slab_store.damage(K[1])
        ops.fail(errno.EIO, on="pwrite", when=is_journal)
        assert isinstance(harness.load(K[1:2])[0], CorruptBlockError)
        assert "not journalled yet" in caplog.text
        assert set(slab_store.addresses()) == set(K[:3])
        ops.heal()
        assert harness.store(K[5:6]) == {}
        assert set(slab_store.addresses()) == {K[0], K[2], K[5]}
        sound(harness.tier)


def test_a_damaged_journal_that_cannot_be_written_anew_is_worked_with(slab_store, caplog):
    with slab_store.open() as harness:
        for number in range(6):
            harness.store([K[number]])
        content = slab_store.journal.read_bytes()
    slab_store.journal.write_bytes(content)
    flip(slab_store.journal, len(content) - 3 * RECORD_BYTES)
    ops = FaultyFileOps()
    ops.fail(errno.ENOSPC, on="open", when=lambda call: call.path.endswith("journal.new"))
    with slab_store.open(ops) as harness:
        assert "journal compaction failed" in caplog.text
        assert harness.announced() == {K[i] for i in (0, 1, 2, 3, 5)}
        assert harness.store(K[10:14]) == {}
        sound(harness.tier)
    with slab_store.open() as harness:
        assert harness.announced() == {K[i] for i in (0, 1, 2, 3, 5, 10, 11, 12, 13)}


def test_the_owner_learns_that_a_block_is_damaged(slab_store):
    with slab_store.manage() as harness:
        harness.submit_store(K[:2], [0, 1])
        harness.wait()
        slab_store.damage(K[1])
        job = harness.submit_load(K[:2], [5, 6])
        harness.wait()
        assert harness.result_of(job).successful_keys == {K[0]}
        context = ReqContext("r")
        assert harness.manager.lookup(K[0], context) is LookupResult.HIT
        assert harness.manager.lookup(K[1], context) is LookupResult.MISS


def test_the_right_bytes_in_anothers_slot_do_not_verify(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:2])
        path = slab_store.folder / segment_name(0)
        first, second, end = (slab_store.size_of(slots) for slots in range(3))
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(first)
            file.write(content[second:end] + content[first:second])
        assert {type(e) for e in harness.load(K[:2]).values()} == {CorruptBlockError}


def test_two_loads_of_a_damaged_block_both_fail_and_its_slot_is_used_again(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:2])
        slab_store.damage(K[0])
        hang = ops.hang(on="preadv", times=1)

        async def both():
            jobs = [make_job(900 + i, [K[0]], [20 + i], is_promotion=True) for i in range(2)]
            first = asyncio.create_task(harness.tier.load(jobs[0]))
            await entered(hang)
            second = await harness.tier.load(jobs[1])
            catalog = harness.tier._store.catalog
            assert catalog._retired == catalog._pins, "its slot waits for the other load"
            assert catalog.num_evictable == 1
            hang.release()
            return await first, second

        for failures in harness.run(both()):
            assert isinstance(failures[0], CorruptBlockError)
        sound(harness.tier)


def test_a_segment_that_was_cut_short_costs_the_blocks_behind_the_cut(slab_store):
    with slab_store.open() as harness:
        harness.store(K[:16])
        os.truncate(slab_store.folder / segment_name(0), slab_store.size_of(5) + 100)
        failures = harness.load(K[:16])
        assert sorted(failures) == list(range(5, 16))
        assert {type(e) for e in failures.values()} == {CorruptBlockError}
        sound(harness.tier)


def test_a_block_whose_checksum_was_not_computed_is_not_served(slab_store, monkeypatch):
    with slab_store.open() as harness:
        harness.store(K[:2])
        block_io = harness.tier._transfers._block_io
        extents = block_io.extents

        async def without_digests(*args, **kwargs):
            return (await extents(*args, **kwargs))._replace(digests=b"")

        monkeypatch.setattr(block_io, "extents", without_digests)
        failures = harness.load(K[:2])
        assert {type(error) for error in failures.values()} == {CorruptBlockError}
        assert sorted(failures) == [0, 1]


@pytest.mark.parametrize("direct_io", [False, True])
def test_a_large_block_that_ends_early_or_cannot_be_read_fails_alone(tmp_path, direct_io):
    slab_store = SlabStore(tmp_path, block_bytes=3 * BLOCK)
    ops = FaultyFileOps()
    options = {"direct_io": direct_io, "piece_bytes": BLOCK, "segment_bytes": 256 * KIB}
    with slab_store.open(ops, **options) as harness:
        harness.store(K[:4])
        ops.fail(errno.EIO, on="preadv", times=1)
        (error,) = harness.load(K[:1]).values()
        assert isinstance(error, TierUnavailableError)
        os.truncate(slab_store.folder / segment_name(0), slab_store.size_of(0) + 10 * BLOCK)
        failures = harness.load(K[:4])
        assert list(failures) == [3]
        assert isinstance(failures[3], CorruptBlockError)
        assert "ends early" in str(failures[3])
        sound(harness.tier)


def test_without_verification_no_checksum_is_computed_and_none_served_later(slab_store):
    with slab_store.open(verify=False) as harness:
        harness.store(K[:4])
        slab_store.damage(K[1])
        assert harness.load(K[:4]) == {}, "nobody looks"
    with slab_store.open(verify=False) as harness:
        assert harness.announced() == set(K[:4])
    with slab_store.open() as harness:
        assert not harness.announced(), "they have no checksum"
        assert harness.store(K[:2]) == {}
        assert set(slab_store.addresses()) == set(K[:2])
    with slab_store.open(verify=False) as harness:
        assert harness.announced() == set(K[:2])
        assert harness.load(K[:2]) == {}


# -- errors ---------------------------------------------------------------------------------------


def test_a_block_that_cannot_be_read_fails_alone_and_stays(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:4])
        ops.fail(errno.EIO, on="preadv", times=3)  # the joined call, and the first two alone
        failures = harness.load(K[:4])
        assert sorted(failures) == [0, 1]
        assert {type(e) for e in failures.values()} == {TierUnavailableError}
        assert harness.load(K[:4]) == {}
        sound(harness.tier)


def test_a_block_that_cannot_be_written_fails_alone(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        ops.fail(errno.EIO, on="pwritev", times=2)
        failures = harness.store(K[:4])
        assert list(failures) == [0]
        assert harness.contains(K[:4]) == set(K[1:4])
        assert harness.load(K[1:4]) == {}
        sound(harness.tier)


def test_a_job_that_cannot_be_journalled_fails_and_leaves_nothing(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:2])
        ops.fail(errno.EIO, on="pwrite", when=is_journal)
        failures = harness.store(K[2:6])
        assert {type(e) for e in failures.values()} == {TierUnavailableError}
        assert len(failures) == 4
        assert harness.contains(K[:6]) == set(K[:2])
        ops.heal()
        assert harness.store(K[2:6]) == {}
        sound(harness.tier)
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:6])


def test_nothing_is_overwritten_before_the_removal_is_journalled(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, capacity_bytes=FIXED + 16 * BLOCK) as harness:
        count = 60 - len(harness.store(K[:60]))
        ops.fail(errno.EIO, on="pwrite", when=is_journal)
        before = len(ops.calls)
        failures = harness.store(K[60:62])
        assert len(failures) == 2
        assert not ops.counts(before)["pwritev"]
        ops.heal()
        before = len(ops.calls)
        assert harness.store(K[62:63]) == {}
        names = [call.name for call in ops.calls[before:] if "write" in call.name]
        assert names == ["pwrite", "pwritev", "pwrite"]
        assert len(harness.contains(K)) == count - 1
        sound(harness.tier)


def test_a_failed_append_that_cannot_be_cut_off_is_taken_back_by_the_next(slab_store):
    """The frame may be whole on disk, and its slots are written to again: with `verify` off
    nothing else would tell."""
    ops = FaultyFileOps()
    with slab_store.open(ops, verify=False, fsync=True) as harness:
        harness.store(K[:2])
        ops.fail(errno.EIO, on="fdatasync", when=is_journal)
        writes = itertools.count()
        ops.fail(errno.EIO, on="pwrite", when=lambda call: is_journal(call) and next(writes) == 1)
        assert len(harness.store(K[2:4])) == 2
        assert set(slab_store.addresses()) == set(K[:4]), "what a crash would leave now"
        ops.heal()
        before = len(ops.calls)
        hang = ops.hang(on="pwritev", times=1)

        async def store():
            task = asyncio.create_task(
                harness.tier.store(make_job(900, K[4:6], [0, 1], is_promotion=False))
            )
            await entered(hang)
            assert set(slab_store.addresses()) == set(K[:2]), "before the slots are written to"
            hang.release()
            return await task

        assert harness.run(store()) == {}
        assert ops.counts(before)["pwrite"] == 2


def test_a_cancelled_store_leaves_the_store_sound(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, piece_bytes=BLOCK, io_threads=2) as harness:
        hang = ops.hang(on="pwritev", times=1)

        async def cancel():
            task = asyncio.create_task(
                harness.tier.store(make_job(900, K[:6], range(6), is_promotion=False))
            )
            await entered(hang)
            task.cancel()
            await asyncio.sleep(0)
            hang.release()
            with pytest.raises(asyncio.CancelledError):
                await task

        harness.run(cancel())
        sound(harness.tier)
        present = harness.contains(K[:6])
        assert present in (set(), set(K[:6]))
        assert harness.announced() == present


def test_what_a_job_has_stored_before_it_is_cancelled_is_announced(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[10:12])
        hang = ops.hang(on="pwrite", when=is_journal, times=1)

        async def cancel():
            job = make_job(900, K[:6], range(6), is_promotion=False)
            task = asyncio.create_task(harness.tier.store(job))
            await entered(hang)
            task.cancel()
            hang.release()
            with pytest.raises(asyncio.CancelledError):
                await task

        harness.run(cancel())
        assert harness.contains(K[:6]) == set(K[:6])
        assert harness.announced() == set(K[:6])
        sound(harness.tier)


def test_a_segment_that_a_cancelled_store_has_created_is_used(slab_store):
    """Otherwise each such job, such as one that times out, adds one beyond the capacity."""
    ops = FaultyFileOps()
    with slab_store.open(ops, segment_bytes=32 * KIB, capacity_bytes=300 * KIB) as harness:
        for _ in range(3):
            hang = ops.hang(on="fallocate", when=is_segment, times=1)

            async def cancel(hang=hang):
                job = make_job(900, K[:6], range(6), is_promotion=False)
                task = asyncio.create_task(harness.tier.store(job))
                while not (task.done() or hang.entered.is_set()):  # noqa: ASYNC110 - as `entered`
                    await asyncio.sleep(0)
                task.cancel()
                hang.release()
                await asyncio.wait([task])

            harness.run(cancel())
            assert len(list(slab_store.folder.glob("segment-*"))) == 1
        assert harness.store(K[:6]) == {}
        assert harness.load(K[:6]) == {}
        sound(harness.tier)


def test_the_same_key_in_two_stores_is_written_once(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        hang = ops.hang(on="pwritev", times=1)

        async def both():
            jobs = [make_job(900 + i, K[i : i + 3], range(3), is_promotion=False) for i in range(2)]
            first = asyncio.create_task(harness.tier.store(jobs[0]))
            await entered(hang)
            second = asyncio.create_task(harness.tier.store(jobs[1]))
            await asyncio.sleep(0)
            hang.release()
            return await first, await second

        assert harness.run(both()) == ({}, {})
        assert ops.counts()["pwritev"] == 2
        assert harness.contains(K[:5]) == set(K[:4])
        sound(harness.tier)


def test_work_before_open_or_after_close_is_refused(slab_store):
    tier = slab_store.tier()
    job = make_job(1, K[:1], [0], is_promotion=False)
    for operation in (tier.store, tier.load):
        with pytest.raises(TierClosedError):
            asyncio.run(operation(job))
    tier.touch(K[:1])


@pytest.mark.parametrize("call", ["make_folders", "open", "lock", "pwrite", "rename", "walk"])
def test_a_directory_that_cannot_be_used_is_refused_and_nothing_is_left_open(slab_store, call):
    ops = FaultyFileOps()
    ops.fail(errno.EACCES, on=call)
    with pytest.raises(ConfigError, match=r"root_dir: .* cannot be used .* can write"):
        slab_store.open(ops)
    assert not ops.open_fds
    with slab_store.open() as harness:
        assert harness.store(K[:1]) == {}


def test_closing_goes_on_when_the_journal_cannot_be_written(slab_store, caplog):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:3])
        ops.fail(errno.ENOSPC, on="pwrite open")
    assert not ops.open_fds
    assert "could not be written at close" in caplog.text
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:3])


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC])
@pytest.mark.parametrize("is_new", [False, True])
def test_whichever_call_of_opening_fails_nothing_stays_open_and_nothing_is_lost(
    slab_store, tmp_path, code, is_new
):
    def begun(store):
        if not is_new:
            with store.open() as harness:
                harness.store(K[:20])
        return FaultyFileOps()

    ops = begun(slab_store)
    with slab_store.open(ops):
        count = len(ops.calls)
    num_refused = 0
    for number in range(1, count + 1):
        store = SlabStore(tmp_path / str(number))
        ops = begun(store)
        ops.fail(code, at=number)
        try:
            store.open(ops).close()
        except (ConfigError, TierUnavailableError) as error:
            num_refused += 1
            assert str(store.root) in str(error)  # noqa: PT017 - many calls need not succeed
            assert ("ulimit -n" if code == errno.EMFILE else "free space") in str(error)  # noqa: PT017
        assert not ops.open_fds
        with store.open() as harness:
            assert harness.contains(K[:20]) == (set() if is_new else set(K[:20]))
    assert num_refused > count // 2


def calls_of_closing(store, **options) -> int:
    ops = FaultyFileOps()
    with store.open(ops, **options) as harness:
        harness.store(K[20:24])
        before = len(ops.calls)
    return len(ops.calls) - before


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fsync": True, "direct_io": True}])
def test_whichever_call_of_closing_fails_everything_is_closed(tmp_path, options):
    """Above all the lock: else this process could not open the store again."""
    count = calls_of_closing(SlabStore(tmp_path / "counted"), **options)
    for number in range(1, count + 1):
        store = SlabStore(tmp_path / str(number))
        ops = FaultyFileOps()
        harness = store.open(ops, **options)
        harness.store(K[:4])
        ops.fail(errno.EIO, at=len(ops.calls) + number)
        with contextlib.suppress(OSError):
            harness.close()
        assert not ops.open_fds, ops.calls[-1]
        with store.open(**options) as harness:
            assert harness.load(K[:4]) == {}
