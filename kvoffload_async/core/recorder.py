"""The recorder of requests: what the last ones have been through, in bounded memory.

    begun --event*--> finished and no job open: ended --forgotten, as later ones need the room-->

It is told what happens, and when; it decides nothing, and knows no clock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

from kvoffload_async.timeline import (
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
from kvoffload_async.types import ReqContext

MAX_EVENTS: Final = 128
"""How many events are kept of one request; what comes later is counted."""

RECENT: Final = 256
"""Among how many requests the slowest are looked for, on a thread that is not the owner's."""

Figures = Callable[[], Sequence[int]]
"""Reads the counters of lookups. They grow by what a round of lookups was answered, and by nothing
else, so that a round is the difference of two readings and a lookup costs nothing more."""


_Raw = tuple[Any, ...]
"""An event's class and its fields, in order: made quickly, and read seldom. The end of a job has
the tuple of its begin."""


class _Record:
    """One request."""

    __slots__ = (
        "asks_since_s",
        "began_s",
        "ctx",
        "dropped",
        "ended_s",
        "events",
        "finished_s",
        "is_done",
        "max_events",
        "open_jobs",
        "parent",
        "waited_s",
    )

    def __init__(
        self, ctx: ReqContext, began_s: float, max_events: int, parent: object | None
    ) -> None:
        self.ctx = ctx
        self.max_events = max_events
        self.began_s = began_s
        self.asks_since_s: float | None = None
        """When it looked something up first, since it was scheduled."""
        self.waited_s = 0.0
        """The same as `RequestTimeline.waited_s`, also of notes that had no room."""
        self.finished_s: float | None = None
        self.ended_s: float | None = None
        self.is_done = False
        """Whether no job can begin any more."""
        self.events: list[_Raw] = []
        self.open_jobs: dict[tuple[str, int], _Raw] = {}
        """Each has a place among the events for its end."""
        self.dropped = 0
        self.parent = parent

    @property
    def room(self) -> int:
        return self.max_events - len(self.events) - len(self.open_jobs)

    def timeline(self) -> RequestTimeline:
        return RequestTimeline(
            self.ctx.req_id,
            self.began_s,
            self.finished_s,
            self.ended_s,
            tuple(_made(self.events)),
            self.dropped,
            self.parent,
        )


