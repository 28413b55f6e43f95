"""Drivers of an engine: a scheduler step by step, or tasks on an event loop.

They compute no results, but count events in the tally that they are given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvoffload_async.replay.report import Report
from kvoffload_async.replay.source import Arrival, RequestSource
from kvoffload_async.timeline import RequestTimeline

if TYPE_CHECKING:
    from kvoffload_async.transport.streams import DeviceRuntime

SYNC: Final = "sync"
ASYNC: Final = "async"
ENGINES: Final = (SYNC, ASYNC)

ROOM_S = 1.0
"""Maximum seconds that a request whose prompt is computed waits for room for its blocks."""
MAX_QUEUED: Final = 10_000
"""Maximum number of requests that have arrived and wait; further ones arrive later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of a replay; see `Report` and `StepwiseDriver`.

    Attributes:
        runtime: Runtime of the device that has the device memory; None: it is on the host.
        device_blocks: Capacity of the device, which then caches blocks; None: enough for the
            requests, without caching.
        concurrency: Requests in flight.
        arrivals: How many times as fast as the source's times requests arrive; they wait until less
            than `concurrency` are in flight. None: a request arrives when another one has ended.
        prefetch: Whether the blocks of requests that have arrived and wait are prefetched.
        verify: Compare blocks on the device byte by byte.
        has_samples: Whether the report has samples of the statistics, for plots.
        should_stop: Called before every step: whether to admit no more requests.
        on_step: Called after every step.
        on_timeline: Receives the timelines of requests; needs `explain_requests`.
        on_ready: With the engine `"sync"`, called before the first request with a function that
            returns the results so far, to be called whenever the engine is idle.
    """

    engine: str = SYNC
    runtime: DeviceRuntime | None = None
    device_blocks: int | None = None
    layers: int = 2
    concurrency: int = 1
    arrivals: float | None = None
    prefetch: bool = True
    verify: bool = True
    has_samples: bool = False
    should_stop: Callable[[], bool] = lambda: False
    on_step: Callable[[], None] = lambda: None
    on_timeline: Callable[[RequestTimeline], None] | None = None
    on_ready: Callable[[Callable[[], Report]], None] = lambda _report: None


class Arrivals:
    """The requests of a replay, each available from its time of arrival on.

    Attributes:
        is_timed: Whether requests arrive by the clock; otherwise all are available at once.
        has_ended: Whether `take` has found no further request.
    """

    def __init__(
        self,
        requests: Iterable[Arrival],
        speed: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock, for the first request.

        Args:
            requests: The requests, in order of arrival.
            speed: How many times as fast as their times they arrive; None: all at once.
            clock: Returns seconds.
        """
        self.is_timed = speed is not None
        self.has_ended = False
        self._speed = math.inf if speed is None else speed
        self._coming = iter(requests)
        self._next: Arrival | None = None
        self._clock = clock
        self._start_s = clock()

    @classmethod
    def of(cls, source: RequestSource, speed: float | None) -> Arrivals:
        """Return the arrivals of a source; its requests must have times if there is a speed."""
        return cls.at_once(source) if speed is None else cls(source.arrivals(), speed)

    @classmethod
    def at_once(cls, requests: Iterable[Sequence[int]]) -> Arrivals:
        """Return requests that are available at once, given their block ids."""
        return cls(Arrival(0.0, block_ids) for block_ids in requests)

    def take(self) -> Sequence[int] | None:
        """Remove and return the next request's block ids; None: none has arrived.

        Raises:
            InputError: The source has no further valid request.
        """
        arrival = self._next or next(self._coming, None)
        self.has_ended = arrival is None
        if arrival is None:
            return None
        if self._due_s(arrival) > self._clock():
            self._next = arrival
            return None
        self._next = None
        return arrival.block_ids

    def next_in_s(self) -> float:
        """Return the seconds until the next request arrives; inf: that does not depend on time."""
        if self._next is None:
            return math.inf
        return max(0.0, self._due_s(self._next) - self._clock())

    def _due_s(self, arrival: Arrival) -> float:
        return self._start_s + arrival.at_s / self._speed
