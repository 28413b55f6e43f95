"""What goes first where a store outruns the tiers: never what a tier in order is still to get."""

import pytest
from core.terms import k, ks, state_of
from core.world import DOWN, World

from kvoffload_async.core.cascades import _SLOTS_A_STEP
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.primary import ProtectedSlots

NOT_YET = "abcd"


def crowded(num_slots=4, tiers=1, *, waits=False, names=NOT_YET, **options):
    """A primary full of blocks of which each tier takes one at a time; the first is under way."""
    world = World(
        num_slots,
        tiers,
        copies_each=1,
        **options,
    )
    world.primary.drops_pending = not waits
    ctx = world.begin("writer", key_positions={k(name): i for i, name in enumerate(names)})
    for name in names:
        world.store(ctx, [name])
    world.step()
    return world


def resident(world):
    return {key for key, _, _ in world.primary.resident()}


def offer(world, names, req_id="new"):
    return world.offer(world.live.get(req_id) or world.begin(req_id), names)


@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_block_that_every_tier_has_goes_before_an_older_one_that_is_pending(policy, waits):
    world = crowded(policy=policy, waits=waits)
    world.finish_job()
    world.step()
    assert state_of(world.primary, k("b")) == "pinned", "it is on its way"
    assert offer(world, "x").evicted_keys == ks("a")
    world.check()
    world.wind_down()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_where_none_of_that_kind_is_left_a_store_drops_as_few_as_it_needs(policy):
    world = crowded(policy=policy)
    counters = world.planner.tiers[0].counters
    assert offer(world, "x").evicted_keys == ks("b")
    assert (counters.dropped["evicted"], counters.dropped_blocks) == (1, 1)
    world.finish(world.live["writer"])
    assert offer(world, "y").evicted_keys == ks("d"), "of a request that has ended, the tail"
    world.check()
    world.wind_down()


@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_a_store_that_waits_is_refused_until_the_tier_has_taken_something(policy):
    world = crowded(policy=policy, waits=True)
    before = resident(world)
    assert offer(world, "x") is None
    assert resident(world) == before
    assert world.planner.tiers[0].counters.dropped_blocks == 0
    world.finish_job()
    world.step()
    assert offer(world, "x").evicted_keys == ks("a")
    world.written()
    assert offer(world, "y") is None
    world.wind_down()
    assert world.tiers[0].contents.keys() == set(ks("abcdx"))


def test_a_store_that_waits_has_the_head_that_fits():
    world = crowded(waits=True, accept_prefix=True)
    world.finish_job()
    output = offer(world, "xy")
    assert (list(output.keys_to_store), list(output.keys_left_out)) == (ks("x"), ks("y"))
    world.wind_down()


def test_a_promotion_drops_nothing_that_is_pending_where_stores_wait():
    world = crowded(waits=True)
    world.fill(0, ks("z"))
    assert world.primary.reserve(ks("z")) == []
    world.primary.drops_pending = True
    assert world.primary.reserve(ks("z"))
    assert k("b") not in resident(world)


def test_a_store_drops_none_of_its_own_blocks():
    world = crowded()
    assert list(offer(world, "bcx").evicted_keys) == ks("d")
    assert offer(world, "bcyz", "other") is None
    world.wind_down()


@pytest.mark.parametrize("waits", [False, True])
def test_a_tier_that_is_down_wants_nothing(waits):
    world = crowded(waits=waits, tiers=2, breaker=BreakerSettings(1, retry_after_s=50.0))
    first, second = sorted(world.running)
    world.fail(first, error=DOWN)
    world.step()
    assert world.planner.tiers[0].counters.dropped_blocks == 0
    world.finish_job(second)
    world.step()
    assert offer(world, "x").evicted_keys == ks("a"), "the other tier has it"
    assert (offer(world, "y", "other") is None) == waits, "the other one is pending the rest"
    world.check()
    world.wind_down()


def test_a_tier_that_hangs_wants_nothing_until_its_copy_has_ended():
    world = crowded(waits=True)
    world.orphan()
    world.step()
    assert offer(world, "x").evicted_keys == ks("b")
    world.written()
    world.release()
    world.step()
    assert offer(world, "y").evicted_keys == ks("a"), "it has landed after all"
    assert offer(world, "z") is None, "what else is pending for it is protected again"
    world.wind_down()


def test_a_tier_whose_share_is_taken_by_overdue_copies_wants_nothing():
    """Of before a reset, or loads: no store can begin that would be overdue in its turn."""
    world = crowded(waits=True)
    world.orphan()
    world.reset()
    world.flush_reset()
    ctx = world.begin("again")
    for name in "efg":
        world.store(ctx, [name])
    world.step()
    assert offer(world, "x").evicted_keys == ks("e")
    world.wind_down()


def test_a_tier_that_comes_back_wants_what_it_is_still_pending():
    world = crowded(waits=True, breaker=BreakerSettings(1, retry_after_s=5.0))
    world.fail(error=DOWN)
    world.step()
    assert world.primary.protected_blocks == 0
    world.step(10.0)
    world.step()
    world.finish_job()
    world.step()
    assert world.primary.protected_blocks == 2
    world.wind_down()
    assert world.tiers[0].contents.keys() == set(ks(NOT_YET))


def test_a_step_looks_at_a_bounded_part_of_what_a_failed_tier_is_pending():
    num_slots = 2 * _SLOTS_A_STEP + 8
    world = crowded(num_slots, breaker=BreakerSettings(1, retry_after_s=50.0), names=())
    ctx = world.begin()
    world.store(ctx, range(num_slots))
    world.end_step()
    world.fail(error=DOWN)
    left = []
    for _ in range(4):
        assert (world.planner.cascades.wakes_in_s(0.0) == 0.0) == bool(0 < len(left) < 3)
        world.end_step()
        left.append(world.primary.protected_blocks)
    assert left == [num_slots - _SLOTS_A_STEP, 8, 0, 0]
    world.check()


def test_nobody_asks_about_a_block_again_as_long_as_it_is_pending():
    num_blocks, rounds = 512, 64
    world = crowded(num_blocks, names=())
    ctx = world.begin()
    world.store(ctx, range(num_blocks))
    asked = []
    first_test = world.primary._first_test

    def watched(share):
        is_evictable = first_test(share)
        return lambda slot: asked.append(slot) or is_evictable(slot)

    world.primary._first_test = watched
    for number in range(rounds):
        world.store(world.begin(f"r{number}"), [f"new{number}"])
    assert world.planner.tiers[0].counters.dropped_blocks == rounds
    assert len(asked) <= num_blocks + 3 * rounds


def test_what_is_used_again_is_not_next_any_more():
    world = crowded()
    assert offer(world, "x").evicted_keys == ks("b")
    world.planner.touch(ks("c"), world.begin("far"))
    world.finish(world.live["far"])
    assert offer(world, "y").evicted_keys == ks("d")
    world.wind_down()


def test_a_reset_protects_nothing_of_before():
    world = crowded()
    assert world.primary.protected_blocks == 3
    world.reset()
    assert world.primary.protected_blocks == 0
    world.check()
    world.flush_reset()
    world.wind_down()


def test_protected_slots_leave_in_the_order_in_which_they_were_met():
    slots = ProtectedSlots(4)
    assert slots.discard([1]) == slots.first(3) == []
    for slot in (2, 0, 3, 2):
        slots.note(slot)
    assert slots.first(2) == [0, 3]
    assert slots.discard([3, 1]) == [3]
    assert slots.first(4) == [0, 2]
    slots.clear()
    assert slots.first(4) == slots.discard([0]) == []
