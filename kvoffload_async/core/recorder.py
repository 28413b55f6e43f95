"""Recorder of request timelines: the events of the latest requests, in bounded memory.

    begun --event*--> finished without open jobs: ended --forgotten when later ones need the
    space-->

The recorder is passive: a `RecordingPlanner` reports events and times to it. A plain planner does
not use it.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from kvoffload_async.core.deletions import Deletion
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import text_of
from kvoffload_async.statistics import MissReason
from kvoffload_async.timeline import (
    PLANNER,
    PRIMARY,
    JobEnded,
    JobStarted,
    LookupEvent,
    Note,
    NoteKind,
    RequestTimeline,
    SlowRequest,
    TimelineEvent,
    TransferDirection,
)
from kvoffload_async.types import (
    JobMetadata,
    JobResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    SlidingWindow,
)

MAX_EVENTS: Final = 128
"""Maximum number of events kept per request; further ones are only counted."""

MAX_BYTES: Final = 30 << 10
"""Maximum memory of one request's record; events that do not fit are only counted."""

MAX_ID_CHARS: Final = 256
"""Maximum length of a stored request id, which is also the look-up key."""

_MAX_ERROR_CHARS: Final = 500
_LEAST_ERROR_CHARS: Final = 60
"""Length of an error text for which a started job reserves space; a full record cuts it to this."""

RECENT: Final = 256
"""Number of latest requests searched for the slowest, on a thread other than the owner's."""

Figures = Callable[[], Sequence[int]]
"""Reads the lookup counters. A round of lookups is the difference of two readings, so recording
adds no cost per lookup."""


_Raw = tuple[Any, ...]
"""An event's class and its fields, in order; cheap to create, as it is rarely read. The end of a
job contains the tuple of its start."""

_RECORD_BYTES: Final = 3 << 10
"""Size of a record without events: its objects, its id and its table entries."""
_FIELD_BYTES: Final = 40
"""Size of an event's field: a number and the reference to it."""
_END_BYTES: Final = 13 * _FIELD_BYTES + 4 * _LEAST_ERROR_CHARS
"""Bytes that a started job reserves for its end event."""


