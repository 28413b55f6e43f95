"""`CPUPrimaryTierOffloadingManager` on its own: the manager contract without any tier."""

import pytest
from facade.worlds import HIT, MISS, PENDING, k, ks

from kvoffload_async.errors import ClosedError, ConfigError, StateError
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.hints import HINTS_KEY
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.types import ReqContext, ScheduleEndContext


@pytest.fixture
def ctx():
    return ReqContext("r")


@pytest.fixture
def manager(ctx):
    manager = CPUPrimaryTierOffloadingManager(4, enable_events=True)
    manager.on_new_request(ctx)
    return manager


def store(manager, ctx, *numbers):
    output = manager.prepare_store(ks(*numbers), ctx)
    manager.complete_store(ks(*numbers), ctx)
    return output


def test_a_request_stores_and_loads_its_blocks(manager, ctx):
    output = manager.prepare_store(ks(1, 2), ctx)
    assert list(output.keys_to_store) == ks(1, 2)
    assert output.store_spec.block_ids.tolist() == [0, 1]
    assert manager.lookup(k(1), ctx) is PENDING
    manager.complete_store(ks(1, 2), ctx)
    assert manager.lookup(k(1), ctx) is HIT
    assert manager.prepare_load(ks(2, 1), ctx).block_ids.tolist() == [1, 0]
    manager.complete_load(ks(2, 1), ctx)


def test_a_failed_store_leaves_nothing(manager, ctx):
    manager.prepare_store(ks(1), ctx)
    manager.complete_store(ks(1), ctx, success=False)
    assert manager.lookup(k(1), ctx) is MISS


def test_slots_are_a_private_read_only_copy(manager, ctx):
    slots = manager.prepare_store(ks(1), ctx).store_spec.block_ids
    assert slots.dtype == "int32"
    with pytest.raises(ValueError, match="read-only"):
        slots[0] = 3


def test_a_batch_that_does_not_fit_is_refused_whole_if_no_head_is_wanted(ctx):
    manager = CPUPrimaryTierOffloadingManager(4, accept_prefix=False)
    manager.on_new_request(ctx)
    assert manager.prepare_store(ks(*range(5)), ctx) is None
    assert manager.core.counts["free"] == 4


def test_the_longest_head_that_fits_is_taken_and_the_rest_named(manager, ctx):
    granted = manager.prepare_store(ks(*range(6)), ctx)
    assert list(granted.keys_to_store) == ks(0, 1, 2, 3)
    assert list(granted.keys_left_out) == ks(4, 5)


def test_the_tail_of_a_finished_request_goes_before_its_head(manager, ctx):
    store(manager, ctx, 1, 2, 3, 4)
    manager.on_request_finished(ctx)
    other = ReqContext("other")
    manager.on_new_request(other)
    assert list(manager.prepare_store(ks(9), other).evicted_keys) == ks(4)


def test_a_use_counts(manager, ctx):
    store(manager, ctx, 1, 2, 3, 4)
    manager.on_request_finished(ctx)
    other = ReqContext("other")
    manager.touch(ks(4), other)
    manager.on_new_request(other)
    assert list(manager.prepare_store(ks(9), other).evicted_keys) == ks(3)


def test_a_block_is_stored_at_its_nth_offer_if_there_is_a_threshold(ctx):
    manager = CPUPrimaryTierOffloadingManager(4, store_threshold=2)
    manager.on_new_request(ctx)
    assert not manager.prepare_store(ks(1), ctx).keys_to_store
    assert manager.prepare_store(ks(1), ctx).keys_to_store


def test_a_reset_empties_it(manager, ctx):
    store(manager, ctx, 1)
    manager.reset_cache()
    manager.on_reset_flushed()
    assert manager.lookup(k(1), ctx) is MISS


def test_events_tell_what_is_readable(manager, ctx):
    store(manager, ctx, 1)
    manager.reset_cache()
    assert [e.removed for e in manager.take_events()] == [False, True]
    assert not list(manager.take_events())


def test_it_defers_nothing(manager):
    manager.on_schedule_end(ScheduleEndContext())
    assert not manager.has_pending_work()


def test_misuse_is_refused(manager, ctx):
    with pytest.raises(StateError):
        manager.prepare_load(ks(1), ctx)
    with pytest.raises(StateError):
        manager.on_new_request(ctx)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_no_capacity_is_a_config_error(num_blocks):
    with pytest.raises(ConfigError, match="num_blocks"):
        CPUPrimaryTierOffloadingManager(num_blocks)


def test_an_unknown_policy_is_a_config_error_that_lists_the_choices():
    with pytest.raises(ConfigError, match=r"eviction_policy: 'x' .*'arc'"):
        CPUPrimaryTierOffloadingManager(1, cache_policy="x")


def test_memory_is_there_until_shutdown():
    manager = CPUPrimaryTierOffloadingManager(2, buffer=PrimaryBuffer(2, 4096))
    assert manager.get_primary_kv_view().shape == (2, 4096)
    manager.shutdown()
    manager.shutdown()
    with pytest.raises(ClosedError):
        manager.get_primary_kv_view()


def test_without_memory_there_is_no_view(manager):
    with pytest.raises(ClosedError):
        manager.get_primary_kv_view()
    manager.shutdown()


def test_a_retention_ends_by_the_managers_clock():
    now_s = [1000.0]
    manager = CPUPrimaryTierOffloadingManager(8, clock=lambda: now_s[0])
    ctx = ReqContext("r", {HINTS_KEY: {"retain_s": 60}})
    manager.on_new_request(ctx)
    store(manager, ctx, 1)
    manager.on_request_finished(ctx)
    for now_s[0], count in (1059.0, 1), (1060.0, 0):
        manager.on_schedule_end()
        assert manager.stats().primary.hinted_blocks == count
