"""Drivers of an engine: a scheduler step by step, or tasks on an event loop.

They compute no results, but count events in the tally that they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvoffload_async.replay.report import Report
from kvoffload_async.timeline import RequestTimeline

if TYPE_CHECKING:
    from kvoffload_async.transport.streams import DeviceRuntime

SYNC: Final = "sync"
ASYNC: Final = "async"
ENGINES: Final = (SYNC, ASYNC)

ROOM_S = 1.0
"""Maximum seconds that a request whose prompt is computed waits for room for its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of a replay; see `Report` and `StepwiseDriver`.

    Attributes:
        runtime: Runtime of the device that has the device memory; None: it is on the host.
        device_blocks: Capacity of the device, which then caches blocks; None: enough for the
            requests, without caching.
        concurrency: Requests in flight.
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
    verify: bool = True
    has_samples: bool = False
    should_stop: Callable[[], bool] = lambda: False
    on_step: Callable[[], None] = lambda: None
    on_timeline: Callable[[RequestTimeline], None] | None = None
    on_ready: Callable[[Callable[[], Report]], None] = lambda _report: None
