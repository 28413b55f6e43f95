"""An actor in virtual time, over a tier that parks everything."""

import asyncio

from scripted_tier import Operation, ScriptedTier
from virtual_runner import VirtualRunner

from kvoffload_async.abc.events import JobFinished
from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import InlineIo
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers._actor import TierActor
from kvoffload_async.tiers._environment import ActorEnvironment

IO_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 2.0
LOAD, STORE, CONTAINS = Operation.LOAD, Operation.STORE, Operation.CONTAINS


class World:
    """An actor on a virtual loop, over a tier that parks everything."""

    def __init__(self, tier=None, **bounds):
        self.tier = tier or ScriptedTier(bounds=TierBounds(**bounds))
        self.events = []
        self.runner = VirtualRunner()
        self.buffer = PrimaryBuffer(8, 4096)
        env = ActorEnvironment(self.buffer.view, InlineIo(), self.events.append)
        self.actor = TierActor(
            "t",
            self.tier,
            env,
            io_timeout_s=IO_TIMEOUT_S,
            probe_timeout_s=PROBE_TIMEOUT_S,
            clock=self.runner.now_s,
        )

    def open(self):
        self.runner.run(self.actor.open(), 1.0)
        return self

    def start(self, job_id, numbers=(1,), *, is_promotion=False):
        keys = [key_of(n) for n in numbers]
        job = make_job(job_id, keys, range(len(keys)), is_promotion=is_promotion)
        self.runner.call_soon(self.actor.start_job, job)
        self.runner.run_ready()

    def probe(self, generation, numbers=(1,)):
        self.runner.call_soon(self.actor.probes.start, generation, [key_of(n) for n in numbers])
        self.runner.run_ready()

    def finish_job(self, index=0, *args, **kwargs):
        self.tier.finish(self.tier.parked[index], *args, **kwargs)
        self.runner.run_ready()

    def task(self, name):
        (task,) = [t for t in asyncio.all_tasks(self.runner.loop) if t.get_name() == name]
        return task

    def close(self, timeout_s=1.0):
        return self.runner.run(self.actor.close(timeout_s), 10.0)

    def finished(self):
        return {e.job_id: e for e in self.events if isinstance(e, JobFinished)}

    def running(self):
        return [p.job.job_id for p in self.tier.parked if p.job]
