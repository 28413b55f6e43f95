"""The shared count is corrected by walks while others change the disk, and is never too small."""

import errno

import pytest
from faulty_files import FaultyFileOps
from fs.counted import MANY, count, grown, living, opened, state, walk

from kvoffload_async.tiers.fs.usage import NUM_BUCKETS

__all__ = ["living", "opened"]

BUCKET = 7


class Visit:
    """A walk that has come to one bucket, which was published and will be visited."""

    def __init__(self, usage, bucket: int = BUCKET) -> None:
        self.usage, self.bucket = usage, bucket
        usage.begin_walk()
        usage.advance(0, 0, bucket)
        usage.advance(0, bucket, bucket)
        usage.advance(bucket, bucket, bucket + 1)

    def found(self, num_bytes: int) -> None:
        """The bucket was visited."""
        self.usage.advance(self.bucket, self.bucket + 1, self.bucket + 1, num_bytes)

    def end(self, rest_bytes: int = 0) -> None:
        """All others were visited."""
        self.usage.advance(self.bucket + 1, self.bucket + 1, NUM_BUCKETS)
        self.usage.advance(self.bucket + 1, NUM_BUCKETS, NUM_BUCKETS, rest_bytes)
        self.usage.end_walk()


@pytest.mark.parametrize("found", [0, 100, 5000])
def test_with_nobody_else_a_walk_sets_the_count_to_the_disk(opened, found):
    usage = opened()
    count(usage, grown(1000))
    walk(usage, {BUCKET: found})
    assert state(usage) == (found, 0, 0)


@pytest.mark.parametrize(
    ("bucket", "rest_bytes"), [(BUCKET - 1, 0), (BUCKET + 1, 1024)], ids=["behind", "ahead"]
)
def test_changes_behind_a_walk_are_added_and_those_ahead_of_it_are_found(
    opened, bucket, rest_bytes
):
    """It is right to the byte, although the count was wrong before."""
    usage, other = opened(), opened("other")
    count(usage, grown(100_000))
    visit = Visit(usage)
    count(other, grown(3072, 2048, bucket=bucket))
    visit.found(4096)
    visit.end(rest_bytes)
    assert state(usage) == (4096 + 1024, 0, 0)


@pytest.mark.parametrize(
    ("added", "removed", "counted"), [(1024, 0, 4096 + 1024), (0, 1024, 4096), (512, 256, 4608)]
)
def test_of_changes_in_a_bucket_during_its_visit_what_was_added_counts(
    opened, added, removed, counted
):
    usage, other = opened(), opened("other")
    count(usage, grown(100_000))
    operation = other.begin(1024, 1)
    visit = Visit(usage)
    count(other, grown(added, removed), operation)
    visit.found(4096)
    visit.end()
    assert usage.read().settled_bytes == counted


@pytest.mark.parametrize("settled_bytes", [4096 - 512, 4096, 4096 + 1024 - 512])
def test_a_count_that_agrees_with_a_walk_within_what_is_in_doubt_stays(opened, settled_bytes):
    """Otherwise each walk would add what is in doubt, and blocks would be evicted for it."""
    usage, other = opened(), opened("other")
    count(usage, grown(settled_bytes - 512))
    visit = Visit(usage)
    count(other, grown(1024, 512))
    visit.found(4096)
    visit.end()
    assert usage.read().settled_bytes == settled_bytes


@pytest.mark.parametrize("settled_bytes", [0, 4096 - 1024, 4096 + 1024])
def test_a_count_that_disagrees_by_more_is_replaced(opened, settled_bytes):
    usage, other = opened(), opened("other")
    count(usage, grown(settled_bytes))
    visit = Visit(usage)
    count(other, grown(512, 512))
    visit.found(4096)
    visit.end()
    assert usage.read().settled_bytes == 4096 + 512


def test_what_was_seen_while_its_operation_was_in_flight_is_not_subtracted_when_it_ends(opened):
    """A bucket was visited after a removal, and before that was reported."""
    usage, other = opened(), opened("other")
    count(usage, grown(100_000))
    operation = other.begin(1024, 1)
    visit = Visit(usage)
    visit.found(4096)
    count(other, grown(removed=1024), operation)
    visit.end()
    assert usage.read().settled_bytes == 4096


