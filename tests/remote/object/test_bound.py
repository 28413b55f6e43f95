"""`capacity_bytes` of the `object` tier, on a directory and on a real server."""

import asyncio
import dataclasses
import time

import obstore
import pytest
from remote.object.tiers import BLOCK_BYTES, K, loads, names_in, objects, tier_on
from servers.process import at_length

from kvoffload_async.abc.maintenance import GcOptions, MaintenanceControl
from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.errors import (
    CallTimeoutError,
    ConfigError,
    SlowDownError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.maintenance import ObjectMaintenance
from kvoffload_async.tiers.object.tier import ObjectOptions
from kvoffload_async.tiers.remote.client import RefusedError

OBJECT_BYTES = BLOCK_BYTES + 128


@pytest.mark.parametrize(
    ("capacity", "text"),
    [("1KiB", "room for 0 blocks"), ("1000TiB", "give room for 1 to")],
)
def test_a_bound_that_cannot_work_is_refused(capacity, text):
    identity = KVIdentity(model="m", block_bytes=BLOCK_BYTES)
    options = {"url": "file:///nowhere", "capacity_bytes": capacity}
    with pytest.raises(ConfigError, match=rf"capacity_bytes: \d+ .*{text}"):
        ObjectOptions.of(options, identity)
    assert ObjectOptions.of(options | {"capacity_bytes": "1MiB"}, identity)
    assert ObjectOptions.of(options, KVIdentity(model="m"))  # checked when it is opened


@pytest.fixture
def bounded(connection):
    """Make hosts on a directory that have short periods."""
    made = []

    def make(num_blocks, **options):
        tier = tier_on(connection, capacity_bytes=num_blocks * OBJECT_BYTES, **options)
        tier.period_s = 0.05
        made.append(TierHarness(tier, 64, BLOCK_BYTES))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def until(harness, is_done):
    """Run the tier until something holds."""
    for _ in range(1000):
        if is_done():
            return
        harness.run(asyncio.sleep(0.02))
    pytest.fail("it did not happen")


def store_all(harness, keys):
    """Store blocks, each again while it is declined."""
    for key in keys:
        until(harness, lambda key=key: not harness.store([key]))


def test_blocks_used_longest_ago_are_deleted_and_announced(bounded, connection):
    host = bounded(16)
    figures = host.tier.gauges
    store_all(host, K[:4])
    for key in K[4:48]:
        assert loads(host, K[:1])
        store_all(host, [key])
    until(host, lambda: figures()["used_bytes"] == len(objects(connection)) * OBJECT_BYTES)
    assert figures()["used_bytes"] <= figures()["capacity_bytes"] == 16 * OBJECT_BYTES
    assert figures()["leads"]
    assert loads(host, K[:1])
    assert not host.run(host.tier.contains(K[1:24]))
    assert figures()["bound_deletions"] >= 32
    evicted = {key for event in host.events for key in event.keys}
    assert evicted >= set(K[1:24])


def test_blocks_beyond_the_grant_are_declined_and_counted_and_not_written(bounded, connection):
    host = bounded(8)
    failures = host.store(K[:32])
    assert set(map(type, failures.values())) == {TierFullError}
    assert len(objects(connection)) == 32 - len(failures) <= 8
    assert host.tier.gauges()["declined_blocks"] == len(failures)


def of_first_byte(key):
    return key[0] % 2


@pytest.mark.parametrize(
    ("quotas", "text"),
    [
        ([BLOCK_BYTES, None], "quota_bytes: 4096 holds no block of"),
        ([64 * OBJECT_BYTES, None], "lower quota_bytes of a tenant"),
        ([None] * 33, "tenants: there are 33"),
    ],
)
def test_quotas_that_cannot_be_kept_are_refused(connection, quotas, text):
    options = {"capacity_bytes": 64 * OBJECT_BYTES, "quotas": TenantQuotas(quotas, of_first_byte)}
    with pytest.raises(ConfigError, match=text):
        TierHarness(tier_on(connection, **options), 64, BLOCK_BYTES)


def test_a_tenant_beyond_its_quota_loses_its_own_blocks_alone(bounded):
    quotas = TenantQuotas([8 * OBJECT_BYTES, None], of_first_byte)
    host = bounded(32, quotas=quotas)
    first, other = ([key for key in K if of_first_byte(key) == tenant] for tenant in (0, 1))
    store_all(host, other[:8])
    written = [account.record().written_bytes for account in host.tier._bound.accounts]
    assert written == [0, 8 * OBJECT_BYTES]
    store_all(host, first[:24])
    figures = host.tier.gauges
    until(host, lambda: 0 < figures()["tenant_0_bytes"] <= 8 * OBJECT_BYTES)
    assert host.run(host.tier.contains(other[:8])) == set(other[:8])
    assert len(host.run(host.tier.contains(first))) <= 8
    assert figures()["tenant_1_bytes"] == 8 * OBJECT_BYTES


@pytest.mark.parametrize(
    ("error", "is_written"),
    [
        (CallTimeoutError("slow"), True),
        (TierUnavailableError("reset"), True),
        (RefusedError("403"), False),
        (SlowDownError("503"), False),
        (TierFullError("507"), False),
    ],
)
def test_a_store_whose_end_is_unknown_takes_its_part_of_the_grant(bounded, error, is_written):
    host = bounded(16, max_retries=0, call_timeout_s=0.5, job_timeout_s=0.5)
    store_all(host, K[:1])
    account = host.tier._bound.accounts[0]

    async def put(keys, values):
        raise error

    host.tier._client.put = put
    before = account.record().written_bytes
    assert host.store(K[1:2])
    assert account.record().written_bytes - before == is_written * OBJECT_BYTES


def test_a_bound_that_only_a_block_without_its_header_fits_into_is_refused(connection):
    tier = tier_on(connection, capacity_bytes=BLOCK_BYTES)
    with pytest.raises(ConfigError, match="room for 0 blocks"):
        TierHarness(tier, 64, BLOCK_BYTES)


def test_objects_of_others_are_counted_and_never_deleted(bounded, connection):
    store = connection.open()
    host = bounded(8)
    (record, *_) = [name for name in names_in(connection) if "/records/" in name]
    namespace = record.partition("/")[0]
    obstore.put(store, f"{namespace}/000/theirs", b"x" * 100)
    store_all(host, K[:32])
    until(host, lambda: host.tier.gauges()["foreign_objects"] == 1)
    assert f"{namespace}/000/theirs" in names_in(connection)


def test_records_are_no_blocks_and_gc_removes_those_that_were_left_behind(bounded, connection):
    host = bounded(8)
    store_all(host, K[:4])
    assert sorted(host.run(host.tier.list_keys(None, 100))[0]) == sorted(K[:4])
    (name, *_) = objects(connection)
    namespace = name.partition("/")[0]
    obstore.put(connection.open(), f"{namespace}/records/0123456789abcdef-1", b"x")

    async def clean_up():
        (store,) = await ObjectMaintenance.find(connection.url)
        options = GcOptions(dry_run=False, older_than_s=0.0, keep_bytes=2 * OBJECT_BYTES)
        return [found async for found in store.gc(options, MaintenanceControl())]

    *removals, summary = asyncio.run(clean_up())
    assert summary.figures["unknown_files"] >= 1
    assert len(removals) == summary.figures["unknown_files"] + summary.figures["surplus_objects"]
    assert len(objects(connection)) == 4 - summary.figures["surplus_objects"]


@pytest.mark.servers
@at_length
def test_two_hosts_on_a_server_stay_within_the_bound_and_keep_what_is_used(server, prefix):
    bound = 64 * OBJECT_BYTES
    connection = dataclasses.replace(server.connection(prefix), capacity_bytes=bound)
    hot, sizes = K[:8], []
    with host_on(connection) as one, host_on(connection) as two:
        hosts = one, two
        store_all(one, hot)
        until_s = time.monotonic() + 30
        number = 1000
        while time.monotonic() < until_s:
            for host in hosts:
                host.store([key_of(number)], [0])
                number += 1
            if number % 8 == 0:
                assert all(loads(host, hot) for host in hosts)
                sizes.append(len(objects(connection)) * OBJECT_BYTES)
        figures = [host.tier.gauges() for host in hosts]
        assert max(sizes) <= 1.05 * bound
        assert sizes[-1] > 0.5 * bound
        assert sum(found["bound_deletions"] for found in figures) > 100
        assert sum(found["leads"] for found in figures) == 1
        assert max(found["bound_failures"] for found in figures) == 0


def host_on(connection):
    """A host with a period of a second, the least that a server's times can tell apart."""
    tier = tier_on(connection)
    tier.period_s = 1.0
    return TierHarness(tier, 64, BLOCK_BYTES)
