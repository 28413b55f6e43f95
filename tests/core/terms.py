"""Keys, jobs and answers, by short names."""

from collections.abc import Iterable

from kvoffload_async.core.tier_state import TIER_FIGURES
from kvoffload_async.types import (
    JobMetadata,
    LookupResult,
    OffloadKey,
    ReqContext,
    as_block_ids,
    make_offload_key,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


def k(name: int | str) -> OffloadKey:
    return make_offload_key(str(name).encode())


def ks(names: Iterable[int | str]) -> list[OffloadKey]:
    return [k(name) for name in names]


def job(job_id=0, names="a", *, promotion=False, slots=None, ctx=None):
    keys = tuple(ks(names))
    slots = range(len(keys)) if slots is None else slots
    return JobMetadata(job_id, keys, as_block_ids(slots), promotion, ctx or ReqContext("r"))


def results(jobs):
    """The results that have not been taken from a ledger or a tier's state."""
    return [result for _, result in getattr(jobs, "jobs", jobs).take_ended()]


def released(jobs):
    """The jobs whose release has not been taken from a ledger or a tier's state."""
    return [record.job.job_id for record in getattr(jobs, "jobs", jobs).take_released()]


def figures_of(tier):
    """Return the statistics of a tier's state."""
    return tier.statistics(TIER_FIGURES.take(tier, 0))


def state_of(primary, key):
    """Return "absent", "writing", "idle" or "pinned"."""
    pins = {each: refs for each, _, refs in primary.resident()}.get(key)
    if pins is None:
        return "absent"
    return "writing" if pins < 0 else "pinned" if pins else "idle"


def ranked(primary):
    """Return the keys that the policy of a primary ranks, the best victim first."""
    return primary.keys_of(tuple(primary.policy.resident()))
