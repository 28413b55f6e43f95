"""What a request may hold: what stays for one that waits, what a step has found, and until when."""

import pytest
from core.retained import ABSENT, IDLE, PINNED, states, waiting_for, world_of
from core.terms import HIT, MISS, PENDING, RETRY, k, ks
from core.world import World

from kvoffload_async.core.invariants import check_state
from kvoffload_async.core.primary import BlockState
from kvoffload_async.core.tier_state import PlannerLimits

# -- who goes on without loading ----------------------------------------------------------------


def stores(world, ctx):
    world.offer(ctx, "s")


def stores_without_room(world, ctx):
    other = world.begin("other")
    world.offer(other, [f"x{i}" for i in range(world.primary.counts["free"])])
    assert world.primary.counts["free"] == 0
    world.planner.prepare_store(ks("nothing here fits"), ctx)


def is_computed(world, ctx):
    assert world.planner.on_request_scheduled(ctx)


def is_scheduled(world, ctx):
    world.planner.end_step([ctx.req_id, "unknown"])


def finds_a_miss_at_its_head(world, ctx):
    assert world.lookup(ctx, "missing") is MISS
    world.step()


def loads_something_else(world, ctx):
    world.store(world.begin("other"), "s")
    assert world.lookup(ctx, "s") is HIT
    world.load(ctx, "s")
    world.step()


def ends(world, ctx):
    world.finish(ctx)


def asks_no_more(world, ctx):
    for _ in range(9):
        world.step(2.0)


@pytest.mark.parametrize(
    "goes_on",
    [
        stores,
        stores_without_room,
        is_computed,
        is_scheduled,
        finds_a_miss_at_its_head,
        loads_something_else,
        ends,
        asks_no_more,
    ],
)
def test_promoted_blocks_are_released_when_their_request_goes_on_without_them(goes_on):
    """A cap of 20 was still full after 1,000 steps."""
    world = world_of(8, below="ab", deferral_s=10.0)
    ctx = waiting_for(world, "ab")
    goes_on(world, ctx)
    world.check()
    assert BlockState.PINNED not in states(world, "ab")
    assert world.planner.promotions.outstanding_slots == 0
    world.wind_down()


def test_promoted_blocks_are_released_when_their_request_is_deferred_for_too_long():
    world = world_of(8, below="ab", deferral_s=10.0, kinds={0: "probed"})
    ctx = waiting_for(world, "ab")
    world.tiers[0].is_probing = True
    answers = []
    while MISS not in answers:
        answers.append(world.lookup(ctx, "unknown"))
        world.step(2.0)
    assert answers[0] is RETRY
    assert states(world, "ab") == [IDLE, IDLE]
    assert world.planner.promotions.outstanding_slots == 0
    world.wind_down()


def test_a_request_that_asks_no_more_waits_for_just_as_long_as_it_may_be_deferred():
    world = world_of(8, below="ab", deferral_s=8.0)
    waiting_for(world, "ab")
    world.step(7.0)
    world.end_step()
    world.check()
    assert states(world, "ab") == [PINNED, PINNED]
    world.step(0.5)
    world.end_step()
    assert states(world, "ab") == [IDLE, IDLE]
    world.wind_down()


def test_one_that_asks_again_keeps_nobody_waiting_longer_than_it_may():
    world = world_of(8, below="ab", deferral_s=8.0)
    first = waiting_for(world, "a", "first")
    waiting_for(world, "b", "second")
    world.step(5.0)
    assert world.lookup(first, "a") is HIT
    world.step(4.0)
    world.end_step()
    assert states(world, "ab") == [PINNED, IDLE]
    world.wind_down()


def test_a_cap_does_not_stay_full_of_what_was_computed_instead():
    names = [f"block{i}" for i in range(40)]
    world = world_of(40, cap=4, below=names)
    for at in range(0, 40, 4):
        ctx = world.begin(f"r{at}")
        mine = names[at : at + 4]
        assert [world.lookup(ctx, name) for name in mine] == [PENDING] * 4
        world.step()
        world.settle_all()
        world.offer(ctx, [f"computed{at}"])
    world.wind_down()


def test_what_lands_for_a_request_that_went_on_is_not_retained():
    world = world_of(4, below="a")
    ctx = world.begin()
    world.lookup(ctx, "a")
    world.step()
    world.planner.on_request_scheduled(ctx)
    world.settle()
    assert states(world, "a") == [IDLE]
    world.wind_down()


def test_of_requests_with_one_id_the_newest_goes_on_when_that_is_scheduled():
    world = world_of(8, below="ab")
    old, new = waiting_for(world, "a"), waiting_for(world, "b")
    world.planner.on_request_finished(old)
    assert not world.planner.on_request_scheduled(old), "it is over"
    assert states(world, "ab") == [IDLE, PINNED]
    world.planner.end_step([new.req_id])
    assert states(world, "ab") == [IDLE, IDLE]
    world.check()


def test_a_request_that_asks_again_waits_again():
    world = world_of(4, below="ab")
    ctx = waiting_for(world, "a")
    world.offer(ctx, "s")
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, PENDING]
    world.step()
    world.settle_all()
    assert states(world, "ab") == [PINNED, PINNED]
    world.wind_down()


