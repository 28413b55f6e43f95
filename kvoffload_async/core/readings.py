"""Reads counters and gauges into the statistics that are shown outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvoffload_async.core.breaker import Breaker
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.statistics import (
    PlannerStatistics,
    PrimaryStatistics,
    SlotStatistics,
    TierStatistics,
)

S = TypeVar("S", PlannerStatistics, PrimaryStatistics, TierStatistics)


def read_primary(primary: Primary) -> PrimaryStatistics:
    """Return how the primary is."""
    return _read(
        PrimaryStatistics,
        primary.counters,
        slots=SlotStatistics(**primary.counts),
        events_dropped=primary.events_dropped,
    )


def read_tier(
    state: TierState,
    own: TierState,
    *,
    name: str,
    row_bytes: int,
    waiting_jobs: int = 0,
    gauges: Mapping[str, float] | None = None,
) -> TierStatistics:
    """Return how a tier is.

    Args:
        state: What the planner knows of it.
        own: What its manager does: the same, unless the tier is a foreign one.
        name: What it is called.
        row_bytes: Bytes of a row.
        waiting_jobs: Jobs that were handed over, and that the tier has not begun.
        gauges: What the tier says of itself.
    """
    return _read(
        TierStatistics,
        state.counters,
        name=name,
        failed_bytes=state.counters.failed_blocks * row_bytes,
        dropped_bytes=state.counters.dropped_blocks * row_bytes,
        jobs_in_flight=state.jobs.unfinished_count,
        queued_jobs=state.jobs.queued_count + waiting_jobs,
        overdue_jobs=state.jobs.disowned_count,
        cascading_blocks=state.cascading_blocks,
        breakers={"load": _word(state.breaker), "store": _word(state.breaker)},
        probes_outstanding=own.index.probes_outstanding,
        events_dropped=own.events_dropped,
        gauges=dict(gauges or {}),
    )


def read_planner(planner: Planner) -> PlannerStatistics:
    """Return what the planner has done."""
    return _read(PlannerStatistics, planner.counters, requests=len(planner.requests))


def _read(cls: type[S], counters: object, **known: Any) -> S:  # noqa: ANN401 - fields of any type
    """Return statistics: each field is known, or a counter of the same name."""
    names = (field.name for field in fields(cls))
    return cls(**{name: getattr(counters, name) for name in names if name not in known}, **known)


def _word(breaker: Breaker) -> str:
    return breaker.state.name.lower()
