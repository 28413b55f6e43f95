"""Each law must be able to fail: a healthy engine is damaged, a story told wrong."""

import pytest
from core.world import World, k, ks, whole_state

from kvoffload_async.core.events import CacheReset, ResetFlushed, StepBegan, StepEnded
from kvoffload_async.core.laws import LAWS, check_quiescent, check_state, check_story
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.restlaws import Rest
from kvoffload_async.core.story import (
    AllQuiet,
    CallReturned,
    ContentRead,
    ContentWritten,
    CopyEnded,
    DeviceBlockOverwritten,
    DeviceReadBegan,
    DeviceReadEnded,
    EventsEmitted,
    FileFound,
    FileKind,
    JobAccepted,
    JobAnswered,
    RequestClosed,
    RequestDecided,
    RequestDeferred,
    RequestOpened,
    ResidentSeen,
    RoomAsked,
    RunEnded,
    StaleCompletionSeen,
    StepClosed,
    Story,
    TierPolled,
    fact_of,
    fingerprint,
)
from kvoffload_async.errors import InvariantError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import ReqContext

A, B = k("a"), k("b")


def test_the_laws_are_p1_to_p20_and_each_is_checked_somewhere():
    assert [law.name for law in LAWS] == [f"P{i}" for i in range(1, 21)]
    silent = {LAWS[1].of_state}
    for law in LAWS:
        assert {law.of_state, law.of_rest, law.of_story} - silent
        assert law.statement


# -- state --------------------------------------------------------------------------------------


def busy_world():
    """Everything at once: idle, pinned, writing, held and free slots, jobs of all kinds."""
    world = World(10, 1, request_level=[0])
    world.fill(0, ks("xyzu"))
    ctx, other = world.begin("r"), world.begin("s")
    world.store(ctx, "ij")
    world.settle()
    world.store(ctx, "c")
    world.store(ctx, "d")
    world.disown(max(world.running))
    for name in "xyz":
        world.lookup(ctx, name)
        world.step()
    world.settle(3)
    world.disown(4)
    world.load(ctx, "i")
    world.offer(ctx, "w")
    world.offer(other, "w")
    world.lookup(other, "u")
    return world


def block(world, name):
    return world.primary._blocks[k(name)]


def damage_p3_count(world):
    world.primary._idle += 1


def damage_p3_free(world):
    world.primary.pool._returned.append(0)


def damage_p3_range(world):
    block(world, "c").slot = 99


def damage_p4_pin(world):
    block(world, "i").refs += 1


def damage_p4_write(world):
    world.engine.requests["r"].writing.clear()


def damage_p4_not_written(world):
    world.engine.requests["r"].writing.add(k("i"))


def damage_p4_slot(world):
    _, job = world.engine.jobs[min(world.engine.jobs)]
    block(world, "i").slot, block(world, "c").slot = block(world, "c").slot, block(world, "i").slot
    assert k("c") in job.keys


def damage_p4_held(world):
    world.engine.disowned[4].holds_slots = False


def damage_p4_cascading(world):
    world.engine.tiers[0].cascading_blocks += 1


def damage_p7_twice(world):
    tier, job = world.engine.jobs[5]
    world.engine.jobs[99] = tier, job
    world.engine.counters.jobs_submitted += 1


def damage_p7_count(world):
    world.engine.promotions._held += 1


def damage_p7_cap(world):
    world.engine.limits = type(world.engine.limits)(1, 1_000, 1.0)


def damage_p7_kept_for_nobody(world):
    world.engine.requests["r"].is_finished = True


def damage_p10(world):
    request = world.engine.requests["s"]
    request.is_finished = True
    request.parked.clear()
    request.unflushed_promotions = 0


def damage_p13_absent(world):
    world.primary.policy.admit(ks("?"))


def damage_p13_unranked(world):
    world.primary.policy.discard(ks("i"))


def damage_p13_twice(world):
    world.primary.policy.resident = lambda: [*ks("iii")]


def damage_p16(world):
    world.engine.requests["s"].parked.clear()
    world.engine.jobs.clear()
    world.engine.counters.job_results = world.engine.counters.jobs_submitted


