"""How many system calls a job takes: each costs time, and the interpreter's lock twice."""

from collections import Counter

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FsDirectory

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(8)]
ROOMY = 64 * BLOCK

READ = {"open": 1, "preadv": 1, "close": 1}
WRITTEN = {"stat": 1, "open": 1, "pwritev": 1, "set_xattr": 1, "close": 1, "publish": 1}
COUNTED = WRITTEN | {"stat": 2}
"""The file as well: what the block did to the disk."""
ROOT = {"stat": 1}
"""Of a job: whether the root is still the directory that was opened."""
COUNT_CHANGES = {"lock": 2, "fstat": 2, "pread_into": 2, "pwrite": 2, "unlock": 2}
"""What is set aside before a job, and given back after it."""
IS_NATIVE = implementation().name == "native"


@pytest.fixture
def ops():
    return FaultyFileOps()


def calls_of(ops: FaultyFileOps, operation, keys) -> dict[str, int]:
    before = len(ops.calls)
    assert operation(keys) == {}
    return dict(ops.counts(before))


def times(count: int, calls: dict[str, int]) -> Counter[str]:
    """Return what a job of so many blocks takes."""
    return Counter({name: count * number for name, number in calls.items()}) + Counter(ROOT)


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": ROOMY}])
@pytest.mark.parametrize("count", [1, 8])
def test_a_load_takes_three_calls_a_block_and_one_a_job(
    directory: FsDirectory, ops, count, options
):
    with directory.open(ops, **options) as harness:
        assert harness.store(K) == {}
        assert calls_of(ops, harness.load, K[:count]) == times(count, READ)


@pytest.mark.parametrize("verify", ["when_present", "required"])
def test_a_checksum_is_asked_for_once(directory: FsDirectory, ops, verify):
    with directory.open() as other, directory.open(ops, verify=verify) as harness:
        assert other.store(K) == {}
        assert calls_of(ops, harness.load, K) == times(8, READ | {"get_xattr": 1})
        assert calls_of(ops, harness.load, K) == times(8, READ)


def test_a_load_that_verifies_nothing_asks_only_whose_checksum_it_is(directory: FsDirectory, ops):
    with directory.open() as other, directory.open(ops, verify="off") as harness:
        assert other.store(K) == {}
        assert calls_of(ops, harness.load, K) == times(8, READ | {"get_xattr": 1})


@pytest.mark.parametrize("count", [1, 8])
def test_a_store_takes_six_calls_a_block_and_one_a_job(directory: FsDirectory, ops, count):
    with directory.open(ops) as harness:
        assert harness.store(K) == {}  # makes the folders
        for key in K:
            directory.path(key).unlink()
        assert calls_of(ops, harness.store, K[:count]) == times(count, WRITTEN)


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": ROOMY}])
def test_storing_what_is_there_takes_one_call_a_block_and_one_a_job(
    directory: FsDirectory, ops, options
):
    with directory.open(ops, **options) as harness:
        assert harness.store(K) == {}
        assert calls_of(ops, harness.store, K) == times(8, {"stat": 1})


@pytest.mark.parametrize("count", [1, 8])
def test_a_store_within_a_capacity_changes_the_count_twice_a_job(
    directory: FsDirectory, ops, count
):
    with directory.open(ops, capacity_bytes=ROOMY) as harness:
        assert harness.store(K) == {}
        for key in K:
            directory.path(key).unlink()
        assert harness.load(K).keys() == set(range(8))  # now the tier knows, too
        found = calls_of(ops, harness.store, K[:count])
        found.pop("truncate", None)  # of a count that has fewer digits than the one before
        for name, number in times(count, COUNTED).items():
            found[name] -= number
        found["stat"] -= IS_NATIVE  # a batch checks the root itself
        assert {name: number for name, number in found.items() if number} == COUNT_CHANGES
