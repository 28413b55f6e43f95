"""Reads counters and gauges into the statistics that are shown outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvoffload_async.core.counters import (
    Histogram,
    JobDurations,
    PlannerCounters,
    PrimaryCounters,
    TierCounters,
    TierObservations,
)
from kvoffload_async.core.health import BreakerState
from kvoffload_async.core.index import CostGatedIndex
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.statistics import (
    BreakEvenStatistics,
    DurationStatistics,
    PlannerStatistics,
    PrimaryStatistics,
    SlotStatistics,
    TierStatistics,
)

Figures = tuple[Any, ...]
"""What was taken of one object; immutable, but for dicts of its own that nobody changes."""


class Snapshot(NamedTuple):
    """The figures of a planner, its primary and its tiers at one moment; not changed afterwards."""

    primary: Figures
    planner: Figures
    tiers: tuple[Figures, ...]


def take_snapshot(planner: Planner) -> Snapshot:
    """Copy what `read_primary`, `read_planner` and `read_tier` show. Thread: owner."""
    tiers = []
    for tier, queue in zip(planner.tiers, planner.cascades.queues, strict=True):
        tiers.append(_TIER.take(tier, queue.count))
    planned = _PLANNER.take(planner, len(planner.requests))
    return Snapshot(_PRIMARY.take(planner.primary), planned, tuple(tiers))


def take_primary(primary: Primary) -> Figures:
    """Copy what `read_primary` shows. Thread: owner."""
    return _PRIMARY.take(primary)


def take_tier(state: TierState, pending_blocks: int = 0) -> Figures:
    """Copy what `read_tier` shows of a state. Thread: owner.

    Args:
        state: What the planner knows of the tier; its manager, where there is no planner.
        pending_blocks: Blocks that wait in the primary for room in the tier.
    """
    return _TIER.take(state, pending_blocks)


def read_primary(taken: Figures, row_bytes: int = 0) -> PrimaryStatistics:
    """Return how the primary was; `row_bytes` is 0 where there is no memory behind it."""
    figures = _PRIMARY.named(taken)
    slots = SlotStatistics(**figures.pop("slots"))
    return PrimaryStatistics(**figures, slots=slots, row_bytes=row_bytes)


def read_tier(
    taken: Figures,
    own: TierState,
    *,
    waiting_jobs: int = 0,
    gauges: Mapping[str, float] | None = None,
) -> TierStatistics:
    """Return how a tier was.

    Args:
        taken: From `take_tier`.
        own: The tier's state; read now, as no sum of the statistics is about these figures.
        waiting_jobs: Jobs that were handed over, and that the tier has not begun.
        gauges: What the tier says of itself.
    """
    counted, said = _TIER.named(taken), gauges or {}
    row_bytes = own.jobs.slot_bytes
    loads, stores = counted.pop("loads"), counted.pop("stores")
    openings = {"load": counted.pop("load_openings"), "store": counted.pop("store_openings")}
    counted["queued_jobs"] += waiting_jobs
    return TierStatistics(
        **counted,
        **_OBSERVED.named(_OBSERVED.take(own.observed)),
        name=own.label,
        failed_bytes=counted["failed_blocks"] * row_bytes,
        dropped_bytes=counted["dropped_blocks"] * row_bytes,
        loads_in_flight=counted["submitted_loads"] - counted["finished_loads"],
        breakers={"load": _WORDS[loads], "store": _WORDS[stores]},
        breaker_openings=openings,
        probes_outstanding=own.index.probes_outstanding,
        events_dropped=own.event_log.dropped,
        used_bytes=said.get("used_bytes"),
        capacity_bytes=said.get("capacity_bytes"),
        gauges=dict(said),
        break_even=_read_break_even(own.cost_gated),
    )


def read_planner(taken: Figures) -> PlannerStatistics:
    """Return what the planner had done."""
    return PlannerStatistics(**_PLANNER.named(taken))


def _read_break_even(cost_gated: CostGatedIndex | None) -> BreakEvenStatistics | None:
    if cost_gated is None or cost_gated.break_even is None:
        return None
    break_even, needed = cost_gated.break_even, cost_gated.needed_blocks
    return BreakEvenStatistics(
        needed_blocks=None if math.isinf(needed) else int(needed),
        latency_s=break_even.latency_s,
        blocks_per_s=break_even.blocks_per_s,
        explorations=break_even.explorations,
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


class _FigureSet:
    """Which figures are taken of an object: they are copied at once, and named when they are read.

    The copies are the owner's at the end of every step, the rest is whoever's who reads them.
    """

    def __init__(
        self,
        counters: type[Any],
        path: str = "",
        *,
        gauges: Mapping[str, str] | None = None,
        given: Sequence[str] = (),
    ) -> None:
        """Take every counter, whose names are those of the statistics' fields.

        Args:
            counters: Class of the counters.
            path: Where they are among the object's attributes, with a dot behind it.
            gauges: Name -> path among the object's attributes of what else is taken.
            given: Names of what `take` is given.
        """
        fresh = counters()
        kinds = {field.name: type(getattr(fresh, field.name)) for field in fields(counters)}
        numbers = {name: path + name for name, kind in kinds.items() if kind not in _HOW}
        numbers |= gauges or {}
        others = {name: _HOW[kind] for name, kind in kinds.items() if kind in _HOW}
        self._get_numbers = attrgetter(*numbers.values())  # far faster than getattr in a loop
        self._others = [(attrgetter(path + name), how) for name, how in others.items()]
        self._names = (*numbers, *others, *given)

    def take(self, source: object, *given: object) -> Figures:
        """Copy the figures of an object."""
        figures = [*self._get_numbers(source)]
        for get, how in self._others:
            figures.append(how(get(source)))
        return (*figures, *given)

    def named(self, taken: Figures) -> dict[str, Any]:
        """Return figures that were taken, by name."""
        return dict(zip(self._names, taken, strict=True))


_PRIMARY: Final = _FigureSet(
    PrimaryCounters,
    "counters.",
    gauges={
        "slots": "counts",
        "load_pins": "loading.num_pins",
        "events_dropped": "event_log.dropped",
    },
)
_PLANNER: Final = _FigureSet(
    PlannerCounters,
    "counters.",
    gauges={"retained_blocks": "shares.retained_slots"},
    given=["requests"],
)
_TIER: Final = _FigureSet(
    TierCounters,
    "counters.",
    gauges={
        "jobs_in_flight": "jobs.unreported_count",
        "queued_jobs": "jobs.queued_count",
        "overdue_jobs": "jobs.orphaned_count",
        "cascading_blocks": "cascading_blocks",
        "promoting_blocks": "promotion_slots",
        "loads": "health.loads.state",
        "stores": "health.stores.state",
        "load_openings": "health.loads.openings",
        "store_openings": "health.stores.openings",
    },
    given=["pending_blocks"],
)
_OBSERVED: Final = _FigureSet(TierObservations)
_WORDS: Final = {state: state.name.lower() for state in BreakerState}
