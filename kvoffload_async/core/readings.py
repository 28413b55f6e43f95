"""Reads counters and gauges into the statistics that are shown outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from kvoffload_async.core.breaker import Breaker
from kvoffload_async.core.counters import PlannerCounters, PrimaryCounters
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import TierCounters, TierState
from kvoffload_async.statistics import (
    PlannerStatistics,
    PrimaryStatistics,
    SlotStatistics,
    TierStatistics,
)


def _shown(statistics: type[Any], counters: type[Any]) -> tuple[str, ...]:
    """Return the names of the counters that statistics have a field for."""
    names = {field.name for field in fields(statistics)}
    return tuple(field.name for field in fields(counters) if field.name in names)


_OF_PRIMARY: Final = _shown(PrimaryStatistics, PrimaryCounters)
_OF_TIER: Final = _shown(TierStatistics, TierCounters)
_OF_PLANNER: Final = _shown(PlannerStatistics, PlannerCounters)


def read_primary(primary: Primary) -> PrimaryStatistics:
    """Return how the primary is."""
    return PrimaryStatistics(
        **_counted(primary.counters, _OF_PRIMARY),
        slots=SlotStatistics(**primary.counts),
        events_dropped=primary.event_log.dropped,
    )


def read_tier(
    state: TierState,
    own: TierState,
    *,
    name: str,
    row_bytes: int,
    waiting_jobs: int = 0,
    owed_blocks: int = 0,
    gauges: Mapping[str, float] | None = None,
) -> TierStatistics:
    """Return how a tier is.

    Args:
        state: What the planner knows of it.
        own: What its manager does: the same, unless the tier is a foreign one.
        name: What it is called.
        row_bytes: Bytes of a row.
        waiting_jobs: Jobs that were handed over, and that the tier has not begun.
        owed_blocks: Blocks that wait in the primary for room in the tier.
        gauges: What the tier says of itself.
    """
    return TierStatistics(
        **_counted(state.counters, _OF_TIER),
        name=name,
        failed_bytes=state.counters.failed_blocks * row_bytes,
        dropped_bytes=state.counters.dropped_blocks * row_bytes,
        jobs_in_flight=state.jobs.unfinished_count,
        queued_jobs=state.jobs.queued_count + waiting_jobs,
        overdue_jobs=state.jobs.disowned_count,
        cascading_blocks=state.cascading_blocks,
        owed_blocks=owed_blocks,
        breakers={"load": _word(state.health.loads), "store": _word(state.health.stores)},
        probes_outstanding=own.index.probes_outstanding,
        events_dropped=own.event_log.dropped,
        gauges=dict(gauges or {}),
    )


def read_planner(planner: Planner) -> PlannerStatistics:
    """Return what the planner has done."""
    return PlannerStatistics(
        **_counted(planner.counters, _OF_PLANNER), requests=len(planner.requests)
    )


def _counted(counters: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(counters, name) for name in names}


def _word(breaker: Breaker) -> str:
    return breaker.state.name.lower()
