"""A tier manager that does not leave its jobs to the planner: a third party's, or a subclass's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

from kvoffload_async.core.breaker import BreakerSettings
from kvoffload_async.core.effects import BeginRequest, FinishRequest, StartJob, TouchBlocks
from kvoffload_async.core.foreign_tier import ForeignTierState
from kvoffload_async.core.ledger import JobState
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import TierUnavailableError, text_of
from kvoffload_async.facade.guard import GUARDED, TierGuard, wrong
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    ReqContext,
)

logger = logging.getLogger(__name__)

_LEFT_TO_THE_PLANNER: Final = (
    "on_request_finished",
    "lookup",
    "touch",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "get_released_jobs",
)


def is_foreign(manager: SecondaryTierManager) -> bool:
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
        state.knowledge, state.selective = own.index, own.selective


class ForeignTier:
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
        self.state = ForeignTierState(
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

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return what the manager says."""
        return self.guard.lookup(key, req_context)

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
            (result.disowned, bool),
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
