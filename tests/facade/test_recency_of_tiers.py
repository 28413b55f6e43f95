"""A prefix that everybody uses stays in the primary, and in the tier behind it as well."""

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.core.ledger import TouchBlocks
from kvoffload_async.testing.harness import key_of
from kvoffload_async.types import LookupResult, ReqContext

BLOCK_BYTES = 4096
PREFIX = [key_of(number) for number in range(4)]
DEADLINE_S = 60.0


def spec_over(root):
    return TieringOffloadingSpec(
        {
            "cpu_bytes_to_use": 32 * BLOCK_BYTES,
            "block_bytes": BLOCK_BYTES,
            "model": "test",
            "check_invariants": True,
            "secondary_tiers": [
                {
                    "type": "slab",
                    "root_dir": str(root),
                    "capacity_bytes": "512KiB",
                    "segment_bytes": "128KiB",
                }
            ],
        }
    )


def serve(manager, number):
    """One request: it finds the prefix, or computes it, and stores four blocks of its own."""
    keys = [*PREFIX, *(key_of(1000 + 4 * number + i) for i in range(4))]
    ctx = ReqContext(f"r{number}", key_positions={key: i for i, key in enumerate(keys, 1)})
    manager.on_new_request(ctx)
    found = [key for key in PREFIX if manager.lookup(key, ctx) is LookupResult.HIT]
    manager.prepare_load(found, ctx)
    manager.complete_load(found, ctx)
    granted = manager.prepare_store(keys[len(found) :], ctx)
    assert granted is not None
    manager.complete_store(granted.keys_to_store, ctx)
    manager.on_request_finished(ctx)


def finish_jobs(manager):
    manager.on_schedule_end()
    while manager.has_pending_work():
        assert manager.wait_for_progress(DEADLINE_S)
        manager.on_schedule_end()


def test_after_a_restart_the_prefix_of_sixty_requests_is_in_the_slab(tmp_path):
    with spec_over(tmp_path) as spec:
        manager = spec.get_manager()
        (tier,) = manager.planner.tiers
        touches = []
        take_effects = tier.take_effects

        def counted():
            effects = take_effects()
            touches.append(sum(isinstance(effect, TouchBlocks) for effect in effects))
            return effects

        tier.take_effects = counted
        for number in range(60):
            serve(manager, number)
            finish_jobs(manager)
        counters = tier.counters
        assert counters.stored_blocks > 200, "the store is turned over a few times"
        assert max(touches) == 1
        assert sum(touches) == 59
    with spec_over(tmp_path) as spec:
        manager = spec.get_manager()
        ctx = ReqContext("after the restart")
        manager.on_new_request(ctx)
        answers = [manager.lookup(key, ctx) for key in PREFIX]
        assert answers == [LookupResult.HIT_PENDING] * 4
        finish_jobs(manager)
        assert [manager.lookup(key, ctx) for key in PREFIX] == [LookupResult.HIT] * 4
