"""Export of timelines to a trace event file for Perfetto and Chrome's about:tracing.

The format is JSON: https://perfetto.dev/docs/getting-started/other-formats. There is one track for
requests and one per tier and direction for copies; overlapping events use additional tracks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Self

from kvoffload_async.timeline import (
    JobEnded,
    JobStarted,
    LookupEvent,
    Note,
    RequestTimeline,
    described,
)

REQUESTS: Final = "requests"

TraceEvent = dict[str, Any]


class TraceEventFile:
    """Writes timelines as they arrive, without keeping them; a context manager.

    The file is valid only after `close`.
    """

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: The file cannot be created.
        """
        self._file: IO[str] = path.open("w", encoding="utf-8")
        self._tracks = _Tracks()
        self._processes: dict[str, int] = {}
        self._separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Complete and close the file; idempotent."""
        if self._file.closed:
            return
        with self._file:
            self._file.write("\n]}\n" if self._processes else f"{self._separator}]}}\n")

    def add(self, timeline: RequestTimeline, process: str = "kvoffload") -> None:
        """Write a timeline's events; `process` is the track group."""
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._write(_named("process_name", process, pid, 0))
        for track, event in self._events(timeline):
            began_us, duration_us = event["ts"], event.get("dur", 0.0)
            tid, name = self._tracks.assign(pid, track, began_us, began_us + duration_us)
            if name is not None:
                self._write(_named("thread_name", name, pid, tid))
            self._write({**event, "pid": pid, "tid": tid})
            if track is REQUESTS:
                for inner in self._inside(timeline):
                    self._write({**inner, "pid": pid, "tid": tid})

    def _events(self, timeline: RequestTimeline) -> Iterator[tuple[str, TraceEvent]]:
        """Yield (track, event) for the request and each of its copies."""
        about = {
            "request": timeline.req_id,
            "has_ended": timeline.ended_s is not None,
            "dropped_events": timeline.dropped_events,
        }
        name = f"request {timeline.req_id}"
        yield REQUESTS, _lasting(name, "request", timeline.began_s, timeline.last_s, about)
        jobs = [event for event in timeline.events if isinstance(event, JobEnded)]
        for end in jobs:
            yield self._copy(timeline, end.job, end.at_s, _arguments(end))
        for job in timeline.unfinished_jobs:
            yield self._copy(timeline, job, timeline.last_s, {"error": "has not ended"})

    def _copy(
        self, timeline: RequestTimeline, job: JobStarted, end_s: float, about: TraceEvent
    ) -> tuple[str, TraceEvent]:
        about = {"request": timeline.req_id, "job": job.job_id, "blocks": job.num_blocks, **about}
        name = f"{job.tier} {job.direction}"
        return name, _lasting(name, "copy", job.at_s, end_s, about)

    def _inside(self, timeline: RequestTimeline) -> Iterator[TraceEvent]:
        """Yield the request's own events, which are nested in its track."""
        for event in timeline.events:
            match event:
                case LookupEvent():
                    about = {"answers": event.answers, "deferred": event.deferred}
                    yield _lasting("lookup", "lookup", event.at_s, event.last_s, about)
                case Note():
                    yield {
                        "name": event.kind,
                        "cat": "note",
                        "ph": "i",
                        "s": "t",
                        "ts": _us(event.at_s),
                        "args": {"what": described(event)},
                    }
                case _:
                    """Copies have their own tracks."""

    def _write(self, event: TraceEvent) -> None:
        self._file.write(self._separator)
        json.dump(event, self._file)
        self._separator = ",\n"


class _Tracks:
    """Assigns events to tracks, so that events on one track do not overlap."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, str], list[tuple[int, float]]] = {}
        self._count = 0

    def assign(self, pid: int, name: str, began: float, end: float) -> tuple[int, str | None]:
        """Return a track that is free from `began` on, and its name if it is new."""
        tracks = self._ends.setdefault((pid, name), [])
        for index, (tid, free_from) in enumerate(tracks):
            if free_from <= began:
                tracks[index] = (tid, end)
                return tid, None
        self._count += 1
        tracks.append((self._count, end))
        return self._count, name if len(tracks) == 1 else f"{name} {len(tracks)}"


def _lasting(
    name: str, category: str, began_s: float, end_s: float, about: TraceEvent
) -> TraceEvent:
    began_us = _us(began_s)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": began_us,
        "dur": round(_us(end_s) - began_us, 3),
        "args": about,
    }


def _us(at_s: float) -> float:
    """Return a time in microseconds, the format's unit."""
    return round(at_s * 1e6, 3)


def _named(what: str, name: str, pid: int, tid: int) -> TraceEvent:
    return {"name": what, "ph": "M", "ts": 0.0, "pid": pid, "tid": tid, "args": {"name": name}}


def _arguments(end: JobEnded) -> TraceEvent:
    about: TraceEvent = {"landed_blocks": end.landed_blocks, "bytes": end.num_bytes}
    for name in ("seconds", "queue_s", "bytes_per_s", "error"):
        value = getattr(end, name)
        if value is not None:
            about[name] = value
    return about