def test_an_operation_that_began_after_the_visit_of_its_bucket_is_certain(opened):
    usage, other = opened(), opened("other")
    count(usage, grown(100_000))
    visit = Visit(usage)
    visit.found(4096)
    count(other, grown(removed=1024), other.begin(1024, 1))
    visit.end()
    assert usage.read().settled_bytes == 4096 - 1024
    assert not usage.read().total.doubt_bytes


def test_an_operation_that_ends_after_a_walk_does_not_subtract_what_that_has_seen(opened):
    usage, other = opened(), opened("other")
    count(usage, grown(100_000))
    operation = other.begin(1024, 1)
    walk(usage, {BUCKET: 4096})
    assert usage.read().settled_bytes == 4096 + 1024, "moving bytes count"
    count(other, grown(removed=1024), operation)
    assert usage.read().settled_bytes == 4096 + 1024
    walk(usage, {BUCKET: 4096})
    assert usage.read().settled_bytes == 4096


def test_a_move_past_a_walk_is_not_lost(opened):
    """From a bucket ahead of it to one behind it, not reported before its end."""
    usage, other = opened(), opened("other")
    count(usage, grown(100_000))
    visit = Visit(usage)
    visit.found(0)
    operation = other.begin(4096, 1)
    visit.end()
    assert usage.read().settled_bytes == 4096
    count(other, [*grown(removed=4096, bucket=BUCKET + 1), *grown(4096)], operation)
    assert usage.read().settled_bytes >= 4096
    walk(usage, {BUCKET: 4096})
    assert state(usage) == (4096, 0, 0)


def test_a_killed_writers_move_past_a_walk_is_not_lost(opened, living):
    usage, second, dead = opened(), opened("second"), opened("dead")
    count(usage, grown(100_000))
    visit = Visit(usage)
    visit.found(0)
    dead.begin(4096, 1)
    living.discard("dead")
    walk(second, {BUCKET: 4096})
    assert state(second) == (4096, 0, 0)
    visit.end()
    assert usage.read().settled_bytes == 4096


def test_two_walks_at_the_same_time_are_corrected_by_the_same_changes(opened):
    first, second = opened("first"), opened("second")
    count(first, grown(1000))
    one, two = Visit(first), Visit(second, BUCKET + 2)
    count(first, grown(500, bucket=BUCKET + 1))
    one.found(400)
    two.found(0)
    two.end()
    assert state(first) == (500, 0, 0)
    one.end(500)
    assert state(first) == (900, 0, 0)


def test_a_walk_that_was_lost_with_the_count_corrects_nothing(opened, directory):
    usage = opened()
    visit = Visit(usage)
    (directory.folder / ".usage").unlink()
    visit.found(4096)
    visit.end()
    assert not usage.is_complete
    walk(usage, {BUCKET: 4096})
    assert state(usage) == (4096, 0, 0)


def test_a_walk_that_was_not_ended_is_replaced_by_the_next(opened):
    usage = opened()
    Visit(usage).found(4096)
    walk(usage, {BUCKET: 100})
    assert state(usage) == (100, 0, 0)


@pytest.mark.parametrize("is_made", [False, True])
def test_buckets_whose_report_failed_are_not_counted_twice_and_not_left_out(opened, is_made):
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    visit = Visit(usage)
    if is_made:
        visit.found(4096)
    else:
        ops.fail(errno.EIO, on="pwrite", times=1)
        with pytest.raises(OSError, match="injected"):
            visit.found(4096)
    visit.found(4096)
    visit.end()
    assert usage.read().settled_bytes == 4096


def test_a_bucket_that_is_left_out_after_a_failed_report_ends_the_walk(opened):
    """What was found before is lost, so the walk must not count as one over everything."""
    ops = FaultyFileOps()
    usage = opened(ops=ops)
    count(usage, grown(1000))
    visit = Visit(usage)
    ops.fail(errno.EIO, on="pwrite", times=1)
    with pytest.raises(OSError, match="injected"):
        visit.found(4096)
    visit.end()
    assert usage.read().settled_bytes == 1000


def test_with_an_unknown_total_changes_are_counted_by_walks_only(opened):
    usage, other = opened(is_known=False), opened("other", is_known=False)
    visit = Visit(usage)
    visit.found(4096)
    count(other, grown(512), other.begin(512, 1, MANY))
    visit.end()
    assert usage.is_complete
    assert state(usage) == (4096 + 512, 0, 0)
