"""The health of a tier: a circuit breaker for each direction, driven by its jobs and probes.

    CLOSED --n-th fault in a row--> OPEN --wait is over, one try--> HALF_OPEN
    HALF_OPEN --the try worked--> CLOSED      HALF_OPEN --the try failed, or told nothing--> OPEN

A try is one job, or one existence probe; until it has ended everything else is refused. A full or
read-only disk goes on serving loads. Existence probes belong to the loads.
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
    """Whether a tier is used."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    HALF_OPEN = enum.auto()

    __hash__ = object.__hash__  # that of an Enum is a Python function, and each job looks it up


class BreakerEvent(enum.Enum):
    """What a tier's jobs and probes tell."""

    TRIED = enum.auto()
    WORKED = enum.auto()
    FAULTED = enum.auto()
    UNDECIDED = enum.auto()
    """It ended, for a reason that is not the tier's: it was busy, or the job was wrong."""

    __hash__ = object.__hash__  # that of an Enum is a Python function, and each job looks it up


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    Attributes:
        fault_threshold: Faults in a row that open it.
        retry_after_s: Seconds from the last fault until one job or probe is tried.
    """

    fault_threshold: int = 3
    retry_after_s: float = 5.0


class Breaker:
    """Counts the faults in a row of one direction of a tier.

    Thread: owner.

    Attributes:
        settings: When it opens.
        state: Whether the tier is used in this direction.
        opened_at_s: When it was suspended last.
        reason: The error that it was suspended for, as text.
        openings: How often it was.
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
        """Whether the tier is used as if nothing had happened."""
        return self.state is BreakerState.CLOSED

    def permits(self, now_s: float) -> bool:
        """Tell whether a job or a probe may be started now."""
        if self.state is BreakerState.CLOSED:
            return True
        return self.state is BreakerState.OPEN and now_s >= self._retry_at_s

    def is_stuck(self, begun_s: Iterable[float]) -> bool:
        """Tell whether it is half-open and no try is under way, given when the work there is began.

        For invariants: only the end of a try leads out of that state.
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
        """Take note of what was tried, or has ended.

        Args:
            event: What happened.
            now_s: When.
            begun_s: When what has ended was begun: once one is tried, no older one decides.
            error: What a fault was.
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
    # A job from before the breaker opened: good news is believed.
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
"""Back-pressure, a job that cannot be run at all, the shutdown: they tell nothing of a tier."""


class TierHealth:
    """The breakers of one tier.

    Thread: owner.

    Attributes:
        loads: When promotions and probes leave the tier alone.
        stores: When cascades do.
        now_s: The time of the planner's step; None: no planner heeds the breakers.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self.loads = Breaker(settings)
        self.stores = Breaker(settings)
        self.now_s: float | None = None
        self._probes_begun_s: dict[int, float] = {}
        self._is_closing = False
        self._try_is_reserved = False
        """Whether the try of `loads` is a promotion that has a slot and is not submitted yet."""

    def promotion_reserved(self) -> None:
        """Note that a promotion will be submitted: it is the try, if one is due."""
        if self.loads.state is not BreakerState.CLOSED:  # asked here: once a promoted block
            self.loads.note(BreakerEvent.TRIED, self.now_s or 0.0)
            self._try_is_reserved = True

    def promotion_submitted(self) -> None:
        """Note that a promotion was submitted: from now on its result decides the try."""
        self._try_is_reserved = False

    def store_submitted(self, job: JobMetadata) -> None:
        """Note that a cascade was submitted: it is the try, if one is due."""
        self.stores.note(BreakerEvent.TRIED, job.submit_time)

    def job_ended(self, job: JobMetadata, result: JobResult, now_s: float) -> None:
        """Note how a job has ended."""
        breaker = self.loads if job.is_promotion else self.stores
        event = BreakerEvent.WORKED if result.success else self._event_of(result.error)
        breaker.note(event, now_s, begun_s=job.submit_time, error=result.error)

    def lookup_failed(self, error: BaseException) -> None:
        """Note that the tier could not say what it has."""
        self.loads.note(BreakerEvent.FAULTED, self.now_s or 0.0, error=error)

    def reports_failed(self, error: BaseException) -> None:
        """Note that the tier could not say what has become of its jobs, whichever they were."""
        event = BreakerEvent.UNDECIDED if self._is_closing else BreakerEvent.FAULTED
        for breaker in (self.loads, self.stores):
            breaker.note(event, self.now_s or 0.0, error=error)

    def permits_probe(self) -> bool:
        """Tell whether a probe may be started now."""
        return self.now_s is None or self.loads.permits(self.now_s)

    def probe_started(self, generation: int) -> None:
        """Note a probe: it is the try, if one is due."""
        if self.now_s is not None:
            self._probes_begun_s[generation] = self.now_s
            self.loads.note(BreakerEvent.TRIED, self.now_s)

    def probe_ended(self, answer: ProbeAnswered) -> None:
        """Count a failed probe as a fault; one that worked tells only of a tier that is tried.

        Else a tier that knows its blocks, but cannot read them, would never be suspended.
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

    def reset(self) -> None:
        """Forget the try if it is a promotion that a reset of the primary has made void."""
        if self._try_is_reserved:
            self._try_is_reserved = False
            self.loads.note(BreakerEvent.UNDECIDED, self.now_s or 0.0)

    def close(self) -> None:
        """Note that the tier is being closed: what fails from now on tells nothing of it."""
        self._is_closing = True

    def stuck_breakers(self, jobs: Collection[JobMetadata]) -> list[str]:
        """Return the directions whose breaker is half-open with no try under way.

        Such a breaker would never leave its state. For invariants.

        Args:
            jobs: The tier's jobs without a result.
        """
        loads = [job.submit_time for job in jobs if job.is_promotion]
        stores = [job.submit_time for job in jobs if not job.is_promotion]
        loads += self._probes_begun_s.values()
        if self._try_is_reserved:
            loads.append(math.inf)
        tries = (("loads", self.loads, loads), ("stores", self.stores, stores))
        return [name for name, breaker, begun_s in tries if breaker.is_stuck(begun_s)]

    def _event_of(self, error: Exception | None) -> BreakerEvent:
        """Return what a failure tells of the tier."""
        if isinstance(error, _FAULT_OF_ONE_BLOCK):
            return BreakerEvent.WORKED
        is_fault = not self._is_closing and not isinstance(error, _NO_FAULT)
        return BreakerEvent.FAULTED if is_fault else BreakerEvent.UNDECIDED
