"""The owner's side of one tier: job ledger, key index, and the effects for the tier's actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvoffload_async.abc.events import (
    BlocksAppeared,
    BlocksEvicted,
    JobOverdue,
    JobSettled,
    ProbeAnswered,
    TierEvent,
)
from kvoffload_async.core.effects import PortEffect, StartJob, StartProbe, TouchBlocks
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import KeyIndex
from kvoffload_async.core.ledger import JobAbandoned, JobState, Launched, Ledger
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    StateError,
    TierClosedError,
)
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
)

_GONE = (BlockMissingError, CorruptBlockError)


class TierPort:
    """Accepts jobs and lookups for one tier; effects go out, the tier's events come in.

    Effects pile up until `take_effects`, which also launches the jobs among them: until then a
    job is certainly untouched by the tier.

    Thread: owner.
    """

    def __init__(self, index: KeyIndex, slot_bytes: int, events: EventLog) -> None:
        """Start empty.

        Args:
            index: What is known of the tier's contents; owned by this object from now on.
            slot_bytes: Bytes a row.
            events: Where changes of the tier's contents are announced.
        """
        self.index = index
        self.ledger = Ledger(slot_bytes)
        self._events = events
        self._effects: list[PortEffect] = []
        self._closed = False

    def submit(self, job: JobMetadata) -> None:
        """Accept a job; its one result will come out of `take_results`.

        A job that comes after `close` is answered at once, with a failure, and so is one whose
        id is in use.

        Raises:
            StateError: Lengths differ; the job was not accepted.
        """
        # All else is the actor's to find: a look at every key or slot takes longer than the rest.
        if len(job.block_ids) != len(job.keys):
            raise StateError(
                f"job {job.job_id} has {len(job.keys)} keys but {len(job.block_ids)} block_ids"
            )
        if self._closed:
            self.ledger.refuse(job, TierClosedError(f"job {job.job_id} came after the shutdown"))
        elif self.ledger.accept(job):
            self._effects.append(StartJob(job))

    def lookup(self, key: OffloadKey, req_id: str) -> LookupResult:
        """Return HIT, MISS or RETRY, from memory."""
        return self.index.lookup(key, req_id)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Pass a use of blocks on to the tier."""
        if keys and not self._closed:
            self._effects.append(TouchBlocks(tuple(keys)))

    def end_step(self) -> None:
        """Queue the probe for what was asked in this step."""
        if self._closed:
            return
        probe: StartProbe | None = self.index.next_probe()
        if probe is not None:
            self._effects.append(probe)

    @property
    def has_effects(self) -> bool:
        """Whether `take_effects` would return anything."""
        return bool(self._effects)

    def take_effects(self) -> list[PortEffect]:
        """Detach the effects; the jobs among them now belong to the tier until they settle."""
        effects, self._effects = self._effects, []
        for effect in effects:
            if isinstance(effect, StartJob):
                self.ledger.handle(Launched(effect.job.job_id))
        return effects

    def handle(self, event: TierEvent) -> None:
        """Apply what happened in the tier.

        Raises:
            IllegalTransitionError: The tier's actor reported a job twice, or a foreign one.
        """
        match event:
            case JobSettled():
                self._settle(event)
            case JobOverdue():
                job = self.ledger.handle(event)
                if job.is_promotion:
                    self.index.vanished(job.keys, surely=False)
            case ProbeAnswered():
                self.index.answered(event.generation, event.present)
            case BlocksAppeared():
                self.index.appeared(event.keys)
                self._events.add(event.keys, removed=False)
            case BlocksEvicted():  # pragma: no branch - no other event exists
                self.index.vanished(event.keys, surely=True)
                self._events.add(event.keys, removed=True)

    def close(self) -> None:
        """Stop the intake; jobs that were not handed over fail now, the others go on."""
        self._closed = True
        self._effects.clear()
        self._abandon(JobState.QUEUED)

    def abandon_rest(self) -> list[JobId]:
        """Fail everything that has no result yet; return the jobs whose copies still run."""
        self._effects = [e for e in self._effects if not isinstance(e, StartJob)]
        self._abandon(JobState.QUEUED, JobState.FLYING)
        return self.ledger.ids_in(JobState.DISOWNED)

    def take_results(self) -> list[JobResult]:
        """Detach the results since the last call."""
        return self.ledger.take_results()

    def take_released(self) -> list[JobId]:
        """Detach the disowned jobs whose memory became free since the last call."""
        return self.ledger.take_released()

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Detach what appeared in and disappeared from the tier since the last call."""
        return self._events.take(lambda _key: False)

    @property
    def has_pending_work(self) -> bool:
        """Whether a job has no result yet, a result was not taken, or a probe is outstanding.

        Nobody waits for a probe once the port is closed: it may never have been started.
        """
        return bool(
            self.ledger.unfinished_count
            or self.ledger.has_results
            or (self.index.is_waiting and not self._closed)
        )

    def _settle(self, event: JobSettled) -> None:
        job = self.ledger.handle(event)
        if event.job_error is not None:
            if job.is_promotion:
                self.index.vanished(job.keys, surely=False)
            return
        failures = event.failures
        if not job.is_promotion:
            stored: Sequence[OffloadKey] = job.keys
            if failures:
                stored = [key for i, key in enumerate(job.keys) if i not in failures]
            self.index.appeared(stored)
            self._events.add(stored, removed=False)
            return
        if not failures:
            return
        gone = [job.keys[i] for i, error in failures.items() if isinstance(error, _GONE)]
        self.index.vanished(gone, surely=True)
        self._events.add(gone, removed=True)
        self.index.vanished(
            [job.keys[i] for i, error in failures.items() if not isinstance(error, _GONE)],
            surely=False,
        )

    def _abandon(self, *states: JobState) -> None:
        for job_id in self.ledger.ids_in(*states):
            self.ledger.handle(
                JobAbandoned(job_id, TierClosedError(f"job {job_id} was ended by the shutdown"))
            )
