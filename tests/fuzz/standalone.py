"""A world of one tier alone: a `SecondaryTierManager`, to which jobs are submitted by hand."""

import random
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
from fuzz.common import (
    BLOCK_BYTES,
    GRACE_S,
    ON_DISK,
    calm,
    check_tier_sums,
    content,
    damage,
    draw_tier,
    holds,
    law,
    prompt,
)
from fuzz.tiers import SlowPool
from virtual_runner import LeftoverTasksError, VirtualRunner

from kvoffload_async import (
    JobMetadata,
    JobResult,
    LookupResult,
    ReqContext,
    SecondaryTierFactory,
    StateError,
    make_offload_key,
)
from kvoffload_async.runtime.bridge import Bridge

JUNK = 0xAA


@dataclass(frozen=True)
class Spec:
    """What a tier looks for in the spec that it belongs to."""

    runtime: Bridge | None


class Standalone:
    """The world; a step's name is a method's, and a number from which it draws the rest."""

    STEPS = {  # noqa: RUF012 - never changed
        "store": 8,
        "load": 8,
        "poll": 6,
        "end_step": 4,
        "look_up": 4,
        "wait": 4,
        "touch": 1,
        "finish": 1,
        "misuse": 1,
        "drain": 0.5,
        "abandon": 0.3,
        "damage": 1.5,
        "heal": 0.3,
        "restart": 0.5,
    }

    def __init__(self, chance, folder):
        self.folder = folder
        self.is_virtual = chance.random() < 0.9
        kinds = ("unreliable", "example", *ON_DISK) if self.is_virtual else ON_DISK
        self.config = {**draw_tier(chance, folder, kinds), "model": "fuzz"}
        # A tier whose copies go on is not closed, and keeps its files open.
        on_disk = "root_dir" in self.config
        self.close_s = (100.0 if on_disk else 1.0) if self.is_virtual else GRACE_S / 2
        self.rows = np.zeros((chance.choice((4, 12)), BLOCK_BYTES), np.uint8)
        self.chance = random.Random(chance.randrange(10**6))
        self.offered = set()
        self.next_id = 0
        self.open()

    def open(self):
        self.jobs, self.orphaned = {}, {}
        self.runner = VirtualRunner() if self.is_virtual else None
        bridge = Bridge(self.runner, lambda *_: SlowPool(self.chance)) if self.runner else None
        view = memoryview(self.rows)
        self.tier = SecondaryTierFactory.create_secondary_tier(self.config, view, Spec(bridge))

    def play(self, steps):
        try:
            for name, number in steps:
                getattr(self, name)(random.Random(number))
            self.rest()
            self.close()
        except BaseException:
            with suppress(Exception):
                self.tier.shutdown(1.0)
            if self.runner is not None:
                with suppress(Exception):
                    self.runner.close()
            raise

    # -- jobs -----------------------------------------------------------------------------------

    def keys(self, chance):
        return [make_offload_key(block_hash) for block_hash in prompt(chance)]

    def submit(self, chance, *, is_promotion):
        in_use = {slot for job in (self.jobs | self.orphaned).values() for slot in job.block_ids}
        free = sorted(set(range(len(self.rows))) - in_use)
        keys = self.keys(chance)[: len(free)]
        slots = np.array(chance.sample(free, len(keys)), np.int32)
        for key, slot in zip(keys, slots, strict=True):
            self.rows[slot] = JUNK if is_promotion else content(key)
        ctx = ReqContext(str(chance.randrange(3)))
        job = JobMetadata(self.next_id, tuple(keys), slots, is_promotion, ctx)
        self.next_id += 1
        self.jobs[job.job_id] = job
        if is_promotion:
            self.tier.submit_load(job)
        else:
            self.offered |= set(keys)
            self.tier.submit_store(job)

    def store(self, chance):
        self.submit(chance, is_promotion=False)

    def load(self, chance):
        self.submit(chance, is_promotion=True)

    def poll(self, _chance):
        for result in self.tier.get_finished_jobs():
            law(type(result) is JobResult, f"{result!r} is no result")
            law(result.job_id in self.jobs, f"a result too many, or of nobody's job: {result}")
            job = self.jobs.pop(result.job_id)
            landed = set(job.keys if result.success else result.successful_keys or ())
            law(landed <= set(job.keys), f"keys of another job: {result}")
            law(
                result.success or not job.keys or landed < set(job.keys),
                f"all landed, and yet: {result}",
            )
            law(result.success == (result.error is None), f"an error, or not: {result}")
            for key, slot in zip(job.keys, job.block_ids, strict=True):
                if job.is_promotion and key in landed:
                    law(key in self.offered, "a block is loaded that nobody has stored")
                    law(holds(self.rows[slot], key), f"wrong bytes are loaded into slot {slot}")
            if result.orphaned:
                self.orphaned[job.job_id] = job
        for job_id in self.tier.get_released_jobs():
            law(job_id in self.orphaned, f"job {job_id} is released, and was not orphaned")
            del self.orphaned[job_id]

    # -- the rest of the surface ----------------------------------------------------------------

    def end_step(self, _chance):
        self.tier.on_schedule_end()

    def look_up(self, chance):
        ctx = ReqContext("lookup")
        self.tier.on_new_request(ctx)
        for key in self.keys(chance):
            answer = self.tier.lookup(key, ctx)
            found = answer is LookupResult.HIT
            law(key in self.offered or not found, "a block is found that nobody has stored")

    def wait(self, chance):
        self.pass_time(chance.choice((0.0, 0.01, 0.2, 1.0, 40.0)))

    def pass_time(self, seconds):
        if self.runner is not None:
            self.runner.advance(seconds)
        else:
            time.sleep(min(seconds, 0.002))  # noqa: TID251 - it runs on threads

    def touch(self, chance):
        self.tier.touch(self.keys(chance), ReqContext("touch"))

    def finish(self, chance):
        self.tier.on_request_finished(ReqContext(str(chance.randrange(3))))

    def misuse(self, chance):
        """Submit jobs that cannot be done: each has its result, or is refused at once."""
        key = self.keys(chance)[0]
        keys, slots = chance.choice((([key, key], [0, 1]), ([key], [99]), ([key], [-1])))
        ctx = ReqContext("misuse")
        job = JobMetadata(self.next_id, tuple(keys), np.array(slots), chance.random() < 0.5, ctx)
        self.next_id += 1
        self.jobs[job.job_id] = JobMetadata(job.job_id, (), np.array([]), False, ctx)
        self.tier.submit_load(job) if job.is_promotion else self.tier.submit_store(job)
        job = JobMetadata(self.next_id, (key,), np.array([0, 1]), True, ctx)
        try:
            self.tier.submit_load(job)
        except StateError:
            return
        law(False, "a job with unequal lengths is accepted")

    def drain(self, chance):
        self.tier.drain_jobs(chance.choice((0.0, 0.01, 2.0)))

    def abandon(self, _chance):
        self.tier.abandon_jobs()

    def damage(self, chance):
        damage(chance, self.folder)

    def heal(self, _chance):
        calm([self.tier])
        self.pass_time(0.0)

    def restart(self, chance):
        if chance.random() < 0.5:
            self.rest()
        self.close()
        self.open()

    # -- the end --------------------------------------------------------------------------------

    def rest(self):
        """Let every job end; then nothing is left of any."""
        chance = random.Random(0)
        self.heal(chance)
        deadline_s = time.monotonic() + GRACE_S
        while self.jobs or self.orphaned or self.tier.has_pending_work():
            now_s = self.runner.now_s() if self.runner else time.monotonic()
            law(now_s < deadline_s + 200, f"jobs without an end: {[*self.jobs, *self.orphaned]}")
            self.end_step(chance)
            self.pass_time(1.0)
            self.poll(chance)
        check_tier_sums(self.tier.stats())

    def close(self):
        chance = random.Random(0)
        report = self.tier.shutdown(self.close_s)
        late = JobMetadata(self.next_id, (), np.array([], np.int32), True, ReqContext("late"))
        self.next_id += 1
        self.jobs[late.job_id] = late
        self.tier.submit_load(late)
        self.poll(chance)
        law(not self.jobs, f"jobs without a result after shutdown: {list(self.jobs)}")
        law(set(report.unfinished_jobs) == set(self.orphaned), f"{report}, but {self.orphaned}")
        check_tier_sums(self.tier.stats())
        if self.runner is not None:
            self.heal(chance)
            self.runner.advance(100.0)
            with nullcontext() if report.is_clean else suppress(LeftoverTasksError):
                self.runner.close()
