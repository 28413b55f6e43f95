"""Tenants of one primary: each has slots of its own, and none can take another's."""

import pytest
from core.terms import HIT, MISS, PENDING, ks
from core.world import World

from kvoffload_async.core.primary import Tenancy
from kvoffload_async.errors import InvariantError, StateError
from kvoffload_async.types import Hints, Priority


def of_case(key):
    """Upper-case names are the second tenant's."""
    return int(chr(key[0]).isupper())


def shared(*quotas, tiers=0, **options):
    options.setdefault("accept_prefix", True)
    return World(sum(quotas), tiers, tenancy=Tenancy(quotas, of_case, "AB"), **options)


def test_a_tenant_evicts_its_own_oldest_though_others_slots_are_free():
    world = shared(2, 6)
    ctx = world.begin()
    world.store(ctx, "ab")
    world.finish(ctx)
    output = world.store(world.begin("s"), "c")
    assert output.evicted_keys == ks("b"), "the tail of the prompt is older"
    world.wind_down()


@pytest.mark.parametrize("policy", ["lru", "arc", "hd"])
def test_a_flood_changes_no_hit_of_another_tenant(policy):
    def hits(num_flooding):
        world = shared(4, 4, policy=policy)
        found = []
        for number in range(60):
            ctx = world.begin("own")
            found += world.lookups(ctx, "ABCDEF"[number % 3 : number % 3 + 3])
            world.offer(ctx, "ABCDEF"[number % 3 : number % 3 + 3])
            while world.writes:
                world.written()
            world.finish(ctx)
            for other in range(num_flooding):
                ctx = world.begin("flood")
                world.offer(ctx, [f"f{number}.{other}"])
                while world.writes:
                    world.written()
                world.finish(ctx)
            world.step()
        world.wind_down()
        return found

    assert hits(7) == hits(0)
    assert HIT in hits(0)


def test_a_store_of_several_tenants_is_refused():
    world = shared(2, 2)
    ctx = world.begin()
    for call in (
        lambda: world.offer(ctx, "aB"),
        lambda: world.lookups(ctx, "aB"),
        lambda: world.planner.prefetch(ks("aB"), ctx),
        lambda: world.primary.reserve(ks("aB")),
    ):
        with pytest.raises(StateError, match="several tenants"):
            call()
    world.lookups(ctx, "a")
    with pytest.raises(StateError, match="several tenants"):
        world.lookup(ctx, "B")
    assert not list(world.primary.resident())
    world.wind_down()


def test_a_request_that_has_asked_for_nothing_has_no_tenant_yet():
    world = shared(2, 2)
    ctx = world.begin()
    world.planner.prefetch([], ctx)
    assert world.lookup(ctx, "B") is MISS
    with pytest.raises(StateError, match="several tenants"):
        world.lookup(ctx, "a")
    world.wind_down()


def test_a_tenant_that_waits_for_room_lets_others_pass():
    world = shared(2, 3, tiers=1)
    world.fill(0, ks("abCD"))
    holder, waiter, other = world.begin("h"), world.begin("w"), world.begin("o")
    world.offer(holder, "xy")
    assert world.lookups(waiter, "ab") == [PENDING] * 2
    world.step(0.1)
    assert world.lookups(other, "CD") == [PENDING] * 2
    world.step(0.1)
    world.finish_all()
    assert world.lookups(other, "CD") == [HIT, HIT]
    assert world.lookups(waiter, "ab") == [PENDING] * 2
    world.wind_down()


def test_a_run_is_bounded_by_the_tenants_own_budget():
    world = shared(3, 30, tiers=1)
    world.fill(0, ks("abcdef"))
    ctx = world.begin()
    assert world.lookups(ctx, "abcdef") == [PENDING] * 6
    world.step()
    world.finish_all()
    assert world.lookups(ctx, "abcdef") == [HIT] * 2 + [MISS] * 4
    world.wind_down()


def test_early_tickets_give_way_to_their_own_tenants_only():
    world = shared(8, 8, tiers=1)
    world.fill(0, ks("abAB"))
    first, second = world.begin("f"), world.begin("s")
    world.planner.prefetch(ks("ab"), first)
    world.planner.prefetch(ks("AB"), second)
    world.step()
    world.finish_all()
    world.step()
    assert len(world.planner.room.early) == 2
    world.offer(world.begin("t"), [f"n{i}" for i in range(8)])
    assert [request.ctx for request in world.planner.room.early] == [second]
    world.wind_down()


