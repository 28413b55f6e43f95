"""Tenants of one store: each evicts its own blocks, and keeps to its quota over restarts."""

import pytest
from slab.stores import BLOCK, FIXED

from kvoffload_async.errors import ConfigError, TierFullError
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.types import make_offload_key


def k(tenant, number):
    return make_offload_key(f"{tenant}{number:031d}".encode())


def keys(tenant, *numbers):
    return [k(tenant, number) for number in range(*numbers)]


def quotas(*blocks):
    in_bytes = [None if count is None else count * BLOCK for count in blocks]
    return TenantQuotas(in_bytes, lambda key: int(chr(key[0])))


CAPACITY = FIXED + 40 * (BLOCK + 700)


def counts(harness):
    gauges = harness.tier.gauges()
    return [gauges[f"tenant_{tenant}_bytes"] // BLOCK for tenant in range(2)]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_flood_of_one_tenant_evicts_no_block_of_another(slab_store, policy):
    with slab_store.open(
        capacity_bytes=CAPACITY, quotas=quotas(10, None), policy=policy
    ) as harness:
        harness.store(keys(1, 10))
        for first in range(0, 1000, 5):
            assert not harness.store(keys(0, first, first + 5))
            assert counts(harness) == [min(first + 5, 10), 10]
        assert harness.contains(keys(1, 10)) == set(keys(1, 10))
        assert harness.contains(keys(0, 1000)) == set(keys(0, 990, 1000))
        assert not list(harness.tier._store.catalog.violations())


def test_a_tenant_above_a_new_quota_shrinks_as_it_stores(slab_store):
    with slab_store.open(capacity_bytes=CAPACITY, quotas=quotas(None, 4)) as harness:
        harness.store(keys(0, 30))
        harness.store(keys(1, 4))
    with slab_store.open(capacity_bytes=CAPACITY, quotas=quotas(6, None)) as harness:
        assert harness.announced() == {*keys(0, 30), *keys(1, 4)}, "nothing is wiped at once"
        assert not harness.store(keys(0, 30, 33))
        assert counts(harness) == [27, 4]
        for first in range(33, 60, 3):
            assert not harness.store(keys(0, first, first + 3))
        assert counts(harness) == [6, 4]
        assert harness.contains(keys(0, 60)) == set(keys(0, 54, 60))


def test_a_tenant_without_room_gets_that_of_one_above_its_quota(slab_store):
    with slab_store.open(capacity_bytes=CAPACITY) as harness:
        harness.store(keys(0, 60))
        num_before = len(harness.contains(keys(0, 60)))
    with slab_store.open(capacity_bytes=CAPACITY, quotas=quotas(4, 8)) as harness:
        for first in range(0, 40, 4):
            assert not harness.store(keys(1, first, first + 4))
        assert counts(harness) == [num_before - 8, 8]
        assert not list(harness.tier._store.catalog.violations())


def test_a_job_of_several_tenants_stores_what_each_may(slab_store):
    with slab_store.open(capacity_bytes=CAPACITY, quotas=quotas(2, 8)) as harness:
        mixed = [key for pair in zip(keys(0, 5), keys(1, 5), strict=True) for key in pair]
        failures = harness.store(mixed)
        assert [*failures] == [4, 6, 8]
        assert all(isinstance(error, TierFullError) for error in failures.values())
        assert counts(harness) == [2, 5]


def test_quotas_beyond_the_capacity_are_refused(slab_store):
    for given in quotas(300, 300), quotas(500, None), quotas(0, None):
        with pytest.raises(ConfigError, match="quota_bytes"):
            slab_store.open(capacity_bytes=CAPACITY, quotas=given)
