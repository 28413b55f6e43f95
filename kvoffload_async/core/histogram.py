"""Durations by bucket: what is observed one by one, and read at any time."""

from __future__ import annotations

from bisect import bisect_left

from kvoffload_async.statistics import BUCKET_BOUNDS_S, HistogramStatistics


class Histogram:
    """Counts durations in the buckets of `BUCKET_BOUNDS_S`.

    Thread: one observes; any reads, without a lock, and may miss what is being observed.
    """

    __slots__ = ("_count", "_counts", "_last_read", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._count = 0
        self._last_read = (0, HistogramStatistics())
        """What was read last, and of how many: most are read more often than they change."""

    def observe(self, seconds: float) -> None:
        """Count a duration; one that a clock makes negative counts as none."""
        duration_s = seconds if seconds > 0 else 0.0
        self._counts[bisect_left(BUCKET_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s
        self._count += 1  # last: a reader that does not see it reads again

    def __repr__(self) -> str:
        return f"Histogram({self._count} durations, {self._sum_s} s)"

    def read(self) -> HistogramStatistics:
        """Return what was observed so far."""
        count = self._count
        if self._last_read[0] != count:
            read = HistogramStatistics(counts=tuple(self._counts), sum_s=self._sum_s)
            self._last_read = (count, read)
        return self._last_read[1]
