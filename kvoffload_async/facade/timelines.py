"""Timelines of requests, as a manager or an engine hands them out."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvoffload_async.core.recorder import RequestRecorder
from kvoffload_async.errors import StateError
from kvoffload_async.timeline import RequestTimeline, SlowRequest
from kvoffload_async.types import ReqContext

logger = logging.getLogger(__name__)

TimelineListener = Callable[[RequestTimeline], None]
"""Called on the owner's thread; must not block."""

FindParent = Callable[[ReqContext], object | None]


class Explaining:
    """Timelines of the last `explain_requests` requests.

    Not thread-safe, except `slowest_requests`; call only from the owner's thread.

    Attributes:
        recorder: Records the timelines; None: recording is off.
    """

    recorder: RequestRecorder | None
    _listeners: tuple[TimelineListener, ...] = ()

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a request so far, also after its end; `print` it.

        If several requests have the id, the latest is returned.

        Returns:
            None if the request is not recorded.

        Raises:
            StateError: Recording is off: `explain_requests` is 0.
        """
        return self._require_recorder().explain(req_id)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return the timelines of all recorded requests, oldest first.

        Raises:
            StateError: Recording is off: `explain_requests` is 0.
        """
        return self._require_recorder().timelines()

    def slowest_requests(self, count: int = 5) -> tuple[SlowRequest, ...] | None:
        """Return the recent requests with the longest waits; None if recording is off.

        Thread-safe.
        """
        return None if self.recorder is None else self.recorder.slowest(count)

    def watch_timelines(
        self, listener: TimelineListener, find_parent: FindParent | None = None
    ) -> None:
        """Pass each timeline to a listener, once, at the end of the step that completes it.

        A timeline is complete when no copy for its request is running. At shutdown, and when the
        recorder drops a request, the timeline is passed incomplete. The error of a listener is
        logged, and the listener is removed.

        Args:
            listener: Called on the owner's thread; must not block.
            find_parent: Returns the trace context of a new request; by default the request's own.

        Raises:
            StateError: Recording is off: `explain_requests` is 0.
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
        """At shutdown, pass all remaining timelines to the listener, incomplete ones included."""
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
                        "fix it, and watch again",
                        timeline.req_id,
                    )
