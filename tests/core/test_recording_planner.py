"""What the planner tells the recorder: the journeys of a request, event by event."""

import pytest
from core.states import POLICIES
from core.terms import HIT, MISS, PENDING, k, ks
from core.tiers import NativeTier
from core.world import World

from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.recorder import RecordingPlanner, RequestRecorder
from kvoffload_async.errors import BlockMissingError
from kvoffload_async.timeline import JobEnded, JobStarted, LookupEvent, Note
from kvoffload_async.types import Hints, ReqContext


def recording(primary, tiers, limits):
    return RecordingPlanner(primary, tiers, limits, RequestRecorder(4))


def world_of(*args, **options):
    return World(*args, create_planner=recording, **options)


def events_of(world, req_id="r"):
    return world.planner.recorder.explain(req_id).events


def notes_of(world, req_id="r"):
    notes = [event for event in events_of(world, req_id) if isinstance(event, Note)]
    return [(note.kind, note.num_blocks) for note in notes]


def test_the_tiers_may_have_names_that_tell_them_apart():
    tiers = [NativeTier("fs").state for _ in range(2)]
    tiers[1].event_log.ownership = "fs-2"
    primary = Primary(2, POLICIES["lru"](2))
    recorder = RequestRecorder(1)
    limits = 9.0
    planner = RecordingPlanner(primary, tiers, limits, recorder)
    ctx = ReqContext("r")
    planner.on_new_request(ctx)
    assert planner.lookup(k("a"), ctx) is MISS
    (lookup,) = recorder.explain("r").events
    assert lookup.answers == {"primary": {"miss": 1}, "fs": {"miss": 1}, "fs-2": {"miss": 1}}


def test_a_promotion_and_a_load():
    world = world_of()
    world.fill(0, ks("ab"))
    ctx = world.begin()
    assert [world.lookup(ctx, name) for name in "abc"] == [PENDING, PENDING, MISS]
    world.step(2.0)
    world.finish_job(seconds=1.5)
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, HIT]
    world.load(ctx, "ab")
    world.step(1.0)
    world.loaded()
    world.finish(ctx)
    job = JobStarted(0.0, 0, "tier0", "load", 2, 2 << 20)
    assert events_of(world) == (
        LookupEvent(0.0, 0.0, 1, {"primary": {"miss": 3}, "tier0": {"hit": 2, "miss": 1}}, 2),
        job,
        JobEnded(2.0, job, 2, 2 << 20, 1.5),
        LookupEvent(2.0, 2.0, 1, {"primary": {"hit": 2}}, 0),
        Note(2.0, "scheduled", seconds=2.0),
        Note(2.0, "pinned", 2),
        Note(3.0, "unpinned", 2),
    )
    timeline = world.planner.recorder.explain("r")
    assert (timeline.began_s, timeline.finished_s, timeline.ended_s) == (0.0, 3.0, 3.0)


def test_a_deletion_of_blocks_that_a_request_waits_for():
    world = world_of()
    world.fill(0, ks("abc"))
    ctx, other = world.begin(), world.begin("other")
    assert [world.lookup(ctx, name) for name in "ab"] == [PENDING, PENDING]
    world.step()
    world.planner.delete(ks("bc"), [0])
    assert notes_of(world) == [("deleted", 1)]
    assert not notes_of(world, other.req_id)


def test_a_prefetch_and_its_use():
    world = world_of(8)
    world.fill(0, ks("ab"))
    ctx = world.begin()
    world.planner.prefetch(ks("abc"), ctx)
    world.step()
    world.finish_job()
    assert world.planner.lookup_prefix(ks("abc"), ctx) == (2, False)
    world.load(ctx, "ab")
    world.loaded()
    world.finish(ctx)
    kinds = ["queued", "prefetched", "scheduled", "pinned", "used", "unpinned"]
    assert [(kind, count) for kind, count in notes_of(world) if count] == [
        *(("queued", 3), ("prefetched", 2), ("pinned", 2), ("used", 2), ("unpinned", 2))
    ]
    assert [kind for kind, _ in notes_of(world)] == kinds


@pytest.mark.parametrize("is_early", [True, False])
def test_a_prefetch_in_vain(is_early):
    world = world_of(8)
    world.fill(0, ks("ab"))
    ctx = world.begin()
    world.planner.prefetch(ks("ab"), ctx)
    world.step()
    ends = [world.finish_job, lambda: world.finish(ctx)]
    for end in ends if is_early else reversed(ends):
        end()
    world.step()
    assert notes_of(world) == [("queued", 2), ("prefetched", 2), ("unused", 2)]


def test_a_store_and_its_cascade_end_after_the_request():
    world = world_of()
    ctx = world.begin()
    world.store(ctx, "ab")
    world.finish(ctx)
    world.step(1.0)
    assert world.planner.recorder.explain("r").ended_s is None
    world.finish_job()
    timeline = world.planner.recorder.explain("r")
    assert notes_of(world) == [("reserved", 2), ("stored", 2)]
    assert [type(event) for event in timeline.events[2:]] == [JobStarted, JobEnded]
    assert timeline.ended_s == 1.0


