"""The label beside the blocks: whatever becomes of it, the tier works and says nothing wrong."""

import pytest
from remote.valkey.tiers import QUICK, tier_at

from kvoffload_async.errors import BlockMissingError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(32)]
LABELS = {"another type": ["no", "string"], "long": b"x" * (64 << 20), "short": b"", "gone": None}


def open_at(server, **options):
    return TierHarness(tier_at(server.url(), **QUICK | options), 64, timeout_s=20.0)


def put_label(server, name, value):
    with server.client() as client:
        client.delete(name)
        if isinstance(value, list):
            client.rpush(name, *value)
        elif value is not None:
            client.set(name, value)


def sent_bytes(server):
    with server.client() as client:
        return client.info("stats")["total_net_output_bytes"]


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_a_label_that_is_none_is_replaced_and_nothing_is_lost(server, label, caplog):
    with open_at(server, positive_cache_ttl_s=60.0) as harness:
        assert harness.store(K[:8]) == {}
        name = harness.tier._client._label_name
        put_label(server, name, label)
        before = sent_bytes(server)
        assert harness.contains(K[:10]) == set(K[:8])
        assert harness.contains(K[8:]) == frozenset()
        assert sent_bytes(server) - before < 1 << 20
        assert harness.load(K[:8]) == {}
        assert harness.tier.gauges()["emptied"] == harness.tier.gauges()["failed"] == 0
        assert "lost its contents" not in caplog.text
        with server.client() as client:
            assert len(client.get(name)) == 16


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_a_tier_is_opened_whatever_the_label_is(server, label):
    with open_at(server) as harness:
        harness.store(K[:4])
        name = harness.tier._client._label_name
    put_label(server, name, label)
    before = sent_bytes(server)
    with open_at(server) as harness:
        assert harness.contains(K) == set(K[:4])
        assert harness.load(K[:4]) == {}
    assert sent_bytes(server) - before < 1 << 20


def test_contents_that_are_lost_are_noticed_by_every_host(server):
    with open_at(server) as one, open_at(server) as other:
        one.store(K[:4])
        assert other.load(K[:4]) == {}
        with server.client() as client:
            client.flushall()
        assert isinstance(one.load(K[:1])[0], BlockMissingError)
        assert one.contains(K) == other.contains(K) == frozenset()
        assert one.tier.gauges()["emptied"] == other.tier.gauges()["emptied"] == 1


def test_a_server_without_memory_for_a_label_is_asked_for_it_once(own_server):
    with open_at(own_server) as harness:
        harness.store(K[:2])
        with own_server.client() as client:
            client.delete(harness.tier._client._label_name)
            client.config_set("maxmemory", "1")
        assert harness.contains(K) == set(K[:2])
        with own_server.client() as client:
            before = client.info("commandstats")["cmdstat_set"]["calls"]
        for _ in range(4):
            assert harness.contains(K) == set(K[:2])
        with own_server.client() as client:
            assert client.info("commandstats")["cmdstat_set"]["calls"] == before
        assert harness.tier.gauges()["emptied"] == 0
