"""A tier manager that does not leave its jobs to the planner: a third party's, or a subclass's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvoffload_async.core.breaker import Breaker
from kvoffload_async.core.effects import BeginRequest, FinishRequest, StartJob, TouchBlocks
from kvoffload_async.core.foreign_tier import ForeignTierState
from kvoffload_async.core.ledger import refused
from kvoffload_async.errors import StateError, TierUnavailableError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.types import JobMetadata, ReqContext

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


class ForeignTier:
    """Carries effects to such a manager, and its results back.

    Thread: owner.

    Attributes:
        state: What the planner drives.
    """

    def __init__(self, manager: SecondaryTierManager, breaker: Breaker) -> None:
        self.state = ForeignTierState(
            manager.tier_type,
            manager,
            breaker=breaker,
            medium=manager.medium,
            locality=manager.locality,
            backpressure=manager.backpressure_detector,
        )
        self._manager = manager

    def poll_tier(self) -> None:
        """Have the state hold what the manager has to report.

        Raises:
            StateError: Something was reported that is no job of this tier's; all else is taken in.
        """
        wrong: list[StateError] = []
        for result in self._manager.get_finished_jobs():
            try:
                self.state.answer(result)
            except StateError as error:
                wrong.append(error)
        for job_id in self._manager.get_released_jobs():
            try:
                self.state.release(job_id)
            except StateError as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]

    def hand_over(self) -> None:
        """Execute what the planner wants done; a job that is refused has its result at once."""
        for effect in self.state.take_effects():
            match effect:
                case StartJob(job):
                    self._submit(job)
                case TouchBlocks(keys, ReqContext() as ctx):
                    self._tell("a use of blocks", self._manager.touch, keys, ctx)
                case BeginRequest(ctx):
                    self._tell(f"request {ctx.req_id}", self._manager.on_new_request, ctx)
                case FinishRequest(ctx):  # pragma: no branch - there are no other effects
                    what = f"the end of request {ctx.req_id}"
                    self._tell(what, self._manager.on_request_finished, ctx)

    def _tell(self, what: str, hook: Callable[..., object], *args: object) -> None:
        try:
            hook(*args)
        except Exception:
            # The effects behind it have left the state: they must be carried out all the same.
            logger.exception("tier %s: %s", self._manager.tier_type, what)

    def _submit(self, job: JobMetadata) -> None:
        try:
            if job.is_promotion:
                self._manager.submit_load(job)
            else:
                self._manager.submit_store(job)
        except Exception as cause:  # noqa: BLE001 - third-party code; it becomes the job's result
            error = TierUnavailableError(f"{self._manager.tier_type} refused the job: {cause}")
            error.__cause__ = cause
            self.state.answer(refused(job, error))
