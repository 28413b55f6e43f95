"""The metrics for Prometheus, read from the statistics; needs the extra `metrics`.

In the multi-process mode of `prometheus_client`, which hosts such as SGLang use, a server's
processes write their values into files, and the process that is scraped reads the files: collectors
of other processes are ignored. So the values are copied into metrics of `prometheus_client`.
Histograms are left out, because it can only observe single values.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import REGISTRY, Collector

from kvoffload_async.errors import ClosedError
from kvoffload_async.statistics import (
    HistogramStatistics,
    OffloadingStatistics,
    TierStatistics,
)

BREAKER_STATES: Final = ("closed", "open", "half_open")
SLOT_STATES: Final = ("free", "writing", "idle", "pinned", "held")

Value = float | HistogramStatistics
Samples = Iterable[tuple[tuple[str, ...], Value]]


class Read(NamedTuple):
    """A reader of a metric's samples from a part of the statistics.

    Attributes:
        labels: The names of its labels.
        samples: Returns its samples: label values and value.
    """

    labels: tuple[str, ...]
    samples: Callable[[Any], Samples]


def at(path: str) -> Read:
    """Return a reader of the value at a path; no sample if a part of it is missing or None."""

    def read(part: Any) -> Samples:  # noqa: ANN401 - any part of the tree
        for name in path.split("."):
            part = getattr(part, name, None)
            if part is None:
                return
        yield (), part

    return Read((), read)


def by_name(label: str, **paths: str) -> Read:
    """Return a reader of several values, each labelled with the name of its argument."""
    reads = {name: at(path).samples for name, path in paths.items()}
    return Read(
        (label,),
        lambda part: (((name,), value) for name, read in reads.items() for _, value in read(part)),
    )


def by_key(label: str, path: str) -> Read:
    """Return a reader of the values of the mapping at a path, each labelled with its key."""
    mappings: Callable[[Any], Iterable[tuple[object, Any]]] = at(path).samples
    return Read(
        (label,),
        lambda part: (((key,), n) for _, mapping in mappings(part) for key, n in mapping.items()),
    )


def by_tenant(name: str) -> Read:
    """Return a reader of one field of each tenant's statistics."""
    return Read(
        ("tenant",),
        lambda stats: (
            ((tenant,), getattr(each, name)) for tenant, each in stats.primary.tenants.items()
        ),
    )


def by_direction(loads: str, both: str) -> Read:
    """Return a reader of a tier's loads and stores, from its counts of loads and of both."""
    return Read(
        ("direction",),
        lambda tier: (
            (("load",), getattr(tier, loads)),
            (("store",), getattr(tier, both) - getattr(tier, loads)),
        ),
    )


def of_tiers(read: Read) -> Read:
    """Return a reader of each tier's samples, labelled with the tier's name."""
    return Read(
        ("tier", *read.labels),
        lambda stats: (
            ((tier.name, *labels), value)
            for tier in stats.tiers
            for labels, value in read.samples(tier)
        ),
    )


def needed_blocks(tier: TierStatistics) -> Samples:
    """Yield how many blocks a request must miss for a load to pay; infinity if none ever pays."""
    if tier.break_even is not None:
        needed = tier.break_even.needed_blocks
        yield (), math.inf if needed is None else needed


def breakers(tier: TierStatistics) -> Samples:
    """Yield 1 for the current state of each breaker of a tier, and 0 for its other states."""
    for direction, now in tier.breakers.items():
        yield from (((direction, state), float(state == now)) for state in BREAKER_STATES)


def events(stats: OffloadingStatistics) -> Samples:
    """Yield the number of events dropped because they were not read in time, by tier."""
    yield from (((tier.name,), tier.events_dropped) for tier in stats.tiers)


def info(stats: OffloadingStatistics) -> Samples:
    """Yield 1, labelled with the versions and the block I/O implementation."""
    if stats.runtime is not None:
        yield (stats.runtime.version, stats.runtime.python, stats.runtime.block_io), 1.0