def test_a_request_may_load_what_it_has_found_piece_by_piece():
    world = world_of(3, below="abx")
    ctx = waiting_for(world, "ab")
    other = world.begin("other")
    world.store(other, "y")
    world.settle_all()
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, HIT]
    world.load(ctx, "a")
    world.loaded()
    assert world.lookup(other, "x") is PENDING, "it takes the place of y"
    world.load(ctx, "b")
    assert states(world, "y") == [ABSENT]
    world.step()
    assert world.planner.retention.retained_slots == 0
    world.wind_down()


def test_what_a_request_loads_does_not_count_against_the_cap():
    world = world_of(4, cap=2, below="abcd")
    ctx = waiting_for(world, "ab")
    world.crowd()
    assert [world.lookup(ctx, name) for name in "abc"] == [HIT, HIT, MISS]
    world.load(ctx, "ab")
    assert world.lookup(world.begin("other"), "c") is PENDING
    world.wind_down()


def test_a_request_that_waits_alone_is_promoted_beyond_the_cap():
    world = world_of(8, cap=2, below="abcdefgh", reserved=0.25)
    ctx = world.begin()
    for _ in range(4):
        answers = world.lookups(ctx, "abcdefgh")
        world.step()
        world.settle_all()
    assert answers == [HIT] * 6 + [MISS] * 2
    world.load(ctx, "abcdef")
    world.wind_down()


def test_who_joins_a_request_beyond_the_cap_is_served_and_so_is_that_request():
    world = world_of(8, cap=2, below="abcdef")
    long = waiting_for(world, "ab")
    assert world.lookups(long, "abcd") == [HIT, HIT, PENDING, PENDING]
    joins = world.begin("joins")
    assert world.lookup(joins, "e") is RETRY, "four slots are more than the cap"
    left = {joins: "e", long: "abcdf"}
    for _ in range(8):
        world.step()
        world.settle_all()
        for ctx, names in list(left.items()):
            if world.lookups(ctx, names) == [HIT] * len(names):
                world.load(ctx, names)
                del left[ctx]
    assert not left
    world.wind_down()


def test_a_request_that_could_not_be_placed_keeps_what_it_can_use():
    world = world_of(8, below="abc")
    ctx = waiting_for(world, "abc")
    for _ in range(5):
        assert [world.lookup(ctx, name) for name in ("a", "b", "missing")] == [HIT, HIT, MISS]
        world.step()
    assert states(world, "abc") == [PINNED, PINNED, IDLE]
    world.load(ctx, "ab")
    world.wind_down()


# -- the head of who waits for the tail -----------------------------------------------------------


def test_a_head_stays_while_its_tail_is_being_promoted():
    """10 of 50 blocks were lost, and the rest of them useless."""
    head, tail = [f"head{i}" for i in range(10)], [f"tail{i}" for i in range(40)]
    world = world_of(60, below=tail, resident=head)
    ctx = world.begin()
    answers = [world.lookup(ctx, name) for name in [*head, *tail]]
    assert answers == [HIT] * 10 + [PENDING] * 40
    world.step()
    assert states(world, head) == [PINNED] * 10
    other = world.begin("other")
    world.store(other, [f"x{i}" for i in range(10)])
    assert world.offer(other, ["y"]) is None, "nothing else may go"
    world.settle_all()
    world.step()
    assert [world.lookup(ctx, name) for name in [*head, *tail]] == [HIT] * 50
    world.load(ctx, [*head, *tail])
    world.wind_down()


def test_a_head_stays_while_a_tier_is_asked_for_its_tail():
    world = world_of(2, resident="ab", kinds={0: "probed"})
    ctx = world.begin()
    assert [world.lookup(ctx, name) for name in "abc"] == [HIT, HIT, RETRY]
    world.step()
    assert states(world, "ab") == [PINNED, PINNED]
    world.wind_down()


def test_what_is_found_without_waiting_is_not_retained():
    world = world_of(2, resident="ab")
    ctx = world.begin()
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, HIT]
    world.step()
    assert states(world, "ab") == [IDLE, IDLE]
    world.wind_down()


def test_what_does_not_fit_under_the_cap_is_not_retained_head_first():
    world = world_of(8, cap=3, below="z", resident="abcd")
    ctx = world.begin()
    world.crowd()
    assert [world.lookup(ctx, name) for name in "abcdz"] == [HIT] * 4 + [PENDING]
    world.step()
    assert states(world, "abcd") == [PINNED, PINNED, IDLE, IDLE]
    world.wind_down()


def test_a_head_that_many_wait_behind_counts_once():
    world = world_of(16, cap=8, below="pqrs", resident="abcd")
    waiters = {name: world.begin(name) for name in "pqrs"}
    for name, ctx in waiters.items():
        assert [world.lookup(ctx, each) for each in ("a", "b", "c", "d", name)][-1] is PENDING
    world.step()
    assert world.planner.promotions.outstanding_slots == 8
    for name in "pqr":
        world.finish(waiters[name])
        assert states(world, "abcd") == [PINNED] * 4
    world.finish(waiters["s"])
    assert states(world, "abcd") == [IDLE] * 4
    world.wind_down()


