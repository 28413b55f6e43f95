"""What an engine has done so far, and what it holds now: plain numbers, read at one moment.

`stats()` of an engine, a manager or a tier returns one of these. Reading takes no lock, walks no
blocks, and waits for nobody, so that it may be done every step. *Counters* only grow, as long as
the object lives; *gauges* say how it is now. Blocks count one each, whatever their size; bytes are
those of the primary's rows.

A counter that the engine gets is a field here of the same name; nothing else needs to know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        stored_blocks: Written by requests.
        loaded_blocks: Given to requests for loading.
        evicted_blocks: Made to leave for others.
        refused_stores: Calls of `prepare_store` that found no room.
        events_dropped: Events that nobody has read in time.
    """

    slots: SlotStatistics
    stored_blocks: int
    loaded_blocks: int
    evicted_blocks: int
    refused_stores: int
    events_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """One secondary tier.

    Attributes:
        name: Its `type`; with `-2` and so on for further tiers of one type.
        stored_blocks: Blocks that stores have put there, or found there.
        stored_bytes: Their bytes.
        loaded_blocks: Blocks that loads have brought to the primary.
        loaded_bytes: Their bytes.
        failed_blocks: Blocks of jobs that were not moved.
        failed_bytes: Their bytes.
        failed_jobs: Jobs of which a block failed.
        failed_loads: Those of them that were loads.
        dropped_blocks: Blocks that left the primary before the tier had room for them.
        dropped_bytes: Their bytes.
        late_blocks: Blocks that were offered to the tier after they had waited for room.
        failed_store_blocks: Blocks that were given up after their stores had failed.
        refused_keys: Keys that the tier announced and that are none.
        jobs_in_flight: Jobs without a result. Gauge.
        queued_jobs: Those of them that the tier has not begun. Gauge.
        overdue_jobs: Jobs that were given up, and whose copies still run. Gauge.
        cascading_blocks: Blocks of stores whose copies may still run. Gauge.
        owed_blocks: Blocks that wait in the primary for room in the tier. Gauge.
        breakers: "closed", "open" or "half_open", for each of "load" and "store". Gauge.
        probes_outstanding: Existence probes without an answer. Gauge.
        events_dropped: Events that nobody has read in time.
        gauges: What the tier says of itself; see `AsyncTier.gauges`.
    """

    name: str
    stored_blocks: int
    stored_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    failed_blocks: int
    failed_bytes: int
    failed_jobs: int
    failed_loads: int
    dropped_blocks: int
    dropped_bytes: int
    late_blocks: int
    failed_store_blocks: int
    refused_keys: int
    jobs_in_flight: int
    queued_jobs: int
    overdue_jobs: int
    cascading_blocks: int
    owed_blocks: int
    breakers: Mapping[str, str]
    probes_outstanding: int
    events_dropped: int
    gauges: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatistics:
    """What moves between the primary and the tiers.

    Attributes:
        requests: Requests that are known. Gauge.
        jobs_submitted: Jobs given to tiers.
        job_results: Results of them.
        job_failures: Those that say that something failed.
        promotions_refused: Hits in a tier for which the primary had no slot.
        deferrals_expired: Requests that were deferred longer than they may be.
    """

    requests: int
    jobs_submitted: int
    job_results: int
    job_failures: int
    promotions_refused: int
    deferrals_expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadingStatistics:
    """A manager: the primary, the tiers behind it in the order of lookup, and the planner.

    Attributes:
        primary: The primary tier.
        tiers: The secondary tiers; none where there is a primary alone.
        planner: What moves between them; None where there is a primary alone.
    """

    primary: PrimaryStatistics
    tiers: tuple[TierStatistics, ...] = ()
    planner: PlannerStatistics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics(OffloadingStatistics):
    """An `OffloadEngine`: its manager, and the copies to and from the device.

    Attributes:
        copies: Copies under way, loads and stores. Gauge.
        waiting_loads: Calls of `load` that wait for a permit. Gauge.
        waiting_stores: Calls of `store` that do. Gauge.
        missed_events: Events that readers of `events()` were too slow for, once for each reader.
    """

    copies: int
    waiting_loads: int
    waiting_stores: int
    missed_events: int
