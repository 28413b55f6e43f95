"""Timeline of one request, as returned by `explain`: events as values and as text.

Times are seconds on the engine's monotonic clock. The text shows milliseconds since the request
began.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

DEVICE: Final = "device"
"""Tier name for copies between the device and the primary."""
PRIMARY: Final = "primary"
"""Source of lookup answers from the primary tier."""
PLANNER: Final = "planner"
"""Source of misses for blocks that some tier has."""

TransferDirection = Literal["load", "store"]
"""Load: to the device or the primary. Store: away from it."""

NoteKind = Literal[
    "declined",
    "deleted",
    "evicted",
    "left_out",
    "nothing_to_store",
    "pending",
    "pinned",
    "prefetched",
    "queued",
    "refused",
    "released",
    "reserved",
    "reset",
    "scheduled",
    "store_failed",
    "stored",
    "unpinned",
    "unused",
    "used",
    "waits",
]


@dataclass(frozen=True, slots=True)
class LookupEvent:
    """One round of lookups, or several consecutive rounds with equal answers.

    Attributes:
        at_s: Start of the first round.
        last_s: Start of the last round.
        rounds: Number of rounds, one per scheduler step.
        answers: Block counts by source and answer. The source is `"primary"`, a tier's name, or
            `"planner"`. The primary answers `hit`, `pending` (being written) or `miss`; a tier
            `hit`, `miss`, `undecided` (being probed) or a reason for not asking it, as in
            `TierStatistics.skipped_lookups`; the planner, for blocks that some tier may have,
            `no_room`, `expired` or `paused`, as in `PlannerStatistics.misses`.
        deferred: Lookups per round that deferred the request, so that it must look up again.
    """

    at_s: float
    last_s: float
    rounds: int
    answers: Mapping[str, Mapping[str, int]]
    deferred: int


@dataclass(frozen=True, slots=True)
class JobStarted:
    """A copy was submitted.

    Attributes:
        at_s: Time of the submission.
        job_id: Unique within the tier.
        tier: Name of the tier, or `"device"`.
        direction: Load or store.
        num_blocks: Blocks to copy.
        num_bytes: Bytes to copy.
    """

    at_s: float
    job_id: int
    tier: str
    direction: TransferDirection
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A copy has its result.

    Attributes:
        at_s: When the owner's thread received the result.
        job: The submission.
        landed_blocks: Blocks copied.
        num_bytes: Bytes copied.
        seconds: Duration in the tier, queueing included; None if unknown.
        queue_s: Time in the tier's queue; None if unknown.
        error: Error of the job or of its first failed block; None: every block was copied.
        is_overdue: Whether the copy was still running, at its deadline or at a reset.
    """

    at_s: float
    job: JobStarted
    landed_blocks: int
    num_bytes: int
    seconds: float | None = None
    queue_s: float | None = None
    error: str | None = None
    is_overdue: bool = False

    @property
    def bytes_per_s(self) -> float | None:
        """Throughput without queueing; None if unknown."""
        copy_s = (self.seconds or 0.0) - (self.queue_s or 0.0)
        return self.num_bytes / copy_s if copy_s > 0 else None


@dataclass(frozen=True, slots=True)
class Note:
    """An event of the request other than a lookup or a copy.

    Attributes:
        at_s: Time of the first occurrence.
        kind: `waits` for a permit, `scheduled` (no lookup outstanding), `pinned` and `unpinned`
            (blocks to load), `reserved` (slots to store into), `evicted` (blocks evicted for
            them), `declined` (not worth storing, for the eviction policy or the tier's
            `admission`), `deleted` (by `cache`, while it waits for them), `left_out` and `refused`
            (no room for some, or any), `nothing_to_store`, `stored`, `store_failed`, `pending`
            (blocks waiting for a tier), `released` (the copy of an overdue job ended), `reset`;
            `queued` (to be prefetched), `prefetched` (the next
            load is a prefetch), `used` and `unused` (prefetched blocks).
        num_blocks: Number of blocks.
        tier: The tier, if the event belongs to one; `"primary"` for what the policy declined.
        reason: Reason, if the kind has several.
        seconds: Duration, if the kind has one.
        times: Number of consecutive occurrences.
    """

    at_s: float
    kind: NoteKind
    num_blocks: int = 0
    tier: str | None = None
    reason: str | None = None
    seconds: float | None = None
    times: int = 1


