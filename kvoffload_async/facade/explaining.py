"""What requests have been through: the part of a manager that records it, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvoffload_async.core.planner import Planner
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.recorder import RecordingPlanner, RequestRecorder
from kvoffload_async.core.tier_state import PlannerLimits, TierState
from kvoffload_async.errors import StateError
from kvoffload_async.timeline import RequestTimeline, SlowRequest
from kvoffload_async.types import ReqContext

logger = logging.getLogger(__name__)

TimelineListener = Callable[[RequestTimeline], None]
"""Called on the owner's thread: it must not wait."""

FindParent = Callable[[ReqContext], object | None]


class Explaining:
    """Explains requests, where `explain_requests` of them are kept.

    Thread: owner.

    Attributes:
        recorder: What is told; None: nothing is recorded.
    """

    recorder: RequestRecorder | None
    _listeners: tuple[TimelineListener, ...] = ()

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return what a request has been through so far, also after its end; `print` it.

        Of several requests with one id, the one that began last.

        Returns:
            None: it is not among the requests that are kept.

        Raises:
            StateError: Nothing is recorded, as `explain_requests` is 0.
        """
        return self._require_recorder().explain(req_id)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return the timeline of every request that is kept, the one that began first first.

        Raises:
            StateError: Nothing is recorded, as `explain_requests` is 0.
        """
        return self._require_recorder().timelines()

    def slowest_requests(self, count: int = 5) -> tuple[SlowRequest, ...] | None:
        """Return which of the recent requests have waited longest; None: nothing is recorded.

        Thread: any.
        """
        return None if self.recorder is None else self.recorder.slowest(count)

    def watch_timelines(
        self, listener: TimelineListener, find_parent: FindParent | None = None
    ) -> None:
        """Have each timeline handed over, once, at the end of the step in which it is complete.

        A request's timeline is complete when no copy works for it any more. At the shutdown, and
        when a request has to make room for later ones, it is handed over as it is. A listener that
        raises is logged, and called no more.

        Args:
            listener: Called on the owner's thread; it must not wait.
            find_parent: Returns the trace context of a request that begins; by default its own.

        Raises:
            StateError: Nothing is recorded, as `explain_requests` is 0.
        """
        recorder = self._require_recorder()
        recorder.keep_complete()
        if find_parent is not None:
            recorder.find_parent = find_parent
        self._listeners += (listener,)

    def _require_recorder(self) -> RequestRecorder:
        if self.recorder is None:
            raise StateError(
                "no request is recorded: set explain_requests, the number of requests to keep"
            )
        return self.recorder

    def _give_timelines_up(self) -> None:
        """Hand every timeline over, also those that are not complete: nothing will follow."""
        if self.recorder is not None:
            self._hand_timelines_over()
            self.recorder.give_up()
            self._hand_timelines_over()

    def _hand_timelines_over(self) -> None:
        if self.recorder is None or not self._listeners:
            return
        for timeline in self.recorder.take_complete():
            for listener in self._listeners:
                try:
                    listener(timeline)
                except Exception:
                    self._listeners = tuple(one for one in self._listeners if one != listener)
                    logger.exception(
                        "request %s: a listener for timelines failed and is not called again; "
                        "fix it, and watch anew",
                        timeline.req_id,
                    )


class _ExplainingPlanner(RecordingPlanner):
    """Records with the time at which things happen, not that of their step."""

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        limits: PlannerLimits,
        recorder: RequestRecorder,
        *,
        clock: Callable[[], float],
        names: Sequence[str],
    ) -> None:
        self._clock = clock
        super().__init__(primary, tiers, limits, recorder, names=names)

    def tell_time(self) -> None:
        self.recorder.advance(self._clock())


def create_planner(
    primary: Primary,
    tiers: Sequence[TierState],
    limits: PlannerLimits,
    recorder: RequestRecorder | None,
    *,
    clock: Callable[[], float],
    names: Sequence[str],
) -> Planner:
    """Return a planner that tells `recorder`, if there is one, with the tiers' `names`."""
    if recorder is None:
        return Planner(primary, tiers, limits)
    return _ExplainingPlanner(primary, tiers, limits, recorder, clock=clock, names=names)
