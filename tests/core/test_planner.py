"""The planner's requests, jobs and resets."""

import pytest
from core.terms import HIT, MISS, PENDING, k, ks
from core.world import World, stored_below

from kvoffload_async.abc.events import JobFinished
from kvoffload_async.core.primary import read_primary
from kvoffload_async.errors import IllegalTransitionError, StateError
from kvoffload_async.types import ReqContext

# -- requests -----------------------------------------------------------------------------------


def test_the_tiers_hear_of_the_end_after_the_last_store_45823():
    """45823, 46027: tiers were told the end, and then got one more store."""
    world = World(tiers=2)
    ctx = world.begin()
    world.offer(ctx, "a")
    world.finish(ctx)
    assert world.ended == []
    world.written()
    assert world.ended == [(0, "r"), (1, "r")]
    assert len(world.running) == 2
    world.wind_down()


def test_for_a_request_that_finishes_in_the_step_of_its_lookup_nothing_is_promoted():
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.finish(ctx)
    assert world.ended == [(0, "r")]
    world.end_step()
    assert world.running == {}
    world.wind_down()


def test_a_finish_is_not_missed_on_a_reset_46284():
    """46284: a request that had finished with a store in flight was never ended after a reset."""
    world = World()
    ctx, survivor = world.begin("r"), world.begin("s")
    world.offer(ctx, "a")
    world.finish(ctx)
    world.reset()
    assert world.ended == [(0, "r")]
    world.flush_reset()
    assert world.ended == [(0, "r")]
    world.store(survivor, "a")
    world.wind_down()


def test_misuse_is_told_at_the_call():
    world = World()
    ctx = world.begin()
    with pytest.raises(StateError, match="known already"):
        world.planner.on_new_request(ctx)
    world.finish(ctx)
    for call in (
        lambda: world.planner.lookup(k("a"), ctx),
        lambda: world.planner.prepare_load(ks("a"), ctx),
        lambda: world.planner.prepare_store(ks("a"), ctx),
        lambda: world.planner.on_request_finished(ctx),
    ):
        with pytest.raises(StateError, match="on_new_request first"):
            call()
    world.wind_down()


def test_a_request_that_waits_for_its_store_looks_nothing_up():
    world = World()
    ctx = world.begin()
    world.offer(ctx, "a")
    world.finish(ctx)
    with pytest.raises(StateError, match="has finished"):
        world.lookup(ctx, "a")
    world.wind_down()


def test_touching_moves_nothing_but_ranks():
    world = World()
    ctx = world.begin()
    world.store(ctx, "ab")
    world.planner.touch(ks("a"), ctx)
    world.planner.touch(ks("a"), ReqContext("unknown"))
    world.wind_down()


def observe(world, hear):
    """Have `hear` called with each lookup in a tier: its name, keys, context and answers."""

    def observed(tier, lookup_many):
        def ask(keys, req_context, *, stop_at_miss):
            answers = lookup_many(keys, req_context, stop_at_miss=stop_at_miss)
            hear(tier.name, keys, req_context, answers)
            return answers

        return ask

    for tier in world.planner.tiers:
        tier.lookup_many = observed(tier, tier.lookup_many)


def test_lookups_ask_the_tiers_in_order_up_to_one_that_has_the_block():
    world, ctx = stored_below(tiers=2)
    heard = []
    observe(world, lambda *lookup: heard.append(lookup))
    assert world.lookup(ctx, "a") is PENDING
    names = [tier.name for tier in world.planner.tiers]
    answers = zip(names, [MISS, HIT], strict=True)
    assert heard == [(name, ks("a"), ctx, [answer]) for name, answer in answers]
    world.step()
    world.finish_job()
    world.wind_down()


def test_a_prompt_whose_first_block_no_tier_has_is_looked_up_by_that_block_alone():
    world = World(tiers=2)
    ctx = world.begin()
    heard = []
    observe(world, lambda name, keys, _ctx, _answers: heard.append((name, list(keys))))
    for _ in range(2):  # a tier that lacks a key is not asked again in the same step
        assert world.planner.lookup_many(ks("abc"), ctx, stop_at_miss=True) == [MISS]
    assert heard == [(tier.name, ks("a")) for tier in world.planner.tiers]
    assert world.planner.counters.misses["absent"] == 2
    assert [tier.counters.misses for tier in world.planner.tiers] == [1, 1]
    world.wind_down()


