import itertools

import pytest
from hypothesis.stateful import invariant
from policies.arcs import cache, lists, with_ghosts
from policies.models import (
    NaiveArc,
    PolicyMachine,
    Rig,
    anything,
    arc_state,
    check_arc_invariants,
    key,
    keys,
    nothing,
)

from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy

# --- the paper's cases --------------------------------------------------------------------------


def test_a_new_key_is_seen_once():
    rig = Rig(ArcPolicy(4))
    assert rig.store(1, 2) == []
    assert lists(rig) == [keys([1, 2]), [], [], []]


def test_a_reused_key_is_seen_twice_wherever_it_was():
    rig = cache(4, once=[1, 2], twice=[3, 4])
    rig.reuse(3)
    rig.reuse(1)
    assert lists(rig) == [keys([2]), keys([4, 3, 1]), [], []]


def test_a_key_that_the_request_stored_itself_moves_but_is_not_promoted():
    rig = cache(4, once=[1, 2], twice=[3, 4])
    rig.policy.access(keys([1, 3]), nothing)
    assert lists(rig) == [keys([2, 1]), keys([4, 3]), [], []]


def test_victims_become_ghosts_of_their_list():
    rig = cache(4, once=[1, 2], twice=[3, 4], pinned=[2])
    assert rig.store(5, 6) == keys([1, 3])
    assert lists(rig) == [keys([2, 5, 6]), [key(4)], [key(1)], [key(3)]]


def test_a_ghost_of_t1_returns_to_the_top_of_t2_and_raises_the_target():
    rig = cache(3, once=[1], twice=[2, 3])
    rig.store(4)
    assert lists(rig) == [[key(4)], keys([2, 3]), [key(1)], []]
    assert rig.store(1) == [key(2)]
    assert lists(rig) == [[key(4)], keys([3, 1]), [], [key(2)]]
    assert rig.inner.p == 1.0


def test_a_ghost_of_t2_returns_to_the_top_of_t2_and_lowers_the_target():
    rig = cache(3, once=[1], twice=[2, 3])
    rig.store(4)
    rig.store(1)
    assert rig.store(2) == [key(4)]
    assert lists(rig) == [[], keys([3, 1, 2]), [key(4)], []]
    assert rig.inner.p == 0.0


def test_at_its_target_t1_gives_way_to_a_ghost_of_t2_but_not_to_a_new_key():
    rig = cache(3, once=[1], twice=[2, 3])
    rig.store(4)
    rig.store(1)
    rig.inner.p = 1.0
    assert rig.store(5) == [key(3)]
    rig.inner.p = 3.0
    assert len(rig.inner.lists()[0]) == 2
    assert rig.store(2) == [key(4)]


def test_the_target_moves_by_the_ratio_of_the_ghosts():
    policy = with_ghosts(9, b1=[1, 2], b2=[3, 4, 5, 6, 7])
    policy.make_room(keys([1]), 0, nothing)
    assert policy.p == 2.5
    policy.make_room(keys([3]), 0, nothing)
    assert policy.p == 1.5
    policy.make_room(keys([1, 2]), 0, nothing)
    assert policy.p == 1.5 + 2.5 + 5
    policy.make_room(keys([1]), 0, nothing)
    assert policy.p == 9


def test_the_target_falls_by_the_ratio_of_the_ghosts():
    policy = with_ghosts(9, b1=[3, 4, 5, 6, 7], b2=[1, 2])
    policy.p = 9.0
    policy.make_room(keys([1]), 0, nothing)
    assert policy.p == 6.5
    policy.make_room(keys([1, 2]), 0, nothing)
    assert policy.p == 0


def test_a_t1_that_fills_the_cache_leaves_no_ghosts():
    rig = cache(3, once=[1, 2, 3])
    assert rig.store(4, 5) == keys([1, 2])
    assert lists(rig) == [keys([3, 4, 5]), [], [], []]


