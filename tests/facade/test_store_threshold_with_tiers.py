"""A store threshold above a tier: what is not stored in the primary does not reach the tier."""

from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.types import LookupResult, ReqContext, make_offload_key


def test_a_block_reaches_the_tier_at_its_second_offer():
    config = {
        "cpu_bytes_to_use": "64KiB",
        "block_bytes": "4KiB",
        "model": "m",
        "store_threshold": 2,
        "secondary_tiers": [{"type": "example"}],
    }
    key = make_offload_key(b"block")
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        for offer, expected in enumerate([[], [key], []], 1):
            ctx = ReqContext(f"r{offer}")
            manager.on_new_request(ctx)
            granted = manager.prepare_store([key], ctx)
            assert list(granted.keys_to_store) == expected
            manager.complete_store(granted.keys_to_store, ctx)
            manager.on_request_finished(ctx)
            manager.on_schedule_end()
            while manager.has_pending_work():
                manager.wait_for_progress(1.0)
                manager.on_schedule_end()
            assert manager.stats().tiers[0].stored_blocks == (offer > 1)
        assert manager.lookup(key, _begun(manager)) is LookupResult.HIT


def _begun(manager):
    ctx = ReqContext("last")
    manager.on_new_request(ctx)
    return ctx
