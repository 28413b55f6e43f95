"""A timeline as people read it."""

import pytest

from kvoffload_async.timeline import (
    JobEnded,
    JobStarted,
    LookupEvent,
    Note,
    RequestTimeline,
    described,
)

LOAD = JobStarted(10.002, 7, "fs", "load", 4, 4 << 20)
STORE = JobStarted(10.004, 8, "valkey", "store", 1, 0)

EXPECTED = """\
request r1: in flight, 2.00 s
      ms  event
       0  begins
   1.000  lookup (3 times in 1.00 ms): primary: 1 found, 4 not found; fs: 4
            found -> deferred by 4 blocks
   2.000  fs: load of 4 blocks, 4.0 MiB begins (job 7)
   4.000  valkey: store of 1 block begins (job 8)
   5.000  fs: load of job 7 ends: 4 blocks, 4.0 MiB; took 3.00 ms, 1.00 ms of it
            in the queue, 2.0 GiB/s
   5.500  finished by its owner; copies may go on
2000.000  no room for 2 blocks: not stored now (3 times)
2000.000  still open: valkey: store of 1 block begins (job 8)
          2 more events were not kept"""


def test_a_timeline_is_printed_line_by_line():
    events = (
        LookupEvent(10.001, 10.002, 3, {"primary": {"hit": 1, "miss": 4}, "fs": {"hit": 4}}, 4),
        LOAD,
        STORE,
        JobEnded(10.005, LOAD, 4, 4 << 20, 0.003, 0.001),
        Note(12.0, "refused", 2, times=3),
    )
    timeline = RequestTimeline("r1", 10.0, 10.0055, None, events, dropped_events=2)
    assert str(timeline) == EXPECTED
    assert timeline.unfinished_jobs == (STORE,)
    assert timeline.seconds == 2.0


def test_a_request_that_has_ended_says_so():
    text = str(RequestTimeline("r1", 1.0, 2.0, 3.0, (LookupEvent(1.0, 1.0, 1, {}, 0),)))
    assert text.splitlines()[-2:] == [
        "1000.000  finished by its owner",
        "2000.000  ends: no copies in flight",
    ]


def test_a_lookup_that_ends_at_the_first_miss_says_why_it_counts_fewer_blocks():
    first = {"primary": {"miss": 9}, "fs": {"unknown": 9}}
    events = (
        LookupEvent(1.0, 1.0, 1, first, 9),
        LookupEvent(2.0, 2.0, 1, {"primary": {"miss": 1}, "fs": {"miss": 1}}, 0),
    )
    text = " ".join(str(RequestTimeline("r1", 1.0, None, None, events)).split())
    assert text.count("need no answer") == 1
    assert "fs: 1 not found; 8 blocks after the first miss need no answer: a prefix ends" in text


def test_no_line_is_wider_than_a_terminal():
    reason = "fs: load of 8 blocks for request r1 (job 7) timed out after 1.0 s, " * 4
    events = (LOAD, JobEnded(11.0, LOAD, 1, 1 << 20, 0.9, error=reason))
    text = str(RequestTimeline("r1", 10.0, None, None, events))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            JobEnded(11.0, LOAD, 1, 1 << 20, 0.5, error="gone"),
            "fs: load of job 7 fails, 1 of 4 blocks arrived: gone; took 500.00 ms, 2.0 MiB/s",
        ),
        (
            JobEnded(11.0, STORE, 0, 0, error="too slow", is_overdue=True),
            "valkey: store of job 8 is overdue, its copy still runs: too slow",
        ),
        (
            JobEnded(11.0, STORE, 1, 512, 1.0),
            "valkey: store of job 8 ends: 1 block, 512 B; took 1.00 s, 512 B/s",
        ),
        (
            JobEnded(11.0, STORE, 1, 0, 0.001, 0.001),
            "valkey: store of job 8 ends: 1 block; took 1.00 ms, 1.00 ms of it in the queue",
        ),
        (
            Note(11.0, "pending", 3, "fs", "others wait before them"),
            "fs: 3 blocks have to wait: others wait before them",
        ),
        (
            LookupEvent(1.0, 1.0, 1, {"planner": {"no_room": 2}}, 0),
            "lookup: planner: 2 not promoted: no room in the primary",
        ),
    ],
)
def test_an_event_in_words(event, text):
    assert described(event) == text