def damage_p1(world):
    world.engine.counters.job_results += 1


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


def violated(engine):
    found = []
    for law in LAWS:
        try:
            law.enforce(law.of_state(engine))
        except InvariantError:
            found.append(law.name.lower())
    return found


def test_a_busy_engine_obeys_every_law_of_state():
    world = busy_world()
    counts = world.primary.counts
    assert min(counts.values()) > 0, counts
    check_state(world.engine)
    world.wind_down()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_violates_its_law(damage):
    world = busy_world()
    damage(world)
    assert damage.__name__.split("_")[1] in violated(world.engine)
    with pytest.raises(InvariantError):
        check_state(world.engine)


def test_a_violation_names_its_law_and_says_what_is_wrong():
    world = busy_world()
    damage_p1(world)
    with pytest.raises(InvariantError, match=r"^P1 \(every accepted job .*\): 6 jobs were submi"):
        check_state(world.engine)


def test_a_policy_that_knows_its_own_invariants_is_asked():
    world = World(policy="arc")
    world.primary.policy.p = -1.0
    with pytest.raises(InvariantError, match=r"P13 .*p=-1"):
        check_state(world.engine)
    assert list(ArcPolicy(2).violations()) == []


# -- rest ---------------------------------------------------------------------------------------


def at_rest():
    world = World()
    ctx = world.begin()
    world.store(ctx, "a")
    world.settle()
    world.finish(ctx)
    return world


def test_an_engine_at_rest_obeys_every_law_of_rest():
    world = at_rest()
    check_quiescent(world.engine, kept=[A], tier_contents=[{A}])
    check_quiescent(world.engine, kept=[A], tier_contents=[set()])
    check_quiescent(world.engine, kept=[B], tier_contents=[{B}])


@pytest.mark.parametrize(
    ("disturb", "law"),
    [
        (lambda world, ctx: world.store(ctx, "b"), "P1"),
        (lambda world, ctx: (world.store(ctx, "b"), world.disown()), "P1"),
        (lambda world, ctx: world.load(ctx, "a"), "P2"),
        (lambda world, ctx: world.offer(ctx, "b"), "P2"),
    ],
)
def test_what_is_left_over_violates_rest(disturb, law):
    world = at_rest()
    disturb(world, world.begin())
    with pytest.raises(InvariantError, match=rf"^{law} "):
        check_quiescent(world.engine)


def test_a_held_slot_is_no_rest():
    world = at_rest()
    world.fill(0, ks("x"))
    world.lookup(world.begin(), "x")
    world.step()
    world.disown()
    found = []
    for law in LAWS:
        found += law.of_rest(rest_of(world))
    assert any("held" in text for text in found)


def test_a_promotion_that_nobody_read_is_no_rest():
    world = at_rest()
    world.fill(0, ks("x"))
    world.lookup(world.begin(), "x")
    world.step()
    world.settle()
    assert list(LAWS[1].of_rest(rest_of(world))) == [
        f"block {k('x').hex()} is PINNED",
        "1 slots count as promotions",
    ]


def rest_of(world):
    return Rest(world.engine, (), ())


def test_a_request_that_waits_for_ever_is_no_rest():
    world = at_rest()
    ctx = world.begin()
    world.offer(ctx, "b")
    world.finish(ctx)
    world.begin("live")
    law = LAWS[9]
    assert list(law.of_rest(rest_of(world))) == [
        "the tiers were not told that request 'r' has finished"
    ]


def test_a_lost_block_violates_p9():
    with pytest.raises(InvariantError, match=f"P9 .*{B.hex()} is lost"):
        check_quiescent(at_rest().engine, kept=[B], tier_contents=[{B}, set()])


# -- stories ------------------------------------------------------------------------------------


def accepted(job_id=0, *, tier=0, req_id="r", promotion=False):
    return JobAccepted(tier, job_id, req_id, promotion, 1)


def asked(*, offered=(), busy=(), granted=True, evicted=(), before=0, after=1):
    return RoomAsked(tuple(offered), frozenset(busy), granted, tuple(evicted), before, after)


