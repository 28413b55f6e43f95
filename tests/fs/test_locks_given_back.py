"""Whatever call of one tier fails, another on the same directory is not kept waiting."""

import errno
import threading

import pytest
from fs.places import BLOCK, KIB, Place
from fs.spaces import rescan

from kvoffload_async.errors import TierUnavailableError, drop_tracebacks
from kvoffload_async.testing.fileops import FaultyFileOps
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.files.locks import held
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.counts import FILE_NAME
from kvoffload_async.tiers.fs.outcome import DiskChange
from kvoffload_async.tiers.fs.usage import UsageFile

K = [key_of(number) for number in range(12)]
FULL = 40 * KIB + 3 * (BLOCK + 8 * KIB) + 3 * 4 * KIB
WAIT_S = 5.0


def store(harness: TierHarness, keys) -> None:
    """Store in trouble: it may fail."""
    try:
        harness.store(keys)
    except (OSError, TierUnavailableError) as error:
        drop_tracebacks(error)


def number_of_calls(place: Place) -> int:
    ops = FaultyFileOps()
    with place.open(ops, capacity_bytes=FULL) as harness, place.open(capacity_bytes=FULL):
        before = len(ops.calls)
        store(harness, K[:2])
        return len(ops.calls) - before


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_after_a_failure_at_any_call_of_a_store_another_tier_goes_on(place, code):
    count = number_of_calls(place)
    for number in range(1, count + 1):
        place = Place(place.root.with_name(f"{code}-{number}"))
        ops = FaultyFileOps()
        with (
            place.open(ops, capacity_bytes=FULL) as harness,
            place.open(capacity_bytes=FULL) as other,
        ):
            ops.fail(code, at=len(ops.calls) + number)
            store(harness, K[:2])
            rescan(other)
            ops.heal()
            store(other, K[2:4])
            rescan(harness)
        assert not ops.open_fds


def test_a_count_that_another_never_gives_back_ends_the_wait(place):
    """A process that is stopped inside a change, or hangs in the filesystem."""
    place.folder.mkdir(parents=True)
    ops = FaultyFileOps()
    usage = UsageFile(ops, str(place.folder), "me", set, lock_timeout_s=0.01)
    usage.open()
    with (
        held(FileOps(), str(place.folder / FILE_NAME)),
        pytest.raises(TimeoutError, match=r"its lock was held by another for 0.01 s: .*\.usage"),
    ):
        usage.reserve(BLOCK, 1, FULL)
    assert usage.read().writers.keys() == {"me"}
    usage.close()
    assert not ops.open_fds


def test_a_thread_that_never_gives_the_count_back_ends_the_wait_of_others(place):
    place.folder.mkdir(parents=True)
    ops = FaultyFileOps()
    grown = DiskChange()
    grown.add(7, 512)
    usage = UsageFile(ops, str(place.folder), "me", set, lock_timeout_s=0.01)
    usage.open()
    hang = ops.hang(on="pread_into")
    stuck = threading.Thread(target=usage.read)
    stuck.start()
    assert hang.entered.wait(WAIT_S)
    for call in (usage.read, lambda: usage.settle(0, grown)):
        with pytest.raises(TimeoutError, match=r"held by another for 0.01 s"):
            call()
    ops.heal()
    stuck.join(WAIT_S)
    assert usage.read().bucket(7)[1] == 1
    usage.close()
