"""Who waits for room for promotions, and who is served next."""

from itertools import chain

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, k, ks
from core.world import DOWN, World

from kvoffload_async.core.primary import BlockState
from kvoffload_async.core.requests import TURN_S
from kvoffload_async.core.tier_state import PlannerLimits
from kvoffload_async.errors import BlockMissingError

PATIENCE_S = 100.0


def world_of(cap, below, num_slots=64, tiers=1, deferral_s=PATIENCE_S, **options):
    limits = PlannerLimits(cap, 1_000, deferral_s, options.pop("reserved", 0.0))
    world = World(num_slots, tiers, limits=limits, **options)
    world.fill(tiers - 1, ks(below))
    return world


def ask(world, ctx, names):
    return [world.lookup(ctx, name) for name in names]


def next_step(world, seconds=0.1):
    world.step(seconds)
    world.settle_all()


def serve(world, requests, steps=100):
    """Ask for each request that waits, in this order, every step; return who is done, in order."""
    done, waiting = [], dict(requests)
    for _ in range(steps):
        for ctx, names in list(waiting.items()):
            answers = ask(world, ctx, names)
            if not {PENDING, RETRY} & set(answers):
                assert answers == [HIT] * len(names)
                world.load(ctx, names)
                done.append(ctx.req_id)
                del waiting[ctx]
        next_step(world)
        while world.reads:
            world.loaded()
        world.check()
        if not waiting:
            break
    return done


@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_a_burst_of_hits_through_a_small_primary_hits_all(policy):
    """Of 6 prompts of 12 blocks, 36 blocks were hits: the others found no room, and were missed."""
    prompts = [[f"{prompt}.{number}" for number in range(12)] for prompt in range(6)]
    world = world_of(32, chain(*prompts), policy=policy, reserved=0.25)
    requests = {world.begin(f"r{i}"): names for i, names in enumerate(prompts)}
    assert serve(world, requests) == [f"r{i}" for i in range(6)]
    assert world.planner.counters.promotions_refused == 0
    world.wind_down()


def test_fifty_requests_are_served_in_the_order_in_which_they_came():
    prompts = [[f"{prompt}.{number}" for number in range(3)] for prompt in range(50)]
    world = world_of(4, chain(*prompts), num_slots=8)
    requests = {world.begin(f"r{i}"): names for i, names in enumerate(prompts)}
    for ctx, names in requests.items():
        ask(world, ctx, names)
    world.step(0.1)
    upside_down = dict(reversed(requests.items()))
    assert serve(world, upside_down, steps=400) == [f"r{i}" for i in range(50)]
    world.wind_down()


def test_who_comes_later_does_not_take_the_room_that_others_wait_for():
    world = world_of(2, "abcx")
    first, second, late = (world.begin(req_id) for req_id in ("first", "second", "late"))
    assert ask(world, first, "ab") == [PENDING] * 2
    assert ask(world, second, "c") == [RETRY]
    next_step(world)
    ask(world, first, "ab")
    world.load(first, "ab")
    assert ask(world, late, "x") == [RETRY]
    assert ask(world, second, "c") == [PENDING]
    assert ask(world, late, "x") == [PENDING]
    world.wind_down()


def test_a_request_that_waits_is_answered_in_time():
    world = world_of(1, "ab", deferral_s=3.0)
    first, second = world.begin("first"), world.begin("second")
    assert ask(world, first, "a") == [PENDING]
    world.step(1.0)
    answers = []
    for _ in range(5):
        answers += ask(world, second, "b")
        world.step(1.0)
    assert answers == [RETRY] * 3 + [MISS] * 2
    assert world.planner.promotions.lines.waiting() == [[]]
    world.wind_down()


@pytest.mark.parametrize("how", ["fails", "finishes", "proceeds", "stops asking"])
def test_a_promotion_that_fails_and_a_request_that_waits_no_more_free_the_room(how):
    world = world_of(1, "ab")
    first, second = world.begin("first"), world.begin("second")
    ask(world, first, "a")
    world.step()
    if how == "fails":
        world.settle(failed={0}, error=DOWN)
    else:
        world.settle()
    if how != "stops asking":
        assert ask(world, second, "b") == [PENDING if how == "fails" else RETRY]
    if how == "finishes":
        world.finish(first)
    elif how == "proceeds":
        world.planner.on_request_scheduled(first)
    elif how == "stops asking":
        world.step(0.6 * PATIENCE_S)
        ask(world, second, "b")
        world.step(0.6 * PATIENCE_S)
        world.step()
    assert ask(world, second, "b") == [PENDING]
    world.wind_down()


