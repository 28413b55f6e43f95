"""A primary is demoted and keeps its connections, while its address leads to the new one."""

import asyncio
import itertools
import random
import threading

import pytest
import torch
from remote.valkey.tiers import QUICK, calls_of, documented, tier_at
from servers.hostile_valkey import HostileServer
from servers.proxy import Proxy
from servers.valkey import ValkeyPair

from kvoffload_async import OffloadEngine
from kvoffload_async.errors import BlockMissingError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(32)]
BLOCK_BYTES = 4096


@pytest.fixture
def pair(tmp_path):
    with ValkeyPair(tmp_path) as pair:
        yield pair


def open_at(url, **options):
    return TierHarness(tier_at(url, **QUICK | options), 64, BLOCK_BYTES, timeout_s=20.0)


def has(server, keys):
    with server.client() as client:
        names = client.keys("*")
    return all(any(name.endswith(key) for name in names) for key in keys)


def test_blocks_are_stored_on_the_new_primary_though_the_old_one_keeps_its_connections(pair):
    with open_at(pair.url) as harness:
        assert harness.store(K[:4]) == {}
        pair.wait_for_replica()
        pair.fail_over()
        before = pair.proxy.connections
        assert harness.store(K[4:8]) == {}
        assert has(pair.primary, K[4:8])
        assert pair.proxy.connections == before + 1


def test_loads_follow_to_the_new_primary(pair):
    with open_at(pair.url) as harness:
        assert harness.store(K[:4]) == {}
        pair.wait_for_replica()
        pair.fail_over()
        harness.store(K[4:8])
        before = calls_of(pair.replica, "getrange")
        assert harness.load(K[4:8]) == {}
        assert all(harness.holds(key, i) for i, key in enumerate(K[4:8]))
        assert calls_of(pair.replica, "getrange") == before


def test_a_server_that_stays_read_only_costs_a_connection_a_try(pair):
    with open_at(pair.url, max_retries=2) as harness:
        harness.store(K[:4])
        pair.demote(pair.primary, pair.replica)
        with pair.replica.client() as client:
            client.replicaof("NO", "ONE")
        before = pair.proxy.connections
        failures = harness.store(K[4:8])
        assert "READONLY" in str(failures[0])
        assert pair.proxy.connections <= before + 2  # the first try had one
        for tries in range(1, 6):  # each only checks the server
            with pytest.raises(TierUnavailableError, match="READONLY"):
                harness.store(K[4:8])
            assert pair.proxy.connections <= before + 2 + tries


async def offer(engine, device, number):
    """Compute a block of a request, and have it stored."""
    async with engine.request(f"r{number}", [number.to_bytes(32)]) as request:
        found = await engine.lookup(request)
        device["layer"][0] = number % 256
        await engine.store(request, range(found, 1), found)
        assert await request.released()
    await engine.quiesce(20.0)


def test_the_breaker_limits_how_often_a_read_only_server_is_connected_to(pair):
    tier = {"type": "valkey", "url": pair.url, "max_retries": 0, "positive_cache_ttl_s": 0}
    config = {"cpu_bytes_to_use": "1MiB", "model": "org/model", "secondary_tiers": [tier]}
    config |= {"breaker_retry_s": 3600, "write_back": "drop"}
    device = {"layer": torch.zeros(1, BLOCK_BYTES, dtype=torch.uint8)}

    async def run():
        numbers = itertools.count()
        async with OffloadEngine(config, kv_caches=device) as engine:
            pair.demote(pair.primary, pair.replica)
            before = pair.proxy.connections
            while engine.stats().tiers[0].breakers["store"] != "open":
                await offer(engine, device, next(numbers))
                await asyncio.sleep(0.01)  # until its job has ended
            for _ in range(40):
                await offer(engine, device, next(numbers))
            # Three faults open a breaker; a load or a look-up may check the server, too.
            assert pair.proxy.connections <= before + 2 * 3

    asyncio.run(run())


def test_a_tier_does_not_open_on_a_replica(pair):
    with pytest.raises(TierUnavailableError, match="READONLY"):
        open_at(pair.replica.url())


