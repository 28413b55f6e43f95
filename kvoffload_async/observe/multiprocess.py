"""The metrics in the multi-process mode of `prometheus_client`, for hosts such as SGLang.

In this mode, a server's processes write their values into files, and the process that is scraped
reads the files: collectors of other processes are ignored. So the values are copied into metrics of
`prometheus_client`. Histograms are left out, because it can only observe single values.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvoffload_async.observe.prometheus import ENGINE_LABEL, METRICS, MetricKind
from kvoffload_async.statistics import HistogramStatistics, OffloadingStatistics

_PERIOD_S: Final = 1.0


def is_multiprocess() -> bool:
    """Return whether this process writes its metrics into files."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


class MultiprocessMetrics:
    """The counters and gauges of one engine. Not thread-safe."""

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