def test_a_request_that_is_gone_leaves_the_line():
    world = world_of(1, "abc")
    first, second, third = (world.begin(req_id) for req_id in ("first", "second", "third"))
    assert [ask(world, ctx, name) for ctx, name in ((first, "a"), (second, "b"), (third, "c"))] == [
        [PENDING],
        [RETRY],
        [RETRY],
    ]
    world.finish(second)
    next_step(world)
    world.finish(first)
    assert ask(world, third, "c") == [PENDING]
    world.wind_down()


def test_the_first_in_line_that_does_not_ask_loses_its_turn():
    world = world_of(1, "abc")
    first, silent, third = (world.begin(req_id) for req_id in ("first", "silent", "third"))
    for ctx, name in (first, "a"), (silent, "b"), (third, "c"):
        ask(world, ctx, name)
    next_step(world)
    world.finish(first)
    assert ask(world, third, "c") == [RETRY], "the other one may still ask"
    world.step(TURN_S)
    assert ask(world, third, "c") == [RETRY]
    world.step(TURN_S)
    assert ask(world, third, "c") == [PENDING]
    assert ask(world, silent, "b") == [RETRY]
    world.wind_down()


def test_who_is_behind_holds_nothing_that_the_first_one_needs():
    world = world_of(4, "abcdwxyz")
    holder, first, second = (world.begin(req_id) for req_id in ("holder", "first", "second"))
    assert ask(world, holder, "a") == [PENDING]
    assert ask(world, second, "w") == [PENDING]
    assert ask(world, first, "bcd") == [PENDING, PENDING, RETRY]
    next_step(world)
    assert world.primary.state_of(k("w")) is BlockState.PINNED
    assert ask(world, second, "wx") == [HIT, RETRY]
    assert world.primary.state_of(k("w")) is BlockState.IDLE
    assert ask(world, first, "bcd") == [HIT, HIT, PENDING]
    world.check()
    world.wind_down()


def test_of_two_tiers_first_ones_that_wait_for_each_other_one_goes_on():
    world = world_of(4, "", tiers=2)
    world.fill(0, ks("abcd"))
    world.fill(1, ks("wxyz"))
    first, second = world.begin("first"), world.begin("second")
    assert ask(world, first, "ab") == [PENDING] * 2
    assert ask(world, second, "wx") == [PENDING] * 2
    next_step(world)
    assert ask(world, first, "abc") == [HIT, HIT, RETRY]
    assert ask(world, second, "wxy") == [HIT, HIT, MISS], "it has what it can get"
    assert ask(world, first, "abc") == [HIT, HIT, RETRY]
    world.load(second, "wx")
    assert ask(world, first, "abc") == [HIT, HIT, PENDING]
    world.wind_down()


def test_its_own_promotions_leave_the_share_of_their_tier_when_they_have_landed():
    world = world_of(32, range(24), num_slots=64, tiers=2, reserved=0.25)
    ctx = world.begin()
    answers = ask(world, ctx, range(24))
    assert answers == [PENDING] * 18 + [RETRY] * 6
    next_step(world)
    assert ask(world, ctx, range(24)) == [HIT] * 18 + [PENDING] * 6
    world.wind_down()


def test_an_overdue_copy_is_not_waited_for():
    world = world_of(8, "abcd", num_slots=4, reserved=0.5)
    ctx = world.begin()
    assert ask(world, ctx, "a") == [PENDING]
    world.step()
    world.orphan()
    assert ask(world, ctx, "bc") == [MISS, MISS]
    world.wind_down()


def test_who_waits_is_told_when_no_room_comes_any_more():
    world = world_of(8, "abcd", num_slots=4, reserved=0.5)
    first, second = world.begin("first"), world.begin("second")
    assert ask(world, first, "a") == [PENDING]
    assert ask(world, second, "b") == [RETRY]
    world.step()
    told = []
    world.primary.decided = told.extend
    world.step()
    assert told == []
    world.orphan()
    world.step()
    assert told == ks("ab")
    for _ in range(3):
        world.step()
    assert told == ks("ab"), "once"
    assert ask(world, second, "b") == [MISS]
    world.wind_down()


def in_vain():
    """Two requests in line for room that does not come any more, as it has turned out."""
    world = world_of(8, "abcd", num_slots=4, reserved=0.5)
    requests = [world.begin(req_id) for req_id in ("holds", "first", "second")]
    answers = [ask(world, ctx, name) for ctx, name in zip(requests, "abc", strict=True)]
    assert answers == [[PENDING], [RETRY], [RETRY]]
    world.step()
    world.orphan()
    told = []
    world.primary.decided = told.extend
    world.step()
    return world, requests[1:], told


