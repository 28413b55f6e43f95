"""One policy for each tenant, behind the interface of one."""

import pytest

from kvoffload_async.errors import ConfigError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.hd import HdPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.policies.tenants import (
    TenantPolicies,
    TenantQuotas,
    divide,
    tenant_gauges,
)
from kvoffload_async.types import ReqContext, make_offload_key


def k(tenant, name):
    return make_offload_key(f"{tenant}{name}".encode())


def of_first_byte(key):
    return int(chr(key[0]))


def every(slot):
    return True


def two(policy=LruPolicy, quotas=(4, 4)):
    return TenantPolicies(8, [policy(quota) for quota in quotas], of_first_byte)


def test_victims_are_the_tenants_own_however_old_the_others_are():
    policies = two()
    policies.admit([k(0, "a"), k(1, "a"), k(0, "b"), k(1, "b")], [7, 6, 5, 4])
    assert policies.make_room([k(1, "c")], 1, every) == [6]
    assert policies.make_room([k(1, "c"), k(1, "d")], 2, every) is None
    assert [policies.num_blocks(tenant) for tenant in range(2)] == [2, 1]
    assert list(policies.resident()) == [7, 5, 4]


def test_a_skipped_slot_is_proposed_again_once_released():
    policies = two()
    policies.admit([k(0, "a"), k(0, "b")], [3, 2])
    assert policies.make_room([k(0, "c")], 1, lambda slot: slot != 3) == [2]
    assert list(policies.skipped()) == [3]
    assert policies.make_room([k(0, "d")], 1, lambda slot: slot != 3) is None
    policies.released([3])
    assert policies.make_room([k(0, "d")], 1, every) == [3]


@pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy, HdPolicy])
def test_slots_may_change_hands(policy):
    policies = two(policy)
    policies.admit([k(0, "a"), k(1, "a")], [0, 1])
    policies.access([1, 0], [True, True])
    policies.discard([0, 1])
    policies.admit([k(1, "b"), k(0, "b")], [0, 1])
    assert policies.make_room([], 0, every) == []
    assert policies.make_room([k(0, "c")], 1, every) == [1]
    assert not list(policies.violations())
    policies.clear()
    assert not list(policies.resident())


def test_requests_are_told_to_the_policy_of_their_tenant():
    policies = two(HdPolicy)
    assert policies.follows_requests
    keys = [k(1, name) for name in "abcd"]
    policies.admit(keys[:3], [0, 1, 2])
    policies.request_ended(ReqContext("r"), keys, [0, 1, 2, None], [False] * 4)
    assert policies.policies[1].model.clock == 1
    assert policies.policies[0].model.clock == 0
    assert not policies.declines(ReqContext("r"), keys, keys[3:], 1, every)


def test_a_wrong_number_is_a_violation():
    policies = two()
    policies.admit([k(0, "a"), k(1, "a")], [0, 1])
    policies._number_at[0] = 2
    policies._free[1].take(1)
    assert len(list(policies.violations())) == 2


@pytest.mark.parametrize(
    ("capacity", "quotas", "parts"),
    [
        (10, [None], [10]),
        (10, [4, None], [4, 6]),
        (10, [None, 3, None, None], [2, 3, 2, 3]),
        (10, [4, 4], [4, 4]),
        (2, [None, None], [1, 1]),
    ],
)
def test_what_quotas_leave_is_shared_equally(capacity, quotas, parts):
    assert divide(capacity, quotas) == parts


@pytest.mark.parametrize(("capacity", "quotas"), [(10, [10, None]), (10, [11]), (1, [None, None])])
def test_no_part_is_nothing(capacity, quotas):
    with pytest.raises(ValueError, match="quotas"):
        divide(capacity, quotas)


def test_as_many_as_may_go_are_evicted():
    policies = two()
    policies.admit([k(0, name) for name in "abcd"], [0, 1, 2, 3])
    coming = [k(0, name) for name in "wxyz"]
    assert policies.evict_some(0, coming, 4, lambda slot: slot != 1) == [0, 2, 3]
    assert policies.evict_some(0, coming, 4, lambda slot: slot != 1) == []
    assert policies.evict_some(1, coming, 4, every) == []
    assert policies.counts() == [1, 0]


def test_the_fullest_tenant_is_that_with_the_most_of_its_part():
    policies = two()
    policies.admit([k(0, "a"), k(0, "b"), k(1, "a"), k(1, "b"), k(1, "c")], [0, 1, 2, 3, 4])
    assert policies.fullest([2, 4]) == (0, 0)
    assert policies.fullest([1, 1]) == (1, 2)
    assert tenant_gauges(policies, 10) == {"tenant_0_bytes": 20, "tenant_1_bytes": 30}
    assert tenant_gauges(LruPolicy(3), 10) == {}


def test_quotas_in_bytes_become_blocks():
    quotas = TenantQuotas([1000, None], of_first_byte)
    assert quotas.blocks(30, 100, "capacity_bytes") == [10, 20]
    assert quotas.policies(LruPolicy, 30).counts() == [0, 0]
    assert quotas.grouped([k(1, "a"), k(0, "b"), k(1, "c")], [0, 1, 2]) == [[0, 2], [1]]
    with pytest.raises(ConfigError, match="quota_bytes: 1000 holds no block of 1001 bytes"):
        quotas.blocks(30, 1001, "capacity_bytes")
    with pytest.raises(ConfigError, match="capacity_bytes: 10 blocks of 100 bytes"):
        quotas.blocks(10, 100, "capacity_bytes")
