"""What the recorder keeps, and what it forgets."""

import gc
import sys
from types import FunctionType, ModuleType
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.core.recorder import (
    MAX_BYTES,
    MAX_EVENTS,
    MAX_ID_CHARS,
    RECENT,
    RequestRecorder,
)
from kvoffload_async.errors import OffloadError
from kvoffload_async.timeline import JobEnded, JobStarted, LookupEvent, Note
from kvoffload_async.types import ReqContext, make_offload_key


def begun(recorder, *req_ids):
    contexts = [ReqContext(req_id) for req_id in req_ids]
    for ctx in contexts:
        recorder.begin(ctx)
    return contexts


def ended(recorder, *contexts):
    for ctx in contexts:
        recorder.finish(ctx)
        recorder.done(ctx)


def kept(recorder):
    return [timeline.req_id for timeline in recorder.timelines()]


def test_requests_that_have_ended_make_room_before_those_in_flight():
    recorder = RequestRecorder(3)
    _slow, quick, other = begun(recorder, "slow", "quick", "other")
    ended(recorder, quick)
    begun(recorder, "next")
    assert kept(recorder) == ["slow", "other", "next"]
    ended(recorder, other)
    begun(recorder, "last", "newest")
    assert kept(recorder) == ["next", "last", "newest"]
    assert recorder.explain("slow") is None


def test_of_two_requests_with_one_id_the_later_one_is_explained():
    recorder = RequestRecorder(2)
    recorder.advance(1.0)
    begun(recorder, "a")
    recorder.advance(2.0)
    (second,) = begun(recorder, "a")
    assert recorder.explain("a").began_s == 2.0
    begun(recorder, "b")
    assert recorder.explain("a").began_s == 2.0
    recorder.begin(second)  # the same object again: what it was is forgotten
    assert kept(recorder) == ["b", "a"]


def test_what_concerns_a_request_that_is_not_kept_is_ignored():
    recorder = RequestRecorder(1)
    gone, _here = begun(recorder, "gone", "here")
    recorder.begin_round(gone)
    recorder.scheduled(gone)
    recorder.note(gone, "stored", 1)
    recorder.job_started(gone, 1, "fs", "load", (1, 8))
    recorder.job_ended(gone, 1, "fs", landed_blocks=1, num_bytes=8)
    ended(recorder, gone)
    assert recorder.explain("here").events == ()
    assert len(recorder) == 1


def test_a_round_is_what_the_figures_have_grown_by():
    figures = [5, 0, 0]
    recorder = RequestRecorder(2)
    recorder.read_lookups([("primary", "hit"), ("fs", "miss")], lambda: tuple(figures))
    one, two = begun(recorder, "one", "two")
    stranger = ReqContext("stranger")
    for at_s, ctx, growth in [
        (1.0, one, (2, 0, 0)),
        (2.0, stranger, (7, 7, 7)),
        (3.0, two, (0, 3, 1)),
        (4.0, two, (0, 3, 1)),
        (5.0, two, (1, 0, 0)),
    ]:
        recorder.advance(at_s)
        recorder.begin_round(ctx)
        figures[:] = [now + more for now, more in zip(figures, growth, strict=True)]
    assert recorder.explain("one").events == (LookupEvent(1.0, 1.0, 1, {"primary": {"hit": 2}}, 0),)
    assert recorder.explain("two").events == (
        LookupEvent(3.0, 4.0, 2, {"fs": {"miss": 3}}, 1),
        LookupEvent(5.0, 5.0, 1, {"primary": {"hit": 1}}, 0),
    )


def test_what_happens_again_is_counted_and_not_repeated():
    recorder = RequestRecorder(1)
    (ctx,) = begun(recorder, "a")
    for now_s in (1.0, 2.0, 3.0):
        recorder.advance(now_s)
        recorder.note(ctx, "refused", 4)
    recorder.note(ctx, "refused", 5)
    assert recorder.explain("a").events == (
        Note(1.0, "refused", 4, times=3),
        Note(3.0, "refused", 5),
    )


