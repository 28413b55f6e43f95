"""Scripted tiers: they answer, and copy, as they are told.

A native one stands for a built-in tier's actor: it takes the commands that the link would hand it,
and posts the events that the link would bring back. A external one is a manager with its own say.
"""

from core.memory import content
from core.terms import HIT, MISS, RETRY

from kvoffload_async.abc.events import (
    BlocksAppeared,
    BlocksEvicted,
    JobOverdue,
    JobSettled,
    ProbeAnswered,
)
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.external_tier import ExternalTierState
from kvoffload_async.core.index import CostGatedIndex, ExactIndex, ProbedIndex
from kvoffload_async.core.ledger import BeginRequest, FinishRequest, refused
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import BlockMissingError
from kvoffload_async.types import JobResult, LookupResult, Medium, OffloadKey

MIB = 1 << 20
INDEXES = {
    "exact": ExactIndex,
    "probed": lambda: ProbedIndex(2),
    "cost_gated": lambda: CostGatedIndex(ProbedIndex(2), 2),
}
"""What the owner may know of a native tier."""


class _NotedState(TierState):
    """Notes among the effects where requests begin and end, as an external tier's state does."""

    def begin_request(self, ctx):
        super().begin_request(ctx)
        self.effects.append(BeginRequest(ctx))

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

    def __init__(self, name, kind="exact", **options):
        super().__init__()
        log = EventLog(Medium.STORAGE, enabled=False)
        self.state = _NotedState(name, INDEXES[kind](), MIB, log, **options)
        self.probes: dict[int, tuple[OffloadKey, ...]] = {}

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

    def settle(self, job, failed, error, seconds, *, whole=False):
        """Report the end of a copy; `whole`: the error is of the job, else of each block."""
        failures = {} if whole else dict.fromkeys(sorted(failed), error)
        fault = error if whole else None
        self.state.handle(JobSettled(job.job_id, failures, fault, seconds))

    def refuse(self, job, error):
        self.state.handle(JobSettled(job.job_id, job_error=error))

    def orphan(self, job, error):
        self.state.handle(JobOverdue(job.job_id, error))

    def release(self, job, failed):
        gone = BlockMissingError("scripted")
        self.state.handle(JobSettled(job.job_id, dict.fromkeys(sorted(failed), gone)))


class ExternalTier(ScriptedTier):
    """A manager that is asked for every key, and gives results of its own."""

    def __init__(self, name, **options):
        super().__init__()
        self.state = ExternalTierState(name, self, **options)
        self.stray: LookupResult | None = None

    def lookup_many(self, keys, req_context, *, stop_at_miss):
        if self.stray is not None:
            answers = [self.stray] * len(keys)
        elif self.is_probing:
            answers = [RETRY] * len(keys)
        else:
            answers = [HIT if key in self.contents else MISS for key in keys]
        return answers[: answers.index(MISS) + 1] if stop_at_miss and MISS in answers else answers

    def lose(self, key, *, announced):
        """Drop a block; nobody has to be told."""
        self.contents.pop(key, None)

    def answer_probes(self, error=None):
        """Nothing: no probe was asked for."""

    def settle(self, job, failed, error, seconds, *, whole=False):
        landed = frozenset(key for i, key in enumerate(job.keys) if i not in failed)
        self.state.answer(
            JobResult(
                job.job_id,
                success=not failed,
                successful_keys=landed if failed else None,
                transfer_time=seconds,
                transfer_bytes=len(landed) * MIB,
                error=error,
            )
        )

    def refuse(self, job, error):
        self.state.answer(refused(job, error))

    def orphan(self, job, error, landed=None):
        result = JobResult(job.job_id, False, landed, error=error, orphaned=True)
        self.state.answer(result)

    def release(self, job, failed):
        self.state.release(job.job_id)