class RequestRecorder:
    """Keeps the timelines of the last requests; those that have ended make room first.

    Thread: owner.

    Attributes:
        max_requests: How many requests are kept.
        now_s: The time of what happens next.
        find_parent: Returns the trace context of a request that begins.
        dropped_timelines: Timelines that nobody has taken in time.
    """

    def __init__(self, max_requests: int, max_events: int = MAX_EVENTS) -> None:
        self.max_requests = max_requests
        self._max_events = max_events
        self.now_s = 0.0
        self.find_parent: Callable[[ReqContext], object | None] = _own_parent
        self.dropped_timelines = 0
        self._records: dict[ReqContext, _Record] = {}
        self._ended: dict[ReqContext, None] = {}
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
        """Read rounds of lookups from figures: who has answered what; the last one: deferrals."""
        self._labels, self._figures = tuple(labels), figures
        self._before = figures()

    def keep_complete(self) -> None:
        """Keep the timelines of requests that have ended, or are forgotten, for `take_complete`."""
        if self._complete is None:
            self._complete = deque()

    def advance(self, now_s: float) -> None:
        """Learn the time; it never goes back."""
        self.now_s = max(self.now_s, now_s)

    # -- what happens ---------------------------------------------------------------------------

    def begin(self, ctx: ReqContext) -> None:
        """A request begins."""
        self._end_round()
        if ctx in self._records:
            self._forget(ctx)
        elif len(self._records) == self.max_requests:
            self._forget(next(iter(self._ended or self._records)))
        record = _Record(ctx, self.now_s, self._max_events, self.find_parent(ctx))
        self._records[ctx] = self._by_id[ctx.req_id] = record

    def finish(self, ctx: ReqContext) -> None:
        """Its owner has finished a request; jobs may follow."""
        self._end_round()
        if record := self._records.get(ctx):
            record.finished_s = self.now_s

    def done(self, ctx: ReqContext) -> None:
        """No job can begin for a request any more."""
        self._end_round()
        if record := self._records.get(ctx):
            record.is_done = True
            self._end_if_done(record)

    def begin_round(self, ctx: ReqContext) -> None:
        """A request begins to ask."""
        self._end_round()
        self._asking, self._asked_s = ctx, self.now_s
        record = self._records.get(ctx)
        if record is not None and record.asks_since_s is None:
            record.asks_since_s = self.now_s

    def scheduled(self, ctx: ReqContext) -> None:
        """A request that has asked waits for no answer any more."""
        record = self._records.get(ctx)
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
        """Something happens to a request; what happens again, right after itself, is counted."""
        self._end_round()
        record = self._records.get(ctx)
        if record is None:
            return
        last = record.events[-1] if record.events else None
        what = (kind, num_blocks, tier, reason, seconds)
        if last is not None and last[0] is Note and last[2:-1] == what:
            record.events[-1] = (*last[:-1], last[-1] + 1)
        elif record.room:
            record.events.append((Note, self.now_s, *what, 1))
        else:
            record.dropped += 1

    def job_started(
        self,
        ctx: ReqContext,
        job_id: int,
        tier: str,
        direction: TransferDirection,
        size: tuple[int, int],
    ) -> None:
        """A copy of so many blocks, and bytes, is asked for; its end has its place from now on."""
        self._end_round()
        record = self._records.get(ctx)
        if record is None:
            return
        if record.room < 2:  # noqa: PLR2004 - its begin and its end
            record.dropped += 2
            return
        job = (JobStarted, self.now_s, job_id, tier, direction, *size)
        record.events.append(job)
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
        """A copy has its result."""
        self._end_round()
        record = self._records.get(ctx)
        if record is None or (tier, job_id) not in record.open_jobs:
            return
        job = record.open_jobs.pop((tier, job_id))
        said = None if error is None else described_error(error)
        how = (landed_blocks, num_bytes, seconds, queue_s, said, is_overdue)
        record.events.append((JobEnded, self.now_s, job, *how))
        self._end_if_done(record)

    def note_all_live(self, kind: NoteKind) -> None:
        """Something happens to every request that has not finished."""
        for ctx, record in self._records.items():
            if record.finished_s is None:
                self.note(ctx, kind)

    # -- what is known --------------------------------------------------------------------------

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a request, of several with one id the latest; None: not kept."""
        self._end_round()
        record = self._by_id.get(req_id)
        return None if record is None else record.timeline()

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return every timeline that is kept, in the order in which the requests began."""
        self._end_round()
        return tuple(record.timeline() for record in self._records.values())

    def slowest(self, count: int) -> tuple[SlowRequest, ...]:
        """Return which of the latest `RECENT` requests waited longest, those first. Thread: any."""
        # Making timelines holds the interpreter up: only those that are returned are made.
        recent = [(one.waited_s, one) for one in list(self._records.values())[-RECENT:]]
        slow = heapq.nlargest(count, recent, key=itemgetter(0))
        return tuple(
            SlowRequest(
                req_id=record.ctx.req_id,
                seconds=waited_s,
                longest_phase=record.timeline().longest_phase,
            )
            for waited_s, record in slow
            if waited_s > 0
        )

    def take_complete(self) -> list[RequestTimeline]:
        """Detach the timelines that became complete since the last call; see `keep_complete`."""
        complete = list(self._complete or ())
        if self._complete:
            self._complete.clear()
        return complete

    def give_up(self) -> None:
        """Have the timelines of requests taken that have not ended: nothing more is to come."""
        self._end_round()
        for ctx, record in self._records.items():
            if ctx not in self._ended:
                self._deliver(record)

    # -- inside ---------------------------------------------------------------------------------

    def _end_round(self) -> None:
        """Read what the round that is under way was answered."""
        asking, self._asking = self._asking, None
        if asking is None:
            return
        before, self._before = self._before, self._figures()
        record = self._records.get(asking)
        if record is None:
            return
        counts = [now - then for now, then in zip(self._before, before, strict=True)]
        answers: dict[str, dict[str, int]] = {}
        for (who, what), count in zip(self._labels, counts[:-1], strict=True):
            if count:
                answers.setdefault(who, {})[what] = count
        deferred = counts[-1]
        last = record.events[-1] if record.events else None
        asked_s = self._asked_s
        if last is not None and last[0] is LookupEvent and last[4:] == (answers, deferred):
            record.events[-1] = (LookupEvent, last[1], asked_s, last[3] + 1, answers, deferred)
        elif record.room:
            record.events.append((LookupEvent, asked_s, asked_s, 1, answers, deferred))
        else:
            record.dropped += 1

    def _end_if_done(self, record: _Record) -> None:
        if record.is_done and not record.open_jobs and record.ended_s is None:
            record.ended_s = self.now_s
            self._ended[record.ctx] = None
            self._deliver(record)

    def _forget(self, ctx: ReqContext) -> None:
        record = self._records.pop(ctx)
        if self._by_id.get(ctx.req_id) is record:
            del self._by_id[ctx.req_id]
        if ctx in self._ended:
            del self._ended[ctx]
        else:
            self._deliver(record)

    def _deliver(self, record: _Record) -> None:
        if self._complete is None:
            return
        if len(self._complete) == self.max_requests:
            self._complete.popleft()
            self.dropped_timelines += 1
        self._complete.append(record.timeline())


def _made(events: Iterable[_Raw]) -> Iterator[TimelineEvent]:
    """Make events out of what was kept of them."""
    begun: dict[tuple[str, int], JobStarted] = {}
    for kind, *fields in events:
        if kind is JobEnded:
            _, _, job_id, tier, *_ = fields[1]
            fields[1] = begun[tier, job_id]
        event = kind(*fields)
        if kind is JobStarted:
            begun[event.tier, event.job_id] = event
        yield event


def described_error(error: BaseException) -> str:
    """Return an error as text; one of a third party's may raise when it is asked for it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - third-party code
        text = ""
    return text or type(error).__name__


def _own_parent(ctx: ReqContext) -> object | None:
    return ctx.trace_context
