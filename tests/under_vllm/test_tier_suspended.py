"""A tier that keeps failing under vLLM's own manager, which suspends no tier: ours does itself."""

import errno

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm_world import keys_of

from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.integrations.vllm.tiers import FAILED_JOBS

READS, WRITES = "pread_into preadv", "pwritev"
NEVER_S = 1e9
KEYS = keys_of(1, 2)


@pytest.fixture
def world(serving, faulty):
    """An engine whose tier is suspended by its second fault, until a test resumes it."""
    world = serving(faulty)
    for breaker in (world.tier._state.health.loads, world.tier._state.health.stores):
        breaker.settings = BreakerSettings(fault_threshold=2, retry_after_s=NEVER_S)
    world.store(KEYS)
    world.reset()
    return world


def resume(breaker):
    """Let the breaker's pause have passed."""
    breaker._retry_at_s = 0.0


def lookup(world, key):
    return world.on(world.manager.lookup, key, world.request())


def test_lookups_miss_at_once_while_loads_are_suspended_and_a_trial_resumes_them(
    world, ops, caplog
):
    ops.fail(errno.EIO, on=READS, times=None)
    assert world.load(KEYS[:1]) == {}
    assert lookup(world, KEYS[0]) is LookupResult.RETRY, "one fault suspends nothing"
    assert world.load(KEYS[1:]) == {}
    world.finish_jobs()
    assert [lookup(world, key) for key in KEYS] == [LookupResult.MISS] * 2
    assert not world.on(world.manager.has_pending_work)
    assert caplog.text.count("loads are suspended") == 1
    ops.heal()
    resume(world.tier._state.health.loads)
    world.until(lambda: world.load(KEYS).keys() == set(KEYS))
    assert world.holds(KEYS)
    assert caplog.text.count("loads resumed") == 1


def writes(ops):
    return sum(call.name == WRITES for call in ops.calls)


def test_stores_fail_at_once_while_they_are_suspended_and_a_trial_resumes_them(world, ops, caplog):
    ops.fail(errno.EIO, on=WRITES, times=None)
    for number in (5, 6):
        world.store(keys_of(number))
        world.finish_jobs()
    before = writes(ops)
    world.store(keys_of(7))
    world.finish_jobs()
    assert writes(ops) == before
    counted = world.on(world.manager.get_stats).reduce()
    assert counted[f"{FAILED_JOBS}:('FaultyFsTier', 'TierUnavailableError')"] == 3
    assert caplog.text.count("stores are suspended") == 1
    world.reset()
    assert world.holds(KEYS), "loads are not suspended"
    ops.heal()
    resume(world.tier._state.health.stores)
    world.store(keys_of(8))
    world.reset()
    assert world.holds(keys_of(8))