def test_what_the_planner_and_the_primary_have_done_can_be_read():
    world = World(num_slots=2)
    ctx = world.begin()
    world.store(ctx, "a")
    world.lookup(ctx, "a")
    taken = world.planner.snapshot()
    planner, primary = world.planner.statistics(taken.planner), read_primary(taken.primary, 8)
    own = world.planner.tiers
    tiers = [tier.statistics(figures) for tier, figures in zip(own, taken.tiers, strict=True)]
    in_flight = sum(tier.jobs_in_flight for tier in tiers)
    assert in_flight == planner.jobs_submitted - planner.job_results
    assert (planner.requests, planner.retained_blocks, planner.hits) == (1, 0, 1)
    assert (primary.row_bytes, primary.load_pins, primary.hits) == (8, 0, 1)
    assert (primary.slots.free, primary.slots.pinned) == (1, 1)
    world.wind_down()


# -- jobs ---------------------------------------------------------------------------------------


def test_a_job_reported_twice_or_by_the_wrong_tier_is_a_defect():
    world = World(tiers=2)
    world.store(world.begin(), "a")
    mine, other = world.planner.tiers
    with pytest.raises(IllegalTransitionError, match="the job is unknown"):
        other.handle(JobFinished(0))
    mine.handle(JobFinished(0))
    with pytest.raises(IllegalTransitionError, match="the job is FINISHED"):
        mine.handle(JobFinished(0))


def test_only_an_orphaned_job_is_released_and_only_by_its_tier():
    world = World(tiers=2)
    world.store(world.begin(), "a")
    world.orphan(0)
    mine, other = world.planner.tiers
    with pytest.raises(IllegalTransitionError, match="the job is unknown"):
        other.handle(JobFinished(0))
    world.release(0)
    with pytest.raises(IllegalTransitionError, match="has ended already"):
        mine.handle(JobFinished(0))
    world.wind_down()


def test_an_orphaned_cascade_keeps_its_block_until_its_copy_ends():
    world = World(num_slots=1)
    ctx = world.begin()
    world.store(ctx, "a")
    world.orphan()
    assert world.offer(ctx, "b") is None
    world.release()
    world.store(ctx, "b")
    world.wind_down()


def test_an_orphaned_cascade_counts_against_its_tiers_bound_until_its_copy_ends():
    world = World(num_slots=4)
    ctx = world.begin()
    world.store(ctx, "ab")
    world.orphan()
    assert world.planner.tiers[0].cascading_blocks == 2
    world.release()
    assert world.planner.tiers[0].cascading_blocks == 0
    world.wind_down()


def test_an_orphaned_promotion_is_a_miss_and_keeps_its_slot_until_its_copy_ends():
    world, ctx = stored_below(num_slots=1, names="a")
    world.lookup(ctx, "a")
    world.step()
    world.orphan()
    assert world.lookup(ctx, "a") is MISS
    assert world.primary.counts["held"] == 1
    assert world.offer(ctx, "b") is None
    world.release()
    world.store(ctx, "b")
    world.load(ctx, "b")
    world.wind_down()


def test_promotions_flow_though_nobody_takes_events_44206():
    """44206: draining events drove the life cycle."""
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.end_step()
    world.finish_job()
    assert world.lookup(ctx, "a") is HIT
    world.load(ctx, "a")
    world.wind_down()


def test_loading_a_missing_block_ends_in_a_miss_42529():
    """42529: a load of a missing key gave no result, and its request hung."""
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.lose(0, k("a"))
    world.finish_job()
    assert world.lookup(ctx, "a") is MISS
    assert not world.planner.has_pending_work
    world.wind_down()


# -- reset --------------------------------------------------------------------------------------


def test_a_reset_wants_the_tiers_drained_first():
    world = World()
    world.store(world.begin(), "a")
    with pytest.raises(StateError, match="1 jobs in flight"):
        world.planner.reset_cache()
    assert world.primary.counts["pinned"] == 1
    world.wind_down()


def test_slots_of_a_copy_that_outlives_the_reset_are_not_reused_44541():
    """44541: a reset left tier I/O running over slots that were handed out again."""
    world, ctx = stored_below(num_slots=2, names="a")
    world.store(ctx, "b")
    world.finish_job()
    world.store(ctx, "c")
    world.orphan()
    world.reset()
    world.flush_reset()
    assert world.primary.counts["held"] == 1
    assert world.offer(ctx, "xy") is None
    world.store(ctx, "x")
    world.release()
    world.store(ctx, "y")
    world.load(ctx, "xy")
    world.wind_down()


def test_a_promotion_mid_copy_outlives_the_reset_44541():
    world, ctx = stored_below(num_slots=1, names="a")
    world.lookup(ctx, "a")
    world.step()
    world.orphan()
    world.reset()
    world.flush_reset()
    assert world.offer(ctx, "x") is None
    world.release()
    world.store(ctx, "x")
    world.load(ctx, "x")
    world.wind_down()


