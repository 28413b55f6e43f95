"""Every invariant of a state notices its damage."""

from dataclasses import replace

import pytest
from core.terms import k, ks
from core.world import World
from planner_invariants import (
    HISTORY_INVARIANTS,
    REST_INVARIANTS,
    Rest,
    check_quiescent,
)

from kvoffload_async.core.health import BreakerEvent
from kvoffload_async.core.invariants import STATE_INVARIANTS, check_state
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.requests import RequestState
from kvoffload_async.errors import InvariantError
from kvoffload_async.policies.arc import ArcPolicy
from kvoffload_async.types import ReqContext

A, B = k("a"), k("b")


def test_the_invariants_are_p1_to_p28():
    every = [*STATE_INVARIANTS, *REST_INVARIANTS, *HISTORY_INVARIANTS]
    assert {invariant.name for invariant in every} == {f"P{i}" for i in range(1, 29)}
    assert all(invariant.statement for invariant in every)


# -- state --------------------------------------------------------------------------------------


def busy_world():
    """Everything at once: idle, pinned, writing, held and free slots, jobs of all kinds."""
    world = World(13, 2, request_level=[0])
    world.fill(1, ks("yvu"))
    ctx, other, waiting = world.begin("r"), world.begin("s"), world.begin("t")
    world.store(ctx, "ij")
    world.finish_all()
    for request, name in (ctx, "y"), (waiting, "v"), (other, "u"):
        world.lookup(request, name)
    world.step()
    world.store(ctx, "c")
    world.orphan(PROMOTED)
    world.finish_job(PROMOTED + 1)
    world.store(ctx, "d")
    world.orphan(max(world.running))
    world.load(ctx, "i")
    world.offer(ctx, "w")
    world.offer(other, "w")
    return world


PROMOTED = 2
"""Id of the first of three promotions of `busy_world`."""


def slot_of(world, name):
    return world.primary.slot_of(k(name))


def damage_p3_count(world):
    world.primary.shares[0].idle += 1


def damage_p3_free(world):
    world.primary.pool.unused.give_back([0])


def damage_p3_range(world):
    world.primary.pool.unused.give_back([99])


def damage_p3_key(world):
    world.primary._blocks._keys.update([slot_of(world, "i")], [k("j")])


def damage_p4_pin(world):
    world.primary._refs[slot_of(world, "i")] += 1


def request_of(world, req_id):
    (found,) = [r for ctx, r in world.planner.requests.items() if ctx.req_id == req_id]
    return found


def damage_p4_write(world):
    request_of(world, "r").writing.clear()


def damage_p4_not_written(world):
    request_of(world, "r").writing.add(k("i"))


def damage_p4_slot(world):
    assert any(k("c") in job.keys for _, job in world.planner.jobs.values())
    slots = [slot_of(world, "c"), slot_of(world, "i")]
    world.primary._blocks.add(ks("ic"), slots)


def damage_p4_retained(world):
    world.planner.orphaned[PROMOTED].holds_slots = False


def damage_p7_twice(world):
    _, job = world.planner.jobs[PROMOTED + 2]
    world.planner.tiers[1].jobs._records[99] = JobRecord(replace(job, job_id=99), job.is_promotion)
    world.planner.counters.jobs_submitted += 1


def damage_p7_count(world):
    world.planner.room._named_in[world.primary.shares[0]] += 1


def damage_p7_in_flight(world):
    world.planner.room.in_flight.add(k("i"))


def damage_p7_budget(world):
    world.planner.room.reserved = world.primary.num_slots - 1


def damage_p21_cascading(world):
    world.planner.tiers[0].cascading_blocks += 1


def damage_p21_promotions(world):
    world.planner.tiers[0].promotion_slots += 1


def damage_p22_for_one_that_was_computed(world):
    request_of(world, "t").waits = False


def damage_p22_for_one_that_has_finished(world):
    world.planner.room.use(request_of(world, "t"))
    request_of(world, "t").waits = False
    request_of(world, "t").is_finished = True


def damage_p21_copies(world):
    world.planner.room.copies_each = 0