class MetricKind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus metric and its reader.

    Attributes:
        name: With the unit, and with `_total` for a counter.
        kind: See `MetricKind`.
        documentation: One sentence.
        labels: The names of its labels.
        read: Returns its samples.
    """

    name: str
    kind: MetricKind
    documentation: str
    labels: tuple[str, ...]
    read: Callable[[Any], Samples]


def _metric(
    name: str, documentation: str, read: str | Read, kind: MetricKind | None = None
) -> Metric:
    """Return the metric `kvoffload_<name>`; `read` may be the path of its only value.

    By default, the kind follows from the name.
    """
    by_unit = {"total": MetricKind.COUNTER, "seconds": MetricKind.HISTOGRAM}
    kind = kind or by_unit.get(name.rpartition("_")[2], MetricKind.GAUGE)
    read = at(read) if isinstance(read, str) else read
    return Metric(f"kvoffload_{name}", kind, documentation, *read)


def _tier(
    name: str, documentation: str, read: str | Read = "", kind: MetricKind | None = None
) -> Metric:
    """Return the metric `kvoffload_tier_<name>`; `read` defaults to the tier field of that name."""
    read = read or name.removesuffix("_total")
    of_one = at(read) if isinstance(read, str) else read
    return _metric(f"tier_{name}", documentation, of_tiers(of_one), kind)


METRICS: Final[tuple[Metric, ...]] = (
    _metric(
        "info",
        "Package version, Python version and block I/O implementation, as labels; always 1.",
        Read(("version", "python", "block_io"), info),
    ),
    # The primary.
    _metric(
        "primary_slots",
        "Slots of the primary tier by state.",
        by_name("state", **{name: f"primary.slots.{name}" for name in SLOT_STATES}),
    ),
    _metric(
        "tenant_quota_slots",
        "Slots of the primary tier that each tenant may take.",
        by_tenant("quota_slots"),
    ),
    _metric(
        "tenant_used_slots",
        "Slots of the primary tier that each tenant takes.",
        by_tenant("used_slots"),
    ),
    _metric(
        "tenant_stored_blocks_total",
        "Blocks that each tenant's requests stored.",
        by_tenant("stored_blocks"),
    ),
    _metric(
        "tenant_loaded_blocks_total",
        "Blocks that each tenant's requests loaded.",
        by_tenant("loaded_blocks"),
    ),
    _metric(
        "tenant_evicted_blocks_total",
        "Blocks of each tenant evicted from the primary tier.",
        by_tenant("evicted_blocks"),
    ),
    _metric(
        "unknown_tenant_blocks_total",
        "Blocks neither stored nor loaded, as the tenant of their request is unknown.",
        "primary.unknown_tenant_blocks",
    ),
    _metric("primary_used_bytes", "Bytes in use in the primary tier.", "primary.used_bytes"),
    _metric("primary_capacity_bytes", "Capacity of the primary tier.", "primary.capacity_bytes"),
    _metric(
        "primary_lookups_total",
        "Block lookups in the primary tier by result; repeated lookups count again.",
        by_name(
            "result", hit="primary.hits", pending="primary.pending_hits", miss="primary.misses"
        ),
    ),
    _metric("primary_stored_blocks_total", "Blocks that requests stored.", "primary.stored_blocks"),
    _metric("primary_loaded_blocks_total", "Blocks that requests loaded.", "primary.loaded_blocks"),
    _metric(
        "primary_evicted_blocks_total",
        "Blocks evicted from the primary tier.",
        "primary.evicted_blocks",
    ),
    _metric(
        "primary_deleted_blocks_total",
        "Blocks deleted from the primary tier.",
        "primary.deleted_blocks",
    ),
    _metric(
        "primary_refused_stores_total", "Stores refused for lack of room.", "primary.refused_stores"
    ),
    _metric(
        "primary_declined_blocks_total",
        "Blocks that the eviction policy declined to store.",
        "primary.declined_blocks",
    ),
    _metric(
        "primary_withheld_blocks_total",
        "Blocks not stored because of their request's `max_offload_tokens`.",
        "primary.withheld_blocks",
    ),
    _metric(
        "primary_hinted_blocks",
        "Blocks that hints of requests retain, and so are evicted last.",
        "primary.hinted_blocks",
    ),
    _metric(
        "hints_total",
        "Hints of requests by result: `applied`, `unknown` name, or `invalid`.",
        by_key("result", "primary.hints"),
    ),
    _metric("primary_used_blocks_total", "Blocks of ended requests.", "primary.used_blocks"),
    _metric(
        "primary_found_blocks_total",
        "Blocks that ended requests found, also behind a missing one.",
        "primary.found_blocks",
    ),
    # What moves between it and the tiers.
    _metric("requests", "Requests in progress.", "planner.requests"),
    _metric("retained_blocks", "Blocks pinned for waiting requests.", "planner.retained_blocks"),
    _metric("pinned_blocks", "Blocks pinned by `cache.pin`.", "planner.pinned_blocks"),
    _metric("deleting_blocks", "Blocks of deletions under way.", "planner.deleting_blocks"),
    _metric(
        "cache_operations",
        "Operations of `cache` under way, by name.",
        by_key("operation", "cache_operations"),
    ),
    _metric(
        "lookups_total",
        "Block lookups other than misses, by result; repeated lookups count again.",
        by_name(
            "result", hit="planner.hits", pending="planner.pending_hits", retry="planner.retries"
        ),
    ),
    _metric(
        "lookup_misses_total",
        "Block lookups that missed, by reason.",
        by_key("reason", "planner.misses"),
    ),
    _metric(
        "blocks_total",
        "Blocks that requests looked up, by final result; each block counts once per request.",
        by_name("result", hit="planner.block_hits", miss="planner.block_misses"),
    ),
    _metric(
        "promotions_refused_total",
        "Hits in a tier that were not promoted for lack of a primary slot.",
        "planner.promotions_refused",
    ),
    _metric(
        "deferrals_expired_total",
        "Requests deferred up to the deadline, and computed instead.",
        "planner.deferrals_expired",
    ),
    _metric(
        "decision_seconds",
        "Time from a request's first lookup until the request proceeds.",
        "planner.decision_seconds",
    ),
    # Each tier.
    _tier("open", "1 if the tier is open, 0 if it could not be opened or was closed.", "is_open"),
    _tier(
        "unopened_since_timestamp_seconds",
        "Time of the first failed attempt to open the tier, since 1970; absent if it is open.",
        "unopened.since_s",
        MetricKind.GAUGE,
    ),
    _tier(
        "lookups_total",
        "Block lookups in the tier by result.",
        by_name("result", hit="hits", miss="misses", undecided="undecided"),
    ),
    _tier(
        "skipped_lookups_total",
        "Block lookups that skipped the tier, by reason.",
        by_key("reason", "skipped_lookups"),
    ),
    _tier(
        "needed_blocks",
        "Break-even point: the tier is asked from this many missed blocks on; +Inf: never.",
        Read((), needed_blocks),
    ),
    _tier(
        "load_latency_seconds",
        "Measured fixed cost of a load; absent if not measured.",
        "break_even.latency_s",
        MetricKind.GAUGE,
    ),
    _tier(
        "load_blocks_per_second",
        "Measured load throughput beyond the fixed cost; absent if not measured.",
        "break_even.blocks_per_s",
    ),
    _tier("jobs_total", "Finished jobs.", by_direction("finished_loads", "finished_jobs")),
    _tier(
        "failed_jobs_total",
        "Jobs with at least one failed block.",
        by_direction("failed_loads", "failed_jobs"),
    ),
    _tier(
        "errors_total", "Failed jobs by class of error.", by_key("error", "failed_jobs_by_error")
    ),
    _tier("stored_blocks_total", "Blocks stored in the tier."),
    _tier("stored_bytes_total", "Bytes stored in the tier."),
    _tier("loaded_blocks_total", "Blocks loaded from the tier."),
    _tier("loaded_bytes_total", "Bytes loaded from the tier."),
    _tier("failed_blocks_total", "Blocks that jobs failed to transfer."),
    _tier("corrupt_blocks_total", "Blocks whose checksum did not match."),
    _tier("missing_blocks_total", "Blocks that were missing when loaded."),
    _tier("evicted_blocks_total", "Blocks that the tier announced as evicted."),
    _tier("deleted_blocks_total", "Blocks whose deletion the tier has confirmed."),
    _tier(
        "dropped_blocks_total",
        "Blocks that waited for room in the tier and were dropped, by reason: `evicted` from the "
        "primary, `reset` of the primary, `closed` by the shutdown, `deleted`.",
        by_key("reason", "dropped"),
    ),
    _tier("declined_blocks_total", "Blocks not stored, as their reuse was unlikely."),
    _tier("failed_store_blocks_total", "Blocks abandoned after failed stores."),
    _tier("prefetched_blocks_total", "Blocks promoted before the first lookup of their request."),
    _tier("unused_prefetched_blocks_total", "Prefetched blocks that no request has loaded."),
    _tier("refused_keys_total", "Announced keys that are malformed."),
    _tier(
        "jobs_in_flight",
        "Jobs without a result.",
        by_direction("loads_in_flight", "jobs_in_flight"),
    ),
    _tier("queued_jobs", "Jobs that the tier has not started."),
    _tier("overdue_jobs", "Jobs past their deadline whose copies still run."),
    _tier("promoting_blocks", "Primary slots occupied by promotions from the tier."),
    _tier("pending_blocks", "Blocks waiting for room in the tier."),
    _tier("used_bytes", "Bytes in use in the tier; absent if the tier does not report them."),
    _tier("capacity_bytes", "Capacity of the tier; absent if the tier does not report it."),
    _tier("bytes_in_flight", "Payload of running calls; absent if the tier does not report it."),
    _tier(
        "bytes_in_flight_limit",
        "Payload that may be in flight now; absent if the tier does not report it.",
    ),
    _tier(
        "breaker_state",
        "1 for the current state of a direction's breaker, 0 for the other states.",
        Read(("direction", "state"), breakers),
    ),
    _tier(
        "breaker_openings_total",
        "Times that a direction's breaker opened.",
        by_key("direction", "breaker_openings"),
    ),
    _tier(
        "job_seconds",
        "Time from a job's submission to the end of its I/O.",
        by_name("direction", load="load_seconds.total", store="store_seconds.total"),
    ),
    _tier(
        "queue_seconds",
        "Time from a job's submission until the tier started it.",
        by_name("direction", load="load_seconds.queue", store="store_seconds.queue"),
    ),
    _tier(
        "copy_seconds",
        "Time from a job's start to the end of its I/O.",
        by_name("direction", load="load_seconds.copy", store="store_seconds.copy"),
    ),
    _metric(
        "events_dropped_total",
        "Events dropped because they were not read in time.",
        Read(("tier",), events),
    ),
    # The threads.
    _metric(
        "loop_lag_seconds",
        "Delay between waking up the event loop and its callback.",
        "runtime.loop_lag_seconds",
    ),
    _metric(
        "step_seconds",
        "Time that the owner's thread spends per step on results and on the end of the step.",
        "runtime.step_seconds",
    ),
    # Copies to and from the device, which an `OffloadEngine` makes.
    _metric("device_copies", "Copies to or from the device in progress.", "copies"),
    _metric("device_copy_failures_total", "Failed copies to or from the device.", "failed_copies"),
    _metric(
        "device_copy_seconds",
        "Duration of copies to or from the device.",
        by_name("direction", load="load_copy_seconds", store="store_copy_seconds"),
    ),
    _metric(
        "waiting_calls",
        "Calls that wait for a copy permit or for room.",
        by_name("direction", load="waiting_loads", store="waiting_stores"),
    ),
    _metric(
        "missed_events_total",
        "Events that slow readers missed, counted once per reader.",
        "missed_events",
    ),
)


ENGINE_LABEL: Final = "engine"

ReadStatistics = Callable[[], OffloadingStatistics]
_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Final[Mapping[MetricKind, type[_Family]]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


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
        """Create a collector from a mapping of engine names to `stats` methods, which may grow."""
        self._engines = engines

    def describe(self) -> Iterable[_Family]:
        """Return the metrics without samples, so that registration reads no statistics."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[_Family]:
        """Read all statistics once; yield each metric that has samples."""
        read: dict[str, OffloadingStatistics] = {}
        for name, engine in list(self._engines.items()):
            with suppress(ClosedError):
                read[name] = engine()
        for metric in METRICS:
            family = _family(metric)
            for name, stats in read.items():
                for labels, value in metric.read(stats):
                    _add(family, [name, *labels], value)
            if family.samples:
                yield family