def test_no_promotion_into_a_slot_that_a_late_device_copy_still_writes_033_fence():
    """0.33's fence: after a reset a late copy from the device may still land in a freed slot."""
    world, ctx = stored_below(num_slots=1, names="a")
    world.offer(ctx, "x")
    world.reset()
    assert world.lookup(ctx, "a") is MISS
    world.flush_reset()
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    world.finish_job()
    world.load(ctx, "a")
    world.wind_down()


def test_lookups_of_the_step_are_void_after_a_reset():
    world, ctx = stored_below(names="a", request_level=[0])
    other = world.begin("other")
    world.lookup(ctx, "a")
    world.offer(other, "p")
    world.offer(ctx, "p")
    world.reset()
    assert world.primary.counts["free"] == 4
    assert world.planner.room.named == 0
    assert not world.planner.has_pending_work
    world.step()
    assert world.running == {}
    world.wind_down()


def test_the_tiers_keep_their_blocks_over_a_reset():
    world = World()
    ctx = world.begin()
    world.store(ctx, "a")
    world.finish_job()
    world.reset()
    world.flush_reset()
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    world.finish_job()
    world.load(ctx, "a")
    world.wind_down()


@pytest.mark.parametrize("stop_at_miss", [False, True])
def test_keys_are_looked_up_together_up_to_the_first_miss_or_past_it(stop_at_miss):
    world = World(num_slots=8)
    world.fill(0, ks("bd"))
    ctx = world.begin()
    world.store(ctx, "a")
    answers = world.lookups(ctx, "abxdad", stop_at_miss=stop_at_miss)
    every = [HIT, PENDING, MISS, PENDING, HIT, PENDING]
    assert answers == (every[:3] if stop_at_miss else every)
    counters = world.planner.counters
    assert counters.lookups == len(answers)
    assert counters.misses["absent"] == 1
    assert (counters.block_hits, counters.block_misses) == (1, 1)
    world.step()
    assert world.tiers[0].state.promotion_slots == (1 if stop_at_miss else 2)
    world.finish_all()
    again = world.lookups(ctx, "abxda", stop_at_miss=stop_at_miss)
    assert again == ([HIT, HIT, MISS] if stop_at_miss else [HIT, HIT, MISS, HIT, HIT])
    world.wind_down()


def test_a_lookup_of_many_keys_asks_for_few_behind_a_miss():
    world = World(num_slots=600)
    names = [f"{number:04}" for number in range(600)]
    world.fill(0, ks(names[:300] + names[301:]))
    ctx = world.begin()
    asked = []
    lookup_many = world.primary.lookup_many
    world.primary.lookup_many = lambda keys: asked.extend(keys) or lookup_many(keys)
    assert world.lookups(ctx, names, stop_at_miss=True) == [PENDING] * 300 + [MISS]
    assert len(asked) == 1 + 512
    assert world.lookups(ctx, (), stop_at_miss=True) == []
    world.primary.lookup_many = lookup_many
    world.step()
    world.finish_all()
    world.wind_down()


def test_of_a_prefix_the_head_that_fits_is_promoted_in_one_job():
    world = World(num_slots=4)
    world.fill(0, ks("abcdef"))
    ctx = world.begin()
    assert world.lookups(ctx, "abcdef", stop_at_miss=True) == [PENDING] * 6
    world.step()
    ((_, job),) = world.running.values()
    assert job.keys == tuple(ks("abc"))
    assert world.lookups(ctx, "abcdef", stop_at_miss=True) == [PENDING] * 3 + [MISS]
    world.finish_all()
    assert world.lookups(ctx, "abcdef") == [HIT] * 3 + [MISS] * 3
    assert world.planner.counters.misses["no_room"] == 4
    world.wind_down()


def test_what_a_lookup_has_found_is_not_evicted_by_its_own_promotions():
    world = World(num_slots=2)
    world.fill(0, ks("a"))
    ctx = world.begin()
    world.store(ctx, "xy")
    world.step()
    world.finish_all()
    assert world.lookups(ctx, "axy") == [PENDING, HIT, HIT]
    assert world.lookups(ctx, "xy") == [HIT] * 2
    world.wind_down()


def test_a_request_that_was_deferred_for_too_long_misses_what_is_pending():
    world = World(num_slots=8, deferral_s=2.0)
    world.fill(0, ks("bc"))
    ctx = world.begin()
    world.store(ctx, "a")
    assert world.lookups(ctx, "abc", stop_at_miss=True) == [HIT, PENDING, PENDING]
    world.step(3.0)
    assert world.lookups(ctx, "abc") == [HIT, MISS, MISS]
    assert world.lookups(ctx, "abc", stop_at_miss=True) == [HIT, MISS]
    assert world.planner.counters.misses["expired"] == 3
    world.finish_all()
    world.wind_down()
