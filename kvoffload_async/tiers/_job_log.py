"""Log lines for a tier's jobs, with tier, request, blocks, time and remedy.

A full tier may refuse every store for a long time: this is logged at a limited rate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvoffload_async.error_log import LogRate
from kvoffload_async.errors import (
    BlockMissingError,
    BusyError,
    JobNotStartedError,
    Remedies,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    drop_tracebacks,
    remedy_of,
    text_of,
)
from kvoffload_async.tiers._environment import log_trace
from kvoffload_async.types import JobMetadata

logger = logging.getLogger(__name__)

_EXPECTED = (BlockMissingError, BusyError, TierClosedError)
"""Not faults of the tier: another process, back-pressure, shutdown."""


class JobLog:
    """Logs the ends of jobs: errors at level ERROR, everything else at DEBUG.

    Stores that a full tier refuses, and jobs that were not started in time, are logged once a
    minute, because there may be many for a long time. An overdue job is logged as an error at its
    deadline, and not again when its copy ends.

    Thread: loop.
    """

    def __init__(self, name: str, remedies: Remedies) -> None:
        """Start without jobs; `name` is the tier's `type`."""
        self._name = name
        self._remedies = remedies
        self._limited = {TierFullError: LogRate(), JobNotStartedError: LogRate()}
        self._overdue: set[int] = set()

    def overdue(self, job: JobMetadata, timeout_s: float) -> TierTimeoutError:
        """Log that a running job's deadline has passed; return the error."""
        self._overdue.add(job.job_id)
        error = self.timeout(job, timeout_s)
        logger.error(
            "%s; its copy continues and keeps its slots until it ends%s", error, self._remedy(error)
        )
        return error

    def timeout(self, job: JobMetadata, timeout_s: float) -> TierTimeoutError:
        """Return the error for a job whose deadline has passed."""
        return TierTimeoutError(
            f"tier {self._name}: {described(job)} timed out after {timeout_s} s"
        )

    def ended(
        self,
        job: JobMetadata,
        failures: Mapping[int, TierError],
        error: TierError | None,
        *,
        seconds: float,
        now_s: float,
    ) -> None:
        """Log that a job no longer accesses memory; drop its errors' frames."""
        was_overdue = job.job_id in self._overdue
        self._overdue.discard(job.job_id)
        first = error or next(iter(failures.values()), None)
        if first is None:
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("tier %s: %s ended after %.4f s", self._name, described(job), seconds)
            return
        if (refusals := self._limited.get(type(first))) is not None:
            more = refusals.note(now_s)
            is_error = more is not None and not was_overdue
        else:
            more, is_error = "", not was_overdue and not isinstance(first, _EXPECTED)
        if first.__cause__ is not None:
            log_trace(first)
        for raised in (error, *failures.values()):
            drop_tracebacks(raised)
        logger.log(
            logging.ERROR if is_error else logging.DEBUG,
            "tier %s: %s failed after %.4f s: %s%s%s",
            self._name,
            described(job),
            seconds,
            text_of(first),
            more or "",
            self._remedy(first) if is_error else "",
        )

    def _remedy(self, error: TierError) -> str:
        text = remedy_of(error, self._remedies)
        return f" ({text})" if text else ""


def described(job: JobMetadata) -> str:
    """Describe a job in one phrase."""
    what = "load" if job.is_promotion else "store"
    return (
        f"{what} of {len(job.keys)} blocks for request {job.req_context.req_id} (job {job.job_id})"
    )
