"""Quotas of tenants: the primary's slots, and the tiers that can divide their capacity."""

import pytest
from facade.worlds import HIT, MISS

from kvoffload_async.core.primary import Tenancy
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.tier_factory import check_tiers, with_quotas
from kvoffload_async.observe.prometheus import METRICS
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.statistics import TenantStatistics
from kvoffload_async.types import ReqContext, make_offload_key


def k(tenant, number):
    return make_offload_key(f"{tenant}{number:031d}".encode())


def of_first_byte(key):
    return int(chr(key[0]))


@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_a_tenant_keeps_to_its_slots_of_the_primary(policy):
    manager = CPUPrimaryTierOffloadingManager(
        8, cache_policy=policy, tenancy=Tenancy([3, 5], of_first_byte, "ab")
    )
    for tenant, count in (1, 4), (0, 300):
        for number in range(count):
            ctx = ReqContext(f"{tenant}.{number}")
            manager.on_new_request(ctx)
            manager.prepare_store([k(tenant, number)], ctx)
            manager.complete_store([k(tenant, number)], ctx)
            manager.on_request_finished(ctx)
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    assert [manager.lookup(k(1, number), ctx) for number in range(4)] == [HIT] * 4
    assert manager.lookup(k(0, 0), ctx) is MISS
    stats = manager.stats()
    assert stats.primary.tenants == {
        "a": TenantStatistics(3, 3, 300, 0, 297),
        "b": TenantStatistics(5, 4, 4, 0, 0),
    }
    read = {each.name.removeprefix("kvoffload_tenant_"): each.read for each in METRICS}
    assert list(read["used_slots"](stats)) == [(("a",), 3), (("b",), 4)]
    assert list(read["evicted_blocks_total"](stats)) == [(("a",), 297), (("b",), 0)]


def test_only_tiers_that_divide_their_capacity_take_quotas(tmp_path):
    quotas, equal = (TenantQuotas([quota, None], of_first_byte) for quota in (1 << 20, None))
    slab = {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"}
    fs = {"type": "fs", "root_dir": str(tmp_path)}
    valkey = {"type": "valkey", "url": "redis://localhost"}
    assert with_quotas([slab], quotas) == [{**slab, "quotas": quotas}]
    check_tiers(with_quotas([{**slab, "model": "m"}], quotas))
    assert with_quotas([slab, fs, valkey], equal) == [{**slab, "quotas": equal}, fs, valkey]
    for tier, remedy in (fs, "give it capacity_bytes"), (valkey, "use fs or slab"):
        with pytest.raises(ConfigError, match=remedy):
            with_quotas([tier], quotas)
