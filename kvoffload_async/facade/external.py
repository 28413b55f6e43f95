"""External managers: classes outside this package that implement `SecondaryTierManager`'s contract.

`ExternalLink` adapts such a manager to the planner, which drives an ordinary `TierState`. No error
of the manager escapes: it is logged, and the hook that called the manager continues.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, TypeGuard

from kvoffload_async.abc.events import CallEnded, JobFinished, JobOverdue
from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.core.counters import Figures
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import AskedIndex
from kvoffload_async.core.ledger import CallTier, JobState, StartJob, TouchBlocks
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import (
    StateError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    drop_tracebacks,
    remedy_of,
    text_of,
)
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)

logger = logging.getLogger(__name__)

GUARDED: Final = (Exception, SystemExit)
"""Errors of a manager that are caught; KeyboardInterrupt on the owner's thread is not."""

_CONTRACT: Final = (
    "on_new_request",
    "on_request_finished",
    "lookup",
    "touch",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "get_released_jobs",
    "on_schedule_end",
    "has_pending_work",
    "take_events",
    "drain_jobs",
    "abandon_jobs",
    "shutdown",
)


def is_external(manager: SecondaryTierManager) -> bool:
    """Return whether a manager overrides a method of the `SecondaryTierManager` contract."""
    return any(
        getattr(type(manager), name) is not getattr(SecondaryTierManager, name)
        for name in _CONTRACT
    )


def closed(manager: SecondaryTierManager, timeout_s: float | None = None) -> CloseReport:
    """Shut a manager down; never raises, but returns the manager's error in the report.

    Args:
        manager: The manager.
        timeout_s: Seconds for running jobs to end; None: the manager's own.
    """
    try:
        report: object = manager.shutdown(timeout_s)
    except GUARDED as error:
        failure = error if isinstance(error, Exception) else _broken(error)
        drop_tracebacks(failure)
        return CloseReport(error=failure)
    if report is None:  # vLLM's tiers return no report
        return CloseReport()
    return report if _is_report(report) else CloseReport(error=_broken(report))


