"""The `valkey` tier on a cluster: three nodes that share the keys."""

from contextlib import ExitStack, contextmanager

import pytest
import redis
from redis.crc import key_slot
from remote.valkey.tiers import QUICK, calls_of, documented, tier_at
from servers.process import free_ports, wait_until
from servers.valkey import ValkeyServer

from kvoffload_async.errors import (
    CorruptBlockError,
    ShardUnavailableError,
    TierError,
    TierUnavailableError,
)
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote.client import Value

pytestmark = [pytest.mark.slow, pytest.mark.measured]

K = [key_of(number) for number in range(32)]
SLOTS = 16384


def node_of(folder, bus_port):
    home = folder / str(bus_port)
    home.mkdir()
    arguments = ("--cluster-enabled", "yes", "--cluster-port", bus_port)
    arguments += ("--cluster-require-full-coverage", "no")
    arguments += ("--appendonly", "yes", "--appendfsync", "always")
    return ValkeyServer(home, *arguments)


@contextmanager
def run_cluster(folder):
    """Run three nodes that serve what they have while another is down."""
    with ExitStack() as stack:
        bus_ports = free_ports(3)
        nodes = [stack.enter_context(node_of(folder, bus_port)) for bus_port in bus_ports]
        clients = [stack.enter_context(node.client()) for node in nodes]
        for number, client in enumerate(clients):
            slots = (SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1)
            client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node, bus_port in list(zip(nodes, bus_ports, strict=True))[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus_port)
        wait_until(lambda: all(is_in_order(node) for node in nodes))
        yield nodes


def is_in_order(node):
    with node.client() as client:
        try:
            return client.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
        except redis.ConnectionError:
            return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with run_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def own_cluster(tmp_path):
    """A cluster whose nodes a test may kill."""
    with run_cluster(tmp_path) as nodes:
        yield nodes


def number_of(key, harness):
    """Return which node of a cluster has a key."""
    return key_slot(harness.tier._client._prefix + key) * 3 // SLOTS


def test_blocks_are_spread_over_the_nodes_and_load_from_all(cluster):
    tier = tier_at(cluster[0].url(), is_cluster=True, ttl_s=60.0, **QUICK)
    with TierHarness(tier, 64) as harness:
        assert harness.store(K) == {}
        sizes = []
        for node in cluster:
            with node.client() as client:
                sizes.append(client.dbsize())
        assert min(sizes) > 0
        assert harness.contains(K) == set(K)
        assert list(harness.run(tier.longest_prefixes([[*K, key_of(99)]]))) == [32]
        assert harness.load(K) == {}
        assert all(harness.holds(key, i) for i, key in enumerate(K))
        harness.run(tier._client.renew(K))


def test_a_bad_block_is_removed_from_its_node(cluster):
    tier = tier_at(cluster[0].url(), is_cluster=True, **QUICK)
    with TierHarness(tier, 64) as harness:
        harness.store(K[:3])
        name = tier._client._prefix + K[1]
        with redis.RedisCluster("127.0.0.1", cluster[0].port) as client:
            client.set(name, b"bad")
        failures = harness.load(K[:3])
        assert {i: type(error) for i, error in failures.items()} == {1: CorruptBlockError}
        other = Value(memoryview(b"x"))
        assert harness.run(tier._client.remove_if(K[0], other, other.sha1())) is False
        assert harness.contains(K[:3]) == {K[0], K[2]}


def test_the_rights_that_the_page_names_are_enough_for_a_cluster(cluster):
    for node in cluster:
        with node.client() as client:
            rights = [*documented(), "+ping", "+asking", "+cluster|slots"]
            client.acl_setuser(
                "kv", enabled=True, nopass=True, reset=True, keys="kvo:*", commands=rights
            )
    url = cluster[0].url().replace("valkey://", "valkey://kv:any@")
    with TierHarness(tier_at(url, is_cluster=True, ttl_s=60.0, **QUICK), 64) as harness:
        assert harness.store(K) == {}
        assert harness.contains(K) == set(K)
        assert harness.load(K) == {}
        harness.run(harness.tier._client.renew(K))
        assert harness.tier.gauges()["failed"] == 0


