"""Deleted blocks are gone at once, and nothing that was under way brings them back."""

import pytest
from core.terms import HIT, MISS, PENDING, RETRY, k, ks
from core.world import World, stored_below

from kvoffload_async.abc.events import CallEnded
from kvoffload_async.core.deletions import KEYS_A_STEP, MOST_DELETIONS
from kvoffload_async.errors import BusyError, StateError, TierClosedError
from kvoffload_async.types import Hints


def stored(names="ab", num_slots=8, tiers=1, **options):
    """A world whose blocks are in the primary and in every tier."""
    world = World(num_slots, tiers, **options)
    ctx = world.begin()
    world.store(ctx, names)
    world.finish_all()
    return world, ctx


def end_calls(world):
    while world.calls:
        world.end_call()
    world.step()


def test_a_deleted_block_is_a_miss_at_once_and_gone_after_the_step():
    world, ctx = stored()
    deletion = world.delete("a")
    assert world.lookups(ctx, "ab") == [MISS, HIT]
    world.step()
    assert world.primary.counts["free"] == 7
    assert not deletion.is_done, "the tier has not confirmed it"
    assert world.lookup(ctx, "a") is MISS
    end_calls(world)
    assert deletion.is_done
    assert world.tiers[0].contents.keys() == {k("b")}
    assert world.lookup(ctx, "a") is MISS
    world.wind_down()


def test_a_block_that_is_loaded_stays_until_its_load_has_ended():
    world, ctx = stored(tiers=0)
    world.lookups(ctx, "ab")
    world.load(ctx, "ab")
    deletion = world.delete("a")
    world.step()
    assert world.lookup(ctx, "a") is MISS
    assert not deletion.is_done
    world.loaded()  # reads the block's bytes
    world.step()
    assert deletion.is_done
    assert world.primary.counts["free"] == 7
    world.wind_down()


def test_a_block_that_is_being_stored_never_becomes_readable():
    world = World(8, 1)
    ctx = world.begin()
    world.offer(ctx, "ab")
    world.delete("a")
    world.step()
    world.written()
    assert world.lookups(ctx, "ab") == [MISS, HIT]
    assert [job.keys for _, job in world.running.values()] == [(k("b"),)], "nor does it cascade"
    world.wind_down()


def test_a_block_that_is_being_promoted_never_becomes_readable():
    world, ctx = stored_below()
    assert world.lookups(ctx, "ab") == [PENDING, PENDING]
    world.step()
    world.delete("b")
    world.finish_job()
    assert world.lookups(ctx, "ab") == [HIT, MISS]
    world.step()
    assert world.primary.counts["free"] == 3
    end_calls(world)
    assert world.tiers[0].contents.keys() == {k("a")}
    world.wind_down()


def test_a_copy_to_a_tier_that_ends_after_the_deletion_is_deleted_there():
    world = World(8, 1)
    ctx = world.begin()
    world.store(ctx, "ab")
    deletion = world.delete("a")
    world.step()
    assert not world.endable_calls(), "the tier deletes after its jobs on the block"
    world.finish_all()
    assert k("a") in world.tiers[0].contents
    assert world.lookup(ctx, "a") is MISS
    end_calls(world)
    assert deletion.is_done
    assert world.tiers[0].contents.keys() == {k("b")}
    world.wind_down()


def test_a_failed_copy_of_a_deleted_block_is_not_repeated():
    world = World(8, 1)
    ctx = world.begin()
    world.store(ctx, "ab")
    world.delete("a")
    world.step()
    world.fail()
    for _ in range(4):
        world.step()
        world.finish_all()
    end_calls(world)
    assert world.tiers[0].contents.keys() == {k("b")}
    world.wind_down()


def test_a_block_that_is_pending_for_a_tier_is_dropped():
    world = World(8, 1, copies_each=1)
    ctx = world.begin()
    world.store(ctx, "abc")
    world.delete("bc")
    world.step()
    assert world.planner.tiers[0].counters.dropped["deleted"] == 2
    world.finish_all()
    end_calls(world)
    assert world.tiers[0].contents.keys() == {k("a")}
    world.wind_down()


def test_an_answer_to_a_probe_from_before_the_deletion_does_not_bring_a_block_back():
    world, ctx = stored_below(kinds={0: "probed"})
    world.tiers[0].is_probing = True
    assert world.lookup(ctx, "a") is RETRY
    world.step()
    world.delete("a")
    world.step()
    world.end_call()
    world.step()
    assert not world.planner.deletions.running
    state = world.planner.tiers[0]
    (generation,) = world.tiers[0].probes
    world.tiers[0].contents[k("a")] = "what the probe saw"
    world.tiers[0].is_probing = False
    world.step()
    assert generation not in world.tiers[0].probes
    assert state.index.lookup(k("a"), ctx) is MISS
    del world.tiers[0].contents[k("a")]
    world.wind_down()


