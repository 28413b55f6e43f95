"""Tenants of one directory: each evicts its own blocks, and keeps to its quota over restarts."""

import pytest
from fs.directories import KIB
from fs.spaces import evicted, rescan, room_for

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.errors import ConfigError
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.types import make_offload_key

CAPACITY = room_for(40)
GRAIN = 4 * KIB


def k(tenant, number):
    return make_offload_key(f"{tenant}{number:031d}".encode())


def keys(tenant, *numbers):
    return [k(tenant, number) for number in range(*numbers)]


def quotas(*blocks):
    in_bytes = [None if count is None else count * GRAIN for count in blocks]
    return TenantQuotas(in_bytes, lambda key: int(chr(key[0])))


def counts(harness):
    gauges = harness.tier.gauges()
    return [gauges[f"tenant_{tenant}_bytes"] // GRAIN for tenant in range(2)]


@pytest.mark.usefixtures("folders_on_disk")
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_flood_of_one_tenant_evicts_no_block_of_another(directory, policy):
    with directory.open(capacity_bytes=CAPACITY, quotas=quotas(10, None), policy=policy) as harness:
        harness.store(keys(1, 10))
        for first in range(0, 1000, 5):
            assert not harness.store(keys(0, first, first + 5))
            assert counts(harness) == [min(first + 5, 10), 10]
        assert directory.blocks() == {*keys(1, 10), *keys(0, 990, 1000)}
        assert evicted(harness).isdisjoint(keys(1, 10))
        assert directory.counted_bytes() == directory.disk_bytes() <= CAPACITY


@pytest.mark.usefixtures("folders_on_disk")
def test_a_tenant_above_a_new_quota_shrinks_as_it_stores(directory):
    with directory.open(capacity_bytes=CAPACITY, quotas=quotas(None, 4)) as harness:
        harness.store(keys(0, 30))
        harness.store(keys(1, 4))
    with directory.open(capacity_bytes=CAPACITY, quotas=quotas(6, None)) as harness:
        rescan(harness)
        assert counts(harness) == [30, 4], "nothing is wiped at once"
        assert not harness.store(keys(0, 30, 33))
        assert counts(harness) == [27, 4]
        for first in range(33, 66, 3):
            assert not harness.store(keys(0, first, first + 3))
        assert counts(harness) == [6, 4]
        assert directory.blocks() == {*keys(0, 60, 66), *keys(1, 4)}
        assert directory.counted_bytes() == directory.disk_bytes()


@pytest.mark.usefixtures("folders_on_disk")
def test_a_tenant_without_room_gets_that_of_one_above_its_quota(directory):
    with directory.open(capacity_bytes=CAPACITY) as harness:
        harness.store(keys(0, 50))
        num_before = len(directory.blocks())
    with directory.open(capacity_bytes=CAPACITY, quotas=quotas(4, 8)) as harness:
        rescan(harness)
        for first in range(0, 40, 4):
            assert not harness.store(keys(1, first, first + 4))
        mine, other = counts(harness)
        assert other == 8
        assert num_before - 8 <= mine <= num_before
        assert directory.counted_bytes() == directory.disk_bytes() <= CAPACITY


@pytest.mark.usefixtures("folders_on_disk")
def test_a_job_of_several_tenants_stores_what_each_may(directory):
    with directory.open(capacity_bytes=CAPACITY, quotas=quotas(2, 8)) as harness:
        mixed = [key for pair in zip(keys(0, 5), keys(1, 5), strict=True) for key in pair]
        assert len(harness.store(mixed)) == 3
        assert counts(harness) == [2, 5]


@pytest.mark.usefixtures("folders_on_disk")
def test_background_eviction_takes_from_the_fullest_tenant(directory):
    with directory.open(capacity_bytes=CAPACITY, quotas=quotas(10, None), high=0.5, low=0.4) as h:
        h.store(keys(1, 12))
        h.store(keys(0, 10))
        h.run(h.tier._housekeeping._trim())
        mine, other = counts(h)
        assert mine < 10
        assert abs(mine / 10 - other / 28) < 0.2


def test_quotas_beyond_the_capacity_are_refused(directory):
    for given in quotas(30, 30), quotas(40, None), quotas(0, None):
        with pytest.raises(ConfigError, match="quota_bytes"):
            directory.open(capacity_bytes=CAPACITY, quotas=given)
    with pytest.raises(ConfigError, match="capacity_bytes"):
        FsSettings.of({"root_dir": str(directory.root), "quotas": quotas(1)}, KVIdentity("m"))
