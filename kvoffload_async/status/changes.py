"""Rates, shares and latencies computed from successive readings of an engine's statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvoffload_async.statistics import (
    BUCKET_BOUNDS_S,
    EngineStatistics,
    HistogramStatistics,
    OffloadingStatistics,
)
from kvoffload_async.status.client import EngineReport

WINDOW_S: Final = 60.0
"""Time window of shares and latencies; rates are since the previous reading."""
_MAX_READINGS: Final = 600

Count = Callable[[OffloadingStatistics], float]


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of a phase within the window.

    Attributes:
        phase: Name of the phase.
        count: Number of durations.
        p50_s: Median in seconds, interpolated within a histogram bucket.
        p99_s: 99th percentile in seconds, interpolated likewise.
    """

    phase: str
    count: int
    p50_s: float
    p99_s: float


class Readings:
    """The latest readings of one engine, oldest first.

    With fewer than two readings, changes are since the start of the engine.
    """

    def __init__(self) -> None:
        """Start without readings."""
        self._readings: deque[EngineReport] = deque(maxlen=_MAX_READINGS)

    @property
    def is_empty(self) -> bool:
        """Whether there is no reading yet."""
        return not self._readings

    @property
    def last(self) -> EngineReport:
        """The latest reading; there must be one."""
        return self._readings[-1]

    def add(self, report: EngineReport) -> None:
        """Add a reading; a reading of another engine discards all previous ones."""
        if self._readings:
            last = self._readings[-1]
            if (last.pid, last.model) != (report.pid, report.model) or (
                report.uptime_s < last.uptime_s
                or len(report.statistics.tiers) != len(last.statistics.tiers)
            ):
                self._readings.clear()
        self._readings.append(report)
        while len(self._readings) > 2 and self._age_s(self._readings[1]) >= WINDOW_S:  # noqa: PLR2004 - always keep two
            self._readings.popleft()

    def rate(self, count: Count) -> float:
        """Return a counter's increase per second since the previous reading."""
        before = self._readings[-2] if len(self._readings) > 1 else None
        seconds = self._age_s(before)
        return self._grown(count, before) / seconds if seconds > 0 else 0.0

    def share(self, part: Count, whole: Count) -> float | None:
        """Return the ratio of two counters' increases in the window; None for a zero divisor."""
        total = self._grown(whole, self._first)
        return self._grown(part, self._first) / total if total > 0 else None

    def grown(self, count: Count) -> float:
        """Return a counter's increase in the window."""
        return self._grown(count, self._first)

    def latencies(self) -> list[Latency]:
        """Return the latencies of all phases with durations in the window, slowest first."""
        before = dict(_phases(self._first.statistics)) if self._first else {}
        found: list[Latency] = []
        for phase, histogram in _phases(self.last.statistics):
            counts = _difference(histogram, before.get(phase))
            if sum(counts):
                found.append(
                    Latency(phase, sum(counts), quantile(counts, 0.5), quantile(counts, 0.99))
                )
        return sorted(found, key=lambda latency: latency.p99_s, reverse=True)

    @property
    def _first(self) -> EngineReport | None:
        return self._readings[0] if len(self._readings) > 1 else None

    def _age_s(self, before: EngineReport | None) -> float:
        return self.last.uptime_s - (before.uptime_s if before else 0.0)

    def _grown(self, count: Count, before: EngineReport | None) -> float:
        return count(self.last.statistics) - (count(before.statistics) if before else 0.0)


def quantile(counts: tuple[int, ...], fraction: float) -> float:
    """Return a quantile in seconds, interpolated linearly within a bucket like Prometheus.

    Values above the last bound count as that bound.
    """
    rank = fraction * sum(counts)
    below = 0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = BUCKET_BOUNDS_S[index - 1] if index else 0.0
            return low + (BUCKET_BOUNDS_S[index] - low) * (rank - below) / count
        below += count
    return BUCKET_BOUNDS_S[-1]


def _difference(now: HistogramStatistics, before: HistogramStatistics | None) -> tuple[int, ...]:
    if before is None:
        return now.counts
    return tuple(max(0, a - b) for a, b in zip(now.counts, before.counts, strict=True))


def _phases(stats: OffloadingStatistics) -> Iterator[tuple[str, HistogramStatistics]]:
    """Yield (phase, histogram) for all histograms."""
    if stats.planner is not None:
        yield "request: lookup to decision", stats.planner.decision_seconds
    for tier in stats.tiers:
        for direction, of in (("load", tier.load_seconds), ("store", tier.store_seconds)):
            yield f"{tier.name}: {direction}", of.total
            yield f"{tier.name}: {direction}, in queue", of.queue
            yield f"{tier.name}: {direction}, copy", of.copy
    if isinstance(stats, EngineStatistics):
        yield "device: load", stats.load_copy_seconds
        yield "device: store", stats.store_copy_seconds
    if stats.runtime is not None:
        yield "event loop: lag", stats.runtime.loop_lag_seconds
        yield "scheduler thread: step", stats.runtime.step_seconds
