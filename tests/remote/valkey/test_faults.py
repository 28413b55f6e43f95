"""A real server behind a network that breaks: no wrong byte, no hang, and then hits again."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from remote.valkey.tiers import QUICK, tier_at
from remote.values import read, value_of
from servers.proxy import Proxy
from servers.valkey import ValkeyServer

from kvoffload_async.errors import (
    BlockMissingError,
    CallTimeoutError,
    ConfigError,
    CorruptBlockError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote.client import Value

K = [key_of(number) for number in range(32)]
BLOCK_BYTES = 65536
NO_ANSWER = {CallTimeoutError, TierTimeoutError, TierUnavailableError}


def open_at(url, **options):
    return TierHarness(tier_at(url, **QUICK | options), 64, BLOCK_BYTES, timeout_s=20.0)


@pytest.fixture
def harness(server, proxy):
    with open_at(server.url(proxy.port)) as harness:
        yield harness


def kinds(failures):
    return {type(error) for error in failures.values()}


def recovers(harness, keys):
    """Whether everything loads, once the connections that were broken are gone."""
    return harness.load(keys) == {} and all(harness.holds(k, i) for i, k in enumerate(keys))


def test_latency_costs_time_alone(harness, proxy):
    harness.store(K[:8])
    proxy.set(latency_s=0.02)
    assert recovers(harness, K[:8])


@pytest.mark.parametrize("at", [3, 40_000, 150_000])
@pytest.mark.parametrize("how", ["reset_at", "close_at"])
def test_a_connection_that_ends_in_a_reply_is_tried_again(harness, proxy, at, how):
    harness.store(K[:8])
    proxy.set(**{how: at})
    assert recovers(harness, K[:8])
    assert harness.tier.gauges()["retries"] > 0


def test_a_bit_that_flips_on_the_way_is_seen_and_the_block_is_read_again(harness, proxy):
    harness.store(K[:4])
    proxy.set(flip_at=BLOCK_BYTES + 5000)
    assert recovers(harness, K[:4])
    assert harness.tier.gauges()["read_again"] == 1
    assert harness.tier.gauges()["corrupt"] == 0


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_bits_that_flip_in_the_protocol_do_no_harm(harness, proxy, at):
    harness.store(K[:4])
    proxy.set(flip_at=at)
    failures = harness.load(K[:4])
    assert kinds(failures) <= {CorruptBlockError, *NO_ANSWER}
    assert all(harness.holds(K[i], i) for i in range(4) if i not in failures)
    proxy.set()
    assert recovers(harness, K[:4])


@pytest.mark.slow
def test_a_stalled_server_costs_a_deadline_and_hits_come_back(server, proxy):
    with open_at(server.url(proxy.port), call_timeout_s=0.3, job_timeout_s=1.0) as harness:
        harness.store(K[:4])
        proxy.set(stalls=True)
        assert kinds(harness.load(K[:4])) <= NO_ANSWER
        with pytest.raises(TierUnavailableError):
            harness.load(K[:4])
        with pytest.raises(TierUnavailableError):
            harness.contains(K[:4])
        proxy.set()
        assert recovers(harness, K[:4])
        assert harness.tier.gauges()["timeouts"] > 0
        assert harness.tier.gauges()["bytes_in_flight"] == 0


@pytest.mark.slow
def test_a_stalled_server_does_not_keep_a_tier_from_closing(server, proxy):
    with open_at(server.url(proxy.port), call_timeout_s=0.3, job_timeout_s=1.0) as harness:
        harness.store(K[:4])
        proxy.set(stalls=True)
        harness.load(K[:4])


def test_a_server_that_refuses_connections_is_unavailable_and_then_there_again(harness, proxy):
    harness.store(K[:4])
    proxy.set(refuses=True)
    assert kinds(harness.load(K[:4])) == {TierUnavailableError}
    proxy.set()
    assert recovers(harness, K[:4])


def test_a_server_that_is_not_there_at_the_opening_is_unavailable(server):
    with Proxy(server.port) as proxy:
        proxy.set(refuses=True)
        with pytest.raises(TierUnavailableError):
            open_at(server.url(proxy.port))


def test_a_server_that_was_killed_and_restarted_empty_is_noticed(own_server, caplog):
    with open_at(own_server.url(), positive_cache_ttl_s=60.0) as harness:
        harness.store(K[:4])
        own_server.kill()
        assert kinds(harness.load(K[:4])) == {TierUnavailableError}
        own_server.start()
        assert kinds(harness.load(K[:1])) == {BlockMissingError}
        assert harness.contains(K[:8]) == frozenset()
        assert harness.tier.gauges()["emptied"] == 1
        assert "has lost its contents" in caplog.text
        assert harness.store(K[:4]) == {}
        assert recovers(harness, K[:4])
        assert harness.tier.gauges()["emptied"] == 1


def test_a_server_that_was_killed_and_restarted_with_its_blocks_has_lost_nothing(tmp_path):
    arguments = ("--appendonly", "yes", "--appendfsync", "always")
    with ValkeyServer(tmp_path, *arguments) as server, open_at(server.url()) as harness:
        harness.store(K[:4])
        server.kill()
        with pytest.raises(TierUnavailableError):
            harness.contains(K[:4])
        server.start()
        assert recovers(harness, K[:4])
        assert harness.contains(K[:8]) == set(K[:4])
        assert harness.tier.gauges()["emptied"] == 0


def test_a_server_that_has_no_memory_left_is_full_and_serves_what_it_has(own_server):
    with own_server.client() as client:
        client.config_set("maxmemory", "3mb")
    with open_at(own_server.url()) as harness:
        failures = harness.store(K)
        assert kinds(failures) == {TierFullError}
        stored = [key for i, key in enumerate(K) if i not in failures]
        assert stored
        assert recovers(harness, stored)
        assert harness.contains(K) == set(stored)


@pytest.mark.parametrize("password", ["wr0ng/p@ss", None])
def test_a_wrong_password_is_an_error_of_the_configuration_without_secrets(
    tmp_path, caplog, password
):
    caplog.set_level(logging.DEBUG)
    with ValkeyServer(tmp_path, password="s3cret") as server:  # noqa: S106 - made up
        server.password = password and password.replace("/", "%2F").replace("@", "%40")
        with pytest.raises(ConfigError, match="correct url or credentials") as raised:
            open_at(server.url())
    said = f"{raised.value!r} {raised.value.__cause__} {caplog.text}"
    assert "s3cret" not in said
    assert "wr0ng" not in said


def test_credentials_that_expire_fail_jobs_and_no_secret_is_said(own_server, caplog):
    caplog.set_level(logging.DEBUG)
    with own_server.client() as client:
        client.acl_setuser("kv", enabled=True, passwords=["+s3cret"], keys="*", commands=["+@all"])
    url = f"valkey://kv:s3cret@127.0.0.1:{own_server.port}/0"
    with open_at(url) as harness:
        harness.store(K[:4])
        with own_server.client() as client:
            client.acl_setuser("kv", enabled=False)
            client.client_kill_filter(user="kv")
        failures = harness.load(K[:4])
        assert all(isinstance(error, TierUnavailableError) for error in failures.values())
        said = caplog.text + repr(failures) + repr(harness.tier.gauges())
        assert "s3cret" not in said + harness.tier.describe()


def test_connections_that_have_died_unheard_cost_a_deadline_and_are_replaced(server, proxy):
    with open_at(server.url(proxy.port), call_timeout_s=0.5, job_timeout_s=8.0) as harness:
        harness.store(K[:4])
        proxy.set(drops_open=True)
        assert recovers(harness, K[:4])
        assert harness.tier.gauges()["timeouts"] > 0


@pytest.mark.slow
def test_a_server_that_reads_slowly_costs_the_deadline_and_holds_nothing(server, proxy):
    with open_at(server.url(proxy.port), call_timeout_s=0.5, job_timeout_s=1.0) as harness:
        harness.store(K[:2])
        proxy.set(reader_pause_s=0.1)
        assert kinds(harness.store(K[8:24])) <= NO_ANSWER
        assert harness.tier.gauges()["bytes_in_flight"] == 0
        proxy.set()
        assert recovers(harness, K[:2])
        assert harness.store(K[8:24]) == {}
        assert recovers(harness, K[8:24])


def test_two_hosts_that_write_the_same_keys_at_once_both_succeed(server):
    with open_at(server.url()) as one, open_at(server.url()) as other:
        jobs = []
        for harness in (one, other):
            harness.fill(K, range(len(K)))
            jobs.append(harness.job(K, range(len(K)), is_promotion=False))
        with ThreadPoolExecutor() as pool:
            stores = [
                pool.submit(harness.run, harness.tier.store(job))
                for harness, job in zip((one, other), jobs, strict=True)
            ]
        assert [store.result() for store in stores] == [{}, {}]
        assert recovers(one, K)
        assert recovers(other, K)


def test_blocks_expire_unless_they_are_used(server):
    with open_at(server.url(), ttl_s=60.0) as harness:
        harness.store(K[:2])
        with server.client() as client:
            names = [name for name in client.scan_iter() if name.endswith((K[0], K[1]))]
            assert all(0 < client.pttl(name) <= 60_000 for name in names)
            for name in names:
                client.pexpire(name, 1_000_000)
        harness.run(harness.tier._client.renew(K[:3]))
        with server.client() as client:
            assert all(0 < client.pttl(name) <= 60_000 for name in names)


def test_a_bad_block_is_removed_only_if_it_is_still_the_bad_one(server):
    with open_at(server.url()) as harness:
        harness.store(K[:1])
        with server.client() as client:
            (name,) = [name for name in client.scan_iter() if name.endswith(K[0])]
            client.set(name, b"bad")
        assert kinds(harness.load(K[:1])) == {CorruptBlockError}
        with server.client() as client:
            assert client.get(name) is None
        assert harness.store(K[:1]) == {}
        assert recovers(harness, K[:1])


@pytest.mark.parametrize("value", [b"", b"x" * (8 << 20), ["no", "string"]])
def test_a_value_that_cannot_be_a_block_is_not_read_further_and_is_removed(server, value):
    with open_at(server.url()) as harness:
        harness.store(K[:3])
        name = harness.tier._client._prefix + K[1]
        with server.client() as client:
            client.delete(name)
            client.rpush(name, *value) if isinstance(value, list) else client.set(name, value)
        found = read(harness, K[1], BLOCK_BYTES)
        assert len(found.data) <= BLOCK_BYTES + 1
        failures = harness.load(K[:3])
        assert {i: type(error) for i, error in failures.items()} == {1: CorruptBlockError}
        assert harness.tier.gauges()["removed"] == 1
        assert harness.store(K[:3]) == {}
        assert recovers(harness, K[:3])


def test_a_block_that_has_replaced_a_long_value_is_not_removed(server):
    with open_at(server.url()) as harness:
        client, name = harness.tier._client, harness.tier._client._prefix + K[0]
        harness.store(K[:1])
        with server.client() as plain:
            good = plain.get(name)
            plain.set(name, good + b"more")
            long = read(harness, K[0], len(good))
            plain.set(name, good)
        assert harness.run(client.remove_if(K[0], long, long.sha1())) is False
        assert recovers(harness, K[:1])


def test_calls_wait_where_every_connection_is_in_use(server):
    with open_at(server.url(), connections=1) as harness:
        client = harness.tier._client

        async def check_at_once():
            async with asyncio.TaskGroup() as group:
                for _ in range(64):
                    group.create_task(client.check(None))

        harness.run(check_at_once())
        with server.client() as plain:
            assert len(plain.client_list()) <= 11


def test_a_whole_probe_is_one_call(server):
    with open_at(server.url()) as harness:
        harness.store(K[:20])
        before = harness.tier.gauges()["requests"]
        assert list(harness.run(harness.tier.longest_prefixes([K]))) == [20]
        assert harness.tier.gauges()["requests"] == before + 1


def test_a_value_that_is_another_one_now_is_not_removed(server):
    with open_at(server.url()) as harness:
        harness.store(K[:1])
        client, other = harness.tier._client, Value(memoryview(b"what was there before"))
        assert harness.run(client.remove_if(K[0], other, other.sha1())) is False
        assert recovers(harness, K[:1])


def test_the_first_writer_wins_where_two_write_at_once(server):
    with open_at(server.url()) as harness:
        with server.client() as client:
            client.set(harness.tier._client._prefix + K[0], b"first")
        value = value_of(harness, K[0], 0)
        assert harness.run(harness.tier._client.put(K[:1], [value])) == [None]
        assert bytes(read(harness, K[0], 1 << 20).data) == b"first"