async def list_all(tier, count):
    listed, cursor = await tier.list_keys(None, count)
    while cursor is not None:
        keys, cursor = await tier.list_keys(cursor, count)
        listed += keys
    return listed


def test_a_listing_has_the_blocks_of_all_nodes(cluster):
    with TierHarness(tier_at(cluster[0].url(), is_cluster=True, **QUICK), 64) as harness:
        assert harness.store(K) == {}
        assert set(harness.run(list_all(harness.tier, 5))) == set(K)


def test_a_listing_fails_if_slots_move_or_a_node_is_down(own_cluster):
    options = {"is_cluster": True} | QUICK | {"call_timeout_s": 0.5}
    with TierHarness(tier_at(own_cluster[0].url(), **options), 64) as harness:
        assert harness.store(K) == {}
        _, cursor = harness.run(harness.tier.list_keys(None, 4))
        source, target, *_ = own_cluster
        with source.client() as old, target.client() as new:
            name = new.execute_command("CLUSTER MYID").decode()
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", 0, "NODE", name)
        with pytest.raises(TierUnavailableError, match="slots of the cluster have moved"):
            harness.run(harness.tier.list_keys(cursor, 4))
        harness.run(harness.tier.list_keys(None, 4))
        own_cluster[2].kill()
        with pytest.raises(TierError):
            harness.run(list_all(harness.tier, 4))


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("number", [0, 1])
def test_what_the_other_nodes_have_is_served_while_one_is_down(own_cluster, how, number):
    options = {"is_cluster": True} | QUICK | {"call_timeout_s": 0.5}
    with TierHarness(tier_at(own_cluster[0].url(), **options), 64) as harness:
        assert harness.store(K) == {}
        down = own_cluster[number]
        getattr(down, how)()
        lost = [i for i, key in enumerate(K) if number_of(key, harness) == number]
        assert 0 < len(lost) < len(K)
        for _ in range(2):
            failures = harness.load(K)
            assert sorted(failures) == lost
            assert {type(error) for error in failures.values()} == {ShardUnavailableError}
            assert all(harness.holds(K[i], i) for i in range(len(K)) if i not in lost)
            assert harness.contains(K) == {K[i] for i in range(len(K)) if i not in lost}
            assert sorted(harness.store(K)) == lost
        harness.run(harness.tier._client.check(None))
        down.start() if how == "kill" else down.thaw()
        wait_until(lambda: harness.contains(K) == set(K))
        assert harness.load(K) == {}
        assert harness.tier.gauges()["emptied"] == 0


def test_a_tier_is_opened_while_another_node_than_its_own_is_down(own_cluster):
    own_cluster[1].kill()
    with TierHarness(tier_at(own_cluster[0].url(), is_cluster=True, **QUICK), 64) as harness:
        lost = [i for i, key in enumerate(K) if number_of(key, harness) == 1]
        assert sorted(harness.store(K)) == lost