def test_who_is_told_that_no_room_comes_is_not_put_in_line_again_behind_the_next():
    world, (first, second), told = in_vain()
    assert told[-1:] == ks("b")
    assert ask(world, first, "b") == [MISS]
    world.step()
    assert told[-1:] == ks("c")
    assert ask(world, second, "c") == [MISS]
    del told[:]
    world.step()
    assert not told
    assert not any(world.planner.promotions.lines.waiting())
    world.wind_down()


def test_who_is_told_that_no_room_comes_and_waits_elsewhere_by_then_leaves_the_line():
    world, (first, second), told = in_vain()
    assert ask(world, first, "z") == [MISS]
    world.step()
    assert world.planner.promotions.lines.first(0).ctx is second
    world.step()
    assert told.count(k("b")) == 1
    assert told[-1:] == ks("c")
    world.wind_down()


@pytest.mark.parametrize("what", ["loads", "writes", "stores", "debts"])
def test_a_primary_in_use_is_waited_for(what):
    world = world_of(8, "z", num_slots=2)
    ctx, other = world.begin(), world.begin("other")
    world.store(other, "ab") if what != "writes" else world.offer(other, "ab")
    if what == "loads":
        world.settle_all()
        world.load(other, "ab")
    if what == "debts":
        world.settle_all()
        world.primary.drops_pending = False
        world.planner.cascades.defer(0, ks("ab"), 0.0)
        world.primary.protect(world.primary.readable_slots(ks("ab")))
    assert ask(world, ctx, "z") == [RETRY]
    if what == "debts":
        return
    {"loads": world.loaded, "writes": world.written, "stores": world.settle_all}[what]()
    world.settle_all()
    assert ask(world, ctx, "z") == [PENDING]
    world.wind_down()


def test_a_block_that_another_tier_has_brought_is_not_waited_for():
    world = world_of(1, "abc", tiers=1)
    first, second, third = (world.begin(req_id) for req_id in ("first", "second", "third"))
    ask(world, first, "a")
    assert ask(world, second, "b") == [RETRY]
    assert ask(world, third, "c") == [RETRY]
    world.store(first, "b")
    world.step()
    assert world.planner.promotions.lines.first(0).ctx is third
    world.store(first, "c")
    world.step()
    assert world.planner.promotions.lines.waiting() == [[]]
    world.wind_down()


def test_a_reset_empties_the_line():
    world = world_of(1, "ab")
    first, second = world.begin("first"), world.begin("second")
    ask(world, first, "a")
    ask(world, second, "b")
    next_step(world)
    world.reset()
    assert world.planner.promotions.lines.waiting() == [[]]
    world.check()
    world.flush_reset()
    assert ask(world, second, "b") == [PENDING]
    world.wind_down()


def test_only_the_first_in_line_is_told_of_room_and_once():
    world = world_of(1, "abc")
    told = []
    requests = [world.begin(req_id) for req_id in "123"]
    for ctx, name in zip(requests, "abc", strict=True):
        ask(world, ctx, name)
    next_step(world)
    world.primary.decided = told.append
    world.step()
    assert told == [], "there is no room"
    world.finish(requests[0])
    for _ in range(3):
        world.step(0.0)
    assert told == [ks("b")]
    world.finish(requests[1])
    world.step(0.0)
    assert told == [ks("b"), ks("c")]
    world.wind_down()


def test_a_step_looks_at_nobody_behind_the_first_in_line():
    world = world_of(1, range(1_000), num_slots=4)
    ctx = world.begin("holder")
    ask(world, ctx, [0])
    for number in range(1, 1_000):
        assert ask(world, world.begin(f"r{number}"), [number]) == [RETRY]
    next_step(world)
    looked = []
    lookup_many = world.primary.lookup_many
    world.primary.lookup_many = lambda keys: looked.extend(keys) or lookup_many(keys)
    world.end_step()
    assert looked == ks([1])


def test_a_failed_promotion_of_a_request_in_line_keeps_its_place():
    world = world_of(2, "abc")
    first, second = world.begin("first"), world.begin("second")
    world.crowd()
    assert ask(world, first, "abc") == [PENDING, PENDING, MISS]
    world.step()
    world.settle(failed={1}, error=BlockMissingError("gone"))
    assert ask(world, second, "c") == [PENDING]
    world.wind_down()
