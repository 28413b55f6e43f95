"""The ranking by groups notices when its own lists are damaged; `test_hd` compares its order."""

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


def test_a_damaged_ranking_says_so():
    ranking = GroupRanking(3)
    ranking.form(0, 1, [0, 1])
    assert list(ranking.violations()) == []
    ranking._sizes[2] += 1
    ranking.num_skipped += 1
    ranking._free.take(1)
    ranking._oldest[0] = 0
    assert len(list(ranking.violations())) == 4
