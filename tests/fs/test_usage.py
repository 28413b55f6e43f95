import errno
import threading

import pytest

from kvoffload_async.testing.fileops import FaultyFileOps
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.outcome import DiskChange
from kvoffload_async.tiers.fs.usage import Usage, UsageFile

MANY = 10**9


class Disk:
    """A number that stands for a walk over the disk."""

    def __init__(self) -> None:
        self.used = 1000
        self.walks = 0

    def count(self) -> int:
        self.walks += 1
        return self.used


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def opened(place, disk):
    place.folder.mkdir(parents=True)
    files = []

    def make(writer_id="me", ops=None) -> UsageFile:
        usage = UsageFile(ops or FileOps(), str(place.folder), writer_id, disk.count)
        usage.open()
        files.append(usage)
        return usage

    yield make
    for usage in files:
        usage.close()


def nobody() -> set[str]:
    return set()


def grown(added: int = 0, removed: int = 0) -> DiskChange:
    return DiskChange(added, removed)


def test_the_first_to_count_sets_the_count_to_the_disk(opened):
    assert opened().start(nobody, 500).settled_bytes == 500


def test_beside_another_counter_its_count_goes_on(opened):
    first = opened("first")
    first.start(nobody, 500)
    first.settle(0, grown(70))
    second = opened("second")
    assert second.start(lambda: {"first"}, 9999).settled_bytes == 570
    assert first.read().total_bytes == 570


def test_a_living_writer_that_has_not_begun_to_count_does_not_keep_the_count_stale(opened):
    """Two tiers start at the same moment after a crash: each sees the other living."""
    old = opened("old")
    old.start(nobody, 500)
    first, second = opened("first"), opened("second")
    assert first.start(lambda: {"second"}, 300).settled_bytes == 300
    assert second.start(lambda: {"first"}, 301).settled_bytes == 300


def test_a_dead_writers_reservation_is_dropped_at_the_next_start(opened):
    dead, living = opened("dead"), opened("living")
    living.start(nobody, 0)
    assert dead.reserve(100, 3, MANY) == 3
    assert living.reserve(100, 2, MANY) == 2
    assert living.read().total_bytes == 500
    assert opened("new").start(lambda: {"living"}, 0).total_bytes == 200


def test_a_dead_writers_reservation_is_dropped_by_a_correction(opened):
    dead, living = opened("dead"), opened("living")
    living.start(nobody, 0)
    dead.reserve(100, 3, MANY)
    assert living.correct(living.read(), 0, nobody).total_bytes == 0


def test_room_is_granted_up_to_the_capacity_by_all_together(opened):
    first, second = opened("first"), opened("second")
    first.start(nobody, 100)
    second.start(lambda: {"first"}, 0)
    assert first.reserve(100, 5, 1000) == 5
    assert second.reserve(100, 5, 1000) == 4
    assert second.reserve(100, 5, 1000) == 0
    first.settle(500, grown(250))
    assert second.reserve(100, 5, 1000) == 2
    assert second.reserve(100, 5, 10) == 0


def test_settling_gives_back_and_counts(opened):
    usage = opened()
    usage.start(nobody, 0)
    usage.reserve(100, 3, MANY)
    after = usage.settle(200, grown(150, 30))
    assert after.settled_bytes == 120
    assert after.reserved_bytes == {"me": 100}
    assert after.changed_bytes == 180
    assert usage.settle(900, grown(removed=900)) == Usage(0, {"me": 0}, 1080)


def test_closing_gives_back_what_was_set_aside(opened):
    first, second = opened("first"), opened("second")
    first.start(nobody, 0)
    first.reserve(100, 3, MANY)
    first.close()
    first.close()
    assert second.read().reserved_bytes == {"second": 0}
    with pytest.raises(OSError, match="is closed"):
        first.read()


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"[1, {}]", b"[1, {}, 2] tail", b"[1, [], 2]", b'["x", {}, 0]', b"null"]
)
def test_a_file_that_does_not_parse_is_counted_anew(opened, place, disk, garbage):
    usage = opened()
    usage.start(nobody, 0)
    usage.reserve(10, 5, MANY)
    (place.folder / ".usage").write_bytes(garbage)
    read = usage.read()
    assert read.settled_bytes == disk.used
    assert read.reserved_bytes == {"me": 50}
    assert usage.read().settled_bytes == disk.used
    assert disk.walks == 1


def test_a_shorter_count_leaves_no_tail(opened, place):
    usage = opened()
    usage.start(nobody, 10**15)
    usage.settle(0, grown(removed=10**15 - 1))
    assert usage.read().settled_bytes == 1


