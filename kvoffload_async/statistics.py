"""What an engine has done so far, and what it holds now: plain numbers, read at one moment.

`stats()` of an engine, a manager or a tier returns one of these. Reading takes no lock, walks no
blocks, and waits for nobody, so that it may be done every step. *Counters* only grow, as long as
the object lives; *gauges* say how it is now. Blocks count one each, whatever their size; bytes are
those of the primary's rows.

Any thread may read an engine or a `TieringOffloadingManager`. On the owner's it reads how it is
now; on another one it reads the counters and gauges that were published at the end of the owner's
last step. What a tier says of itself (`gauges`, histograms, `corrupt_blocks` and the like) is read
at the time of the call. A primary or a tier without such a manager is read by its owner's thread.

Of what is counted the following always hold, on whatever thread. For a primary: `lookups == hits +
pending_hits + misses`. For a planner: `lookups == hits + pending_hits + retries +
sum(misses.values())`, and `jobs_submitted` is `job_results` and the tiers' `jobs_in_flight`. For a
tier: `lookups == hits + misses + undecided`, `submitted_jobs == finished_jobs + jobs_in_flight`,
`failed_jobs` is the sum of `failed_jobs_by_error`, and `dropped_blocks` that of `dropped`.

A counter that the engine gets is a field here of the same name; nothing else needs to know it.
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
"""The inclusive upper bounds of a histogram's buckets, in seconds; above the last is one more."""

MissReason = Literal["absent", "skipped", "no_room", "paused", "expired"]
MISS_REASONS: Final[tuple[MissReason, ...]] = get_args(MissReason)
"""Why a lookup found nothing: no tier has the block; a tier that was not asked may have it; a tier
has it, but the primary has no slot for it, and will have none; a reset is under way; the request
was deferred for longer than `deferral_timeout_s`."""

SkipReason = Literal["unavailable", "suspended", "filtered", "failed", "too_few"]
SKIP_REASONS: Final[tuple[SkipReason, ...]] = get_args(SkipReason)
"""Why a tier was not asked: it is not open; its breaker is; the request loads nothing from it; a
promotion of this block failed for this request before; it misses fewer blocks than pay."""

DropReason = Literal["evicted", "reset", "closed"]
DROP_REASONS: Final[tuple[DropReason, ...]] = get_args(DropReason)
"""What became of a block before its tier had room: it left the primary for another; with a reset of
the primary; with the shutdown."""