def test_a_ticket_ends_before_a_deleted_block():
    world, ctx = stored_below(names="abc")
    world.lookups(ctx, "abc")
    world.step()
    world.finish_job()
    world.delete("b")
    world.step()
    assert world.planner.room.named_blocks == 1
    assert world.lookups(ctx, "abc", stop_at_miss=True) == [HIT, MISS]
    world.wind_down()


def test_a_tier_that_fails_to_delete_is_asked_again_and_its_block_stays_absent():
    world, ctx = stored()
    deletion = world.delete("ab")
    world.step()
    world.end_call(failed=[1])
    assert deletion.left == {0: 1}
    assert isinstance(deletion.errors[0], Exception)
    assert world.lookups(ctx, "ab") == [MISS, MISS]
    for _ in range(3):
        world.step(1.0)
    (retried,) = world.calls.values()
    assert len(retried.keys) == 1
    end_calls(world)
    assert deletion.is_done
    assert not deletion.errors
    world.wind_down()


def test_a_deleted_block_can_be_stored_anew():
    world, ctx = stored()
    world.delete("a")
    world.step()
    assert world.offer(ctx, "a").keys_to_store == [], "not while it is being deleted"
    end_calls(world)
    world.store(ctx, "a")
    assert world.lookup(ctx, "a") is HIT
    world.finish_all()
    assert k("a") in world.tiers[0].contents
    world.wind_down()


def test_a_tier_alone_forgets_a_block_that_the_primary_keeps():
    world, ctx = stored(tiers=2)
    world.delete("a", [1], in_primary=False)
    world.step()
    end_calls(world)
    assert world.lookup(ctx, "a") is HIT
    assert k("a") in world.tiers[0].contents
    assert k("a") not in world.tiers[1].contents
    world.wind_down()


@pytest.mark.parametrize("is_early", [False, True])
def test_a_block_that_only_the_primary_forgets_is_promoted_once_it_is_gone(is_early):
    world, ctx = stored()
    world.planner.room.most_early = 4
    world.lookups(ctx, "ab")
    world.load(ctx, "ab")
    deletion = world.delete("ab", [])
    other = world.begin("other")
    if is_early:
        world.planner.prefetch(ks("ab"), other)
    else:
        assert world.lookups(other, "ab") == [MISS, MISS], "the load still uses their slots"
    for _ in range(2):
        world.step()
    assert not world.running
    assert not deletion.is_done
    world.loaded()
    world.step()
    assert deletion.is_done
    assert world.lookups(other, "ab") == [PENDING, PENDING]
    world.step()
    world.finish_all()
    assert world.lookups(other, "ab") == [HIT, HIT]
    world.wind_down()


def test_a_failed_copy_to_the_one_tier_that_forgets_a_block_is_not_repeated():
    world = World(8, 2)
    ctx = world.begin()
    world.store(ctx, "a")
    world.delete("a", [1], in_primary=False)
    world.step()
    world.fail(max(world.running))
    world.finish_all()
    end_calls(world)
    for _ in range(4):
        world.step()
        world.finish_all()
    assert k("a") in world.tiers[0].contents
    assert k("a") not in world.tiers[1].contents
    world.wind_down()


def test_a_step_deletes_a_bounded_number_of_blocks():
    names = list(range(3 * KEYS_A_STEP))
    world, ctx = stored(names, num_slots=len(names), tiers=0)
    world.delete(names)
    for step in range(1, 4):
        assert world.planner.has_pending_work
        world.step()
        assert world.primary.counts["free"] == step * KEYS_A_STEP
        assert set(world.lookups(ctx, names)) == {MISS}, "all of them are barred from the first"
    assert not world.planner.deletions.running
    world.wind_down()


def test_deletions_are_bounded():
    world = World(4, 1)
    for name in range(MOST_DELETIONS):
        world.delete([name])
    with pytest.raises(BusyError, match=r"deletions .* are under way: at most .*delete in parts"):
        world.delete(["x"])
    with pytest.raises(StateError, match="too short"):
        World(4, 0).planner.delete([b"x"], ())


