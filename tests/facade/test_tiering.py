"""`TieringOffloadingManager` over real actors in virtual time: journeys, steps, requests.

A number at the end of a test's name is the vLLM issue or pull request whose fault it replays.
"""

import pytest
from facade.worlds import (
    EXCLUSIVE,
    HIT,
    MISS,
    PENDING,
    PROBED,
    REQUEST_LEVEL,
    RETRY,
    Hearing,
    filled,
    k,
    ks,
)
from planner_invariants import check_quiescent

from kvoffload_async.errors import StateError
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.types import ENGINE_REQ_ID, OffloadPolicy, ReqContext, TierMatcher

# -- journeys -----------------------------------------------------------------------------------


def test_a_stored_block_is_hit_with_its_bytes_while_it_cascades(worlds):
    world = worlds()
    world.begin("r")
    world.store(1, 2)
    world.step()
    assert world.parked(), "the cascade is under way"
    assert world.lookup(1) is HIT
    world.load(1, 2)


def test_a_block_is_readable_only_once_its_write_has_ended(worlds):
    world = worlds()
    world.begin("r")
    world.prepare_store(1)
    assert world.lookup(1) is PENDING
    world.complete_store(1)
    assert world.lookup(1) is HIT


def test_a_stored_block_cascades_to_every_tier_and_is_pinned_until_the_slowest(worlds):
    world = worlds(EXCLUSIVE, EXCLUSIVE)
    world.begin("r")
    world.store(1)
    world.step()
    assert world.counts["pinned"] == 1
    world.finish_job(0)
    world.poll()
    assert world.counts["pinned"] == 1
    world.finish_job(1)
    world.poll()
    assert world.counts["pinned"] == 0


def test_a_failed_store_does_not_cascade(worlds):
    world = worlds()
    world.begin("r")
    world.prepare_store(1)
    world.complete_store(1, success=False)
    world.step()
    assert not world.parked()
    assert world.lookup(1) is MISS


def test_a_block_of_a_tier_is_promoted_once_and_then_hit(worlds):
    world = worlds()
    filled(world, 1, 2)
    world.begin("r")
    assert [world.lookup(n) for n in (1, 2, 1)] == [PENDING] * 3
    world.step()
    (load,) = world.parked()
    assert load.keys == tuple(ks(1, 2)), "one job a tier, request and step"
    world.finish_job()
    assert [world.lookup(n) for n in (1, 2)] == [HIT, HIT]
    world.load(1, 2)


def test_a_block_in_use_is_passed_over_though_it_is_the_oldest(worlds):
    world = worlds(num_slots=2)
    world.begin("r")
    world.store(1)
    world.store(2)
    world.rest()
    world.manager.prepare_load(ks(1), world.contexts["r"])
    assert list(world.prepare_store(3).evicted_keys) == ks(2)
    assert world.prepare_store(4) is None
    world.manager.complete_load(ks(1), world.contexts["r"])
    assert list(world.prepare_store(4).evicted_keys) == ks(1)