def test_a_reset_releases_what_is_retained():
    world = world_of(4, below="bc", resident="a")
    ctx = world.begin()
    [world.lookup(ctx, name) for name in "abc"]
    world.step()
    world.settle_all()
    assert states(world, "abc") == [PINNED] * 3
    world.reset()
    world.check()
    world.flush_reset()
    assert world.primary.counts["free"] == 4
    world.wind_down()


# -- what a step has found ----------------------------------------------------------------------


def test_a_store_does_not_evict_what_was_found_in_its_step():
    world = world_of(2, resident="ab")
    ctx, other = world.begin(), world.begin("other")
    assert [world.lookup(ctx, name) for name in "ab"] == [HIT, HIT]
    assert world.offer(other, "x") is None
    world.load(ctx, "ab")
    world.loaded()
    world.step()
    assert world.offer(other, "x") is not None, "the step is over"
    world.wind_down()


def test_a_store_evicts_what_was_found_in_its_step_beyond_the_cap():
    world = world_of(4, cap=2, resident="abcd")
    ctx, other = world.begin(), world.begin("other")
    world.crowd()
    [world.lookup(ctx, name) for name in "abcd"]
    assert set(world.offer(other, "xy").evicted_keys) == set(ks("cd"))
    assert world.offer(other, "z") is None
    world.step()
    assert states(world, "ab") == [IDLE, IDLE]
    world.wind_down()


def test_promotions_evict_nothing_that_was_found_in_their_step_whatever_the_cap():
    world = world_of(3, cap=1, below="xy", resident="abc")
    ctx, other = world.begin(), world.begin("other")
    assert [world.lookup(ctx, name) for name in "abc"] == [HIT] * 3
    assert world.lookup(other, "x") is MISS
    assert [world.lookup(ctx, name) for name in "abc"] == [HIT] * 3, "found twice, pinned once"
    assert world.lookup(other, "x") is MISS
    world.check()
    world.load(ctx, "abc")
    world.wind_down()


def test_what_is_released_stays_until_the_end_of_a_step_that_may_have_found_it():
    world = world_of(2, below="abx", policy="lru")
    first = waiting_for(world, "ab")
    second, third = world.begin("second"), world.begin("third")
    assert [world.lookup(second, name) for name in "ab"] == [HIT, HIT]
    assert world.lookup(third, "x") is RETRY, "nothing may be evicted"
    world.finish(first)
    assert world.lookup(third, "x") is MISS, "the second one has found both"
    world.check()
    world.load(second, "ab")
    world.loaded()
    world.step()
    assert world.lookup(third, "x") is PENDING
    world.wind_down()


def test_a_head_that_a_store_has_evicted_beyond_the_cap_is_not_retained():
    world = world_of(3, cap=2, below="z", resident="ab")
    ctx, other = world.begin(), world.begin("other")
    world.crowd()
    assert [world.lookup(ctx, name) for name in "abz"] == [HIT, HIT, PENDING]
    world.offer(other, "x")
    world.step()
    assert states(world, "ab") == [PINNED, ABSENT]
    check_state(world.planner)
    world.wind_down()


def test_a_request_that_asks_again_after_a_load_goes_on_waiting():
    world = world_of(4, below="abc")
    ctx = waiting_for(world, "ab")
    [world.lookup(ctx, name) for name in "ab"]
    world.load(ctx, "a")
    assert [world.lookup(ctx, name) for name in "bc"] == [HIT, PENDING]
    world.step()
    assert world.planner.requests[ctx].retained.keys() == {k("b")} | {k("a")}
    world.wind_down()


def test_a_block_that_is_loaded_twice_at_once_is_released_once():
    world = World(8, limits=PlannerLimits(4, 8, 1000.0))
    world.fill(0, ks("a"))
    ctx = world.begin("r")
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    world.settle_all()
    assert world.lookup(ctx, "a") is HIT
    world.planner.prepare_load([k("a"), k("a")], ctx)
    world.planner.complete_load([k("a"), k("a")], ctx)
    world.step()
    check_state(world.planner)
    assert world.planner.primary.state_of(k("a")) is BlockState.IDLE


def test_what_is_retained_does_not_keep_what_is_pending_from_its_tier_at_the_end():
    world = World(8, limits=PlannerLimits(8, 4, 1000.0, 0.25))
    names = "abcdef"
    assert len(names) == world.planner.shares.total
    world.fill(0, ks(names))
    ctx = world.begin("r")
    for _ in range(20):
        for name in names:
            world.lookup(ctx, name)
        world.step(0.01)
        world.settle_all()
    assert world.planner.shares.spare_slots == 0
    other = world.begin("s")
    world.offer(other, "z")
    world.written()
    world.finish(other)
    world.step(0.01)
    assert world.planner.cascades.queues[0].count == 1
    world.planner.release_retained()
    world.step(1.0)
    world.settle_all()
    assert world.planner.cascades.queues[0].count == 0
    assert world.planner.tiers[0].counters.dropped_blocks == 0