OPENED = RequestOpened(0, "r")
PROMOTION = accepted(1, promotion=True)
BLOCK, TEMPORARY, OTHER = FileKind.BLOCK, FileKind.TEMPORARY, FileKind.OTHER

GOOD = {
    "jobs": [
        OPENED,
        accepted(0),
        accepted(1, promotion=True),
        JobAnswered(0, 0),
        JobAnswered(0, 1, disowned=True),
        RequestClosed(0, "r"),
        CopyEnded(0, 1),
        AllQuiet(),
    ],
    "a job under way": [OPENED, accepted(0)],
    "an id used again": [OPENED, RequestClosed(0, "r"), OPENED, accepted(0)],
    "rooms": [
        asked(offered=[A], evicted=[B]),
        asked(offered=[A], busy=[B], granted=False, before=3, after=3),
    ],
    "contents": [ContentWritten(A, "x"), ContentRead(A, "x"), ContentWritten(A, "x")],
    "steps": [
        OPENED,
        TierPolled(0),
        TierPolled(1),
        accepted(2),
        accepted(3),
        PROMOTION,
        StepClosed(),
        TierPolled(0),
        accepted(4, promotion=True),
        StepClosed(),
    ],
    "events": [
        EventsEmitted("CPU", (A, B), removed=False),
        EventsEmitted("fs", (A,), removed=False),
        EventsEmitted("CPU", (A,), removed=True),
        ResidentSeen("CPU", frozenset({B})),
        ResidentSeen("fs", frozenset({A})),
    ],
    "deferrals": [
        RequestDeferred("r", 1),
        StepClosed(),
        RequestDeferred("r", 1),
        RequestDecided("r"),
        StepClosed(),
        StepClosed(),
    ],
    "stale": [StaleCompletionSeen(0, "same", "same")],
    "calls": [CallReturned("lookup", 0.001, 0.002)],
    "device": [
        DeviceReadBegan(0, frozenset({1, 2})),
        DeviceBlockOverwritten(3),
        DeviceReadEnded(0),
        DeviceBlockOverwritten(1),
    ],
    "files": [FileFound("a.bin", BLOCK, 8, 8), FileFound("a.tmp", TEMPORARY, 3, 8)],
    "runs": [RunEnded("s", "1", "x"), RunEnded("s", "2", "x"), RunEnded("t", "1", "y")],
}

BAD = {
    "P1 accepted job 0 twice": [OPENED, accepted(0), accepted(0)],
    "P1 answered job 0, which it did not owe": [
        OPENED,
        accepted(0),
        JobAnswered(0, 0),
        JobAnswered(0, 0),
    ],
    "P1 released job 0, which was not disowned": [CopyEnded(0, 0)],
    "P1 never answered job 0": [OPENED, accepted(0), AllQuiet()],
    "P1 never released job 0": [
        OPENED,
        accepted(0),
        JobAnswered(0, 0, disowned=True),
        AllQuiet(),
    ],
    "P5 evicted while in use": [asked(busy=[B], evicted=[B])],
    "P5 evicted by its own offer": [asked(offered=[A], evicted=[A])],
    "P6 refusing 6100000000 changed 0 into 1": [asked(offered=[A], granted=False)],
    "P6 refusing": [asked(granted=False, evicted=[A], after=0)],
    "P8 two contents": [ContentWritten(A, "x"), ContentWritten(A, "y")],
    "P8 read as y, not x": [ContentWritten(A, "x"), ContentRead(A, "y")],
    "P8 never written": [ContentRead(A, "x")],
    "P10 told twice that request 'r' began": [OPENED, OPENED],
    "P10 the end of request 'r', which was not open": [RequestClosed(0, "r")],
    "P10 got job 0 for request 'r', which was not open": [
        OPENED,
        RequestClosed(0, "r"),
        accepted(0),
        JobAnswered(0, 0),
    ],
    "P11 2 promotions for request 'r' at tier 0": [
        OPENED,
        PROMOTION,
        accepted(2, promotion=True),
        StepClosed(),
    ],
    "P11 2 polls at tier 3": [TierPolled(3), TierPolled(3), StepClosed()],
    "P12 is gone, but its events": [
        EventsEmitted("CPU", (A,), removed=False),
        ResidentSeen("CPU", frozenset()),
    ],
    "P12 is resident, but its events": [ResidentSeen("CPU", frozenset({A}))],
    "P14 request 'r' is still deferred": [RequestDeferred("r", 1), StepClosed(), StepClosed()],
    "P15 job 7, from before the reset": [StaleCompletionSeen(7, "this", "that")],
    "P17 lookup took 0.003000 s of 0.002000": [CallReturned("lookup", 0.003, 0.002)],
    "P18 device block 1 was overwritten while store 0": [
        DeviceReadBegan(0, frozenset({1})),
        DeviceBlockOverwritten(1),
    ],
    "P19 a.bin has 3 of 8 bytes": [FileFound("a.bin", BLOCK, 3, 8)],
    "P19 core is neither": [FileFound("core", OTHER, 3, 8)],
    "P20 s: run 2 ended in y, run 1 in x": [RunEnded("s", "1", "x"), RunEnded("s", "2", "y")],
}


