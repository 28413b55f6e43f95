"""A circuit breaker: a tier that keeps failing in one direction is left alone, then tried once.

CLOSED --n-th fault in a row--> OPEN --wait is over, one try--> HALF_OPEN
HALF_OPEN --the try worked--> CLOSED      HALF_OPEN --the try failed, or told nothing--> OPEN

A try is one job, or one existence probe; until it has ended everything else is refused.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvoffload_async.errors import text_of


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
        opened_at_s: When it was left alone last.
        reason: The error that it was left alone for, as text.
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
