"""The job ledger: every accepted job gets exactly one result, and it is made here.

    QUEUED --Launched--> FLYING --JobSettled--> SETTLED --taken--> (gone)
    QUEUED --JobAbandoned--> SETTLED             the tier never saw it
    FLYING --JobOverdue | JobAbandoned--> ORPHANED --JobSettled--> (released)

QUEUED means that the owner has not handed the job over yet, so that its memory is certainly
untouched. A ORPHANED job has been reported, but its copy still owns its memory until it settles.

Effects are what the owner asks of a tier: imperative, executed in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvoffload_async.abc.events import JobOverdue, JobSettled
from kvoffload_async.errors import IllegalTransitionError, StateError
from kvoffload_async.types import JobId, JobMetadata, JobResult, OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run a job."""

    job: JobMetadata


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Find out which of these blocks the tier has."""

    generation: int
    keys: tuple[OffloadKey, ...]
    chains: tuple[tuple[OffloadKey, ...], ...] = ()
    """The same keys as chains, head to tail, for a tier that is asked for the longest heads."""
    before: tuple[tuple[OffloadKey, ...], ...] = ()
    """For each chain the keys right before it, head to tail; empty for a tier that is told none."""


@dataclass(frozen=True, slots=True)
class TouchBlocks:
    """Learn that blocks were used, head to tail."""

    keys: tuple[OffloadKey, ...]
    ctx: ReqContext | None = None
    """The request on whose behalf an external manager is called."""


TierEffect = StartJob | StartProbe | TouchBlocks


class JobState(enum.Enum):
    """Where a job stands, seen from its owner."""

    QUEUED = enum.auto()
    FLYING = enum.auto()
    ORPHANED = enum.auto()
    SETTLED = enum.auto()

    __hash__ = object.__hash__  # that of an Enum is a Python function, and each job looks it up


@dataclass(frozen=True, slots=True)
class Launched:
    """The job was handed to its tier."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class JobAbandoned:
    """The owner stopped waiting for the job."""

    job_id: JobId
    error: Exception | None


JobEvent = Launched | JobSettled | JobOverdue | JobAbandoned


class JobRecord:
    """One job.

    Attributes:
        job: The job.
        state: Where it stands.
        holds_slots: What an orphaned job keeps: its slots; else (a cascade, before a reset of the
            primary) the pins of its keys.
    """

    __slots__ = ("holds_slots", "job", "state")

    def __init__(self, job: JobMetadata) -> None:
        self.job = job
        self.state = JobState.QUEUED
        self.holds_slots = job.is_promotion


def refused(job: JobMetadata, error: Exception) -> JobResult:
    """Return the result of a job that no tier accepted."""
    return JobResult(job.job_id, success=False, error=error)


_Handler = Callable[["Ledger", JobRecord, JobEvent], JobResult | None]


