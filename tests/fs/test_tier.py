"""How jobs are spread over threads, and what a closed tier says."""

import asyncio
import concurrent.futures
import errno
import os
import shutil
import threading
from types import SimpleNamespace

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import KIB, FsDirectory
from fs.spaces import check, end_of, evicted, start

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.errors import TierBusyError, TierClosedError
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.fs import housekeeping
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.types import make_offload_key

K = [key_of(number) for number in range(8)]
MIB = 1 << 20
PIECES = 4 if implementation().name == "native" else 1
"""How many calls read a block of that size."""


@pytest.fixture
def ops():
    ops = FaultyFileOps()
    yield ops
    ops.heal()


def open_large(directory: FsDirectory, ops: FaultyFileOps, **options) -> TierHarness:
    return TierHarness(directory.tier(ops, **options), 16, MIB)


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 64 * MIB}])
def test_a_large_job_uses_several_threads(directory, ops, options):
    with open_large(directory, ops, **options) as harness:
        hang = ops.hang(on="pwritev", when=is_temp, times=1)
        others = ops.hang(on="publish")
        job = harness.job(K, range(8), is_promotion=False)
        harness.fill(K, range(8))
        tasks = []
        harness.on_loop(lambda: tasks.append(_task(harness.tier.store(job))))
        assert hang.entered.wait(60)
        assert others.entered.wait(60), "no other thread went on"
        ops.heal()
        assert harness.run(_end(tasks)) == {}
        before = len(ops.calls)
        assert harness.load(K, range(8, 16)) == {}
        assert all(harness.holds(key, 8 + i) for i, key in enumerate(K))
        assert ops.counts(before)["preadv"] == 8 * PIECES, "each block is read once"


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("max_bytes", [2 * MIB, 100_000])
def test_every_piece_of_a_large_block_is_verified(directory, ops, max_bytes, is_remembered):
    with open_large(directory, ops) as harness, open_large(directory, ops) as other:
        assert (harness if is_remembered else other).store(K) == {}
        ops.shorten(max_bytes, on="preadv")
        for key, offset in zip(K, [0, MIB // 4 - 1, MIB // 4, MIB - 1], strict=False):
            with directory.path(key).open("r+b") as file:
                byte = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)
        os.truncate(directory.path(K[4]), MIB // 2)
        with directory.path(K[5]).open("ab") as file:
            file.write(b"x")
        assert harness.load(K, range(8, 16)).keys() == {0, 1, 2, 3, 4, 5}
        assert not any(directory.path(key).exists() for key in K[:6])
        assert all(harness.holds(K[index], 8 + index) for index in (6, 7))


def _task(coroutine):
    return asyncio.get_running_loop().create_task(coroutine)


async def _end(tasks):
    return await tasks[0]


def test_failures_keep_their_places_in_a_spread_job(directory, ops):
    with open_large(directory, ops) as harness:
        assert harness.store(K) == {}
        directory.path(K[2]).unlink()
        ops.fail(errno.EIO, on="preadv", when=lambda c: c.path == str(directory.path(K[5])))
        assert sorted(harness.load(K, range(8, 16))) == [2, 5]
        assert all(harness.holds(key, 8 + i) for i, key in enumerate(K) if i not in {2, 5})


def test_a_closed_tier_says_so(directory):
    harness = directory.open()
    tier = harness.tier
    job = harness.job(K[:1], [0], is_promotion=True)
    harness.close()
    for operation in (tier.load(job), tier.store(job), tier.contains(K[:1])):
        with pytest.raises(TierClosedError):
            operation.send(None)


def test_probes_at_its_limits_are_whatever_the_disk_says(directory):
    with directory.open() as harness:
        assert harness.contains(K) == frozenset()
        directory.put(K[3])
        assert harness.contains(K) == {K[3]}


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 64 * MIB, "verify": "required"}])
def test_nothing_is_open_after_the_close_however_the_directory_was_opened(directory, ops, options):
    with open_large(directory, ops, **options) as harness:
        assert harness.store(K[:2]) == {}
        assert harness.load(K[:2]) == {}
    assert not ops.open_fds
    with open_large(directory, ops, **options):
        pass
    assert not ops.open_fds


def test_an_opening_that_is_cancelled_while_it_joins_the_count_leaves_nothing(directory):
    ops = FaultyFileOps()
    tier, opening = directory.tier(ops, capacity_bytes=MIB), []
    hang = ops.hang(on="lock", when=lambda call: call.path.endswith("/.usage"))
    open_tier = tier.open

    async def opened(env):
        opening.extend([asyncio.get_running_loop(), asyncio.current_task()])
        await open_tier(env)

    tier.open = opened

    def cancel():
        assert hang.entered.wait(60)
        opening[0].call_soon_threadsafe(opening[1].cancel)
        opening[0].call_soon_threadsafe(hang.release)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises((asyncio.CancelledError, concurrent.futures.CancelledError)):
        TierHarness(tier, 8, 4096)
    canceller.join()
    assert not ops.open_fds
    assert not directory.usage().writers
    assert not list((directory.folder / ".writers").iterdir())


def test_the_grain_of_a_filesystem_is_no_less_than_a_sector():
    settings = FsSettings(root_dir="/unused", run_config={})
    grains = {1: 1536, 512: 1536, 4096: 4096}
    for grain, allocated_bytes in grains.items():
        folder = SimpleNamespace(st_blksize=grain)
        assert settings.allocated_bytes(1025, folder) == allocated_bytes


