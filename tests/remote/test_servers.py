"""A store of several servers: one that is down costs the keys of the others nothing."""

import asyncio

import pytest
from remote.fake_store import FakeClient, World

from kvoffload_async.abc.events import ProbeAnswered
from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.errors import ShardUnavailableError, TierUnavailableError
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.types import JobResult

SERVERS = 3
K = [key_of(number) for number in range(60)]
OTHERS = [i for i, key in enumerate(K) if key[0] % SERVERS != 1]
LOST = [i for i, key in enumerate(K) if key[0] % SERVERS == 1]
FAULTS = ["down", "frozen"]


@pytest.fixture
def world():
    client = FakeClient(servers=SERVERS)
    with World(client, call_timeout_s=2.0, job_timeout_s=30.0, max_retries=0) as world:
        yield world


@pytest.mark.parametrize("fault", FAULTS)
def test_the_blocks_of_the_other_servers_are_found_loaded_and_stored(world, fault):
    world.store(K)
    getattr(world.client, fault).add(1)
    for _ in range(2):
        failures = world.load(K)
        assert sorted(failures) == LOST
        assert {type(error) for error in failures.values()} == {ShardUnavailableError}
        assert all(world.holds(K[i], i) for i in OTHERS)
        assert world.run(world.tier.contains(K)) == {K[i] for i in OTHERS}
        assert world.heads([K[i] for i in OTHERS], K) == [len(OTHERS), LOST[0]]
        world.client.values.clear()
        assert sorted(world.store(K)) == LOST
    assert world.gauge("unanswered_keys") >= len(LOST)
    assert world.gauge("bytes_in_flight") == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_there_again_is_used_again(world, fault):
    world.store(K)
    getattr(world.client, fault).add(1)
    assert sorted(world.load(K)) == LOST
    getattr(world.client, fault).clear()
    if fault == "frozen":
        world.run(asyncio.sleep(2.0))
    assert world.load(K) == {}
    assert world.run(world.tier.contains(K)) == set(K)


def test_what_nobody_has_answered_is_not_remembered_as_absent():
    with World(FakeClient(servers=SERVERS), negative_cache_ttl_s=60.0, max_retries=0) as world:
        world.store(K)
        world.client.down = {1}
        world.run(world.tier.contains(K))
        world.client.down = set()
        assert world.run(world.tier.contains(K)) == set(K)


def test_a_server_that_did_not_answer_in_time_is_not_asked_for_as_long_as_a_call_may_take(world):
    world.store(K)
    world.client.frozen = {1}
    world.load(K)
    for _ in range(3):
        before_s, timeouts = world.runner.loop.time(), world.gauge("timeouts")
        assert sorted(world.load(K)) == LOST
        world.run(world.tier.contains(K))
        assert world.runner.loop.time() == before_s
        assert world.gauge("timeouts") == timeouts
        world.run(asyncio.sleep(2.0))
        world.load(K)
        assert world.gauge("timeouts") == timeouts + 1


def test_a_probe_returns_what_the_others_have_before_its_deadline():
    client = FakeClient(servers=SERVERS)
    with World(client, call_timeout_s=60.0, probe_timeout_s=2.0) as world:
        world.store(K)
        client.frozen = {1}

        async def probe():
            async with asyncio.timeout(2.0):
                return await world.tier.contains(K)

        for _ in range(3):
            assert world.run(probe()) == {K[i] for i in OTHERS}


def test_a_server_whose_probe_was_given_up_is_left_alone_too(world):
    world.store(K)
    world.client.frozen = {1}

    async def give_up():
        async with asyncio.timeout(1.95):
            await world.tier.contains([K[LOST[0]]])

    with pytest.raises(TimeoutError):
        world.run(give_up())
    before_s = world.runner.loop.time()
    assert world.run(world.tier.contains(K)) == {K[i] for i in OTHERS}
    assert world.runner.loop.time() == before_s


def test_a_store_whose_servers_are_all_down_is_down(world):
    world.store(K)
    world.client.down = {0, 1, 2}
    world.load(K)
    for call in (lambda: world.load(K), lambda: world.run(world.tier.contains(K))):
        with pytest.raises(TierUnavailableError) as raised:
            call()
        assert type(raised.value) is TierUnavailableError


def test_a_job_of_a_server_that_is_down_alone_is_no_fault_of_the_tier(world):
    world.store(K)
    world.client.down = {1}
    lost = [K[i] for i in LOST[:3]]
    assert {type(error) for error in world.load(lost).values()} == {ShardUnavailableError}
    with pytest.raises(ShardUnavailableError):
        world.load(lost)
    unanswered = world.gauge("unanswered_keys")
    assert world.run(world.tier.contains(lost)) == frozenset()
    assert world.gauge("unanswered_keys") == unanswered + 3


def test_a_server_of_several_that_is_down_opens_no_breaker():
    health = TierHealth(BreakerSettings(fault_threshold=1))
    error = ShardUnavailableError("one node is down")
    for is_promotion in (True, False):
        job = make_job(1, K[:1], [0], is_promotion=is_promotion)
        health.job_ended(job, JobResult(1, success=False, error=error), 1.0)
    health.now_s = 1.0
    health.probe_started(1)
    health.probe_ended(ProbeAnswered(1, frozenset(), error))
    assert health.loads.state is health.stores.state is BreakerState.CLOSED


def test_a_call_given_up_does_not_end_the_rest_of_a_server_that_timed_out(world):
    world.store(K)
    world.client.frozen = {1}

    async def time_out_and_give_up():
        await world.tier.load(make_job(1, [K[OTHERS[0]]], [0], is_promotion=True))
        lost = world.tier.load(make_job(2, [K[LOST[0]]], [1], is_promotion=True))
        losing = asyncio.create_task(lost)
        await asyncio.sleep(1.7)
        late = asyncio.create_task(world.tier.delete([K[LOST[1]]]))
        await losing
        assert not late.done()
        late.cancel()
        await asyncio.wait({late})

    world.run(time_out_and_give_up())
    before_s = world.runner.loop.time()
    assert sorted(world.load(K)) == LOST
    assert world.runner.loop.time() == before_s
