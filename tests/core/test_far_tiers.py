"""Tiers in a chain: a remote one is asked only for what the nearer ones are known to lack."""

from core.terms import MISS, PENDING, RETRY, k, ks
from core.world import World


def chain(near="", far="", **options):
    world = World(8, 2, remote={1}, **options)
    world.fill(0, ks(near))
    world.fill(1, ks(far))
    return world, world.begin()


def questions(world, tier=1):
    return world.planner.tiers[tier].counters.lookups


def test_what_the_near_tier_has_is_not_asked_of_the_remote_one():
    world, ctx = chain(near="ab", far="abcd")
    assert [world.lookup(ctx, name) for name in "abcdx"] == [PENDING] * 4 + [MISS]
    assert questions(world) == 3
    world.step()
    assert {tier: job.keys for tier, job in world.running.values()} == {
        0: tuple(ks("ab")),
        1: tuple(ks("cd")),
    }
    world.wind_down()


def test_a_remote_tier_waits_until_the_nearer_one_knows():
    world, ctx = chain(far="a", kinds={0: "probed"})
    world.tiers[0].is_probing = True
    for _ in range(2):
        assert [world.lookup(ctx, name) for name in "ax"] == [RETRY, RETRY]
        world.step()
    assert questions(world) == 0
    world.tiers[0].is_probing = False
    world.step()
    assert [world.lookup(ctx, name) for name in "ax"] == [PENDING, MISS]
    assert questions(world) == 2
    world.wind_down()


def test_a_local_tier_behind_one_that_does_not_know_is_asked_at_once():
    world = World(8, 3, remote={1}, kinds={0: "probed"})
    world.fill(2, ks("a"))
    assert world.lookup(world.begin(), "a") is PENDING
    assert questions(world, 1) == 0
    world.wind_down()


def test_a_tier_that_refuses_stores_keeps_none_from_the_other():
    world, ctx = chain()
    world.refusing.add(0)
    world.store(ctx, "ab")
    world.step()
    world.finish_all()
    assert world.tiers[1].contents.keys() == {k("a"), k("b")}
    world.wind_down()
