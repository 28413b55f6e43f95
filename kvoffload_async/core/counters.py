"""Counters of the core, and their copies for other threads.

`kvoffload_async.statistics` documents fields of the same names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Final

from kvoffload_async import errors
from kvoffload_async.abc.events import JobFinished
from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.statistics import (
    BUCKET_BOUNDS_S,
    DROP_REASONS,
    HINT_RESULTS,
    MISS_REASONS,
    OTHER_ERROR,
    SKIP_REASONS,
    DropReason,
    DurationStatistics,
    HintResult,
    HistogramStatistics,
    MissReason,
    SkipReason,
)
from kvoffload_async.types import JobMetadata, JobResult, LookupResult


class Histogram:
    """Histogram of durations with the buckets of `BUCKET_BOUNDS_S`.

    One thread may observe. Any thread may read without a lock, and may miss the latest duration.
    """

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration; a negative one, from a clock that was set back, counts as zero."""
        duration_s = seconds if seconds > 0 else 0.0
        self._counts[bisect_left(BUCKET_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def __repr__(self) -> str:
        return f"Histogram({sum(self._counts)} durations, {self._sum_s} s)"

    def read(self) -> HistogramStatistics:
        """Return the current counts."""
        return HistogramStatistics(counts=tuple(self._counts), sum_s=self._sum_s)


_OWN_ERRORS: Final = frozenset(error for error in vars(errors).values() if isinstance(error, type))


@dataclass(slots=True)
class PrimaryCounters:
    """Counters of the primary."""

    lookups: int = 0
    hits: int = 0
    pending_hits: int = 0
    misses: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    deleted_blocks: int = 0
    refused_stores: int = 0
    declined_blocks: int = 0
    withheld_blocks: int = 0
    hints: dict[HintResult, int] = field(default_factory=lambda: dict.fromkeys(HINT_RESULTS, 0))
    used_blocks: int = 0
    found_blocks: int = 0
    unknown_tenant_blocks: int = 0

    def count_lookups(self, answers: Sequence[LookupResult]) -> None:
        """Count lookups by the primary's answers."""
        self.lookups += len(answers)
        self.hits += answers.count(LookupResult.HIT)
        self.pending_hits += answers.count(LookupResult.HIT_PENDING)
        self.misses += answers.count(LookupResult.MISS)


@dataclass(slots=True)
class PlannerCounters:
    """Counters of the planner."""

    lookups: int = 0
    hits: int = 0
    pending_hits: int = 0
    retries: int = 0
    block_hits: int = 0
    block_misses: int = 0
    jobs_submitted: int = 0
    job_results: int = 0
    job_failures: int = 0
    promotions_refused: int = 0
    deferrals_expired: int = 0
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    decision_seconds: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class JobDurations:
    """Durations of the jobs of one direction; see `DurationStatistics`."""

    total: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    copy: Histogram = field(default_factory=Histogram)

    def observe(self, seconds: float, queue_s: float | None) -> None:
        """Record a job's duration and its time in the queue; `queue_s` is None if it never ran."""
        self.total.observe(seconds)
        if queue_s is not None:
            self.queue.observe(queue_s)
            self.copy.observe(seconds - queue_s)

    def read(self) -> DurationStatistics:
        """Return the current counts. Thread-safe, like `Histogram.read`."""
        return DurationStatistics(
            total=self.total.read(), queue=self.queue.read(), copy=self.copy.read()
        )


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier, updated by the planner or by a manager without a planner."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    undecided: int = 0
    submitted_jobs: int = 0
    submitted_loads: int = 0
    finished_jobs: int = 0
    finished_loads: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed_jobs: int = 0
    failed_loads: int = 0
    failed_blocks: int = 0
    corrupt_blocks: int = 0
    missing_blocks: int = 0
    evicted_blocks: int = 0
    refused_keys: int = 0
    dropped_blocks: int = 0
    late_blocks: int = 0
    declined_blocks: int = 0
    failed_store_blocks: int = 0
    deleted_blocks: int = 0
    prefetched_blocks: int = 0
    unused_prefetched_blocks: int = 0
    skipped_lookups: dict[SkipReason, int] = field(
        default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0)
    )
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    failed_jobs_by_error: dict[str, int] = field(default_factory=dict)
    load_seconds: JobDurations = field(default_factory=JobDurations)
    store_seconds: JobDurations = field(default_factory=JobDurations)

    def count(self, job: JobMetadata, result: JobResult) -> None:
        """Count a job and its result."""
        self.finished_jobs += 1
        self.finished_loads += job.is_promotion
        if not result.success:
            self.failed_jobs += 1
            self.failed_loads += job.is_promotion
            kind = _kind_of(result.error)
            self.failed_jobs_by_error[kind] = self.failed_jobs_by_error.get(kind, 0) + 1
        num_bytes = result.transfer_bytes or 0
        landed = len(job.keys) if result.success else len(result.successful_keys or ())
        self.failed_blocks += len(job.keys) - landed
        if job.is_promotion:
            self.loaded_bytes += num_bytes
            self.loaded_blocks += landed
        else:
            self.stored_bytes += num_bytes
            self.stored_blocks += landed

    def count_copy(self, job: JobMetadata, event: JobFinished) -> None:
        """Count a job whose copy has ended, which may be after its result."""
        durations = self.load_seconds if job.is_promotion else self.store_seconds
        durations.observe(event.seconds, event.queue_s)
        for error in event.failures.values():
            self.corrupt_blocks += isinstance(error, CorruptBlockError)
            self.missing_blocks += isinstance(error, BlockMissingError)

    def drop(self, reason: DropReason, num_blocks: int) -> None:
        """Count pending blocks that were dropped before the tier stored them."""
        self.dropped_blocks += num_blocks
        self.dropped[reason] += num_blocks


def _kind_of(error: Exception | None) -> str:
    """Return the class name of an error of this package, or "other"."""
    return type(error).__name__ if type(error) in _OWN_ERRORS else OTHER_ERROR


Figures = tuple[Any, ...]
"""Values of counters and gauges, copied from one object at one time; treat as immutable."""


class FigureSet:
    """Copies a fixed set of figures of an object (`take`), and assigns names to a copy (`named`).

    The owner's thread calls `take` at the end of every step; any thread may call `named`.
    """

    def __init__(self, counters: type[Any], gauges: dict[str, str], *given: str) -> None:
        """Select figures; their names equal those of the statistics' fields.

        Args:
            counters: Class of the object's `counters`; all of them are selected, except durations,
                which any thread may read.
            gauges: Name -> attribute path in the object, of further figures.
            *given: Names of the values passed to `take`.
        """
        fresh = counters()
        kinds = {each.name: type(getattr(fresh, each.name)) for each in fields(counters)}
        paths = {name: f"counters.{name}" for name, kind in kinds.items() if kind is int} | gauges
        self._num_immutable = len(paths)
        paths |= {name: f"counters.{name}" for name, kind in kinds.items() if kind is dict}
        self._get = attrgetter(*paths.values())  # far faster than getattr in a loop
        self._names = (*paths, *given)

    def take(self, source: object, *given: object) -> Figures:
        """Copy the figures of an object, followed by the given values."""
        figures, num_immutable = self._get(source), self._num_immutable
        return (*figures[:num_immutable], *map(dict, figures[num_immutable:]), *given)

    def named(self, taken: Figures) -> dict[str, Any]:
        """Return copied figures by name."""
        return dict(zip(self._names, taken, strict=True))