class Ledger:
    """The jobs of one tier, from acceptance to report.

    Thread: owner.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Start empty; a slot counts as `slot_bytes` in a result's bytes."""
        self.slot_bytes = slot_bytes
        self._records: dict[JobId, JobRecord] = {}
        self._unfinished = 0
        self.queued_count = 0
        """Jobs that were not handed over yet."""
        self.orphaned_count = 0
        """Jobs that have a result and whose copies still run."""
        self._ended: list[tuple[JobMetadata, JobResult]] = []
        self._released: list[JobRecord] = []

    def accept(self, job: JobMetadata) -> bool:
        """Take a job on: from now on it gets exactly one result.

        Returns:
            Whether it is to be run. A job whose id is in use is not: its result is a failure.
        """
        if job.job_id in self._records:
            duplicate = StateError(f"job id {job.job_id} is in use; job ids are never reused")
            self._ended.append((job, refused(job, duplicate)))
            return False
        self._records[job.job_id] = JobRecord(job)
        self._unfinished += 1
        self.queued_count += 1
        return True

    def handle(self, event: JobEvent) -> JobMetadata:
        """Apply an event to its job; return the job.

        Raises:
            IllegalTransitionError: The event cannot happen in the job's state.
        """
        record = self._records.get(event.job_id)
        if record is None:
            raise IllegalTransitionError(f"{event!r}: the job is unknown, or has ended already")
        handler = self.TRANSITIONS[record.state, type(event)]
        if handler is None:
            raise IllegalTransitionError(f"{event!r}: the job is {record.state.name}")
        result = handler(self, record, event)
        if result is not None:
            self._unfinished -= 1
            self._ended.append((record.job, result))
        return record.job

    def take_ended(self) -> list[tuple[JobMetadata, JobResult]]:
        """Detach the jobs whose result has not been taken yet, with it, oldest first."""
        ended, self._ended = self._ended, []
        for job, _ in ended:
            record = self._records.get(job.job_id)
            if record is not None and record.state is JobState.SETTLED:
                del self._records[job.job_id]
        return ended

    def take_released(self) -> list[JobRecord]:
        """Detach the orphaned jobs whose copies have ended since the last call."""
        released, self._released = self._released, []
        return released

    @property
    def unfinished_count(self) -> int:
        """Jobs that have no result yet."""
        return self._unfinished

    @property
    def unreported_count(self) -> int:
        """Jobs whose result has not been taken."""
        return self._unfinished + len(self._ended)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would return anything."""
        return bool(self._ended)

    @property
    def has_news(self) -> bool:
        """Whether `take_ended` or `take_released` would return anything."""
        return bool(self._ended or self._released)

    def ids_in(self, *states: JobState) -> list[JobId]:
        """Return the jobs in any of these states, oldest first."""
        return [job_id for job_id, record in self._records.items() if record.state in states]

    def state_of(self, job_id: JobId) -> JobState | None:
        """Return where a job stands, or None if it is unknown or has been reported."""
        record = self._records.get(job_id)
        return None if record is None else record.state

    def job_of(self, job_id: JobId) -> JobMetadata:
        """Return a job that is known: `state_of` is not None."""
        return self._records[job_id].job

    def unreported(self) -> Iterator[JobMetadata]:
        """Iterate over the jobs whose result has not been taken."""
        for record in self._records.values():
            if record.state in (JobState.QUEUED, JobState.FLYING):
                yield record.job
        yield from (job for job, _ in self._ended)

    def orphaned(self) -> Iterator[JobRecord]:
        """Iterate over the jobs whose result was taken, and whose release was not."""
        ended = {job.job_id for job, _ in self._ended}
        late = [r for r in self._records.values() if r.state is JobState.ORPHANED]
        yield from (r for r in (*self._released, *late) if r.job.job_id not in ended)

    # -- transitions ----------------------------------------------------------------------------

    def _launch(self, record: JobRecord, _event: JobEvent) -> None:
        record.state = JobState.FLYING
        self.queued_count -= 1

    def _settle(self, record: JobRecord, event: JobEvent) -> JobResult:
        assert isinstance(event, JobSettled)  # noqa: S101 - for the type checker; see TRANSITIONS
        record.state = JobState.SETTLED
        job = record.job
        failures = event.failures
        error: Exception | None = event.job_error
        landed: Iterable[OffloadKey] = ()
        if error is None and failures:
            error = failures[min(failures)]
            landed = (key for i, key in enumerate(job.keys) if i not in failures)
        return JobResult(
            job.job_id,
            success=error is None,
            successful_keys=frozenset(landed) if error else None,
            transfer_time=event.seconds,
            queue_time=event.queue_s,
            transfer_bytes=(len(job.keys) - len(failures)) * self.slot_bytes
            if event.job_error is None
            else 0,
            error=error,
        )

    def _orphan(self, record: JobRecord, event: JobEvent) -> JobResult:
        assert isinstance(event, JobOverdue | JobAbandoned)  # noqa: S101 - see _settle
        record.state = JobState.ORPHANED
        self.orphaned_count += 1
        return JobResult(event.job_id, success=False, error=event.error, orphaned=True)

    def _give_up(self, record: JobRecord, event: JobEvent) -> JobResult:
        assert isinstance(event, JobAbandoned)  # noqa: S101 - see _settle
        record.state = JobState.SETTLED
        self.queued_count -= 1
        return JobResult(event.job_id, success=False, error=event.error)

    def _release(self, record: JobRecord, event: JobEvent) -> None:
        del self._records[event.job_id]
        self.orphaned_count -= 1
        self._released.append(record)

    def _stay(self, _record: JobRecord, _event: JobEvent) -> None:
        """Nothing: the job's result has been given already."""

    # Total: every state meets every event; None marks what cannot happen.
    TRANSITIONS: ClassVar[dict[tuple[JobState, type[JobEvent]], _Handler | None]] = {
        (JobState.QUEUED, Launched): _launch,
        (JobState.QUEUED, JobSettled): None,
        (JobState.QUEUED, JobOverdue): None,
        (JobState.QUEUED, JobAbandoned): _give_up,
        (JobState.FLYING, Launched): None,
        (JobState.FLYING, JobSettled): _settle,
        (JobState.FLYING, JobOverdue): _orphan,
        (JobState.FLYING, JobAbandoned): _orphan,
        (JobState.ORPHANED, Launched): None,
        (JobState.ORPHANED, JobSettled): _release,
        # The owner gave up first; the tier's own deadline passes later, or the other way round.
        (JobState.ORPHANED, JobOverdue): _stay,
        (JobState.ORPHANED, JobAbandoned): _stay,
        (JobState.SETTLED, Launched): None,
        (JobState.SETTLED, JobSettled): None,
        (JobState.SETTLED, JobOverdue): None,
        # The owner gives up on everything that is left, settled or not.
        (JobState.SETTLED, JobAbandoned): _stay,
    }
