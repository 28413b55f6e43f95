"""A planner that tells a recorder what each request goes through; a plain one knows of none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.recorder import RequestRecorder
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.shares import PlannerLimits
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.statistics import MissReason
from kvoffload_async.timeline import PLANNER, PRIMARY
from kvoffload_async.types import (
    JobMetadata,
    JobResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)

_REFUSED: Final[tuple[MissReason, ...]] = ("no_room", "expired", "paused")


class RecordingPlanner(Planner):
    """Decides as its base class does.

    Thread: owner.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        limits: PlannerLimits,
        recorder: RequestRecorder,
        *,
        names: Sequence[str] = (),
    ) -> None:
        """Tell `recorder`; `names` are what the tiers are called, by default their own names."""
        self.recorder = recorder
        self._names = tuple(names) or tuple(tier.name for tier in tiers)
        super().__init__(primary, tiers, limits)
        labels = [(PRIMARY, "hit"), (PRIMARY, "pending"), (PRIMARY, "miss")]
        for name, tier in zip(self._names, tiers, strict=True):
            answers = ("hit", "miss", "undecided", *tier.counters.skipped_lookups)
            labels += [(name, answer) for answer in answers]
        labels += [(PLANNER, reason) for reason in _REFUSED]
        recorder.read_lookups(labels, self._lookup_figures)

    def tell_time(self) -> None:
        """Tell the recorder the time; a step's, unless a subclass knows a better one."""
        self.recorder.advance(self.now_s)

    # -- the scheduler's calls ------------------------------------------------------------------

    def on_new_request(self, ctx: ReqContext, request_level_tiers: Collection[int] = ()) -> None:
        super().on_new_request(ctx, request_level_tiers)
        self.tell_time()
        self.recorder.begin(ctx)

    def on_request_finished(self, ctx: ReqContext) -> None:
        self.tell_time()
        self._live_request(ctx)  # or it raises
        self.recorder.finish(ctx)
        super().on_request_finished(ctx)

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[int]:
        slots = super().prepare_load(keys, ctx)
        self.recorder.note(ctx, "pinned", len(keys))
        return slots

    def complete_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, generation: int | None = None
    ) -> None:
        super().complete_load(keys, ctx, generation)
        if keys:
            self.tell_time()
            self.recorder.note(ctx, "unpinned", len(keys))

    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        self.tell_time()
        before = self._owed_counts()
        output = super().prepare_store(keys, ctx)
        if output is None:
            self.recorder.note(ctx, "refused", len(keys))
            return None
        if output.keys_to_store:
            self.recorder.note(ctx, "reserved", len(output.keys_to_store))
        if output.evicted_keys:
            self.recorder.note(ctx, "evicted", len(output.evicted_keys))
        if output.keys_left_out:
            self.recorder.note(ctx, "left_out", len(output.keys_left_out))
        if not output.keys_to_store and not output.keys_left_out:
            self.recorder.note(ctx, "nothing_to_store", len(keys))
        self._note_owed(ctx, before)
        return output

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        ctx: ReqContext,
        *,
        success: bool,
        generation: int | None = None,
    ) -> None:
        self.tell_time()
        before = self._owed_counts()
        if keys:
            self.recorder.note(ctx, "stored" if success else "store_failed", len(keys))
        super().complete_store(keys, ctx, success=success, generation=generation)
        self._note_owed(ctx, before)

    # -- steps ----------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self.tell_time()
        self.recorder.note_all_live("reset")
        super().reset_cache()

    # -- inside ---------------------------------------------------------------------------------

    def _begin_round(self, request: RequestState) -> None:
        self.tell_time()
        self.recorder.begin_round(request.ctx)
        super()._begin_round(request)

    def _decide(self, request: RequestState) -> bool:
        has_asked = super()._decide(request)
        if has_asked:
            self.tell_time()
            self.recorder.scheduled(request.ctx)
        return has_asked

    def _submit(
        self,
        index: int,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        *,
        is_promotion: bool,
    ) -> None:
        self.tell_time()
        self.recorder.job_started(
            ctx,
            self._next_job_id,
            self._names[index],
            "load" if is_promotion else "store",
            (len(keys), len(keys) * self.tiers[index].jobs.slot_bytes),
        )
        super()._submit(index, ctx, keys, slots, is_promotion=is_promotion)

    def _job_ended(self, index: int, job: JobMetadata, result: JobResult) -> None:
        self.tell_time()
        landed = len(job.keys) if result.success else len(result.successful_keys or ())
        self.recorder.job_ended(
            job.req_context,
            job.job_id,
            self._names[index],
            landed_blocks=landed,
            num_bytes=result.transfer_bytes or 0,
            seconds=result.transfer_time,
            queue_s=result.queue_time,
            error=result.error,
            is_overdue=result.disowned,
        )
        super()._job_ended(index, job, result)

    def _job_released(self, index: int, record: JobRecord) -> None:
        job = record.job
        self.tell_time()
        self.recorder.note(job.req_context, "released", len(job.keys), tier=self._names[index])
        super()._job_released(index, record)

    def _end_if_done(self, request: RequestState) -> None:
        super()._end_if_done(request)
        if request.ctx not in self.requests:
            self.recorder.done(request.ctx)

    def _owed_counts(self) -> list[int]:
        return [backlog.count for backlog in self.cascades.backlogs]

    def _note_owed(self, ctx: ReqContext, before: Sequence[int]) -> None:
        for index, (count, now) in enumerate(zip(before, self._owed_counts(), strict=True)):
            if now > count:
                reason = self._reason_to_owe(index, has_others=count > 0)
                name = self._names[index]
                self.recorder.note(ctx, "owed", now - count, tier=name, reason=reason)

    def _reason_to_owe(self, index: int, *, has_others: bool) -> str:
        if not self.tiers[index].may_store(self.now_s):
            return "the tier is not open, or its breaker is"
        if has_others:
            return "others wait before them"
        if not self.cascades.room(index):
            return "its share of the primary is used up"
        return "the tier is slower than what is stored"

    def _lookup_figures(self) -> Sequence[int]:
        primary, planner = self.primary.counters, self.counters
        figures = [primary.hits, primary.pending_hits, primary.misses]
        for tier in self.tiers:
            counters = tier.counters
            figures += (counters.hits, counters.misses, counters.undecided)
            figures += counters.skipped_lookups.values()
        misses = planner.misses
        figures += [misses[reason] for reason in _REFUSED]
        figures.append(planner.pending_hits + planner.retries)
        return figures