def test_two_requests_that_want_one_key_share_its_promotion(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("a")
    world.begin("b")
    assert world.lookup(1, "a") is PENDING
    assert world.lookup(1, "b") is PENDING
    world.step()
    assert world.lookup(1, "b") is PENDING
    world.step()
    assert len(world.parked()) == 1
    world.finish_job()
    assert world.lookup(1, "a") is world.lookup(1, "b") is HIT


def test_the_first_tier_that_has_a_block_promotes_it(worlds):
    world = worlds(EXCLUSIVE, EXCLUSIVE)
    filled(world, 1)
    world.tiers[0].blocks.clear()
    world.tiers[0].env.blocks_evicted(ks(1))
    world.begin("r")
    assert world.lookup(1) is PENDING
    world.step()
    assert not world.parked(0)
    assert len(world.parked(1)) == 1


def test_a_retry_of_one_tier_does_not_stop_the_search_of_the_next(worlds):
    world = worlds(PROBED, EXCLUSIVE)
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is PENDING
    assert world.lookup(2) is RETRY
    world.step()
    world.finish_all()
    assert world.lookup(2) is MISS


def test_a_request_loads_only_from_the_tiers_that_its_filter_names(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("none", load_tier_filter=frozenset())
    world.begin("all", load_tier_filter=frozenset({TierMatcher()}))
    assert world.lookup(1, "none") is MISS
    assert world.lookup(1, "all") is PENDING


def test_a_full_primary_refuses_a_store_and_changes_nothing(worlds):
    world = worlds(num_slots=2)
    world.begin("r")
    assert world.prepare_store(1, 2) is not None
    before = world.counts
    assert world.prepare_store(3) is None
    assert world.counts == before


def test_a_promotion_waits_a_second_for_room_that_nobody_frees(worlds):
    world = worlds(num_slots=2)
    filled(world, 1)
    world.begin("r")
    world.prepare_store(8, 9)
    answers = []
    for _ in range(5):
        answers.append(world.lookup(1))
        world.step()
        world.runner.advance(0.5)
    assert answers == [PENDING] * 3 + [MISS, PENDING], "it would be computed now"


# -- steps --------------------------------------------------------------------------------------


def test_external_tiers_are_polled_once_for_a_steps_lookups_and_once_for_its_stores(worlds):
    world = worlds(manager_class=Hearing)
    polls = []
    tier = world.secondaries[0]
    poll = tier.get_finished_jobs
    tier.get_finished_jobs = lambda: polls.append(1) or poll()
    world.begin("r")
    for number in range(3):
        world.lookup(number)
        world.prepare_store(number)
    assert len(polls) == 1, "what the lookups have seen will do for the stores"
    world.step()
    assert len(polls) == 1
    for number in range(3, 6):  # as vLLM does: the model runs after this, and before the next step
        world.prepare_store(number)
    assert len(polls) == 2
    for number in range(3):
        world.lookup(number)
    assert len(polls) == 3
    world.step()
    assert len(polls) == 3


def test_a_lookup_sees_what_has_landed_since_stores_were_offered_after_the_last_step(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("r")
    world.begin("other")
    assert world.lookup(1) is PENDING
    world.step()
    world.store(2, req_id="other")  # offered after the step's end, as vLLM does; then it computes
    world.finish_job()
    assert world.lookup(1) is HIT


def test_a_step_wakes_the_loop_once_whatever_it_submits(worlds):
    world = worlds(EXCLUSIVE, EXCLUSIVE, REQUEST_LEVEL, PROBED)
    filled(world, 1)
    world.begin("r")
    world.lookup(1)
    world.lookup(7)
    world.store(2)
    world.store(3)
    wake_ups, callbacks = world.bridge.wake_ups, world.runner.callbacks
    world.step()
    assert world.bridge.wake_ups - wake_ups == 1
    assert world.runner.callbacks - callbacks == 1
    world.step()
    assert world.bridge.wake_ups - wake_ups == 1


def test_promotions_flow_though_nobody_ever_takes_events_44206(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("r")
    for _ in range(3):
        answer = world.lookup(1)
        world.step()
        world.finish_all()
    assert answer is HIT


def test_taking_events_submits_nothing_polls_nothing_and_ends_nothing_44206(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("r")
    assert world.lookup(1) is PENDING
    for _ in range(3):
        list(world.manager.take_events())
    world.runner.run_ready()
    assert not world.parked(), "only the end of the step submits"
    world.step()
    world.finish_job()
    list(world.manager.take_events())
    assert world.manager.planner.jobs, "a result is not taken in by looking at events"
    assert world.lookup(1) is HIT


def test_events_are_those_of_the_primary_and_of_every_tier_once(worlds):
    world = worlds(EXCLUSIVE, EXCLUSIVE)
    world.begin("r")
    world.store(1)
    world.rest()
    assert len(list(world.manager.take_events())) == 3
    assert not list(world.manager.take_events())


def test_an_idle_engine_takes_a_new_request_at_once_beside_a_slow_tier_45595(worlds):
    world = worlds()
    world.begin("old")
    world.store(1, req_id="old")
    world.finish("old")
    world.step()
    assert world.manager.has_pending_work()
    before_s = world.runner.now_s()
    world.begin("new")
    assert world.lookup(1, "new") is HIT
    world.step()
    assert world.runner.now_s() == before_s, "nothing has waited for the tier"


def test_work_is_pending_until_the_last_result_is_taken_in_42611(worlds):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.finish("r")
    assert world.manager.has_pending_work()
    world.step()
    world.finish_all()
    world.step()
    assert not world.manager.has_pending_work()


def test_progress_can_be_waited_for(worlds):
    world = worlds()
    world.begin("r")
    world.store(1)
    world.step()
    assert not world.manager.wait_for_progress(1.0)
    world.tiers[0].finish_all()
    assert world.manager.wait_for_progress(1.0)


def test_progress_needs_a_shared_bridge():
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(2), [])
    with pytest.raises(StateError, match="share no bridge"):
        manager.wait_for_progress(1.0)
    manager.on_schedule_end()
    manager.shutdown()


# -- requests -----------------------------------------------------------------------------------


def test_nothing_is_submitted_for_a_request_after_its_tiers_heard_of_its_end_45823(worlds):
    world = worlds(manager_class=Hearing)
    ctx = world.begin("r") and world.contexts["r"]
    world.prepare_store(1)
    world.finish("r")
    world.step()
    heard = world.secondaries[0].heard
    assert heard == [("new", "r")], "its store is still in flight"
    world.manager.complete_store(ks(1), ctx)
    world.step()
    assert heard == [("new", "r"), ("store", "r"), ("finished", "r")]


def test_a_request_that_had_finished_is_ended_once_by_a_reset_46027_46284(worlds):
    world = worlds(manager_class=Hearing)
    ctx = world.begin("r") and world.contexts["r"]
    world.prepare_store(1)
    world.finish("r")
    world.manager.reset_cache()
    world.step()
    heard = world.secondaries[0].heard
    assert heard == [("new", "r"), ("finished", "r")]
    world.manager.complete_store(ks(1), ctx)
    world.step()
    assert heard == [("new", "r"), ("finished", "r")], "neither again, nor a store after it"


def test_an_active_request_survives_a_reset_and_proceeds_41956_48102(worlds):
    world = worlds()
    world.begin("r")
    world.prepare_store(1)
    world.manager.reset_cache()
    world.manager.on_reset_flushed()
    assert world.lookup(1) is MISS
    world.store(1)
    assert world.lookup(1) is HIT
    world.finish("r")
    world.rest()
    check_quiescent(world.manager.planner)


def test_a_request_that_is_live_is_refused_before_any_tier_hears_of_it(worlds):
    world = worlds(manager_class=Hearing)
    world.begin("r")
    with pytest.raises(StateError, match="'r' is known already"):
        world.manager.on_new_request(world.contexts["r"])
    assert world.secondaries[0].heard == [("new", "r")]


def test_nobody_else_may_have_the_engines_own_id(worlds):
    world = worlds(manager_class=Hearing)
    with pytest.raises(StateError, match="the engine's own; take another"):
        world.begin(ENGINE_REQ_ID)
    assert not world.secondaries[0].heard


def test_calls_for_an_unknown_request_are_misuse(worlds):
    world = worlds()
    world.begin("r")
    ctx = world.contexts["r"]
    world.finish("r")
    for call in (
        lambda: world.manager.lookup(k(1), ctx),
        lambda: world.manager.prepare_store(ks(1), ctx),
        lambda: world.manager.prepare_load(ks(1), ctx),
        lambda: world.manager.on_request_finished(ctx),
    ):
        with pytest.raises(StateError):
            call()


@pytest.mark.parametrize("key", [b"", b"abcd", b"x" * 97], ids=["empty", "no hash", "too long"])
def test_a_key_that_is_none_is_refused_before_anything_has_changed(worlds, key):
    world = worlds()
    world.begin("r")
    ctx, manager = world.contexts["r"], world.manager
    before = manager.stats()
    for call in (
        lambda: manager.lookup(key, ctx),
        lambda: manager.prepare_store([*ks(1), key], ctx),
        lambda: manager.prepare_load([key], ctx),
        lambda: manager.complete_load([key], ctx),
        lambda: manager.touch([key], ctx),
    ):
        with pytest.raises(StateError):
            call()
        assert manager.stats() == before
    world.store(1)
    world.rest()


def test_a_use_reaches_the_tiers(worlds):
    world = worlds()
    filled(world, 1)
    world.begin("r")
    world.manager.touch(ks(1), world.contexts["r"])
    world.finish("r")
    world.step()
    assert world.tiers[0].touched == ks(1)


# -- whole requests -----------------------------------------------------------------------------


def test_one_tier_that_wants_whole_requests_makes_the_policy(worlds):
    assert worlds(EXCLUSIVE).begin("r").policy is OffloadPolicy.BLOCK_LEVEL
    assert worlds(EXCLUSIVE, REQUEST_LEVEL).begin("r").policy is OffloadPolicy.REQUEST_LEVEL


def test_warm_blocks_go_to_a_tier_that_wants_whole_requests_52808(worlds):
    world = worlds(EXCLUSIVE, REQUEST_LEVEL)
    world.begin("a")
    world.store(1, 2, req_id="a")
    world.rest()
    world.tiers[1].blocks.clear()
    world.begin("b")
    output = world.prepare_store(1, 2, req_id="b")
    assert not output.keys_to_store
    world.step()
    assert not world.parked(0)
    assert world.parked(1)[0].keys == tuple(ks(1, 2))


def test_a_key_that_another_request_still_writes_is_cascaded_when_it_has_been_53329(worlds):
    world = worlds(REQUEST_LEVEL, manager_class=Hearing)
    world.begin("writer")
    world.begin("sharer")
    world.prepare_store(1, req_id="writer")
    world.prepare_store(1, 2, req_id="sharer")
    world.complete_store(2, req_id="sharer")
    world.finish("sharer")
    world.step()
    assert world.manager.has_pending_work()
    assert ("finished", "sharer") not in world.secondaries[0].heard
    world.complete_store(1, req_id="writer")
    world.step()
    assert world.secondaries[0].heard[-2:] == [("store", "sharer"), ("finished", "sharer")]


def test_a_request_that_waits_during_a_reset_asks_the_tiers_anew(worlds):
    """It remembered what a tier had lacked before, although others had stored it since."""
    world = worlds(EXCLUSIVE, num_slots=8)
    manager = world.manager
    waiting, writer = ReqContext("waiting"), ReqContext("writer")
    manager.on_new_request(waiting)
    manager.on_new_request(writer)
    manager.prepare_store(ks(1), writer)
    assert manager.lookup_many(ks(1, 2), waiting) == [PENDING, MISS]
    manager.on_schedule_end()
    manager.prepare_store(ks(2), writer)
    manager.complete_store(ks(1, 2), writer)
    for _ in range(3):
        manager.on_schedule_end()
        world.runner.run_ready()
        world.finish_all()
    manager.reset_cache()
    manager.on_reset_flushed()
    assert manager.lookup_many(ks(1, 2), waiting) == [PENDING, PENDING]