_hosted: Final[dict[str, ReadStatistics]] = {}
_hosted_lock: Final = threading.Lock()
_hosts: Final = OffloadCollector(_hosted)
"""The single collector of all published engines: a registry rejects duplicate metrics."""


def publish(name: str, read: ReadStatistics) -> Callable[[], None]:
    """Add an engine to the default registry, which the host, such as LMCache, exports.

    Args:
        name: Value of the label `engine`; numbered if it is taken.
        read: Returns the statistics.

    Returns:
        Removes the engine; idempotent.
    """
    with _hosted_lock:
        number = next(n for n in count(1) if _numbered(name, n) not in _hosted)
        name = _numbered(name, number)
        if not _hosted:
            REGISTRY.register(_hosts)
        _hosted[name] = read

    def remove() -> None:
        with _hosted_lock:
            if _hosted.pop(name, None) is not None and not _hosted:
                REGISTRY.unregister(_hosts)

    return remove


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _family(metric: Metric) -> _Family:
    labels = (ENGINE_LABEL, *metric.labels)
    return _FAMILIES[metric.kind](metric.name, metric.documentation, labels=labels)


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


_PERIOD_S: Final = 1.0


def is_multiprocess() -> bool:
    """Return whether `prometheus_client` is in multi-process mode, writing metrics to files."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


class MultiprocessMetrics:
    """The counters and gauges of one engine in multi-process mode. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """Create the metrics, without values.

        Args:
            name: Value of the label `engine`, unique among the server's processes.
        """
        registry = CollectorRegistry()  # this process's own one is not read
        self._name = name
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._counted: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._next_s = 0.0
        for metric in METRICS:
            given = (metric.name, metric.documentation, (ENGINE_LABEL, *metric.labels))
            if metric.kind is MetricKind.COUNTER:
                self._counters[metric.name] = Counter(*given, registry=registry)
            elif metric.kind is MetricKind.GAUGE:
                gauge = Gauge(*given, registry=registry, multiprocess_mode="mostrecent")
                self._gauges[metric.name] = gauge

    def update(self, read: Callable[[], OffloadingStatistics]) -> None:
        """Write the current values, at most once a second.

        Args:
            read: Returns the statistics.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _PERIOD_S
        stats = read()
        for metric in METRICS:
            for labels, value in metric.read(stats):
                if isinstance(value, HistogramStatistics):
                    continue
                values = (self._name, *map(str, labels))
                if metric.name in self._gauges:
                    self._gauges[metric.name].labels(*values).set(value)
                elif (more := value - self._counted[metric.name, *values]) > 0:
                    self._counters[metric.name].labels(*values).inc(more)
                    self._counted[metric.name, *values] += more
