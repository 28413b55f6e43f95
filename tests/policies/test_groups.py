"""The order of the ranking by groups, and what it costs; `test_hd` compares it with a model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.policies.groups import GroupRanking


def by_age(kind, time):
    return (time, kind)


def test_members_go_tail_first_from_the_oldest_or_newest_group():
    ranking = GroupRanking(6)
    ranking.form(3, 1, [0, 1])
    ranking.form(3, 2, [2, 3])
    ranking.form(5, 0, [4])
    assert ranking.take(4, lambda _: True, by_age) == [4, 1, 0, 3]
    assert ranking.take(2, lambda _: True, by_age) is None
    assert list(ranking.walk(by_age)) == [2]


def test_released_members_return_at_their_rank_in_any_order():
    ranking = GroupRanking(4)
    ranking.form(0, 1, [0, 1, 2, 3])
    assert ranking.take(1, lambda _: False, by_age) is None
    assert sorted(ranking.skipped()) == [0, 1, 2, 3]
    for number in (2, 0, 3, 1):
        ranking.release([number])
    assert list(ranking.violations()) == []
    assert ranking.take(4, lambda _: True, by_age) == [3, 2, 1, 0]


@given(st.data())
def test_members_go_in_the_order_of_the_walk_whatever_was_skipped_and_released(data):
    ranking = GroupRanking(12)
    stays: set[int] = set()

    def may_leave(number):
        return number not in stays

    for time in range(data.draw(st.integers(1, 25))):
        members = list(ranking.walk(by_age))
        absent = sorted(set(range(12)).difference(members))
        if absent and data.draw(st.booleans()):
            ranking.form(data.draw(st.integers(0, 3)), time, data.draw(st.permutations(absent)))
        some = data.draw(st.lists(st.sampled_from(members), unique=True)) if members else []
        count = data.draw(st.integers(1, 6))
        expected = [n for n in ranking.walk(by_age) if may_leave(n)][:count]
        match data.draw(st.sampled_from(["skip", "release", "remove", "first", "pick", "take"])):
            case "skip":
                stays.update(some)
            case "release":
                stays.difference_update(some)
                ranking.release(some)
            case "remove":
                ranking.remove(some)
            case "first":
                ranking.put_first(some)
            case "pick":
                assert ranking.pick(count, may_leave, by_age)[0] == expected
            case _:
                taken = ranking.take(count, may_leave, by_age)
                assert taken == (expected if len(expected) == count else None)
        assert list(ranking.violations()) == []
        ranking.release(sorted(set(ranking.skipped()).difference(stays)))


class Read:
    """An array that counts how often it is read."""

    def __init__(self, array):
        self.array, self.count = array, 0

    def __getitem__(self, index):
        self.count += 1
        return self.array[index]

    def __setitem__(self, index, value):
        self.array[index] = value


@pytest.mark.parametrize("order", ["slots", "backwards", "random"])
@pytest.mark.parametrize("is_first", [False, True])
def test_releasing_members_and_taking_them_reads_few_ranks_for_each(order, is_first):
    count = 4096
    ranking = GroupRanking(count)
    numbers = list(range(count))
    ranking.form(0, 1, numbers)
    if is_first:
        ranking.put_first(numbers)
    assert ranking.take(1, lambda _: False, by_age) is None
    stamps = ranking._stamps = Read(ranking._stamps)
    if order != "slots":
        numbers.reverse()
    if order == "random":
        random.Random(1).shuffle(numbers)
    for number in numbers:
        ranking.release([number])
    assert ranking.take(count, lambda _: True, by_age) == list(range(count))[::-1]
    assert stamps.count < 8 * count


def test_members_that_are_released_and_removed_again_and_again_take_bounded_memory():
    rounds, comers, last = 20, [0, 1, 2, 3, 4], 5
    capacity = 6 + 2 * rounds
    ranking = GroupRanking(capacity)
    sizes = []
    for time in range(rounds):
        middle, tail = range(6 + 2 * time, 8 + 2 * time)
        news = [last, *comers, middle, tail]
        ranking.form(0, time, news)
        ranking.put_first(news)
        assert ranking.take(1, last.__eq__, by_age) == [last]  # the others are skipped
        ranking.release([tail, *comers, middle])
        ranking.remove(comers)
        assert list(ranking.violations()) == []
        sizes.append(len(ranking._returned.get(1, ())))
    assert max(sizes) > len(comers) * 10  # some ranks are kept
    assert max(sizes) <= 2 * capacity + 6
    assert list(ranking.walk(by_age)) == list(range(capacity - 1, 5, -1))
    assert ranking.take(2 * rounds, lambda _: True, by_age) == list(range(capacity - 1, 5, -1))
    assert not ranking._returned


def test_a_damaged_ranking_says_so():
    ranking = GroupRanking(3)
    ranking.form(0, 1, [0, 1])
    assert list(ranking.violations()) == []
    ranking._sizes[2] += 1
    ranking.num_skipped += 1
    ranking._free.take(1)
    ranking._oldest[0] = 0
    assert len(list(ranking.violations())) == 4
    ranking = GroupRanking(3)
    ranking.form(0, 1, [0, 1, 2])
    assert ranking.take(1, lambda _: False, by_age) is None
    for number in (0, 2, 1):
        ranking.release([number])
    ranking._stamps[2] = 0
    assert list(ranking.violations()) == ["a released member ranks behind the tail of its list"]