TimelineEvent = LookupEvent | JobStarted | JobEnded | Note


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """Recorded events of one request; `print` shows them in 80 columns.

    Attributes:
        req_id: The request's id.
        began_s: When it began.
        finished_s: When its owner finished it; None: not yet.
        ended_s: When its last copy had a result; None: not yet.
        events: The events, in order.
        dropped_events: Events not recorded because of the limit per request.
        trace_context: The caller's parent context for the spans.
        tenant: The request's tenant; None: there are no tenants, or none has it.
    """

    req_id: str
    began_s: float
    finished_s: float | None
    ended_s: float | None
    events: tuple[TimelineEvent, ...]
    dropped_events: int = 0
    trace_context: object | None = field(default=None, repr=False, compare=False)
    tenant: str | None = None

    @property
    def last_s(self) -> float:
        """Time of the last known event."""
        last_s = self.began_s
        if self.events:
            event = self.events[-1]
            last_s = event.last_s if isinstance(event, LookupEvent) else event.at_s
        return max(last_s, self.finished_s or last_s, self.ended_s or last_s)

    @property
    def seconds(self) -> float:
        """Time from the request's start to its last known event."""
        return self.last_s - self.began_s

    @property
    def waited_s(self) -> float:
        """Total time from the request's lookups until it was scheduled."""
        notes = (event for event in self.events if isinstance(event, Note))
        return sum(n.times * (n.seconds or 0.0) for n in notes if n.kind == "scheduled")

    @property
    def longest_phase(self) -> str:
        """The longest phase of `waited_s`: one tier's load, or the lookups."""
        loads: dict[str, float] = {}
        for event in self.events:
            # Only loads to the primary delay scheduling; loads to the device follow it.
            if isinstance(event, JobEnded) and event.job.direction == "load":
                name = event.job.tier
                if name != DEVICE:
                    loads[name] = max(loads.get(name, 0.0), event.seconds or 0.0)
        tier = max(loads, key=loads.__getitem__, default=None)
        if tier is None or loads[tier] < self.waited_s / 2:
            return "lookups"
        return f"{tier}: load"

    @property
    def unfinished_jobs(self) -> tuple[JobStarted, ...]:
        """Copies without a result."""
        open_jobs: dict[tuple[str, int], JobStarted] = {}
        for event in self.events:
            if isinstance(event, JobStarted):
                open_jobs[event.tier, event.job_id] = event
            elif isinstance(event, JobEnded):
                del open_jobs[event.job.tier, event.job.job_id]
        return tuple(open_jobs.values())

    def __str__(self) -> str:
        state = "ended" if self.ended_s is not None else "in flight"
        owner = "" if self.tenant is None else f" of tenant {self.tenant}"
        lines = [f"request {self.req_id}{owner}: {state}, {_duration(self.seconds)}"]
        lines += ["      ms  event", "       0  begins"]
        for at_s, text in self._lines():
            after = f"{(at_s - self.began_s) * 1e3:8.3f}"[:8]
            lines += textwrap.wrap(
                text, 80, initial_indent=f"{after}  ", subsequent_indent=" " * 12
            )
        if self.dropped_events:
            lines.append(f"          {self.dropped_events} more events were not kept")
        return "\n".join(lines)

    def _lines(self) -> Iterator[tuple[float, str]]:
        finished_s = self.finished_s
        asked = 0
        for event in self.events:
            if finished_s is not None and event.at_s > finished_s:
                yield finished_s, "finished by its owner; copies may go on"
                finished_s = None
            text = described(event)
            if isinstance(event, LookupEvent) and event.answers:
                now_asked = max(sum(answers.values()) for answers in event.answers.values())
                has_missed = "miss" in list(event.answers.values())[-1]  # of the last one asked
                if now_asked < asked and has_missed:
                    rest = _blocks(asked - now_asked)
                    text += f"; {rest} after the first miss need no answer: a prefix ends there"
                asked = now_asked
            yield event.at_s, text
        if finished_s is not None:
            yield finished_s, "finished by its owner"
        if self.ended_s is not None:
            yield self.ended_s, "ends: no copies in flight"
        for job in self.unfinished_jobs:
            yield self.last_s, f"still open: {described(job)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRequest:
    """One of the slowest recent requests.

    Attributes:
        req_id: Its id.
        seconds: Total time from lookups until scheduled.
        longest_phase: The longest phase of that time: one tier's load, or the lookups.
    """

    req_id: str
    seconds: float
    longest_phase: str


