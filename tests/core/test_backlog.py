"""What one tier is owed."""

import pytest

from kvoffload_async.core.cascades import Backlog


def owed(backlog):
    return list(backlog.slots())


def test_what_is_owed_the_longest_goes_first():
    backlog = Backlog(8, list, list)
    assert backlog.add([3, 1], 5.0) == 2
    assert backlog.add([1, 7], 9.0) == 1, "slot 1 is owed already"
    assert (backlog.count, backlog.since_s) == (3, 5.0)
    assert backlog.oldest(2) == [3, 1]
    backlog.began([3, 1])
    assert owed(backlog) == [7]
    assert backlog.add([3], 9.0) == 0, "it is on its way"
    backlog.ended([3, 1])
    assert backlog.add([3], 9.0) == 1


def test_an_evicted_block_is_not_owed_any_more_and_its_slot_is_as_new():
    backlog = Backlog(4, list, list)
    backlog.add([0, 1], 0.0)
    assert backlog.forget([1, 2]) == 1
    assert owed(backlog) == [0]
    assert backlog.add([1], 0.0) == 1


def test_a_block_that_fails_is_last_in_line_and_given_up_after_eight_tries():
    backlog = Backlog(4, list, list)
    backlog.add([0, 1], 0.0)
    for _ in range(7):
        backlog.began([0])
        assert backlog.failed([0], 0.0, counts=True) == 0
        assert owed(backlog) == [1, 0]
    backlog.began([0])
    assert backlog.failed([0], 0.0, counts=False) == 0, "the tier's own fault"
    backlog.began([0])
    assert backlog.failed([0], 0.0, counts=True) == 1
    assert owed(backlog) == [1]
    backlog.began([1])
    backlog.ended([1])
    assert list(backlog.violations(set())) == []


def test_a_block_that_is_owed_once_more_while_an_older_copy_runs_stays_owed():
    backlog = Backlog(4, list, list)
    for ends in (backlog.ended, lambda slots: backlog.failed(slots, 0.0, counts=True)):
        backlog.began([2])
        backlog.began([2])
        backlog.ended([2])
        backlog.add([2], 0.0)
        ends([2])
        assert owed(backlog) == [2]
        backlog.forget([2])


def test_a_reset_returns_what_was_owed():
    backlog = Backlog(4, list, list)
    backlog.add([0, 1], 0.0)
    backlog.began([0])
    backlog.pause(0.0)
    backlog.is_shut = True
    assert backlog.clear() == 1
    assert (backlog.count, backlog.paused_until_s, backlog.is_shut) == (0, 0.0, False)
    assert list(backlog.violations(set())) == []


def test_pauses_grow_until_something_works():
    backlog = Backlog(1, list, list)
    lengths = []
    for second in range(10, 100, 10):
        backlog.pause(second)
        lengths.append(backlog.paused_until_s - second)
        backlog.pause(second)  # a job of before the pause: that is no news
    assert lengths == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0])
    backlog.resume()
    assert backlog.paused_until_s == 0.0
    backlog.pause(200.0)
    assert backlog.paused_until_s == 200.25


def test_what_is_owed_is_protected_while_the_tier_is_in_order():
    protected = []
    backlog = Backlog(4, protected.extend, lambda slots: list(map(protected.remove, slots)))
    backlog.add([2, 0], 0.0)
    assert protected == list(backlog.slots()) == [2, 0]
    backlog.heed(is_wanted=False)
    backlog.add([3], 0.0)
    assert protected == []
    assert list(backlog.violations(set())) == []
    backlog.is_wanted = True
    assert len(list(backlog.violations(set()))) == 3, "it has not been heeded"
    backlog.is_wanted = False
    backlog.heed(is_wanted=True)
    assert sorted(protected) == sorted(backlog.protected()) == [0, 2, 3]
    backlog.began([0])
    backlog.forget([3])
    assert protected == [2]
    backlog.clear()
    assert protected == []
