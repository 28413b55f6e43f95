"""Many requests to a store that is slow and healthy: few at once, and every answer is used."""

import asyncio

from remote.fake_store import FakeClient, FakeTier, World

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.tier import ObjectTier

K = [key_of(number) for number in range(3000)]
RTT_S = 0.155


class FarClient(FakeClient):
    """One request a key; `most_tasks` and `most_calls` at once."""

    def __init__(self):
        super().__init__(answers_many=False)
        self.calls_now = self.most_calls = self.most_tasks = 0

    async def _begin(self, name, keys=()):
        self.calls_now += 1
        self.most_calls = max(self.most_calls, self.calls_now)
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        try:
            await asyncio.sleep(RTT_S)
            await super()._begin(name, keys)
        finally:
            self.calls_now -= 1


def test_a_look_up_of_many_keys_asks_for_sixteen_at_once_and_holds_no_task_for_the_others():
    with World(FarClient(), probe_timeout_s=100.0) as world:
        world.client.values = dict.fromkeys(K[:1000], b"")
        assert world.run(world.tier.contains(K)) == set(K[:1000])
        assert world.client.most_calls == 16
        assert world.client.most_tasks <= 16 + 8


def test_a_deletion_of_many_blocks_holds_no_task_for_those_that_wait():
    with World(FarClient(), job_timeout_s=100.0) as world:
        world.client.values = dict.fromkeys(K, b"")
        assert world.run(world.tier.delete(K)) == {}
        assert world.client.values == {}
        assert world.client.most_calls == 8
        assert world.client.most_tasks <= 8 + 8


def test_a_look_up_with_more_keys_than_its_time_allows_is_answered_for_the_first_of_them():
    with World(FarClient(), negative_cache_ttl_s=60.0, probe_timeout_s=2.0) as world:
        world.client.values = dict.fromkeys(K, b"")

        async def ask():
            async with asyncio.timeout(2.0):  # as its caller does
                return await world.tier.contains(K[:400])

        found = world.run(ask())
        assert found == set(K[: len(found)])
        assert len(found) >= 10 * 16 - 16
        assert world.gauge("unanswered_keys") == 400 - len(found)
        assert world.tier._memory.get(K[399]) is None


class FakeObjectTier(FakeTier):
    longest_prefixes = ObjectTier.longest_prefixes


def test_a_key_without_an_answer_says_nothing_about_those_behind_it():
    world = World(FarClient(), negative_cache_ttl_s=60.0, probe_timeout_s=2.0)
    world.tier = FakeObjectTier(world.client, world.tier._settings)
    with world:
        chains = [K[2 * number : 2 * number + 2] for number in range(400)]
        world.client.values = dict.fromkeys(K, b"")
        lengths = world.run(world.tier.longest_prefixes(chains))
        assert lengths[-1] == 0
        assert world.tier._memory.get(chains[-1][1]) is None


def test_a_search_that_runs_out_of_time_returns_what_it_has_found():
    world = World(FarClient(), probe_timeout_s=2.0)
    world.tier = FakeObjectTier(world.client, world.tier._settings)
    with world:
        chains = [K[7 * number : 7 * number + 7] for number in range(400)]
        world.client.values = {key: b"" for chain in chains for key in chain[:3]}
        for _ in range(5):
            lengths = world.run(world.tier.longest_prefixes(chains))
            assert lengths[0] >= 1
            assert lengths[-1] == 0