@pytest.mark.parametrize("options", [{}, {"fsync": True}, {"capacity_bytes": MIB}])
def test_a_key_too_long_for_a_file_name_fails_alone_and_hinders_no_closing(directory, options):
    long = make_offload_key(b"x" * 150)
    with TierHarness(directory.tier(**options)) as harness:
        for _ in range(2):
            assert list(harness.store([K[0], long, K[1]])) == [1]
        assert list(harness.load([K[0], long, K[1]])) == [1]
        assert harness.contains([K[0], long, K[1]]) == {K[0], K[1]}


# -- discarding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 64 * KIB}])
def test_discarded_blocks_are_removed_and_their_removal_announced(directory, options):
    with directory.open(**options) as harness:
        assert harness.store(K[:4]) == {}
        discard(harness, [*K[:2], K[0], K[7]])
        assert directory.blocks() == set(K[2:4])
        assert evicted(harness) == set(K[:2])
        assert harness.store(K[:2]) == {}
        assert directory.blocks() == set(K[:4])
        if options:
            check(directory, harness, 64 * KIB)
    harness.tier.discard(K[:1])  # closed: no effect


def test_blocks_of_others_are_discarded_before_a_walk_has_found_them(directory):
    with directory.open(capacity_bytes=64 * KIB) as harness:
        directory.put(K[0])
        discard(harness, K[:1])
        assert not directory.blocks()


def test_a_block_in_use_is_not_discarded(directory):
    with directory.open(capacity_bytes=64 * KIB) as harness:
        harness.store(K[:2])
        harness.on_loop(lambda: harness.tier._space.pin(K[:1]))
        discard(harness, K[:2])
        assert directory.blocks() == {K[0]}
        harness.on_loop(lambda: harness.tier._space.unpin(K[:1]))


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 64 * KIB}])
def test_a_pinned_block_is_not_discarded_until_its_last_pin_is_gone(directory, options):
    with directory.open(**options) as harness:
        harness.store(K[:3])
        harness.on_loop(lambda: harness.tier.pin(K[:2]))
        harness.on_loop(lambda: harness.tier.pin(K[:1]))
        for left in (K[:2], K[:1], []):
            discard(harness, K[:3])
            assert directory.blocks() == set(left)
            harness.on_loop(lambda: harness.tier.unpin(K[:3]))
        assert evicted(harness) == set(K[:3])
        assert harness.store(K[:1]) == {}
        discard(harness, K[:1])
        assert not directory.blocks()


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": 64 * KIB}])
def test_a_deletion_names_the_blocks_whose_files_stay(directory, options):
    ops = FaultyFileOps()
    with directory.open(ops, **options) as harness:
        harness.store(K[:4])
        harness.on_loop(lambda: harness.tier.pin(K[:1]))
        ops.fail(errno.EIO, on="unlink", times=1)
        left = harness.run(harness.tier.delete([*K[:3], K[7]]))
        assert isinstance(left.pop(0), TierBusyError)
        assert len(left) == 1, "one of the others could not be unlinked"
        harness.on_loop(lambda: harness.tier.unpin(K[:1]))
        assert harness.run(harness.tier.delete([*K[:3], K[7]])) == {}
        assert directory.blocks() == {K[3]}
        if options:
            check(directory, harness, 64 * KIB)


def test_unpinning_does_not_release_a_block_that_a_job_reads(directory, ops):
    with directory.open(ops, capacity_bytes=64 * KIB) as harness:
        harness.store(K[:1])
        hang = ops.hang(on="preadv pread_into", times=1)
        reading = start(harness, harness.tier.load(harness.job(K[:1], [1], is_promotion=True)))
        assert hang.entered.wait(60)
        harness.on_loop(lambda: harness.tier.unpin(K[:1]))
        discard(harness, K[:1])
        assert directory.blocks() == {K[0]}
        hang.release()
        assert harness.run(end_of(reading)) == {}


def test_later_blocks_are_discarded_after_an_unexpected_error(directory, caplog):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        harness.store(K[:2])
        ops.fail(ValueError("unexpected"), on="unlink", times=1)
        discard(harness, K[:1])
        discard(harness, K[1:2])
        assert directory.blocks() == {K[0]}
    assert "housekeeping failed" in caplog.text


def test_nothing_is_discarded_in_a_directory_that_was_replaced(directory, caplog):
    with directory.open() as harness:
        harness.store(K[:1])
        directory.root.rename(directory.root.with_name("aside"))
        shutil.copytree(directory.root.with_name("aside"), directory.root)
        discard(harness, K[:1])
        assert "blocks were not removed" in caplog.text
        assert directory.blocks() == {K[0]}
        assert not evicted(harness)


def test_blocks_beyond_those_that_may_wait_are_kept(directory, monkeypatch, caplog):
    monkeypatch.setattr(housekeeping, "_MOST_DISCARDS", 2)
    with directory.open() as harness:
        harness.store(K[:4])
        discard(harness, K[:4])
        assert directory.blocks() == set(K[2:4])
        assert "2 blocks are not removed" in caplog.text


def discard(harness, keys) -> None:
    """Discard blocks, and wait until that is done."""
    tasks = []

    def begin() -> None:
        harness.tier.discard(keys)
        tasks.append(harness.tier._housekeeping._discarding)

    harness.on_loop(begin)
    harness.run(_end(tasks))
