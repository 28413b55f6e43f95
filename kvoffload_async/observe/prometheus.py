"""Prometheus collector for the metrics; needs the extra `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvoffload_async.errors import ClosedError
from kvoffload_async.observe.metrics import METRICS, Metric, MetricKind
from kvoffload_async.statistics import HistogramStatistics, OffloadingStatistics

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