def test_what_a_store_has_no_room_for():
    world = world_of(2, 0, accept_prefix=True)
    ctx = world.begin()
    world.store(ctx, "a")
    world.store(ctx, "a")
    world.offer(ctx, "bcd")
    assert world.offer(ctx, "ef") is None
    world.written(success=False)
    world.planner.complete_store((), ctx, success=True)
    world.planner.complete_load((), ctx)
    assert notes_of(world) == [
        ("reserved", 1),
        ("stored", 1),
        ("nothing_to_store", 1),
        ("reserved", 2),
        ("evicted", 1),
        ("left_out", 1),
        ("refused", 2),
        ("store_failed", 2),
    ]


def test_what_the_policy_declines():
    world = world_of(2, 0, accept_prefix=True)
    world.primary.policy.follows_requests = True
    world.primary.policy.declines = lambda _request, _keys, missing, *_: missing[1:]
    ctx = world.begin()
    world.store(ctx, "ab")
    world.store(ctx, "ab")
    world.primary.policy.declines = lambda _request, _keys, missing, *_: missing
    world.store(ctx, "c")
    assert notes_of(world) == [
        ("reserved", 1),
        ("declined", 1),
        ("stored", 1),
        ("reserved", 1),
        ("stored", 1),
        ("declined", 1),
    ]
    declined = events_of(world)[-1]
    assert (declined.tier, declined.reason) == (
        "primary",
        "they are worth less than the resident blocks",
    )


def test_what_a_hint_of_the_request_withholds():
    world = world_of(2, 0)
    ctx = world.begin(hints=Hints(max_offload_tokens=0))
    world.store(ctx, "ab")
    assert notes_of(world) == [("declined", 2)]
    assert events_of(world)[-1].reason == "the request's max_offload_tokens excludes them"


def test_what_is_evicted_to_make_room():
    world = world_of(1, 0)
    ctx = world.begin("one")
    world.store(ctx, "a")
    world.finish(ctx)
    ctx = world.begin("two")
    world.store(ctx, "b")
    assert notes_of(world, "two")[:2] == [("reserved", 1), ("evicted", 1)]


@pytest.mark.parametrize(
    ("breaker", "reasons"),
    [
        (9, ["its part of the primary is used up", "others wait before them"]),
        (1, 2 * ["the tier is not open, or its breaker is"]),
    ],
)
def test_why_a_tier_gets_blocks_later(breaker, reasons):
    world = world_of(8, 1, copies_each=1, breaker=BreakerSettings(breaker, 60.0))
    first = world.begin("first")
    world.refusing = {0} if breaker == 1 else set()
    world.store(first, "a")
    second = world.begin("second")
    world.store(second, "b")
    world.store(second, "c")
    notes = [event for event in events_of(world, "second") if isinstance(event, Note)]
    pending = [note for note in notes if note.kind == "pending"]
    assert pending == [Note(0.0, "pending", 1, "tier0", each) for each in reasons]


def test_a_tier_under_pressure_gets_blocks_later():
    world = world_of(8, 1, pressed_tier=0)
    world.planner.tiers[0].backpressure.drops_store = lambda _now_s: True
    ctx = world.begin()
    world.store(ctx, "a")
    assert events_of(world)[-1].reason == "the tier is slower than what is stored"


def test_a_load_that_fails_and_one_that_is_given_up():
    world = world_of()
    world.fill(0, ks("ab"))
    ctx = world.begin()
    world.lookup(ctx, "a")
    world.step()
    world.finish_job(failed=[0], error=BlockMissingError("gone"))
    world.lookup(ctx, "b")
    world.step()
    world.orphan()
    world.release()
    ends = [event for event in events_of(world) if isinstance(event, JobEnded)]
    assert [(end.landed_blocks, end.error, end.is_overdue) for end in ends] == [
        (0, "gone", False),
        (0, "scripted", True),
    ]
    assert events_of(world)[-1] == Note(2.0, "released", 1, "tier0")


def test_why_a_tier_was_not_asked_and_why_a_hit_was_not_used():
    world = world_of(4, 1, deferral_s=3.0)
    world.fill(0, ks("abcd"))
    ctx = world.begin(load_tier_filter=frozenset())
    world.lookup(ctx, "a")
    assert events_of(world)[-1].answers["tier0"] == {"filtered": 1}
    late = world.begin("late")
    assert [world.lookup(late, name) for name in "abcd"] == [PENDING] * 4
    world.step(5.0)
    assert [world.lookup(late, name) for name in "da"] == [MISS, MISS]
    assert events_of(world, "late")[-1].answers == {
        "primary": {"pending": 1, "miss": 1},
        "planner": {"no_room": 1, "expired": 1},
    }


def test_a_reset_is_noted():
    world = world_of()
    ctx = world.begin()
    world.reset()
    world.lookup(ctx, "a")
    assert notes_of(world) == [("reset", 0)]
    assert events_of(world)[-1].answers["planner"] == {"paused": 1}