def damage_p10(world):
    request = request_of(world, "s")
    request.is_finished = True
    request.parked.clear()


def damage_p13_absent(world):
    world.primary.policy.admit(ks("?"), list(world.primary.pool.unused)[:1])


def damage_p13_unranked(world):
    world.primary.policy.discard([slot_of(world, "i")])


def damage_p13_twice(world):
    world.primary.policy.resident = lambda: [slot_of(world, "i")] * 3


def damage_p16(world):
    world.planner.cascades.parking.clear()
    for queue in world.planner.cascades.queues:
        queue.is_shut = True
    world.planner.counters.job_results = world.planner.counters.jobs_submitted


def damage_p10_own(world):
    for record in world.planner.tiers[1].jobs._records.values():
        if record.job.is_promotion:
            context = world.planner.own.ctx
            record.job = replace(record.job, req_context=context)


def damage_p23_count(world):
    world.planner.cascades.queues[0].count += 1


def damage_p23_mark(world):
    world.planner.cascades.queues[0]._marks[slot_of(world, "i")] = 1


def damage_p23_under_way(world):
    world.planner.cascades.queues[0]._marks[slot_of(world, "i")] = 2


def damage_p23_tries(world):
    world.planner.cascades.queues[0]._marks[slot_of(world, "i")] = 4


def damage_p23_unreadable(world):
    world.planner.cascades.queues[0].add([slot_of(world, "w")])


def damage_p23_free(world):
    free = next(iter(world.primary.pool.unused))
    world.planner.cascades.queues[0]._oldest_first.append([free])


def damage_p23_unwatched(world):
    world.primary.on_evicted = None


def damage_p24_lookups(world):
    world.planner.counters.lookups += 1


def damage_p24_lookups_of_the_primary(world):
    world.primary.counters.hits += 1


def damage_p24_lookups_of_a_tier(world):
    world.planner.tiers[0].counters.undecided += 1


def damage_p24_jobs(world):
    world.planner.tiers[0].counters.finished_jobs += 1


def damage_p24_failures(world):
    world.planner.tiers[0].counters.failed_jobs_by_error["other"] = 1000


def damage_p24_drops(world):
    world.planner.tiers[0].counters.dropped_blocks += 1


def damage_p24_pins(world):
    world.primary.loading.num_pins += 1


def damage_p25_loads(world):
    tried(world.planner.tiers[0].health.loads)


def damage_p25_stores(world):
    tried(world.planner.tiers[0].health.stores)


def damage_p26_queue(world):
    world.planner.room.queue[any_request(world)] = None


def damage_p26_queued_with_a_ticket(world):
    world.planner.room._join(request_of(world, "t"))


def damage_p26_queued(world):
    any_request(world).is_queued = True


def damage_p22_who_is_gone(world):
    world.planner.room._join(RequestState(ReqContext("gone"), ()))


def damage_p22_for_one_that_was_looked_up(world):
    world.planner.room.early[request_of(world, "t")] = 0.0, 0


def damage_p22_early_beside_a_queue(world):
    damage_p22_for_one_that_was_looked_up(world)
    damage_p22_who_is_gone(world)


def damage_p7_pins(world):
    world.primary.num_kept += 1


def damage_p27_nobody_deletes(world):
    world.planner.tiers[0].barred.sets.append(frozenset(ks("a")))


def damage_p26_ticket(world):
    request_of(world, "t").ticket[k("?")] = False


def damage_p26_awaits(world):
    request_of(world, "t").awaits += 1


def damage_p26_wants(world):
    request_of(world, "t").wants.clear()


def any_request(world):
    return world.planner.requests[world.live["s"]]


def damage_p23_protection(world):
    world.primary.protect([slot_of(world, "j")])


def damage_p23_protected_mark(world):
    world.planner.cascades.queues[0]._marks[slot_of(world, "i")] = 128 + 2


def damage_p23_protected_blocks(world):
    world.primary.shares[0].protected += 1


