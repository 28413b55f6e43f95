"""Lists in order of rank: who must stay is met once, and keeps its rank."""

from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffload_async.tables.ranked import IntegerHeap, RankedLists

CAPACITY = 12
NUMBERS = st.sets(st.integers(0, CAPACITY - 1))


def anything(_number):
    return True


def filled(*numbers, stay=()):
    """A list in which those that must stay are skipped."""
    lists = RankedLists(CAPACITY)
    lists.append(numbers)
    lists.release([n for n in lists.pick(len(numbers), lambda n: n not in stay) if n not in stay])
    return lists


class RankedMachine(RuleBasedStateMachine):
    """Two ranked lists beside two plain ones; stamps begin anew all the time."""

    def __init__(self):
        super().__init__()
        self.lists = RankedLists(CAPACITY, 2, max_stamp=CAPACITY + 3)
        self.model: list[list[int]] = [[], []]
        self.stay: set[int] = set()
        self.num_refused = self.num_chances = 0

    def may_leave(self, number):
        self.num_refused += number in self.stay
        return number not in self.stay

    def drawn_members(self, data):
        members = [*self.model[0], *self.model[1]]
        numbers = data.draw(st.lists(st.sampled_from(members), unique=True))
        if data.draw(st.booleans()):
            numbers.sort(key=members.index)
        return numbers

    def forget(self, numbers):
        self.model = [[n for n in order if n not in numbers] for order in self.model]

    @rule(data=st.data(), which=st.integers(0, 1))
    def append(self, data, which):
        absent = sorted(set(range(CAPACITY)) - {*self.model[0], *self.model[1]})
        numbers = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
        self.lists.append(numbers, which)
        self.model[which] += numbers
        self.num_chances += len(numbers)

    @precondition(lambda self: any(self.model))
    @rule(data=st.data(), which=st.integers(0, 1), leaves=st.booleans())
    def move_or_remove(self, data, which, leaves):
        numbers = self.drawn_members(data)
        self.forget(numbers)
        if leaves:
            self.lists.remove(numbers)
        else:
            self.lists.move_to_end(numbers, which)
            self.model[which] += numbers
            self.num_chances += len(numbers)

    @rule(numbers=NUMBERS)
    def make_stay(self, numbers):
        self.stay |= numbers

    @rule(numbers=NUMBERS)
    def let_leave(self, numbers):
        self.stay -= numbers
        for which in 0, 1:
            self.lists.release([n for n in self.model[which] if n in numbers], which)
        self.num_chances += len(numbers)

    @rule(count=st.integers(0, 5), which=st.integers(0, 1))
    def take(self, count, which):
        expected = [n for n in self.model[which] if n not in self.stay][:count]
        taken = self.lists.take_first(count, self.may_leave, which)
        if len(expected) < count:
            assert taken is None
            return
        assert taken == expected
        self.forget(taken)

    @rule(count=st.integers(0, 5), which=st.integers(0, 1))
    def pick_and_leave_where_they_are(self, count, which):
        picked = self.lists.pick(count, self.may_leave, which)
        assert picked == [n for n in self.model[which] if n not in self.stay][:count]
        self.lists.release(picked, which)

    @rule(really=st.integers(0, 9).map(lambda n: n == 9))
    def clear(self, really):
        if really:
            self.lists.clear()
            self.model = [[], []]

    @invariant()
    def both_agree(self):
        assert [list(self.lists.walk(which)) for which in (0, 1)] == self.model
        assert list(self.lists.violations()) == []

    @invariant()
    def only_what_must_stay_is_skipped_and_it_is_met_once(self):
        assert set(self.lists.skipped()) <= self.stay
        assert self.num_refused <= self.num_chances

    @invariant()
    def what_waits_is_bounded(self):
        assert sum(len(list(heap)) for heap in self.lists._heaps) <= 2 * CAPACITY


TestRanked = pytest.mark.stateful(RankedMachine.TestCase)


def test_stamps_that_begin_anew_keep_the_rank_of_those_that_are_released_later():
    lists = RankedLists(4, max_stamp=4)
    lists.append([0, 1, 2, 3])
    assert lists.take_first(1, {2}.__contains__) == [2]
    lists.append([2])
    lists.release([1])
    assert lists.take_first(2, {1, 2}.__contains__) == [1, 2]  # 2 is the fifth to have a stamp
    assert list(lists.violations()) == []
    assert lists.take_first(3, anything) is None
    lists.release([3, 0])
    assert lists.take_first(2, anything) == [0, 3]


def test_stamps_begin_anew_before_they_are_too_large_for_their_four_bytes():
    lists = RankedLists(CAPACITY)
    lists.append([0, 1, 2])
    lists._last_stamp = (1 << 31) - 2
    assert lists.take_first(1, {2}.__contains__) == [2]
    lists.release([1, 0])
    assert lists.take_first(2, anything) == [0, 1]
    assert list(lists.violations()) == []


def damaged_with_stamps_out_of_order(lists):
    lists._stamps[0], lists._stamps[1] = lists._stamps[1], lists._stamps[0]


def damaged_with_a_stamp_in_front(lists):
    lists._stamps[3] = 7


def damaged_with_nothing_waiting(lists):
    lists._heaps[0].clear()


def damaged_with_a_wrong_count(lists):
    lists.num_met += 1


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (damaged_with_stamps_out_of_order, "the stamps of list 0 do not ascend: [2, 1, -3]"),
        (damaged_with_a_stamp_in_front, "a member of list 0 has a stamp, but was not checked"),
        (damaged_with_nothing_waiting, "a released member of list 0 is not in the heap"),
        (damaged_with_a_wrong_count, "3 members were checked, but 4 counted"),
    ],
)
def test_damage_is_a_violation(damage, found):
    lists = filled(0, 1, 2, stay=[0, 1])
    lists.append([3])
    assert list(lists.violations()) == []
    damage(lists)
    assert list(lists.violations()) == [found]


# -- the heap -----------------------------------------------------------------------------------


@given(st.lists(st.none() | st.integers(0, 1 << 62)), st.integers(0, 3))
def test_the_heap_gives_the_smallest_first_however_much_is_in_it(values, num_loose):
    heap, model = IntegerHeap(num_loose), []
    for value in values:
        if value is not None:
            heap.push(value)
            heappush(model, value)
        elif model:
            assert heap.pop() == heappop(model)
        assert bool(heap) == bool(model)
        assert sorted(heap) == sorted(model)
    assert [heap.pop() for _ in range(len(model))] == sorted(model)
    assert not heap._runs


def test_released_members_are_invisible_to_the_garbage_collector():
    num_members = 100_000
    lists = RankedLists(num_members)
    lists.append(range(num_members))
    assert lists.pick(1, lambda _number: False) == []
    lists.release(range(num_members))
    heap = lists._heaps[0]
    assert len(heap._loose) + len(heap._runs) + len(heap._smallest) < 2_000
    assert lists.take_first(3, anything) == [0, 1, 2]
