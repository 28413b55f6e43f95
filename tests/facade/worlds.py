"""Managers on a virtual loop, over tiers and I/O that do as the test says."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from scripted_tier import ScriptedTier
from virtual_runner import VirtualRunner

from kvoffload_async.abc.tier import TierBounds, TierCapabilities
from kvoffload_async.core.invariants import check_state
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import InlineIo, ScriptedIo
from kvoffload_async.testing.harness import content_of, key_of, make_job
from kvoffload_async.types import LookupResult, ReqContext

SLOT_BYTES = 32
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY

EXCLUSIVE = TierCapabilities(exclusive=True)
PROBED = TierCapabilities(exclusive=False)
REQUEST_LEVEL = TierCapabilities(exclusive=True, request_level=True)


class UnpooledInlineIo(InlineIo):
    def close(self, timeout_s):
        return 0

    def abandon(self):
        raise AssertionError("nothing hangs")


class PooledScriptedIo(ScriptedIo):
    """A scripted pool: closing it leaves what is parked, like threads that hang in a call."""

    def close(self, timeout_s):
        return len(self.parked)

    def abandon(self):
        self.parked.clear()


class FakeHost:
    """A virtual runner and a bridge over it whose pools the test holds."""

    def __init__(self, pool=UnpooledInlineIo):
        self.runner = VirtualRunner()
        self.pools = []

        def create_pool(*_threads):
            self.pools.append(pool())
            return self.pools[-1]

        self.bridge = Bridge(self.runner, create_pool)


def k(number):
    return key_of(number)


def ks(*numbers):
    return [key_of(number) for number in numbers]


class World:
    """A tiering manager over scripted tiers, in virtual time, with real bytes.

    Attributes:
        hung: Which tier hangs: nothing ends there. None: none does.
    """

    def __init__(
        self,
        *tiers,
        num_slots=8,
        manager_class=SecondaryTierManager,
        io_timeout_s=30.0,
        pool=UnpooledInlineIo,
        copies_each=1_000,
        **options,
    ):
        self.host = FakeHost(pool)
        self.runner = self.host.runner
        self.bridge = self.host.bridge
        self.tiers = [t if not isinstance(t, TierCapabilities) else scripted(t) for t in tiers]
        self.hung = None
        self.buffer = PrimaryBuffer(num_slots, SLOT_BYTES, prefault=False)
        self.rows = np.asarray(self.buffer.view)
        self.primary = CPUPrimaryTierOffloadingManager(
            num_slots, buffer=self.buffer, enable_events=True
        )
        if not isinstance(manager_class, tuple):
            manager_class = (manager_class,) * len(self.tiers)
        self.secondaries = [
            manager_class[index](
                None,
                self.buffer.view,
                f"tier{index}",
                tier,
                runtime=self.bridge,
                io_timeout_s=io_timeout_s,
                enable_kv_events=True,
            )
            for index, tier in enumerate(self.tiers)
        ]
        self.manager = TieringOffloadingManager(
            self.primary,
            self.secondaries,
            bridge=self.bridge,
            clock=self.runner.now_s,
            check_invariants=True,
            **options,
        )
        if copies_each is not None:
            self.manager.planner.room.copies_each = copies_each
        self.contexts = {}

    # -- the scheduler ----------------------------------------------------------------------

    def begin(self, req_id, **kwargs):
        ctx = self.contexts[req_id] = ReqContext(req_id, **kwargs)
        return self.manager.on_new_request(ctx)

    def finish(self, req_id):
        self.manager.on_request_finished(self.contexts.pop(req_id))

    def lookup(self, number, req_id="r"):
        return self.manager.lookup(k(number), self.contexts[req_id])

    def prepare_store(self, *numbers, req_id="r"):
        output = self.manager.prepare_store(ks(*numbers), self.contexts[req_id])
        if output is not None:
            for key, slot in zip(
                output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True
            ):
                self.rows[slot] = content_of(key, SLOT_BYTES)
        return output

    def complete_store(self, *numbers, req_id="r", success=True):
        self.manager.complete_store(ks(*numbers), self.contexts[req_id], success)

    def store(self, *numbers, req_id="r"):
        output = self.prepare_store(*numbers, req_id=req_id)
        assert output is not None
        self.complete_store(*numbers, req_id=req_id)

    def load(self, *numbers, req_id="r"):
        """Load keys that are HIT and compare their bytes."""
        spec = self.manager.prepare_load(ks(*numbers), self.contexts[req_id])
        for number, slot in zip(numbers, spec.block_ids.tolist(), strict=True):
            assert bytes(self.rows[slot]) == bytes(content_of(k(number), SLOT_BYTES))
        self.manager.complete_load(ks(*numbers), self.contexts[req_id])

    def step(self):
        """End a scheduler step and let the loop do what it can in no time."""
        self.manager.on_schedule_end()
        self.runner.run_ready()
        check_state(self.manager.planner)

    def poll(self):
        """End the step and begin another one, in which results are taken in."""
        self.step()
        self.step()

    # -- the tiers --------------------------------------------------------------------------

    def parked(self, index=0):
        return self.tiers[index].parked

    def finish_job(self, index=0, at=0, **outcome):
        self.tiers[index].finish(self.parked(index)[at], **outcome)
        self.runner.run_ready()

    @property
    def healthy(self):
        """The tiers that do not hang, by their numbers."""
        return {index: tier for index, tier in enumerate(self.tiers) if index != self.hung}

    def finish_all(self):
        while any(tier.parked for tier in self.healthy.values()):
            for tier in self.healthy.values():
                tier.finish_all()
            self.runner.run_ready()

    def has_pending(self, index):
        """Tell whether a tier has jobs, or copies of late ones, or blocks pending for it."""
        planner = self.manager.planner
        jobs = planner.tiers[index].jobs
        is_pending = bool(planner.cascades.queues[index].count)
        return is_pending or any(True for _ in (*jobs.unreported(), *jobs.orphaned()))

    def check_what_the_hung_tier_leaves(self):
        """With nothing else under way: all is there for stores but the hung tier's copies."""
        room, num_slots = self.manager.planner.room, self.primary.core.num_slots
        hung = [tier for i, tier in enumerate(self.manager.planner.tiers) if i not in self.healthy]
        assert all(tier.promotion_slots <= num_slots - room.reserved for tier in hung)
        assert all(tier.cascading_blocks <= room.copies_each for tier in hung)
        left = num_slots - sum(tier.promotion_slots + tier.cascading_blocks for tier in hung)
        assert self.counts["free"] + self.counts["idle"] >= left
        return left

    def rest(self, steps=10):
        """Let everything end well, step by step."""
        for _ in range(steps):
            self.step()
            self.finish_all()
        assert not self.manager.has_pending_work()

    def evict_everything(self):
        """Push what is idle out of the primary, without a trace in the tiers."""
        self.rest()
        self.manager.reset_cache()
        self.manager.on_reset_flushed()

    @property
    def counts(self):
        return self.primary.core.counts

    def end(self):
        """Shut down; memory, loop and tasks must all be gone afterwards."""
        self.hung = None
        try:
            self.manager.shutdown(1.0)
        finally:
            self.finish_all()
            for tier in self.tiers:
                tier._env = None
            self.rows = None
            for secondary in self.secondaries:
                secondary.link._view.release()
            released = self.buffer.release()
            self.runner.close()
        assert released