def test_a_tail_that_a_crash_has_left_is_counted_anew(opened, place, disk):
    usage = opened()
    usage.start(nobody, 7)
    with (place.folder / ".usage").open("ab") as file:
        file.write(b"}")
    assert usage.read().settled_bytes == disk.used


def test_a_change_that_failed_is_told_by_the_next_one(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.start(nobody, 0)
    usage.reserve(100, 3, MANY)
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="injected"):
        usage.settle(300, grown(200))
    ops.fail(errno.EIO, on="lock", times=1)
    with pytest.raises(OSError, match="injected"):
        usage.settle(0, grown(20, 10))
    # The file was wiped by the failed write: what is told is in the disk's count already.
    assert usage.read().total_bytes == 1000
    assert usage.read().reserved_bytes == {"me": 0}


def test_a_lock_that_failed_delays_the_telling_only(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.start(nobody, 0)
    usage.reserve(100, 3, MANY)
    ops.fail(errno.EIO, on="lock", times=3)  # a kept descriptor is opened anew once
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            usage.settle(100, grown(60, 10))
    assert usage.read() == Usage(100, {"me": 100}, 140)


def test_a_reservation_that_failed_is_none(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.start(nobody, 0)
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="injected"):
        usage.reserve(100, 3, MANY)
    assert usage.read().reserved_bytes == {"me": 0}


def test_short_writes_of_the_count_are_continued(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    ops.shorten(3, on="pwrite")
    usage.start(nobody, 123456789)
    assert usage.read().settled_bytes == 123456789


def test_a_count_that_was_half_written_is_counted_anew(opened, disk):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.start(nobody, 555)
    ops.shorten(2, on="pwrite", times=1)
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="injected"):
        usage.settle(0, grown(444))
    assert usage.read().settled_bytes == disk.used


def run_together(count, call) -> None:
    barrier = threading.Barrier(count)

    def body(number):
        barrier.wait()
        for _ in range(50):
            call(number)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_threads_of_one_tier_lose_no_update(opened):
    """The file's lock belongs to the descriptor, and so does not part threads that share it."""
    usage = opened()
    usage.start(nobody, 0)
    run_together(4, lambda _n: usage.settle(0, grown(10, 3)))
    assert usage.read() == Usage(1400, {"me": 0}, 2600)


def test_a_threads_change_waits_for_that_of_another(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    usage.start(nobody, 0)
    hang = ops.hang(on="pwrite", times=1)
    first, second = (
        threading.Thread(target=usage.settle, args=(0, grown(number))) for number in (10, 3)
    )
    first.start()
    assert hang.entered.wait(10)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    hang.release()
    first.join(10)
    second.join(10)
    assert usage.read().settled_bytes == 13


def test_tiers_lose_no_update_to_each_other(opened):
    usages = [opened(f"w{n}") for n in range(4)]
    for number, usage in enumerate(usages):
        usage.start(lambda number=number: {f"w{n}" for n in range(number)}, 0)
    run_together(4, lambda n: usages[n].settle(0, grown(10, 3)))
    assert usages[0].read().settled_bytes == 1400


# -- corrections --------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [0, 100, 5000])
def test_a_correction_sets_the_count_to_the_disk(opened, found):
    usage = opened()
    usage.start(nobody, 1000)
    assert usage.correct(usage.read(), found, nobody).settled_bytes == found


def test_a_walk_in_a_busy_time_does_not_change_a_count_that_may_be_right(opened):
    usage = opened()
    usage.start(nobody, 1000)
    before = usage.read()
    usage.settle(0, grown(300, 300))
    assert usage.correct(before, 1500, nobody).settled_bytes == 1000
    assert usage.correct(before, 1601, nobody).settled_bytes == 1601


def test_what_is_set_aside_may_be_on_disk_already(opened):
    usage, other = opened(), opened("other")
    usage.start(nobody, 1000)
    other.start(lambda: {"me"}, 0)
    before = usage.read()
    other.reserve(100, 2, MANY)
    assert usage.correct(before, 1200, lambda: {"other"}).settled_bytes == 1000
    before = usage.read()
    other.settle(200, grown())
    assert usage.correct(before, 1200, lambda: {"other"}).settled_bytes == 1000
    assert usage.correct(usage.read(), 1200, lambda: {"other"}).settled_bytes == 1200


def test_two_tiers_that_walk_at_the_same_time_correct_once(opened):
    first, second = opened("first"), opened("second")
    first.start(nobody, 1000)
    second.start(lambda: {"first"}, 0)
    before_first, before_second = first.read(), second.read()
    assert first.correct(before_first, 400, lambda: {"second"}).settled_bytes == 400
    assert second.correct(before_second, 400, lambda: {"first"}).settled_bytes == 400