def described(event: TimelineEvent) -> str:
    """Return a one-line text for an event."""
    match event:
        case LookupEvent():
            return _lookup(event)
        case JobStarted():
            size = _amount(event.num_blocks, event.num_bytes)
            return f"{event.tier}: {event.direction} of {size} begins (job {event.job_id})"
        case JobEnded():
            return _ended(event)
        case Note():
            return _note(event)


def _lookup(event: LookupEvent) -> str:
    said = "; ".join(
        f"{who}: "
        + ", ".join(f"{count} {_WORDS.get(what, what)}" for what, count in what_of.items())
        for who, what_of in event.answers.items()
    )
    times = ""
    if event.rounds > 1:
        times = f" ({event.rounds} times in {_duration(event.last_s - event.at_s)})"
    wait = f" -> deferred by {_blocks(event.deferred)}" if event.deferred else ""
    return f"lookup{times}: {said}{wait}"


def _ended(event: JobEnded) -> str:
    job = event.job
    text = f"{job.tier}: {job.direction} of job {job.job_id} "
    if event.is_overdue:
        text += f"is overdue, its copy still runs: {event.error}"
    elif event.error is None:
        text += f"ends: {_amount(event.landed_blocks, event.num_bytes)}"
    else:
        text += f"fails, {event.landed_blocks} of {_blocks(job.num_blocks)} arrived: {event.error}"
    if event.seconds is None:
        return text
    text += f"; took {_duration(event.seconds)}"
    if event.queue_s is not None:
        text += f", {_duration(event.queue_s)} of it in the queue"
    if event.bytes_per_s is not None and event.num_bytes:
        text += f", {_size(event.bytes_per_s)}/s"
    return text


def _note(note: Note) -> str:
    text = _NOTES[note.kind].format(
        blocks=_blocks(note.num_blocks),
        tier=note.tier,
        reason=note.reason,
        seconds=_duration(note.seconds or 0.0),
    )
    return text + (f" ({note.times} times)" if note.times > 1 else "")


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _amount(num_blocks: int, num_bytes: int) -> str:
    """Return the size as text; the bytes are omitted if unknown (0)."""
    return _blocks(num_blocks) + (f", {_size(num_bytes)}" if num_bytes else "")


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _size(num_bytes: float) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"


_WORDS: Final = {
    "expired": "not waited for: deferred for too long",
    "failed": "not asked: failed for it before",
    "filtered": "not asked: the request's filter",
    "hit": "found",
    "miss": "not found",
    "no_room": "not promoted: no room in the primary",
    "pending": "being written",
    "paused": "not promoted: a reset is under way",
    "suspended": "not asked: its breaker is open",
    "too_few": "not asked: too few are missed for loading to pay",
    "unavailable": "not asked: the tier is not open",
    "undecided": "not known yet",
}


_NOTES: Final[Mapping[NoteKind, str]] = {
    "declined": "{tier}: {blocks} declined: {reason}",
    "deleted": "{blocks} that it waits for are being deleted",
    "evicted": "{blocks} are evicted to make room",
    "left_out": "no room for {blocks}: left out, to be offered again",
    "nothing_to_store": "{blocks} offered for storing: all are there",
    "pending": "{tier}: {blocks} have to wait: {reason}",
    "pinned": "{blocks} pinned, to be loaded",
    "prefetched": "{tier}: {blocks} are prefetched",
    "queued": "queued with {blocks}, before its first lookup",
    "refused": "no room for {blocks}: not stored now",
    "released": "{tier}: the overdue copy of {blocks} has ended",
    "reserved": "slots for {blocks} reserved, to be stored",
    "reset": "the primary was reset: its hits are gone",
    "scheduled": "scheduled: waited {seconds} since its first lookup",
    "store_failed": "the write of {blocks} to the primary failed",
    "stored": "{blocks} are readable in the primary",
    "unpinned": "{blocks} unpinned",
    "unused": "{blocks} were prefetched in vain",
    "used": "{blocks} of these were prefetched",
    "waits": "waits for {reason}",
}
