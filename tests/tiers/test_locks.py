import errno
import itertools
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty_files import FaultyFileOps

from kvoffload_async.tiers.files import locks
from kvoffload_async.tiers.files.locks import LockedFile, locked

LIMIT_S = 5.0


class Time:
    """A clock that moves only when somebody pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.on_pause = lambda: None

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds
        self.on_pause()


@pytest.fixture
def ops():
    return FaultyFileOps()


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "count"
    path.write_bytes(b"1")
    return path


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def files(path, time, monkeypatch):
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=time.clock))
    monkeypatch.setattr(locks, "_pause", time.pause)
    made = []

    def make(ops: FaultyFileOps, flags: int = os.O_RDWR) -> LockedFile:
        file = LockedFile(ops, str(path), flags, timeout_s=LIMIT_S)
        made.append(file)
        return file

    yield make
    for file in made:
        file.close()
        file.close()
        assert not file._ops.open_fds or file is not made[-1]


@pytest.fixture
def file(files, ops) -> LockedFile:
    return files(ops)


@pytest.fixture
def other(files, ops) -> LockedFile:
    return files(ops)


def test_a_lock_that_another_holds_is_waited_for_until_the_deadline(file, other, path, time):
    message = r"not released for 5 s.*count"
    with other.locked(), pytest.raises(TimeoutError, match=message) as raised, file.locked():
        pytest.fail("two have the lock")
    assert raised.value.errno == errno.ETIMEDOUT
    assert raised.value.filename == str(path)
    assert LIMIT_S <= time.now_s < LIMIT_S + 0.1
    longest_s = max(time.pauses)
    assert time.pauses[0] < 0.001 < longest_s < 0.1
    for pause_s, next_s in itertools.pairwise(time.pauses):
        assert next_s == min(2 * pause_s, longest_s)


def test_without_time_to_wait_a_lock_is_tried_once(ops, file, path, time):
    impatient = LockedFile(ops, str(path), os.O_RDWR, timeout_s=0.0)
    with file.locked(), pytest.raises(TimeoutError), impatient.locked():
        pytest.fail("two have the lock")
    assert not time.pauses
    with impatient.locked():
        pass
    impatient.close()


def test_between_two_tries_the_processor_is_left_to_others(file, path):
    class Counting(FaultyFileOps):
        tries = 0

        def lock(self, fd, *, wait):
            self.tries += 1
            return super().lock(fd, wait=wait)

    ops = Counting()
    with file.locked(), pytest.raises(TimeoutError), locked(ops, str(path), timeout_s=0.02):
        pytest.fail("two have the lock")
    assert ops.tries < 12, "each pause is twice as long as the one before it"


def test_a_lock_that_is_released_meanwhile_is_taken(file, other, time):
    with ExitStack() as first:
        first.enter_context(other.locked())
        time.on_pause = first.close
        with file.locked() as fd:
            assert os.pread(fd, 1, 0) == b"1"


@pytest.mark.parametrize("on", ["unlock", "close", "fstat", "lock", "unlock close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_no_lock_survives_the_call_that_took_it(ops, file, other, on, code):
    ops.fail(code, on=on)
    fails = pytest.raises(OSError, match="count") if on in {"fstat", "lock"} else nullcontext()
    with fails, file.locked():
        pass
    ops.heal()
    for each in (other, file):  # or the deadline passes
        with each.locked():
            pass


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no"), ZeroDivisionError()])
def test_no_lock_survives_a_failure_under_it(file, other, time, error):
    with pytest.raises(type(error)), file.locked():
        raise error
    with other.locked():
        assert not time.pauses


def test_a_child_that_inherited_the_descriptor_does_not_keep_the_lock(file, other, time):
    with file.locked() as fd:
        copy = os.dup(fd)  # as a fork makes one
    try:
        with other.locked():
            assert not time.pauses
    finally:
        os.close(copy)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_filesystem_without_locks_says_so_at_once(ops, file, time, code):
    ops.fail(code, on="lock")
    with pytest.raises(OSError, match="count") as raised, file.locked():
        pytest.fail("it was not locked")
    assert raised.value.errno == code
    assert raised.value.strerror == f"cannot be locked: injected: {os.strerror(code)}"
    assert not time.pauses
    assert not ops.open_fds


def test_a_descriptor_is_kept_and_closed_at_the_end(ops, file):
    for _ in range(3):
        with file.locked():
            assert len(ops.open_fds) == 1
    assert ops.counts()["open"] == 1
    file.close()
    assert not ops.open_fds


@pytest.mark.parametrize("on", ["lock", "fstat"])
def test_a_kept_descriptor_that_has_gone_stale_is_opened_anew_once(ops, file, on):
    with file.locked():
        pass
    ops.fail(errno.ESTALE, on=on, times=1)
    with file.locked():
        assert ops.counts()["open"] == 2
    ops.fail(errno.ESTALE, on=on)
    with pytest.raises(OSError, match=r"cannot be locked.*count") as raised, file.locked():
        pytest.fail("it was not locked")
    assert raised.value.errno == errno.ESTALE
    assert ops.counts()["open"] == 3


def test_a_descriptor_under_which_a_call_failed_is_opened_anew(ops, file):
    with pytest.raises(OSError, match="stale"), file.locked():
        raise OSError(errno.ESTALE, "stale")
    assert not ops.open_fds
    with file.locked():
        assert ops.counts()["open"] == 2


def test_a_file_that_was_deleted_is_not_locked_but_the_one_in_its_place(files, ops, path, other):
    file = files(ops, os.O_RDWR | os.O_CREAT)
    for replace in (lambda: None, lambda: path.write_bytes(b"22")):
        with file.locked():
            pass
        path.unlink()
        replace()
        with file.locked() as fd:
            assert os.path.samestat(os.fstat(fd), path.stat())


def test_a_file_that_is_removed_again_and_again_is_given_up_at_the_deadline(files, path, time):
    class Removing(FaultyFileOps):
        def lock(self, fd, *, wait):
            path.unlink()
            return super().lock(fd, wait=wait)

    ops = Removing()
    with pytest.raises(TimeoutError), files(ops, os.O_RDWR | os.O_CREAT).locked():
        pytest.fail("a file without a name was locked")
    assert time.now_s >= LIMIT_S
    assert not ops.open_fds


def test_a_file_that_is_not_there_is_made_only_if_asked_for(files, ops, path):
    path.unlink()
    with pytest.raises(FileNotFoundError), files(ops).locked():
        pytest.fail("there was nothing to lock")
    with files(ops, os.O_RDWR | os.O_CREAT).locked():
        assert path.exists()


def test_threads_of_one_file_wait_for_each_other_until_the_deadline(ops, path):
    file = LockedFile(ops, str(path), timeout_s=0.001)
    with file.locked():
        with (
            pytest.raises(TimeoutError, match=r"not released for 0.001 s.*count"),
            file.locked(),
        ):
            pytest.fail("two have the lock")
        with pytest.raises(TimeoutError):
            file.close()
    with file.locked():
        pass
    file.close()


def test_one_use_leaves_nothing_open(ops, path):
    with locked(ops, str(path)) as fd:
        assert os.pread(fd, 1, 0) == b"1"
        with pytest.raises(TimeoutError), locked(ops, str(path), timeout_s=0.001):
            pytest.fail("two have the lock")
    assert not ops.open_fds
    with pytest.raises(ZeroDivisionError), locked(ops, str(path)):
        raise ZeroDivisionError
    assert not ops.open_fds
