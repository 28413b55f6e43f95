"""What the fuzzer puts behind an engine: tiers that fail, and managers that lie.

None of them ever makes up bytes: what they say landed has landed, and what they say is over is.
"""

import asyncio
import errno
import random

import numpy as np

from kvoffload_async import (
    AsyncTier,
    BlockMissingError,
    JobResult,
    LookupResult,
    SecondaryTierManager,
    TierCapabilities,
)
from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.errors import TierFullError
from kvoffload_async.testing import Fault, FaultPlan, FaultyTier

NONSENSE = (None, 7, "text", {None: None}, object(), [None], float("nan"))


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text either")


def some_error(chance):
    kinds = (RuntimeError, ValueError, UnprintableError, SystemExit, TimeoutError, KeyError)
    return chance.choice([kind("drawn") for kind in kinds] + [OSError(errno.EIO, "drawn")])


async def deaf_sleep(seconds):
    """Sleep to the end, as a system call does; a cancellation is delivered then."""
    loop = asyncio.get_running_loop()
    end_s, cancelled = loop.time() + seconds, None
    while True:
        try:
            await asyncio.sleep(max(0.0, end_s - loop.time()))
            break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class SlowPool:
    """An I/O pool without threads, whose calls take some virtual time."""

    def __init__(self, chance):
        self.chance = chance

    async def run(self, direction, call, **_options):
        seconds = self.chance.choice((0.0, 0.0, 0.001, 0.1))
        try:
            await deaf_sleep(seconds)
        finally:
            result = call()
        return result

    def close(self, timeout_s):
        return 0

    def abandon(self):
        raise AssertionError("nothing hangs while it opens")


class MemoryTier(AsyncTier):
    """Blocks in a dictionary with a bound, moved a block at a time; forgets some, on its own."""

    def __init__(self, seed=0, capacity=1000, exclusive=True, request_level=False):
        self.chance = random.Random(seed)
        self.capacity = capacity
        self.capabilities = TierCapabilities(exclusive=exclusive, request_level=request_level)
        self.bounds = TierBounds(
            concurrent_loads=self.chance.choice((1, 4)),
            queued_jobs=self.chance.choice((1, 4, 1024)),
        )
        self.blocks = {}
        self.is_calm = False

    async def open(self, env):
        self.env, self.rows = env, np.asarray(env.kv_view)

    async def contains(self, keys):
        await self.take_time()
        return self.blocks.keys() & set(keys)

    async def store(self, job):
        failures = {}
        for index, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            await self.take_time()
            if len(self.blocks) >= self.capacity and self.chance.random() < 0.5:
                failures[index] = TierFullError("full")
                continue
            while len(self.blocks) >= self.capacity:
                self.forget(next(iter(self.blocks)))
            self.blocks.setdefault(key, self.rows[slot].copy())
        return self.outcome(failures)

    async def load(self, job):
        failures = {}
        for index, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            await self.take_time()
            if key in self.blocks:
                self.rows[slot] = self.blocks[key]
            else:
                failures[index] = BlockMissingError(key.hex())
        return self.outcome(failures)

    async def close(self):
        self.rows = None

    async def take_time(self):
        if not self.is_calm and self.blocks and self.chance.random() < 0.02:
            self.forget(self.chance.choice(list(self.blocks)))
        await deaf_sleep(self.chance.choice((0.0, 0.0, 0.001, 0.5)))

    def forget(self, key):
        del self.blocks[key]
        if self.capabilities.exclusive:
            self.env.blocks_evicted([key])

    def outcome(self, failures):
        """Return what failed, or nonsense."""
        if self.is_calm or self.chance.random() < 0.95:
            return failures
        wrong = (*NONSENSE, {99: BlockMissingError("")}, {0: "text"}, {"0": BlockMissingError("")})
        return self.chance.choice(wrong)

    def gauges(self):
        if not self.is_calm and self.chance.random() < 0.1:
            raise some_error(self.chance)
        return {"blocks": len(self.blocks)}


class UnreliableTier(FaultyTier):
    """A memory tier, with all faults there are."""

    def __init__(self, seed=0, trouble=0.2, capacity=1000, exclusive=True, request_level=False):
        weights = dict.fromkeys(Fault, trouble) | {Fault.NONE: 1.0}
        plan = FaultPlan(seed, weights, slow_s=random.Random(seed).choice((0.1, 10.0)))
        super().__init__(MemoryTier(seed, capacity, exclusive, request_level), plan)

    def calm(self):
        """Do as a tier should, from now on. Thread: loop."""
        self.plan = FaultPlan()
        self.inner.is_calm = True
        self.release()


