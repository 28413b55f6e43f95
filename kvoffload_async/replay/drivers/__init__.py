"""Drivers of an engine: a scheduler step by step, or tasks on an event loop.

They compute no results, but count events in the tally that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROOM_S = 1.0
"""Maximum time that a request, its prompt computed, waits for room for its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """Settings of every driver.

    Attributes:
        tier_names: Names of the manager's tiers in the tally, in lookup order.
        concurrency: Requests in flight.
        verify: Compare blocks on the device byte by byte.
        stall_timeout_s: Seconds without progress before the replay fails.
        should_stop: Called before every step: whether to admit no more requests.
        on_step: Called after every step.
    """

    tier_names: Sequence[str]
    concurrency: int = 1
    verify: bool = True
    stall_timeout_s: float = 120.0
    should_stop: Callable[[], bool] = lambda: False
    on_step: Callable[[], None] = lambda: None