OTHER_ERROR: Final = "other"
"""What a third party's error is counted as."""


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    """Durations by bucket. Counters.

    Attributes:
        counts: How many fell into each bucket of `BUCKET_BOUNDS_S`; the last one is above them all.
        sum_s: Their sum in seconds.
    """

    counts: tuple[int, ...] = (0,) * (len(BUCKET_BOUNDS_S) + 1)
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Iterate over the bounds in seconds, infinity last, and how many were not above each."""
        return zip((*BUCKET_BOUNDS_S, float("inf")), accumulate(self.counts), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationStatistics:
    """How long the jobs of one direction of a tier took.

    Those that have ended in the tier itself, well or not; an overdue one when its copy has ended.

    Attributes:
        total: From the arrival in the tier's queue until the bytes had stopped moving.
        queue: Until the tier began; a job that never began is not among these.
        copy: From then on.
    """

    total: HistogramStatistics = HistogramStatistics()
    queue: HistogramStatistics = HistogramStatistics()
    copy: HistogramStatistics = HistogramStatistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatistics:
    """Slots of the primary by use; they add up to its capacity. Gauges.

    Attributes:
        free: Nobody's.
        writing: A store or a promotion is filling it.
        idle: Readable, and the first to be evicted.
        pinned: Readable, and in use by loads, cascades or waiting requests.
        held: Nobody's, but a copy that was given up may still touch it.
    """

    free: int
    writing: int
    idle: int
    pinned: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimaryStatistics:
    """The primary tier.

    Attributes:
        slots: Its slots by use.
        row_bytes: Bytes of a slot; 0 where there is no memory behind it.
        lookups: Lookups of a block, each time that it was asked for.
        hits: Those that found it readable.
        pending_hits: Those that found it being written.
        misses: Those that found nothing.
        stored_blocks: Written by requests.
        loaded_blocks: Given to requests for loading.
        evicted_blocks: Made to leave for others.
        refused_stores: Calls of `prepare_store` that found no room.
        load_pins: Pins of blocks that requests load; a block may have several. Gauge.
        events_dropped: Events that nobody has read in time.
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
    refused_stores: int
    load_pins: int
    events_dropped: int

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
        """Bytes of those that are not free."""
        return (self.num_slots - self.slots.free) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenStatistics:
    """Where loading from a tier pays, as measured lately; see `prefill_blocks_per_s`.

    Attributes:
        needed_blocks: Blocks that a request must miss for the tier to be asked, by `min_blocks` and
            what was measured; None: no number is enough. Gauge.
        latency_s: What loading takes however few the blocks are, the probe included; None: no load
            was measured. Gauge.
        blocks_per_s: How fast the rest of it goes; None: no load was measured, or the number of
            their blocks made no difference. Gauge.
        explorations: Requests that were let through to measure anew.
    """

    needed_blocks: int | None
    latency_s: float | None
    blocks_per_s: float | None
    explorations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """One secondary tier.

    Attributes:
        name: Its `type`; with `-2` and so on for further tiers of one type.
        lookups: How often it was asked for a block.
        hits: Answers that it has it.
        misses: Answers that it has not.
        undecided: Answers that it is not known yet: an existence probe has to tell.
        skipped_lookups: How often it was not asked, by `SKIP_REASONS`.
        submitted_jobs: Jobs that were submitted.
        submitted_loads: Those of them that were loads.
        finished_jobs: Jobs whose result was taken.
        finished_loads: Those of them that were loads.
        stored_blocks: Blocks that stores have put there, or found there.
        stored_bytes: Their bytes.
        loaded_blocks: Blocks that loads have brought to the primary.
        loaded_bytes: Their bytes.
        failed_blocks: Blocks of jobs that were not moved.
        failed_bytes: Their bytes.
        failed_jobs: Jobs of which a block failed.
        failed_loads: Those of them that were loads.
        failed_jobs_by_error: Failed jobs by the name of the first error's class, or "other".
        corrupt_blocks: Blocks whose bytes did not verify.
        missing_blocks: Blocks that were not there when they were to be loaded.
        evicted_blocks: Blocks that the tier has announced as gone.
        dropped_blocks: Blocks that left the primary before the tier had room for them.
        dropped_bytes: Their bytes.
        dropped: The same by `DROP_REASONS`.
        late_blocks: Blocks that were offered to the tier after they had waited for room.
        failed_store_blocks: Blocks that were given up after their stores had failed.
        refused_keys: Keys that the tier announced and that are none.
        jobs_in_flight: Jobs whose result was not taken. Gauge.
        loads_in_flight: Those of them that are loads. Gauge.
        queued_jobs: Jobs that the tier has not begun. Gauge.
        overdue_jobs: Jobs that were given up, and whose copies still run. Gauge.
        cascading_blocks: Blocks of stores whose copies may still run. Gauge.
        promoting_blocks: Slots of the primary that its loads occupy. Gauge.
        pending_blocks: Blocks that wait in the primary for room in the tier. Gauge.
        breakers: "closed", "open" or "half_open", for each of "load" and "store". Gauge.
        breaker_openings: How often each of them has opened.
        probes_outstanding: Existence probes without an answer. Gauge.
        events_dropped: Events that nobody has read in time.
        used_bytes: What the tier occupies, where it says so in its gauges. Gauge.
        capacity_bytes: What it may occupy, where it says so. Gauge.
        load_seconds: How long loads took.
        store_seconds: How long stores took.
        gauges: What the tier says of itself; see `AsyncTier.gauges`.
        break_even: Where loading pays; None: nobody measures that.
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
    dropped_blocks: int
    dropped_bytes: int
    dropped: Mapping[DropReason, int]
    late_blocks: int
    failed_store_blocks: int
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
    load_seconds: DurationStatistics
    store_seconds: DurationStatistics
    gauges: Mapping[str, float] = field(default_factory=dict)
    break_even: BreakEvenStatistics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatistics:
    """What moves between the primary and the tiers.

    Attributes:
        requests: Requests that are known. Gauge.
        retained_blocks: Blocks that are pinned for requests that wait. Gauge.
        lookups: Lookups of a block, each time that a request asked for it.
        hits: Those that found it readable in the primary.
        pending_hits: Those that found it on its way there.
        retries: Those that have to wait for a tier's answer.
        misses: The others, by `MISS_REASONS`.
        block_hits: Blocks that requests found, each once a request, as soon as it was certain.
        block_misses: Blocks that they did not find.
        jobs_submitted: Jobs given to tiers.
        job_results: Results of them.
        job_failures: Those that say that something failed.
        promotions_refused: Hits in a tier for which the primary has no slot, and will have none.
        deferrals_expired: Requests that were deferred longer than they may be.
        decision_seconds: From a request's first lookup until it proceeds: loads, is computed
            without, or ends. In whole steps.
    """

    requests: int
    retained_blocks: int
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
    """The threads that all of it runs on.

    Attributes:
        version: Of this package.
        python: Of the interpreter.
        block_io: What moves payload in tiers that keep files: "native" or "python".
        loop_lag_seconds: From handing something over to the event loop until it gets to it.
        step_seconds: What the end of a step and taking in results took of the owner's thread.
        longest_step_s: The longest of these, in seconds.
        wake_ups: How often the loop was woken.
    """

    version: str
    python: str
    block_io: str = "python"
    loop_lag_seconds: HistogramStatistics
    step_seconds: HistogramStatistics
    longest_step_s: float
    wake_ups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingStatistics:
    """A manager: the primary, the tiers behind it in the order of lookup, and the planner.

    Attributes:
        primary: The primary tier.
        tiers: The secondary tiers; none where there is a primary alone.
        planner: What moves between them; None where there is a primary alone.
        runtime: The threads; None where there is a primary alone.
    """

    primary: PrimaryStatistics
    tiers: tuple[TierStatistics, ...] = ()
    planner: PlannerStatistics | None = None
    runtime: RuntimeStatistics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics(OffloadingStatistics):
    """An `OffloadEngine`: its manager, and the copies to and from the device.

    Attributes:
        copies: Copies under way, loads and stores. Gauge.
        waiting_loads: Calls of `load` that wait for a permit. Gauge.
        waiting_stores: Calls of `store` that do, or that wait for room. Gauge.
        missed_events: Events that readers of `events()` were too slow for, once for each reader.
        failed_copies: Copies that failed, or could not begin.
        load_copy_seconds: How long copies to the device took that have ended.
        store_copy_seconds: How long those from the device took.
    """

    copies: int
    waiting_loads: int
    waiting_stores: int
    missed_events: int
    failed_copies: int
    load_copy_seconds: HistogramStatistics
    store_copy_seconds: HistogramStatistics
