"""The blocks that are pending for one tier."""

import pytest

from kvoffload_async.core.cascades import WriteBackQueue


def pending(queue):
    return list(queue.slots())


def test_what_is_pending_the_longest_goes_first():
    queue = WriteBackQueue(8, list, list)
    assert queue.add([3, 1]) == 2
    assert queue.add([1, 7]) == 1, "slot 1 is pending already"
    assert queue.count == 3
    assert queue.oldest(2) == [3, 1]
    queue.began([3, 1])
    assert pending(queue) == [7]
    assert queue.add([3]) == 0, "it is on its way"
    queue.ended([3, 1])
    assert queue.add([3]) == 1


def test_an_evicted_block_is_not_pending_any_more_and_its_slot_is_as_new():
    queue = WriteBackQueue(4, list, list)
    queue.add([0, 1])
    assert queue.forget([1, 2]) == 1
    assert pending(queue) == [0]
    assert queue.add([1]) == 1


def test_a_block_that_fails_is_last_in_line_and_given_up_after_eight_tries():
    queue = WriteBackQueue(4, list, list)
    queue.add([0, 1])
    for _ in range(7):
        queue.began([0])
        assert queue.failed([0], counts=True) == 0
        assert pending(queue) == [1, 0]
    queue.began([0])
    assert queue.failed([0], counts=False) == 0, "the tier's own fault"
    queue.began([0])
    assert queue.failed([0], counts=True) == 1
    assert pending(queue) == [1]
    queue.began([1])
    queue.ended([1])
    assert list(queue.violations(set())) == []


def test_a_block_that_is_pending_once_more_while_an_older_copy_runs_stays_pending():
    queue = WriteBackQueue(4, list, list)
    for ends in (queue.ended, lambda slots: queue.failed(slots, counts=True)):
        queue.began([2])
        queue.began([2])
        queue.ended([2])
        queue.add([2])
        ends([2])
        assert pending(queue) == [2]
        queue.forget([2])


def test_a_reset_returns_what_was_pending():
    queue = WriteBackQueue(4, list, list)
    queue.add([0, 1])
    queue.began([0])
    queue.pause(0.0)
    queue.is_shut = True
    assert queue.clear() == 1
    assert (queue.count, queue.paused_until_s, queue.is_shut) == (0, 0.0, False)
    assert list(queue.violations(set())) == []


def test_pauses_grow_until_something_works():
    queue = WriteBackQueue(1, list, list)
    lengths = []
    for second in range(10, 100, 10):
        queue.pause(second)
        lengths.append(queue.paused_until_s - second)
        queue.pause(second)  # a job of before the pause: that is no news
    assert lengths == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0])
    queue.resume()
    assert queue.paused_until_s == 0.0
    queue.pause(200.0)
    assert queue.paused_until_s == 200.25


def test_what_is_pending_is_protected_while_the_tier_is_in_order():
    protected = []
    queue = WriteBackQueue(4, protected.extend, lambda slots: list(map(protected.remove, slots)))
    queue.add([2, 0])
    assert protected == list(queue.slots()) == [2, 0]
    queue.update_protection(is_wanted=False)
    queue.add([3])
    assert protected == []
    assert list(queue.violations(set())) == []
    queue.is_wanted = True
    assert len(list(queue.violations(set()))) == 3, "its protection was not updated"
    queue.is_wanted = False
    queue.update_protection(is_wanted=True)
    assert sorted(protected) == sorted(queue.protected()) == [0, 2, 3]
    queue.began([0])
    queue.forget([3])
    assert protected == [2]
    queue.clear()
    assert protected == []
