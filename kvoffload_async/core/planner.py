"""The planner: decides every transfer between the primary tier and the secondary tiers.

It drives one `TierState` per tier, which queues effects until a link takes them, and results until
`collect`. The planner does no I/O and reads no clock: `begin_step` sets the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Final, NamedTuple

from kvoffload_async.core.cascades import Cascades, EngineContext, Touches
from kvoffload_async.core.counters import Figures, FigureSet, PlannerCounters
from kvoffload_async.core.deletions import Deletion, Deletions
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.pins import Pins
from kvoffload_async.core.prefetch import Prefetch, Prompt
from kvoffload_async.core.primary import PRIMARY_FIGURES, Primary, Share
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.room import Room
from kvoffload_async.core.search import TierSearch, Verdict
from kvoffload_async.core.tier_state import TIER_FIGURES, TierState
from kvoffload_async.errors import StateError
from kvoffload_async.statistics import PlannerStatistics
from kvoffload_async.tables.keymap import LEAST_KEY_BYTES, MAX_KEY_BYTES, require_keys
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    SlidingWindow,
    as_block_ids,
)

_HIT: Final = LookupResult.HIT
_PENDING: Final = LookupResult.HIT_PENDING
_MISS: Final = LookupResult.MISS
_RETRY: Final = LookupResult.RETRY
_KEYS_AT_ONCE: Final = 256
"""Maximum number of keys per batch of a lookup; limits the keys looked up beyond a miss."""


class Snapshot(NamedTuple):
    """Immutable copy of the figures of a planner, its primary and its tiers."""

    primary: Figures
    planner: Figures
    tiers: tuple[Figures, ...]


class Planner:
    """Decides which blocks are stored, cascaded, promoted and evicted.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        now_s: Time of the current step's start, in seconds.
    """

    def __init__(self, primary: Primary, tiers: Sequence[TierState], deferral_s: float) -> None:
        """Create a planner for an empty primary.

        Args:
            primary: The primary tier.
            tiers: The secondary tiers; lookups query them in this order.
            deferral_s: Total seconds that a request may be deferred, without its time behind others
                in the queue for room; then pending counts as missing.
        """
        self.primary = primary
        self.tiers = tuple(tiers)
        primary.may_decline = not self.tiers  # unless the admission says what they do not store
        self.deferral_s = deferral_s
        self.counters = PlannerCounters()
        self.search = TierSearch(self.tiers, primary.barred)
        self.room = Room(
            primary,
            self.tiers,
            lambda keys, request: self.search.find(keys, request, self.now_s),
            self._promote,
        )
        self.prefetcher = Prefetch(primary, self.tiers, self.search, self.room)
        self.requests: dict[ReqContext, RequestState] = {}
        self._newest: dict[str, RequestState] = {}
        """Request id -> the newest live request with that id."""
        self.promotions_paused = False
        self.own = EngineContext()
        self.cascades = Cascades(
            primary,
            self.tiers,
            self.room.room_to_store,
            self.own,
            partial(self._submit, is_promotion=False),
        )
        self.pins = Pins(primary, self.room)
        self.deletions = Deletions(primary, self.tiers, self.cascades, self.room, self.pins)
        self._touches = Touches(self.tiers, self.cascades, self.own)
        self._asking: RequestState | None = None
        self._ahead: dict[OffloadKey, Verdict] = {}
        """The tiers' answers, fetched in one call, to keys that a request looks up one by one."""
        self._found = self.room.found
        self._next_job_id: JobId = 0
        self.begin_step(0.0)

    # -- the scheduler's calls ------------------------------------------------------------------

    def on_new_request(self, ctx: ReqContext, request_level_tiers: Collection[int] = ()) -> None:
        """Begin a request. Several live requests may share an id, but not the engine's own.

        Raises:
            StateError: `ctx` is live already.
        """
        self.primary.open_request(ctx)
        self.requests[ctx] = self._newest[ctx.req_id] = RequestState(
            ctx, tuple(request_level_tiers)
        )

    def on_request_finished(self, ctx: ReqContext) -> None:
        """End a request: rank its blocks now; notify the tiers when it can submit no more jobs."""
        request = self._live_request(ctx)
        self.cascades.end_request(request)
        self._touches.note(self.primary.close_request(ctx))
        request.is_finished = True
        self._proceed(request)
        self.prefetcher.ended(request)
        self._end_if_done(request)

    def prefetch(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, windows: Sequence[SlidingWindow] = ()
    ) -> None:
        """Have the blocks of a request that is queued promoted before its first lookup.

        Args:
            keys: The keys of its prompt, in order.
            ctx: The request; without effect if it has been looked up.
            windows: The groups with sliding-window attention; `keys` are those of the other one.

        Raises:
            StateError: See `lookup_many`.
        """
        require_keys(keys)
        for window in windows:
            require_keys(window.keys)
        request = self._live_request(ctx)
        self._enter_share(request, [*keys, *chain.from_iterable(each.keys for each in windows)])
        self.prefetcher.queue(request, Prompt(keys, windows))

    def promote(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> RequestState:
        """Have any blocks promoted, as far as they are found, when no request needs the room.

        Args:
            keys: The keys, of one tenant.
            ctx: A request of the engine's own, which makes no lookups.

        Returns:
            The request; see `Prefetch.is_under_way`. `demote` ends its right to the blocks.
        """
        request = self._live_request(ctx)
        request.share = None
        self._enter_share(request, keys)
        self.prefetcher.queue(request, Prompt(keys, is_chain=False))
        return request

    def demote(self, request: RequestState) -> None:
        """End the right of `promote` to blocks, which may be evicted from now on."""
        self.room.leave(request)
        self.prefetcher.ended(request)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Look up one key; see `lookup_many`.

        The first lookup of a round asks the tiers for all keys that the request was not answered
        in the last step, as it will repeat them.
        """
        if not LEAST_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            require_keys((key,))
        request = self._asking
        if request is None or request.ctx is not ctx or request.is_finished:
            request = self._live_request(ctx)
            self._begin_round(request)
            self._ask_ahead(request)
        if self.primary.is_shared:
            self._enter_share(request, (key,))
        return self._answer((key,), (self.primary.lookup(key),), request)[0]

    def lookup_prefix(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> tuple[int, bool]:
        """Look up a prompt's blocks, up to the first miss.

        Costs no time per block while the request waits for room or for its promotions.

        Returns:
            The number of blocks before the miss, and whether the lookup is deferred: then some of
            the blocks are not readable yet, or their number is not known: repeat it in the next
            step.

        Raises:
            StateError: See `lookup_many`.
        """
        request = self._live_request(ctx)
        if request is not self._asking:
            self._begin_round(request)
        if (request.is_queued or request.awaits) and self._defer(request):
            self.counters.lookups += 1
            self.counters.pending_hits += 1
            return 0, True
        if not keys or (first := self.lookup(keys[0], ctx)) is _MISS:  # most prompts are new
            return 0, False
        answers = [first, *self.lookup_many(keys[1:], ctx, stop_at_miss=True)]
        length = len(answers) - answers.count(_MISS)
        return length, answers.count(_HIT) < length

    def lookup_many(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Look up blocks in all tiers; those found in a secondary tier are promoted.

        HIT_PENDING: the block is being written, or a tier has it and the request waits for room.
        RETRY: a tier has not resolved the key yet.

        Args:
            keys: The keys.
            ctx: The request.
            stop_at_miss: Whether the answers end with the first MISS; later keys are not looked up.

        Raises:
            StateError: The request is unknown or finished, a key has the wrong length, or the
                request has looked up keys of another tenant.
        """
        request = self._live_request(ctx)
        require_keys(keys)
        if self.primary.is_shared:
            self._enter_share(request, keys)
        if request is not self._asking:
            self._begin_round(request)
        answers: list[LookupResult] = []
        size = 1 if stop_at_miss else _KEYS_AT_ONCE  # most prompts are new: their first block tells
        while len(answers) < len(keys):
            part = keys[len(answers) : len(answers) + size]
            in_primary = self.primary.lookup_many(part)
            answers += self._answer(part, in_primary, request, stop_at_miss=stop_at_miss)
            if stop_at_miss and answers[-1] is _MISS:
                break
            size = _KEYS_AT_ONCE
        return answers

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[int]:
        """Pin keys that were HIT in this step; return their slots, in key order."""
        request = self._live_request(ctx)
        slots = self.primary.prepare_load(ctx, keys)
        self._asking = None
        self._decide(request)
        self.room.use(request)
        self.prefetcher.loaded(keys)
        return slots

    def hold(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int | None:
        """Give a request a ticket for keys that were HIT in this step; see `Room.hold`."""
        return self.room.hold(self._live_request(ctx), keys)

    def on_request_scheduled(self, ctx: ReqContext) -> bool:
        """End a request's wait for loads; a request that has ended is ignored.

        Returns:
            Whether the request had a ticket or a position in the queue until now.
        """
        request = self.requests.get(ctx)
        if request is None:
            return False
        had_some = bool(request.ticket) or request.is_queued
        self._proceed(request)
        return had_some

    def complete_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, generation: int | None = None
    ) -> None:
        """Unpin the blocks of `prepare_load`, unless a reset has already unpinned them."""
        self.primary.complete_load(ctx, keys, generation)

    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for absent keys; None if there is no room.

        The request is being computed, so it no longer waits for loads.
        """
        request = self._live_request(ctx)
        require_keys(keys)
        share = self.primary.share_of(keys)
        self._proceed(request)
        if self.primary.barred.sets:
            keys = self.primary.barred.without(keys)
        if len(keys) > share.free:
            self.room.give_way(len(keys), share)
            self.room.guard_hits()
        output = self.primary.prepare_store(
            ctx, keys, partial(self._room_for_store, share) if self.room.queue else None
        )
        if output is None or output.keys_left_out:
            self.room.store_refused()
        if output is None:
            return None
        request.writing.update(output.keys_to_store)
        if request.request_level_tiers:
            new = frozenset(output.keys_to_store)
            self.cascades.send_present(request, ctx.storable(keys), new, self.now_s)
        return output

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        ctx: ReqContext,
        *,
        success: bool,
        generation: int | None = None,
    ) -> None:
        """End the write of keys that `prepare_store` granted; on success they cascade."""
        written = self.primary.complete_store(ctx, keys, success=success, generation=generation)
        request = self.requests.get(ctx)
        if success:
            self.room.written(written)
        else:
            self.room.unwritten(written)
        if request is None or not written:
            return
        if success:
            for index in range(len(self.tiers)):
                self.cascades.send(index, request, written, self.now_s)
        request.writing.difference_update(written)
        if request.is_finished:
            self._end_if_done(request)

    def delete(
        self, keys: Iterable[OffloadKey], tiers: Collection[int], *, in_primary: bool = True
    ) -> Deletion:
        """Begin to delete blocks, between steps; no later lookup finds them at these places.

        Args:
            keys: The keys.
            tiers: Indices of the tiers.
            in_primary: Whether to delete them from the primary too.

        Raises:
            BusyError: See `Deletions.begin`.
            StateError: A key has the wrong length.
        """
        deletion = Deletion(keys, tiers, in_primary=in_primary)
        require_keys(deletion.keys)
        self.deletions.begin(deletion)
        return deletion

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        """Record a use of blocks, for eviction policies and tiers."""
        if self.primary.touch(ctx, keys):
            self._touches.note(keys)

    # -- steps and jobs -------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Begin a scheduler step at `now_s` seconds, or set a later time within the step."""
        self.now_s = now_s
        self.primary.begin_step(now_s)
        self.room.begin_step(now_s)
        for tier in self.tiers:
            tier.health.now_s = now_s

    def collect(self) -> None:
        """Apply the job results and slot releases queued in the tier states; serve the queue."""
        for index, tier in enumerate(self.tiers):
            if tier.jobs.ended:
                for job, result in tier.jobs.take_ended():
                    self._job_ended(index, job, result)
            if tier.jobs.released:
                for record in tier.jobs.take_released():
                    self._job_released(index, record)
        if self.room.queue:
            self.room.serve_first()

    def end_step(self, scheduled: Iterable[str] = ()) -> None:
        """End a step: grant tickets, submit pending cascades, report used blocks to the tiers.

        Args:
            scheduled: Ids of requests whose computation began in this step.
        """
        for req_id in scheduled:
            if req_id in self._newest:
                self._proceed(self._newest[req_id])
        if self.cascades.parking:
            for request in self.cascades.retry_parked(self.now_s):
                self._end_if_done(request)
        if self._touches.used:
            self._touches.flush(self.now_s)
        if self.search.has_unknown:
            self.search.end_step(self.now_s)
        self._asking = None
        gave_up = self.room.end_step()
        if self.primary.num_kept or self.deletions.running:
            self.pins.end_step(self.now_s)
            self.deletions.serve(self.requests.values(), self.now_s)
        if self.prefetcher.queued and not self.promotions_paused:
            self.prefetcher.serve(self.now_s)
        self.cascades.send_pending(self.now_s)
        if gave_up:
            self.collect()

    @property
    def has_pending_work(self) -> bool:
        """Whether a job has no result yet, or a step can submit a block or delete some."""
        if self.counters.jobs_submitted != self.counters.job_results or self.cascades.has_work:
            return True
        return self.deletions.has_work

    def wakes_in_s(self) -> float:
        """Return the seconds until a step has work even without an event; inf if never."""
        now_s = self.now_s
        due_s = min(self.cascades.wakes_in_s(now_s), self.room.wakes_in_s())
        if self.prefetcher.queued:
            due_s = min(due_s, self.prefetcher.wakes_in_s())
        if self.primary.num_kept or self.deletions.running:
            due_s = min(due_s, self.deletions.wakes_in_s(now_s), self.pins.wakes_in_s(now_s))
        return due_s

    @property
    def jobs(self) -> dict[JobId, tuple[int, JobMetadata]]:
        """Job id -> (tier index, job) of the jobs without a result. For inspection."""
        jobs = [(i, job) for i, tier in enumerate(self.tiers) for job in tier.jobs.unreported()]
        return {job.job_id: (index, job) for index, job in jobs}

    @property
    def orphaned(self) -> dict[JobId, JobRecord]:
        """Job id -> record of the jobs that have a result but whose copy still runs."""
        records = (record for tier in self.tiers for record in tier.jobs.orphaned())
        return {record.job.job_id: record for record in records}

    # -- statistics -----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copy the figures of the primary, the planner and the tiers."""
        tiers = []
        for tier, queue in zip(self.tiers, self.cascades.queues, strict=True):
            tiers.append(TIER_FIGURES.take(tier, queue.count))
        planned = PLANNER_FIGURES.take(self, len(self.requests))
        return Snapshot(PRIMARY_FIGURES.take(self.primary), planned, tuple(tiers))

    def statistics(self, taken: Figures) -> PlannerStatistics:
        """Return the statistics of the planner from its figures. Thread-safe."""
        decision_seconds = self.counters.decision_seconds.read()
        return PlannerStatistics(**PLANNER_FIGURES.named(taken), decision_seconds=decision_seconds)

    # -- reset ----------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the primary and pause promotions until `reset_flushed`.

        Raises:
            StateError: A job has no result yet.
        """
        if jobs := self.jobs:
            raise StateError(f"a reset with {len(jobs)} jobs in flight: drain the tiers first")
        self.room.reset()
        self.prefetcher.reset()
        self.pins.reset()
        self.cascades.forget()
        reading = [record for record in self.orphaned.values() if not record.holds_slots]
        for record in reading:
            record.holds_slots = True
        self.primary.reset([slot for r in reading for slot in r.job.block_ids.tolist()])
        for request in list(self.requests.values()):
            request.forget_blocks()
            self._end_if_done(request)
        for tier in self.tiers:
            tier.reset()
        self._asking = None
        self.promotions_paused = True

    def reset_flushed(self) -> None:
        """Resume promotions; call when all copies that started before the reset have ended."""
        self.promotions_paused = False

    def end_tickets(self) -> None:
        """End all tickets: no request will load any more."""
        for request in self.requests.values():
            self._proceed(request)

    def close(self) -> None:
        """Drop pending cascades, and end the engine's own request; idempotent."""
        parked = list(self.cascades.parking.values())
        self.cascades.close()
        self.deletions.close()
        for request in parked:
            self._end_if_done(request)
        self.own.close()

    # -- internal -------------------------------------------------------------------------------

    def _job_ended(self, index: int, job: JobMetadata, result: JobResult) -> None:
        self.counters.job_results += 1
        self.counters.job_failures += not result.success
        if job.is_promotion:
            self._promotion_ended(index, job, result)
        else:
            self.cascades.ended(index, job, result, self.now_s)

    def _promotion_ended(self, index: int, job: JobMetadata, result: JobResult) -> None:
        good = frozenset(job.keys) if result.success else result.successful_keys or frozenset()
        if result.orphaned:
            good = frozenset()  # the copy still runs, so no block is complete yet
        landed = [key for key in job.keys if key in good]
        failed = [key for key in job.keys if key not in good]
        request, prefetches = self.requests.get(job.req_context), self.tiers[index].prefetches
        is_early = job.job_id in prefetches
        if failed:
            self.room.fail(index, failed, orphaned=result.orphaned, is_early=is_early)
            if request is not None and not is_early:
                request.failed.update(zip(repeat(index), failed))
        self.prefetcher.replaced(landed)
        if is_early:
            prefetches.remove(job.job_id)
            self.prefetcher.landed(index, request, landed)
        if landed:
            self.room.land(landed)
            self.cascades.offer_faster(index, landed)

    def _job_released(self, index: int, record: JobRecord) -> None:
        if record.holds_slots:
            self.primary.release_slots(record.job.block_ids.tolist())
        else:
            self.cascades.released(index, record, self.now_s)

    def _ask_ahead(self, request: RequestState) -> None:
        """Look up in the tiers, in one call, the keys that a request will look up again."""
        if not request.again:
            return
        keys, request.again = list(request.again), ()
        answers = zip(keys, self.primary.lookup_many(keys), strict=True)
        absent = [key for key, found in answers if found is _MISS]
        paused = self.promotions_paused
        self._ahead = self.search.ask(absent, request, is_paused=paused, stop_at_miss=False)

    def _answer(
        self,
        keys: Sequence[OffloadKey],
        in_primary: Sequence[LookupResult],
        request: RequestState,
        *,
        stop_at_miss: bool = False,
    ) -> list[LookupResult]:
        """Return and count the answers to look-ups of keys, given the primary's answers.

        Args:
            keys: The keys.
            in_primary: The primary's answers.
            request: The request that looks up the keys; its round has begun.
            stop_at_miss: Whether the answers end with the first MISS.
        """
        outcomes: Sequence[Verdict] = in_primary
        if _MISS in in_primary:
            outcomes = self._look_below(keys, in_primary, request, stop_at_miss=stop_at_miss)
        if _PENDING in outcomes or _RETRY in outcomes:
            waits_already = request.is_deferred and not (
                request.is_refused or request.ticket or request.is_expired
            )
            if not waits_already:
                outcomes = self._wait(keys, in_primary, outcomes, request)
        answers: list[LookupResult] = []
        counters, decided, num_found = self.counters, request.decided, len(self._found)
        for number, outcome in enumerate(outcomes):
            key = keys[number]
            if isinstance(outcome, str):
                counters.misses[outcome] += 1
                counters.block_misses += key not in decided
                decided.add(key)
                answers.append(_MISS)
                if stop_at_miss:
                    break
                continue
            if outcome is _HIT:
                counters.block_hits += key not in decided
                decided.add(key)
            elif in_primary[number] is _MISS:
                request.searched[key] = outcome is _PENDING
            answers.append(outcome)
            self._found.append(key)
        own, num_hits = self.primary.counters, answers.count(_HIT)
        being_written = in_primary[: len(answers)].count(_PENDING)
        counters.lookups += len(answers)
        own.lookups += len(answers)
        own.misses += len(answers) - num_hits - being_written
        own.pending_hits += being_written
        if len(self._found) > num_found:
            own.hits += num_hits
            counters.hits += num_hits
            counters.pending_hits += answers.count(_PENDING)
            counters.retries += answers.count(_RETRY)
        return answers

    def _look_below(
        self,
        keys: Sequence[OffloadKey],
        in_primary: Sequence[LookupResult],
        request: RequestState,
        *,
        stop_at_miss: bool,
    ) -> list[Verdict]:
        """Look up in the tiers the keys that the primary lacks; return the outcomes of all keys.

        A request in the queue, or with a ticket, is not looked up again: what the ticket leaves out
        is a miss.

        Args:
            keys: The keys, at least one of which the primary lacks.
            in_primary: The primary's answers.
            request: The request.
            stop_at_miss: Whether outcomes behind the first miss are of no use.
        """
        wants = request.wants if request.is_queued or request.ticket else ()
        # Behind a miss, the search has no verdict.
        outcomes: dict[OffloadKey, Verdict] = dict.fromkeys(keys, "absent") if stop_at_miss else {}
        absent: list[OffloadKey] = []
        for number, found in enumerate(in_primary):
            key = keys[number]
            if found is not _MISS:
                outcomes[key] = found
            elif request.searched.get(key):
                outcomes[key] = _PENDING
            elif key in wants:
                outcomes[key] = _PENDING if request.is_queued else "no_room"
            elif key in self._ahead:
                outcomes[key] = self._ahead.pop(key)
            else:
                absent.append(key)
        if absent:
            paused = self.promotions_paused
            outcomes |= self.search.ask(
                absent, request, is_paused=paused, stop_at_miss=stop_at_miss
            )
        return list(map(outcomes.__getitem__, keys))

    def _wait(
        self,
        keys: Sequence[OffloadKey],
        in_primary: Sequence[LookupResult],
        outcomes: Sequence[Verdict],
        request: RequestState,
    ) -> Sequence[Verdict]:
        """Defer a request until its keys are readable; keys that it may not await are misses."""
        final: list[Verdict] = []
        ticket, wants = request.ticket, request.wants
        for key, found, outcome in zip(keys, in_primary, outcomes, strict=True):
            answer = outcome
            if outcome is _PENDING and found is _MISS and not request.is_queued:
                if request.is_refused or not self.room.has_budget(request):
                    self.counters.promotions_refused += 1
                    answer = "no_room"
            elif outcome is _PENDING and (
                request.is_refused or (ticket and key in wants and key not in ticket)
            ):
                answer = "no_room"
            final.append(answer)
        if _PENDING in final or _RETRY in final:
            if not request.is_deferred:
                self._defer(request)
            if request.is_expired:
                waiting = (_PENDING, _RETRY)
                return ["expired" if each in waiting else each for each in final]
        return final

    def _defer(self, request: RequestState) -> bool:
        """Record that a request is deferred in this step; return whether it may be deferred."""
        counts = not request.is_queued or self.room.is_head(request)
        self.counters.deferrals_expired += request.defer(self.now_s, self.deferral_s, counts=counts)
        return not request.is_expired

    def _room_for_store(self, share: Share, count: int, is_whole: bool) -> int:
        """Return how many of `count` slots a store may take; see `Room.room_for_store`."""
        waiting = zip(self.cascades.queues, self.tiers, strict=True)
        pending = [tier.cascading_blocks + queue.count for queue, tier in waiting]
        num_stored = self.primary.stored_now + max(pending, default=0)
        return self.room.room_for_store(count, share, is_whole=is_whole, num_stored=num_stored)

    def _begin_round(self, request: RequestState) -> None:
        """Begin a request's series of lookups; the previous request's series ends."""
        self._asking, self._ahead = request, {}
        if self.prefetcher.queued:
            self.prefetcher.forget(request)
        self.search.begin_round(request, self.now_s)
        self.room.begin_round(request, self.now_s)

    def _decide(self, request: RequestState) -> bool:
        """Record how long a request waited for its lookups; return whether it was waiting."""
        asked_s = request.proceed()
        if asked_s is None:
            return False
        self.counters.decision_seconds.observe(self.now_s - asked_s)
        return True

    def _enter_share(self, request: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Record the tenant of a request; raises StateError if it had another, or keys of several.

        Without tenants, every request has the same.
        """
        if not keys:
            return
        share = self.primary.share_of(keys)
        if request.share not in {None, share}:
            raise StateError(f"request {request.ctx.req_id!r} looks up blocks of several tenants")
        request.share = share

    def _proceed(self, request: RequestState) -> None:
        waited = request.waits
        self._decide(request)
        if self.prefetcher.queued:
            self.prefetcher.forget(request)
        if waited or request.ticket:
            self.room.leave(request)
            self._asking = None

    def _live_request(self, ctx: ReqContext) -> RequestState:
        request = self.requests.get(ctx)
        if request is None or request.is_finished:
            raise StateError(
                f"request {ctx.req_id!r} is unknown or has finished: call on_new_request first"
            )
        return request

    def _promote(
        self,
        index: int,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        is_early: bool,
    ) -> None:
        if is_early:
            self.tiers[index].prefetches.add(self._next_job_id)
        self._submit(index, ctx, keys, slots, is_promotion=True)

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
        self.tiers[index].submit(job)

    def _end_if_done(self, request: RequestState) -> None:
        if not request.can_end:
            return
        del self.requests[request.ctx]
        if self._newest.get(request.ctx.req_id) is request:
            del self._newest[request.ctx.req_id]
        for tier in self.tiers:
            tier.finish_request(request.ctx)


PLANNER_FIGURES: Final = FigureSet(
    PlannerCounters,
    {
        "retained_blocks": "room.named_blocks",
        "pinned_blocks": "primary.num_kept",
        "deleting_blocks": "deletions.num_keys",
    },
    "requests",
)
"""Copies the figures of a `Planner`, with the number of its requests."""
