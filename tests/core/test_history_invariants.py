"""Every invariant of a history notices its breach."""

import pytest
from core.states import whole_state
from core.terms import k, ks
from core.world import World
from planner_invariants import (
    AllQuiet,
    BlocksTouched,
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
    History,
    JobAccepted,
    RequestClosed,
    RequestDecided,
    RequestDeferred,
    RequestOpened,
    ResidentSeen,
    ResultTaken,
    RoomAsked,
    RunEnded,
    StaleCompletionSeen,
    StepClosed,
    TierPolled,
    check_history,
    fact_of,
    fingerprint,
)

from kvoffload_async.core.ledger import StartProbe, TouchBlocks
from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import InvariantError
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import ENGINE_REQ_ID, ReqContext

A, B = k("a"), k("b")


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
        ResultTaken(0, 0),
        ResultTaken(0, 1, orphaned=True),
        RequestClosed(0, "r"),
        CopyEnded(0, 1),
        AllQuiet(),
    ],
    "a job under way": [OPENED, accepted(0)],
    "the engine's own request": [
        RequestOpened(0, ENGINE_REQ_ID),
        accepted(0, req_id=ENGINE_REQ_ID),
        BlocksTouched(0, ENGINE_REQ_ID),
        RequestClosed(0, ENGINE_REQ_ID),
    ],
    "an id used again": [OPENED, RequestClosed(0, "r"), OPENED, accepted(0)],
    "rooms": [
        asked(offered=[A], evicted=[B]),
        asked(offered=[A], busy=[B], granted=False, before=3, after=3),
    ],
    "contents": [ContentWritten(A, "x"), ContentRead(A, "x"), ContentWritten(A, "x")],
    "steps": [
        OPENED,
        TierPolled(0),
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
        ResultTaken(0, 0),
        ResultTaken(0, 0),
    ],
    "P1 released job 0, which was not orphaned": [CopyEnded(0, 0)],
    "P1 never answered job 0": [OPENED, accepted(0), AllQuiet()],
    "P1 never released job 0": [
        OPENED,
        accepted(0),
        ResultTaken(0, 0, orphaned=True),
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
        ResultTaken(0, 0),
    ],
    "P10 got job 0 for request 'kvoffload_async:engine', which was not open": [
        accepted(req_id=ENGINE_REQ_ID),
        ResultTaken(0, 0),
    ],
    "P10 got promotion 0 for the engine's own request": [
        RequestOpened(0, ENGINE_REQ_ID),
        accepted(req_id=ENGINE_REQ_ID, promotion=True),
    ],
    "P10 told of a use within request 'r', which was not open": [
        OPENED,
        RequestClosed(0, "r"),
        BlocksTouched(0, "r"),
    ],
    "P11 2 touches at tier 0": [BlocksTouched(0, None), BlocksTouched(0, None), StepClosed()],
    "P11 2 promotions for request 'r' at tier 0": [
        OPENED,
        PROMOTION,
        accepted(2, promotion=True),
        StepClosed(),
    ],
    "P11 3 polls at tier 3": [*[TierPolled(3)] * 3, StepClosed()],
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


def history_of(facts, bound=100):
    history = History(bound)
    history.record(*facts)
    return history


@pytest.mark.parametrize("facts", GOOD.values(), ids=GOOD)
def test_a_good_story_obeys_every_law(facts):
    check_history(history_of(facts))


@pytest.mark.parametrize(("violation", "facts"), BAD.items(), ids=BAD)
def test_a_bad_story_violates_its_law(violation, facts):
    name, text = violation.split(" ", 1)
    with pytest.raises(InvariantError) as caught:
        check_history(history_of(facts))
    assert str(caught.value).startswith(f"{name} (")
    assert text in str(caught.value)


@pytest.mark.parametrize("facts", GOOD.values(), ids=GOOD)
def test_a_good_story_that_has_forgotten_its_beginning_violates_nothing(facts):
    for bound in range(len(facts)):
        history = history_of(facts, bound)
        assert not history.is_complete
        assert len(list(history)) == len(history) == bound
        check_history(history)


def test_a_forgetful_story_still_proves_what_it_remembers():
    history = history_of([StepClosed(), OPENED, accepted(0), AllQuiet()], bound=3)
    with pytest.raises(InvariantError, match="P1 "):
        check_history(history)


def test_what_the_planner_wants_and_takes_in_is_recorded():
    world = World()
    ctx = world.begin()
    world.store(ctx, "a")
    world.orphan()
    world.release()
    world.finish(ctx)
    world.step()
    assert list(world.history)[1:] == [
        *list(world.history.of(RoomAsked)),
        ContentWritten(A, "bytes of 6100000000"),
        JobAccepted(0, 0, "r", is_promotion=False, num_blocks=1),
        ResultTaken(0, 0, orphaned=True),
        CopyEnded(0, 0),
        RequestClosed(0, "r"),
        StepClosed(),
        EventsEmitted("CPU", (A,), removed=False),
        ResidentSeen("CPU", frozenset({A})),
    ]
    assert fact_of(0, StartProbe(1, (A,))) is None
    assert fact_of(0, TouchBlocks((A,))) == BlocksTouched(0, None)


def test_a_fingerprint_changes_with_pins_ranks_and_held_slots():
    primary = Primary(2, LruPolicy(2))
    ctx = ReqContext("r")
    primary.open_request(ctx)
    seen = [fingerprint(primary)]
    for change in (
        lambda: primary.prepare_store(ctx, ks("ab")),
        lambda: primary.complete_store(ctx, ks("a"), success=True),
        lambda: primary.prepare_load(ctx, ks("a")),
        lambda: primary.policy.access([primary.slot_of(k("a"))], [True]),
        lambda: primary.orphan_write(ks("b")),
    ):
        change()
        seen.append(fingerprint(primary))
    assert len(set(seen)) == len(seen)
    assert whole_state(primary)[0] == seen[-1]