def story_of(facts, bound=100):
    story = Story(bound)
    story.tell(*facts)
    return story


@pytest.mark.parametrize("facts", GOOD.values(), ids=GOOD)
def test_a_good_story_obeys_every_law(facts):
    check_story(story_of(facts))


@pytest.mark.parametrize(("violation", "facts"), BAD.items(), ids=BAD)
def test_a_bad_story_violates_its_law(violation, facts):
    name, text = violation.split(" ", 1)
    with pytest.raises(InvariantError) as caught:
        check_story(story_of(facts))
    assert str(caught.value).startswith(f"{name} (")
    assert text in str(caught.value)


@pytest.mark.parametrize("facts", GOOD.values(), ids=GOOD)
def test_a_good_story_that_has_forgotten_its_beginning_violates_nothing(facts):
    for bound in range(len(facts)):
        story = story_of(facts, bound)
        assert not story.is_complete
        assert len(list(story)) == len(story) == bound
        check_story(story)


def test_a_forgetful_story_still_proves_what_it_remembers():
    story = story_of([StepClosed(), OPENED, accepted(0), AllQuiet()], bound=3)
    with pytest.raises(InvariantError, match="P1 "):
        check_story(story)


def test_events_and_effects_of_the_engine_tell_their_facts():
    world = World()
    ctx = world.begin()
    world.store(ctx, "a")
    world.disown()
    world.release()
    world.finish(ctx)
    world.step()
    assert list(world.story)[1:] == [
        *list(world.story.of(RoomAsked)),
        ContentWritten(A, "bytes of 6100000000"),
        JobAccepted(0, 0, "r", is_promotion=False, num_blocks=1),
        JobAnswered(0, 0, disowned=True),
        CopyEnded(0, 0),
        RequestClosed(0, "r"),
        StepClosed(),
        EventsEmitted("CPU", (A,), removed=False),
        ResidentSeen("CPU", frozenset({A})),
    ]
    assert fact_of(StepEnded()) == StepClosed()
    for silent in StepBegan(0.0), CacheReset(), ResetFlushed():
        assert fact_of(silent) is None


def test_a_fingerprint_changes_with_pins_ranks_and_held_slots():
    primary = Primary(2, LruPolicy(2))
    ctx = ReqContext("r")
    primary.open_request(ctx)
    seen = [fingerprint(primary)]
    for change in (
        lambda: primary.prepare_store(ctx, ks("ab")),
        lambda: primary.complete_store(ctx, ks("a"), success=True),
        lambda: primary.prepare_load(ctx, ks("a")),
        lambda: primary.policy.access(ks("a"), lambda _: True),
        lambda: primary.disown_write(ks("b")),
    ):
        change()
        seen.append(fingerprint(primary))
    assert len(set(seen)) == len(seen)
    assert whole_state(primary)[0] == seen[-1]
