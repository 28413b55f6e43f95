"""The shared count is corrected by walks, exactly or not at all, while others change the disk."""

import pytest
from fs.counted import MANY, grown, living, opened, seen, settle, state

__all__ = ["living", "opened"]


def sight(usage, size: int, bucket: int = 7):
    """Begin a walk over one bucket; return what it finds, and how to end it."""
    operation = usage.begin()
    (bucket_scan,) = seen(usage.read(), {bucket: size})

    def end() -> bool:
        return not usage.correct([bucket_scan], operation)

    return bucket_scan, end


@pytest.mark.parametrize("found", [0, 100, 5000])
def test_with_nobody_else_a_walk_sets_the_count_to_the_disk(opened, found):
    usage = opened()
    settle(usage, 0, grown(1000))
    bucket_scan, end = sight(usage, found)
    assert end()
    assert bucket_scan.is_exact
    assert state(usage) == (found, 0, 0)


def test_a_bucket_that_was_changed_meanwhile_is_not_exact(opened):
    usage = opened()
    settle(usage, 0, grown(4096))
    bucket_scan, end = sight(usage, 4096)
    settle(usage, 0, grown(1024))
    assert end()
    assert not bucket_scan.is_exact
    assert usage.read().settled_bytes == 5120


def test_a_change_in_another_bucket_does_not_matter(opened):
    usage = opened()
    bucket_scan, end = sight(usage, 4096)
    settle(usage, 0, grown(1024, bucket=8))
    assert end()
    assert bucket_scan.is_exact
    assert usage.read().settled_bytes == 4096 + 1024


@pytest.mark.parametrize(
    ("found", "counted"), [(0, 4096), (4096, 8192), (12288, 8192), (16384, 20480)]
)
def test_a_count_that_is_off_by_more_than_was_changed_meanwhile_is_raised_or_lowered(
    opened, found, counted
):
    usage = opened()
    settle(usage, 0, grown(4096))
    _, end = sight(usage, found)
    settle(usage, 0, grown(4096))
    assert end()
    assert usage.read().settled_bytes == counted


def test_a_walk_waits_for_the_operations_that_ran_beside_it(opened):
    usage, other = opened(), opened("other")
    operation = other.begin()
    other.reserve(4096, 1, MANY)
    bucket_scan, end = sight(usage, 4096)  # it is on disk, and not told yet
    assert not end()
    assert state(usage) == (0, 4096, 0)
    settle(other, 4096, grown(4096), operation)
    assert end()
    assert not bucket_scan.is_exact
    assert state(usage) == (4096, 0, 0)


def test_a_walk_waits_for_operations_of_its_own_tier(opened):
    usage = opened()
    operation = usage.begin()
    usage.reserve(4096, 1, MANY)
    bucket_scan, end = sight(usage, 4096)
    assert not end()
    settle(usage, 4096, grown(4096, bucket=9), operation)
    assert end()
    assert bucket_scan.is_exact


def test_operations_that_began_later_are_not_waited_for(opened):
    usage, other = opened(), opened("other")
    before = other.begin()
    other.read()
    bucket_scan, end = sight(usage, 4096)
    assert not end()
    later = other.begin()
    settle(other, 0, grown(bucket=9), before)
    assert end()
    assert bucket_scan.is_exact
    settle(other, 0, grown(), later)


def test_an_operation_ends_when_what_it_did_is_told_and_not_before(opened):
    """Of two operations, the later one ends first."""
    usage, other = opened(), opened("other")
    first, second = other.begin(), other.begin()
    other.read()
    _, end = sight(usage, 0)
    assert not end()
    settle(other, 0, grown(512, bucket=9), second)
    assert not end()
    settle(other, 0, grown(512, bucket=9), first)
    assert end()


def test_a_writer_that_has_left_is_not_waited_for(opened):
    usage, other = opened(), opened("other")
    other.begin()
    other.read()
    _, end = sight(usage, 0)
    assert not end()
    other.close()
    assert end()


def test_a_dead_writer_is_waited_for_until_it_is_found_dead(opened, living):
    usage, dead = opened(), opened("dead")
    dead.begin()
    dead.reserve(4096, 1, MANY)
    living.discard("dead")
    bucket_scan, end = sight(usage, 4096)
    assert not end()
    usage.begin_cycle()
    assert end()
    assert bucket_scan.is_exact
    assert state(usage) == (4096, 0, 4096)


@pytest.mark.parametrize(("found", "counted"), [(0, 4096), (8192, 4096), (20480, 20480)])
def test_what_is_waited_for_in_vain_can_only_raise_the_count(opened, found, counted):
    usage, other = opened(), opened("other")
    settle(usage, 0, grown(4096))
    other.begin()
    other.reserve(4096, 1, MANY)
    bucket_scan, end = sight(usage, found)
    assert not end()
    usage.give_up([bucket_scan])
    assert usage.read().settled_bytes == counted


def test_an_unknown_bucket_is_known_even_if_it_was_waited_for_in_vain(opened):
    usage = opened(is_known=False)
    usage.begin()
    bucket_scan, end = sight(usage, 4096)
    assert not end()
    usage.give_up([bucket_scan])
    assert usage.read().bucket(7)[0] == 4096


def test_two_walks_at_the_same_time_correct_once(opened):
    first, second = opened("first"), opened("second")
    settle(first, 0, grown(1000))
    (_, end_first), (_, end_second) = sight(first, 400), sight(second, 400)
    assert not end_first()  # the other walk is an operation, too: it may sweep
    assert end_second()
    assert end_first()
    assert state(first) == (400, 0, 0)
