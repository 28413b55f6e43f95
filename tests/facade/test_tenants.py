"""Quotas of tenants: the primary's slots, and the tiers that can divide their capacity."""

import asyncio

import pytest
import torch
from facade.worlds import HIT, MISS
from typer.testing import CliRunner

from kvoffload_async.async_engine.surface import OffloadEngine
from kvoffload_async.cli.app import app
from kvoffload_async.core.primary import Tenancy
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.spec import CPUOffloadingSpec, TieringOffloadingSpec
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
    bucket = {"type": "object", "url": "s3://bucket", "capacity_bytes": "64MiB"}
    assert with_quotas([bucket], quotas) == [{**bucket, "quotas": quotas}]
    assert with_quotas([slab, fs, valkey], equal) == [{**slab, "quotas": equal}, fs, valkey]
    for tier, remedy in (fs, "give it capacity_bytes"), (valkey, "use fs, slab or object"):
        with pytest.raises(ConfigError, match=remedy):
            with_quotas([tier], quotas)


# -- configurations -----------------------------------------------------------------------------

CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "m", "tenants": {"a": {}}}


@pytest.mark.parametrize(
    ("tenants", "text"),
    [
        ({}, "an object of 1 to 254 names of tenants"),
        ({"a": 5}, r"tenants\['a'\]: 5 is not valid"),
        ({"a": {"quota": 5}}, "quota"),
        ({"a": {"quota_bytes": 4095}}, "quota_bytes: 4095 holds no block"),
        ({"a": {"quota_bytes": "64KiB"}}, "cpu_bytes_to_use: .*the quotas leave 0 of 16"),
        ({"a": {"quota_bytes": "1MiB"}}, "cpu_bytes_to_use: .*lower quota_bytes"),
        ({str(number): {} for number in range(17)}, "the quotas leave 16 of 16 to 18 other"),
    ],
)
@pytest.mark.parametrize("spec", [CPUOffloadingSpec, TieringOffloadingSpec])
def test_unusable_tenants_are_refused_before_anything_starts(spec, tenants, text):
    with pytest.raises(ConfigError, match=text):
        spec({**CONFIG, "tenants": tenants})


def test_a_quota_needs_tiers_that_keep_to_it(tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    config = {**CONFIG, "tenants": {"a": {"quota_bytes": 8192}}, "secondary_tiers": [tier]}
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\]: .*give it capacity_bytes"):
        TieringOffloadingSpec(config)
    TieringOffloadingSpec({**config, "secondary_tiers": [{**tier, "capacity_bytes": "1GiB"}]})


# -- real tiers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fs", "slab", "object"])
def test_tenants_find_their_own_blocks_after_a_restart_until_gc_removes_them(tmp_path, kind):
    place = {"root_dir": str(tmp_path)} if kind != "object" else {"url": f"file://{tmp_path}"}
    bound = {"capacity_bytes": "64MiB"} if kind == "slab" else {}
    config = {**CONFIG, "tenants": {"a": {}, "b": {}}, "enable_kv_cache_events": True}
    config["secondary_tiers"] = [{"type": kind, **place, **bound}]
    names = [bytes([number]) * 16 for number in range(4)]

    async def use(storing, asking):
        tensors = {"l": torch.zeros(8, 4096, dtype=torch.uint8)}
        found = []
        async with OffloadEngine(config, kv_caches=tensors) as engine:
            for tenant in storing:
                async with engine.request("r", names, tenant=tenant) as request:
                    await engine.store(request, range(4))
                while engine.driver.has_pending_work():
                    await engine.wait_for_progress(1.0)
            for tenant in asking:
                async with engine.request("r", names, tenant=tenant) as request:
                    found.append(await engine.lookup(request))
        return found

    assert asyncio.run(use(["a"], ["a", "b", None])) == [4, 0, 0]
    assert asyncio.run(use(["b"], ["b", None, "a"])) == [4, 0, 4]
    where = str(tmp_path) if kind != "object" else place["url"]
    for tenant, options in ("c", []), ("a", ["--dry-run"]), ("a", []), ("a", []):
        result = CliRunner().invoke(app, ["store", "gc", where, "--tenant", tenant, *options])
        assert result.exit_code == 0, result.output
    assert asyncio.run(use([], ["a", "b", None])) == [0, 4, 0]