def test_time_never_goes_back():
    recorder = RequestRecorder(1)
    recorder.advance(2.0)
    recorder.advance(1.0)
    begun(recorder, "a")
    assert recorder.explain("a").began_s == 2.0


def test_events_beyond_the_bound_are_counted_and_the_ends_of_jobs_keep_their_places():
    recorder = RequestRecorder(1, max_events=4)
    (ctx,) = begun(recorder, "a")
    recorder.job_started(ctx, 1, "fs", "load", (2, 16))
    recorder.note(ctx, "waits", reason="one")
    recorder.job_started(ctx, 2, "fs", "load", (2, 16))
    recorder.note(ctx, "waits", reason="two")
    recorder.note(ctx, "waits", reason="three")
    recorder.begin_round(ctx)
    recorder.job_ended(ctx, 2, "fs", landed_blocks=2, num_bytes=16)
    recorder.job_ended(ctx, 1, "fs", landed_blocks=2, num_bytes=16)
    timeline = recorder.explain("a")
    assert [type(event) for event in timeline.events] == [JobStarted, Note, Note, JobEnded]
    assert timeline.dropped_events == 4
    assert timeline.unfinished_jobs == ()


def kept_bytes(recorder):
    """Return what a recorder keeps alive, types and modules apart."""
    seen, queue, total = set(), [recorder], 0
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        queue += gc.get_referents(one)
    return total


def test_a_request_that_has_ended_keeps_neither_its_keys_nor_its_parameters():
    recorder = RequestRecorder(4)
    positions = {make_offload_key(bytes([n % 256, n >> 8]) * 16): n for n in range(8192)}
    ctx = ReqContext("r", {"prompt": "x" * 1_000_000}, positions)
    recorder.begin(ctx)
    ended(recorder, ctx)
    alive = ref(ctx)
    del ctx
    assert alive() is None
    assert recorder.explain("r").ended_s is not None


@pytest.mark.parametrize("character", ["x", "\N{GRINNING FACE}"])
def test_a_record_takes_30_kib_whatever_its_request_and_errors_are(character):
    huge, empty = character * 1_000_000, kept_bytes(RequestRecorder(1))
    recorder = RequestRecorder(1)
    numbers = [1 << 40] * 41
    recorder.read_lookups([(f"tier{n}", "hit") for n in range(40)], lambda: tuple(numbers))
    ctx = ReqContext(huge)
    recorder.begin(ctx)
    for number in range(2 * MAX_EVENTS):
        recorder.advance(number + 0.5)
        recorder.job_started(ctx, (1 << 40) + number, "fs", "load", (1 << 40, 1 << 50))
        recorder.note(ctx, "waits", 1 << 40, reason=f"{huge[:300]}{number}", seconds=1e-3 * number)
        recorder.begin_round(ctx)
        numbers = [figure + (1 << 40) + number for figure in numbers]
        error = OSError(huge)
        recorder.job_ended(
            *(ctx, (1 << 40) + number, "fs"),
            landed_blocks=1 << 40,
            num_bytes=1 << 50,
            seconds=number * 0.3,
            queue_s=number * 0.1,
            error=error,
        )
    ended(recorder, ctx)
    del ctx, error
    assert kept_bytes(recorder) - empty < MAX_BYTES + 40 * 200, "the labels are shared by all"
    timeline = recorder.explain(huge)
    assert timeline.dropped_events
    assert timeline.req_id == huge[:MAX_ID_CHARS]
    assert all(
        e.error.startswith(f"OSError: {character}")
        for e in timeline.events
        if isinstance(e, JobEnded)
    )


