"""A copy that outlives its deadline: vLLM must not get its slots back before the bytes rest."""

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm_world import keys_of

from kvoffload_async.errors import TierTimeoutError
from kvoffload_async.integrations.vllm.tiers import OVERDUE_JOBS

IO_TIMEOUT_S = 0.1


def until_overdue(world):
    world.until(lambda: world.tier._overdue)


@pytest.fixture
def world(serving, faulty):
    return serving({**faulty, "io_timeout_s": IO_TIMEOUT_S, "close_timeout_s": 0.1}, slots=4)


def test_an_overdue_store_keeps_its_slots_pinned_until_its_bytes_rest(world, ops):
    hang = ops.hang(on="pwritev")
    keys = keys_of(1, 2, 3, 4)
    world.store(keys)
    until_overdue(world)
    assert list(world.tier.get_finished_jobs()) == []
    assert world.tier.has_pending_work()
    assert world.store(keys_of(5)) == [], "every slot is still being read"
    hang.release()
    world.finish_jobs()
    assert world.store(keys_of(5)) == keys_of(5)


def test_an_overdue_load_keeps_its_slot_until_its_bytes_rest_and_is_then_a_miss(world, ops):
    (key,) = keys_of(1)
    world.store([key])
    world.reset()
    hang = ops.hang(on="pread_into preadv")
    request = world.request()
    world.until(lambda: world.on(world.manager.lookup, key, request) is LookupResult.HIT_PENDING)
    until_overdue(world)
    assert world.on(world.manager.lookup, key, request) is LookupResult.HIT_PENDING
    others = keys_of(5, 6, 7, 8)
    assert world.store(others) == [], "three slots are free, and the fourth is being written"
    hang.release()
    world.until(lambda: not world.tier._overdue)
    assert world.on(world.manager.lookup, key, request) is LookupResult.MISS
    assert world.store(others) == others


def test_an_overdue_job_is_reported_once_as_failed_and_counted(world, ops):
    hang = ops.hang(on="pwritev")
    world.store(keys_of(1))
    until_overdue(world)
    hang.release()
    world.tier._drain_timeout_s = 20.0
    world.tier.drain_jobs()
    (result,) = world.tier.get_finished_jobs()
    assert not result.success
    assert list(world.tier.get_finished_jobs()) == []
    world.tier._finished.append(result)  # for the manager, which has it outstanding
    world.finish_jobs()
    counted = world.tier.get_stats().reduce()
    assert counted[f"{OVERDUE_JOBS}:('FaultyFsTier',)"] == 1


def test_draining_raises_where_bytes_do_not_come_to_rest_and_a_reset_changes_nothing(world, ops):
    hang = ops.hang(on="pwritev")
    keys = keys_of(1, 2)
    world.store(keys)
    world.tier._drain_timeout_s = 2 * IO_TIMEOUT_S
    with pytest.raises(TierTimeoutError, match="still run"):
        world.reset()
    request = world.request()
    assert world.on(world.manager.lookup, keys[0], request) is LookupResult.HIT
    hang.release()
    world.tier._drain_timeout_s = 20.0
    world.reset()
    world.rows[:] = 0
    assert world.holds(keys)


def test_a_shutdown_that_leaves_a_copy_behind_keeps_the_primary_mapped(world, ops, caplog):
    hang = ops.hang(on="pwritev")
    world.store(keys_of(1))
    until_overdue(world)
    mapping = world.spec._scheduler_mmap.mmap_obj
    with pytest.raises(TierTimeoutError, match="must stay mapped"):
        world.manager.shutdown()
    assert not mapping.closed
    hang.release()
    world.manager.primary_tier.shutdown()  # what vLLM left undone, now that the bytes rest
    world.worker.cleanup()
    # The threads of a tier that could not close end with it: vLLM's manager holds it, and so do the
    # frames of the error in vLLM's log.
    world.forget()
    caplog.clear()
