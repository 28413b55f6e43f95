"""The planner: the primary tier, the secondary tiers behind it, and what moves between them.

It drives one `TierState` a tier. What it wants done waits there, as effects, until somebody hands
them over; what has ended is there when `collect` looks. The planner executes nothing and knows no
clock: time comes in with `begin_step`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from kvoffload_async.core.cascades import Cascades
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.own_context import OwnContext
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.promotions import Promotions
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierLookup, TierState
from kvoffload_async.core.touches import Touches
from kvoffload_async.errors import StateError
from kvoffload_async.types import (
    ENGINE_REQ_ID,
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    as_block_ids,
)


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """The planner's bounds.

    Attributes:
        promotion_slots: Primary slots that promotions may occupy until they are loaded.
        cascade_blocks: Blocks in cascade to one tier at once; the others wait their turn.
        deferral_s: Seconds that a request may be deferred in all; then pending means missing.
    """

    promotion_slots: int
    cascade_blocks: int
    deferral_s: float


@dataclass(slots=True)
class PlannerCounters:
    """What the planner has done so far."""

    jobs_submitted: int = 0
    job_results: int = 0
    job_failures: int = 0
    promotions_refused: int = 0
    deferrals_expired: int = 0


class Planner:
    """Decides what is stored, cascaded, promoted and evicted.

    Thread: owner.

    Attributes:
        now_s: When the step began.
        sources: Who answers a lookup in each tier: its state, or an observer around that.
    """

    def __init__(self, primary: Primary, tiers: Sequence[TierState], limits: PlannerLimits) -> None:
        """Start with an empty primary in front of `tiers`, in the order of their lookup."""
        self.primary = primary
        self.tiers = tuple(tiers)
        self.sources: list[TierLookup] = list(self.tiers)
        self.limits = limits
        self.counters = PlannerCounters()
        self.promotions = Promotions(primary, limits.promotion_slots)
        self.requests: dict[str, RequestState] = {}
        self.promotions_paused = False
        self.own = OwnContext()
        self.cascades = Cascades(
            primary,
            self.tiers,
            limits.cascade_blocks,
            self.own,
            partial(self._submit, is_promotion=False),
        )
        self._touches = Touches(self.tiers, self.cascades, self.own)
        self._hits_of_step: set[OffloadKey] = set()
        self._next_job_id: JobId = 0
        self.now_s = 0.0

    # -- the scheduler's calls ------------------------------------------------------------------

    def on_new_request(self, ctx: ReqContext, request_level_tiers: Collection[int] = ()) -> None:
        """Begin a request; raises StateError if its id is live, or the engine's own."""
        if ctx.req_id == ENGINE_REQ_ID:
            raise StateError(f"request {ctx.req_id!r}: the id is the engine's own; take another")
        if ctx.req_id in self.requests:
            raise StateError(f"request {ctx.req_id!r} is known already")
        self.primary.open_request(ctx)
        self.requests[ctx.req_id] = RequestState(ctx, request_level_tiers)

    def on_request_finished(self, ctx: ReqContext) -> None:
        """End a request: commit its recency now, tell the tiers as soon as nothing can follow."""
        request = self._live_request(ctx)
        self._touches.note(self.primary.close_request(ctx))
        request.is_finished = True
        self.promotions.release(request, list(request.retained))
        self._end_if_done(request)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Return what is known of a key; may reserve a slot and queue a promotion.

        Raises:
            StateError: The request is unknown or has finished.
        """
        request = self._live_request(ctx)
        answer = self.primary.lookup(key)
        if answer is LookupResult.HIT:
            self._hits_of_step.add(key)
            return answer
        if answer is LookupResult.MISS and not request.is_expired:
            answer = self._search(key, request)
        if answer is LookupResult.MISS:
            return answer
        if request.defer(self.now_s, self.limits.deferral_s):
            self.counters.deferrals_expired += 1
        return LookupResult.MISS if request.is_expired else answer

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[int]:
        """Pin keys that were HIT in this step; return their slots, in key order."""
        request = self._live_request(ctx)
        slots = self.primary.prepare_load(ctx, keys)
        self.promotions.release(request, keys)
        request.proceed()
        return slots

    def complete_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Unpin what `prepare_load` pinned."""
        self.primary.complete_load(ctx, keys)

    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for missing keys; None if there is no room, and then nothing changed."""
        request = self._live_request(ctx)
        output = self.primary.prepare_store(ctx, keys)
        if output is None:
            return None
        request.proceed()
        request.writing.update(output.keys_to_store)
        if request.request_level_tiers:
            new = frozenset(output.keys_to_store)
            self.cascades.send_present(request, keys, new, self.now_s)
        return output

    def complete_store(self, keys: Sequence[OffloadKey], ctx: ReqContext, *, success: bool) -> None:
        """End the write of keys that `prepare_store` granted; on success they cascade."""
        written = self.primary.complete_store(ctx, keys, success=success)
        request = self.requests.get(ctx.req_id)
        if request is None or not written:
            return
        if success:
            for index in range(len(self.tiers)):
                self.cascades.send(index, request, written, self.now_s)
        request.writing.difference_update(written)
        self._end_if_done(request)

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Note a use of keys."""
        if self.primary.touch(ctx, keys):
            self._touches.note(keys)

    # -- steps and jobs -------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Note the time of the scheduler's step, at its first call."""
        self.now_s = now_s

    def collect(self) -> None:
        """Take in the results and the releases that the tiers' states have."""
        for index, tier in enumerate(self.tiers):
            if tier.jobs.has_news:
                self.collect_from(index)

    def collect_from(self, index: int) -> None:
        """Take in what one tier's state has."""
        tier = self.tiers[index]
        for job, result in tier.take_ended(self.now_s):
            self._job_ended(index, job, result)
        for record in tier.take_released():
            self._job_released(index, record)

    def end_step(self) -> None:
        """Submit the step's promotions, and what waits to cascade; tell the tiers what was used."""
        for tier, request, keys, slots in self.promotions.flush():
            self._submit(tier, request.ctx, keys, slots, is_promotion=True)
            self._end_if_done(request)
        for request in self.cascades.retry_parked(self.now_s):
            self._end_if_done(request)
        self._touches.flush(self.now_s)
        self.cascades.send_owed(self.now_s)
        self._hits_of_step.clear()

    @property
    def has_pending_work(self) -> bool:
        """Whether a job has no result yet, or a block waits to cascade and may."""
        return self.counters.jobs_submitted != self.counters.job_results or self.cascades.has_work

    @property
    def jobs(self) -> dict[JobId, tuple[int, JobMetadata]]:
        """The jobs without a result, each with its tier, oldest first. For inspection."""
        jobs = [(i, job) for i, tier in enumerate(self.tiers) for job in tier.jobs.unreported()]
        jobs.sort(key=lambda at: at[1].job_id)
        return {job.job_id: (index, job) for index, job in jobs}

    @property
    def disowned(self) -> dict[JobId, JobRecord]:
        """The jobs that have a result and whose copies still run. For inspection."""
        records = (record for tier in self.tiers for record in tier.jobs.disowned())
        return {record.job.job_id: record for record in records}

    # -- reset ----------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the primary; every job has its result. Promotions are held until the flush.

        Raises:
            StateError: A job has none.
        """
        if jobs := self.jobs:
            raise StateError(f"a reset with {len(jobs)} jobs in flight: drain the tiers first")
        self.promotions.reset()
        self.cascades.forget()
        reading = [record for record in self.disowned.values() if not record.holds_slots]
        for record in reading:
            record.holds_slots = True
        self.primary.reset([slot for r in reading for slot in r.job.block_ids.tolist()])
        for request in list(self.requests.values()):
            request.forget_blocks()
            self._end_if_done(request)
        for tier in self.tiers:
            if tier.backpressure is not None:
                tier.backpressure.clear()
        self._hits_of_step.clear()
        self.promotions_paused = True

    def reset_flushed(self) -> None:
        """Learn that no copy from before the reset touches the primary any more."""
        self.promotions_paused = False

    def close(self) -> None:
        """Owe the tiers nothing any more, and end the engine's own request; idempotent."""
        parked = list(self.cascades.parking.values())
        self.cascades.close()
        for request in parked:
            self._end_if_done(request)
        self.own.close()

    # -- inside ---------------------------------------------------------------------------------

    def _job_ended(self, index: int, job: JobMetadata, result: JobResult) -> None:
        self.counters.job_results += 1
        self.counters.job_failures += not result.success
        if job.is_promotion:
            self._promotion_ended(index, job, result)
        else:
            self.cascades.ended(index, job, result, self.now_s)

    def _promotion_ended(self, index: int, job: JobMetadata, result: JobResult) -> None:
        good = frozenset(job.keys) if result.success else result.successful_keys or frozenset()
        if result.disowned:
            good = frozenset()  # whatever the tier says: while the copy runs, nothing has landed
        landed = [key for key in job.keys if key in good]
        failed = [key for key in job.keys if key not in good]
        request = self.requests.get(job.req_context.req_id)
        if request is not None and request.ctx is not job.req_context:
            request = None  # another request took the id since
        if result.disowned:
            self.promotions.disown(failed)
        else:
            self.promotions.land(landed, request)
            self.promotions.fail(failed)
            self.cascades.offer_faster(index, landed, self.now_s)
        if request is not None:
            request.failed.update((index, key) for key in failed)

    def _job_released(self, index: int, record: JobRecord) -> None:
        if record.holds_slots:
            self.primary.release_slots(record.job.block_ids.tolist())
        else:
            self.cascades.released(index, record, self.now_s)

    def _live_request(self, ctx: ReqContext) -> RequestState:
        request = self.requests.get(ctx.req_id)
        if request is None or request.is_finished:
            raise StateError(
                f"request {ctx.req_id!r} is unknown or has finished: call on_new_request first"
            )
        return request

    def _search(self, key: OffloadKey, request: RequestState) -> LookupResult:
        """Ask the tiers in order; the first that has the key promotes it."""
        if self.promotions_paused:
            return LookupResult.MISS
        unknown = False
        for index, tier in enumerate(self.tiers):
            if (index, key) in request.failed or not tier.may_load(request.ctx, self.now_s):
                continue
            answer = self.sources[index].lookup(key, request.ctx)
            if answer is LookupResult.HIT:
                if self.promotions.reserve(index, request, key, self._hits_of_step):
                    return LookupResult.HIT_PENDING
                self.counters.promotions_refused += 1
                return LookupResult.MISS
            # A tier has no pending hits; one that says so does not know yet.
            unknown = unknown or answer is not LookupResult.MISS
        return LookupResult.RETRY if unknown else LookupResult.MISS

    def _submit(
        self,
        index: int,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        *,
        is_promotion: bool,
    ) -> None:
        job = JobMetadata(
            self._next_job_id,
            tuple(keys),
            as_block_ids(slots),
            is_promotion,
            ctx,
            self.now_s,
        )
        self._next_job_id += 1
        self.counters.jobs_submitted += 1
        self.tiers[index].take_on(job)

    def _end_if_done(self, request: RequestState) -> None:
        if not request.can_end:
            return
        del self.requests[request.ctx.req_id]
        for tier in self.tiers:
            tier.finish_request(request.ctx)
