import itertools

import pytest
from policies.models import NaiveLru, PolicyMachine, Rig, anything, key, keys, nothing

from kvoffload_async.policies.lru import LruPolicy


def full(*names, pinned=()):
    rig = Rig(LruPolicy(len(names)), keys(pinned))
    rig.store(*names)
    return rig


def order(rig):
    return list(rig.policy.resident())


def test_the_oldest_keys_leave_first_and_in_order():
    rig = full(1, 2, 3)
    assert rig.store(4, 5) == keys([1, 2])
    assert order(rig) == keys([3, 4, 5])


def test_an_accessed_key_outlives_an_older_admission():
    rig = full(1, 2, 3)
    rig.reuse(1)
    assert rig.store(4) == [key(2)]


def test_storing_and_finding_a_key_count_the_same():
    rig = full(1, 2, 3)
    rig.policy.access(keys([1]), nothing)
    rig.policy.access(keys([2]), anything)
    assert order(rig) == keys([3, 1, 2])


def test_tails_leave_before_heads():
    rig = Rig(LruPolicy(4))
    rig.request("head", "middle", "tail")
    assert order(rig) == keys(["tail", "middle", "head"])
    assert rig.request("other", "one") == set()
    assert rig.request("head", "middle", "tail") == set(keys(["head", "middle"]))


@pytest.mark.parametrize("arrival", list(itertools.permutations("abc")))
def test_the_order_in_which_transfers_end_does_not_matter(arrival):
    rig = Rig(LruPolicy(4))
    rig.store(*arrival)
    rig.policy.access(keys("abc"), nothing)
    assert order(rig) == keys("cba")


def test_access_ignores_keys_that_are_not_resident():
    rig = full(1, 2)
    rig.reuse(9, 1)
    assert order(rig) == keys([2, 1])


def test_a_pinned_key_is_skipped_and_keeps_its_rank():
    rig = full(1, 2, 3, pinned=[1])
    assert rig.store(4) == [key(2)]
    rig.unpin(keys([1]))
    assert rig.store(5) == [key(1)]


def test_without_enough_victims_nothing_changes():
    rig = full(1, 2, 3, pinned=[1, 3])
    before = order(rig)
    assert rig.store(4, 5) is None
    assert order(rig) == before


def test_no_victims_needed_means_no_victim_and_no_question():
    rig = full(1, 2)
    assert rig.policy.make_room([], 0, rig.is_evictable) == []
    assert rig.num_scans == 0


def test_a_batch_asks_about_each_key_once_at_most():
    size = 2000
    rig = full(*range(size), pinned=range(0, size, 2))
    assert rig.store(*range(size, size + size // 2)) == keys(range(1, size, 2))
    assert rig.num_scans <= size


def test_a_batch_asks_about_no_key_behind_its_last_victim():
    rig = full(*range(2000), pinned=[0])
    rig.store(*range(2000, 2010))
    assert rig.num_scans == 11


def test_discarded_keys_leave_and_unknown_ones_are_ignored():
    rig = full(1, 2, 3)
    rig.policy.discard(keys([2, 9]))
    assert order(rig) == keys([1, 3])


def test_clear_forgets_everything():
    rig = full(1, 2)
    rig.policy.clear()
    assert order(rig) == []
    assert rig.store(1, 2) == []


def test_the_list_of_residents_is_the_callers_own():
    rig = full(1, 2)
    listed = rig.policy.resident()
    rig.policy.clear()
    assert list(listed) == keys([1, 2])


class LruMachine(PolicyMachine):
    policy_type = LruPolicy
    model_type = NaiveLru

    def policy_state(self):
        return tuple(self.policy.resident())


TestLruAgainstItsModel = pytest.mark.stateful(LruMachine.TestCase)
