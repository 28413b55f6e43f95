"""What was granted before a reset is worth nothing after it, whoever says that it has ended."""

import pytest
from core.terms import HIT, PENDING, k, ks, state_of
from core.world import World

from kvoffload_async.core.primary import Primary
from kvoffload_async.errors import StateError
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import ReqContext


def primary_with(*contexts):
    primary = Primary(4, LruPolicy(4))
    for ctx in contexts:
        primary.open_request(ctx)
    return primary


def granted(primary, ctx, names):
    return primary.prepare_store(ctx, ks(names)).store_spec.generation


def test_the_end_of_a_write_from_before_a_reset_makes_no_slot_readable():
    """The request lives on, and has been granted the same block anew: its bytes are to come."""
    ctx = ReqContext("r")
    primary = primary_with(ctx)
    before = granted(primary, ctx, "a")
    primary.reset()
    after = granted(primary, ctx, "a")
    for success in False, True:
        assert not primary.complete_store(ctx, ks("a"), success=success, generation=before)
    assert primary.lookup(k("a")) is PENDING
    assert primary.complete_store(ctx, ks("a"), success=True, generation=after) == ks("a")
    assert primary.lookup(k("a")) is HIT


def test_the_end_of_a_load_from_before_a_reset_unpins_nothing():
    ctx = ReqContext("r")
    primary = primary_with(ctx)
    for generation in range(2):
        assert primary.generation == generation
        primary.complete_store(ctx, ks("a"), success=True, generation=granted(primary, ctx, "a"))
        primary.prepare_load(ctx, ks("a"))
        if not generation:
            primary.reset()
    primary.complete_load(ctx, ks("a"), 0)
    assert state_of(primary, k("a")) == "pinned"
    primary.complete_load(ctx, ks("a"), 1)
    assert state_of(primary, k("a")) == "idle"


@pytest.mark.parametrize("generation", [None, 0])
def test_another_request_with_the_id_ends_no_write_and_no_load(generation):
    old, new = ReqContext("r"), ReqContext("r")
    primary = primary_with(old, new)
    primary.prepare_store(new, ks("a"))
    assert not primary.complete_store(old, ks("a"), success=True, generation=generation)
    primary.complete_store(new, ks("a"), success=True)
    primary.prepare_load(new, ks("a"))
    with pytest.raises(StateError, match="did not prepare"):
        primary.complete_load(old, ks("a"), generation)
    assert state_of(primary, k("a")) == "pinned"


def test_a_late_store_of_a_request_that_lives_on_cascades_nothing():
    world = World()
    ctx = world.begin()
    world.offer(ctx, "a")
    world.reset()
    world.planner.reset_flushed()
    world.offer(ctx, "a")
    stale, fresh = world.writes
    world.planner.complete_store(stale.keys, ctx, success=True, generation=stale.generation)
    world.writes.remove(stale)
    assert world.planner.lookup(k("a"), ctx) is PENDING
    assert not world.planner.jobs
    world.written(fresh)
    assert len(world.planner.jobs) == 1
    world.wind_down()
