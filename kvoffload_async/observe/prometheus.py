"""The metrics for Prometheus, read from the statistics; needs the extra `metrics`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvoffload_async.errors import ClosedError
from kvoffload_async.statistics import (
    EngineStatistics,
    HistogramStatistics,
    OffloadingStatistics,
    TierStatistics,
)

BREAKER_STATES: Final = ("closed", "open", "half_open")

Value = float | HistogramStatistics
Samples = Iterable[tuple[tuple[str, ...], Value]]


def one(path: str, part: Any) -> Samples:  # noqa: ANN401 - any part of the tree
    """Yield one value; none where the tree has no such part, or does not know."""
    for name in path.split("."):
        part = getattr(part, name, None)
        if part is None:
            return
    yield (), part


def by_name(path: str, names: Mapping[str, str], stats: OffloadingStatistics) -> Samples:
    """Yield several fields of a part, each under a name of its own."""
    for label, field in names.items():
        for _, value in one(f"{path}.{field}", stats):
            yield (label,), value


def by_key(path: str, stats: OffloadingStatistics) -> Samples:
    """Yield the values of the mapping at `path`, labelled by key."""
    for _, mapping in one(path, stats):
        assert isinstance(mapping, Mapping)  # noqa: S101 - for the type checker
        for key, value in mapping.items():
            yield (key,), value


def of_tiers(read: Callable[[TierStatistics], Samples], stats: OffloadingStatistics) -> Samples:
    """Yield the samples that `read` returns for each tier, labelled with the tier's name."""
    for tier in stats.tiers:
        for labels, value in read(tier):
            yield (tier.name, *labels), value


def fields_of_tier(names: Mapping[str, str], tier: TierStatistics) -> Samples:
    """Yield several fields of a tier, each under a name of its own."""
    return (((label,), getattr(tier, field)) for label, field in names.items())


def keys_of_tier(field: str, tier: TierStatistics) -> Samples:
    """Yield the values of a mapping of a tier."""
    return (((key,), value) for key, value in getattr(tier, field).items())


def needed_blocks(tier: TierStatistics) -> Samples:
    """Yield how many blocks a request must miss, infinity for "no number is enough"."""
    if tier.break_even is not None:
        needed = tier.break_even.needed_blocks
        yield (), math.inf if needed is None else needed


def durations(phase: str, tier: TierStatistics) -> Samples:
    """Yield the histograms of one phase of a tier, by direction."""
    yield ("load",), getattr(tier.load_seconds, phase)
    yield ("store",), getattr(tier.store_seconds, phase)


def finished(tier: TierStatistics) -> Samples:
    """Yield a tier's jobs that have their result, by direction."""
    yield ("load",), tier.finished_loads
    yield ("store",), tier.finished_jobs - tier.finished_loads


def failed(tier: TierStatistics) -> Samples:
    """Yield those of which a block failed, by direction."""
    yield ("load",), tier.failed_loads
    yield ("store",), tier.failed_jobs - tier.failed_loads


def in_flight(tier: TierStatistics) -> Samples:
    """Yield those without a result, by direction."""
    yield ("load",), tier.loads_in_flight
    yield ("store",), tier.jobs_in_flight - tier.loads_in_flight


def breakers(tier: TierStatistics) -> Samples:
    """Yield 1 for the state that each breaker of a tier is in, 0 for the others."""
    for direction, now in tier.breakers.items():
        yield from (((direction, state), float(state == now)) for state in BREAKER_STATES)


def events(stats: OffloadingStatistics) -> Samples:
    """Yield the events that nobody has read in time, by tier."""
    yield ("primary",), stats.primary.events_dropped
    yield from (((tier.name,), tier.events_dropped) for tier in stats.tiers)


def info(stats: OffloadingStatistics) -> Samples:
    """Yield 1 under the versions."""
    if stats.runtime is not None:
        yield (stats.runtime.version, stats.runtime.python, stats.runtime.block_io), 1.0


