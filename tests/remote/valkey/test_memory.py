"""`maxmemory` and `maxmemory-policy` of a server, read when a tier opens."""

import logging

import pytest
from remote.valkey.test_labels import open_at

from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(2)]
LOGGER = "kvoffload_async.tiers.valkey.tier"


def texts(caplog):
    return [r.message.partition(": ")[2] for r in caplog.records if r.name == LOGGER]


@pytest.mark.parametrize(
    ("policy", "ttl_s", "evicts"),
    [
        ("allkeys-lru", None, True),
        ("noeviction", None, False),
        ("volatile-lru", None, False),
        ("volatile-lru", 3600.0, True),
    ],
)
def test_a_bound_is_shown_and_a_server_that_does_not_evict_is_warned_of(
    own_server, caplog, policy, ttl_s, evicts
):
    caplog.set_level(logging.INFO)
    with own_server.client() as client:
        client.config_set("maxmemory", "64mb")
        client.config_set("maxmemory-policy", policy)
    with open_at(own_server, ttl_s=ttl_s) as harness:
        figures = harness.tier.gauges()
        assert (figures["capacity_bytes"], figures["evicts"]) == (64 << 20, evicts)
    warning = f"maxmemory-policy is {policy}: set allkeys-lru"
    assert [warning in said for said in texts(caplog)] == [True] * (not evicts)


def test_a_server_without_a_bound_is_mentioned_and_has_no_capacity(server, caplog):
    caplog.set_level(logging.INFO)
    with open_at(server) as harness:
        assert "capacity_bytes" not in harness.tier.gauges()
    assert any("it has no maxmemory" in said for said in texts(caplog))


def test_a_user_who_may_not_read_it_uses_the_server_all_the_same(own_server, caplog):
    caplog.set_level(logging.INFO)
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-info")
    with open_at(own_server) as harness:
        assert harness.store(K) == {}
        assert "capacity_bytes" not in harness.tier.gauges()
    assert texts(caplog) == []