class LyingManager(SecondaryTierManager):
    """A third party's manager: reports late, twice, nonsense, others' jobs, or raises.

    Bytes move before it reports them, or never.
    """

    def __init__(
        self, offloading_spec, primary_kv_view, tier_type="liar", *, seed=0, trouble=0.2, **options
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, MemoryTier(seed), **options)
        self.chance = random.Random(seed)
        self.trouble = trouble
        self.rows = np.asarray(primary_kv_view)
        self.blocks, self.jobs, self.orphaned = {}, [], []
        self.reported, self.withheld = [], []

    def calm(self):
        self.trouble = 0.0

    def _lies(self):
        return self.chance.random() < self.trouble

    def _may_fail(self, honest=None):
        """Return an honest answer, or another one, or raise."""
        if not self._lies():
            return honest
        if self.chance.random() < 0.5:
            raise some_error(self.chance)
        return self.chance.choice(NONSENSE)

    def on_new_request(self, req_context):
        return self._may_fail(super().on_new_request(req_context))

    def on_request_finished(self, req_context):
        self._may_fail()

    def on_schedule_end(self, context=None):
        self._may_fail()

    def touch(self, keys, req_context):
        self._may_fail()

    def take_events(self):
        return self._may_fail(iter(()))

    def has_pending_work(self):
        return self._may_fail(bool(self.jobs or self.orphaned))

    def drain_jobs(self, timeout=30.0):
        return self._may_fail(honest=False)

    def lookup(self, key, req_context):
        honest = LookupResult.HIT if key in self.blocks else LookupResult.MISS
        if self._lies():
            return self.chance.choice((LookupResult.RETRY, LookupResult.HIT, LookupResult.MISS))
        return self._may_fail(honest)

    def submit_store(self, job_metadata):
        self._may_fail()
        self.jobs.append(job_metadata)

    submit_load = submit_store

    def get_finished_jobs(self):
        self.chance.shuffle(self.jobs)
        while self.jobs and not self._lies():
            job = self.jobs.pop()
            if self._lies():
                self.orphaned.append(job)
                yield JobResult(job.job_id, success=False, orphaned=True)
                continue
            truth, told = self._answers_of(job)
            self.withheld.append(truth)
            said = self._may_fail(told)
            yield said
            if said is truth:
                self.withheld.remove(truth)
        while self.withheld and not self.trouble:
            yield self.withheld.pop()
        if self._lies():
            others = (JobResult(10**9, success=True), JobResult(-1, success=False), *self.reported)
            yield self.chance.choice(others)
            yield self.chance.choice(NONSENSE)

    def get_released_jobs(self):
        while self.orphaned and not self._lies():
            job = self.orphaned.pop()
            self._move(job)
            yield job.job_id
        if self._lies():
            yield self.chance.choice((*NONSENSE, 10**9, -1))

    def _move(self, job):
        landed = []
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
            if not job.is_promotion:
                self.blocks.setdefault(key, self.rows[slot].copy())
            elif key in self.blocks:
                self.rows[slot] = self.blocks[key]
            else:
                continue
            landed.append(key)
        return frozenset(landed)

    def _answers_of(self, job):
        """Move a job's bytes; return what is to be said of it, and what is said."""
        job_id, landed = job.job_id, self._move(job)
        is_whole = len(landed) == len(job.keys)
        truth = JobResult(job_id, is_whole, landed)
        self.reported = [truth, *self.reported[:3]]
        if not self._lies():
            return truth, truth
        others = (
            JobResult(job_id, success=1),
            JobResult(job_id, success=False, successful_keys=frozenset({b"another's"})),
            JobResult(job_id, success=False, successful_keys=list(landed)),
            JobResult(job_id, success=False, error="text"),
            JobResult(job_id, is_whole, landed, transfer_time=float("nan")),
            JobResult(job_id, is_whole, landed, transfer_bytes=-5),
            JobResult(job_id, success=False, error=UnprintableError()),
            JobResult([], success=is_whole),
        )
        return truth, self.chance.choice(others)

    def shutdown(self, timeout=None):
        self.rows = None
        return self._may_fail(super().shutdown(timeout))
