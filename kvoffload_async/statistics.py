"""Snapshots of an engine's counters and gauges.

`stats()` of an engine, a manager or a tier returns one of these. Reading takes no lock, does not
iterate over blocks and never blocks, so it may be done every step. *Counters* only grow during the
object's lifetime; *gauges* are current values. Blocks count one each, whatever their size; bytes
are those of the primary's rows.

An engine or a `TieringOffloadingManager` may be read from any thread. The owner's thread gets
current values; other threads get those published at the end of the owner's last step. Durations,
and a tier's breakers, probes, dropped events, break-even point and own `gauges` are read at the
call. A primary or a tier without such a manager may only be read by its owner's thread.

These equations hold in every snapshot. Primary: `lookups == hits + pending_hits + misses`. Planner:
`lookups == hits + pending_hits + retries + sum(misses.values())`, and `jobs_submitted` equals
`job_results` plus the tiers' `jobs_in_flight`. Tier: `lookups == hits + misses + undecided`,
`submitted_jobs == finished_jobs + jobs_in_flight`, `failed_jobs` is the sum of
`failed_jobs_by_error`, and `dropped_blocks` the sum of `dropped`.

The engine increments a counter under the name that its field has here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, get_args

BUCKET_BOUNDS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Inclusive upper bounds of the histogram buckets, in seconds; one more bucket is unbounded."""

MissReason = Literal["absent", "skipped", "no_room", "paused", "expired"]
MISS_REASONS: Final[tuple[MissReason, ...]] = get_args(MissReason)
"""Why a lookup missed. `absent`: no tier has the block. `skipped`: a tier that was not asked may
have it. `no_room`: a tier has it, but the primary has no room for it, or for a block before it.
`paused`: a reset is in progress. `expired`: the request was deferred for longer than
`deferral_timeout_s`."""

SkipReason = Literal["unavailable", "clearing", "suspended", "filtered", "failed", "too_few"]
SKIP_REASONS: Final[tuple[SkipReason, ...]] = get_args(SkipReason)
"""Why a tier was not asked. `unavailable`: not open. `clearing`: all its blocks are being deleted.
`suspended`: its breaker is open. `filtered`: excluded by the request's filter. `failed`: a
promotion of the block failed for this request before. `too_few`: fewer missed blocks than the
break-even point."""

DropReason = Literal["evicted", "reset", "closed", "deleted"]
DROP_REASONS: Final[tuple[DropReason, ...]] = get_args(DropReason)
"""Why a block was not stored to a tier. `evicted`: evicted from the primary before the tier had
room. `reset`: the primary was reset. `closed`: the manager was shut down. `deleted`: the block is
being deleted."""

HintResult = Literal["applied", "unknown", "invalid"]
HINT_RESULTS: Final[tuple[HintResult, ...]] = get_args(HintResult)
"""What became of a hint. `applied`: taken over. `unknown`: a name, an action or a version that this
package does not know. `invalid`: a value or a structure that is not allowed."""

