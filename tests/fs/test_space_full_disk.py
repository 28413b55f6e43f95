"""What a tier does whose disk is full below its capacity."""

import errno
import shutil
import subprocess

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import KIB, TRIES, FsDirectory
from fs.spaces import K, check, evicted

from kvoffload_async.errors import TierFullError


@pytest.mark.usefixtures("folders_on_disk")
def test_on_a_full_disk_below_the_capacity_blocks_replace_others(directory):
    ops = FaultyFileOps(small_root=str(directory.root), small_bytes=1200 * KIB)
    with directory.open(ops, capacity_bytes=10_000 * KIB) as harness:
        for start in range(0, 60, 3):
            failures = harness.store(K[start : start + 3])
            assert failures == {}
            assert set(K[start : start + 3]) <= directory.blocks()
        assert evicted(harness)
        check(directory, harness, 10_000 * KIB)


def test_a_full_disk_with_nothing_to_evict_fails_the_blocks(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=10_000 * KIB) as harness:
        ops.fail(errno.ENOSPC, on="pwritev", when=is_temp)
        failures = harness.store(K[:3])
        assert sorted(failures) == [0, 1, 2]
        assert all(isinstance(error, TierFullError) for error in failures.values())
        ops.heal()
        assert harness.store(K[:3]) == {}
        check(directory, harness, 10_000 * KIB)


def test_a_block_is_tried_once_more_and_not_again(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=10_000 * KIB) as harness:
        harness.store(K[:20])
        before = len(ops.calls)
        ops.fail(errno.ENOSPC, on="pwritev", when=is_temp)
        assert sorted(harness.store(K[30:31])) == [0]
        tries = [c for c in ops.calls[before:] if c.name == "pwritev" and is_temp(c)]
        assert len(tries) == 2 * TRIES
        assert len(directory.blocks()) >= 16


def test_without_a_capacity_a_full_disk_fails_the_block(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        ops.fail(errno.ENOSPC, on="pwritev", when=lambda c: str(directory.path(K[1])) in c.path)
        failures = harness.store(K[:3])
        assert failures.keys() == {1}
        assert all(isinstance(error, TierFullError) for error in failures.values())


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 256 KiB, where one may be mounted."""
    root = tmp_path / "small"
    root.mkdir()
    command = [
        shutil.which("mount") or "/bin/mount",
        "-t",
        "tmpfs",
        "-o",
        "size=256k",
        "none",
        str(root),
    ]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True, timeout=60)
    except OSError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield root
    subprocess.run(
        [shutil.which("umount") or "/bin/umount", "-l", str(root)], check=True, timeout=60
    )


def test_a_really_full_disk_is_a_normal_state(small_disk):
    directory = FsDirectory(small_disk / "root")
    with directory.open(capacity_bytes=10_000 * KIB) as harness:
        for start in range(0, 200, 8):
            assert harness.store(K[start : start + 8]) == {}
            assert set(K[start : start + 8]) <= directory.blocks()
            assert not directory.temps()
        assert evicted(harness)
        assert directory.every_block_is_whole()
    with FsDirectory(small_disk / "root").open(num_slots=100) as harness:
        failures = harness.store(K[200:280])
        assert failures
        assert all(isinstance(error, TierFullError) for error in failures.values())
        assert not directory.temps()
