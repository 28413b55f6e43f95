"""A disk that is full before the capacity is reached."""

import errno
import shutil
import subprocess

import pytest
from faulty_files import FaultyFileOps
from slab.stores import BLOCK, KIB, SlabStore, is_segment, sound

from kvoffload_async.errors import TierFullError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.slab import tier as slab_tier

K = [key_of(number) for number in range(80)]
L = [key_of(number) for number in range(1000, 1020)]


def is_journal(call) -> bool:
    return "/journal" in call.path


def small_disk(slab_store, size_bytes: int) -> FaultyFileOps:
    slab_store.root.mkdir(parents=True, exist_ok=True)
    return FaultyFileOps(small_root=str(slab_store.root), small_bytes=size_bytes)


@pytest.mark.parametrize("size", [200 * KIB, 330 * KIB, 700 * KIB])
def test_the_store_stays_as_large_as_the_disk_allows_and_evicts(slab_store, caplog, size):
    ops = small_disk(slab_store, size)
    with slab_store.open(ops, capacity_bytes=1024 * KIB, segment_bytes=64 * KIB) as harness:
        last = []
        for first in range(0, 400, 4):
            last = [key_of(1000 + first + i) for i in range(4)]
            assert harness.store(last) == {}
            assert slab_store.disk_bytes() <= size + BLOCK, "the root itself is not the store's"
        assert harness.load(last) == {}
        assert len(harness.tier._store.catalog) * BLOCK > size // 3
        sound(harness.tier)
    assert "below the capacity" in caplog.text
    with slab_store.open(capacity_bytes=1024 * KIB) as harness:
        assert set(last) <= harness.announced()


def test_without_room_for_a_single_slot_blocks_fail_as_full(slab_store):
    ops = FaultyFileOps()
    ops.fail(errno.ENOSPC, on="fallocate")
    with slab_store.open(ops) as harness:
        failures = harness.store(K[:3])
        assert {type(error) for error in failures.values()} == {TierFullError}
        sound(harness.tier)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("call", "where"),
    [("fdatasync", is_segment), ("fdatasync", is_journal), ("pwrite", is_journal)],
)
def test_jobs_that_find_no_space_fail_as_full_and_cost_nothing_but_what_was_evicted(
    slab_store, call, where, error
):
    ops = FaultyFileOps()
    options = {"segment_bytes": 32 * KIB, "capacity_bytes": 300 * KIB, "fsync": True}
    with slab_store.open(ops, **options) as harness:
        for first in range(0, 80, 8):
            assert harness.store(K[first : first + 8]) == {}
        before = harness.contains(K)
        segments = dict(harness.tier._store.catalog.segments)
        ops.fail(error, on=call, when=where)
        for first in range(0, 16, 4):
            failures = harness.store(L[first : first + 4])
            assert {type(error) for error in failures.values()} == {TierFullError}
        assert dict(harness.tier._store.catalog.segments) == segments
        assert len(before - harness.contains(K)) <= 4 * 4
        sound(harness.tier)
        ops.heal()
        assert harness.store(L[:4]) == {}
        kept = harness.contains([*K, *L])
        sound(harness.tier)
    with slab_store.open(**options) as harness:
        assert harness.announced() == kept


def test_a_block_that_finds_no_space_fails_alone(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, segment_bytes=16 * KIB, piece_bytes=BLOCK, io_threads=2) as harness:
        harness.store(K[:20])
        ops.fail(errno.ENOSPC, on="pwritev", times=1)
        (error,) = harness.store(K[20:24]).values()
        assert type(error) is TierFullError
        stored = harness.contains(K[20:24])
        assert len(stored) == 3
        assert harness.load(sorted(stored)) == {}
        sound(harness.tier)


def test_a_segment_that_cannot_be_made_for_another_reason_ends_the_growth(slab_store, caplog):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:16])
        ops.fail(errno.EIO, on="fallocate", times=1)
        assert harness.store(K[16:20]) == {}, "by eviction"
        assert len(harness.contains(K)) == 16
        assert "growth stopped below the capacity" in caplog.text
        sound(harness.tier)


def test_a_disk_with_room_for_fewer_segments_than_threads_is_used_as_it_is(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops, stripes=2) as harness:
        ops.fail(errno.ENOSPC, on="fallocate", when=lambda call: "segment-000000" not in call.path)
        assert harness.store(K[:16]) == {}
        assert harness.store(K[16:20]) == {}, "by eviction"
        assert len(harness.tier._store.catalog.segments) == 1
        assert len(harness.contains(K)) == 16
        sound(harness.tier)


def test_growth_is_tried_again_after_a_while(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        harness.store(K[:16])
        ops.fail(errno.ENOSPC, on="fallocate")
        harness.store(K[16:20])
        ops.heal()
        harness.store(K[20:24])
        assert len(harness.contains(K)) == 16
        harness.tier._allocator._limited_until_s -= slab_tier._REGROW_S
        harness.store(K[24:60])
        assert len(harness.contains(K)) > 40
        sound(harness.tier)


@pytest.fixture
def mounted(tmp_path):
    mount = shutil.which("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=640k", "none", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small filesystem cannot be mounted here")
    yield folder
    subprocess.run([shutil.which("umount") or "umount", str(folder)], check=True)


def test_a_real_small_filesystem_is_filled_and_used_on(mounted):
    slab_store = SlabStore(mounted / "root")
    options = {"capacity_bytes": 4096 * KIB, "segment_bytes": 128 * KIB}
    last: list = []
    with slab_store.open(**options) as harness:
        for first in range(0, 600, 6):
            last = [key_of(1000 + first + i) for i in range(6)]
            assert harness.store(last) == {}
        assert harness.load(last) == {}
        assert len(harness.tier._store.catalog) > 60
        (mounted / "other").write_bytes(b"x" * shutil.disk_usage(mounted).free)
        for first in range(0, 600, 6):
            last = [key_of(5000 + first + i) for i in range(6)]
            harness.store(last)
        assert harness.store(last) == {}
        assert harness.load(last) == {}
        sound(harness.tier)
    with slab_store.open(**options) as harness:
        assert set(last) <= harness.announced()
        assert harness.load(last) == {}
