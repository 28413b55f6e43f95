"""The job ledger: every accepted job gets exactly one result, created here.

    QUEUED --Launched--> FLYING --JobFinished--> FINISHED --taken--> (removed)
    QUEUED --JobAbandoned--> FINISHED             the tier never received it
    FLYING --JobOverdue | JobAbandoned--> ORPHANED --JobFinished--> (released)

QUEUED: the owner has not submitted the job to the tier yet, so its memory is untouched. ORPHANED:
the job was reported as failed, but its copy may still access its memory until it has finished.

Effects are the owner's commands to a tier, executed in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvoffload_async.abc.events import JobFinished, JobOverdue, TierOperation
from kvoffload_async.errors import IllegalTransitionError, StateError
from kvoffload_async.types import JobId, JobMetadata, JobResult, OffloadKey, ReqContext


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run a job in the tier."""

    job: JobMetadata


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Probe which of these blocks the tier has."""

    generation: int
    keys: tuple[OffloadKey, ...]
    chains: tuple[tuple[OffloadKey, ...], ...] = ()
    """The same keys as chains, in prompt order, for tiers that search for longest prefixes."""


@dataclass(frozen=True, slots=True)
class TouchBlocks:
    """Update the recency of blocks in the tier, first block first."""

    keys: tuple[OffloadKey, ...]
    ctx: ReqContext | None = None
    """The request to pass to an external manager."""


@dataclass(frozen=True, slots=True)
class CallTier:
    """Call a method of the tier that is no job; a `CallEnded` answers."""

    call_id: int
    operation: TierOperation
    keys: tuple[OffloadKey, ...] = ()
    cursor: str | None = None
    """Where a listing continues; None: at its begin."""
    age_s: float | None = None
    """Minimum age of the blocks to list, in seconds; None: all are listed."""


TierEffect = StartJob | StartProbe | TouchBlocks | CallTier


class JobState(enum.Enum):
    """State of a job from its owner's view."""

    QUEUED = enum.auto()
    FLYING = enum.auto()
    ORPHANED = enum.auto()
    FINISHED = enum.auto()

    __hash__ = object.__hash__  # Enum's hash is a Python function, too slow for a look-up per job