def test_l1_drops_its_oldest_ghost_when_it_has_as_many_keys_as_the_cache():
    rig = cache(3, once=[1, 2], twice=[3])
    rig.store(4)
    assert lists(rig) == [keys([2, 4]), [key(3)], [key(1)], []]
    rig.store(5)
    assert lists(rig) == [keys([4, 5]), [key(3)], [key(2)], []]


def test_l2_drops_its_oldest_ghost_when_there_are_twice_as_many_keys_as_places():
    rig = cache(2, twice=[1, 2])
    for name in (3, 4):
        rig.store(name)
        rig.reuse(name)
    assert lists(rig) == [[], keys([3, 4]), [], keys([1, 2])]
    assert rig.store(5) == [key(3)]
    assert lists(rig) == [[key(5)], [key(4)], [], keys([2, 3])]


def test_a_ghost_that_the_batch_itself_pushed_out_is_a_new_key():
    rig = cache(3, once=[1, 2], twice=[3])
    rig.store(4)
    assert rig.inner.lists()[2] == (key(1),)
    assert rig.store(5, 1) == keys([2, 4])
    assert rig.inner.p == 0
    assert lists(rig) == [keys([5, 1]), [key(3)], [key(4)], []]


def test_a_victim_of_the_batch_leaves_t1_smaller_for_the_next_one():
    rig = cache(4, once=[1, 2, 3], twice=[5])
    rig.store(4)
    rig.inner.p = 1.0
    assert lists(rig) == [keys([2, 3, 4]), [key(5)], [key(1)], []]
    assert rig.store(1, 6) == keys([2, 5]), "with 2 gone T1 is at its target"
    assert lists(rig) == [keys([3, 4, 6]), [key(1)], [key(2)], [key(5)]]


def test_ghosts_that_the_batch_makes_count_for_the_target():
    rig = cache(8, once=[1, 2, 3], twice=[4, 5, 6, 7, 8])
    rig.store(11, 12, 13)
    rig.inner.p = 3.0
    assert lists(rig)[2:] == [keys([1, 2, 3]), []]
    assert rig.store(1, 2, 3) == keys([4, 5, 6])
    assert rig.inner.p == 3.0 + 1 + 1 + 2, "for the last one there are two ghosts of T2 to one"


def with_four_places_and_eight_keys():
    rig = cache(4, twice=[1, 2, 3, 4])
    for name in (5, 6, 7):
        rig.store(name)
        rig.reuse(name)
    rig.store(8)
    assert lists(rig) == [[key(8)], keys([5, 6, 7]), [], keys([1, 2, 3, 4])]
    return rig


def test_a_ghost_of_t2_that_the_batch_itself_pushed_out_is_a_new_key():
    rig = with_four_places_and_eight_keys()
    rig.inner.p = 1.0
    assert rig.store(9, 1) == keys([5, 8])
    assert rig.inner.p == 1.0
    assert lists(rig) == [keys([9, 1]), keys([6, 7]), [key(8)], keys([3, 4, 5])]


@pytest.mark.parametrize(
    ("returning", "pushed_out", "left"), [(4, 1, [3, 5, 6]), (1, 2, [4, 5, 6])]
)
def test_a_ghost_that_returns_makes_no_room_for_ghosts(returning, pushed_out, left):
    rig = with_four_places_and_eight_keys()
    rig.inner.p = 2.0
    assert rig.store(returning, 9, pushed_out) == keys([8, 5, 6])
    assert rig.inner.p == 1.0
    assert lists(rig) == [keys([9, pushed_out]), keys([7, returning]), [key(8)], keys(left)]


def test_a_batch_may_push_out_the_ghosts_of_its_own_victims():
    rig = cache(3, once=[1, 2, 3])
    assert rig.store(4, 5, 6) == keys([1, 2, 3])
    assert lists(rig) == [keys([4, 5, 6]), [], [], []]


# --- where evicting is not always possible or needed --------------------------------------------


def test_issue_55461_t1_gives_the_victims_when_all_of_t2_is_pinned():
    rig = cache(4, once=[1, 2], twice=[3, 4], pinned=[3, 4])
    rig.inner.p = 4.0
    assert rig.store(5, 6) == keys([1, 2])


