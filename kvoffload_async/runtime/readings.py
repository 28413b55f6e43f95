"""Figures of the owner, copied for other threads and converted to the public statistics."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvoffload_async.block_io.choice import implementation
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
from kvoffload_async.errors import ConfigError
from kvoffload_async.statistics import (
    BreakEvenStatistics,
    DurationStatistics,
    HistogramStatistics,
    PlannerStatistics,
    PrimaryStatistics,
    RuntimeStatistics,
    SlotStatistics,
    TierStatistics,
)

Figures = tuple[Any, ...]
"""Values of counters and gauges, copied from one object at one time; treat as immutable."""


class Snapshot(NamedTuple):
    """Immutable copy of the figures of a planner, its primary and its tiers."""

    primary: Figures
    planner: Figures
    tiers: tuple[Figures, ...]


def take_snapshot(planner: Planner) -> Snapshot:
    """Copy the figures of the primary, the planner and the tiers. Call on the owner's thread."""
    tiers = []
    for tier, queue in zip(planner.tiers, planner.cascades.queues, strict=True):
        tiers.append(_TIER.take(tier, queue.count))
    planned = _PLANNER.take(planner, len(planner.requests))
    return Snapshot(_PRIMARY.take(planner.primary), planned, tuple(tiers))


def take_primary(primary: Primary) -> Figures:
    """Copy the figures for `read_primary`. Call on the owner's thread."""
    return _PRIMARY.take(primary)


def take_tier(state: TierState, pending_blocks: int = 0) -> Figures:
    """Copy the figures for `read_tier`. Call on the owner's thread.

    Args:
        state: The tier's state, of the planner or of a manager without one.
        pending_blocks: Blocks in the primary that are pending for the tier.
    """
    return _TIER.take(state, pending_blocks)


def read_primary(taken: Figures, row_bytes: int = 0) -> PrimaryStatistics:
    """Return the primary's statistics; `row_bytes` is 0 if it has no memory."""
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
    """Return a tier's statistics.

    Args:
        taken: From `take_tier`.
        own: The tier's state, for figures that are not part of `taken`.
        waiting_jobs: Number of launched jobs that the tier has not started.
        gauges: The tier's own gauges, by name.
    """
    counted, said = _TIER.named(taken), gauges or {}
    row_bytes = own.jobs.slot_bytes
    loads, stores = counted.pop("loads"), counted.pop("stores")
    reasons = {"load": counted.pop("load_reason"), "store": counted.pop("store_reason")}
    openings = {"load": counted.pop("load_openings"), "store": counted.pop("store_openings")}
    counted["queued_jobs"] += waiting_jobs
    breakers = {"load": _WORDS[loads], "store": _WORDS[stores]}
    closed = _WORDS[BreakerState.CLOSED]
    return TierStatistics(
        **counted,
        **_OBSERVED.named(_OBSERVED.take(own.observed)),
        name=own.label,
        failed_bytes=counted["failed_blocks"] * row_bytes,
        dropped_bytes=counted["dropped_blocks"] * row_bytes,
        jobs_in_flight=counted["submitted_jobs"] - counted["finished_jobs"],
        loads_in_flight=counted["submitted_loads"] - counted["finished_loads"],
        breakers=breakers,
        breaker_openings=openings,
        breaker_reasons={way: reasons[way] for way, now in breakers.items() if now != closed},
        probes_outstanding=own.index.probes_outstanding,
        events_dropped=own.event_log.dropped,
        used_bytes=said.get("used_bytes"),
        capacity_bytes=said.get("capacity_bytes"),
        gauges=dict(said),
        break_even=_read_break_even(own.cost_gated),
        is_open=own.is_available,
    )


def read_planner(taken: Figures) -> PlannerStatistics:
    """Return the planner's statistics."""
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
"""Type of a figure that is not a number -> function that returns a copy of it."""


