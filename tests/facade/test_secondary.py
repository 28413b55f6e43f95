"""`SecondaryTierManager` alone: the contract of one tier towards its scheduler."""

import numpy as np
import pytest
from facade.worlds import (
    HIT,
    MISS,
    PROBED,
    REQUEST_LEVEL,
    RETRY,
    FakeHost,
    k,
    ks,
)
from scripted_tier import ScriptedTier

from kvoffload_async.errors import (
    ConfigError,
    StateError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.tables.keymap import MAX_KEY_BYTES
from kvoffload_async.testing.harness import make_job
from kvoffload_async.types import (
    Locality,
    Medium,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

R = ReqContext("r")


# -- jobs and results ---------------------------------------------------------------------------


def test_nothing_is_finished_before_it_has_ended(alone):
    world = alone()
    world.submit(1)
    world.run()
    assert world.results() == {}
    world.finish_job()
    assert world.results()[1].success
    assert world.results() == {}, "each result once"


@pytest.mark.parametrize("key", [b"", b"abc", make_offload_key(b"x" * 93)])
def test_a_key_that_no_tier_can_keep_is_refused_before_anything_has_changed(alone, key):
    world = alone()
    before = world.manager.stats()
    for is_promotion in (False, True):
        job = make_job(1, [k(1), key], [0, 1], is_promotion=is_promotion)
        submit = world.manager.submit_load if is_promotion else world.manager.submit_store
        with pytest.raises(StateError, match="too long" if len(key) > MAX_KEY_BYTES else "short"):
            submit(job)
    for call in (
        lambda: world.manager.lookup(key, R),
        lambda: world.manager.touch([k(1), key], R),
    ):
        with pytest.raises(StateError):
            call()
    world.run()
    assert not world.tier.parked
    assert not world.tier.touched
    assert world.manager.stats() == before


def test_polling_alone_hands_jobs_over_where_no_manager_composes(alone):
    world = alone()
    world.submit(1)
    world.results()
    world.host.runner.run_ready()
    assert len(world.tier.parked) == 1


def test_submitting_copies_nothing_on_the_callers_thread(alone):
    world = alone()
    world.submit(1)
    assert not world.tier.parked
    assert not world.tier.blocks


def test_many_submits_of_a_step_cost_one_wake_up(alone):
    world = alone()
    for job_id in range(50):
        world.submit(job_id)
    before = world.host.runner.callbacks
    world.manager.on_schedule_end()
    assert world.host.runner.callbacks - before == 1


def test_a_load_of_a_missing_key_is_one_failed_result_42529(alone):
    world = alone()
    world.submit(1, [1, 2], is_promotion=True)
    world.run()
    world.finish_job()
    result = world.results()[1]
    assert not result.success
    assert result.successful_keys == frozenset()


def test_one_bad_block_leaves_the_others_landed_50321(alone):
    world = alone()
    world.submit(1, [1, 2, 3])
    world.run()
    world.finish_job()
    world.submit(2, [1, 2, 3], is_promotion=True)
    world.run()
    world.finish_job(failures={2: TierUnavailableError("bad")})
    assert world.results()[2].successful_keys == frozenset(ks(1, 2))


def test_an_empty_job_completes(alone):
    world = alone()
    world.submit(1, [])
    world.submit(2, [], is_promotion=True)
    world.run()
    assert {i: r.success for i, r in world.results().items()} == {1: True, 2: True}


def test_a_result_carries_time_and_bytes(alone):
    world = alone()
    world.submit(1, [1, 2])
    world.run()
    world.host.runner.advance(1.5)
    world.finish_job()
    result = world.results()[1]
    assert (result.transfer_time, result.transfer_bytes) == (1.5, 32)


def test_a_job_id_in_use_gets_a_failed_result_and_the_first_job_its_own(alone):
    world = alone()
    world.submit(1, [1])
    world.submit(1, [2])
    world.run()
    (refused,) = world.manager.get_finished_jobs()
    assert isinstance(refused.error, StateError)
    world.finish_job()
    (first,) = world.manager.get_finished_jobs()
    assert first.success


@pytest.mark.parametrize("is_promotion", [False, True])
@pytest.mark.parametrize(("numbers", "slots"), [([1, 2], [0]), ([1], [0, 1])])
def test_a_malformed_job_is_refused_at_the_call(alone, is_promotion, numbers, slots):
    world = alone()
    with pytest.raises(StateError):
        world.submit(1, numbers, is_promotion=is_promotion, slots=slots)
    assert not world.manager.has_pending_work()


# -- deadlines ----------------------------------------------------------------------------------


def test_a_hung_job_is_reported_as_orphaned_and_released_when_its_copy_ends(alone):
    world = alone(io_timeout_s=3.0)
    world.submit(1)
    world.run()
    world.host.runner.advance(3.0)
    result = world.results()[1]
    assert result.orphaned
    assert isinstance(result.error, TierTimeoutError)
    assert not world.manager.get_released_jobs()
    world.finish_job()
    assert world.results() == {}, "it has had its result"
    assert list(world.manager.get_released_jobs()) == [1]
    assert list(world.manager.get_released_jobs()) == []


def test_a_tier_that_is_stuck_for_ever_still_answers_within_the_deadline_57912(alone):
    world = alone(io_timeout_s=3.0)
    for job_id in range(20):
        world.submit(job_id, [job_id % 5], is_promotion=bool(job_id % 2))
    world.run()
    world.host.runner.advance(3.0)
    assert set(world.results()) == set(range(20))


# -- lookups ------------------------------------------------------------------------------------


def test_an_exclusive_tier_is_looked_up_without_any_probe(alone):
    world = alone()
    world.submit(1, [1])
    world.run()
    world.finish_job()
    world.results()
    assert world.manager.lookup(k(1), R) is HIT
    assert world.manager.lookup(k(2), R) is MISS
    world.run()
    assert not world.tier.parked


def test_a_shared_tier_is_probed_once_a_step_for_all_new_keys(alone):
    world = alone(PROBED)
    assert [world.manager.lookup(key, R) for key in ks(1, 2, 3)] == [RETRY] * 3
    assert world.manager.has_pending_work()
    world.run()
    (probe,) = world.tier.parked
    assert set(probe.keys) == set(ks(1, 2, 3))
    world.finish_job()
    world.results()
    assert world.manager.lookup(k(1), R) is MISS
    assert not world.manager.has_pending_work()


def test_a_newcomer_shares_the_probe_under_way_55823(alone):
    world = alone(PROBED)
    world.manager.lookup(k(1), R)
    world.run()
    other = ReqContext("other")
    assert world.manager.lookup(k(1), other) is RETRY
    world.run()
    assert len(world.tier.parked) == 1


def test_a_late_verdict_is_not_applied_to_a_newer_request_54872(alone):
    world = alone(PROBED, probe_timeout_s=1.0)
    world.manager.lookup(k(1), R)
    world.run()
    world.host.runner.advance(1.0)  # answered as absent, the probe itself hangs on
    world.results()
    world.manager.on_request_finished(R)
    newer = ReqContext("newer")
    assert world.manager.lookup(k(1), newer) is RETRY
    world.tier.blocks[k(1)] = np.zeros(16, np.uint8)
    world.finish_job()  # the old probe: its answer is too late
    world.results()
    assert world.manager.lookup(k(1), newer) is RETRY


def test_a_failed_load_flips_the_verdict_49328(alone):
    world = alone(PROBED)
    world.tier.blocks[k(1)] = np.zeros(16, np.uint8)
    world.manager.lookup(k(1), R)
    world.run()
    world.finish_job()
    world.results()
    assert world.manager.lookup(k(1), R) is HIT
    world.submit(1, [1], is_promotion=True)
    world.run()
    world.finish_job(error=OSError("truncated"))
    world.results()
    assert world.manager.lookup(k(1), R) is MISS


def test_what_a_tier_announces_is_found(alone):
    world = alone()
    world.tier.env.blocks_appeared(ks(1, 2))
    world.tier.env.blocks_evicted(ks(2))
    world.results()
    assert [world.manager.lookup(key, R) for key in ks(1, 2)] == [HIT, MISS]


def test_what_a_tier_announces_at_once_is_taken_in_step_by_step(alone):
    world = alone()
    world.tier.env.blocks_appeared(ks(*range(9000)))
    world.results()
    known = [world.manager.lookup(key, R) for key in ks(0, 4095, 4096, 8999)]
    assert known == [HIT, HIT, MISS, MISS]
    assert world.manager.has_pending_work(), "it takes the next portion in, and one is left"
    assert not world.manager.has_pending_work()
    assert world.manager.lookup(k(8999), R) is HIT


# -- the rest of the contract -------------------------------------------------------------------


def test_the_policy_is_that_of_the_tier(alone):
    assert alone().manager.on_new_request(R).policy is OffloadPolicy.BLOCK_LEVEL
    whole = alone(REQUEST_LEVEL).manager.on_new_request(R)
    assert whole.policy is OffloadPolicy.REQUEST_LEVEL


def test_type_medium_and_locality_are_attributes(alone):
    manager = alone().manager
    assert (manager.tier_type, manager.medium, manager.locality) == (
        "t",
        Medium.STORAGE,
        Locality.LOCAL,
    )


def test_a_use_reaches_the_tier_with_the_step(alone):
    world = alone()
    world.manager.touch(ks(1, 2), R)
    world.manager.touch([], R)
    world.manager.on_schedule_end(ScheduleEndContext(new_req_ids=["r"]))
    world.host.runner.run_ready()
    assert world.tier.touched == ks(1, 2)


def test_events_tell_what_appeared_and_disappeared_if_asked_for(alone):
    world = alone(enable_kv_events=True)
    world.submit(1, [1])
    world.run()
    world.finish_job()
    world.results()
    world.tier.env.blocks_evicted(ks(1))
    world.results()
    events = list(world.manager.take_events())
    assert [(set(e.keys), e.removed) for e in events] == [(set(ks(1)), False), (set(ks(1)), True)]
    assert not list(world.manager.take_events())


def test_events_are_off_by_default(alone):
    world = alone()
    world.tier.env.blocks_appeared(ks(1))
    world.results()
    assert not list(world.manager.take_events())


def test_work_is_pending_from_submission_until_the_result_is_taken(alone):
    world = alone()
    assert not world.manager.has_pending_work()
    world.submit(1)
    assert world.manager.has_pending_work()
    world.run()
    world.finish_job()
    assert world.manager.has_pending_work()
    world.results()
    assert not world.manager.has_pending_work()


@pytest.mark.parametrize(
    "view",
    [memoryview(bytearray(64)), memoryview(np.zeros((4, 4), np.int32))],
    ids=["one dimension", "wide items"],
)
def test_a_view_of_another_shape_is_refused(view):
    with pytest.raises(StateError, match="num_slots, slot_bytes"):
        SecondaryTierManager(None, view, "t", ScriptedTier())


def test_a_tier_that_cannot_open_raises_and_leaves_nothing_running():
    view = memoryview(bytearray(64)).cast("B", (4, 16))
    with pytest.raises(ConfigError, match="root_dir"):
        SecondaryTierManager(None, view, "t", ScriptedTier(open_error=ConfigError("root_dir: no")))
    host = FakeHost()
    with pytest.raises(ConfigError, match="root_dir"):
        SecondaryTierManager(
            None,
            view,
            "t",
            ScriptedTier(open_error=ConfigError("root_dir: no")),
            runtime=host.bridge,
        )
    host.runner.close()
    assert not host.bridge.links
