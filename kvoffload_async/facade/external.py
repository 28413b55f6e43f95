"""A tier manager that does not leave its jobs to the planner: a third party's, or a subclass's.

What it raises stays here: it is logged, and the hook that has called goes on.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, TypeGuard, TypeVar

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.core.external_tier import ExternalTierState
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.ledger import BeginRequest, FinishRequest, JobState, StartJob, TouchBlocks
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import StateError, TierUnavailableError, drop_tracebacks, text_of
from kvoffload_async.facade.secondary import SecondaryTierManager
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

T = TypeVar("T")

GUARDED: Final = (Exception, SystemExit)
"""A KeyboardInterrupt on the owner's thread is the user's."""
_LOG_INTERVAL_S: Final = 60.0


class TierGuard:
    """Calls the methods of a tier's manager, a third party's or not; none of them raises here.

    What a method has given before it raised is kept. Errors of one method are logged at most once a
    minute, with the number of those that were not.

    Thread: owner.
    """

    def __init__(
        self, manager: SecondaryTierManager, state: TierState, clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._state = state
        self._clock = clock
        self._logged_at_s: dict[str, float] = {}
        self._not_logged: dict[str, int] = {}

    def wants_whole_requests(self, ctx: ReqContext) -> bool:
        """Tell the tier of a request; return whether it wants all of its blocks."""
        try:
            return self._manager.on_new_request(ctx).policy is OffloadPolicy.REQUEST_LEVEL
        except GUARDED as error:
            self.complain("on_new_request", error)
            return False

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Return what the tier says; a tier that fails has nothing."""
        try:
            answer: object = self._manager.lookup(key, ctx)
            if isinstance(answer, LookupResult):
                return answer
            raise wrong(answer)
        except GUARDED as error:
            self._state.health.lookup_failed(error)
            self.complain("lookup", error)
            return LookupResult.MISS

    def touch(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        try:
            self._manager.touch(keys, ctx)
        except GUARDED as error:
            self.complain("touch", error)

    def finish_request(self, ctx: ReqContext) -> None:
        try:
            self._manager.on_request_finished(ctx)
        except GUARDED as error:
            self.complain("on_request_finished", error)

    def finished_jobs(self) -> Iterator[JobResult]:
        """Yield what `get_finished_jobs` gives; a wrong one is still to be found."""
        return self._each("get_finished_jobs", is_fault=True)

    def released_jobs(self) -> Iterator[int]:
        """Yield what `get_released_jobs` gives; a wrong one is still to be found."""
        return self._each("get_released_jobs", is_fault=True)

    def end_step(self, context: ScheduleEndContext | None) -> None:
        try:
            self._manager.on_schedule_end(context)
        except GUARDED as error:
            self.complain("on_schedule_end", error, is_fault=True)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the tier's events."""
        for event in self._each("take_events"):
            if isinstance(event, OffloadingEvent):
                yield event
            else:
                self.complain("take_events", wrong(event))

    def has_pending_work(self) -> bool:
        """Ask the tier; one that fails is not waited for."""
        try:
            return bool(self._manager.has_pending_work())
        except GUARDED as error:
            self.complain("has_pending_work", error)
            return False

    def drain_jobs(self, timeout_s: float) -> None:
        """Wait for the tier's jobs; what runs on then is given up."""
        try:
            if self._manager.drain_jobs(timeout_s):
                return
        except GUARDED as error:
            self.complain("drain_jobs", error, is_fault=True)
        self.abandon_jobs()

    def abandon_jobs(self) -> None:
        """Give up the tier's jobs that have no result yet."""
        try:
            self._manager.abandon_jobs()
        except GUARDED as error:
            self.complain("abandon_jobs", error, is_fault=True)

    def shutdown(self, timeout_s: float) -> CloseReport:
        """Shut the tier down."""
        try:
            report: object = self._manager.shutdown(timeout_s)
        except GUARDED as error:
            failure = error if isinstance(error, Exception) else wrong(error)
            drop_tracebacks(failure)
            return CloseReport(error=failure)
        if report is None:  # as vLLM's tiers do
            return CloseReport()
        return report if _is_report(report) else CloseReport(error=wrong(report))

    def complain(self, method: str, error: BaseException, *, is_fault: bool = False) -> None:
        """Log an error of the manager's; count it if it says nothing of its jobs any more."""
        if is_fault:
            self._state.health.reports_failed(error)
        now_s = self._clock()
        if now_s - self._logged_at_s.get(method, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            self._not_logged[method] = self._not_logged.get(method, 0) + 1
            return
        self._logged_at_s[method] = now_s
        more = self._not_logged.pop(method, 0)
        again = f" ({more} times more since it was logged last)" if more else ""
        name = self._state.name
        # As text: a log record that kept the error would keep its frames, and what they work on.
        trace = "".join(traceback.format_exception(error))
        logger.error("tier %s: %s failed%s: %s", name, method, again, trace)
        drop_tracebacks(error)

    def _each(self, method: str, *, is_fault: bool = False) -> Iterator[Any]:
        try:
            yield from getattr(self._manager, method)()
        except GUARDED as error:
            self.complain(method, error, is_fault=is_fault)


def _is_report(report: object) -> TypeGuard[CloseReport]:
    """Tell whether all of a report is what it must be."""
    if not isinstance(report, CloseReport):
        return False
    jobs: object = report.unfinished_jobs
    error: object = report.error
    return (
        isinstance(jobs, Collection)
        and all(isinstance(job_id, int) for job_id in jobs)
        and isinstance(error, Exception | None)
    )


def wrong(given: object) -> StateError:
    """Return what is wrong with what a tier has given."""
    return StateError(f"the tier broke its contract with a {type(given).__name__}")


_LEFT_TO_THE_PLANNER: Final = (
    "on_request_finished",
    "lookup",
    "touch",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "get_released_jobs",
)


def is_external(manager: SecondaryTierManager) -> bool:
    """Tell whether a manager has a say in its jobs, lookups or results: it overrides a method."""
    return any(
        getattr(type(manager), name) is not getattr(SecondaryTierManager, name)
        for name in _LEFT_TO_THE_PLANNER
    )


def share_knowledge(state: TierState, manager: SecondaryTierManager) -> None:
    """Have the planner see what a manager's own state knows; its probes count there."""
    own = getattr(manager, "tier_state", None)
    if isinstance(own, TierState):
        own.health = state.health
        state.knowledge, state.cost_gated = own.index, own.cost_gated


class ExternalTier:
    """Carries effects to such a manager, and its results back; no error of its escapes.

    A job that it does not report within twice its `io_timeout_s` fails, and is overdue: its slots
    stay out of use, and count against the tier's share, until the manager reports or releases it.

    Thread: owner.

    Attributes:
        state: What the planner drives.
        guard: Through which the manager is called.
    """

    def __init__(
        self, manager: SecondaryTierManager, breaker: BreakerSettings, clock: Callable[[], float]
    ) -> None:
        self.state = ExternalTierState(
            manager.tier_type,
            self,
            breaker=breaker,
            medium=manager.medium,
            locality=manager.locality,
            backpressure=manager.backpressure_detector,
        )
        self.guard = TierGuard(manager, self.state, clock)
        self._manager = manager
        self._clock = clock
        share_knowledge(self.state, manager)

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool
    ) -> list[LookupResult]:
        """Ask the manager for each key."""
        answers: list[LookupResult] = []
        for key in keys:
            answers.append(self.guard.lookup(key, req_context))
            if stop_at_miss and answers[-1] is LookupResult.MISS:
                break
        return answers

    def poll_tier(self) -> None:
        """Have the state hold what the manager has to report; what is wrong is only logged."""
        for result in self.guard.finished_jobs():
            try:
                self.state.answer(_checked(result))
            except GUARDED as error:
                self.guard.complain("get_finished_jobs", error)
                self._fail_job_of(result, error)
        for job_id in self.guard.released_jobs():
            try:
                self.state.release(job_id)
            except GUARDED as error:
                self.guard.complain("get_released_jobs", error)
        # Its own deadline comes first: it may say more, and is reported a step later.
        timeout_s = 2 * self._manager.io_timeout_s
        for late in self.state.give_up(self._clock() - timeout_s, timeout_s):
            logger.error("%s", late)

    def hand_over(self) -> None:
        """Execute what the planner wants done; a job that is refused has its result at once."""
        for effect in self.state.take_effects():
            match effect:
                case StartJob(job):
                    self._submit(job)
                case TouchBlocks(keys, ReqContext() as ctx):
                    self.guard.touch(keys, ctx)
                case BeginRequest(ctx):
                    self.guard.wants_whole_requests(ctx)
                case FinishRequest(ctx):  # pragma: no branch - there are no other effects
                    self.guard.finish_request(ctx)

    def _submit(self, job: JobMetadata) -> None:
        try:
            if job.is_promotion:
                self._manager.submit_load(job)
            else:
                self._manager.submit_store(job)
        except GUARDED as cause:
            self._fail(job.job_id, f"{self.state.name} refused the job", cause)

    def _fail_job_of(self, report: object, cause: BaseException) -> None:
        """Give the job of a report that cannot be read its result, if it is known which it is."""
        job_id = getattr(report, "job_id", None)
        if isinstance(job_id, int) and self.state.jobs.state_of(job_id) is JobState.FLYING:
            self._fail(job_id, f"{self.state.name} reported nonsense", cause)

    def _fail(self, job_id: JobId, what: str, cause: BaseException) -> None:
        error = TierUnavailableError(f"{what}: {text_of(cause)}")
        error.__cause__ = cause
        self.state.fail(job_id, error)


def _checked(result: object) -> JobResult:
    """Return what a manager has reported, if all of it is what it must be.

    Raises:
        StateError: It is not.
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
    raise wrong(result)


def _is_figure(value: object) -> bool:
    """Tell whether it is None or a number that can be added up and written as JSON."""
    if value is None:
        return True
    return isinstance(value, int | float) and 0 <= value < math.inf
