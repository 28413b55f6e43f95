"""The `valkey` tier on a cluster: three nodes that share the keys."""

from contextlib import ExitStack

import pytest
import redis
from remote.valkey.tiers import QUICK, tier_at
from servers.process import free_ports, wait_until
from servers.valkey import ValkeyServer

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote.client import Value

pytestmark = pytest.mark.slow

K = [key_of(number) for number in range(32)]
SLOTS = 16384


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        nodes, bus_ports = [], free_ports(3)
        for number in range(3):
            home = folder / str(number)
            home.mkdir()
            arguments = ("--cluster-enabled", "yes", "--cluster-port", bus_ports[number])
            nodes.append(stack.enter_context(ValkeyServer(home, *arguments)))
        clients = [stack.enter_context(node.client()) for node in nodes]
        for number, client in enumerate(clients):
            slots = (SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1)
            client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node, bus_port in list(zip(nodes, bus_ports, strict=True))[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus_port)

        def is_ready():
            infos = [client.execute_command("CLUSTER INFO") for client in clients]
            return all(info["cluster_state"] == "ok" for info in infos)

        wait_until(is_ready)
        yield nodes


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
