"""What recording requests costs: a replay with it against one without, in turn.

Method: the built-in workload over a tier in memory, so that nothing but the engine takes time;
pairs of replays, one that records and one that does not, which of them first in turn; the figure to
read is `ratio` in the extra information, the shortest time with recording over the shortest without
(others share the machine, and only ever add to a time): of the owner thread's processor time
(`owner`) and of the clock's (`wall`). Goal: under 1.05.

    pytest tests/benchmarks/test_recorder_cost.py --benchmark-enable --benchmark-only -v

Where nothing is recorded, how often somebody looks whether something is to be is counted.
"""

import itertools
import time
from dataclasses import replace

import pytest

from kvoffload_async import TieringOffloadingManager, TieringOffloadingSpec
from kvoffload_async.core.planner import Planner
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.replay.drivers import ReplayOptions
from kvoffload_async.replay.run import replay
from kvoffload_async.replay.source import ChatWorkload
from kvoffload_async.testing.harness import key_of
from kvoffload_async.types import ReqContext

pytestmark = pytest.mark.bench

NUM_KEPT = 128
NUM_REQUESTS = 100
CONFIG = {
    "cpu_bytes_to_use": "4MiB",
    "block_bytes": "16KiB",
    "model": "bench",
    "secondary_tiers": [{"type": "example"}],
}


def timed_replay(num_kept):
    spec = TieringOffloadingSpec(CONFIG)
    if num_kept:
        spec = TieringOffloadingSpec(replace(spec.config, explain_requests=num_kept))
    began_s, began_owner_s = time.perf_counter(), time.thread_time()
    report = replay(spec, ChatWorkload(NUM_REQUESTS), ReplayOptions(verify=False, layers=1))
    assert report.requests == NUM_REQUESTS
    return time.thread_time() - began_owner_s, time.perf_counter() - began_s


def test_a_replay_that_records_against_one_that_does_not(benchmark):
    times = {0: [], NUM_KEPT: []}
    orders = itertools.cycle([(0, NUM_KEPT), (NUM_KEPT, 0)])

    def pair():
        for num_kept in next(orders):
            times[num_kept].append(timed_replay(num_kept))

    benchmark.pedantic(pair, rounds=40, warmup_rounds=1)
    best = {kept: map(min, zip(*each, strict=True)) for kept, each in times.items()}
    ratios = [on / off for on, off in zip(best[NUM_KEPT], best[0], strict=True)]
    benchmark.extra_info["ratio"] = dict(zip(("owner", "wall"), ratios, strict=True))


class Watched(TieringOffloadingManager):
    """Counts how often `recorder` is looked at."""

    looks = 0

    @property
    def recorder(self):
        type(self).looks += 1

    @recorder.setter
    def recorder(self, value):
        assert value is None


def test_where_nothing_is_recorded_no_step_looks_at_the_recorder():
    manager = Watched(CPUPrimaryTierOffloadingManager(8), [])
    assert type(manager.planner) is Planner, "and not one that records"
    Watched.looks = 0
    ctx = ReqContext("r")
    keys = [key_of(number) for number in range(8)]
    for step in range(1, 5):
        if step == 1:
            manager.on_new_request(ctx)
            manager.prepare_store(keys, ctx)
            manager.complete_store(keys, ctx)
        for key in keys:
            manager.lookup(key, ctx)
        manager.prepare_load(keys, ctx)
        manager.complete_load(keys, ctx)
        manager.on_schedule_end()
    manager.on_request_finished(ctx)
    assert not Watched.looks
    manager.shutdown()