def of_engine(
    read: Callable[[EngineStatistics], Samples], stats: OffloadingStatistics
) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield what only an `OffloadEngine` has."""
    if isinstance(stats, EngineStatistics):
        yield from read(stats)


def waiting(stats: EngineStatistics) -> Samples:
    """Yield the calls that wait for a permit, by direction."""
    yield ("load",), stats.waiting_loads
    yield ("store",), stats.waiting_stores


def copies(stats: EngineStatistics) -> Samples:
    """Yield the histograms of device copies, by direction."""
    yield ("load",), stats.load_copy_seconds
    yield ("store",), stats.store_copy_seconds


class MetricKind(StrEnum):
    """What may be done with a metric's values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: With the unit, and with `_total` for a counter.
        kind: See `MetricKind`.
        documentation: One sentence.
        labels: The names of its labels.
        read: Returns its samples: label values and value.
    """

    name: str
    kind: MetricKind
    documentation: str
    labels: tuple[str, ...]
    read: Callable[[OffloadingStatistics], Samples]


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_SLOTS: Final = {name: name for name in ("free", "writing", "idle", "pinned", "held")}
_IN_PRIMARY: Final = {"hit": "hits", "pending": "pending_hits", "miss": "misses"}
_IN_TIER: Final = {"hit": "hits", "miss": "misses", "undecided": "undecided"}


def _plain(name: str, kind: MetricKind, documentation: str, path: str) -> Metric:
    return Metric(name, kind, documentation, (), partial(one, path))


def _tier(
    name: str,
    kind: MetricKind,
    documentation: str,
    read: str | Callable[[TierStatistics], Samples],
    *labels: str,
) -> Metric:
    of_one = partial(one, read) if isinstance(read, str) else read
    return Metric(
        f"kvoffload_tier_{name}",
        kind,
        documentation,
        ("tier", *labels),
        partial(of_tiers, of_one),
    )


METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        "kvoffload_info",
        _G,
        "Package version, Python version and block I/O implementation, as labels; always 1.",
        ("version", "python", "block_io"),
        info,
    ),
    # The primary.
    Metric(
        "kvoffload_primary_slots",
        _G,
        "Slots of the primary tier by state.",
        ("state",),
        partial(by_name, "primary.slots", _SLOTS),
    ),
    _plain(
        "kvoffload_primary_used_bytes",
        _G,
        "Bytes in use in the primary tier.",
        "primary.used_bytes",
    ),
    _plain(
        "kvoffload_primary_capacity_bytes",
        _G,
        "Capacity of the primary tier.",
        "primary.capacity_bytes",
    ),
    Metric(
        "kvoffload_primary_lookups_total",
        _C,
        "Block lookups in the primary tier by result; repeated lookups count again.",
        ("result",),
        partial(by_name, "primary", _IN_PRIMARY),
    ),
    _plain(
        "kvoffload_primary_stored_blocks_total",
        _C,
        "Blocks that requests stored.",
        "primary.stored_blocks",
    ),
    _plain(
        "kvoffload_primary_loaded_blocks_total",
        _C,
        "Blocks that requests loaded.",
        "primary.loaded_blocks",
    ),
    _plain(
        "kvoffload_primary_evicted_blocks_total",
        _C,
        "Blocks evicted from the primary tier.",
        "primary.evicted_blocks",
    ),
    _plain(
        "kvoffload_primary_refused_stores_total",
        _C,
        "Stores refused for lack of room.",
        "primary.refused_stores",
    ),
    _plain("kvoffload_primary_load_pins", _G, "Pins held by loads.", "primary.load_pins"),
    # What moves between it and the tiers.
    _plain("kvoffload_requests", _G, "Requests in progress.", "planner.requests"),
    _plain(
        "kvoffload_retained_blocks",
        _G,
        "Blocks pinned for waiting requests.",
        "planner.retained_blocks",
    ),
    Metric(
        "kvoffload_lookups_total",
        _C,
        "Block lookups other than misses, by result; repeated lookups count again.",
        ("result",),
        partial(
            by_name,
            "planner",
            {"hit": "hits", "pending": "pending_hits", "retry": "retries"},
        ),
    ),
    Metric(
        "kvoffload_lookup_misses_total",
        _C,
        "Block lookups that missed, by reason.",
        ("reason",),
        partial(by_key, "planner.misses"),
    ),
    Metric(
        "kvoffload_blocks_total",
        _C,
        "Blocks that requests looked up, by final result; each block counts once per request.",
        ("result",),
        partial(by_name, "planner", {"hit": "block_hits", "miss": "block_misses"}),
    ),
    _plain(
        "kvoffload_promotions_refused_total",
        _C,
        "Hits in a tier that were not promoted for lack of a primary slot.",
        "planner.promotions_refused",
    ),
    _plain(
        "kvoffload_deferrals_expired_total",
        _C,
        "Requests deferred up to the deadline, and computed instead.",
        "planner.deferrals_expired",
    ),
    _plain(
        "kvoffload_decision_seconds",
        _H,
        "Time from a request's first lookup until the request proceeds.",
        "planner.decision_seconds",
    ),
    # Each tier.
    _tier(
        "lookups_total",
        _C,
        "Block lookups in the tier by result.",
        partial(fields_of_tier, _IN_TIER),
        "result",
    ),
    _tier(
        "skipped_lookups_total",
        _C,
        "Block lookups that skipped the tier, by reason.",
        partial(keys_of_tier, "skipped_lookups"),
        "reason",
    ),
    _tier(
        "needed_blocks",
        _G,
        "Break-even point: the tier is asked from this many missed blocks on; +Inf: never.",
        needed_blocks,
    ),
    _tier(
        "load_latency_seconds",
        _G,
        "Measured fixed cost of a load; absent if not measured.",
        "break_even.latency_s",
    ),
    _tier(
        "load_blocks_per_second",
        _G,
        "Measured load throughput beyond the fixed cost; absent if not measured.",
        "break_even.blocks_per_s",
    ),
    _tier(
        "explorations_total",
        _C,
        "Requests below the break-even point that were loaded to renew the measurement.",
        "break_even.explorations",
    ),
    _tier("jobs_total", _C, "Finished jobs.", finished, "direction"),
    _tier("failed_jobs_total", _C, "Jobs with at least one failed block.", failed, "direction"),
    _tier(
        "errors_total",
        _C,
        "Failed jobs by class of error.",
        partial(keys_of_tier, "failed_jobs_by_error"),
        "error",
    ),
    _tier("stored_blocks_total", _C, "Blocks stored in the tier.", "stored_blocks"),
    _tier("stored_bytes_total", _C, "Bytes stored in the tier.", "stored_bytes"),
    _tier("loaded_blocks_total", _C, "Blocks loaded from the tier.", "loaded_blocks"),
    _tier("loaded_bytes_total", _C, "Bytes loaded from the tier.", "loaded_bytes"),
    _tier("failed_blocks_total", _C, "Blocks that jobs failed to transfer.", "failed_blocks"),
    _tier("corrupt_blocks_total", _C, "Blocks whose checksum did not match.", "corrupt_blocks"),
    _tier("missing_blocks_total", _C, "Blocks that were missing when loaded.", "missing_blocks"),
    _tier(
        "evicted_blocks_total", _C, "Blocks that the tier announced as evicted.", "evicted_blocks"
    ),
    _tier(
        "dropped_blocks_total",
        _C,
        "Blocks that left the primary tier before they were stored in the tier, by reason.",
        partial(keys_of_tier, "dropped"),
        "reason",
    ),
    _tier(
        "late_blocks_total", _C, "Blocks stored after waiting for room in the tier.", "late_blocks"
    ),
    _tier(
        "failed_store_blocks_total",
        _C,
        "Blocks abandoned after failed stores.",
        "failed_store_blocks",
    ),
    _tier("refused_keys_total", _C, "Announced keys that are malformed.", "refused_keys"),
    _tier("jobs_in_flight", _G, "Jobs without a result.", in_flight, "direction"),
    _tier("queued_jobs", _G, "Jobs that the tier has not started.", "queued_jobs"),
    _tier("overdue_jobs", _G, "Jobs past their deadline whose copies still run.", "overdue_jobs"),
    _tier("cascading_blocks", _G, "Blocks being stored in the tier.", "cascading_blocks"),
    _tier(
        "promoting_blocks",
        _G,
        "Primary slots occupied by promotions from the tier.",
        "promoting_blocks",
    ),
    _tier("pending_blocks", _G, "Blocks waiting for room in the tier.", "pending_blocks"),
    _tier("probes_outstanding", _G, "Existence probes without an answer.", "probes_outstanding"),
    _tier(
        "used_bytes",
        _G,
        "Bytes in use in the tier; absent if the tier does not report them.",
        "used_bytes",
    ),
    _tier(
        "capacity_bytes",
        _G,
        "Capacity of the tier; absent if the tier does not report it.",
        "capacity_bytes",
    ),
    _tier(
        "breaker_state",
        _G,
        "1 for the current state of a direction's breaker, 0 for the other states.",
        breakers,
        "direction",
        "state",
    ),
    _tier(
        "breaker_openings_total",
        _C,
        "Times that a direction's breaker opened.",
        partial(keys_of_tier, "breaker_openings"),
        "direction",
    ),
    _tier(
        "job_seconds",
        _H,
        "Time from a job's submission to the end of its I/O.",
        partial(durations, "total"),
        "direction",
    ),
    _tier(
        "queue_seconds",
        _H,
        "Time from a job's submission until the tier started it.",
        partial(durations, "queue"),
        "direction",
    ),
    _tier(
        "copy_seconds",
        _H,
        "Time from a job's start to the end of its I/O.",
        partial(durations, "copy"),
        "direction",
    ),
    Metric(
        "kvoffload_events_dropped_total",
        _C,
        "Events dropped because they were not read in time.",
        ("tier",),
        events,
    ),
    # The threads.
    _plain(
        "kvoffload_loop_lag_seconds",
        _H,
        "Delay between waking up the event loop and its callback.",
        "runtime.loop_lag_seconds",
    ),
    _plain(
        "kvoffload_step_seconds",
        _H,
        "Time that the owner's thread spends per step on results and on the end of the step.",
        "runtime.step_seconds",
    ),
    _plain("kvoffload_longest_step_seconds", _G, "Longest step.", "runtime.longest_step_s"),
    _plain("kvoffload_loop_wake_ups_total", _C, "Wake-ups of the event loop.", "runtime.wake_ups"),
    # Copies to and from the device, which an `OffloadEngine` makes.
    _plain("kvoffload_device_copies", _G, "Copies to or from the device in progress.", "copies"),
    _plain(
        "kvoffload_device_copy_failures_total",
        _C,
        "Failed copies to or from the device.",
        "failed_copies",
    ),
    Metric(
        "kvoffload_device_copy_seconds",
        _H,
        "Duration of copies to or from the device.",
        ("direction",),
        partial(of_engine, copies),
    ),
    Metric(
        "kvoffload_waiting_calls",
        _G,
        "Calls that wait for a copy permit or for room.",
        ("direction",),
        partial(of_engine, waiting),
    ),
    _plain(
        "kvoffload_missed_events_total",
        _C,
        "Events that slow readers missed, counted once per reader.",
        "missed_events",
    ),
)


ENGINE_LABEL: Final = "engine"

ReadStatistics = Callable[[], OffloadingStatistics]
_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class OffloadCollector(Collector):
    """Reads the statistics of engines or managers at every scrape; register it once.

        REGISTRY.register(OffloadCollector({"0": engine.stats}))

    Every metric has the label `engine`, which separates several engines in one process. An engine
    that is not open has no samples. In a server with several processes, serve each process's
    metrics on its own port: the multi-process mode of `prometheus_client` sums values from files
    and ignores collectors.

    Thread-safe. A scrape reads numbers without a lock and does not block the engine.
    """

    def __init__(self, engines: Mapping[str, ReadStatistics]) -> None:
        """Create a collector of engine name -> its `stats` method."""
        self._engines = dict(engines)

    def describe(self) -> Iterable[_Family]:
        """Return the metrics without samples, so that registration reads no statistics."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[_Family]:
        """Read all statistics once; yield each metric that has samples."""
        read = {name: stats for name, stats in self._read() if stats is not None}
        for metric in METRICS:
            family = _family(metric)
            for name, stats in read.items():
                for labels, value in metric.read(stats):
                    _add(family, [name, *labels], value)
            if family.samples:
                yield family

    def _read(self) -> Iterator[tuple[str, OffloadingStatistics | None]]:
        for name, stats in self._engines.items():
            try:
                yield name, stats()
            except ClosedError:
                yield name, None


def _family(metric: Metric) -> _Family:
    labels = (ENGINE_LABEL, *metric.labels)
    match metric.kind:
        case MetricKind.COUNTER:
            return CounterMetricFamily(metric.name, metric.documentation, labels=labels)
        case MetricKind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.documentation, labels=labels)
        case MetricKind.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.documentation, labels=labels)


def _add(family: _Family, labels: list[str], value: float | HistogramStatistics) -> None:
    if isinstance(value, HistogramStatistics):
        assert isinstance(family, HistogramMetricFamily)  # noqa: S101 - for the type checker
        buckets = [
            ("+Inf" if bound == float("inf") else f"{bound:g}", float(count))
            for bound, count in value.cumulative()
        ]
        family.add_metric(labels, buckets, value.sum_s)
    else:
        assert not isinstance(family, HistogramMetricFamily)  # noqa: S101 - for the type checker
        family.add_metric(labels, value)