def tried(breaker):
    """Have the breaker wait for a try that is under way nowhere."""
    for _ in range(breaker.settings.fault_threshold):
        breaker.note(BreakerEvent.FAULTED, 1e6, error=OSError())
    breaker.note(BreakerEvent.TRIED, 2e6)


def damage_p1(world):
    world.planner.counters.job_results += 1


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


def violated(planner):
    found = []
    for invariant in STATE_INVARIANTS:
        try:
            invariant.enforce(planner)
        except InvariantError:
            found.append(invariant.name.lower())
    return found


def test_a_busy_engine_keeps_every_invariant_of_state():
    world = busy_world()
    counts = world.primary.counts
    assert min(counts.values()) > 0, counts
    check_state(world.planner)
    world.wind_down()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_violates_its_invariant(damage):
    world = busy_world()
    damage(world)
    assert damage.__name__.split("_")[1] in violated(world.planner)
    with pytest.raises(InvariantError):
        check_state(world.planner)


def test_a_violation_names_its_invariant_and_says_what_is_wrong():
    world = busy_world()
    damage_p1(world)
    with pytest.raises(InvariantError, match=r"^P1 \(every accepted job .*\): \d jobs were submi"):
        check_state(world.planner)


def test_a_policy_that_knows_its_own_invariants_is_asked():
    world = World(policy="arc")
    world.primary.policy.p = -1.0
    with pytest.raises(InvariantError, match=r"P13 .*p=-1"):
        check_state(world.planner)
    assert list(ArcPolicy(2).violations()) == []


# -- rest ---------------------------------------------------------------------------------------


def at_rest():
    world = World()
    ctx = world.begin()
    world.store(ctx, "a")
    world.finish_job()
    world.finish(ctx)
    return world


def test_an_engine_at_rest_keeps_every_invariant_of_rest():
    world = at_rest()
    check_quiescent(world.planner, kept=[A], tier_contents=[{A}])
    check_quiescent(world.planner, kept=[A], tier_contents=[set()])
    check_quiescent(world.planner, kept=[B], tier_contents=[{B}])


@pytest.mark.parametrize(
    ("disturb", "invariant"),
    [
        (lambda world, ctx: world.store(ctx, "b"), "P1"),
        (lambda world, ctx: (world.store(ctx, "b"), world.orphan()), "P1"),
        (lambda world, ctx: world.load(ctx, "a"), "P2"),
        (lambda world, ctx: world.offer(ctx, "b"), "P2"),
    ],
)
def test_what_is_left_over_violates_rest(disturb, invariant):
    world = at_rest()
    disturb(world, world.begin())
    with pytest.raises(InvariantError, match=rf"^{invariant} "):
        check_quiescent(world.planner)


def test_a_held_slot_is_no_rest():
    world = at_rest()
    world.fill(0, ks("x"))
    world.lookup(world.begin(), "x")
    world.step()
    world.orphan()
    found = []
    for invariant in REST_INVARIANTS:
        found += invariant.violations(rest_of(world))
    assert any("held" in text for text in found)


def test_a_promotion_that_nobody_read_is_no_rest():
    world = at_rest()
    world.fill(0, ks("x"))
    world.lookup(world.begin(), "x")
    world.step()
    world.finish_job()
    assert list(of_rest("P2").violations(rest_of(world))) == [
        f"block {k('x').hex()} is pinned",
        "1 slots are named by tickets and promotions",
    ]


def of_rest(name):
    return next(invariant for invariant in REST_INVARIANTS if invariant.name == name)


def rest_of(world):
    return Rest(world.planner, (), ())


def test_a_request_that_waits_for_ever_is_no_rest():
    world = at_rest()
    ctx = world.begin()
    world.offer(ctx, "b")
    world.finish(ctx)
    world.begin("live")
    assert list(of_rest("P10").violations(rest_of(world))) == [
        "the tiers were not told that request 'r' has finished"
    ]


def test_a_lost_block_violates_p9():
    with pytest.raises(InvariantError, match=f"P9 .*{B.hex()} is lost"):
        check_quiescent(at_rest().planner, kept=[B], tier_contents=[{B}, set()])
