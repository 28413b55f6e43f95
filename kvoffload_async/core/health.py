"""Health of a tier: one circuit breaker per direction, driven by its jobs and probes.

    CLOSED --n-th consecutive fault--> OPEN --wait elapsed, trial starts--> HALF_OPEN
    HALF_OPEN --trial succeeds--> CLOSED     HALF_OPEN --trial fails or is inconclusive--> OPEN

A trial is one job or one existence probe; until it ends, all others are refused. The directions are
separate, so a full or read-only disk still serves loads. Existence probes count as loads.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvoffload_async.abc.events import ProbeAnswered
from kvoffload_async.errors import (
    BlockMissingError,
    BusyError,
    CorruptBlockError,
    ShardUnavailableError,
    StateError,
    TierClosedError,
    TierFullError,
    text_of,
)
from kvoffload_async.types import JobMetadata, JobResult


class BreakerState(enum.Enum):
    """States of a breaker: CLOSED uses the tier, OPEN suspends it, HALF_OPEN awaits a trial."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    HALF_OPEN = enum.auto()

    __hash__ = object.__hash__  # Enum's hash is a Python function, too slow for a look-up per job


class BreakerEvent(enum.Enum):
    """Outcomes of a tier's jobs and probes."""

    TRIED = enum.auto()
    WORKED = enum.auto()
    FAULTED = enum.auto()
    UNDECIDED = enum.auto()
    """A job or probe ended without evidence for or against the tier, such as a busy tier."""

    __hash__ = object.__hash__  # as in BreakerState


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Thresholds of a breaker.

    Attributes:
        fault_threshold: Number of consecutive faults that open the breaker.
        retry_after_s: Seconds from the last fault until a trial is permitted.
    """

    fault_threshold: int = 3
    retry_after_s: float = 5.0


class Breaker:
    """Circuit breaker of one direction of a tier.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        settings: Its thresholds.
        state: Its state.
        opened_at_s: Time of the last opening.
        reason: Text of the error that opened it.
        openings: Number of openings.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = BreakerState.CLOSED
        self.opened_at_s = 0.0
        self.reason = ""
        self.openings = 0
        self._faults = 0
        self._retry_at_s = 0.0
        self._tried_at_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the tier is in normal use."""
        return self.state is BreakerState.CLOSED

    def permits(self, now_s: float) -> bool:
        """Return whether a job or probe may start now."""
        if self.state is BreakerState.CLOSED:
            return True
        return self.state is BreakerState.OPEN and now_s >= self._retry_at_s

    def is_stuck(self, begun_s: Iterable[float]) -> bool:
        """Return whether the breaker is half-open without a trial under way.

        Such a breaker stays half-open for ever. For invariant checks.

        Args:
            begun_s: Start times, in seconds, of the running jobs and probes.
        """
        tries = any(begun >= self._tried_at_s for begun in begun_s)
        return self.state is BreakerState.HALF_OPEN and not tries

    def note(
        self,
        event: BreakerEvent,
        now_s: float,
        *,
        begun_s: float = math.inf,
        error: BaseException | None = None,
    ) -> None:
        """Record the start of a trial or the end of a job or probe.

        Args:
            event: The event.
            now_s: Its time.
            begun_s: Start of the job or probe that ended. In the half-open state, the end of work
                that started before the trial is ignored.
            error: The error of a failed job or probe.
        """
        before = self.state
        if before is BreakerState.HALF_OPEN and begun_s < self._tried_at_s:
            return
        if event is BreakerEvent.TRIED:
            self._tried_at_s = now_s
        elif event is BreakerEvent.WORKED:
            self._faults = 0
        elif event is BreakerEvent.FAULTED:
            self._faults += 1
            self._retry_at_s = now_s + self.settings.retry_after_s
            if before is BreakerState.CLOSED:
                if self._faults < self.settings.fault_threshold:
                    return
                self.opened_at_s = now_s
                self.openings += 1
                self.reason = "" if error is None else text_of(error)
        self.state = _NEXT[before, event]


_NEXT: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIED): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.FAULTED): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.UNDECIDED): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.TRIED): BreakerState.HALF_OPEN,
    # A success closes the breaker, even of a job from before it opened.
    (BreakerState.OPEN, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.FAULTED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.UNDECIDED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAULTED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.UNDECIDED): BreakerState.OPEN,
}


_FAULT_OF_ONE_BLOCK = (
    BlockMissingError,
    CorruptBlockError,
    ShardUnavailableError,
    TierFullError,
)
_NO_FAULT = (BusyError, StateError, TierClosedError)
"""Errors due to back-pressure, an invalid job or the shutdown: not the tier's fault."""


