"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried once.

CLOSED --n-th fault in a row--> OPEN --wait is over, job tried--> HALF_OPEN
HALF_OPEN --job ended well--> CLOSED      HALF_OPEN --fault--> OPEN
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BreakerState(enum.Enum):
    """Whether a tier is used."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    HALF_OPEN = enum.auto()

    __hash__ = object.__hash__  # that of an Enum is a Python function, and each job looks it up


class BreakerEvent(enum.Enum):
    """What a tier's jobs tell."""

    TRIED = enum.auto()
    WORKED = enum.auto()
    FAULTED = enum.auto()

    __hash__ = object.__hash__  # that of an Enum is a Python function, and each job looks it up


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    Attributes:
        fault_threshold: Faults in a row that open it.
        retry_after_s: Seconds from the last fault until one job is tried.
    """

    fault_threshold: int = 3
    retry_after_s: float = 5.0


class Breaker:
    """Counts a tier's faults in a row.

    Thread: owner.
    """

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self.state = BreakerState.CLOSED
        self._faults = 0
        self._retry_at_s = 0.0

    def permits(self, now_s: float) -> bool:
        """Tell whether a job may be submitted now."""
        if self.state is BreakerState.CLOSED:
            return True
        return self.state is BreakerState.OPEN and now_s >= self._retry_at_s

    def note(self, event: BreakerEvent, now_s: float) -> None:
        """Take note of a job that was tried, or has ended."""
        if event is BreakerEvent.WORKED:
            self._faults = 0
        elif event is BreakerEvent.FAULTED:
            self._faults += 1
            self._retry_at_s = now_s + self._settings.retry_after_s
            if self.state is BreakerState.CLOSED and self._faults < self._settings.fault_threshold:
                return
        self.state = _NEXT[self.state, event]


_NEXT: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIED): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.FAULTED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.TRIED): BreakerState.HALF_OPEN,
    # A job from before the breaker opened: good news is believed.
    (BreakerState.OPEN, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.FAULTED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAULTED): BreakerState.OPEN,
}