class _FigureSet:
    """Copies a fixed set of figures of an object (`take`), and assigns names to a copy (`named`).

    The owner's thread calls `take` at the end of every step; any thread may call `named`.
    """

    def __init__(
        self,
        counters: type[Any],
        path: str = "",
        *,
        gauges: Mapping[str, str] | None = None,
        given: Sequence[str] = (),
    ) -> None:
        """Select all counters of a class; their names equal those of the statistics' fields.

        Args:
            counters: Class of the counters.
            path: Attribute path of the counters in the object, with a trailing dot.
            gauges: Name -> attribute path of further figures.
            given: Names of the values passed to `take`.
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
        """Copy the figures of an object, followed by the given values."""
        figures = [*self._get_numbers(source)]
        for get, how in self._others:
            figures.append(how(get(source)))
        return (*figures, *given)

    def named(self, taken: Figures) -> dict[str, Any]:
        """Return copied figures by name."""
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
    gauges={"retained_blocks": "room.named_blocks"},
    given=["requests"],
)
_TIER: Final = _FigureSet(
    TierCounters,
    "counters.",
    gauges={
        "queued_jobs": "jobs.queued_count",
        "overdue_jobs": "jobs.orphaned_count",
        "cascading_blocks": "cascading_blocks",
        "promoting_blocks": "promotion_slots",
        "loads": "health.loads.state",
        "stores": "health.stores.state",
        "load_openings": "health.loads.openings",
        "store_openings": "health.stores.openings",
        "load_reason": "health.loads.reason",
        "store_reason": "health.stores.reason",
    },
    given=["pending_blocks"],
)
_OBSERVED: Final = _FigureSet(TierObservations)
_WORDS: Final = {state: state.name.lower() for state in BreakerState}


class OwnerSteps:
    """Measures the time that the begin and end of each step take on the owner's thread.

    The end of a step publishes a snapshot of the planner's figures by one assignment, so other
    threads read a consistent snapshot without waiting.

    Not thread-safe, except `published` and `read`; call only from the owner's thread.
    """

    def __init__(self, clock: Callable[[], float], planner: Planner) -> None:
        self._clock = clock
        self._planner = planner
        self._durations = Histogram()
        self._step_s = 0.0
        self._block_io = _block_io()
        self.publish()

    def began(self, since_s: float) -> None:
        """Record the duration of the step's begin, which started at `since_s`, in seconds."""
        self._owner = threading.get_ident()
        self._step_s += self._clock() - since_s

    def ended(self, since_s: float) -> None:
        """Record the duration of the step's end, which started at `since_s`; then publish."""
        self._step_s += self._clock() - since_s
        self._durations.observe(self._step_s)
        self._step_s = 0.0
        self.publish()

    def publish(self) -> None:
        """Publish a snapshot for other threads."""
        self._owner = threading.get_ident()
        self._published = take_snapshot(self._planner)

    def published(self) -> Snapshot:
        """Return the latest snapshot; on the owner's thread, take a new one."""
        if threading.get_ident() == self._owner:
            self.publish()
        return self._published

    def read(self, loop_lag: Histogram | None = None, wake_ups: int = 0) -> RuntimeStatistics:
        """Return the durations of steps; with the lag and the wake-ups of a loop, if any."""
        version, python = _versions()
        return RuntimeStatistics(
            version=version,
            python=python,
            block_io=self._block_io,
            loop_lag_seconds=HistogramStatistics() if loop_lag is None else loop_lag.read(),
            step_seconds=self._durations.read(),
            wake_ups=wake_ups,
        )


def _block_io() -> str:
    """Return the name of the block I/O implementation; "python" if its setting is invalid."""
    try:
        return implementation().name
    except ConfigError:
        return "python"


@functools.cache
def _versions() -> tuple[str, str]:
    """Return the versions of this package and the interpreter; cached."""
    return importlib.metadata.version("kvoffload-async"), platform.python_version()