def test_the_node_that_takes_over_the_keys_of_another_is_asked_for_them(own_cluster):
    with TierHarness(tier_at(own_cluster[0].url(), is_cluster=True, **QUICK), 64) as harness:
        assert harness.store(K) == {}
        own_cluster[1].kill()
        harness.load(K)
        with own_cluster[2].client() as client:  # as an operator would give up what it had
            for slot in range(SLOTS // 3, SLOTS * 2 // 3):
                client.execute_command("CLUSTER DELSLOTS", slot)
            client.execute_command("CLUSTER ADDSLOTSRANGE", SLOTS // 3, SLOTS * 2 // 3 - 1)
            client.execute_command("CLUSTER BUMPEPOCH")

        def is_known():
            with own_cluster[0].client() as client:
                ranges = client.execute_command("CLUSTER SLOTS")
            return own_cluster[1].port not in {owner[1] for _, _, owner, *_ in ranges}

        wait_until(is_known)
        wait_until(lambda: harness.store(K) == {})
        assert harness.load(K) == {}


def test_a_block_whose_slot_moves_is_served_on_the_way_and_afterwards(own_cluster):
    source, target, *_ = own_cluster
    with TierHarness(tier_at(source.url(), is_cluster=True, **QUICK), 64) as harness:
        assert harness.store(K) == {}
        moved = next(key for key in K if number_of(key, harness) == 0)
        name = harness.tier._client._prefix + moved
        slot = key_slot(name)
        with source.client() as old, target.client() as new:
            ids = [client.execute_command("CLUSTER MYID").decode() for client in (old, new)]
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            old.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
            assert harness.load(K) == {}
            assert harness.contains(K) == set(K)
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert harness.load(K) == {}
        assert harness.tier._client.server_of(moved) == ("127.0.0.1", target.port)
        assert all(harness.holds(key, i) for i, key in enumerate(K))


@pytest.fixture
def replica(own_cluster, tmp_path):
    """A replica of the cluster's second node, in step with it."""
    (bus_port,) = free_ports(1)
    with node_of(tmp_path, bus_port) as replica, replica.client() as client:
        with own_cluster[1].client() as primary:
            name = primary.execute_command("CLUSTER MYID").decode()
            primary.execute_command("CLUSTER MEET", "127.0.0.1", replica.port, bus_port)

        def follows():
            try:
                return client.execute_command("CLUSTER REPLICATE", name)
            except redis.ResponseError:  # it does not know the node yet
                return False

        wait_until(follows)
        wait_until(lambda: client.info("replication").get("master_link_status") == "up")
        yield replica


def take_over(replica, nodes):
    with replica.client() as client:
        client.execute_command("CLUSTER FAILOVER", "TAKEOVER")

    def is_known(node):
        with node.client() as client:
            ranges = client.execute_command("CLUSTER SLOTS")
        return replica.port in {owner[1] for _, _, owner, *_ in ranges}

    wait_until(lambda: all(is_known(node) for node in nodes))


def test_a_demoted_node_of_a_cluster_costs_nothing(own_cluster, replica):
    with TierHarness(tier_at(own_cluster[0].url(), is_cluster=True, **QUICK), 64) as harness:
        assert harness.store(K) == {}
        lost = [key for key in K if number_of(key, harness) == 1]
        with replica.client() as client:
            wait_until(lambda: client.dbsize() >= len(lost))
        take_over(replica, own_cluster)
        assert harness.load(K) == {}
        assert all(harness.holds(key, i) for i, key in enumerate(K))
        new = [key_of(number) for number in range(100, 132)]
        assert harness.store(new) == {}
        assert harness.contains([*K, *new]) == {*K, *new}


def test_the_new_primary_of_a_clusters_node_costs_its_own_blocks_alone(own_cluster, replica):
    options = {"is_cluster": True} | QUICK | {"call_timeout_s": 0.5, "max_retries": 0}
    options["negative_cache_ttl_s"] = 60.0
    new = [key_of(number) for number in range(100, 132)]
    with TierHarness(tier_at(own_cluster[0].url(), **options), 64) as harness:
        assert harness.store(K) == {}
        assert harness.contains(new) == frozenset()
        lost = [[i for i, key in enumerate(k) if number_of(key, harness) == 1] for k in (new, K)]
        take_over(replica, own_cluster)
        replica.kill()  # the demoted node still directs there
        for failures, expected in zip((harness.store(new), harness.load(K)), lost, strict=True):
            assert sorted(failures) == expected
            assert {type(error) for error in failures.values()} == {ShardUnavailableError}


def test_a_check_proves_that_a_node_accepts_writes(own_cluster):
    with TierHarness(tier_at(own_cluster[0].url(), is_cluster=True, **QUICK), 64) as harness:
        client = harness.tier._client
        for node in own_cluster:
            before = calls_of(node, "set")
            harness.run(client.check(("127.0.0.1", node.port)))
            assert calls_of(node, "set") > before
            with node.client() as plain:
                proofs = [name for name in plain.keys("kvo:*") if b"?" in name]
                assert all(0 < plain.pttl(name) <= 60_000 for name in proofs)
