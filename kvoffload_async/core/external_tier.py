"""The state of a tier that somebody else manages: it has an index and results of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvoffload_async.abc.events import JobOverdue, JobSettled
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.ledger import BeginRequest, FinishRequest, JobAbandoned, JobState
from kvoffload_async.core.tier_state import TierLookup, TierState
from kvoffload_async.errors import StateError, TierError, TierTimeoutError
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
)


class ExternalTierState(TierState):
    """A tier whose manager has an index and results of its own: it is asked, and it answers."""

    def __init__(
        self,
        name: str,
        source: TierLookup,
        *,
        breaker: BreakerSettings | None = None,
        medium: Medium = Medium.STORAGE,
        locality: Locality = Locality.LOCAL,
        backpressure: Backpressure | None = None,
    ) -> None:
        """Start empty; `source` is asked for every key, and its answer is not kept."""
        super().__init__(
            name,
            ExactIndex(),  # stays empty
            0,
            EventLog(medium, enabled=False),
            breaker=breaker,
            medium=medium,
            locality=locality,
            backpressure=backpressure,
        )
        self.knowledge = None
        self._source = source
        self._given_up: set[JobId] = set()

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool
    ) -> list[LookupResult]:
        """Return the manager's answers."""
        return self._source.lookup_many(keys, req_context, stop_at_miss=stop_at_miss)

    @property
    def is_exact(self) -> bool:
        """Never: the tier's contents are its own business."""
        return False

    def lacks(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return none: whether the tier lacks a key is not known."""
        return []

    def begin_request(self, ctx: ReqContext) -> None:
        """Tell the tier, ahead of the jobs of the request."""
        self.effects.append(BeginRequest(ctx))

    def finish_request(self, ctx: ReqContext) -> None:
        """Tell the tier, behind the jobs of the request."""
        self.effects.append(FinishRequest(ctx))

    def abandon_rest(self) -> list[JobId]:
        """Fail everything that has no result yet; a late one says that the copy has ended."""
        self._given_up.update(self.jobs.ids_in(JobState.FLYING))
        return super().abandon_rest()

    def give_up(self, submitted_by_s: float, timeout_s: float) -> list[TierTimeoutError]:
        """Fail the jobs that were submitted so early and have no result; return the errors.

        The memory of their copies stays theirs until a late result, or a release.
        """
        flying = takewhile(lambda job: job.submit_time <= submitted_by_s, self.jobs.unreported())
        errors = []
        for job in list(flying):
            if self.jobs.state_of(job.job_id) is not JobState.FLYING:
                continue
            errors.append(
                TierTimeoutError(
                    f"tier {self.name}: its manager has not reported the {_kind(job)} of "
                    f"{len(job.keys)} blocks for request {job.req_context.req_id} "
                    f"(job {job.job_id}) within {timeout_s} s"
                )
            )
            self._given_up.add(job.job_id)
            self.jobs.handle(JobOverdue(job.job_id, errors[-1]))
        return errors

    def answer(self, result: JobResult) -> None:
        """Take in a result that the tier has given.

        One of a job that was given up says that the copy has ended, unless it is `orphaned`.

        Raises:
            StateError: The job is not this tier's, or has a result; or keys that landed are not
                the job's.
        """
        if result.job_id in self._given_up:
            if not result.orphaned:
                self.release(result.job_id)
            return
        if self.jobs.state_of(result.job_id) is not JobState.FLYING:
            raise StateError(
                f"tier {self.name!r} reported job {result.job_id}, which is not its job"
            )
        keys = self.jobs.job_of(result.job_id).keys
        if not (result.successful_keys or frozenset()).issubset(keys):
            raise StateError(
                f"tier {self.name!r} reported keys for job {result.job_id} that are not the job's"
            )
        if result.orphaned:
            self.jobs.handle(JobAbandoned(result.job_id, result.error), given=result)
        else:
            self.jobs.handle(JobSettled(result.job_id), given=result)

    def fail(self, job_id: JobId, error: TierError) -> None:
        """Give a job its result where the tier has given none: its copy has ended, or never began.

        Raises:
            IllegalTransitionError: The job is not this tier's, or has a result.
        """
        self.jobs.handle(JobSettled(job_id, job_error=error))

    def release(self, job_id: JobId) -> None:
        """Take in that the copy of an orphaned job has ended.

        Raises:
            StateError: The job is not this tier's, or was not orphaned.
        """
        if self.jobs.state_of(job_id) is not JobState.ORPHANED:
            raise StateError(f"tier {self.name!r} released job {job_id}, which is not its job")
        self._given_up.discard(job_id)
        self.jobs.handle(JobSettled(job_id))


def _kind(job: JobMetadata) -> str:
    return "load" if job.is_promotion else "store"
