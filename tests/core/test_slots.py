import pytest

from kvoffload_async.core.primary import SlotPool
from kvoffload_async.errors import InvariantError


def test_fresh_slots_come_in_increasing_order_before_returned_ones():
    pool = SlotPool(4)
    assert pool.allocate(2) == [0, 1]
    pool.free([0])
    assert pool.allocate(3) == [2, 3, 0]


def test_more_than_is_free_cannot_be_allocated():
    pool = SlotPool(2)
    pool.allocate(1)
    with pytest.raises(InvariantError, match="2 slots asked for, 1 free"):
        pool.allocate(2)
    assert pool.unused.count == 1


def test_freeing_a_slot_twice_is_a_defect():
    pool = SlotPool(1)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(InvariantError, match="slot 0"):
        pool.free([0])


def test_a_held_slot_is_nobodys_until_it_is_released():
    pool = SlotPool(2)
    pool.allocate(2)
    pool.hold([1])
    assert (pool.unused.count, list(pool.holds)) == (0, [1])
    with pytest.raises(InvariantError):
        pool.free([1])
    pool.release([1])
    assert list(pool.unused) == [1]


def test_a_slot_held_for_two_copies_is_free_after_both():
    pool = SlotPool(2)
    pool.allocate(2)
    pool.reset([1, 1])
    pool.release([1])
    assert list(pool.unused) == [0]
    pool.release([1])
    assert sorted(pool.unused) == [0, 1]


def test_a_reset_frees_all_but_the_held_slots_in_increasing_order():
    pool = SlotPool(4)
    pool.allocate(3)
    pool.hold([1])
    pool.reset([])
    assert pool.allocate(3) == [0, 2, 3]
    assert list(pool.holds) == [1]
