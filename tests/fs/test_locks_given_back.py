"""Whatever call of one tier fails, another on the same directory is not kept waiting."""

import errno
import threading

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FsDirectory
from fs.spaces import rescan, room_for
from sweeps import shares

from kvoffload_async.errors import (
    ConfigError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    drop_tracebacks,
)
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.files.locks import locked
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.usage import FILE_NAME, Operation, UsageFile

K = [key_of(number) for number in range(12)]
FULL = room_for(4)
WAIT_S = 60.0
SHARES = 8


def store(harness: TierHarness, keys) -> None:
    """Store in trouble: it may fail."""
    try:
        harness.store(keys)
    except (OSError, TierError) as error:
        drop_tracebacks(error)


def number_of_calls(directory: FsDirectory) -> int:
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=FULL) as harness, directory.open(capacity_bytes=FULL):
        before = len(ops.calls)
        store(harness, K[:2])
        return len(ops.calls) - before


@shares(SHARES, pytest.mark.slow)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_after_a_failure_at_any_call_of_a_store_another_tier_goes_on(directory, code, share):
    count = number_of_calls(directory)
    for number in range(1 + share, count + 1, SHARES):
        directory = FsDirectory(directory.root.with_name(f"{code}-{number}"))
        ops = FaultyFileOps()
        with (
            directory.open(ops, capacity_bytes=FULL) as harness,
            directory.open(capacity_bytes=FULL) as other,
        ):
            ops.fail(code, at=len(ops.calls) + number)
            store(harness, K[:2])
            rescan(other)
            ops.heal()
            store(other, K[2:4])
            rescan(harness)
        assert not ops.open_fds


def test_a_count_that_another_never_gives_back_ends_the_wait(directory):
    """A process that is stopped inside a change, or hangs in the filesystem."""
    directory.folder.mkdir(parents=True)
    ops = FaultyFileOps()
    usage = UsageFile(ops, str(directory.folder), "me", set)
    usage._file._timeout_s = 0.01
    usage.open()
    with (
        locked(FileOps(), str(directory.folder / FILE_NAME)),
        pytest.raises(TimeoutError, match=r"its lock was not released for 0.01 s: .*\.usage"),
    ):
        usage.begin(BLOCK, 1, FULL)
    assert usage.read().writers.keys() == {"me"}
    usage.close()
    assert not ops.open_fds


def test_a_thread_that_never_gives_the_count_back_ends_the_wait_of_others(directory):
    directory.folder.mkdir(parents=True)
    ops = FaultyFileOps()
    usage = UsageFile(ops, str(directory.folder), "me", set)
    usage._file._timeout_s = 0.01
    usage.open()
    hang = ops.hang(on="pread_into")
    stuck = threading.Thread(target=usage.read)
    stuck.start()
    assert hang.entered.wait(WAIT_S)
    usage.end(Operation(), [(7, 512)])
    for call in (usage.read, usage.report):
        with pytest.raises(TimeoutError, match=r"not released for 0.01 s"):
            call()
    ops.heal()
    stuck.join(WAIT_S)
    assert usage.read().changed_bytes == 512
    usage.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_filesystem_without_locks_is_refused_with_a_capacity_and_used_without(directory, code):
    ops = FaultyFileOps()
    ops.fail(code, on="lock")
    with pytest.raises(ConfigError, match=r"root_dir: .* \(.*cannot be locked: .*\.usage"):
        directory.open(ops, capacity_bytes=FULL)
    assert not ops.open_fds
    with directory.open(ops) as harness:
        assert harness.store(K[:2]) == {}
    assert not ops.open_fds


def test_a_count_that_is_locked_for_ever_is_a_timeout_of_the_opening(directory):
    directory.folder.mkdir(parents=True)
    ops = FaultyFileOps()
    ops.fail(errno.ETIMEDOUT, on="lock", when=lambda call: call.path.endswith(FILE_NAME))
    with pytest.raises(TierTimeoutError, match=r"root_dir: .*\.usage"):
        directory.open(ops, capacity_bytes=FULL)


@pytest.mark.parametrize("times", [1, None])
def test_a_count_whose_handle_went_stale_is_opened_once_more_and_then_a_fault(directory, times):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=FULL) as harness:
        is_count = lambda call: call.path.endswith(FILE_NAME)  # noqa: E731 - a rule
        ops.fail(errno.ESTALE, on="lock", when=is_count, times=times)
        if times == 1:
            assert harness.store(K[:2]) == {}
        else:
            with pytest.raises(TierUnavailableError, match="cannot be locked"):
                harness.store(K[:2])
            ops.heal()
            assert harness.store(K[:2]) == {}


def test_a_root_whose_handle_went_stale_is_a_fault_until_it_answers(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=FULL) as harness:
        ops.fail(
            errno.ESTALE, on="stat", when=lambda call: call.path.startswith(f"{directory.root}/.")
        )
        with pytest.raises(TierUnavailableError, match="Stale file handle"):
            harness.store(K[:2])
        ops.heal()
        assert harness.store(K[:2]) == {}
