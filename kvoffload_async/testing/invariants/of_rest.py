"""What holds when everything has come to rest: no job, copy, load, store or request is left."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import BlockState
from kvoffload_async.types import LookupResult, OffloadKey


@dataclass(frozen=True, slots=True)
class Rest:
    """A planner at rest, and what is known about its surroundings.

    Attributes:
        planner: The planner.
        kept: Keys that were stored, and that no tier has lost since.
        tier_contents: What each tier has.
        counted: For each tier, the keys that were counted as dropped or failed; None: nobody
            knows, and then a key may also be in the primary alone.
    """

    planner: Planner
    kept: Collection[OffloadKey]
    tier_contents: Sequence[Collection[OffloadKey]]
    counted: Sequence[Collection[OffloadKey]] | None = None


def no_job_is_left(rest: Rest) -> Iterator[str]:
    """P1."""
    planner = rest.planner
    if planner.jobs:
        yield f"jobs {sorted(planner.jobs)} have no result"
    if planner.disowned:
        yield f"the copies of jobs {sorted(planner.disowned)} have not ended"


def nothing_is_in_use(rest: Rest) -> Iterator[str]:
    """P2."""
    primary = rest.planner.primary
    for key, _slot, _refs in primary.resident():
        state = primary.state_of(key)
        if state is not BlockState.IDLE:
            yield f"block {key.hex()} is {state.name}"
    if primary.counts["held"]:
        yield f"slots {primary.pool.retained_slots()} are held"
    if rest.planner.promotions.outstanding_slots:
        yield f"{rest.planner.promotions.outstanding_slots} slots count as promotions"


def nothing_is_lost(rest: Rest) -> Iterator[str]:
    """P9."""
    if rest.counted is None:
        for key in rest.kept:
            in_primary = rest.planner.primary.lookup(key) is LookupResult.HIT
            if not in_primary and not all(key in contents for contents in rest.tier_contents):
                yield f"block {key.hex()} is lost"
        return
    planner = rest.planner
    for index, contents in enumerate(rest.tier_contents):
        owed = set(planner.primary.keys_of(tuple(planner.cascades.backlogs[index].slots())))
        counters, counted = planner.tiers[index].counters, rest.counted[index]
        for key in rest.kept:
            if key not in contents and key not in owed and key not in counted:
                yield f"block {key.hex()} is neither in tier {index} nor owed, and not counted"
        if len(counted) > counters.dropped_blocks + counters.failed_store_blocks:
            yield f"tier {index} has lost {len(counted)} blocks, but counted fewer"


def nothing_is_owed(rest: Rest) -> Iterator[str]:
    """P23: with room for it, and a tier in order."""
    for index, backlog in enumerate(rest.planner.cascades.backlogs):
        if backlog.count and not backlog.is_shut and rest.planner.cascades.room(index):
            yield f"tier {index} is owed {backlog.count} blocks, and has room"


def no_request_waits(rest: Rest) -> Iterator[str]:
    """P10."""
    for ctx, request in rest.planner.requests.items():
        if request.is_finished:
            yield f"the tiers were not told that request {ctx.req_id!r} has finished"
