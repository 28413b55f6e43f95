"""A deleted block stays away, whatever was asked, cached or renewed before."""

import asyncio

from remote.fake_store import FakeClient, World

from kvoffload_async.errors import ShardUnavailableError
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(6)]


def test_cached_answers_are_forgotten():
    with World(positive_cache_ttl_s=60.0, negative_cache_ttl_s=60.0) as world:
        world.store(K[:2])
        assert world.run(world.tier.contains(K[:2])) == set(K[:2])
        assert world.run(world.tier.delete(K[:1])) == {}
        assert world.run(world.tier.contains(K[:2])) == {K[1]}
        assert world.store(K[:1]) == {}
        assert world.run(world.tier.contains(K[:1])) == {K[0]}


def test_a_question_from_before_the_deletion_leaves_no_answer():
    with World(positive_cache_ttl_s=60.0) as world:
        world.store(K[:2])
        world.tier._memory.emptied()

        async def ask_and_delete():
            asking = asyncio.create_task(world.tier.contains(K[:2]))
            await asyncio.sleep(0)
            world.client.is_stalled = False
            assert await world.tier.delete(K[:1]) == {}
            return await asking

        present = world.client.exist

        async def exist(keys):
            found = await present(keys)
            await asyncio.sleep(1.0)  # the answer arrives after the deletion
            return found

        world.client.exist = exist
        assert world.run(ask_and_delete()) == {K[1]}
        world.client.exist = present
        assert world.run(world.tier.contains(K[:2])) == {K[1]}


def test_a_renewal_ends_before_its_block_is_deleted():
    with World(FakeClient(answers_many=False), ttl_s=40.0) as world:
        world.store(K[:2])
        world.client.renewal_s = 2.0

        async def use_and_delete():
            await asyncio.sleep(20.0)
            world.tier.touch(K[:2])
            await asyncio.sleep(3.0)  # the renewals have begun
            assert await world.tier.delete(K[:1]) == {}
            assert K[0] in world.client.renewed, "it could have copied the block back"
            world.tier.touch(K[1:2])

        world.run(use_and_delete())
        assert K[0] not in world.client.values


def test_a_renewal_that_waits_is_dropped():
    with World(ttl_s=40.0) as world:
        world.store(K[:2])

        async def use_and_delete():
            await asyncio.sleep(20.0)
            world.tier.touch(K[:2])
            await world.tier.delete(K[:1])
            await asyncio.sleep(20.0)

        world.run(use_and_delete())
        assert world.client.renewed == [K[1]]


def test_a_server_that_fails_keeps_only_its_own_blocks():
    with World(FakeClient(servers=2)) as world:
        world.store(K)
        world.client.down = {0}
        left = world.run(world.tier.delete(K))
        expected = [i for i, key in enumerate(K) if key[0] % 2 == 0]
        assert sorted(left) == expected
        assert all(isinstance(error, ShardUnavailableError) for error in left.values())
        world.client.down = set()
        world.run(asyncio.sleep(100.0))
        assert world.run(world.tier.delete(K)) == {}
        assert not world.client.values


def test_many_blocks_are_deleted_in_a_bounded_number_of_calls_at_once():
    client = FakeClient(answers_many=False)
    keys = [key_of(number) for number in range(100)]
    at_once = []
    running = 0
    remove = client.remove

    async def counted(some):
        nonlocal running
        running += 1
        at_once.append(running)
        await asyncio.sleep(0.1)
        await remove(some)
        running -= 1

    client.remove = counted
    with World(client, num_slots=128) as world:
        world.store(keys)
        assert world.run(world.tier.delete(keys)) == {}
        assert not client.values
        assert max(at_once) == 8