@dataclass(frozen=True, slots=True)
class Launched:
    """The job was submitted to its tier."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class JobAbandoned:
    """The owner stopped waiting for the job."""

    job_id: JobId
    error: Exception | None


JobEvent = Launched | JobFinished | JobOverdue | JobAbandoned


@dataclass(slots=True, eq=False)
class JobRecord:
    """One job and its state.

    Attributes:
        job: The job.
        state: Its state.
        holds_slots: Whether the slots of an orphaned job are held until the copy ends: those of a
            promotion and, after a reset of the primary, of a cascade. Before a reset, a cascade's
            blocks are pinned instead.
    """

    job: JobMetadata
    holds_slots: bool
    state: JobState = JobState.QUEUED


def refused(job: JobMetadata, error: Exception) -> JobResult:
    """Return the failed result of a job that no tier accepted."""
    return JobResult(job.job_id, success=False, error=error)


_Handler = Callable[["Ledger", JobRecord, JobEvent], JobResult | None]


class Ledger:
    """The jobs of one tier, from acceptance to result.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self,
        slot_bytes: int,
        on_result: Callable[[JobMetadata, JobResult], object],
        on_release: Callable[[JobMetadata], object],
    ) -> None:
        """Create an empty ledger.

        Args:
            slot_bytes: Bytes of a block, for the bytes in results.
            on_result: Called with each job and its result when the result is created.
            on_release: Called with each orphaned job when its copy has ended.
        """
        self.slot_bytes = slot_bytes
        self._on_result = on_result
        self._on_release = on_release
        self._records: dict[JobId, JobRecord] = {}
        self.unreported_count = 0
        """Number of jobs whose result was not taken."""
        self.queued_count = 0
        """Number of jobs not yet submitted to the tier."""
        self.orphaned_count = 0
        """Number of jobs with a result whose copies still run."""
        self.ended: list[tuple[JobMetadata, JobResult]] = []
        """Jobs and their results, until `take_ended` returns them. Read-only."""
        self.released: list[JobRecord] = []
        """Orphaned jobs whose copies have ended, until `take_released` returns them. Read-only."""

    def accept(self, job: JobMetadata) -> bool:
        """Accept a job; it will get exactly one result.

        Returns:
            Whether to run the job. A job with an id already in use gets a failed result.
        """
        self.unreported_count += 1
        if job.job_id in self._records:
            duplicate = StateError(f"job id {job.job_id} is in use; job ids are never reused")
            result = refused(job, duplicate)
            self.ended.append((job, result))
            self._on_result(job, result)
            return False
        self._records[job.job_id] = JobRecord(job, job.is_promotion)
        self.queued_count += 1
        return True

    def handle(self, event: JobEvent) -> JobMetadata:
        """Apply an event to its job; return the job.

        Raises:
            IllegalTransitionError: The event is illegal in the job's state.
        """
        record = self._records.get(event.job_id)
        if record is None:
            raise IllegalTransitionError(f"{event!r}: the job is unknown, or has ended already")
        handler = self.TRANSITIONS[record.state, type(event)]
        if handler is None:
            raise IllegalTransitionError(f"{event!r}: the job is {record.state.name}")
        result = handler(self, record, event)
        if result is not None:
            self.ended.append((record.job, result))
            self._on_result(record.job, result)
        return record.job

    def take_ended(self) -> list[tuple[JobMetadata, JobResult]]:
        """Remove and return jobs with their results, oldest first."""
        ended, self.ended = self.ended, []
        self.unreported_count -= len(ended)
        for job, _ in ended:
            record = self._records.get(job.job_id)
            if record is not None and record.state is JobState.FINISHED:
                del self._records[job.job_id]
        return ended

    def take_released(self) -> list[JobRecord]:
        """Remove and return orphaned jobs whose copies have ended."""
        released, self.released = self.released, []
        return released

    @property
    def unfinished_count(self) -> int:
        """Number of jobs without a result."""
        return self.unreported_count - len(self.ended)

    def ids_in(self, *states: JobState) -> list[JobId]:
        """Return the ids of the jobs in any of these states, oldest first."""
        return [job_id for job_id, record in self._records.items() if record.state in states]

    def state_of(self, job_id: JobId) -> JobState | None:
        """Return the state of a job; None if it is unknown or its result was taken."""
        record = self._records.get(job_id)
        return None if record is None else record.state

    def job_of(self, job_id: JobId) -> JobMetadata:
        """Return a job whose `state_of` is not None."""
        return self._records[job_id].job

    def unreported(self) -> Iterator[JobMetadata]:
        """Iterate over the jobs whose result was not taken."""
        for record in self._records.values():
            if record.state in (JobState.QUEUED, JobState.FLYING):
                yield record.job
        yield from (job for job, _ in self.ended)

    def orphaned(self) -> Iterator[JobRecord]:
        """Iterate over the orphaned jobs whose result was taken and whose release was not."""
        ended = {job.job_id for job, _ in self.ended}
        late = [r for r in self._records.values() if r.state is JobState.ORPHANED]
        yield from (r for r in (*self.released, *late) if r.job.job_id not in ended)

    # -- transitions ----------------------------------------------------------------------------

    def _launch(self, record: JobRecord, _event: JobEvent) -> None:
        record.state = JobState.FLYING
        self.queued_count -= 1

    def _finish(self, record: JobRecord, event: JobEvent) -> JobResult:
        assert isinstance(event, JobFinished)  # noqa: S101 - for the type checker; see TRANSITIONS
        record.state = JobState.FINISHED
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
        assert isinstance(event, JobOverdue | JobAbandoned)  # noqa: S101 - see _finish
        record.state = JobState.ORPHANED
        self.orphaned_count += 1
        return JobResult(event.job_id, success=False, error=event.error, orphaned=True)

    def _give_up(self, record: JobRecord, event: JobEvent) -> JobResult:
        assert isinstance(event, JobAbandoned)  # noqa: S101 - see _finish
        record.state = JobState.FINISHED
        self.queued_count -= 1
        return JobResult(event.job_id, success=False, error=event.error)

    def _release(self, record: JobRecord, event: JobEvent) -> None:
        del self._records[event.job_id]
        self.orphaned_count -= 1
        self.released.append(record)
        self._on_release(record.job)

    def _stay(self, _record: JobRecord, _event: JobEvent) -> None:
        """Ignore the event: the job already has its result."""

    # Complete: one entry for each state and event; None marks illegal transitions.
    TRANSITIONS: ClassVar[dict[tuple[JobState, type[JobEvent]], _Handler | None]] = {
        (JobState.QUEUED, Launched): _launch,
        (JobState.QUEUED, JobFinished): None,
        (JobState.QUEUED, JobOverdue): None,
        (JobState.QUEUED, JobAbandoned): _give_up,
        (JobState.FLYING, Launched): None,
        (JobState.FLYING, JobFinished): _finish,
        (JobState.FLYING, JobOverdue): _orphan,
        (JobState.FLYING, JobAbandoned): _orphan,
        (JobState.ORPHANED, Launched): None,
        (JobState.ORPHANED, JobFinished): _release,
        # A job may be abandoned by the owner and become overdue in the tier, in either order.
        (JobState.ORPHANED, JobOverdue): _stay,
        (JobState.ORPHANED, JobAbandoned): _stay,
        (JobState.FINISHED, Launched): None,
        (JobState.FINISHED, JobFinished): None,
        (JobState.FINISHED, JobOverdue): None,
        # At shutdown the owner abandons all remaining jobs, finished ones included.
        (JobState.FINISHED, JobAbandoned): _stay,
    }
