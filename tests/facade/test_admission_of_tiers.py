"""`admission` of a tier: blocks that are not written are counted, and undecided ones wait."""

import pytest

from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import reuse_capacity
from kvoffload_async.types import ReqContext, make_offload_key

CONFIG = {
    "cpu_bytes_to_use": "64KiB",
    "block_bytes": "4KiB",
    "model": "m",
    "secondary_tiers": [{"type": "example", "admission": "reuse"}, {"type": "example"}],
}


def keys(names):
    return [make_offload_key(name.encode()) for name in names]


@pytest.fixture(params=["lru", "hd"])
def manager(request):
    config = {**CONFIG, "eviction_policy": request.param, "explain_requests": 2}
    with TieringOffloadingSpec(config) as spec:
        yield spec.get_manager()


def serve(manager, offered, *, ends_before_write=False, evicts=False):
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    granted = manager.prepare_store(keys(offered), ctx)
    if ends_before_write:
        manager.on_request_finished(ctx)
    manager.complete_store(granted.keys_to_store, ctx)
    if evicts:
        manager.reset_cache()
        manager.on_reset_flushed()
    if not ends_before_write:
        manager.on_request_finished(ctx)
    finish_jobs(manager)


def finish_jobs(manager):
    manager.on_schedule_end()
    while manager.has_pending_work():
        manager.wait_for_progress(1.0)
        manager.on_schedule_end()


def figures(manager):
    return [(tier.stored_blocks, tier.declined_blocks) for tier in manager.stats().tiers]


def probabilities(manager, **by_class):
    admission = manager.planner.cascades.admission
    admission._is_likely = lambda index, kind: kind in by_class["likely"]


def test_unlikely_blocks_are_declined_by_that_tier_alone(manager):
    probabilities(manager, likely=())
    serve(manager, "abc")
    assert figures(manager) == [(0, 3), (3, 0)]
    assert "example: 3 blocks declined: their reuse is unlikely" in str(manager.explain("r"))


def test_undecided_blocks_are_stored_or_declined_when_the_request_ends(manager):
    probabilities(manager, likely=(10,))
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    many = keys([f"{number:04}" for number in range(12)])
    granted = manager.prepare_store(many, ctx)
    manager.complete_store(granted.keys_to_store, ctx)
    finish_jobs(manager)
    assert figures(manager)[0] == (0, 0)  # 12 blocks, of a prompt that may still grow to 16
    ctx.key_positions.update({key: end for end, key in enumerate([*many, *keys("wxyz")], 1)})
    manager.on_request_finished(ctx)
    finish_jobs(manager)
    assert figures(manager)[0] == (12, 0)


def test_a_write_that_ends_after_its_request_is_decided_at_once(manager):
    probabilities(manager, likely=(10,))
    serve(manager, "abc", ends_before_write=True)
    assert figures(manager)[0] == (0, 3)


def test_blocks_that_a_reset_has_dropped_are_not_waited_for(manager):
    probabilities(manager, likely=(10,))
    serve(manager, "abc", evicts=True)
    assert figures(manager)[0][0] == 0


def test_reused_blocks_that_the_tier_lacks_are_stored_once_they_are_likely(manager):
    probabilities(manager, likely=(1,))
    serve(manager, "abc")
    assert figures(manager)[0][0] == 0
    probabilities(manager, likely=(1, 2))
    serve(manager, "abc")
    assert figures(manager)[0][0] == 3


@pytest.mark.parametrize(
    ("likely", "other", "declined"),
    [((), "reuse", 3), ((0,), "reuse", 2), ((9,), "reuse", 0), ((), "all", 0)],
)
def test_the_primary_declines_what_no_tier_stores(likely, other, declined):
    tiers = [{"type": "example", "admission": each} for each in ("reuse", other)]
    config = {**CONFIG, "cpu_bytes_to_use": "8KiB", "eviction_policy": "hd"}
    with TieringOffloadingSpec({**config, "secondary_tiers": tiers}) as spec:
        manager = spec.get_manager()
        admission = manager.planner.cascades.admission
        admission._is_likely = lambda index, kind: index == 0 and kind in likely
        policy = manager.planner.primary.policy
        serve(manager, "xy")
        policy.duel.is_density = True
        policy.model.tables.density = [[float(kind in range(1, 6))] * 26 for kind in range(12)]
        serve(manager, "xy")
        serve(manager, "abc")
        assert manager.stats().primary.declined_blocks == declined


def test_the_capacity_of_a_tier_is_in_blocks():
    assert reuse_capacity({"type": "slab", "capacity_bytes": "1MiB"}, 4096) is None
    assert reuse_capacity({"admission": "all"}, 4096) is None
    assert reuse_capacity({"admission": "reuse", "capacity_bytes": "1MiB"}, 4096) == 256
    assert reuse_capacity({"admission": "reuse"}, 4096) == float("inf")
