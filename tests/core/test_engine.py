import pytest
from core.world import HIT, MISS, NO_LIMITS, PENDING, RETRY, World, k, ks

from kvoffload_async.core.breaker import BreakerSettings
from kvoffload_async.core.effects import FinishRequest, SubmitJob
from kvoffload_async.core.engine import EngineLimits
from kvoffload_async.core.events import CacheReset, JobReleased, JobReported, StepEnded
from kvoffload_async.core.primary import BlockState
from kvoffload_async.errors import (
    CorruptBlockError,
    StateError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.types import JobResult, Locality, LookupResult, ReqContext, TierMatcher


def stored_below(num_slots=4, tiers=1, names="ab", **options):
    """Blocks that lie in the last tier only, and a live request."""
    world = World(num_slots, tiers, **options)
    world.fill(tiers - 1, ks(names))
    return world, world.begin()


# -- storing ------------------------------------------------------------------------------------


def test_a_written_block_cascades_to_every_tier_under_a_pin_each():
    world = World(tiers=2)
    world.store(world.begin(), "ab")
    assert [(tier, job.keys) for tier, job in world.running.values()] == [
        (0, tuple(ks("ab"))),
        (1, tuple(ks("ab"))),
    ]
    world.settle()
    assert world.primary.state_of(k("a")) is BlockState.PINNED
    world.settle()
    assert world.primary.state_of(k("a")) is BlockState.IDLE
    world.wind_down()


def test_a_failed_cascade_lets_go_of_its_pin():
    world = World()
    world.store(world.begin(), "a")
    world.settle(failed={0})
    assert world.primary.state_of(k("a")) is BlockState.IDLE
    assert world.engine.tiers[0].counters.failed_jobs == 1
    world.wind_down()


def test_a_failed_write_does_not_cascade():
    world = World()
    ctx = world.begin()
    world.offer(ctx, "a")
    world.written(success=False)
    assert world.running == {}
    assert world.lookup(ctx, "a") is MISS
    world.wind_down()


def test_a_refused_submission_is_a_failed_job_and_leaks_nothing():
    """An exception out of submit leaked the pin or the reservation."""
    world, ctx = stored_below(tiers=2, names="x")
    world.refusing = {0, 1}
    world.store(ctx, "a")
    assert world.lookup(ctx, "x") is PENDING
    world.step()
    assert world.lookup(ctx, "x") is MISS
    assert world.primary.counts["free"] == 3
    world.wind_down()


def test_what_is_over_the_bound_of_a_tier_is_dropped_and_counted_50031_50045():
    """50031, 50045: cascades to a slow tier piled up without bound."""
    world = World(8, limits=EngineLimits(8, cascade_blocks=3, deferral_s=100.0))
    ctx = world.begin()
    world.store(ctx, "ab")
    world.store(ctx, "cde")
    world.store(ctx, "f")
    assert [job.keys for _, job in world.running.values()] == [tuple(ks("ab")), tuple(ks("c"))]
    assert world.engine.tiers[0].counters.dropped_blocks == 3
    assert world.primary.state_of(k("d")) is BlockState.IDLE
    world.settle()
    world.store(ctx, "g")
    assert len(world.running) == 2
    world.wind_down()


def test_a_tier_under_pressure_is_spared_stores_but_not_loads_50045():
    world = World(32, pressed_tier=0)
    ctx = world.begin()
    for i in range(10):
        world.store(ctx, [f"slow{i}"])
        world.settle(seconds=1.0)
    world.store(ctx, ["dropped"])
    assert world.running == {}
    world.fill(0, [k("x")])
    assert world.lookup(ctx, "x") is PENDING
    world.step(60.0)
    world.settle()
    world.store(ctx, ["after the decay"])
    assert len(world.running) == 1
    world.wind_down()


def test_stores_that_fail_press_a_tier_too():
    world = World(8, pressed_tier=0)
    ctx = world.begin()
    for i in range(3):
        world.store(ctx, [i])
        world.settle(failed={0}, error=TierFullError("full"))
    world.store(ctx, "x")
    assert world.running == {}
    world.reset()
    world.flush_reset()
    world.store(ctx, "y")
    assert len(world.running) == 1
    world.wind_down()


def test_a_failing_tier_is_left_alone_and_tried_again_later():
    world, ctx = stored_below(8, names="x", breaker=BreakerSettings(2, retry_after_s=5.0))
    for name in "ab":
        world.store(ctx, name)
        world.settle(failed={0}, error=TierUnavailableError("down"))
    world.store(ctx, "c")
    assert world.running == {}
    assert world.lookup(ctx, "x") is MISS
    world.step(5.0)
    assert world.lookup(ctx, "x") is PENDING
    world.step()
    world.settle()
    assert world.lookup(ctx, "x") is HIT
    world.store(ctx, "d")
    assert len(world.running) == 1
    world.wind_down()


def test_the_fault_of_a_block_is_not_the_fault_of_its_tier():
    world, ctx = stored_below(8, names="abc", breaker=BreakerSettings(1))
    for name in "abc":
        assert world.lookup(ctx, name) is PENDING
        world.step()
        world.settle(failed={0}, error=CorruptBlockError("flipped"))
    world.wind_down()


# -- promotions ---------------------------------------------------------------------------------


def test_a_block_below_is_promoted_and_read():
    world, ctx = stored_below(tiers=2)
    assert [world.lookup(ctx, name) for name in "abx"] == [PENDING, PENDING, MISS]
    assert [world.lookup(ctx, name) for name in "ab"] == [PENDING, PENDING]
    world.step()
    assert [(tier, job.keys) for tier, job in world.running.values()] == [(1, tuple(ks("ab")))]
    world.settle()
    assert world.lookup(ctx, "a") is HIT
    world.load(ctx, "ab")
    world.loaded()
    world.wind_down()


def test_the_first_tier_that_has_a_block_promotes_it():
    world, ctx = stored_below(tiers=2, names="a")
    world.fill(0, ks("a"))
    world.lookup(ctx, "a")
    world.step()
    assert [tier for tier, _ in world.running.values()] == [0]
    world.wind_down()


def test_a_tier_that_does_not_know_does_not_stop_the_search():
    world, ctx = stored_below(tiers=2, names="a")
    world.tiers[0].is_probing = True
    assert [world.lookup(ctx, name) for name in "ax"] == [PENDING, RETRY]
    world.wind_down()


@pytest.mark.parametrize("stray", [PENDING, RETRY])
def test_a_stray_pending_hit_of_a_tier_is_a_retry_46363(stray):
    """46363: None meant both "unknown" and "on its way"."""
    world = World()
    world.tiers[0].stray = stray
    assert world.lookup(world.begin(), "a") is RETRY
    assert LookupResult.RETRY is not LookupResult.HIT_PENDING
    world.wind_down()


def test_a_request_may_choose_the_tiers_it_loads_from():
    world, _ = stored_below(names="a")
    choosy = world.begin("choosy", load_tier_filter=frozenset())
    remote = world.begin("remote", load_tier_filter={TierMatcher(locality=Locality.REMOTE)})
    local = world.begin("local", load_tier_filter={TierMatcher(locality=Locality.LOCAL)})
    answers = [world.lookup(ctx, "a") for ctx in (choosy, remote, local)]
    assert answers == [MISS, MISS, PENDING]
    world.wind_down()


def test_a_full_primary_makes_a_block_below_a_miss_and_never_a_retry():
    world, ctx = stored_below(num_slots=1)
    assert [world.lookup(ctx, name) for name in "ab"] == [PENDING, MISS]
    assert world.engine.counters.promotions_refused == 1
    world.wind_down()


def test_hits_of_this_step_are_not_evicted_by_promotions():
    world, ctx = stored_below(num_slots=1, names="x")
    world.store(ctx, "a")
    world.settle()
    assert [world.lookup(ctx, name) for name in "ax"] == [HIT, MISS]
    world.load(ctx, "a")
    world.loaded()
    world.step()
    assert world.lookup(ctx, "x") is PENDING
    world.wind_down()


def test_the_good_blocks_of_a_bad_batch_are_kept_50321():
    """50321: the last of three blocks was corrupt, and the whole batch discarded."""
    world, ctx = stored_below(names="abc")
    [world.lookup(ctx, name) for name in "abc"]
    world.step()
    world.settle(failed={2}, error=CorruptBlockError("flipped"))
    assert [world.lookup(ctx, name) for name in "abc"] == [HIT, HIT, MISS]
    assert world.engine.tiers[0].counters.loaded_blocks == 2
    world.wind_down()


def test_a_failed_load_is_not_promoted_again_for_its_request_49176_49328():
    """49176, 49328: a truncated file was promoted for ever; the request has to recompute."""
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.settle(failed={0})
    assert world.lookup(ctx, "a") is MISS
    assert world.primary.counts["free"] == 4
    other = world.begin("other")
    assert world.lookup(other, "a") is PENDING
    world.wind_down()


def test_a_failed_load_is_still_looked_for_in_the_next_tier():
    world, ctx = stored_below(tiers=2, names="a")
    world.fill(0, ks("a"))
    world.lookup(ctx, "a")
    world.step()
    world.settle(failed={0})
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    assert [tier for tier, _ in world.running.values()] == [1]
    world.wind_down()


def test_a_request_does_not_inherit_the_failures_of_an_earlier_one_of_its_id():
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.finish(ctx)
    again = world.begin(ctx.req_id)
    world.settle(failed={0})
    assert world.lookup(again, "a") is PENDING
    world.wind_down()


def test_waiting_requests_fill_neither_primary_nor_evict_each_others_blocks_49902():
    """49902, 49952, 50014: 50 waiters filled a small pool and evicted unread promotions."""
    world = World(16, limits=EngineLimits(8, 1_000, 1_000.0))
    names = [f"block{i}" for i in range(50)]
    world.fill(0, ks(names))
    waiters = [world.begin(f"r{i}") for i in range(50)]
    for ctx, name in zip(waiters, names, strict=True):
        world.lookup(ctx, name)
    world.step()
    assert world.primary.counts["writing"] == 8
    world.settle_all()
    assert world.primary.counts["pinned"] == 8
    world.store(world.begin("runner"), "abcdefgh")
    assert [world.lookup(waiters[i], names[i]) for i in (0, 7, 8)] == [HIT, HIT, MISS]
    assert world.offer(waiters[8], "x") is None
    world.load(waiters[0], [names[0]])
    world.loaded()
    world.finish(waiters[1])
    world.settle_all()
    assert world.lookup(waiters[8], names[8]) is PENDING
    world.wind_down()


def test_promotions_for_a_request_that_has_finished_are_not_kept():
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.finish(ctx)
    world.settle()
    assert world.primary.state_of(k("a")) is BlockState.IDLE
    world.wind_down()


# -- deferral -----------------------------------------------------------------------------------


def test_a_tier_that_never_answers_defers_for_a_bounded_time_49829_49850():
    """49829, 49850: a stalled tier deferred its requests for ever."""
    world = World(limits=EngineLimits(8, 8, deferral_s=3.0))
    world.tiers[0].is_probing = True
    ctx = world.begin()
    answers = []
    for _ in range(5):
        answers.append(world.lookup(ctx, "a"))
        world.step(1.0)
    assert answers == [RETRY, RETRY, RETRY, MISS, MISS]
    assert world.engine.counters.deferrals_expired == 1
    world.wind_down()


def test_failed_rounds_do_not_reset_the_deadline_53087():
    """53087: a tier that failed again and again began a new deadline each time."""
    names = [f"block{i}" for i in range(8)]
    world, ctx = stored_below(names=names, limits=EngineLimits(8, 8, deferral_s=3.0))
    answers = []
    for name in names:
        answers.append(world.lookup(ctx, name))
        world.step(1.0)
        if world.running:
            world.settle(failed={0})
    assert answers == [PENDING] * 3 + [MISS] * 5
    world.wind_down()


def test_being_scheduled_stops_the_clock():
    world, ctx = stored_below(names="ab", limits=EngineLimits(8, 8, deferral_s=3.0))
    world.lookup(ctx, "a")
    world.step(2.0)
    world.settle()
    world.lookup(ctx, "b")
    world.load(ctx, "a")
    world.step(100.0)
    assert world.lookup(ctx, "b") is PENDING
    world.wind_down()


def test_for_an_expired_request_pending_means_missing_and_hits_stay_hits():
    world, ctx = stored_below(names="ab", limits=EngineLimits(8, 8, deferral_s=1.0))
    world.store(ctx, "x")
    world.lookup(ctx, "a")
    world.step(1.0)
    assert [world.lookup(ctx, name) for name in "abx"] == [MISS, MISS, HIT]
    assert world.lookup(world.begin("other"), "b") is PENDING
    world.wind_down()


# -- request level ------------------------------------------------------------------------------


def test_warm_blocks_cascade_to_a_request_level_tier_though_nothing_is_new_52808():
    """52808: a request whose blocks were all present cascaded none of them."""
    world = World(8, 2, request_level=[1])
    world.store(world.begin("r"), "ab")
    world.settle_all()
    assert world.offer(world.begin("s"), "aba").keys_to_store == []
    assert [(tier, job.keys) for tier, job in world.running.values()] == [(1, tuple(ks("ab")))]
    world.wind_down()


def test_blocks_that_another_request_writes_are_parked_and_cascade_later_53329():
    """53329: the cascade of keys in flight was lost for the second of two requests."""
    world = World(8, 1, request_level=[0])
    first, second = world.begin("r"), world.begin("s")
    world.offer(first, "ab")
    world.offer(second, "abc")
    world.finish(second)
    assert world.engine.has_pending_work
    world.step()
    world.written(world.writes[1])
    world.written(world.writes[0])
    world.settle_all()
    assert world.ended == []
    world.step()
    assert [(job.req_context.req_id, job.keys) for _, job in world.running.values()] == [
        ("s", tuple(ks("ab")))
    ]
    assert world.ended == [(0, "s")]
    world.wind_down()


def test_a_parked_block_whose_write_fails_is_dropped():
    world = World(8, 1, request_level=[0])
    first, second = world.begin("r"), world.begin("s")
    world.offer(first, "a")
    world.offer(second, "a")
    world.written(success=False)
    world.step()
    assert world.running == {}
    assert not world.engine.has_pending_work
    world.wind_down()


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


def test_a_request_that_finishes_in_the_step_of_its_lookup_ends_after_the_submit():
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.finish(ctx)
    assert world.ended == []
    effects = world.engine.handle(StepEnded())
    assert [type(effect) for effect in effects] == [SubmitJob, FinishRequest]
    world._absorb(effects)
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
        world.engine.on_new_request(ctx)
    world.finish(ctx)
    for call in (
        lambda: world.engine.lookup(k("a"), ctx),
        lambda: world.engine.prepare_load(ks("a"), ctx),
        lambda: world.engine.prepare_store(ks("a"), ctx),
        lambda: world.engine.on_request_finished(ctx),
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
    world.engine.touch(ks("a"), ctx)
    world.engine.touch(ks("a"), ReqContext("unknown"))
    world.wind_down()


# -- jobs ---------------------------------------------------------------------------------------


def test_a_job_reported_twice_or_by_the_wrong_tier_is_a_defect():
    world = World(tiers=2)
    world.store(world.begin(), "a")
    with pytest.raises(StateError, match="'tier1' reported job 0"):
        world.engine.handle(JobReported(1, JobResult(0, success=True)))
    world.engine.handle(JobReported(0, JobResult(0, success=True)))
    with pytest.raises(StateError, match="'tier0' reported job 0"):
        world.engine.handle(JobReported(0, JobResult(0, success=True)))


def test_only_a_disowned_job_is_released_and_only_by_its_tier():
    world = World(tiers=2)
    world.store(world.begin(), "a")
    world.disown(0)
    with pytest.raises(StateError, match="'tier1' released job 0"):
        world.engine.handle(JobReleased(1, 0))
    world.release(0)
    with pytest.raises(StateError, match="'tier0' released job 0"):
        world.engine.handle(JobReleased(0, 0))
    world.wind_down()


def test_a_disowned_cascade_keeps_its_block_until_its_copy_ends():
    world = World(num_slots=1)
    ctx = world.begin()
    world.store(ctx, "a")
    world.disown()
    assert world.offer(ctx, "b") is None
    world.release()
    world.store(ctx, "b")
    world.wind_down()


def test_a_disowned_cascade_counts_against_its_tiers_bound_until_its_copy_ends():
    world = World(num_slots=4)
    ctx = world.begin()
    world.store(ctx, "ab")
    world.disown()
    assert world.engine.tiers[0].cascading_blocks == 2
    world.release()
    assert world.engine.tiers[0].cascading_blocks == 0
    world.wind_down()


def test_a_disowned_promotion_is_a_miss_and_keeps_its_slot_until_its_copy_ends():
    world, ctx = stored_below(num_slots=1, names="a")
    world.lookup(ctx, "a")
    world.step()
    world.disown()
    assert world.lookup(ctx, "a") is MISS
    assert world.primary.counts["held"] == 1
    assert world.offer(ctx, "b") is None
    world.release()
    world.store(ctx, "b")
    world.load(ctx, "b")
    world.wind_down()


def test_nothing_has_landed_while_the_copy_still_runs_whatever_the_tier_says():
    world, ctx = stored_below(names="ab")
    [world.lookup(ctx, name) for name in "ab"]
    world.step()
    error = TierTimeoutError("late")
    landed = frozenset(ks("a"))
    world.disown(0, result=JobResult(0, False, landed, error=error, disowned=True))
    world.check()
    assert world.primary.counts["held"] == 2
    world.release()
    world.wind_down()


def test_promotions_flow_though_nobody_takes_events_44206():
    """44206: draining events drove the life cycle."""
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world._handle(StepEnded())
    world.settle()
    assert world.lookup(ctx, "a") is HIT
    world.load(ctx, "a")
    world.wind_down()


def test_loading_a_missing_block_ends_in_a_miss_42529():
    """42529: a load of a missing key gave no result, and its request hung."""
    world, ctx = stored_below(names="a")
    world.lookup(ctx, "a")
    world.step()
    world.lose(0, k("a"))
    world.settle()
    assert world.lookup(ctx, "a") is MISS
    assert not world.engine.has_pending_work
    world.wind_down()


# -- reset --------------------------------------------------------------------------------------


def test_a_reset_wants_the_tiers_drained_first():
    world = World()
    world.store(world.begin(), "a")
    with pytest.raises(StateError, match="1 jobs in flight"):
        world.engine.handle(CacheReset())
    assert world.primary.counts["pinned"] == 1
    world.wind_down()


def test_slots_of_a_copy_that_outlives_the_reset_are_not_reused_44541():
    """44541: a reset left tier I/O running over slots that were handed out again."""
    world, ctx = stored_below(num_slots=2, names="a")
    world.store(ctx, "b")
    world.settle()
    world.store(ctx, "c")
    world.disown()
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
    world.disown()
    world.reset()
    world.flush_reset()
    assert world.offer(ctx, "x") is None
    world.release()
    world.store(ctx, "x")
    world.load(ctx, "x")
    world.wind_down()


def test_no_promotion_into_a_slot_that_a_late_device_copy_still_writes_033_fence():
    """0.33's fence: after a reset a late copy from the device may still land in a freed slot."""
    world, ctx = stored_below(num_slots=1, names="a", limits=NO_LIMITS)
    world.offer(ctx, "x")
    world.reset()
    assert world.lookup(ctx, "a") is MISS
    world.flush_reset()
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    world.settle()
    world.load(ctx, "a")
    world.wind_down()


def test_reservations_of_the_step_are_void_after_a_reset():
    world, ctx = stored_below(names="a", request_level=[0])
    other = world.begin("other")
    world.lookup(ctx, "a")
    world.offer(other, "p")
    world.offer(ctx, "p")
    world.reset()
    assert world.primary.counts["free"] == 4
    assert world.engine.promotions.outstanding_slots == 0
    assert not world.engine.has_pending_work
    world.step()
    assert world.running == {}
    world.wind_down()


def test_the_tiers_keep_their_blocks_over_a_reset():
    world = World()
    ctx = world.begin()
    world.store(ctx, "a")
    world.settle()
    world.reset()
    world.flush_reset()
    assert world.lookup(ctx, "a") is PENDING
    world.step()
    world.settle()
    world.load(ctx, "a")
    world.wind_down()