def test_a_copy_that_outlives_its_result_is_noted_after_the_end_of_its_request():
    recorder = RequestRecorder(1)
    (ctx,) = begun(recorder, "a")
    ended(recorder, ctx)
    recorder.note(ctx, "released", 1, tier="fs")
    assert recorder.explain("a").events == (Note(0.0, "released", 1, tier="fs"),)
    begun(recorder, "b")
    recorder.note(ctx, "released", 1, tier="fs")
    assert recorder.explain("a") is None


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, None),
        (OSError("disk"), "OSError: disk"),
        (OffloadError("disk"), "disk"),
        (OSError(), "OSError"),
        (Unspeakable(), "Unspeakable"),
    ],
)
def test_an_error_is_kept_as_text(error, said):
    recorder = RequestRecorder(1)
    (ctx,) = begun(recorder, "a")
    recorder.job_started(ctx, 1, "fs", "store", (1, 8))
    recorder.job_ended(ctx, 1, "fs", landed_blocks=0, num_bytes=0, error=error)
    assert recorder.explain("a").events[-1].error == said


def test_a_timeline_is_complete_when_its_last_job_has_ended_and_is_taken_once():
    recorder = RequestRecorder(2)
    (unseen,) = begun(recorder, "unseen")
    ended(recorder, unseen)
    assert recorder.take_complete() == []
    recorder.keep_complete()
    recorder.keep_complete()
    (ctx,) = begun(recorder, "a")
    recorder.job_started(ctx, 1, "fs", "store", (1, 8))
    ended(recorder, ctx)
    assert recorder.take_complete() == []
    recorder.advance(3.0)
    recorder.job_ended(ctx, 1, "fs", landed_blocks=1, num_bytes=8)
    (timeline,) = recorder.take_complete()
    assert (timeline.req_id, timeline.finished_s, timeline.ended_s) == ("a", 0.0, 3.0)
    recorder.done(ctx)
    assert recorder.take_complete() == []


def test_requests_in_flight_are_taken_as_they_are_when_they_make_room_and_at_the_end():
    recorder = RequestRecorder(1)
    recorder.keep_complete()
    begun(recorder, "first")
    (second,) = begun(recorder, "second")
    assert [timeline.req_id for timeline in recorder.take_complete()] == ["first"]
    recorder.give_up()
    assert [timeline.req_id for timeline in recorder.take_complete()] == ["second"]
    ended(recorder, second)
    recorder.take_complete()
    recorder.give_up()
    assert recorder.take_complete() == []


def test_timelines_that_nobody_takes_are_dropped():
    recorder = RequestRecorder(2)
    recorder.keep_complete()
    ended(recorder, *begun(recorder, "a", "b"))
    ended(recorder, *begun(recorder, "c"))
    assert [timeline.req_id for timeline in recorder.take_complete()] == ["b", "c"]


def test_a_request_has_its_own_trace_context_unless_another_is_found():
    recorder = RequestRecorder(2)
    recorder.begin(ReqContext("a", trace_context="own"))
    recorder.find_parent = lambda ctx: f"found for {ctx.req_id}"
    begun(recorder, "b")
    contexts = [timeline.trace_context for timeline in recorder.timelines()]
    assert contexts == ["own", "found for b"]


def test_what_concerns_all_is_noted_of_those_that_have_not_finished():
    recorder = RequestRecorder(3)
    done, _live, copying = begun(recorder, "done", "live", "copying")
    ended(recorder, done)
    recorder.job_started(copying, 1, "fs", "store", (1, 8))
    recorder.finish(copying)
    recorder.note_all_live("reset")
    assert recorder.explain("done").events == ()
    assert [type(event) for event in recorder.explain("copying").events] == [JobStarted]
    assert recorder.explain("live").events == (Note(0.0, "reset"),)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "finish", "done", "round", "note", "start", "end"]),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=80,
)


@given(operations=OPERATIONS, bound=st.integers(1, 4), max_events=st.integers(1, 6))
def test_bounds_hold_times_are_in_order_and_each_end_has_its_begin(operations, bound, max_events):
    recorder = RequestRecorder(bound, max_events)
    recorder.keep_complete()
    contexts = [ReqContext(str(number % 4)) for number in range(6)]
    for now_s, (what, number, job) in enumerate(operations):
        recorder.advance(float(now_s))
        apply(recorder, what, contexts[number], job)
        assert len(recorder) <= bound
        for timeline in recorder.timelines():
            check_timeline(timeline, max_events)
    for timeline in recorder.take_complete():
        check_timeline(timeline, max_events)
        if timeline.ended_s is not None:
            assert timeline.unfinished_jobs == ()


