"""What probes of 64 blocks cost, counted over 10,000 of them.

Through a tier and on real servers there are as many as `KVOFFLOAD_PROBES` says, and few without it;
`nox -s servers` has 10,000 through a tier.
"""

import asyncio
import os
import random
from collections import Counter

import pytest
from remote.fake_store import FakeClient, World
from remote.object.tiers import tier_on
from remote.valkey.tiers import tier_at
from servers.process import at_length
from servers.seaweedfs import SeaweedServer
from servers.valkey import ValkeyServer

from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.tier import bisect_prefixes

CHAIN = [key_of(number) for number in range(64)]
PROBES = 10_000
PROBES_OF_A_TIER = int(os.environ.get("KVOFFLOAD_PROBES", "500"))
REAL_HEADS = (0, 1, 2, 7, 20, 33, 50, 63, 64)
PROBES_OF_REAL_SERVERS = max(18, int(os.environ.get("KVOFFLOAD_PROBES", "0")) // 50)
MOST_HEADS = 8
"""Requests of a probe where each asks about one key: 2 + log2(64)."""


def heads_of(count, seed=1):
    """How much of the chain there is for each probe: nothing and all of it too, and often."""
    source = random.Random(seed)
    return [source.choice((0, 64, source.randint(0, 64))) for _ in range(count)]


async def probe_all(tier, heads, appear):
    """Probe once for each head; return how many probes cost how many requests."""
    costs = Counter()
    for head in heads:
        appear(head)
        before = tier.gauges()["requests"]
        assert await tier.longest_prefixes([CHAIN]) == [head]
        costs[int(tier.gauges()["requests"] - before)] += 1
    return costs


def test_no_probe_of_ten_thousand_asks_more_than_its_bound():
    prefixes = [frozenset(CHAIN[:head]) for head in range(65)]
    costs = Counter()

    async def ask_all():
        for head in heads_of(PROBES):
            asked = []

            async def ask(keys, asked=asked, there=prefixes[head]):
                asked += keys
                return there.intersection(keys)

            assert await bisect_prefixes([CHAIN], ask) == [head]
            costs[len(asked)] += 1

    asyncio.run(ask_all())
    assert sum(costs.values()) == PROBES
    assert (min(costs), max(costs)) == (1, MOST_HEADS)


def test_where_one_call_answers_for_many_keys_each_probe_costs_one_request():
    prefixes = [dict.fromkeys(CHAIN[:head], b"") for head in range(65)]
    with World(FakeClient()) as world:

        def appear(head):
            world.client.values = prefixes[head]

        costs = world.run(probe_all(world.tier, heads_of(PROBES_OF_A_TIER), appear))
        assert sum(costs.values()) == PROBES_OF_A_TIER
        assert world.client.calls["exist"] == sum(cost * n for cost, n in costs.items())
        assert set(costs) == {1}


def counted(harness, capsys):
    """Probe a real server while the chain's head grows; print and return the costs."""
    costs, stored = Counter(), 0
    for head in REAL_HEADS:
        assert harness.store(CHAIN[stored:head], range(head - stored)) == {}
        stored = head
        some = PROBES_OF_REAL_SERVERS // len(REAL_HEADS)
        costs += harness.run(probe_all(harness.tier, [head] * some, lambda _head: None))
    with capsys.disabled():
        shown = ", ".join(f"{number} cost {cost}" for cost, number in sorted(costs.items()))
        print(f"\n{harness.tier.describe()}: requests of probes: {shown}")  # noqa: T201 - asked for
    return costs


@at_length
@pytest.mark.servers
@pytest.mark.timeout(600)  # 1,600 requests, one after the other
def test_probes_of_a_real_object_store(tmp_path, capsys):
    with (
        SeaweedServer(tmp_path) as server,
        TierHarness(tier_on(server.connection("probes")), 64, timeout_s=600.0) as harness,
    ):
        assert max(counted(harness, capsys)) <= MOST_HEADS


@pytest.mark.servers
def test_probes_of_a_real_valkey(tmp_path, capsys):
    with (
        ValkeyServer(tmp_path) as server,
        TierHarness(tier_at(server.url()), 64, timeout_s=600.0) as harness,
    ):
        assert set(counted(harness, capsys)) == {1}