COMMON_GAUGES: Final = ("used_bytes", "capacity_bytes", "bytes_in_flight", "bytes_in_flight_limit")
"""Gauges of tiers that are fields of `TierStatistics`, too."""
OTHER_ERROR: Final = "other"
"""Label for the error classes of third parties."""


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """Histogram of durations; all its fields are counters.

    Attributes:
        counts: Durations per bucket of `BUCKET_BOUNDS_S`; the last bucket is unbounded.
        sum_s: Their sum in seconds.
    """

    counts: tuple[int, ...] = (0,) * (len(BUCKET_BOUNDS_S) + 1)
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Iterate over (upper bound in seconds, number of durations up to it); infinity last."""
        return zip((*BUCKET_BOUNDS_S, float("inf")), accumulate(self.counts), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationStatistics:
    """Durations of the jobs of one direction of a tier.

    Covers jobs that ended in the tier, with or without success; an overdue job counts when its copy
    ends.

    Attributes:
        total: From arrival in the tier's queue to the end of the copy.
        queue: From arrival to start; jobs that never started are excluded.
        copy: From start to the end of the copy.
    """

    total: HistogramStatistics = HistogramStatistics()
    queue: HistogramStatistics = HistogramStatistics()
    copy: HistogramStatistics = HistogramStatistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatistics:
    """Slots of the primary by state; they add up to its capacity. Gauges.

    Attributes:
        free: Unused.
        writing: Being filled by a store or a promotion.
        idle: Readable and unpinned; eviction candidates.
        pinned: Readable, and in use by loads, cascades or waiting requests.
        held: Unused, but an orphaned copy may still access it.
    """

    free: int
    writing: int
    idle: int
    pinned: int
    held: int


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """Statistics of one tenant's blocks in the primary.

    Attributes:
        quota_slots: Slots that the tenant may take. Gauge.
        used_slots: Slots that it takes. Gauge.
        stored_blocks: Blocks written by its requests.
        loaded_blocks: Blocks handed to its requests for loading.
        evicted_blocks: Its blocks evicted to make room for others of its own.
    """

    quota_slots: int
    used_slots: int
    stored_blocks: int
    loaded_blocks: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimaryStatistics:
    """Statistics of the primary tier.

    Attributes:
        slots: Its slots by state.
        row_bytes: Bytes per slot; 0 if the primary has no memory.
        lookups: Block lookups, repeated ones included.
        hits: Lookups that found the block readable.
        pending_hits: Lookups that found the block being written.
        misses: Lookups that did not find the block.
        stored_blocks: Blocks written by requests.
        loaded_blocks: Blocks handed to requests for loading.
        evicted_blocks: Blocks evicted to make room.
        deleted_blocks: Blocks deleted by `cache.delete`.
        refused_stores: Calls of `prepare_store` that found no room.
        declined_blocks: Blocks that the eviction policy declined to store, as they were worth less
            than those in the cache.
        withheld_blocks: Blocks not stored because of their request's `max_offload_tokens`.
        hinted_blocks: Blocks that hints retain, and so are evicted last. Gauge.
        hints: Hints of requests, by `HINT_RESULTS`.
        used_blocks: Blocks that ended requests loaded, found, stored or were declined.
        found_blocks: Those of them that were found, also behind a missing block, where they cannot
            be loaded: `loaded_blocks` counts prefix hits, this block hits.
        load_pins: Pins of blocks that requests load; a block may have several. Gauge.
        unknown_tenant_blocks: Blocks of requests with an unknown tenant, which `unknown_tenant`
            "no_store" neither stores nor loads.
        tenants: Statistics of each tenant, by name; empty without tenants.
    """

    slots: SlotStatistics
    row_bytes: int = 0
    lookups: int
    hits: int
    pending_hits: int
    misses: int
    stored_blocks: int
    loaded_blocks: int
    evicted_blocks: int
    deleted_blocks: int
    refused_stores: int
    declined_blocks: int
    withheld_blocks: int
    hinted_blocks: int
    hints: Mapping[HintResult, int]
    used_blocks: int
    found_blocks: int
    load_pins: int
    unknown_tenant_blocks: int = 0
    tenants: Mapping[str, TenantStatistics] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """Capacity in blocks."""
        slots = self.slots
        return slots.free + slots.writing + slots.idle + slots.pinned + slots.held

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.row_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        return (self.num_slots - self.slots.free) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenStatistics:
    """Measured break-even point of loading from a tier; see `prefill_blocks_per_s`.

    Attributes:
        needed_blocks: Missed blocks from which on the tier is asked, from `min_blocks` and the
            measurements; None: loading never pays. Gauge.
        latency_s: Fixed latency of a load, probe included; None: no load was measured. Gauge.
        blocks_per_s: Throughput of loads beyond the fixed latency; None: no load was measured, or
            the duration did not depend on the number of blocks. Gauge.
        explorations: Requests below the break-even point let through to refresh the measurement.
    """

    needed_blocks: int | None
    latency_s: float | None
    blocks_per_s: float | None
    explorations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnopenedStatistics:
    """Attempts to open a tier that is not `required`.

    Attributes:
        since_s: Time of the first failed attempt, in seconds since 1970. Gauge.
        attempts: Failed attempts.
        reason: Text of the last attempt's error.
        next_attempt_s: Time of the next attempt, in seconds since 1970; in the past while an
            attempt is running. Gauge.
    """

    since_s: float
    attempts: int
    reason: str
    next_attempt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Statistics of one secondary tier.

    Attributes:
        name: Its `type`; further tiers of the same type get the suffix `-2` and so on.
        lookups: Block lookups in the tier.
        hits: Lookups answered with a hit.
        misses: Lookups answered with a miss.
        undecided: Lookups without an answer yet: an existence probe is needed.
        skipped_lookups: Lookups for which the tier was not asked, by `SKIP_REASONS`.
        submitted_jobs: Jobs submitted.
        submitted_loads: Submitted loads.
        finished_jobs: Jobs that have a result.
        finished_loads: Finished loads.
        stored_blocks: Blocks of successful stores, including those already present in the tier.
        stored_bytes: Bytes of `stored_blocks`.
        loaded_blocks: Blocks loaded into the primary.
        loaded_bytes: Bytes of `loaded_blocks`.
        failed_blocks: Blocks that jobs failed to move.
        failed_bytes: Bytes of `failed_blocks`.
        failed_jobs: Jobs with at least one failed block.
        failed_loads: Failed loads.
        failed_jobs_by_error: Failed jobs by the class name of their first error, or "other".
        corrupt_blocks: Blocks whose checksum did not match.
        missing_blocks: Blocks to load that the tier did not have.
        evicted_blocks: Blocks whose removal the tier announced.
        deleted_blocks: Blocks whose deletion the tier has confirmed, present before or not.
        dropped_blocks: Blocks that waited for room in the tier and were dropped, for any reason.
        dropped_bytes: Bytes of `dropped_blocks`.
        dropped: `dropped_blocks` by `DROP_REASONS`.
        late_blocks: Blocks submitted to the tier after waiting for room.
        declined_blocks: Blocks not stored because of `admission`: their reuse was unlikely.
        failed_store_blocks: Blocks given up after failed stores.
        prefetched_blocks: Blocks promoted before the first lookup of their request.
        unused_prefetched_blocks: Those of them that no request had loaded when theirs ended.
        refused_keys: Malformed keys among those that the tier announced.
        jobs_in_flight: Jobs without a result. Gauge.
        loads_in_flight: Loads without a collected result. Gauge.
        queued_jobs: Jobs that the tier has not started. Gauge.
        overdue_jobs: Jobs reported at their deadline whose copies still run. Gauge.
        cascading_blocks: Blocks of stores whose copies may still run. Gauge.
        promoting_blocks: Slots of the primary reserved for the tier's loads. Gauge.
        pending_blocks: Blocks in the primary that wait for room in the tier. Gauge.
        breakers: "closed", "open" or "half_open", for each of "load" and "store". Gauge.
        breaker_openings: Times each breaker opened.
        breaker_reasons: Text of the error that opened each breaker, for those that are not closed.
        probes_outstanding: Existence probes without an answer. Gauge.
        events_dropped: Events dropped because nobody read them in time; only for tiers whose
            removals are not all announced.
        used_bytes: Space used, if the tier reports it in its gauges. Gauge.
        capacity_bytes: Capacity, if the tier reports it in its gauges. Gauge.
        bytes_in_flight: Payload of running calls, if the tier reports it in its gauges. Gauge.
        bytes_in_flight_limit: Payload that may be in flight now, likewise. Gauge.
        load_seconds: Durations of loads.
        store_seconds: Durations of stores.
        gauges: The tier's own gauges; see `AsyncTier.gauges`.
        break_even: Break-even point of loading; None if it is not measured.
        is_open: Whether the tier is open; False for one that could not be opened, until an attempt
            succeeds, and for one that was closed. Gauge.
        unopened: Attempts to open the tier; None if it is open or was closed.
    """

    name: str
    lookups: int
    hits: int
    misses: int
    undecided: int
    skipped_lookups: Mapping[SkipReason, int]
    submitted_jobs: int
    submitted_loads: int
    finished_jobs: int
    finished_loads: int
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    failed_blocks: int
    failed_bytes: int
    failed_jobs: int
    failed_loads: int
    failed_jobs_by_error: Mapping[str, int]
    corrupt_blocks: int
    missing_blocks: int
    evicted_blocks: int
    deleted_blocks: int
    dropped_blocks: int
    dropped_bytes: int
    dropped: Mapping[DropReason, int]
    late_blocks: int
    declined_blocks: int
    failed_store_blocks: int
    prefetched_blocks: int
    unused_prefetched_blocks: int
    refused_keys: int
    jobs_in_flight: int
    loads_in_flight: int
    queued_jobs: int
    overdue_jobs: int
    cascading_blocks: int
    promoting_blocks: int
    pending_blocks: int
    breakers: Mapping[str, str]
    breaker_openings: Mapping[str, int]
    probes_outstanding: int
    events_dropped: int
    used_bytes: float | None
    capacity_bytes: float | None
    bytes_in_flight: float | None
    bytes_in_flight_limit: float | None
    load_seconds: DurationStatistics
    store_seconds: DurationStatistics
    gauges: Mapping[str, float] = field(default_factory=dict)
    break_even: BreakEvenStatistics | None = None
    breaker_reasons: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = True
    unopened: UnopenedStatistics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatistics:
    """Statistics of lookups and of transfers between the primary and the tiers.

    Attributes:
        requests: Active requests. Gauge.
        retained_blocks: Blocks pinned for waiting requests. Gauge.
        pinned_blocks: Blocks pinned by `cache.pin`. Gauge.
        deleting_blocks: Blocks of deletions under way, which count as absent. Gauge.
        lookups: Block lookups, repeated ones included.
        hits: Lookups that found the block readable in the primary.
        pending_hits: Lookups that found the block being written to the primary.
        retries: Lookups that must be repeated once a tier has answered.
        misses: Lookups that missed, by `MISS_REASONS`.
        block_hits: Blocks found, once per request, counted when the answer is final.
        block_misses: Blocks not found, counted like `block_hits`.
        jobs_submitted: Jobs submitted to tiers.
        job_results: Results received.
        job_failures: Results that report a failure.
        promotions_refused: Hits in a tier for which the primary could not free a slot.
        deferrals_expired: Requests deferred for longer than `deferral_timeout_s`.
        decision_seconds: From a request's first lookup until it loads, is computed without
            loading, or ends; resolved to scheduler steps.
    """

    requests: int
    retained_blocks: int
    pinned_blocks: int
    deleting_blocks: int
    lookups: int
    hits: int
    pending_hits: int
    retries: int
    misses: Mapping[MissReason, int]
    block_hits: int
    block_misses: int
    jobs_submitted: int
    job_results: int
    job_failures: int
    promotions_refused: int
    deferrals_expired: int
    decision_seconds: HistogramStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatistics:
    """Statistics of the owner's thread and the event loop.

    Attributes:
        version: Version of this package.
        python: Version of the interpreter.
        block_io: Block I/O implementation of the tiers on disk: "native" or "python".
        loop_lag_seconds: From posting work to the event loop until the loop runs it.
        step_seconds: Time on the owner's thread per end of step, collecting results included.
        wake_ups: Times the loop was woken; none by an engine that runs on it.
    """

    version: str
    python: str
    block_io: str = "python"
    loop_lag_seconds: HistogramStatistics
    step_seconds: HistogramStatistics
    wake_ups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingStatistics:
    """Statistics of a manager: the primary, the tiers in lookup order, and the planner.

    Attributes:
        primary: The primary tier.
        tiers: The secondary tiers; empty for a primary alone.
        planner: Lookups and transfers between tiers; None for a primary alone.
        runtime: The threads; None for a primary alone.
        cache_operations: Operations of `cache` under way, by name. Gauge.
    """

    primary: PrimaryStatistics
    tiers: tuple[TierStatistics, ...] = ()
    planner: PlannerStatistics | None = None
    runtime: RuntimeStatistics | None = None
    cache_operations: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics(OffloadingStatistics):
    """Statistics of an `OffloadEngine`: its manager, and the copies to and from the device.

    Attributes:
        copies: Device copies in flight, loads and stores. Gauge.
        waiting_loads: Calls of `load` waiting for a permit. Gauge.
        waiting_stores: Calls of `store` waiting for a permit or for room. Gauge.
        missed_events: Events that slow readers of `events()` did not get, but the contents instead;
            counted per reader.
        failed_copies: Copies that failed or could not start.
        load_copy_seconds: Durations of finished copies to the device.
        store_copy_seconds: Durations of finished copies from the device.
    """

    copies: int
    waiting_loads: int
    waiting_stores: int
    missed_events: int
    failed_copies: int
    load_copy_seconds: HistogramStatistics
    store_copy_seconds: HistogramStatistics
