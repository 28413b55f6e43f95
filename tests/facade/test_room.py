"""Bursts of hits that a scheduler sees through a small primary."""

import time

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.types import LookupResult, ReqContext, make_offload_key

SLOTS, PROMPTS, BLOCKS = 64, 6, 12
HIT = LookupResult.HIT


def prompt(number):
    return [make_offload_key(f"{number}.{block}".encode()) for block in range(BLOCKS)]


def store_all(manager):
    for number in range(PROMPTS):
        ctx = ReqContext(f"store{number}")
        manager.on_new_request(ctx)
        output = manager.prepare_store(prompt(number), ctx)
        manager.complete_store(output.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        drain(manager)


def drain(manager):
    deadline_s = time.monotonic() + 60
    while True:
        manager.on_schedule_end()
        if not manager.has_pending_work():
            return
        assert time.monotonic() < deadline_s
        manager.wait_for_progress(1.0)


def load_all(manager):
    """Ask for each request in each step, as a scheduler does; return the hits."""
    waiting, loading, hits = {}, [], 0
    for number in range(PROMPTS):
        ctx = ReqContext(f"load{number}")
        manager.on_new_request(ctx)
        waiting[ctx] = prompt(number)
    deadline_s = time.monotonic() + 60
    while waiting or loading:
        assert time.monotonic() < deadline_s
        ended, loading = loading, []
        for ctx, keys in ended:
            manager.complete_load(keys, ctx)
            manager.on_request_finished(ctx)
        for ctx, keys in list(waiting.items()):
            answers = [manager.lookup(key, ctx) for key in keys]
            if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers):
                continue
            found = answers.index(LookupResult.MISS) if LookupResult.MISS in answers else BLOCKS
            hits += found
            manager.prepare_load(keys[:found], ctx)
            loading.append((ctx, keys[:found]))
            del waiting[ctx]
        manager.on_schedule_end()
        manager.wait_for_progress(0.01)
    return hits


def test_a_burst_of_hits_in_the_slab_hits_all(tmp_path):
    """Of 6 prompts of 12 blocks, all in the tier, 36 blocks of 72 were hits."""
    config = {
        "cpu_bytes_to_use": SLOTS * 4096,
        "block_bytes": 4096,
        "model": "test",
        "check_invariants": True,
        "secondary_tiers": [
            {"type": "slab", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"},
        ],
    }
    with TieringOffloadingSpec(config) as spec:
        store_all(spec.get_manager())
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        assert load_all(manager) == PROMPTS * BLOCKS
        assert manager.stats().planner.promotions_refused == 0