def test_a_tier_that_is_closed_ends_its_part():
    world, _ = stored()
    deletion = world.delete("a")
    world.step()
    world.planner.tiers[0].close()
    assert isinstance(deletion.errors[0], TierClosedError)
    (call_id,) = (call_id for _, call_id in world.calls)
    world.planner.tiers[0].handle(CallEnded(call_id, "delete", frozenset({k("a")})))
    world.calls.clear()
    world.planner.close()
    assert deletion.is_done
    assert not world.primary.barred.sets


def test_a_lookup_of_other_blocks_is_not_disturbed_by_a_deletion():
    world, ctx = stored("abcd")
    world.delete(ks("bd"))
    assert world.lookups(ctx, "abcd") == [HIT, MISS, HIT, MISS]
    world.load(ctx, "ac")
    world.step()
    world.loaded()
    world.wind_down()


def test_a_tier_that_confirms_a_part_is_asked_for_the_rest():
    world, _ = stored()
    deletion = world.delete("ab")
    world.step()
    world.end_call(failed={0}, error=None)
    assert list(deletion.left.values()) == [1]
    assert not deletion.errors
    world.step(1.0)
    end_calls(world)
    assert deletion.is_done
    world.wind_down()


def test_a_deleted_block_is_no_longer_retained():
    world = World(8, 0)
    ctx = world.begin(hints=Hints(retain_s=100))
    world.store(ctx, "ab")
    world.planner.touch(ks("ab"), ctx)
    world.finish(ctx)
    world.step()
    assert world.primary.hinted_blocks == 2
    world.delete("a")
    world.step()
    assert world.primary.hinted_blocks == 1
    world.wind_down()


def test_the_rest_of_a_ticket_before_a_deleted_block_has_its_turn():
    world, ctx = stored_below(names="abc")
    world.lookups(ctx, "abc")
    world.step()
    world.finish_all()
    assert world.planner.room.named_blocks == 3
    world.delete("b")
    world.step()
    assert world.planner.room.named_blocks == 1
    end_calls(world)
    assert world.lookups(ctx, "ab") == [HIT, MISS]
    world.wind_down()


def test_tickets_of_other_blocks_stay_whole():
    world, ctx = stored_below(names="abcd", num_slots=8)
    other = world.begin("other")
    world.lookups(ctx, "ab")
    world.lookups(other, "cd")
    world.step()
    world.delete("a")
    world.step()
    assert world.planner.requests[other].ticket.keys() == {k("c"), k("d")}
    world.finish_all()
    end_calls(world)
    world.wind_down()


def test_a_queued_request_is_not_promoted_from_a_tier_that_deletes_its_block():
    world, ctx = stored_below(names="ab", num_slots=8)
    world.planner.room.most_early = 4
    world.planner.prefetch(ks("ab"), ctx)
    world.delete("a", [0], in_primary=False)
    world.step()
    assert not world.running
    end_calls(world)
    world.wind_down()


@pytest.mark.parametrize("kind", ["exact", "probed", "cost_gated"])
def test_only_an_exact_index_lists_its_keys(kind):
    world = World(8, 1, kinds={0: kind})
    world.fill(0, ks("ab"))
    index = world.planner.tiers[0].index
    assert set(index.following(None, 10)) == (set(ks("ab")) if index.is_exact else set())
    index.deleted(ks("a"))
    world.wind_down()


def test_a_large_load_that_ends_lets_a_deletion_end_without_further_events():
    names = list(range(2 * KEYS_A_STEP + 1))
    world, ctx = stored(names, num_slots=len(names), tiers=0)
    world.lookups(ctx, names)
    world.load(ctx, names)
    deletion = world.delete(names)
    for _ in range(8):  # takes all, and tries each again once
        world.step()
    assert not world.planner.has_pending_work, "it waits for the load"
    world.loaded()
    for _ in range(3):
        world.step()
        assert world.planner.has_pending_work is not deletion.is_done
    assert deletion.is_done
    world.wind_down()


def test_a_deletion_whose_blocks_stay_in_use_does_not_delay_another():
    names = list(range(KEYS_A_STEP + 1))
    world, ctx = stored([*names, "x"], num_slots=len(names) + 1, tiers=0)
    for some in (names, "x"):
        world.lookups(ctx, some)
        world.load(ctx, some)
        world.step()
    world.delete(names)
    other = world.delete("x")
    for _ in range(4):
        world.step()
    world.loaded(world.reads[1])
    while world.planner.has_pending_work:
        world.step()
    assert other.is_done
    assert len(world.planner.deletions.running) == 1
    world.loaded()
    world.wind_down()
