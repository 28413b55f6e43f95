"""Links that are slow, far or shared, in virtual time: a healthy server is never called dead."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from remote.fake_store import SLOT_BYTES, FakeClient, World

from kvoffload_async.errors import (
    CallTimeoutError,
    JobNotStartedError,
    ServerHangError,
    TierTimeoutError,
)
from kvoffload_async.testing.harness import key_of
from kvoffload_async.waiting import Limiter

MIB = SLOT_BYTES // 4
"""A block of 4096 bytes stands for one of 4 MiB."""
BLOCK_MIB = 4
K = [key_of(number) for number in range(64)]
OTHERS = [key_of(number) for number in range(64, 96)]
CALLS_THAT_LAST = {"call_timeout_s": 5.0, "job_timeout_s": 30.0}
OPTIONS = {"bytes_in_flight": 64 * MIB, "connections": 16, "call_timeout_s": 5.0}


class LinkClient(FakeClient):
    """Behind a link whose two directions are queues, which every connection shares.

    Attributes:
        mib_per_s: What each direction carries; None: it carries nothing any more.
        rtt_s: How long an answer takes at least.
        busy_s: How long the server takes for each call with payload, at any load.
        most_queued_s: The longest time for which a byte has waited for a direction.
    """

    def __init__(self, mib_per_s, rtt_s, busy_s=0.0):
        super().__init__(portion=1)
        self.mib_per_s, self.rtt_s, self.busy_s = mib_per_s, rtt_s, busy_s
        self.most_queued_s = 0.0
        self._free_s = Counter()

    async def _begin(self, name, keys=()):
        await super()._begin(name, keys)
        if name not in ("put", "get"):
            await self._pass("up", 0)
            await self._pass("down", 0)

    async def put(self, keys, values):
        await self._pass("up", sum(part.nbytes for value in values for part in value))
        return await super().put(keys, values)

    async def get(self, keys, targets):
        found = await super().get(keys, targets)
        await self._pass("down", sum(len(value.data) for value in found if value))
        return found

    async def _pass(self, direction, num_bytes):
        """Wait until these bytes, and all before them, have passed."""
        if self.mib_per_s is None:
            await asyncio.get_running_loop().create_future()
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s[direction])
        self.most_queued_s = max(self.most_queued_s, begin_s - now_s)
        self._free_s[direction] = end_s = begin_s + num_bytes / (self.mib_per_s * MIB)
        await asyncio.sleep(end_s - now_s + self.rtt_s / 2 + (self.busy_s if num_bytes else 0.0))


class SharedLinkClient(LinkClient):
    """Behind a link whose directions are shared equally by the calls in flight."""

    _STEP_S = 0.1

    def __init__(self, mib_per_s, rtt_s):
        super().__init__(mib_per_s, rtt_s)
        self._in_flight = Counter()

    async def _pass(self, direction, num_bytes):
        left = num_bytes
        self._in_flight[direction] += 1
        try:
            while left > 0:
                await asyncio.sleep(self._STEP_S)
                left -= self.mib_per_s * MIB * self._STEP_S / self._in_flight[direction]
        finally:
            self._in_flight[direction] -= 1


async def unbounded_s(client):
    """Return how long the blocks take with all of `bytes_in_flight` from the beginning on."""
    limiter, began_s = Limiter(16, 64 * MIB), asyncio.get_running_loop().time()

    async def put(key):
        with await limiter.acquire(SLOT_BYTES):
            await client.put([key], [np.zeros(SLOT_BYTES + 128, np.uint8)])

    async with asyncio.TaskGroup() as group:
        for key in K:
            group.create_task(put(key))
    return asyncio.get_running_loop().time() - began_s


async def both_directions(world, rounds):
    """Store and load all blocks at once, over and over; return the errors and the seconds."""
    errors, began_s = [], world.runner.loop.time()
    for _ in range(rounds):
        world.client.values.clear()
        errors += (await world.tier.store(world.job(K[:32], is_promotion=False))).values()
        world.client.values |= dict.fromkeys(K[32:], world.client.values[K[0]])
        async with asyncio.TaskGroup() as group:
            loads = group.create_task(world.tier.load(world.job(K[:32], is_promotion=True)))
            stores = group.create_task(world.tier.store(world.job(OTHERS, is_promotion=False)))
        errors += (*loads.result().values(), *stores.result().values())
    return errors, world.runner.loop.time() - began_s


@pytest.mark.parametrize("rtt_s", [0.001, 0.005, 0.155])
@pytest.mark.parametrize("mib_per_s", [5, 20, 40, 400])
def test_a_healthy_server_behind_any_link_is_never_called_dead(mib_per_s, rtt_s):
    client = LinkClient(mib_per_s, rtt_s)
    with World(client, **OPTIONS, job_timeout_s=120.0, max_retries=0) as world:
        errors, _ = world.run(both_directions(world, rounds=2))
        assert errors == []
        assert world.gauge("failed") == 0
        client.most_queued_s = 0.0
        errors, _ = world.run(both_directions(world, rounds=1))
        assert errors == []
        # A window; or, once a minute, one call more than one.
        assert client.most_queued_s <= max(1.0, 2.1 * BLOCK_MIB / mib_per_s)


@pytest.mark.parametrize("mib_per_s", [400, 4000])
@pytest.mark.parametrize("busy_s", [0.0, 0.3])
def test_a_far_store_is_in_full_use_after_its_first_round_trips(mib_per_s, busy_s):
    client = LinkClient(mib_per_s, 0.155, busy_s)
    with World(client, **OPTIONS, negative_cache_ttl_s=60.0) as world:

        async def store():
            client.values.clear()
            world.tier._memory.vanished(K)
            began_s = world.runner.loop.time()
            assert await world.tier.store(world.job(K, is_promotion=False)) == {}
            return world.runner.loop.time() - began_s

        today_s = world.run(unbounded_s(client))
        first_s, *later_s = [world.run(store()) for _ in range(6)]
        assert first_s <= today_s + 4 * (0.155 + busy_s)
        assert max(later_s[2 if busy_s else 0 :]) <= today_s + 1e-6


def stored_anew(world):
    """Store all blocks; return the errors and the seconds."""
    world.client.values.clear()
    world.tier._memory.vanished(K)
    began_s = world.runner.loop.time()
    failures = world.run(world.tier.store(world.job(K, is_promotion=False)))
    return list(failures.values()), world.runner.loop.time() - began_s


PATIENT = OPTIONS | {"call_timeout_s": 30.0, "job_timeout_s": 600.0, "negative_cache_ttl_s": 60.0}


@pytest.mark.parametrize("busy_s", [0.1, 0.6, 0.8, 2.0])
def test_a_store_that_takes_long_for_each_call_gets_all_its_calls_at_once(busy_s):
    client = LinkClient(4000, 0.005, busy_s)
    with World(client, **PATIENT) as world:
        today_s = world.run(unbounded_s(client))
        assert stored_anew(world)[1] <= 4 * today_s
        assert math.isclose(stored_anew(world)[1], today_s, rel_tol=0.01)


@pytest.mark.parametrize("busy_s", [0.1, 0.6])
def test_a_store_gets_all_its_calls_back_after_a_slow_phase(busy_s):
    client = LinkClient(4000, 0.005, busy_s)
    with World(client, **PATIENT) as world:
        today_s = world.run(unbounded_s(client))
        client.busy_s = 5.0
        stored_anew(world)
        client.busy_s = busy_s
        assert stored_anew(world)[1] <= 2 * today_s
        assert math.isclose(stored_anew(world)[1], today_s, rel_tol=0.01)


def test_calls_that_a_link_is_too_slow_for_all_at_once_become_fewer():
    client = SharedLinkClient(400, 0.005)
    with World(client, **(OPTIONS | {"job_timeout_s": 120.0, "max_retries": 0})) as world:
        assert stored_anew(world)[0] == []
        client.mib_per_s = 5  # all at once, they take 13 s
        assert {type(error) for error in stored_anew(world)[0]} == {CallTimeoutError}
        assert stored_anew(world)[0] == []


def test_a_link_that_dies_under_transfers_is_found_out_as_soon_as_before():
    client = LinkClient(20, 0.005)
    with World(client, **(OPTIONS | {"call_timeout_s": 30.0})) as world:

        async def store():
            coroutine = world.tier.store(world.job(K, is_promotion=False))
            task = asyncio.get_running_loop().create_task(coroutine)
            await asyncio.sleep(4.0)
            client.mib_per_s, died_s = None, world.runner.loop.time()
            failures = await task
            assert {type(error) for error in failures.values()} == {ServerHangError}
            return world.runner.loop.time() - died_s

        assert world.run(store()) <= 2.0 + BLOCK_MIB / 20


def test_what_a_slow_link_has_no_time_for_was_not_started_and_the_rest_is_stored():
    client = LinkClient(5, 0.005)
    with World(client, **OPTIONS) as world:
        failures = world.store(K)
        assert {type(error) for error in failures.values()} == {JobNotStartedError}
        assert "not started" in str(failures[63])
        assert (64 - len(failures)) * BLOCK_MIB >= 0.8 * 30 * 5
        assert world.gauge("failed") == 0


def test_what_waits_for_a_server_that_never_answers_is_its_fault():
    client = FakeClient(portion=1)
    with World(client, connections=1, call_timeout_s=1.0, job_timeout_s=5.0) as world:
        client.is_stalled = True
        failures = world.load(K[:8])
        assert not any(isinstance(error, JobNotStartedError) for error in failures.values())
        assert isinstance(failures[7], TierTimeoutError)
        assert math.isclose(world.runner.loop.time(), 5.0, abs_tol=1.0)


def test_a_check_that_is_not_answered_is_no_hang_while_other_calls_are():
    client = FakeClient(portion=1)
    with World(client, connections=1, **CALLS_THAT_LAST) as world:
        world.store(K[:8])
        client.read_s = 1.2  # of which each is slow, and checked
        client.check = lambda: asyncio.get_running_loop().create_future()
        assert world.load(K[:8]) == {}
        client.is_stalled = True
        failures = world.load(K[:1])
        assert isinstance(failures[0], ServerHangError), "nothing is answered any more"
