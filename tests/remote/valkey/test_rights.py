"""What a user of the server must be allowed, and what becomes of a tier that may do less."""

import pytest
from remote.valkey.tiers import QUICK, damage, documented, tier_at
from remote.values import value_of

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(32)]


def open_as(server, rights, **options):
    with server.client() as client:
        client.acl_setuser(
            "kv", reset=True, enabled=True, nopass=True, keys="kvo:*", commands=rights
        )
    url = f"valkey://kv:any@127.0.0.1:{server.port}/0"
    return TierHarness(tier_at(url, **QUICK | options), 64, timeout_s=20.0)


def spoil(server, key, prefix, value):
    with server.client() as client:
        client.delete(prefix + key)
        client.rpush(prefix + key, *value) if isinstance(value, list) else client.set(
            prefix + key, value
        )


def test_the_rights_that_the_page_names_are_enough_for_everything(server):
    with open_as(server, documented(), ttl_s=60.0) as harness:
        assert harness.store(K) == {}
        assert harness.load(K) == {}
        harness.run(harness.tier._client.renew(K))
        assert damage(server, K[1])
        assert list(harness.load(K)) == [1]
        assert harness.contains(K) == set(K) - {K[1]}
        assert harness.tier.gauges()["removed"] == 1
        assert harness.tier.gauges()["failed"] == 0


@pytest.mark.parametrize("missing", [{"+eval"}, {"+del"}, {"+eval", "+del"}])
@pytest.mark.parametrize("value", [b"bad", b"x" * (1 << 20), ["no", "string"]])
def test_a_bad_block_that_may_not_be_removed_is_overwritten_by_the_next_store(
    server, missing, value
):
    rights = [right for right in documented() if right not in missing]
    with open_as(server, rights) as harness:
        assert harness.store(K[:3]) == {}
        spoil(server, K[1], harness.tier._client._prefix, value)
        failures = harness.load(K[:3])
        assert {i: type(error) for i, error in failures.items()} == {1: CorruptBlockError}
        assert harness.contains(K[:3]) == {K[0], K[2]}
        assert harness.tier.gauges()["unremoved"] == 1
        assert harness.store(K[:3]) == {}
        assert harness.load(K[:3]) == {}
        assert all(harness.holds(key, i) for i, key in enumerate(K[:3]))
        assert harness.contains(K[:3]) == set(K[:3])


def test_blocks_that_may_not_be_removed_are_warned_of_once_however_many(server, caplog):
    with open_as(server, [right for right in documented() if right != "+eval"]) as harness:
        harness.store(K)
        for key in K:
            assert damage(server, key)
        assert len(harness.load(K)) == len(K)
        assert harness.tier.gauges()["unremoved"] == len(K)
        assert caplog.text.count(" was not removed") == 1
        assert harness.store(K) == {}
        assert harness.load(K) == {}


def test_a_good_block_is_not_overwritten(server):
    with open_as(server, [right for right in documented() if right != "+eval"]) as harness:
        harness.store(K[:2])
        damage(server, K[0])
        harness.load(K[:2])
        name = harness.tier._client._prefix + K[1]
        with server.client() as client:
            client.set(name, b"first")
        value = value_of(harness, K[1], 1)
        harness.run(harness.tier._client.put(K[1:2], [value]))
        with server.client() as client:
            assert client.get(name) == b"first"
