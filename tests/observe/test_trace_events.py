"""The file of trace events, against what the format asks for."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.observe.trace_events import TraceEventFile
from kvoffload_async.timeline import JobEnded, JobStarted, LookupEvent, Note, RequestTimeline

JOB = JobStarted(1.1, 4, "fs", "load", 2, 8192)
TIMELINE = RequestTimeline(
    "r1",
    1.0,
    1.8,
    2.0,
    (
        LookupEvent(1.05, 1.08, 2, {"primary": {"miss": 2}}, 2),
        JOB,
        JobEnded(1.5, JOB, 1, 4096, 0.4, 0.1, "gone"),
        Note(1.6, "scheduled", seconds=0.55),
    ),
)


def written(tmp_path, *timelines, process="pass 1"):
    path = tmp_path / "trace.json"
    with TraceEventFile(path) as file:
        for timeline in timelines:
            file.add(timeline, process)
        file.close()
        file.close()
    return valid(json.loads(path.read_text()))


def valid(trace):
    """Check the file as Perfetto reads it; return its events but for the names of tracks."""
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    names = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in {"X", "M", "i"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], float)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            names.add((event["pid"], event["tid"]))
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert {(event["pid"], event["tid"]) for event in events} <= names
    assert_nothing_overlaps(events)
    return events


def assert_nothing_overlaps(events):
    """On one track an event ends before the next one begins, but for what happens within it."""
    tracks = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "lookup":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        track.sort(key=lambda event: (event["ts"], event["dur"]))
        for before, after in pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_a_request_its_lookups_and_its_copies(tmp_path):
    events = written(tmp_path, TIMELINE)
    assert [(event["ph"], event["name"], event["ts"], event.get("dur")) for event in events] == [
        ("X", "request r1", 1_000_000.0, 1_000_000.0),
        ("X", "lookup", 1_050_000.0, 30_000.0),
        ("i", "scheduled", 1_600_000.0, None),
        ("X", "fs load", 1_100_000.0, 400_000.0),
    ]
    about = events[-1]["args"]
    assert about["request"] == "r1"
    assert (about["landed_blocks"], about["bytes"], about["error"]) == (1, 4096, "gone")
    assert about["bytes_per_s"] == 4096 / (0.4 - 0.1)


def test_a_copy_that_has_not_ended_lasts_until_the_last_that_is_known(tmp_path):
    events = written(tmp_path, RequestTimeline("r1", 1.0, None, None, (JOB,)))
    assert events[-1]["dur"] == 0.0
    assert events[-1]["args"]["error"] == "has not ended"


def test_a_file_without_requests_is_valid(tmp_path):
    assert written(tmp_path) == []


def test_passes_are_processes(tmp_path):
    path = tmp_path / "trace.json"
    with TraceEventFile(path) as file:
        file.add(TIMELINE, "pass 1")
        file.add(TIMELINE, "pass 2")
    events = valid(json.loads(path.read_text()))
    assert {event["pid"] for event in events} == {1, 2}


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 20)), max_size=12
    )
)
def test_what_overlaps_lies_on_tracks_of_its_own(spans, tmp_path_factory):
    timelines = []
    for number, (began, waits, takes) in enumerate(spans):
        job = JobStarted(float(began + waits), number, "fs", "load", 1, 1)
        end = JobEnded(float(began + waits + takes), job, 1, 1)
        timelines.append(RequestTimeline("r", float(began), None, end.at_s, (job, end)))
    timelines.sort(key=lambda timeline: timeline.ended_s)
    assert len(written(tmp_path_factory.mktemp("trace"), *timelines)) == 2 * len(spans)