class TierHealth:
    """The breakers of one tier.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        loads: Breaker for promotions and probes.
        stores: Breaker for cascades.
        now_s: Time of the planner's step; None: without a planner, breakers are not consulted.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self.loads = Breaker(settings)
        self.stores = Breaker(settings)
        self.now_s: float | None = None
        self._probes_begun_s: dict[int, float] = {}
        self._is_closing = False

    def job_submitted(self, job: JobMetadata) -> None:
        """Record a submitted job, which is the trial of its direction if a trial is due."""
        breaker = self.loads if job.is_promotion else self.stores
        if breaker.state is not BreakerState.CLOSED:
            breaker.note(BreakerEvent.TRIED, job.submit_time)

    def job_ended(self, job: JobMetadata, result: JobResult, now_s: float) -> None:
        """Record the result of a job."""
        breaker = self.loads if job.is_promotion else self.stores
        event = BreakerEvent.WORKED if result.success else self._event_of(result.error)
        breaker.note(event, now_s, begun_s=job.submit_time, error=result.error)

    def lookup_failed(self, error: BaseException) -> None:
        """Count a failed lookup as a fault of the tier."""
        self.loads.note(BreakerEvent.FAULTED, self.now_s or 0.0, error=error)

    def reports_failed(self, error: BaseException) -> None:
        """Count a failed fetch of the tier's job results as a fault in both directions."""
        event = BreakerEvent.UNDECIDED if self._is_closing else BreakerEvent.FAULTED
        for breaker in (self.loads, self.stores):
            breaker.note(event, self.now_s or 0.0, error=error)

    def permits_probe(self) -> bool:
        """Return whether a probe may start now."""
        return self.now_s is None or self.loads.permits(self.now_s)

    def probe_started(self, generation: int) -> None:
        """Record a started probe, which is the trial of loads if a trial is due."""
        if self.now_s is not None:
            self._probes_begun_s[generation] = self.now_s
            self.loads.note(BreakerEvent.TRIED, self.now_s)

    def probe_ended(self, answer: ProbeAnswered) -> None:
        """Count a failed probe as a fault; a successful probe counts only while HALF_OPEN.

        Successful probes must not reset the count of faults: a tier whose probes succeed but whose
        loads fail would never be suspended.
        """
        begun_s = self._probes_begun_s.pop(answer.generation, None)
        if begun_s is None:
            return
        if answer.error is not None:
            event = self._event_of(answer.error)
        elif self.loads.state is BreakerState.HALF_OPEN:
            event = BreakerEvent.WORKED
        else:
            return
        self.loads.note(event, self.now_s or 0.0, begun_s=begun_s, error=answer.error)

    def close(self) -> None:
        """Record that the tier is closing; later failures do not count as faults."""
        self._is_closing = True

    def stuck_breakers(self, jobs: Collection[JobMetadata]) -> list[str]:
        """Return the directions whose breaker is half-open without a trial in flight.

        Such a breaker would never leave its state. For invariant checks.

        Args:
            jobs: The tier's jobs without a result.
        """
        loads = [job.submit_time for job in jobs if job.is_promotion]
        stores = [job.submit_time for job in jobs if not job.is_promotion]
        loads += self._probes_begun_s.values()
        tries = (("loads", self.loads, loads), ("stores", self.stores, stores))
        return [name for name, breaker, begun_s in tries if breaker.is_stuck(begun_s)]

    def _event_of(self, error: Exception | None) -> BreakerEvent:
        """Return the breaker event of an error."""
        if isinstance(error, _FAULT_OF_ONE_BLOCK):
            return BreakerEvent.WORKED
        is_fault = not self._is_closing and not isinstance(error, _NO_FAULT)
        return BreakerEvent.FAULTED if is_fault else BreakerEvent.UNDECIDED
