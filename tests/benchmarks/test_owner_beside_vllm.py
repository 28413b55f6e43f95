"""What our manager and vLLM's cost the scheduler's thread, each over a tier that costs nothing.

Method: one process; what the two managers are asked alternates, and each call is given what vLLM's
scheduler gives it: ours a prompt at once, as `KVOffloadConnector` does, vLLM's its blocks one by
one. The processor time of the thread is taken. A row is a call, or a step of all requests; printed
is the median of either side, and their ratio. Nothing is asserted about time. The goal is a ratio
of at most 1 in each row.

    pytest tests/benchmarks/test_owner_beside_vllm.py --benchmark-enable -s

Collected where vLLM is installed. Without the option it only shows that it works.
"""

import gc
import hashlib
import importlib.util
import statistics
import time
from collections import defaultdict

import numpy as np
import pytest

from kvoffload_async import AsyncTier, TierCapabilities
from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import SecondaryTierFactory

pytestmark = [
    pytest.mark.bench,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own, when they are imported
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
SLOT_BYTES = 4096
DEADLINE_S = 20.0
PLAIN, MEASURED = [(2, 4)], [(64, 512), (128, 512), (256, 512), (16, 2000)]
"""Requests, and blocks of each."""


class SetTier(AsyncTier):
    """Has what was stored, and moves no bytes."""

    capabilities = TierCapabilities(exclusive=True)
    bounds = TierBounds(concurrent_loads=8, concurrent_stores=8, queued_jobs=4096)

    async def open(self, env):
        pass

    async def contains(self, keys):
        return frozenset()

    async def store(self, job):
        return {}

    async def load(self, job):
        return {}

    async def close(self):
        pass


def their_tier(view):
    """Return a tier of vLLM's that has what was stored, and moves no bytes."""
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.tiering import base as tiering

    def nothing(_tier, *_given):
        pass

    class Theirs(tiering.SecondaryTierManager):
        tier_type, medium, locality = "set", base.Medium.STORAGE, None
        bp_detector = _bp_detector = None
        primary_kv_view, keys, ended = view, set(), []

        def lookup(self, key, context):
            return base.LookupResult.HIT if key in self.keys else base.LookupResult.MISS

        def submit_store(self, job):
            self.keys.update(job.keys)
            self.submit_load(job)

        def submit_load(self, job):
            self.ended.append(tiering.JobResult(job.job_id, True, transfer_time=0.01))

        def get_finished_jobs(self):
            ended = self.ended[:]
            self.ended.clear()
            return ended

        def has_pending_work(self):
            return bool(self.ended)

        def on_new_request(self, context):
            return base.RequestOffloadingContext()

        def take_events(self):
            return ()

        touch = on_request_finished = serve_external_requests = on_schedule_end = nothing
        get_stats = drain_jobs = shutdown = nothing

        def __init__(self):
            pass

    return Theirs()


def vllm_manager(slots):
    """Return vLLM's manager over such a tier."""
    from vllm.v1.kv_offload.tiering import manager

    class Region:
        mmap_path = "/nowhere"

        def create_kv_memoryview(self):
            return memoryview(np.zeros((slots, SLOT_BYTES), np.uint8))

        def cleanup(self):
            pass

    primary = manager.CPUPrimaryTierOffloadingManager(slots, Region())
    return manager.TieringOffloadingManager(primary, [their_tier(primary.get_kv_memoryview())])


class Side:
    """One of the two managers, and what vLLM's scheduler does with it."""

    def __init__(self, manager, num_blocks):
        from vllm.v1.kv_offload import base

        self.base, self.manager, self.num_blocks = base, manager, num_blocks
        self.is_ours = hasattr(manager, "lookup_prefix")
        self.took = defaultdict(list)

    def timed(self, row, call, *args):
        """Return what a call returns; note the microseconds that it took."""
        began_ns = time.thread_time_ns()
        answer = call(*args)
        self.took[row].append((time.thread_time_ns() - began_ns) / 1000)
        return answer

    def keys(self, name, count=None):
        hashed, keys = name.encode(), []
        for _ in range(count or self.num_blocks):
            hashed = hashlib.sha256(hashed).digest()
            keys.append(self.base.make_offload_key(hashed, 0))
        return keys

    def context(self, name, keys):
        context = self.base.ReqContext(req_id=name)
        for position, key in enumerate(keys, 1):
            context.set_offload_key_position(key, 16 * position)
        return context

    def look_up(self, keys, context):
        """Return how many blocks are hits, as vLLM's scheduler asks; None: ask again."""
        if self.is_ours:
            found, is_deferred = self.manager.lookup_prefix(keys, context)
            return None if is_deferred else found
        answers = self.base.LookupResult
        found, is_deferred = 0, False
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is answers.MISS:
                break
            is_deferred = is_deferred or answer is not answers.HIT
            found += 1
        return None if is_deferred else found

    def end_step(self, new=()):
        self.manager.on_schedule_end(self.base.ScheduleEndContext(list(new), ()))

    def wait(self):
        """Wait for a copy of our tier; vLLM's has ended all at once."""
        if self.is_ours:
            assert self.manager.manager.wait_for_progress(DEADLINE_S)

    def finish_jobs(self):
        """End steps until nothing is under way."""
        self.end_step()
        while self.manager.has_pending_work():
            self.wait()
            self.end_step()
        self.end_step()

    # -- what is measured -----------------------------------------------------------------------

    def miss_and_store(self, names):
        """Requests come that nobody knows, and store all their blocks."""
        keys = {name: self.keys(name) for name in names}
        contexts = {name: self.context(name, keys[name]) for name in names}
        for name in names:
            self.timed("a request begins", self.manager.on_new_request, contexts[name])

        def look_up_all():
            for name in names:
                assert self.look_up(keys[name], contexts[name]) == 0

        self.timed("a step: all requests miss their first block", look_up_all)
        self.end_step(names)
        for name in names:
            store = self.manager.prepare_store
            granted = self.timed("prepare_store", store, keys[name], contexts[name])
            assert len(granted.keys_to_store) == len(keys[name])
        for name in names:
            self.timed("complete_store", self.manager.complete_store, {*keys[name]}, contexts[name])
            self.timed("a step ends after a store", self.end_step)
            self.finish_jobs()
        for name in names:
            self.timed("touch", self.manager.touch, keys[name], contexts[name])
            self.timed("a request ends", self.manager.on_request_finished, contexts[name])
        self.finish_jobs()

    def hit_and_go_on(self, names):
        """The requests come again, load their blocks, and store one block now and then."""
        keys = {name: self.keys(name) for name in names}
        contexts = {name: self.context(f"again {name}", keys[name]) for name in names}
        more = {name: self.keys(f"more {name}", 4) for name in names}
        for name in names:
            context = contexts[name]
            self.manager.on_new_request(context)
            found = self.timed("a lookup: primary hits", self.look_up, keys[name], context)
            assert found == len(keys[name])
            self.timed("prepare_load", self.manager.prepare_load, keys[name], context)
            self.timed("a step ends after a load", self.end_step, [context.req_id])
            self.timed("complete_load", self.manager.complete_load, {*keys[name]}, context)
        for number in range(4):

            def store_one_each(at=number):
                for name in names:
                    self.manager.prepare_store([more[name][at]], contexts[name])
                self.end_step()
                for name in names:
                    self.manager.complete_store({more[name][at]}, contexts[name])

            self.timed("a step: all requests store one block", store_one_each)
            self.finish_jobs()
            self.timed("a step in which nothing happens", self.end_step)
        for name in names:
            self.manager.on_request_finished(contexts[name])
        self.finish_jobs()

    def promote(self, names):
        """Some requests find their blocks in the tier alone."""
        self.manager.reset_cache()
        if self.is_ours:
            self.manager.manager.on_reset_flushed()
        for name in names[:8]:
            keys = self.keys(name)
            context = self.context(f"late {name}", keys)
            self.manager.on_new_request(context)

            def begin(keys=keys, context=context):
                assert self.look_up(keys, context) is None
                self.end_step()

            self.timed("a step: a lookup in the tier, and its promotion", begin)
            found = self.timed("a lookup: pending again", self.look_up, keys, context)
            while found is None:
                self.end_step()
                self.wait()
                found = self.look_up(keys, context)
            assert found == len(keys)
            self.manager.on_request_finished(context)
        self.finish_jobs()


@pytest.fixture
def our_managers(monkeypatch):
    """Return a function that creates our manager, as under vLLM."""
    from kvoffload_async.integrations.vllm.manager import KVOffloadManager

    registry, specs = SecondaryTierFactory._registry, []
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "set": lambda: SetTier})

    def create(slots):
        config = {
            "cpu_bytes_to_use": slots * SLOT_BYTES,
            "block_bytes": SLOT_BYTES,
            "model": "bench",
            "prefault": False,
            "secondary_tiers": [{"type": "set"}],
        }
        specs.append(spec := TieringOffloadingSpec(config))
        return KVOffloadManager(spec.get_manager(), memoryview(bytearray(slots)), spec.shutdown)

    yield create
    for spec in specs:
        spec.shutdown()


def test_the_owners_time_beside_vllms_manager(our_managers, request):
    is_measured = request.config.getoption("benchmark_enable")
    for num_requests, num_blocks in MEASURED if is_measured else PLAIN:
        slots = 2 * num_requests * num_blocks + 4096
        sides = [Side(manager(slots), num_blocks) for manager in (our_managers, vllm_manager)]
        for number in range(3 if is_measured else 1):
            names = [f"{number} {each}" for each in range(num_requests)]
            for phase in (Side.miss_and_store, Side.hit_and_go_on, Side.promote):
                for side in sides[:: 1 if number % 2 else -1]:
                    gc.collect()
                    phase(side, names)
        ours, theirs = (side.took for side in sides)
        assert ours.keys() == theirs.keys()
        tell(f"\n{num_requests} requests of {num_blocks} blocks: us of ours, of vLLM's, ratio")
        for row, took in ours.items():
            mine, other = statistics.median(took), statistics.median(theirs[row])
            tell(f"{row:48} {mine:9.1f} {other:9.1f} {mine / other:6.2f}")


def tell(line):
    print(line)  # noqa: T201 - the figures are what this is for
