"""One tier on the owner's side: its jobs, its index, its breakers, its counters, its effects.

A tier with a copy that is overdue, or that was given up, gets no new slots until a copy of it ends:
promotions and cascades occupy their slots until the copy ends, however late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from kvoffload_async.abc.events import (
    AnnouncementRefused,
    BlocksAppeared,
    BlocksEvicted,
    CallEnded,
    JobFinished,
    JobOverdue,
    ProbeAnswered,
    TierEvent,
    TierOperation,
)
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.barred import BarredKeys
from kvoffload_async.core.counters import Figures, FigureSet, TierCounters
from kvoffload_async.core.eventlog import Change, EventLog
from kvoffload_async.core.health import BreakerSettings, BreakerState, TierHealth
from kvoffload_async.core.index import BreakEven, CostGatedIndex, KeyIndex
from kvoffload_async.core.ledger import (
    CallTier,
    JobAbandoned,
    JobState,
    Launched,
    Ledger,
    StartJob,
    StartProbe,
    TierEffect,
    TouchBlocks,
)
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    Remedies,
    StateError,
    TierClosedError,
)
from kvoffload_async.statistics import SkipReason, TierStatistics
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
)

TURN_S: Final = 1.0
"""Seconds until an unused ticket gives way, or a stalled tier counts as silent; see `Room`."""

_GONE = (BlockMissingError, CorruptBlockError)
_PRESUMED_BYTES_PER_S: Final = 100e6
"""Load bandwidth assumed for a tier until its first load has ended."""
_WEIGHT_OF_NEWEST: Final = 0.25


class TierState:
    """The owner's state of one tier; driven by the planner, or by a manager without a planner.

    Effects are queued until `take_effects`, which marks their jobs as launched; the tier cannot
    have touched a job before that. `handle` applies the tier's events. Only the planner uses the
    breakers and back-pressure.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        jobs: Jobs, from submission until their result and their release have been taken.
        index: The known contents of the tier.
        lookup_many: The index's; see `KeyIndex.lookup_many`.
        cost_gated: The index, if it probes only for requests that miss enough blocks; else None.
        cascading_blocks: Blocks of stores whose copies may still run.
        promotion_slots: Slots occupied by promotions: until the block has landed, or the promotion
            was given up and its copy has ended.
        counters: Counts of lookups, jobs and results, and of the tier's own events.
        effects: Effects queued for `take_effects`.
        event_log: Events for `take_events`.
        health: The breakers, which suspend a failing tier.
        is_available: Whether the tier is open.
        is_silent: Whether others waited for room while no copy ended for too long, and none has
            ended since. Set by `Room`.
        prefetches: Jobs without a collected result that promote ahead of lookups: their failure
            is no evidence against the tier.
        may_probe: Whether a step's end may start a probe.
        barred: Keys that are being deleted from the tier.
        deletes: Whether the tier can delete blocks; an external manager cannot.
        lists: Whether the tier can list its blocks.
        ages: Whether it knows their age.
        is_clearing: Whether all blocks of the tier are being deleted: it is not used meanwhile.
        remedies: What helps if the tier fails, for log lines.
    """

    def __init__(
        self,
        name: str,
        index: KeyIndex,
        slot_bytes: int,
        events: EventLog,
        *,
        breaker: BreakerSettings | None = None,
        backpressure: Backpressure | None = None,
        remedies: Remedies | None = None,
    ) -> None:
        """Start without jobs.

        Args:
            name: For messages and metrics.
            index: Index of the tier's contents; this object takes ownership.
            slot_bytes: Bytes per slot.
            events: Log to which changes of the tier's contents are added; its medium and locality
                are the tier's.
            breaker: Thresholds for suspending a failing tier, in each direction.
            backpressure: Drops cascades to the tier while it is slow.
            remedies: The tier's remedies, for log lines.
        """
        self.name = name
        self.index = index
        self.lookup_many: Callable[..., list[LookupResult]] = index.lookup_many
        self.cost_gated = index if isinstance(index, CostGatedIndex) else None
        self.jobs = Ledger(slot_bytes, self._note_result, self._free)
        self.health = TierHealth(breaker or BreakerSettings())
        self.medium, self.locality = events.medium, events.locality
        self.backpressure = backpressure
        self.remedies: Remedies = remedies or {}
        self.cascading_blocks = self.promotion_slots = 0
        self.counters = TierCounters()
        self.event_log = events
        self.effects: list[TierEffect] = []
        self.barred = BarredKeys()
        self.deletes = self.lists = self.ages = self.is_clearing = False
        self._calls: dict[int, tuple[TierOperation, Callable[[CallEnded], object]]] = {}
        """Management call without an answer -> its operation, and who takes the answer."""
        self._next_call_id = 0
        self.is_available = True
        self._closed = False
        self.is_silent = False
        self.prefetches: set[JobId] = set()
        self._prefetches_from_s = 0.0
        """When the pause ends that follows a failed prefetch."""
        self._quiet_since_s = 0.0
        """When a copy last ended, or began while none was in flight."""
        self._load_seconds = slot_bytes / _PRESUMED_BYTES_PER_S
        """Measured seconds per loaded block, a moving average."""
        self.may_probe = self.cost_gated is not None or not index.is_exact

    # -- queries --------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """A name unique among the tiers of the engine."""
        return self.event_log.ownership or self.name

    def skips_load(self, ctx: ReqContext, now_s: float) -> SkipReason | None:
        """Return why a request cannot load from this tier now; None if it can."""
        if not self.is_available:
            return "unavailable"
        if self.is_clearing:
            return "clearing"
        if not self.health.loads.permits(now_s):
            return "suspended"
        for matcher in ctx.load_tier_filter:
            if matcher.matches(self.medium, self.locality):
                return None
        return "filtered"

    def takes_store(self, now_s: float) -> bool:
        """Return whether one more cascade may be submitted now, back-pressure included."""
        if not self.may_store(now_s):
            return False
        return self.backpressure is None or not self.backpressure.drops_store(now_s)

    def may_store(self, now_s: float) -> bool:
        """Return whether the tier is in use and its store breaker permits a store."""
        return self.is_in_use and self.health.stores.permits(now_s)

    @property
    def wants_blocks(self) -> bool:
        """Whether the tier accepts pending blocks: open, store breaker closed, no overdue copy."""
        works = self.is_in_use and self.health.stores.state is BreakerState.CLOSED
        return works and self.takes_slots

    @property
    def is_in_use(self) -> bool:
        """Whether the tier is open, and not being cleared."""
        return self.is_available and not self.is_clearing

    @property
    def takes_slots(self) -> bool:
        """Whether the tier may get slots: it is not silent, and no copy of it is overdue."""
        return not (self.is_silent or self.jobs.orphaned_count)

    def takes_prefetch(self, now_s: float) -> bool:
        """Return whether the tier is in use, and no promotion ahead of lookups has just failed."""
        return self.health.loads.is_closed and now_s >= self._prefetches_from_s

    def falls_silent(self, now_s: float) -> bool:
        """Return whether copies are in flight and none has ended for too long.

        Too long is `TURN_S`, plus twice the time that the tier's measured rate gives for the blocks
        in flight.
        """
        blocks = self.promotion_slots + self.cascading_blocks
        return blocks > 0 and now_s - self._quiet_since_s > TURN_S + 2 * self._load_seconds * blocks

    @property
    def has_pending_work(self) -> bool:
        """Whether a job has no result yet, a result was not taken, or a probe is outstanding.

        Probes of a closed tier do not count: they may never have been started.
        """
        if self.jobs.unreported_count or self._calls:
            return True
        return self._waits_for_probes and not self._closed

    # -- notifications from the planner ---------------------------------------------------------

    def reset(self) -> None:
        """Reset the back-pressure after a reset of the primary."""
        if self.backpressure is not None:
            self.backpressure.clear()

    @property
    def _waits_for_probes(self) -> bool:
        """Whether a probe is outstanding, or one is needed and permitted."""
        if self.health.permits_probe():
            return self.index.is_waiting
        return bool(self.index.probes_outstanding)

    # -- commands -------------------------------------------------------------------------------

    def submit(self, job: JobMetadata) -> None:
        """Accept a job; `jobs` will return exactly one result for it.

        A job fails at once if it is submitted after `close` or its id is in use.

        Raises:
            StateError: The numbers of keys and block ids differ; the job was not accepted.
        """
        num_blocks = len(job.keys)
        # Keys and slots are validated by the actor, off this thread: it costs time per block.
        if len(job.block_ids) != num_blocks:
            raise StateError(
                f"job {job.job_id} has {num_blocks} keys but {len(job.block_ids)} block_ids"
            )
        if not (self.promotion_slots or self.cascading_blocks):
            self._quiet_since_s = job.submit_time
        self.health.job_submitted(job)
        if job.is_promotion:
            self.promotion_slots += num_blocks
        else:
            self.cascading_blocks += num_blocks
        self.counters.submitted_jobs += 1
        self.counters.submitted_loads += job.is_promotion
        if not self.jobs.accept(job):
            return
        if self._closed:
            error = TierClosedError(f"job {job.job_id} came after the shutdown")
            self.jobs.handle(JobAbandoned(job.job_id, error))
        else:
            self.effects.append(StartJob(job))

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None) -> None:
        """Forward a use of blocks to the tier, if it is open."""
        if keys and self.is_available:
            self.effects.append(TouchBlocks(tuple(keys), ctx))

    def call(
        self,
        operation: TierOperation,
        keys: Sequence[OffloadKey],
        on_end: Callable[[CallEnded], object],
        cursor: str | None = None,
        age_s: float | None = None,
    ) -> None:
        """Call a method of the tier that is no job; `on_end` gets the answer, exactly once.

        At once if the tier is not open, otherwise with the tier's events; `delete` is called after
        all jobs on its keys that were submitted before.
        """
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        if not self.is_available:
            on_end(CallEnded(call_id, operation, error=_closed_error(self.name)))
            return
        self._calls[call_id] = operation, on_end
        self.effects.append(CallTier(call_id, operation, tuple(keys), cursor, age_s))

    def finish_request(self, ctx: ReqContext) -> None:
        """Drop the index's state of a request; no jobs follow, but its jobs may still run."""
        self.index.forget_request(ctx)

    def tell_time(self, clock: Callable[[], float]) -> None:
        """Set the time of the break-even model, if there is one; call before `end_step`."""
        if self._break_even is not None:
            self._break_even.advance(clock())

    def end_step(self) -> None:
        """Queue one probe for the keys looked up in this step, unless the tier is suspended."""
        if self._closed:
            return
        if not self.health.permits_probe():
            self.index.tier_suspended()
            return
        probe: StartProbe | None = self.index.next_probe()
        if probe is not None:
            self.effects.append(probe)
            self.health.probe_started(probe.generation)

    def take_effects(self) -> list[TierEffect]:
        """Remove and return the effects; from now on the tier may access their jobs' slots."""
        effects, self.effects = self.effects, []
        for effect in effects:
            if isinstance(effect, StartJob):
                self.jobs.handle(Launched(effect.job.job_id))
        return effects

    # -- events of the tier ---------------------------------------------------------------------

    def handle(self, event: TierEvent) -> None:
        """Apply an event of the tier.

        Raises:
            IllegalTransitionError: The tier's actor finished a job twice, or an unknown job.
        """
        match event:
            case JobFinished():
                self._finish(event)
            case JobOverdue():
                job = self.jobs.handle(event)
                if job.is_promotion:
                    self._doubt(job, job.keys)
            case ProbeAnswered():
                if self._break_even is not None:
                    self._break_even.probe_ended(event.seconds, worked=event.error is None)
                self.index.answered(event.generation, event.present)
                self.health.probe_ended(event)
            case BlocksAppeared():
                self.index.appeared(event.keys)
                self.event_log.add(event.keys, Change.STORED)
            case BlocksEvicted():
                self.counters.evicted_blocks += len(event.keys)
                self.index.vanished(event.keys, surely=True)
                self.event_log.add(event.keys, Change.REMOVED)
            case AnnouncementRefused():
                self.counters.refused_keys += event.num_keys
            case CallEnded():  # pragma: no branch - no other event exists
                self._call_ended(event)

    def take_events(self, max_keys: int | None = None) -> Iterator[OffloadingEvent]:
        """Remove and return events of added and removed blocks; see `EventLog.take`."""
        return self.event_log.take(lambda _key: False, max_keys)

    # -- statistics -----------------------------------------------------------------------------

    def statistics(
        self,
        taken: Figures,
        *,
        waiting_jobs: int = 0,
        gauges: Mapping[str, float] | None = None,
    ) -> TierStatistics:
        """Return the tier's statistics. Thread-safe.

        Args:
            taken: The figures of the tier, copied with `TIER_FIGURES`.
            waiting_jobs: Number of launched jobs that the tier has not started.
            gauges: The tier's own gauges, by name.
        """
        counted, reported = TIER_FIGURES.named(taken), gauges or {}
        slot_bytes = self.jobs.slot_bytes
        counted["queued_jobs"] += waiting_jobs
        breakers = {"load": self.health.loads, "store": self.health.stores}
        states = {way: breaker.state.name.lower() for way, breaker in breakers.items()}
        return TierStatistics(
            **counted,
            name=self.label,
            failed_bytes=counted["failed_blocks"] * slot_bytes,
            dropped_bytes=counted["dropped_blocks"] * slot_bytes,
            jobs_in_flight=counted["submitted_jobs"] - counted["finished_jobs"],
            loads_in_flight=counted["submitted_loads"] - counted["finished_loads"],
            breakers=states,
            breaker_openings={way: breaker.openings for way, breaker in breakers.items()},
            breaker_reasons={
                way: breakers[way].reason for way in states if states[way] != "closed"
            },
            probes_outstanding=self.index.probes_outstanding,
            events_dropped=self.event_log.dropped,
            used_bytes=reported.get("used_bytes"),
            capacity_bytes=reported.get("capacity_bytes"),
            bytes_in_flight=reported.get("bytes_in_flight"),
            bytes_in_flight_limit=reported.get("bytes_in_flight_limit"),
            load_seconds=self.counters.load_seconds.read(),
            store_seconds=self.counters.store_seconds.read(),
            gauges=dict(reported),
            break_even=None if self.cost_gated is None else self.cost_gated.statistics(),
            is_open=self.is_available,
        )

    # -- lifecycle ------------------------------------------------------------------------------

    def take_over(self, opened: TierState) -> None:
        """Mark the tier, which is open now, as available, and adopt the parts of `opened`.

        Args:
            opened: State that was created when the tier was opened; has no jobs. Its index, event
                log and medium replace those of this object.
        """
        for listener in self.index.listeners:
            opened.index.watch(listener)
        self.index, self.cost_gated = opened.index, opened.cost_gated
        self.lookup_many = opened.lookup_many
        self.event_log = opened.event_log
        self.counters.evicted_blocks += opened.counters.evicted_blocks
        self.counters.refused_keys += opened.counters.refused_keys
        self.medium, self.locality = opened.medium, opened.locality
        self.backpressure, self.remedies = opened.backpressure, opened.remedies
        self.deletes, self.lists, self.ages = opened.deletes, opened.lists, opened.ages
        self.is_available = True

    def close(self) -> None:
        """Reject new jobs; queued jobs fail now, launched jobs continue."""
        self._closed = True
        self.is_available = False
        self.effects.clear()
        self._abandon(JobState.QUEUED)
        for call_id, (operation, _) in tuple(self._calls.items()):
            self._call_ended(CallEnded(call_id, operation, error=_closed_error(self.name)))

    def abandon_rest(self) -> list[JobId]:
        """Fail all jobs without a result; return the ids of jobs whose copies still run."""
        self.effects = [e for e in self.effects if not isinstance(e, StartJob)]
        self._abandon(JobState.QUEUED, JobState.FLYING)
        return self.jobs.ids_in(JobState.ORPHANED)

    # -- internal -------------------------------------------------------------------------------

    def _call_ended(self, event: CallEnded) -> None:
        _, on_end = self._calls.pop(event.call_id, (None, None))
        if event.operation == "delete" and event.keys:
            gone = tuple(event.keys)
            self.counters.deleted_blocks += len(gone)
            self.index.deleted(gone)
            self.event_log.add(gone, Change.REMOVED)
        if on_end is not None:  # unless the tier was closed meanwhile
            on_end(event)

    def _finish(self, event: JobFinished) -> None:
        job = self.jobs.handle(event)
        self.counters.count_copy(job, event)
        self.is_silent, self._quiet_since_s = False, self.health.now_s or 0.0
        if event.job_error is not None:
            if job.is_promotion:
                self._doubt(job, job.keys)
            return
        failures, outdated = event.failures, event.outdated
        if not job.is_promotion:
            stored: Sequence[OffloadKey] = job.keys
            if failures:
                stored = [key for i, key in enumerate(job.keys) if i not in failures]
            if outdated:
                stored = [key for key in stored if key not in outdated]
            self.index.appeared(stored)
            self.event_log.add(stored, Change.STORED)
            return
        if not failures:
            self.event_log.confirm(job.keys)
            if job.keys:
                per_block_s = event.seconds / len(job.keys)
                self._load_seconds += _WEIGHT_OF_NEWEST * (per_block_s - self._load_seconds)
                if self._break_even is not None:
                    self._break_even.load_ended(len(job.keys), event.seconds)
            return
        failed = {job.keys[i]: error for i, error in failures.items()}
        gone = [key for key, error in failed.items() if isinstance(error, _GONE)]
        unavailable = [key for key, error in failed.items() if not isinstance(error, _GONE)]
        if outdated:
            gone = [key for key in gone if key not in outdated]
        self.index.vanished(gone, surely=True)
        self.event_log.add(gone, Change.REMOVED)
        self._doubt(job, unavailable)

    def _doubt(self, job: JobMetadata, keys: Sequence[OffloadKey]) -> None:
        """Record that blocks may be gone; after a failed prefetch, requests ask the tier again."""
        if job.job_id in self.prefetches:
            self.index.forget_request(job.req_context)
        else:
            self.index.vanished(keys, surely=False)

    @property
    def _break_even(self) -> BreakEven | None:
        return None if self.cost_gated is None else self.cost_gated.break_even

    def _abandon(self, *states: JobState) -> None:
        for job_id in self.jobs.ids_in(*states):
            self.jobs.handle(
                JobAbandoned(job_id, TierClosedError(f"job {job_id} was ended by the shutdown"))
            )

    def _note_result(self, job: JobMetadata, result: JobResult) -> None:
        self.counters.count(job, result)
        if not result.orphaned:
            self._free(job)
        now_s = self.health.now_s
        if now_s is None:  # without a planner
            return
        if job.job_id in self.prefetches and not result.success:
            self._prefetches_from_s = now_s + self.health.loads.settings.retry_after_s
            return
        self.health.job_ended(job, result, now_s)
        if job.is_promotion or self.backpressure is None:
            return
        if result.success:
            num_bytes = result.transfer_bytes or 0
            self.backpressure.store_ended(result.transfer_time or 0.0, num_bytes, now_s)
        else:
            self.backpressure.store_failed(now_s)

    def _free(self, job: JobMetadata) -> None:
        """Record that the copy of a job has ended."""
        if job.is_promotion:
            self.promotion_slots -= len(job.keys)
        else:
            self.cascading_blocks -= len(job.keys)


def _closed_error(name: str) -> TierClosedError:
    return TierClosedError(f"tier {name} is not open")


TIER_FIGURES: Final = FigureSet(
    TierCounters,
    {
        "queued_jobs": "jobs.queued_count",
        "overdue_jobs": "jobs.orphaned_count",
        "cascading_blocks": "cascading_blocks",
        "promoting_blocks": "promotion_slots",
    },
    "pending_blocks",
)
"""Copies the figures of a `TierState`, with the number of blocks that are pending for the tier."""
