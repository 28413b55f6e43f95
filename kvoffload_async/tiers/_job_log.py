"""What the log says of a tier's jobs: a line each, with tier, request, blocks, time and remedy.

A tier without room may refuse every store for a long time: that is said once in a while.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from kvoffload_async.errors import (
    BlockMissingError,
    BusyError,
    CorruptBlockError,
    RepeatedKeyError,
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownSlotError,
    drop_tracebacks,
    text_of,
)
from kvoffload_async.tiers._environment import log_trace
from kvoffload_async.types import JobMetadata

INTERVAL_S: Final = 60.0
"""How long nothing more is said."""


class Refusals:
    """Counts what a tier has refused for one reason. Thread: loop."""

    def __init__(self) -> None:
        self._said_s: float | None = None
        self._unsaid = 0

    def note(self, now_s: float) -> str | None:
        """Count one; return what its line in the log ends with, or None if there is to be none."""
        if self._said_s is not None and now_s < self._said_s + INTERVAL_S:
            self._unsaid += 1
            return None
        self._said_s, unsaid, self._unsaid = now_s, self._unsaid, 0
        return f" ({unsaid} more since the last time this was said)" if unsaid else ""


logger = logging.getLogger(__name__)

_EXPECTED = (BlockMissingError, BusyError, TierClosedError)
"""What is no fault of the tier's: another process, back-pressure, the shutdown."""

_REMEDIES: Final[Mapping[type[TierError], str]] = {
    CorruptBlockError: "was not served; if it comes again, check the disk: kvoffload store verify",
    TierFullError: "nothing more is stored until there is room: raise its capacity, or make some",
    TierTimeoutError: "check the device or the network; raise io_timeout_s if it is only slow",
    RepeatedKeyError: "a defect of whoever submitted it: name each key once",
    UnknownSlotError: "a defect of whoever submitted it: name slots of the primary",
    TierUnavailableError: "the engine does without these blocks; fix the named cause",
}
"""What to do about an error; a subclass stands before its base."""


class JobLog:
    """Logs how jobs end. Errors are logged as errors, all else for debugging.

    That a tier is full is logged once a minute, since that may be every store for a long time; an
    overdue job at its deadline, and not as an error again when its copy has ended.

    Thread: loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._refusals = Refusals()
        self._overdue: set[int] = set()

    def overdue(self, job: JobMetadata, timeout_s: float) -> TierTimeoutError:
        """Log that the deadline of a running job has passed; return the error."""
        self._overdue.add(job.job_id)
        error = self.timeout(job, timeout_s)
        logger.error(
            "%s; its copy goes on, and keeps its slots until it has ended%s", error, _remedy(error)
        )
        return error

    def timeout(self, job: JobMetadata, timeout_s: float) -> TierTimeoutError:
        """Return the error of a job whose deadline has passed."""
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
        """Log that a job's bytes have stopped moving, or never moved; drop its errors' frames."""
        was_overdue = job.job_id in self._overdue
        self._overdue.discard(job.job_id)
        first = error or next(iter(failures.values()), None)
        if first is None:
            logger.debug("tier %s: %s ended after %.4f s", self._name, described(job), seconds)
            return
        more = self._refusals.note(now_s) if isinstance(first, TierFullError) else ""
        is_error = more is not None and not was_overdue and not isinstance(first, _EXPECTED)
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
            _remedy(first) if is_error else "",
        )


def _remedy(error: TierError) -> str:
    for kind, remedy in _REMEDIES.items():
        if isinstance(error, kind):
            return f" ({remedy})"
    return ""


def described(job: JobMetadata) -> str:
    """Return what a job does."""
    what = "load" if job.is_promotion else "store"
    return (
        f"{what} of {len(job.keys)} blocks for request {job.req_context.req_id} (job {job.job_id})"
    )
