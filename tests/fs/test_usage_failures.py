"""Changes of the shared count that fail, are cut short, or come together, are each made once."""

import errno
import threading

import pytest
from faulty_files import FaultyFileOps
from fs.counted import MANY, count, grown, living, opened, reserved, state
from fs.directories import BLOCK

__all__ = ["living", "opened"]


@pytest.mark.parametrize("on", ["lock", "pread_into", "pwrite"])
def test_a_change_that_failed_is_reported_by_the_next_one(opened, on):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    operation = usage.begin(100, 3, MANY)
    ops.fail(errno.EIO, on=on, times=2 if on == "lock" else 1)
    usage.end(operation, grown(200))
    with pytest.raises(OSError, match="injected"):
        usage.report()
    assert state(usage) == (200, 0, 0)
    assert usage.read().settled_bytes == 200


def test_a_reservation_that_failed_is_none(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="injected"):
        usage.begin(100, 3, MANY)
    assert reserved(usage.read()) == {"me": 0}


@pytest.mark.parametrize("on", ["lock", "pread_into", "pwrite"])
def test_operations_that_cannot_begin_leave_nothing_however_many(opened, on):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    ops.fail(errno.EIO, on=on)
    for _ in range(50):
        with pytest.raises(OSError, match="injected"):
            usage.begin(100, 3, MANY)
    assert not [*usage._running, *usage._ended, *usage._reporting]
    ops.heal()
    assert reserved(usage.read()) == {"me": 0}


def test_a_reservation_that_was_made_though_it_failed_is_released_by_the_next_change(opened):
    ops = Lying()
    usage, other = opened(ops=ops), opened("other")
    ops.is_lying = True
    with pytest.raises(OSError, match="injected"):
        usage.begin(100, 3, MANY)
    assert reserved(other.read())["me"] == 300
    assert reserved(usage.read())["me"] == 0


def test_short_reads_and_writes_of_the_count_are_continued(opened):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    ops.shorten(3000, on="pwrite")
    ops.shorten(3000, on="pread_into")
    count(usage, grown(123456789))
    assert usage.read().settled_bytes == 123456789


@pytest.mark.parametrize("written_bytes", [30, 70, 100])
def test_a_change_that_was_half_written_is_reported_once(opened, written_bytes):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    count(usage, grown(555))
    usage.end(usage.begin(444, 1), grown(444))
    ops.shorten(written_bytes, on="pwrite", times=1)
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="injected"):
        usage.report()
    assert usage.read().settled_bytes == 999
    count(usage, grown(1))
    assert usage.read().settled_bytes == 1000


class Lying(FaultyFileOps):
    """The next write is made, and reported as failed."""

    is_lying = False

    def pwrite(self, fd, data, offset):
        written = super().pwrite(fd, data, offset)
        if self.is_lying:
            self.is_lying = False
            raise OSError(errno.EIO, "injected")
        return written


def test_a_change_that_was_made_though_it_failed_is_reported_once(opened):
    ops = Lying()
    usage, other = opened(ops=ops), opened("other")
    usage.end(usage.begin(100, 3, MANY), grown(200))
    ops.is_lying = True
    with pytest.raises(OSError, match="injected"):
        usage.report()
    count(other, grown(7))
    assert state(usage) == (207, 0, 0)
    count(usage, grown(1))
    assert state(usage) == (208, 0, 0)


def test_a_change_under_another_id_that_was_made_though_it_failed_is_reported_once(opened, living):
    ops = Lying()
    usage = opened("old", ops)
    living.add("new")
    usage.end(usage.begin(70, 1), grown(70))
    ops.is_lying = True
    with pytest.raises(OSError, match="injected"):
        usage.report()
    usage.rename_writer("new")
    assert state(usage) == (70, 0, 0)
    assert reserved(usage.read()) == {"new": 0}


# -- several at once ----------------------------------------------------------------------------


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
        thread.join(60)


def test_threads_of_one_tier_lose_no_update(opened):
    usage = opened()

    def job(_number):
        operation = usage.begin(BLOCK, 1, MANY)
        assert operation.reserved_bytes == BLOCK
        count(usage, grown(10, 3), operation)

    run_together(4, job)
    assert state(usage) == (1400, 0, 0)
    assert not usage._running


def test_tiers_lose_no_update_to_each_other(opened):
    usages = [opened(f"w{n}") for n in range(4)]
    run_together(4, lambda n: count(usages[n], grown(10, 3)))
    assert usages[0].read().settled_bytes == 1400