def scripted(capabilities=EXCLUSIVE, **options):
    return ScriptedTier(capabilities, TierBounds(), **options)


def filled(world, *numbers):
    """Put blocks into every tier, and nowhere else."""
    world.begin("filler")
    world.store(*numbers, req_id="filler")
    world.finish("filler")
    world.evict_everything()


class Refusing(SecondaryTierManager):
    """Raises out of `submit_*` when it is told to."""

    refuses = False

    def submit_store(self, job_metadata):
        self._maybe_refuse()
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata):
        self._maybe_refuse()
        super().submit_load(job_metadata)

    def _maybe_refuse(self):
        if self.refuses:
            raise RuntimeError("third-party code")


class Hearing(SecondaryTierManager):
    """Notes what it hears of requests and jobs."""

    def __init__(self, *args, **kwargs):
        self.heard = []
        super().__init__(*args, **kwargs)

    def on_new_request(self, req_context):
        self.heard.append(("new", req_context.req_id))
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context):
        self.heard.append(("finished", req_context.req_id))
        super().on_request_finished(req_context)

    def submit_store(self, job_metadata):
        self.heard.append(("store", job_metadata.req_context.req_id))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata):
        self.heard.append(("load", job_metadata.req_context.req_id))
        super().submit_load(job_metadata)


class Counting(SecondaryTierManager):
    """Counts the jobs that it accepted and the results that it gave; refuses when told to."""

    def __init__(self, *args, **kwargs):
        self.accepted = Counter()
        self.reported = Counter()
        self.refuses = False
        super().__init__(*args, **kwargs)

    def submit_store(self, job_metadata):
        self._count(job_metadata)
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata):
        self._count(job_metadata)
        super().submit_load(job_metadata)

    def get_finished_jobs(self):
        results = list(super().get_finished_jobs())
        self.reported.update(result.job_id for result in results)
        return results

    def _count(self, job):
        if self.refuses:
            raise RuntimeError("third-party code")
        self.accepted[job.job_id] += 1


class Alone:
    """One manager on a virtual loop, over a tier that parks everything."""

    def __init__(self, capabilities=EXCLUSIVE, **options):
        self.tier = scripted(capabilities)
        self.host = FakeHost()
        self.view = memoryview(bytearray(8 * 16)).cast("B", (8, 16))
        self.manager = SecondaryTierManager(
            None, self.view, "t", self.tier, runtime=self.host.bridge, **options
        )

    def submit(self, job_id, numbers=(1,), *, is_promotion=False, slots=None):
        keys = ks(*numbers)
        job = make_job(
            job_id, keys, range(len(keys)) if slots is None else slots, is_promotion=is_promotion
        )
        submit = self.manager.submit_load if is_promotion else self.manager.submit_store
        submit(job)

    def run(self):
        self.manager.on_schedule_end()
        self.host.runner.run_ready()

    def finish_job(self, index=0, **outcome):
        self.tier.finish(self.tier.parked[index], **outcome)
        self.host.runner.run_ready()

    def results(self):
        return {result.job_id: result for result in self.manager.get_finished_jobs()}

    def end(self):
        self.manager.shutdown(0.1)
        while self.tier.parked:
            self.tier.finish_all()
            self.host.runner.run_ready()
        self.host.runner.close()


@dataclass
class DeviceCopy:
    """A copy between device and primary that the scheduler waits for."""

    ctx: ReqContext
    slots: dict
    generation: int | None = None