def test_issue_55461_t2_gives_the_victims_when_all_of_t1_is_pinned():
    rig = cache(4, once=[1, 2], twice=[3, 4], pinned=[1, 2])
    rig.inner.p = 0.0
    assert rig.store(5, 6) == keys([3, 4])


def test_one_batch_takes_its_victims_from_both_lists_when_one_runs_dry():
    rig = cache(5, once=[1, 2, 3], twice=[4, 5], pinned=[2])
    assert rig.store(6, 7, 8) == keys([1, 3, 4])


def test_t2_gives_more_than_planned_when_t1_runs_dry_and_the_oldest_are_pinned():
    rig = cache(5, once=[1, 2], twice=[3, 4, 5], pinned=[1, 2, 3])
    rig.inner.p = 2.0
    assert rig.store(6, 7) == keys([4, 5])


@pytest.mark.parametrize("target", range(7))
def test_a_batch_with_a_ghost_skips_only_what_is_pinned(target):
    rig = cache(7, once=[1, 2, 3, 9], twice=[4, 5, 6], pinned=[1, 4])
    assert rig.store(7) == [key(2)]
    rig.pinned.add(key(3))
    rig.inner.p = float(target)
    assert rig.store(2, 8) is not None
    assert set(rig.policy.skipped()) <= rig.pinned


def test_without_enough_victims_nothing_changes():
    rig = cache(4, once=[1, 2], twice=[3, 4])
    rig.store(5)
    rig.pinned = set(keys([2, 3, 4]))
    before = arc_state(rig.inner)
    assert rig.store(1, 6) is None
    assert arc_state(rig.inner) == before


def test_a_pinned_key_keeps_its_rank():
    rig = cache(3, once=[1, 2, 3], pinned=[1])
    assert rig.store(4) == [key(2)]
    rig.unpin(keys([1]))
    assert rig.store(5) == [key(1)]


def test_a_free_slot_spares_the_victim_but_a_ghost_still_adapts():
    rig = cache(3, once=[1], twice=[2, 3])
    rig.store(4)
    rig.policy.discard(keys([4]))
    assert rig.store(1) == []
    assert lists(rig) == [[], keys([2, 3, 1]), [], []]
    assert rig.inner.p == 1.0


def test_the_first_keys_of_a_batch_take_the_free_slots():
    rig = cache(3, once=[1], twice=[2])
    rig.inner.p = 1.0  # exceeded by T1 only when 3 is there
    assert rig.store(3, 4) == [key(1)]
    assert lists(rig) == [keys([3, 4]), [key(2)], [key(1)], []]


def test_a_discarded_key_leaves_no_ghost_and_keeps_the_others():
    rig = cache(4, once=[1, 2], twice=[3, 4])
    rig.store(5)
    rig.policy.discard(keys([1, 2, 3, 9]))
    assert lists(rig) == [[key(5)], [key(4)], [key(1)], []]


def test_keys_that_are_withheld_from_admission_stay_ghosts():
    rig = cache(3, once=[1], twice=[2, 3])
    rig.store(4)
    assert rig.policy.make_room(keys([5, 1]), 2, anything) == keys([4, 2])
    rig.policy.admit(keys([5]))
    assert lists(rig) == [[key(5)], [key(3)], keys([1, 4]), [key(2)]]


def test_clear_forgets_ghosts_and_target_too():
    rig = cache(3, once=[1], twice=[2, 3])
    rig.store(4)
    rig.store(1)
    rig.policy.clear()
    assert arc_state(rig.inner) == arc_state(ArcPolicy(3))


# --- what it is for -----------------------------------------------------------------------------


@pytest.mark.parametrize("issue_50992_pinned", [range(0), range(0, 2000, 2), range(1000)])
def test_a_batch_asks_about_each_key_once_and_about_its_victims_twice_at_most(issue_50992_pinned):
    rig = cache(2000, once=range(1000), twice=range(1000, 2000), pinned=issue_50992_pinned)
    assert len(rig.store(*range(2000, 3000))) == 1000
    assert rig.num_scans <= 3000


