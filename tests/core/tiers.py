"""Scripted tiers: they answer, and copy, as they are told.

Each stands for what is behind a tier's link: it takes the commands that the link would hand over,
and posts the events that the link would bring back. An external one is asked for every key.
"""

from core.memory import content
from core.terms import HIT, MISS, RETRY
from planner_invariants import FinishRequest

from kvoffload_async.abc.events import (
    BlocksAppeared,
    BlocksEvicted,
    JobFinished,
    JobOverdue,
    ProbeAnswered,
)
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import AskedIndex, CostGatedIndex, ExactIndex, ProbedIndex
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import BlockMissingError
from kvoffload_async.types import LookupResult, Medium, OffloadKey

MIB = 1 << 20
INDEXES = {
    "exact": ExactIndex,
    "probed": lambda: ProbedIndex(2),
    "cost_gated": lambda: CostGatedIndex(ProbedIndex(2), 2),
}
"""What the owner may know of a native tier."""


class _NotedState(TierState):
    """Notes among the effects where requests end."""

    def finish_request(self, ctx):
        super().finish_request(ctx)
        self.effects.append(FinishRequest(ctx))


class ScriptedTier:
    """What lies in a tier; no question is answered while `is_probing`."""

    def __init__(self):
        self.contents: dict[OffloadKey, str] = {}
        self.is_probing = False

    def copy(self, job, memory, failed):
        """Move a job's bytes; return the indices in `failed`, and those of what is not there."""
        failed = set(failed)
        for i, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            if not job.is_promotion:
                if i not in failed:
                    self.contents[key] = memory.slots[slot]
            elif i in failed or key not in self.contents:
                failed.add(i)
                memory.soil([slot])
            else:
                memory.slots[slot] = self.contents[key]
        return failed

    def fill(self, keys):
        """Have blocks from an earlier run."""
        self.contents.update((key, content(key)) for key in keys)


class NativeTier(ScriptedTier):
    """A built-in tier's actor."""

    def __init__(self, name, kind="exact", locality=None, **options):
        super().__init__()
        log = EventLog(Medium.STORAGE, locality, enabled=False)
        self.state = _NotedState(name, self.create_index(kind), MIB, log, **options)
        self.probes: dict[int, tuple[OffloadKey, ...]] = {}

    def create_index(self, kind):
        return INDEXES[kind]()

    def fill(self, keys):
        """Find blocks from an earlier run."""
        super().fill(keys)
        self.state.handle(BlocksAppeared(tuple(keys)))

    def lose(self, key, *, announced):
        """Drop a block; find that out now, or when it is read."""
        if self.contents.pop(key, None) is not None and announced:
            self.state.handle(BlocksEvicted((key,)))

    def ask(self, probe):
        self.probes[probe.generation] = probe.keys

    def answer_probes(self, error=None):
        while self.probes and not self.is_probing:
            generation = min(self.probes)
            keys = self.probes.pop(generation)
            present = frozenset(keys) & self.contents.keys() if error is None else frozenset()
            self.state.handle(ProbeAnswered(generation, present, error))

    def finish_job(self, job, failed, error, seconds, *, whole=False):
        """Report the end of a copy; `whole`: the error is of the job, else of each block."""
        failures = {} if whole else dict.fromkeys(sorted(failed), error)
        fault = error if whole else None
        self.state.handle(JobFinished(job.job_id, failures, fault, seconds))

    def refuse(self, job, error):
        self.state.handle(JobFinished(job.job_id, job_error=error))

    def orphan(self, job, error):
        self.state.handle(JobOverdue(job.job_id, error))

    def release(self, job, failed):
        gone = BlockMissingError("scripted")
        self.state.handle(JobFinished(job.job_id, dict.fromkeys(sorted(failed), gone)))


class ExternalTier(NativeTier):
    """A manager that is asked for every key, behind its link."""

    def __init__(self, name, **options):
        super().__init__(name, **options)
        self.stray: LookupResult | None = None

    def create_index(self, _kind):
        return AskedIndex(self.lookup, lambda _ctx: None)

    def lookup(self, key, _ctx):
        if self.stray is not None:
            return self.stray
        if self.is_probing:
            return RETRY
        return HIT if key in self.contents else MISS

    def fill(self, keys):
        """Have blocks from an earlier run; nobody has to be told."""
        ScriptedTier.fill(self, keys)

    def lose(self, key, *, announced):
        """Drop a block; nobody has to be told."""
        self.contents.pop(key, None)
