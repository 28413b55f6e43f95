"""Export of timelines as OpenTelemetry spans; needs the extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current

from kvoffload_async.errors import StateError
from kvoffload_async.facade.driver import PlannerDriver
from kvoffload_async.timeline import (
    JobEnded,
    JobStarted,
    LookupEvent,
    RequestTimeline,
    described,
)
from kvoffload_async.types import ReqContext

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

TRACER: Final = "kvoffload_async"
_PREFIX: Final = "kvoffload."


def trace_requests(
    manager: PlannerDriver,
    tracer_provider: trace.TracerProvider | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> None:
    """Export every request of a manager as spans from now on; call once per manager.

    A request is one span, `kvoffload.request`, with lookups and other events as span events. Each
    copy is a child span named by tier and direction. The parent is the request's `trace_context`
    (an OpenTelemetry context, or W3C Trace Context headers), else the context current when the
    request begins, else `traceparent` in its `kv_transfer_params`. Spans are created, and sampled,
    when a request's last copy has ended.

    Call on the owner's thread. Use a non-blocking span processor, such as `BatchSpanProcessor`.

    Args:
        manager: An engine's `driver`, or a `TieringOffloadingManager`, with `explain_requests`.
        tracer_provider: Provider of the tracer; None: the global one.
        clock: The manager's clock.
        wall_clock: Seconds since the epoch.

    Raises:
        StateError: The manager does not record requests.
    """
    maker = _SpanMaker(trace.get_tracer(TRACER, tracer_provider=tracer_provider), clock, wall_clock)
    try:
        manager.watch_timelines(maker.make, _parent_of)
    except StateError as error:
        raise StateError(f"no spans can be made: {error}") from error


@dataclass(frozen=True, slots=True)
class _SpanMaker:
    """Creates the spans of one request at a time."""

    tracer: trace.Tracer
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    def make(self, timeline: RequestTimeline) -> None:
        parent = timeline.trace_context
        ahead_s = self.wall_clock() - self.clock()
        span = self.tracer.start_span(
            f"{_PREFIX}request",
            context=parent if isinstance(parent, Context) else Context(),
            start_time=_ns(timeline.began_s, ahead_s),
            attributes={
                f"{_PREFIX}request.id": timeline.req_id,
                f"{_PREFIX}request.has_ended": timeline.ended_s is not None,
                f"{_PREFIX}request.dropped_events": timeline.dropped_events,
            },
        )
        inside = trace.set_span_in_context(span, Context())
        for event in timeline.events:
            if isinstance(event, JobEnded):
                self._make_copy(event.job, event, event.at_s, ahead_s, inside)
            elif not isinstance(event, JobStarted):
                name = "lookup" if isinstance(event, LookupEvent) else event.kind
                what: dict[str, AttributeValue] = {f"{_PREFIX}what": described(event)}
                span.add_event(f"{_PREFIX}{name}", what, _ns(event.at_s, ahead_s))
        for job in timeline.unfinished_jobs:
            self._make_copy(job, None, timeline.last_s, ahead_s, inside)
        span.end(_ns(timeline.last_s, ahead_s))

    def _make_copy(
        self,
        job: JobStarted,
        end: JobEnded | None,
        end_s: float,
        ahead_s: float,
        inside: Context,
    ) -> None:
        attributes: dict[str, AttributeValue] = {
            f"{_PREFIX}tier": job.tier,
            f"{_PREFIX}direction": job.direction,
            f"{_PREFIX}job.id": job.job_id,
            f"{_PREFIX}blocks": job.num_blocks,
            f"{_PREFIX}bytes": job.num_bytes,
        }
        error = "has not ended" if end is None else end.error
        if end is not None:
            attributes[f"{_PREFIX}landed_blocks"] = end.landed_blocks
            if end.queue_s is not None:
                attributes[f"{_PREFIX}queue_s"] = end.queue_s
        span = self.tracer.start_span(
            f"{_PREFIX}{job.direction} {job.tier}",
            context=inside,
            start_time=_ns(job.at_s, ahead_s),
            attributes=attributes,
        )
        if error is not None:
            span.set_status(trace.StatusCode.ERROR, error)
        span.end(_ns(end_s, ahead_s))


def _parent_of(ctx: ReqContext) -> object | None:
    given = ctx.trace_context
    if isinstance(given, Context):
        return given
    if isinstance(given, Mapping):
        return propagate.extract(given, context=Context())
    current = get_current()
    if trace.get_current_span(current).get_span_context().is_valid:
        return current
    params = ctx.kv_transfer_params or {}
    headers = {name: params[name] for name in ("traceparent", "tracestate") if name in params}
    return propagate.extract(headers, context=Context())


def _ns(at_s: float, ahead_s: float) -> int:
    return round((at_s + ahead_s) * 1e9)
