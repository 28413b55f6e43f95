"""Reads counters and gauges into the statistics that are shown outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from kvoffload_async.core.breaker import BreakerState
from kvoffload_async.core.counters import (
    JobDurations,
    PlannerCounters,
    PrimaryCounters,
    TierCounters,
    TierObservations,
)
from kvoffload_async.core.histogram import Histogram
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.selective_index import SelectiveIndex
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.statistics import (
    DurationStatistics,
    PaybackStatistics,
    PlannerStatistics,
    PrimaryStatistics,
    SlotStatistics,
    TierStatistics,
)


def read_primary(primary: Primary, row_bytes: int = 0) -> PrimaryStatistics:
    """Return how the primary is; `row_bytes` is 0 where there is no memory behind it."""
    return PrimaryStatistics(
        **_of_primary(primary.counters),
        slots=SlotStatistics(**primary.counts),
        row_bytes=row_bytes,
        load_pins=primary.loading.num_pins,
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
    counters, health, jobs = state.counters, state.health, state.jobs
    figures = gauges or {}
    return TierStatistics(
        **_of_tier(counters),
        **_of_observed(own.observed),
        name=name,
        failed_bytes=counters.failed_blocks * row_bytes,
        dropped_bytes=counters.dropped_blocks * row_bytes,
        jobs_in_flight=jobs.unreported_count,
        loads_in_flight=counters.loads_in_flight,
        queued_jobs=jobs.queued_count + waiting_jobs,
        overdue_jobs=jobs.disowned_count,
        cascading_blocks=state.cascading_blocks,
        promoting_blocks=state.promotion_slots,
        owed_blocks=owed_blocks,
        breakers={"load": _WORDS[health.loads.state], "store": _WORDS[health.stores.state]},
        breaker_openings={"load": health.loads.openings, "store": health.stores.openings},
        probes_outstanding=own.index.probes_outstanding,
        events_dropped=own.event_log.dropped,
        used_bytes=figures.get("used_bytes"),
        capacity_bytes=figures.get("capacity_bytes"),
        gauges=dict(figures),
        payback=_read_payback(own.selective),
    )


def read_planner(planner: Planner) -> PlannerStatistics:
    """Return what the planner has done."""
    return PlannerStatistics(
        **_of_planner(planner.counters),
        requests=len(planner.requests),
        retained_blocks=planner.retention.retained_slots,
    )


def _read_payback(selective: SelectiveIndex | None) -> PaybackStatistics | None:
    if selective is None or selective.payback is None:
        return None
    payback, needed = selective.payback, selective.needed_blocks
    return PaybackStatistics(
        needed_blocks=None if math.isinf(needed) else int(needed),
        latency_s=payback.latency_s,
        blocks_per_s=payback.blocks_per_s,
        explorations=payback.explorations,
    )


def _read_durations(durations: JobDurations) -> DurationStatistics:
    return DurationStatistics(
        total=durations.total.read(), queue=durations.queue.read(), copy=durations.copy.read()
    )


_HOW: Final[dict[type[Any], Callable[[Any], Any]]] = {
    dict: dict,
    Histogram: Histogram.read,
    JobDurations: _read_durations,
}
"""How what is not a number is read, so that it does not change afterwards."""


def _reader(counters: type[Any]) -> Callable[[object], dict[str, Any]]:
    """Return what reads counters by name, which are those of the statistics' fields."""
    fresh = counters()
    kinds = {field.name: type(getattr(fresh, field.name)) for field in fields(counters)}
    others = tuple((name, _HOW[kind]) for name, kind in kinds.items() if kind in _HOW)
    names = tuple(kinds)
    get_all = attrgetter(*names)  # several times as fast as getattr in a loop

    def read(counted: object) -> dict[str, Any]:
        found = dict(zip(names, get_all(counted), strict=True))
        for name, how in others:
            found[name] = how(found[name])
        return found

    return read


_of_primary: Final = _reader(PrimaryCounters)
_of_planner: Final = _reader(PlannerCounters)
_of_tier: Final = _reader(TierCounters)
_of_observed: Final = _reader(TierObservations)
_WORDS: Final = {state: state.name.lower() for state in BreakerState}