def test_pins_are_limited_for_each_tenant():
    world = shared(4, 8)
    world.store(world.begin("r"), "abc")
    world.store(world.begin("s"), "ABC")
    assert world.planner.pins.pin(ks("abcABC"), 9.0) == 3
    assert [share.kept for share in world.primary.shares] == [1, 2]
    world.check()
    assert world.planner.pins.unpin(ks("abcABC")) == 3
    assert [share.kept for share in world.primary.shares] == [0, 0]
    world.wind_down()


def test_retentions_are_limited_for_each_tenant():
    world = shared(4, 4)
    for name, keys in ("r", "abcd"), ("s", "ABCD"):
        ctx = world.begin(name, hints=Hints(Priority.HIGH, retain_s=9))
        world.store(ctx, keys)
        world.finish(ctx)
    retained = [share.hinted.retained for share in world.primary.shares]
    assert retained[0] == retained[1] > 0
    world.store(world.begin("t"), "efgh")
    assert [share.hinted.retained for share in world.primary.shares] == [0, retained[1]]
    world.wind_down()


def test_what_is_pending_for_a_tier_is_dropped_for_its_own_tenant_only():
    world = shared(2, 2, tiers=1, copies_each=0)
    world.store(world.begin("r"), "ab")
    world.store(world.begin("s"), "AB")
    output = world.offer(world.begin("t"), "c")
    assert len(output.evicted_keys) == 1
    assert not {*output.evicted_keys} & {*ks("AB")}
    assert world.primary.shares[1].protected == 2
    world.wind_down()


def test_held_slots_stay_their_tenants():
    world = shared(2, 2, tiers=1)
    world.fill(0, ks("a"))
    ctx = world.begin()
    world.lookups(ctx, "a")
    world.step()
    world.orphan()
    assert [(share.free, share.held) for share in world.primary.shares] == [(1, 1), (2, 0)]
    world.check()
    world.reset()
    assert [(share.free, share.held) for share in world.primary.shares] == [(1, 1), (2, 0)]
    world.flush_reset()
    world.release()
    assert [(share.free, share.held) for share in world.primary.shares] == [(2, 0), (2, 0)]
    world.wind_down()


def test_damage_to_the_counts_is_found():
    world = shared(2, 2)
    world.store(world.begin(), "a")
    world.primary.shares[0].free -= 3
    with pytest.raises(InvariantError, match="P28"):
        world.check()


def test_tickets_of_one_tenant_stay_within_its_own_budget():
    world = shared(3, 30, tiers=1)
    world.fill(0, ks("abc"))
    first, second = world.begin("f"), world.begin("s")
    world.lookups(first, "ab")
    world.step(0.1)
    world.lookups(second, "c")
    world.step(0.1)
    world.check()
    assert world.lookups(second, "c") == [PENDING]
    assert world.planner.room.named == 2
    world.wind_down()


def test_a_tenant_is_starved_though_another_holds_tickets():
    world = shared(2, 4, tiers=1)
    world.fill(0, ks("aB"))
    holder, waiter = world.begin("h"), world.begin("w")
    world.offer(world.begin("x"), "xy")
    answers = []
    for _ in range(3):
        world.lookups(holder, "B")
        world.step(0.1)
        world.finish_all()
    for _ in range(15):
        world.lookups(holder, "B")
        answers += world.lookups(waiter, "a")
        world.step(0.1)
        world.finish_all()
    assert MISS in answers, "it waits for nobody of its own"
    world.wind_down()


def test_each_tenant_has_a_head_in_the_queue():
    world = shared(2, 2, tiers=1)
    world.fill(0, ks("abAB"))
    world.offer(world.begin("x"), "xy")
    world.offer(world.begin("y"), "XY")
    heads = [world.begin("h"), world.begin("i")]
    behind = world.begin("j")
    for ctx, names in zip([*heads, behind], ["a", "A", "b"], strict=True):
        world.lookups(ctx, names)
    world.step(0.1)
    room = world.planner.room
    assert [request.ctx for request in room.queue if room.is_head(request)] == heads
    world.wind_down()


def test_room_is_that_of_one_tenant():
    world = shared(2, 5)
    world.store(world.begin("r"), "AB")
    share = world.primary.shares[0]
    assert world.primary.room_excluding(share, ks("AB")) == world.primary.room_in(share) == 2
    assert world.primary.room == 7
    world.wind_down()