def test_a_user_who_may_not_write_reads(server):
    with open_at(server.url()) as harness:
        harness.store(K[:4])
    rights = [right for right in documented() if right != "+set"]
    with server.client() as client:
        client.acl_setuser(
            "kv", reset=True, enabled=True, nopass=True, keys="kvo:*", commands=rights
        )
    with open_at(server.url().replace("valkey://", "valkey://kv:any@")) as harness:
        assert harness.contains(K[:8]) == set(K[:4])
        assert harness.load(K[:4]) == {}


def test_a_replica_that_has_lost_its_primary_is_left(pair):
    with open_at(pair.url, max_retries=0) as harness:
        harness.store(K[:4])
        with pair.primary.client() as client:
            client.config_set("replica-serve-stale-data", "no")
            client.replicaof("127.0.0.1", 1)
        pair.proxy.lead_to(pair.replica.port)
        with pytest.raises(TierUnavailableError, match="MASTERDOWN"):
            harness.contains(K[:4])
        assert harness.contains(K[:4]) == set(K[:4])


async def check_at_once(harness):
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(harness.tier._client.check(None))


@pytest.mark.parametrize("code", ["READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN"])
def test_a_server_that_is_not_fit_to_serve_is_left(server, code):
    with (
        HostileServer(b"-%b it says\r\n" % code.encode() * 2) as unfit,
        Proxy(unfit.port) as proxy,
        open_at(server.url(proxy.port), max_retries=0) as harness,
    ):
        harness.run(check_at_once(harness))  # on as many connections
        unfit.is_hostile = True
        proxy.lead_to(server.port)
        with pytest.raises(TierUnavailableError, match="it says"):
            harness.contains(K[:1])
        harness.run(check_at_once(harness))
        assert harness.contains(K[:1]) == frozenset()


def test_an_answer_about_one_block_leaves_the_connection_alone(server, proxy):
    with open_at(server.url(proxy.port)) as harness:
        harness.store(K[:4])
        name = harness.tier._client._prefix + K[1]
        with server.client() as client:
            client.delete(name)
            client.rpush(name, "no string")
        before = proxy.connections
        assert list(harness.load(K[:4])) == [1]
        assert proxy.connections == before


class Load:
    """Stores blocks and loads them again, in a thread, until told to stop."""

    def __init__(self, harness, numbers):
        self._harness = harness
        self._numbers = numbers
        self._ends = threading.Event()
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self.rounds = self.stored = 0
        self.wrong, self.errors = [], []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()

    def wait(self, count, rounds):
        """Wait for more of a count; AssertionError where that takes too long."""
        with self._moved:
            goal = getattr(self, count) + rounds
            assert self._moved.wait_for(lambda: getattr(self, count) >= goal, 60.0), self.errors[
                -3:
            ]

    def _run(self):
        while not self._ends.is_set():
            keys = [key_of(next(self._numbers)) for _ in range(4)]
            failed = self._do(self._harness.store, keys)
            stored = [key for i, key in enumerate(keys) if i not in failed]
            missed = self._do(self._harness.load, keys)
            found = [i for i in range(len(keys)) if i not in missed]
            self.wrong += [keys[i] for i in found if not self._harness.holds(keys[i], i)]
            with self._moved:
                self.rounds += 1
                self.stored += len(stored) == len(keys)
                self._moved.notify_all()

    def _do(self, call, keys):
        try:
            failures = call(keys)
        except TierUnavailableError as error:
            failures = dict.fromkeys(range(len(keys)), error)
        lasting = [e for e in failures.values() if not isinstance(e, BlockMissingError)]
        self.errors += lasting
        assert all(isinstance(error, TierUnavailableError) for error in lasting), lasting
        return failures


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.sweep] * (n > 0)) for n in range(8)]
)
def test_failovers_at_drawn_moments_serve_no_wrong_byte_and_storing_resumes(pair, seed):
    draw = random.Random(seed)
    failovers = 6
    with open_at(pair.url) as harness:
        with Load(harness, itertools.count(1000)) as load:
            for _ in range(failovers):
                pair.wait_for_replica()
                load.wait("rounds", draw.randrange(1, 8))
                first, *rest = pair.steps()
                first()
                for step in draw.sample(rest, len(rest)):
                    load.wait("rounds", draw.randrange(3))
                    step()
                load.wait("stored", 2)
            new_connections = pair.proxy.connections
        assert load.wrong == []
        keys = K[:4]
        assert harness.store(keys) == {}
        assert has(pair.primary, keys)
        assert new_connections <= 2 + failovers * 3 + len(load.errors)
