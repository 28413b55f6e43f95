"""Blocks that find no room in a tier go there later, under the engine's own request."""

import math

import pytest
from core.terms import PENDING, k, ks
from core.world import World, stored_below
from planner_invariants import JobAccepted, RequestClosed, RequestOpened

from kvoffload_async.core.cascades import LATE_BLOCKS_A_STEP, WriteBackQueue
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.errors import (
    CorruptBlockError,
    TierBusyError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.types import ENGINE_REQ_ID


def narrow(num_slots=16, bound=2, **options):
    """A world whose tiers take few blocks at once."""
    world = World(
        num_slots,
        copies_each=bound,
        **options,
    )
    return world, world.begin()


def queue(world, tier=0):
    return world.planner.cascades.queues[tier]


def pending(world, tier=0):
    return world.primary.keys_of(tuple(queue(world, tier).slots()))


def counters(world, tier=0):
    return world.planner.tiers[tier].counters


# -- nothing is lost ----------------------------------------------------------------------------


def test_a_batch_far_over_the_bound_reaches_a_slow_tier_entirely():
    world, ctx = narrow(num_slots=400, bound=48)
    world.store(ctx, range(400))
    world.finish(ctx)
    for _ in range(20):
        world.end_step()
        world.finish_all()
    assert world.tiers[0].contents.keys() == set(ks(range(400)))
    assert (counters(world).dropped_blocks, counters(world).late_blocks) == (0, 352)
    assert not world.planner.has_pending_work
    world.wind_down()


def test_work_is_pending_until_everything_is_stored():
    world, ctx = narrow(num_slots=8, bound=2)
    world.store(ctx, range(6))
    world.finish(ctx)
    while world.planner.has_pending_work:
        world.finish_all()
        world.step()
    assert len(world.tiers[0].contents) == 6
    world.wind_down()


def test_a_block_that_is_evicted_before_there_was_room_is_counted_as_dropped():
    world, ctx = narrow(num_slots=4, bound=2)
    world.store(ctx, "abcd")
    assert pending(world) == ks("cd")
    world.store(ctx, "xy")
    assert counters(world).dropped_blocks == 2
    assert pending(world) == ks("xy")
    world.finish_all()
    world.wind_down()
    assert not counters(world).failed_store_blocks


def test_what_one_tier_has_in_time_and_another_has_not_is_dropped_there_alone():
    world, ctx = narrow(num_slots=4, bound=2, tiers=2)
    world.store(ctx, "abcd")
    for _ in range(2):
        world.finish_job(next(number for number, (tier, _) in world.running.items() if tier == 1))
        world.end_step()
    world.store(ctx, "xy")
    assert [counters(world, tier).dropped_blocks for tier in range(2)] == [2, 0]
    world.wind_down()


def test_a_promotion_that_evicts_what_is_pending_counts_too():
    world, ctx = narrow(num_slots=2, bound=1)
    world.fill(0, ks("x"))
    world.store(ctx, "ab")
    assert world.lookup(ctx, "x") is PENDING
    world.step()
    assert counters(world).dropped_blocks == 1
    world.wind_down()


def test_the_primary_is_asked_to_tell_of_evictions_only_while_something_is_pending():
    world, ctx = narrow(num_slots=4, bound=1)
    world.store(ctx, "a")
    assert world.primary.on_evicted is None
    world.store(ctx, "b")
    assert world.primary.on_evicted is not None
    world.finish_job()
    world.end_step()
    assert world.primary.on_evicted is None
    world.wind_down()


def test_a_reset_counts_what_was_pending_and_what_is_overdue():
    world, ctx = narrow(num_slots=4, bound=2)
    world.store(ctx, "abcd")
    world.orphan()
    world.planner.reset_cache()
    assert counters(world).dropped_blocks == 2
    assert counters(world).failed_store_blocks == 2
    assert pending(world) == []
    world.planner.reset_flushed()
    world.release()
    world.wind_down()


def test_after_the_close_nothing_is_pending_any_more():
    world, ctx = narrow(num_slots=8, bound=2)
    world.store(ctx, "abcd")
    world.finish(ctx)
    world.planner.close()
    assert counters(world).dropped_blocks == 2
    world.finish_job(error=TierUnavailableError("down"), failed={0, 1})
    assert counters(world).failed_store_blocks == 2
    assert world.planner.cascades.defer(0, ks("cd")) == 0
    world.planner.close()
    world.wind_down()


def test_the_close_ends_a_request_that_waits_for_anothers_write():
    world, ctx = narrow(num_slots=8, request_level=[0])
    world.offer(ctx, "a")
    other = world.begin("s")
    world.offer(other, "a")
    world.finish(other)
    world.planner.close()
    assert [ctx.req_id for ctx in world.planner.requests] == ["r"]
    assert not world.planner.has_pending_work
    world.wind_down()


# -- when ---------------------------------------------------------------------------------------


def test_a_step_submits_a_bounded_number_of_pending_blocks_however_many_there_are():
    num = 4 * LATE_BLOCKS_A_STEP
    world = World(2 * num, breaker=BreakerSettings(1, retry_after_s=5.0))
    ctx = world.begin()
    world.store(ctx, ["first"])
    world.finish_job(failed={0}, error=TierUnavailableError("down"))
    world.store(ctx, range(num))
    world.step(10.0)
    sizes = []
    while world.planner.has_pending_work or not sizes:
        world.end_step()
        sizes += [len(job.keys) for _, job in world.running.values()]
        world.finish_all()
    assert sizes == [LATE_BLOCKS_A_STEP] * 4 + [1]
    world.wind_down()


def test_a_step_that_stores_much_may_submit_as_much():
    """Else a tier with room would fall behind for ever."""
    world = World(2_000)
    ctx = world.begin()
    world.store(ctx, ["first"])
    world.finish_job(failed={0}, error=TierUnavailableError("down"))
    world.step()
    world.store(ctx, range(900))
    world.end_step()
    assert [len(job.keys) for _, job in world.running.values()] == [901]
    world.wind_down()


def test_a_tier_that_refuses_is_asked_once_in_a_while():
    world, ctx = narrow(bound=8, pressed_tier=0)
    world.planner.tiers[0].backpressure._pressed = True
    asked = []
    world.planner.tiers[0].backpressure.drops_store = lambda now_s: asked.append(now_s) or True
    world.store(ctx, "a")
    assert world.planner.has_pending_work, "pressure eases by itself"
    for _ in range(10):
        world.step(0.25)
    assert asked == [0.0, 0.25, 0.75, 1.75]
    assert world.planner.cascades.wakes_in_s(world.now_s) == 1.25
    del world.planner.tiers[0].backpressure.drops_store
    world.wind_down()


def test_the_engine_knows_when_to_try_again():
    world, ctx = narrow(num_slots=8, bound=2)
    cascades = world.planner.cascades
    assert cascades.wakes_in_s(0.0) == math.inf
    world.store(ctx, "abcd")
    assert cascades.wakes_in_s(0.0) == math.inf, "the end of a job will wake it"
    world.finish_job()
    assert cascades.wakes_in_s(0.0) == 0.0
    world.end_step()
    world.finish_job(failed={0}, error=TierUnavailableError("down"))
    assert cascades.wakes_in_s(0.0) == WriteBackQueue(1, list, list)._pause_s
    world.wind_down()


# -- stores that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TierUnavailableError("down"), TierBusyError("full")])
def test_blocks_that_a_passing_fault_has_hit_are_stored_later(error):
    world, ctx = narrow(bound=8)
    world.store(ctx, "abc")
    world.finish_job(failed={1, 2}, error=error)
    assert pending(world) == ks("bc")
    world.step()
    world.end_step()
    world.finish_job()
    assert world.tiers[0].contents.keys() == set(ks("abc"))
    assert not counters(world).failed_store_blocks
    world.wind_down()


@pytest.mark.parametrize("error", [TierFullError("full"), CorruptBlockError("flipped")])
def test_blocks_that_would_fail_again_are_counted_at_once(error):
    world, ctx = narrow(bound=8)
    world.store(ctx, "abc")
    world.finish_job(failed={1}, error=error)
    assert pending(world) == []
    assert counters(world).failed_store_blocks == 1
    world.wind_down()


def test_a_block_that_always_fails_in_a_working_tier_is_given_up_and_counted():
    world, ctx = narrow(bound=8)
    world.store(ctx, "a")
    tries = 0
    while world.running:
        tries += 1
        world.finish_job(failed={0}, error=TierUnavailableError("poison"))
        world.step(10.0)
        world.end_step()
    assert tries == 8
    assert counters(world).failed_store_blocks == 1
    world.wind_down()


def test_an_outage_costs_no_tries():
    world, ctx = narrow(bound=8, breaker=BreakerSettings(1, retry_after_s=5.0))
    world.store(ctx, "a")
    for _ in range(50):
        world.finish_job(failed={0}, error=TierUnavailableError("down"))
        world.step(10.0)
        world.end_step()
    world.finish_job()
    assert world.tiers[0].contents.keys() == set(ks("a"))
    assert not counters(world).failed_store_blocks
    world.wind_down()


def test_an_overdue_store_is_tried_again_when_its_copy_has_ended():
    world, ctx = narrow(bound=8)
    world.store(ctx, "ab")
    world.orphan()
    world.step()
    world.end_step()
    assert world.running == {}, "the copy may still end well"
    world.release(failed={1})
    assert pending(world) == ks("b")
    world.wind_down()


def test_an_overdue_store_is_not_repeated_where_it_is_known_to_have_landed():
    for kind, owes in ("exact", []), ("probed", ks("ab")):
        world, ctx = narrow(bound=8, kinds={0: kind})
        world.store(ctx, "ab")
        world.orphan()
        world.release()
        assert pending(world) == owes
        world.wind_down()


# -- the engine's own request -------------------------------------------------------------------


def test_late_cascades_are_of_the_engines_own_request_which_each_tier_hears_of_once():
    world, ctx = narrow(num_slots=8, bound=1)
    world.store(ctx, "abc")
    world.finish(ctx)
    for _ in range(3):
        world.step()
        world.finish_all()
    world.wind_down()
    told = [
        (type(fact), fact.req_id)
        for fact in world.history
        if isinstance(fact, RequestOpened | RequestClosed | JobAccepted)
    ]
    assert told == [
        (RequestOpened, "r"),
        (JobAccepted, "r"),
        (RequestClosed, "r"),
        (RequestOpened, ENGINE_REQ_ID),
        (JobAccepted, ENGINE_REQ_ID),
        (JobAccepted, ENGINE_REQ_ID),
        (RequestClosed, ENGINE_REQ_ID),
    ]


# -- other ways in ------------------------------------------------------------------------------


def test_a_promoted_block_is_not_offered_to_tiers_that_are_not_known_to_lack_it():
    world, ctx = stored_below(tiers=2, names="a", kinds={0: "probed"})
    world.tiers[0].is_probing = True
    world.lookup(ctx, "a")
    world.step()
    world.finish_job()
    assert pending(world, 0) == []
    world.wind_down()


def test_what_a_request_level_tier_has_no_room_for_is_pending_too():
    world, ctx = narrow(num_slots=8, bound=1, request_level=[0])
    world.store(ctx, "a")
    world.finish_all()
    other = world.begin("s")
    world.offer(other, "a")
    world.offer(other, "a")
    assert pending(world) == [], "it is on its way"
    world.store(other, "b")
    assert pending(world) == [k("b")]
    world.wind_down()