@dataclass(slots=True, eq=False)
class _Record:
    """The recorded events of one request, within `MAX_BYTES`."""

    ctx: ref[ReqContext]
    """Weak reference to the context, which may reference a whole prompt."""
    req_id: str
    began_s: float
    max_events: int
    parent: object | None
    tenant: str | None
    free_bytes: int = MAX_BYTES - _RECORD_BYTES
    asks_since_s: float | None = None
    """Time of the first lookup since the request was last scheduled."""
    waited_s: float = 0.0
    """As `RequestTimeline.waited_s`, but includes notes that were dropped."""
    finished_s: float | None = None
    ended_s: float | None = None
    is_done: bool = False
    """Whether no more jobs can start."""
    events: list[_Raw] = field(default_factory=list)
    open_jobs: dict[tuple[str, int], _Raw] = field(default_factory=dict)
    """Started jobs that have not ended; space is reserved for the end of each."""
    dropped: int = 0

    def add(self, event: _Raw, text: str | None = None, *, ends: int = 0) -> bool:
        """Store an event; return False if the record is full.

        Args:
            event: The event.
            text: Its text, if it has one.
            ends: Number of jobs that the event starts; reserves space for their ends.
        """
        room = self.max_events - len(self.events) - len(self.open_jobs)
        num_bytes = _bytes_of(event, text) + ends * _END_BYTES
        if room <= ends or num_bytes > self.free_bytes:
            self.dropped += 1 + ends
            return False
        self.free_bytes -= num_bytes
        self.events.append(event)
        return True

    def end_job(self, event: _Raw, said: str | None) -> None:
        """Store the end of a job in the reserved space; an error text is cut to the space left."""
        if said is not None:
            said = said[: min(_MAX_ERROR_CHARS, _LEAST_ERROR_CHARS + self.free_bytes // 4)]
        self.free_bytes += _END_BYTES - _bytes_of(event, said)
        self.events.append((*event[:-1], said, event[-1]))

    def timeline(self, labels: Sequence[tuple[str, str]]) -> RequestTimeline:
        """Return the timeline; `labels` is the (source, answer) of each lookup counter."""
        return RequestTimeline(
            self.req_id,
            self.began_s,
            self.finished_s,
            self.ended_s,
            tuple(_made(self.events, labels)),
            self.dropped,
            self.parent,
            self.tenant,
        )


class RequestRecorder:
    """Keeps the timelines of the latest requests; ended ones are evicted first.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        max_requests: Maximum number of requests kept.
        now_s: Time of the latest event.
        clock: Returns the time; None: only `advance` sets it.
        find_parent: Returns the trace context of a new request.
    """

    def __init__(self, max_requests: int, max_events: int = MAX_EVENTS) -> None:
        self.max_requests = max_requests
        self._max_events = max_events
        self.now_s = 0.0
        self.clock: Callable[[], float] | None = None
        self.find_parent: Callable[[ReqContext], object | None] = _own_parent
        self._records: dict[_Record, None] = {}
        self._ended: dict[_Record, None] = {}
        self._by_context: WeakKeyDictionary[ReqContext, _Record] = WeakKeyDictionary()
        """All records whose context is in use; late copies report events after a request's end."""
        self._by_id: dict[str, _Record] = {}
        self._complete: deque[RequestTimeline] | None = None
        self._figures: Figures = lambda: (0,)
        self._labels: Sequence[tuple[str, str]] = ()
        self._before: Sequence[int] = (0,)
        self._asking: ReqContext | None = None
        self._asked_s = 0.0

    def __len__(self) -> int:
        return len(self._records)

    def read_lookups(self, labels: Iterable[tuple[str, str]], figures: Figures) -> None:
        """Set the source of lookup counters; `labels` are (source, answer), deferrals come last."""
        self._labels, self._figures = tuple(labels), figures
        self._before = figures()

    def keep_complete(self) -> None:
        """From now on, keep timelines of ended and dropped requests for `take_complete`."""
        if self._complete is None:
            self._complete = deque(maxlen=self.max_requests)

    def advance(self, now_s: float) -> None:
        """Set the time; it never goes back."""
        self.now_s = max(self.now_s, now_s)

    # -- events ---------------------------------------------------------------------------------

    def begin(self, ctx: ReqContext) -> None:
        """Record the start of a request."""
        self._catch_up()
        if (known := self._by_context.get(ctx)) is not None:
            self._forget(known)
        elif len(self._records) == self.max_requests:
            self._forget(next(iter(self._ended or self._records)))
        req_id, parent = ctx.req_id[:MAX_ID_CHARS], self.find_parent(ctx)
        record = _Record(ref(ctx), req_id, self.now_s, self._max_events, parent, ctx.tenant)
        self._records[record] = None
        self._by_context[ctx] = self._by_id[req_id] = record

    def finish(self, ctx: ReqContext) -> None:
        """Record that the scheduler has finished a request; jobs may follow."""
        self._catch_up()
        if record := self._by_context.get(ctx):
            record.finished_s = self.now_s

    def done(self, ctx: ReqContext) -> None:
        """Record that no more jobs can start for a request."""
        self._catch_up()
        if record := self._by_context.get(ctx):
            record.is_done = True
            self._end_if_done(record)

    def begin_round(self, ctx: ReqContext) -> None:
        """Record the start of a round of lookups."""
        self._catch_up()
        self._asking, self._asked_s = ctx, self.now_s
        record = self._by_context.get(ctx)
        if record is not None and record.asks_since_s is None:
            record.asks_since_s = self.now_s

    def scheduled(self, ctx: ReqContext) -> None:
        """Record that a request no longer waits for lookups; ignored without a lookup."""
        self._catch_up()
        record = self._by_context.get(ctx)
        if record is not None and record.asks_since_s is not None:
            since_s, record.asks_since_s = record.asks_since_s, None
            record.waited_s += self.now_s - since_s
            self.note(ctx, "scheduled", seconds=self.now_s - since_s)

    def note(
        self,
        ctx: ReqContext,
        kind: NoteKind,
        num_blocks: int = 0,
        *,
        tier: str | None = None,
        reason: str | None = None,
        seconds: float | None = None,
    ) -> None:
        """Record an event of a given kind; consecutive equal events are merged and counted."""
        self._catch_up()
        record = self._by_context.get(ctx)
        if record is None:
            return
        last = record.events[-1] if record.events else None
        what = (kind, num_blocks, tier, reason, seconds)
        if last is not None and last[0] is Note and last[2:-1] == what:
            record.events[-1] = (*last[:-1], last[-1] + 1)
        else:
            record.add((Note, self.now_s, *what, 1), reason)

    def job_started(
        self,
        ctx: ReqContext,
        job_id: int,
        tier: str,
        direction: TransferDirection,
        size: tuple[int, int],
    ) -> None:
        """Record a submitted copy of (blocks, bytes), and reserve space for its end."""
        self._catch_up()
        record = self._by_context.get(ctx)
        if record is None:
            return
        job = (JobStarted, self.now_s, job_id, tier, direction, *size)
        if record.add(job, ends=1):
            record.open_jobs[tier, job_id] = job

    def job_ended(
        self,
        ctx: ReqContext,
        job_id: int,
        tier: str,
        *,
        landed_blocks: int,
        num_bytes: int,
        seconds: float | None = None,
        queue_s: float | None = None,
        error: BaseException | None = None,
        is_overdue: bool = False,
    ) -> None:
        """Record the result of a copy."""
        self._catch_up()
        record = self._by_context.get(ctx)
        if record is None or (tier, job_id) not in record.open_jobs:
            return
        job = record.open_jobs.pop((tier, job_id))
        said = None if error is None else text_of(error)
        how = (landed_blocks, num_bytes, seconds, queue_s, is_overdue)
        record.end_job((JobEnded, self.now_s, job, *how), said)
        self._end_if_done(record)

    def note_all_live(self, kind: NoteKind) -> None:
        """Record an event for every request that has not finished."""
        for ctx, record in self._by_context.items():
            if record.finished_s is None:
                self.note(ctx, kind)

    # -- queries --------------------------------------------------------------------------------

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a request, the latest one with this id; None: not kept."""
        self._catch_up()
        record = self._by_id.get(req_id[:MAX_ID_CHARS])
        return None if record is None else record.timeline(self._labels)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return all timelines, in the order in which the requests began."""
        self._catch_up()
        return tuple(record.timeline(self._labels) for record in self._records)

    def slowest(self, count: int) -> tuple[SlowRequest, ...]:
        """Return the slowest of the `RECENT` latest requests, longest wait first. Thread-safe."""
        # Building timelines is slow and holds the GIL: build only those to return.
        recent = [(one.waited_s, one) for one in list(self._records)[-RECENT:]]
        slow = heapq.nlargest(count, recent, key=itemgetter(0))
        return tuple(
            SlowRequest(
                req_id=record.req_id,
                seconds=waited_s,
                longest_phase=record.timeline(self._labels).longest_phase,
            )
            for waited_s, record in slow
            if waited_s > 0
        )

    def take_complete(self) -> list[RequestTimeline]:
        """Remove and return the newly complete timelines; see `keep_complete`."""
        complete = list(self._complete or ())
        if self._complete:
            self._complete.clear()
        return complete

    def give_up(self) -> None:
        """At shutdown, complete the timelines of requests that have not ended."""
        self._catch_up()
        for record in self._records:
            if record.ended_s is None:
                self._deliver(record)

    # -- internal -------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Set the time, and end the round of lookups: record its number of answers of each kind.

        Called before each event.
        """
        if self.clock is not None:
            self.advance(self.clock())
        asking, self._asking = self._asking, None
        if asking is None:
            return
        before, self._before = self._before, self._figures()
        record = self._by_context.get(asking)
        if record is None:
            return
        answers: list[int] = []
        for figure, (now, then) in enumerate(zip(self._before, before, strict=True)):
            if now != then:
                answers += (figure, now - then)
        last = record.events[-1] if record.events else None
        asked_s = self._asked_s
        if last is not None and last[0] is LookupEvent and list(last[4:]) == answers:
            record.events[-1] = (LookupEvent, last[1], asked_s, last[3] + 1, *answers)
        else:
            record.add((LookupEvent, asked_s, asked_s, 1, *answers))

    def _end_if_done(self, record: _Record) -> None:
        if record.is_done and not record.open_jobs and record.ended_s is None:
            record.ended_s = self.now_s
            self._ended[record] = None
            self._deliver(record)

    def _forget(self, record: _Record) -> None:
        del self._records[record]
        if self._by_id.get(record.req_id) is record:
            del self._by_id[record.req_id]
        if (ctx := record.ctx()) is not None:
            self._by_context.pop(ctx, None)
        if record in self._ended:
            del self._ended[record]
        else:
            self._deliver(record)

    def _deliver(self, record: _Record) -> None:
        if self._complete is not None:
            self._complete.append(record.timeline(self._labels))


def _bytes_of(event: _Raw, text: str | None) -> int:
    """Return an estimate of an event's size in bytes, including its text."""
    return sys.getsizeof(event) + len(event) * (_FIELD_BYTES - 8) + sys.getsizeof(text)


def _made(events: Iterable[_Raw], labels: Sequence[tuple[str, str]]) -> Iterator[TimelineEvent]:
    """Convert raw events to timeline events."""
    begun: dict[tuple[str, int], JobStarted] = {}
    for kind, *fields in events:
        if kind is LookupEvent:
            answers: dict[str, dict[str, int]] = {}
            counts = dict(zip(fields[3::2], fields[4::2], strict=True))
            deferred = counts.pop(len(labels), 0)
            for figure, count in counts.items():
                who, what = labels[figure]
                answers.setdefault(who, {})[what] = count
            fields[3:] = (answers, deferred)
        elif kind is JobEnded:
            _, _, job_id, tier, *_ = fields[1]
            fields[1] = begun[tier, job_id]
        event = kind(*fields)
        if kind is JobStarted:
            begun[event.tier, event.job_id] = event
        yield event


def _own_parent(ctx: ReqContext) -> object | None:
    return ctx.trace_context


_WORTH_LESS: Final = "they are worth less than the resident blocks"
_WITHHELD: Final = "the request's max_offload_tokens excludes them"
_UNLIKELY: Final = "their reuse is unlikely"
_REFUSED: Final[tuple[MissReason, ...]] = ("no_room", "expired", "paused")


class RecordingPlanner(Planner):
    """A planner that reports its events to a recorder; its decisions are unchanged.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        deferral_s: float,
        recorder: RequestRecorder,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Report to `recorder`; times are those of `clock`, or of the step if it is None."""
        self.recorder = recorder
        recorder.clock = clock or (lambda: self.now_s)
        self._names = tuple(tier.label for tier in tiers)
        super().__init__(primary, tiers, deferral_s)
        labels = [(PRIMARY, "hit"), (PRIMARY, "pending"), (PRIMARY, "miss")]
        for name, tier in zip(self._names, tiers, strict=True):
            answers = ("hit", "miss", "undecided", *tier.counters.skipped_lookups)
            labels += [(name, answer) for answer in answers]
        labels += [(PLANNER, reason) for reason in _REFUSED]
        recorder.read_lookups(labels, self._lookup_figures)
        self.cascades.on_declined = self._note_declined

    # -- the scheduler's calls ------------------------------------------------------------------

    def on_new_request(self, ctx: ReqContext, request_level_tiers: Collection[int] = ()) -> None:
        super().on_new_request(ctx, request_level_tiers)
        self.recorder.begin(ctx)

    def on_request_finished(self, ctx: ReqContext) -> None:
        self._live_request(ctx)  # raises if the request is unknown
        self.recorder.finish(ctx)
        before = self._unused_prefetched()
        super().on_request_finished(ctx)
        self._note_unused(ctx, before)

    def prefetch(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, windows: Sequence[SlidingWindow] = ()
    ) -> None:
        super().prefetch(keys, ctx, windows)
        self.recorder.note(ctx, "queued", len(keys))

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[int]:
        waiting = self.prefetcher.waiting_blocks
        slots = super().prepare_load(keys, ctx)
        self.recorder.note(ctx, "pinned", len(keys))
        if used := waiting - self.prefetcher.waiting_blocks:
            self.recorder.note(ctx, "used", used)
        return slots

    def complete_load(
        self, keys: Sequence[OffloadKey], ctx: ReqContext, generation: int | None = None
    ) -> None:
        super().complete_load(keys, ctx, generation)
        if keys:
            self.recorder.note(ctx, "unpinned", len(keys))

    def prepare_store(
        self, keys: Sequence[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        before, counters = self._pending_counts(), self.primary.counters
        declined, withheld = counters.declined_blocks, counters.withheld_blocks
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
        if declined := counters.declined_blocks - declined:
            self.recorder.note(ctx, "declined", declined, tier=PRIMARY, reason=_WORTH_LESS)
        if withheld := counters.withheld_blocks - withheld:
            self.recorder.note(ctx, "declined", withheld, tier=PRIMARY, reason=_WITHHELD)
        if not (output.keys_to_store or output.keys_left_out or declined or withheld):
            self.recorder.note(ctx, "nothing_to_store", len(keys))
        self._note_pending(ctx, before)
        return output

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        ctx: ReqContext,
        *,
        success: bool,
        generation: int | None = None,
    ) -> None:
        before = self._pending_counts()
        if keys:
            self.recorder.note(ctx, "stored" if success else "store_failed", len(keys))
        super().complete_store(keys, ctx, success=success, generation=generation)
        self._note_pending(ctx, before)

    def delete(
        self, keys: Iterable[OffloadKey], tiers: Collection[int], *, in_primary: bool = True
    ) -> Deletion:
        deletion = super().delete(keys, tiers, in_primary=in_primary)
        for request in self.requests.values():
            if awaited := sum(key in deletion.keys for key in request.wants):
                self.recorder.note(request.ctx, "deleted", awaited)
        return deletion

    # -- steps ----------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        self.recorder.note_all_live("reset")
        super().reset_cache()

    # -- internal -------------------------------------------------------------------------------

    def _begin_round(self, request: RequestState) -> None:
        self.recorder.begin_round(request.ctx)
        super()._begin_round(request)

    def _decide(self, request: RequestState) -> bool:
        has_asked = super()._decide(request)
        if has_asked:
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
        if self._next_job_id in self.tiers[index].prefetches:
            self.recorder.note(ctx, "prefetched", len(keys), tier=self._names[index])
        self.recorder.job_started(
            ctx,
            self._next_job_id,
            self._names[index],
            "load" if is_promotion else "store",
            (len(keys), len(keys) * self.tiers[index].jobs.slot_bytes),
        )
        super()._submit(index, ctx, keys, slots, is_promotion=is_promotion)

    def _job_ended(self, index: int, job: JobMetadata, result: JobResult) -> None:
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
            is_overdue=result.orphaned,
        )
        before = self._unused_prefetched()
        super()._job_ended(index, job, result)
        self._note_unused(job.req_context, before)

    def _job_released(self, index: int, record: JobRecord) -> None:
        job = record.job
        self.recorder.note(job.req_context, "released", len(job.keys), tier=self._names[index])
        super()._job_released(index, record)

    def _end_if_done(self, request: RequestState) -> None:
        super()._end_if_done(request)
        if request.ctx not in self.requests:
            self.recorder.done(request.ctx)

    def _unused_prefetched(self) -> int:
        return sum(tier.counters.unused_prefetched_blocks for tier in self.tiers)

    def _note_unused(self, ctx: ReqContext, before: int) -> None:
        """Record the blocks that were prefetched for an ended request, and that nobody loaded."""
        if unused := self._unused_prefetched() - before:
            self.recorder.note(ctx, "unused", unused)

    def _note_declined(self, ctx: ReqContext, index: int, count: int) -> None:
        self.recorder.note(ctx, "declined", count, tier=self._names[index], reason=_UNLIKELY)

    def _pending_counts(self) -> list[int]:
        return [queue.count for queue in self.cascades.queues]

    def _note_pending(self, ctx: ReqContext, before: Sequence[int]) -> None:
        for index, (count, now) in enumerate(zip(before, self._pending_counts(), strict=True)):
            if now > count:
                reason = self._reason_to_wait(index, has_others=count > 0)
                name = self._names[index]
                self.recorder.note(ctx, "pending", now - count, tier=name, reason=reason)

    def _reason_to_wait(self, index: int, *, has_others: bool) -> str:
        if not self.tiers[index].may_store(self.now_s):
            return "the tier is not open, or its breaker is"
        if has_others:
            return "others wait before them"
        if not self.room.room_to_store(index):
            return "its part of the primary is used up"
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
