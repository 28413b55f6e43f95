"""The engine: the primary tier, the secondary tiers behind it, and what moves between them.

A scheduler's calls are methods, since they have answers; everything else comes in through
`handle(event)`. Both leave effects, which `handle` returns and `take_effects` detaches. The engine
executes nothing and knows no clock: time comes in with `StepBegan`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvoffload_async.core.effects import EngineEffect, FinishRequest, SubmitJob
from kvoffload_async.core.events import (
    CacheReset,
    EngineEvent,
    JobReleased,
    JobReported,
    ResetFlushed,
    StepBegan,
    StepEnded,
)
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.promotions import Promotions
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tierslot import TierSlot
from kvoffload_async.errors import StateError
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    as_block_ids,
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's bounds.

    Attributes:
        promotion_slots: Primary slots that promotions may occupy until they are loaded.
        cascade_blocks: Blocks in cascade to one tier; what is over it is dropped and counted.
        deferral_s: Seconds that a request may be deferred in all; then pending means missing.
    """

    promotion_slots: int
    cascade_blocks: int
    deferral_s: float


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done so far."""

    jobs_submitted: int = 0
    job_results: int = 0
    job_failures: int = 0
    promotions_refused: int = 0
    deferrals_expired: int = 0


@dataclass(slots=True)
class LateCopy:
    """A reported job whose copy still runs.

    Attributes:
        tier: Which tier runs it.
        job: The job.
        holds_slots: Its slots are held; else (a cascade, before a reset) its keys are pinned.
    """

    tier: int
    job: JobMetadata
    holds_slots: bool


class Engine:
    """Decides what is stored, cascaded, promoted and evicted.

    Thread: owner.
    """

    def __init__(self, primary: Primary, tiers: Sequence[TierSlot], limits: EngineLimits) -> None:
        """Start with an empty primary in front of `tiers`, in the order of their lookup."""
        self.primary = primary
        self.tiers = tuple(tiers)
        self.limits = limits
        self.counters = EngineCounters()
        self.promotions = Promotions(primary, limits.promotion_slots)
        self.requests: dict[str, RequestState] = {}
        self.jobs: dict[JobId, tuple[int, JobMetadata]] = {}
        self.disowned: dict[JobId, LateCopy] = {}
        self.promotions_held = False
        self._parking: dict[str, RequestState] = {}
        self._hits_of_step: set[OffloadKey] = set()
        self._next_job_id: JobId = 0
        self._now_s = 0.0
        self._effects: list[EngineEffect] = []

    # -- the scheduler's calls ------------------------------------------------------------------

    def on_new_request(self, ctx: ReqContext, request_level_tiers: Collection[int] = ()) -> None:
        """Begin a request; raises StateError if its id is live."""
        if ctx.req_id in self.requests:
            raise StateError(f"request {ctx.req_id!r} is known already")
        self.primary.open_request(ctx)
        self.requests[ctx.req_id] = RequestState(ctx, request_level_tiers)

    def on_request_finished(self, ctx: ReqContext) -> None:
        """End a request: commit its recency now, tell the tiers as soon as nothing can follow."""
        request = self._live_request(ctx)
        self.primary.close_request(ctx)
        request.is_finished = True
        self.promotions.let_go(request, list(request.held))
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
        if request.defer(self._now_s, self.limits.deferral_s):
            self.counters.deferrals_expired += 1
        return LookupResult.MISS if request.is_expired else answer

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[int]:
        """Pin keys that were HIT in this step; return their slots, in key order."""
        request = self._live_request(ctx)
        slots = self.primary.prepare_load(ctx, keys)
        self.promotions.let_go(request, keys)
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
            self._cascade_present(request, keys, frozenset(output.keys_to_store))
        return output

    def complete_store(self, keys: Sequence[OffloadKey], ctx: ReqContext, *, success: bool) -> None:
        """End the write of keys that `prepare_store` granted; on success they cascade."""
        written = self.primary.complete_store(ctx, keys, success=success)
        request = self.requests.get(ctx.req_id)
        if request is None or not written:
            return
        if success:
            for index in range(len(self.tiers)):
                self._cascade(index, request, written)
        request.writing.difference_update(written)
        self._end_if_done(request)

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Note a use of keys."""
        self.primary.touch(ctx, keys)

    @property
    def has_pending_work(self) -> bool:
        """Whether a job is registered or a key is parked."""
        return bool(self.jobs) or bool(self._parking)

    # -- events and effects ---------------------------------------------------------------------

    def handle(self, event: EngineEvent) -> tuple[EngineEffect, ...]:
        """Apply an event; return the effects that are due, oldest first."""
        self._HANDLERS[type(event)](self, event)
        return self.take_effects()

    def take_effects(self) -> tuple[EngineEffect, ...]:
        """Detach the effects that calls and events have left, oldest first."""
        effects, self._effects = self._effects, []
        return tuple(effects)

    def _step_began(self, event: StepBegan) -> None:
        self._now_s = event.now_s

    def _job_reported(self, event: JobReported) -> None:
        result = event.result
        owner, job = self.jobs.get(result.job_id, (None, None))
        if job is None or owner != event.tier:
            name = self.tiers[event.tier].name
            raise StateError(f"tier {name!r} reported job {result.job_id}, which is not its job")
        del self.jobs[result.job_id]
        self.tiers[event.tier].ended(job, result, self._now_s)
        self.counters.job_results += 1
        self.counters.job_failures += not result.success
        if result.disowned:
            self.disowned[job.job_id] = LateCopy(event.tier, job, holds_slots=job.is_promotion)
        if job.is_promotion:
            self._promotion_ended(event, job)
        elif not result.disowned:
            self.primary.unpin(job.keys)

    def _promotion_ended(self, event: JobReported, job: JobMetadata) -> None:
        result = event.result
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
        if request is not None:
            request.failed.update((event.tier, key) for key in failed)

    def _job_released(self, event: JobReleased) -> None:
        late = self.disowned.get(event.job_id)
        if late is None or late.tier != event.tier:
            name = self.tiers[event.tier].name
            raise StateError(f"tier {name!r} released job {event.job_id}, which is not its job")
        del self.disowned[event.job_id]
        self.tiers[event.tier].released(late.job)
        if late.holds_slots:
            self.primary.release_slots(late.job.block_ids.tolist())
        else:
            self.primary.unpin(late.job.keys)

    def _step_ended(self, _event: StepEnded) -> None:
        for tier, request, keys, slots in self.promotions.flush():
            self._submit(tier, request, keys, slots, is_promotion=True)
            self._end_if_done(request)
        for request in list(self._parking.values()):
            self._retry_parked(request)
        self._hits_of_step.clear()

    def _cache_reset(self, _event: CacheReset) -> None:
        if self.jobs:
            raise StateError(f"a reset with {len(self.jobs)} jobs in flight: drain the tiers first")
        self.promotions.reset()
        reading = [late for late in self.disowned.values() if not late.holds_slots]
        for late in reading:
            late.holds_slots = True
        self.primary.reset([slot for late in reading for slot in late.job.block_ids.tolist()])
        self._parking.clear()
        for request in list(self.requests.values()):
            request.forget_blocks()
            self._end_if_done(request)
        for tier in self.tiers:
            if tier.backpressure is not None:
                tier.backpressure.clear()
        self._hits_of_step.clear()
        self.promotions_held = True

    def _reset_flushed(self, _event: ResetFlushed) -> None:
        self.promotions_held = False

    # -- inside ---------------------------------------------------------------------------------

    def _live_request(self, ctx: ReqContext) -> RequestState:
        request = self.requests.get(ctx.req_id)
        if request is None or request.is_finished:
            raise StateError(
                f"request {ctx.req_id!r} is unknown or has finished: call on_new_request first"
            )
        return request

    def _search(self, key: OffloadKey, request: RequestState) -> LookupResult:
        """Ask the tiers in order; the first that has the key promotes it."""
        if self.promotions_held:
            return LookupResult.MISS
        unknown = False
        for index, tier in enumerate(self.tiers):
            if (index, key) in request.failed or not tier.may_load(request.ctx, self._now_s):
                continue
            answer = tier.source.lookup(key, request.ctx)
            if answer is LookupResult.HIT:
                if self.promotions.reserve(index, request, key, self._hits_of_step):
                    return LookupResult.HIT_PENDING
                self.counters.promotions_refused += 1
                return LookupResult.MISS
            # A tier has no pending hits; one that says so does not know yet.
            unknown = unknown or answer is not LookupResult.MISS
        return LookupResult.RETRY if unknown else LookupResult.MISS

    def _cascade(self, index: int, request: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Pin readable keys and send them to a tier: as long a head of them as it takes now."""
        tier = self.tiers[index]
        room = max(0, self.limits.cascade_blocks - tier.cascading_blocks)
        taken = keys[:room] if tier.takes_store(self._now_s) else keys[:0]
        tier.counters.dropped_blocks += len(keys) - len(taken)
        if taken:
            self._submit(index, request, taken, self.primary.pin(taken), is_promotion=False)

    def _cascade_present(
        self, request: RequestState, keys: Sequence[OffloadKey], new: Collection[OffloadKey]
    ) -> None:
        """Send what is readable to the tiers that want whole requests; park what is not yet."""
        readable = []
        for key in dict.fromkeys(keys):
            answer = self.primary.lookup(key)
            if answer is LookupResult.HIT:
                readable.append(key)
            elif answer is LookupResult.HIT_PENDING and key not in new:
                request.parked[key] = None
        if request.parked:
            self._parking[request.ctx.req_id] = request
        if readable:
            for index in request.request_level_tiers:
                self._cascade(index, request, readable)

    def _retry_parked(self, request: RequestState) -> None:
        readable = []
        for key in list(request.parked):
            answer = self.primary.lookup(key)
            if answer is not LookupResult.HIT_PENDING:
                del request.parked[key]
            if answer is LookupResult.HIT:
                readable.append(key)
        if readable:
            for index in request.request_level_tiers:
                self._cascade(index, request, readable)
        if not request.parked:
            del self._parking[request.ctx.req_id]
            self._end_if_done(request)

    def _submit(
        self,
        index: int,
        request: RequestState,
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
            request.ctx,
            self._now_s,
        )
        self._next_job_id += 1
        # Registered before the effect runs: a tier may end a job at once.
        self.jobs[job.job_id] = (index, job)
        self.counters.jobs_submitted += 1
        self.tiers[index].submitted(job, self._now_s)
        self._effects.append(SubmitJob(index, job))

    def _end_if_done(self, request: RequestState) -> None:
        if not request.can_end:
            return
        del self.requests[request.ctx.req_id]
        self._effects.extend(FinishRequest(i, request.ctx) for i in range(len(self.tiers)))

    _HANDLERS: ClassVar[dict[type[EngineEvent], Callable[[Engine, Any], None]]] = {
        StepBegan: _step_began,
        JobReported: _job_reported,
        JobReleased: _job_released,
        StepEnded: _step_ended,
        CacheReset: _cache_reset,
        ResetFlushed: _reset_flushed,
    }