class ExternalLink:
    """Connects an external manager to a `TierState`, with the interface of a `TierLink`.

    `flush` makes the manager's calls, `pump` validates its reports and applies them to the state,
    and a lookup in the state's index calls the manager's `lookup`. `on_new_request` is the
    manager's first call for a request; `on_request_finished` follows the last job.

    A job that the manager does not report within twice its `io_timeout_s` fails as overdue: its
    slots stay reserved, and count against the tier's share, until the manager reports or releases
    it. Errors of one method are logged at most once a minute.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        state: The state that the planner drives.
        manager: The external manager.
        inbox: Never empty, so that every step polls the manager, which sends no notifications.
    """

    inbox: Final = ("unknown",)

    def __init__(
        self,
        manager: SecondaryTierManager,
        name: str,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        """Connect manager and state, without calling the manager.

        Args:
            manager: The manager; owned by the link.
            name: Name of the tier in its events.
            slot_bytes: Bytes of a row of the primary.
            clock: Monotonic seconds.
        """
        self.manager = manager
        self._name = name
        self._clock = clock
        self._live: set[ReqContext] = set()
        self._ended: list[ReqContext] = []
        self._orphaned: set[JobId] = set()
        """Jobs that the manager reported as orphaned; each ends when the manager releases it."""
        self._errors: dict[str, ErrorLog] = {}
        """Name of a manager's method -> log of the errors that the method raised."""
        self.state = TierState(
            manager.tier_type,
            AskedIndex(self._lookup, self._ended.append),
            slot_bytes,
            EventLog(manager.medium, manager.locality, enabled=False, ownership=name),
            backpressure=manager.backpressure_detector,
            remedies=manager.remedies,
        )

    # -- calls of the manager -------------------------------------------------------------------

    def begin_request(self, ctx: ReqContext) -> bool:
        """Announce a request to the manager; return whether it wants all blocks of the request."""
        if self._ended:  # report ended requests first: this one may have the same id
            self.flush()
        return self._begin(ctx)

    def flush(self) -> None:
        """Execute the queued effects as calls of the manager; a refused job fails at once."""
        if self.state.effects:
            for effect in self.state.take_effects():
                match effect:
                    case StartJob(job):
                        self._submit(job)
                    case CallTier(call_id, operation):
                        error = TierError(f"its manager has no operation {operation!r}")
                        self.state.handle(CallEnded(call_id, operation, error=error))
                    case TouchBlocks(keys, ReqContext() as ctx):  # pragma: no branch - no others
                        self._begin(ctx)
                        self._call("touch", keys, ctx)
        ended = tuple(self._ended)
        self._ended.clear()
        for ctx in ended:
            if ctx in self._live:
                self._live.remove(ctx)
                self._call("on_request_finished", ctx)

    def end_step(self, context: ScheduleEndContext | None) -> None:
        """Execute the step's queued effects, then call the manager's `on_schedule_end`."""
        self.flush()
        self._call("on_schedule_end", context, is_fault=True)

    def take_events(self, _max_keys: int | None = None) -> Iterator[OffloadingEvent]:
        """Yield the manager's events, with the tier's name."""
        for event in self._each("take_events"):
            if isinstance(event, OffloadingEvent):
                yield replace(event, ownership=self._name)
            else:
                self._complain("take_events", _broken(event))

    def announce_anew(self) -> None:
        """Call the manager's `announce_anew`."""
        self._call("announce_anew")

    def has_pending_work(self) -> bool:
        """Return whether calls are queued, a job is unfinished, or the manager reports work."""
        if self._ended or self.state.effects or self.state.has_pending_work:
            return True
        try:
            return bool(self.manager.has_pending_work())
        except GUARDED as error:
            self._complain("has_pending_work", error)
            return False

    def drain(self, timeout_s: float) -> bool:
        """Wait until all jobs have results; on timeout, fail unfinished jobs and return False."""
        self.flush()
        try:
            if self.manager.drain_jobs(timeout_s):
                return True
        except GUARDED as error:
            self._complain("drain_jobs", error, is_fault=True)
        self.abandon()
        return False

    def abandon(self) -> None:
        """Call the manager's `abandon_jobs`, which fails the jobs without a result."""
        self._call("abandon_jobs", is_fault=True)

    def close(self, timeout_s: float) -> CloseReport:
        """Shut the manager down; never raises."""
        self.flush()
        return closed(self.manager, timeout_s)

    def stats(self, taken: Figures) -> TierStatistics:
        """Return the planner's statistics of the tier. Thread-safe."""
        return self.state.statistics(taken)

    # -- reports of the manager -----------------------------------------------------------------

    def pump(self) -> None:
        """Apply the manager's reports; an invalid report is logged and fails its job."""
        for result in self._each("get_finished_jobs", is_fault=True):
            try:
                self._take(_validated(result))
            except GUARDED as error:
                self._complain("get_finished_jobs", error)
                self._fail_job_of(result, error)
        for job_id in self._each("get_released_jobs", is_fault=True):
            try:
                self._release(job_id)
            except GUARDED as error:
                self._complain("get_released_jobs", error)
        self._expire()

    def _take(self, result: JobResult) -> None:
        """Apply a job's result; for a job already failed as overdue, record only the copy's end.

        Raises:
            StateError: The job is unknown or already has a result, or the keys are not the job's.
        """
        job_id, jobs = result.job_id, self.state.jobs
        state = jobs.state_of(job_id)
        was_given_up = state is JobState.ORPHANED and job_id not in self._orphaned
        if state is not JobState.FLYING and not was_given_up:
            raise StateError(
                f"tier {self.state.name!r} reported job {job_id}, which is not its job"
            )
        job = jobs.job_of(job_id)
        landed = result.successful_keys or frozenset()
        if not was_given_up and not landed.issubset(job.keys):
            raise StateError(
                f"tier {self.state.name!r} reported keys for job {job_id} that are not the job's"
            )
        if result.orphaned:
            self._orphaned.add(job_id)
            self.state.handle(JobOverdue(job_id, result.error))
        else:
            self.state.handle(self._finished(job, result, landed))

    def _finished(
        self, job: JobMetadata, result: JobResult, landed: Collection[OffloadKey]
    ) -> JobFinished:
        seconds = result.transfer_time
        if seconds is None:
            seconds = max(0.0, self._clock() - job.submit_time)
        queue_s = None if result.queue_time is None else min(result.queue_time, seconds)
        if result.success:
            return JobFinished(job.job_id, seconds=seconds, queue_s=queue_s)
        error = result.error or TierUnavailableError(
            f"tier {self.state.name}: its manager reported job {job.job_id} as failed without an "
            "error"
        )
        failed = [index for index, key in enumerate(job.keys) if key not in landed]
        if 0 < len(failed) < len(job.keys):
            failures = dict.fromkeys(failed, error)
            return JobFinished(job.job_id, failures, seconds=seconds, queue_s=queue_s)
        return JobFinished(job.job_id, job_error=error, seconds=seconds, queue_s=queue_s)

    def _release(self, job_id: JobId) -> None:
        """Mark the copy of an orphaned job as ended; raises StateError for an unknown job."""
        jobs = self.state.jobs
        if jobs.state_of(job_id) is not JobState.ORPHANED:
            raise StateError(
                f"tier {self.state.name!r} released job {job_id}, which is not its job"
            )
        self._orphaned.discard(job_id)
        seconds = max(0.0, self._clock() - jobs.job_of(job_id).submit_time)
        self.state.handle(JobFinished(job_id, seconds=seconds))

    def _expire(self) -> None:
        """Fail the jobs whose deadline has passed."""
        # Twice the manager's own timeout: by then, its report should have arrived, with the cause.
        timeout_s = 2 * self.manager.io_timeout_s
        submitted_by_s = self._clock() - timeout_s
        jobs = self.state.jobs
        for job in list(takewhile(lambda j: j.submit_time <= submitted_by_s, jobs.unreported())):
            if jobs.state_of(job.job_id) is not JobState.FLYING:
                continue
            error = TierTimeoutError(
                f"tier {self.state.name}: its manager has not reported the "
                f"{'load' if job.is_promotion else 'store'} of {len(job.keys)} blocks for request "
                f"{job.req_context.req_id} (job {job.job_id}) within {timeout_s} s"
            )
            logger.error("%s (%s)", error, remedy_of(error, self.state.remedies))
            self.state.handle(JobOverdue(job.job_id, error))

    # -- internal -------------------------------------------------------------------------------

    def _lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Return the manager's answer, or MISS if the call fails."""
        try:
            answer: object = self.manager.lookup(key, ctx)
            if isinstance(answer, LookupResult):
                return answer
            raise _broken(answer)
        except GUARDED as error:
            self.state.health.lookup_failed(error)
            self._complain("lookup", error)
            return LookupResult.MISS

    def _begin(self, ctx: ReqContext) -> bool:
        """Begin a request unless it has begun; return whether the manager wants all its blocks."""
        if ctx in self._live:
            return False
        self._live.add(ctx)
        try:
            return self.manager.on_new_request(ctx).policy is OffloadPolicy.REQUEST_LEVEL
        except GUARDED as error:
            self._complain("on_new_request", error)
            return False

    def _submit(self, job: JobMetadata) -> None:
        self._begin(job.req_context)
        try:
            if job.is_promotion:
                self.manager.submit_load(job)
            else:
                self.manager.submit_store(job)
        except GUARDED as cause:
            self._fail(job.job_id, "refused the job", cause)

    def _fail_job_of(self, report: object, cause: BaseException) -> None:
        """Fail the job of an invalid report, if the report names a job."""
        job_id = getattr(report, "job_id", None)
        if isinstance(job_id, int) and self.state.jobs.state_of(job_id) is JobState.FLYING:
            self._fail(job_id, "sent an invalid report", cause)

    def _fail(self, job_id: JobId, what: str, cause: BaseException) -> None:
        error = TierUnavailableError(f"{self.state.name} {what}: {text_of(cause)}")
        error.__cause__ = cause
        self.state.handle(JobFinished(job_id, job_error=error))

    def _call(self, method: str, *arguments: object, is_fault: bool = False) -> None:
        """Call a method of the manager and ignore the return value."""
        try:
            getattr(self.manager, method)(*arguments)
        except GUARDED as error:
            self._complain(method, error, is_fault=is_fault)

    def _each(self, method: str, *, is_fault: bool = False) -> Iterator[Any]:
        """Yield the items that a method of the manager returns, until it raises."""
        try:
            yield from getattr(self.manager, method)()
        except GUARDED as error:
            self._complain(method, error, is_fault=is_fault)

    def _complain(self, method: str, error: BaseException, *, is_fault: bool = False) -> None:
        """Log an error of the manager; with `is_fault`, count it as a fault of the tier too."""
        if is_fault:
            self.state.health.reports_failed(error)
        if method not in self._errors:
            what = f"tier {self.state.name}: {method}"
            self._errors[method] = ErrorLog(logger, what, self._clock)
        self._errors[method].note(error)


def _is_report(report: object) -> TypeGuard[CloseReport]:
    """Return whether an object is a `CloseReport` whose fields have the right types."""
    if not isinstance(report, CloseReport):
        return False
    jobs: object = report.unfinished_jobs
    error: object = report.error
    return (
        isinstance(jobs, Collection)
        and all(isinstance(job_id, int) for job_id in jobs)
        and isinstance(error, Exception | None)
    )


def _broken(given: object) -> StateError:
    """Return the error for an object of the wrong type that a manager has returned."""
    return StateError(f"the tier broke its contract with a {type(given).__name__}")


def _validated(result: object) -> JobResult:
    """Return a manager's result if it is valid.

    Raises:
        StateError: It is not a `JobResult`, or a field has a wrong type or an invalid value.
    """
    if isinstance(result, JobResult):
        fields: tuple[tuple[object, Any], ...] = (
            (result.job_id, int),
            (result.success, bool),
            (result.successful_keys, frozenset | None),
            (result.error, Exception | None),
            (result.orphaned, bool),
        )
        figures = (result.transfer_time, result.transfer_bytes, result.queue_time)
        if all(isinstance(value, allowed) for value, allowed in fields) and all(
            map(_is_figure, figures)
        ):
            return result
    raise _broken(result)


def _is_figure(value: object) -> bool:
    """Return whether a value is None, or a number that can be summed and written as JSON."""
    if value is None:
        return True
    return isinstance(value, int | float) and 0 <= value < math.inf