def apply(recorder, what, ctx, job):
    match what:
        case "begin":
            recorder.begin(ctx)
        case "finish":
            recorder.finish(ctx)
        case "done":
            recorder.done(ctx)
        case "round":
            recorder.begin_round(ctx)
        case "note":
            recorder.note(ctx, "pending", job, tier="fs")
        case "start":
            running = {(j.tier, j.job_id) for t in recorder.timelines() for j in t.unfinished_jobs}
            if ("fs", job) not in running:
                recorder.job_started(ctx, job, "fs", "store", (1, 8))
        case "end":
            recorder.job_ended(ctx, job, "fs", landed_blocks=1, num_bytes=8)


def check_timeline(timeline, max_events):
    times = [timeline.began_s, *(event.at_s for event in timeline.events)]
    assert times == sorted(times)
    assert len(timeline.events) + len(timeline.unfinished_jobs) <= max_events
    started = [event for event in timeline.events if isinstance(event, JobStarted)]
    finished = [event.job for event in timeline.events if isinstance(event, JobEnded)]
    assert sorted(map(id, (*finished, *timeline.unfinished_jobs))) == sorted(map(id, started))


def waited(recorder, req_id, seconds, load_s=None):
    (ctx,) = begun(recorder, req_id)
    recorder.begin_round(ctx)
    if load_s is not None:
        recorder.job_started(ctx, 1, "fs", "load", (1, 1))
        recorder.job_ended(ctx, 1, "fs", landed_blocks=1, num_bytes=1, seconds=load_s)
        recorder.job_started(ctx, 2, "fs", "store", (1, 1))
        recorder.job_ended(ctx, 2, "fs", landed_blocks=1, num_bytes=1, seconds=100.0)
    recorder.advance(recorder.now_s + seconds)
    recorder.scheduled(ctx)
    return ctx


def test_the_slowest_requests_are_those_that_waited_longest_and_say_for_what():
    recorder = RequestRecorder(1000)
    begun(recorder, "never asked")
    waited(recorder, "at once", 0.0)
    waited(recorder, "loaded", 2.0, load_s=1.5)
    waited(recorder, "asked", 3.0, load_s=1.0)
    waited(recorder, "asked alone", 1.0)
    found = [(slow.req_id, slow.seconds, slow.longest_phase) for slow in recorder.slowest(2)]
    assert found == [("asked", 3.0, "lookups"), ("loaded", 2.0, "fs: load")]
    assert [slow.req_id for slow in recorder.slowest(9)] == ["asked", "loaded", "asked alone"]


def test_a_request_waited_for_its_longest_load_not_its_last_and_not_for_the_device():
    recorder = RequestRecorder(1)
    (ctx,) = begun(recorder, "r")
    recorder.begin_round(ctx)
    for job_id, (tier, seconds) in enumerate([("fs", 1.5), ("fs", 0.1), ("device", 1.9)]):
        recorder.job_started(ctx, job_id, tier, "load", (1, 1))
        recorder.job_ended(ctx, job_id, tier, landed_blocks=1, num_bytes=1, seconds=seconds)
    recorder.advance(2.0)
    recorder.scheduled(ctx)
    assert [slow.longest_phase for slow in recorder.slowest(1)] == ["fs: load"]


def test_a_wait_counts_although_its_note_has_no_room():
    recorder = RequestRecorder(1, max_events=1)
    ctx = waited(recorder, "r", 2.0)
    recorder.note(ctx, "pinned", 1)
    assert [slow.seconds for slow in recorder.slowest(1)] == [2.0]


def test_the_slowest_are_looked_for_among_the_latest_alone():
    recorder = RequestRecorder(1000)
    waited(recorder, "long ago", 9.0)
    for number in range(RECENT):
        waited(recorder, f"r{number}", 1.0)
    assert "long ago" not in [slow.req_id for slow in recorder.slowest(RECENT)]