def test_a_batch_that_must_fail_asks_about_no_pinned_key_twice():
    rig = cache(2000, once=range(1000), twice=range(1000, 2000), pinned=range(1500))
    for once_more in 2000, 0:
        rig.num_scans = 0
        assert rig.store(*range(2000, 3000)) is None
        assert rig.num_scans <= once_more + 1000


def test_tails_leave_before_heads():
    rig = Rig(ArcPolicy(4))
    rig.request("head", "middle", "tail")
    rig.request("other", "one")
    assert rig.request("head", "middle", "tail") == set(keys(["head", "middle"]))
    assert set(rig.inner.lists()[1]) == set(keys(["head", "middle"]))


@pytest.mark.parametrize("arrival", list(itertools.permutations("abc")))
def test_the_order_in_which_transfers_end_does_not_matter(arrival):
    rig = Rig(ArcPolicy(4))
    rig.store(*arrival)
    rig.policy.access(keys("abcd"), nothing)
    assert lists(rig) == [keys("cba"), [], [], []]


def test_a_scan_does_not_wash_out_what_is_used_again_and_again():
    hits = {}
    for policy in (LruPolicy(20), ArcPolicy(20)):
        rig = Rig(policy)
        hot = [f"hot{i}" for i in range(10)]
        rig.request(*hot)
        rig.request(*hot)
        for start in range(0, 1000, 10):
            rig.request(*range(start, start + 10))
        hits[policy.name] = len(rig.request(*hot))
    assert hits == {"lru": 0, "arc": 10}


def test_the_residents_are_listed_in_the_order_in_which_they_would_leave():
    for target in (0.0, 0.5, 1.0, 1.75, 4.0, 6.0):
        rig = cache(6, once=[1, 2, 3], twice=[4, 5, 6])
        rig.inner.p = target
        listed = list(rig.policy.resident())
        left = [rig.policy.make_room(keys(["new"]), 1, anything)[0] for _ in range(6)]
        assert listed == left


class ArcMachine(PolicyMachine):
    policy_type = ArcPolicy
    model_type = NaiveArc

    def policy_state(self):
        return arc_state(self.inner)

    @invariant()
    def invariants_hold(self):
        check_arc_invariants(self.inner)


TestArcAgainstItsModel = pytest.mark.stateful(ArcMachine.TestCase)


def damaged_with_a_key_in_two_lists(policy):
    policy._ghost_keys.update([5], [policy.lists()[0][0]])
    policy._ghosts.update([policy.lists()[0][0]], [5])
    policy._ghost_lists.append([5], 1)
    policy._ghost_sizes[1] += 1


def damaged_with_a_ghost_too_many(policy):
    policy._ghost_lists.append([5], 1)
    policy._ghost_keys.update([5], [key("ghost")])
    policy._ghosts.update([key("ghost")], [5])


def damaged_with_a_ghost_without_its_key(policy):
    policy._ghost_keys.update([5], [key("ghost")])
    policy._ghost_lists.append([5], 1)
    policy._ghost_sizes[1] += 1


def damaged_with_a_target_beyond_the_cache(policy):
    policy.p = 4.5


def damaged_with_a_stamp_on_what_was_not_met(policy):
    policy._lists._stamps[0] = 1


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (damaged_with_a_key_in_two_lists, "a key is in two lists"),
        (damaged_with_a_ghost_too_many, r"the lists have [1, 0, 0, 1] members, not [1, 0, 0, 0]"),
        (damaged_with_a_ghost_without_its_key, "a ghost is not found by its key"),
        (damaged_with_a_target_beyond_the_cache, "|T1|=1 |T2|=0 |B1|=0 |B2|=0 p=4.5 c=4"),
        (
            damaged_with_a_stamp_on_what_was_not_met,
            "a member of list 0 has a stamp, but was not checked",
        ),
    ],
)
def test_damage_is_a_violation(damage, found):
    policy = ArcPolicy(4)
    policy.admit([key("a")], [0])
    assert list(policy.violations()) == []
    damage(policy)
    assert list(policy.violations()) == [found]
