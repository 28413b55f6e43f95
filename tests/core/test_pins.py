"""Blocks that a user pins stay, and take nothing that requests and stores have a right to."""

from core.terms import HIT, MISS, k, ks
from core.world import World

from kvoffload_async.core import pins as module


def stored(num_slots=12, names="abcdef", tiers=0):
    world = World(num_slots, tiers)
    ctx = world.begin()
    world.store(ctx, names)
    world.finish_all()
    return world, ctx


def test_pinned_blocks_are_not_evicted_until_their_time():
    world, ctx = stored()
    assert world.planner.pins.pin(ks("abc"), 10.0) == 3
    world.finish(ctx)
    ctx = world.begin("s")
    world.offer(ctx, "123456789")
    world.written()
    assert world.lookups(ctx, "abc") == [HIT, HIT, HIT]
    world.step(11.0)
    world.step()
    assert not world.planner.pins
    world.offer(ctx, "uvwxyz")
    world.written()
    assert MISS in world.lookups(ctx, "abc")
    world.wind_down()


def test_a_later_time_counts_and_an_earlier_does_not():
    world, _ = stored()
    pins = world.planner.pins
    pins.pin(ks("a"), 10.0)
    pins.pin(ks("ab"), 20.0)
    pins.pin(ks("a"), 5.0)
    for now_s, left in ((6.0, 2), (11.0, 2), (19.0, 2)):
        pins.end_step(now_s)
        assert len(pins) == left
    for _ in range(4):
        pins.end_step(20.0)
    assert not pins
    world.wind_down()


def test_a_ticket_and_the_pins_fit_into_the_primary_together():
    world, ctx = stored(8, "ab", tiers=1)
    world.planner.pins.pin(ks("ab"), 1000.0)
    world.finish(ctx)
    wanted = "cdefghij"
    world.fill(0, ks(wanted))
    ctx = world.begin("s", key_positions={k(name): i for i, name in enumerate(wanted)})
    world.lookups(ctx, wanted)
    for _ in range(3):
        world.step()
        world.finish_all()
    answers = world.lookups(ctx, wanted)
    assert answers == [HIT] * 5 + [MISS] * 3, "eight slots, one for stores, two pinned"
    world.wind_down()


def test_pins_leave_the_room_of_tickets_alone():
    world, ctx = stored(8, "abcdef", tiers=1)
    world.finish(ctx)
    world.fill(0, ks("123"))
    ctx = world.begin("s")
    world.lookups(ctx, [*"abcd", 1, 2, 3])
    world.step()
    assert world.planner.room.named == world.planner.room.budget
    assert world.planner.pins.pin(ks("ab"), 10.0) == 0
    world.wind_down()


def test_pinning_again_and_again_costs_no_memory(monkeypatch):
    monkeypatch.setattr(module, "_MOST_OUTDATED", 8)
    world, _ = stored()
    pins = world.planner.pins
    for number in range(1000):
        pins.pin(ks("ab"), 100.0 + number)
    assert len(pins._ends) < 20
    pins.end_step(1098.0)
    assert len(pins) == 2
    for _ in range(20):
        pins.end_step(1099.0)
    assert not pins
    world.wind_down()
