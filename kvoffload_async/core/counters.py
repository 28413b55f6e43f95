"""Counters of the core; `kvoffload_async.statistics` documents fields of the same names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvoffload_async import errors
from kvoffload_async.abc.events import JobFinished
from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.statistics import (
    BUCKET_BOUNDS_S,
    DROP_REASONS,
    MISS_REASONS,
    OTHER_ERROR,
    SKIP_REASONS,
    DropReason,
    HistogramStatistics,
    MissReason,
    SkipReason,
)
from kvoffload_async.types import JobMetadata, JobResult, LookupResult


class Histogram:
    """Histogram of durations with the buckets of `BUCKET_BOUNDS_S`.

    One thread may observe. Any thread may read without a lock, and may miss the latest duration.
    """

    __slots__ = ("_count", "_counts", "_last_read", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._count = 0
        self._last_read = (0, HistogramStatistics())
        """Cached result and its count, as most histograms are read more often than they change."""

    def observe(self, seconds: float) -> None:
        """Add a duration; a negative one, from a clock that was set back, counts as zero."""
        duration_s = seconds if seconds > 0 else 0.0
        self._counts[bisect_left(BUCKET_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s
        self._count += 1  # last: a changed count invalidates the copy that `read` has cached

    def __repr__(self) -> str:
        return f"Histogram({self._count} durations, {self._sum_s} s)"

    def read(self) -> HistogramStatistics:
        """Return the current counts."""
        count = self._count
        if self._last_read[0] != count:
            read = HistogramStatistics(counts=tuple(self._counts), sum_s=self._sum_s)
            self._last_read = (count, read)
        return self._last_read[1]


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
    refused_stores: int = 0
    declined_blocks: int = 0
    used_blocks: int = 0
    found_blocks: int = 0

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
    dropped_blocks: int = 0
    late_blocks: int = 0
    declined_blocks: int = 0
    failed_store_blocks: int = 0
    prefetched_blocks: int = 0
    unused_prefetched_blocks: int = 0
    skipped_lookups: dict[SkipReason, int] = field(
        default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0)
    )
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    failed_jobs_by_error: dict[str, int] = field(default_factory=dict)

    def submit(self, job: JobMetadata) -> None:
        """Count a submitted job."""
        self.submitted_jobs += 1
        self.submitted_loads += job.is_promotion

    def count(self, job: JobMetadata, result: JobResult) -> None:
        """Count a finished job."""
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

    def drop(self, reason: DropReason, num_blocks: int) -> None:
        """Count pending blocks that were dropped before the tier stored them."""
        self.dropped_blocks += num_blocks
        self.dropped[reason] += num_blocks


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


@dataclass(slots=True)
class TierObservations:
    """Counters derived from a tier's events, whoever submits its jobs."""

    corrupt_blocks: int = 0
    missing_blocks: int = 0
    evicted_blocks: int = 0
    refused_keys: int = 0
    load_seconds: JobDurations = field(default_factory=JobDurations)
    store_seconds: JobDurations = field(default_factory=JobDurations)

    def finished(self, job: JobMetadata, event: JobFinished) -> None:
        """Record a finished job."""
        durations = self.load_seconds if job.is_promotion else self.store_seconds
        durations.observe(event.seconds, event.queue_s)
        if event.failures:
            self._failed(event.failures.values())

    def _failed(self, failures: Iterable[Exception]) -> None:
        for error in failures:
            self.corrupt_blocks += isinstance(error, CorruptBlockError)
            self.missing_blocks += isinstance(error, BlockMissingError)


def _kind_of(error: Exception | None) -> str:
    """Return the class name of an error of this package, or "other"."""
    return type(error).__name__ if type(error) in _OWN_ERRORS else OTHER_ERROR
