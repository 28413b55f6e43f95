"""`SecondaryTierManager` alone: the contract of one tier towards its scheduler."""

import gc
import pickle

import numpy as np
import pytest
from facade.worlds import (
    EXCLUSIVE,
    HIT,
    MISS,
    PROBED,
    REQUEST_LEVEL,
    RETRY,
    FakeHost,
    k,
    ks,
    scripted,
)

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import (
    ConfigError,
    StateError,
    TierClosedError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.facade.example import ExampleSecondaryTierManager
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import ScriptedTier
from kvoffload_async.testing.harness import ManagerHarness, make_job
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import Locality, Medium, OffloadPolicy, ReqContext, ScheduleEndContext

R = ReqContext("r")


class Alone:
    """One manager on a virtual loop, over a tier that parks everything."""

    def __init__(self, capabilities=EXCLUSIVE, **options):
        self.tier = scripted(capabilities)
        self.host = FakeHost()
        self.view = memoryview(bytearray(8 * 16)).cast("B", (8, 16))
        self.manager = SecondaryTierManager(
            None, self.view, "t", self.tier, runtime=self.host.bridge, **options
        )

    def submit(self, job_id, numbers=(1,), *, is_promotion=False, slots=None):
        keys = ks(*numbers)
        job = make_job(
            job_id, keys, range(len(keys)) if slots is None else slots, is_promotion=is_promotion
        )
        submit = self.manager.submit_load if is_promotion else self.manager.submit_store
        submit(job)

    def run(self):
        self.manager.on_schedule_end()
        self.host.runner.run_ready()

    def settle(self, index=0, **outcome):
        self.tier.settle(self.tier.parked[index], **outcome)
        self.host.runner.run_ready()

    def results(self):
        return {result.job_id: result for result in self.manager.get_finished_jobs()}

    def end(self):
        self.manager.shutdown(0.1)
        while self.tier.parked:
            self.tier.settle_all()
            self.host.runner.run_ready()
        self.host.runner.close()


@pytest.fixture
def alone():
    made = []

    def make(*args, **kwargs):
        made.append(Alone(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        world.end()


# -- jobs and results ---------------------------------------------------------------------------


def test_nothing_is_finished_before_it_has_ended(alone):
    world = alone()
    world.submit(1)
    world.run()
    assert world.results() == {}
    world.settle()
    assert world.results()[1].success
    assert world.results() == {}, "each result once"


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
    world.settle()
    result = world.results()[1]
    assert not result.success
    assert result.successful_keys == frozenset()


def test_one_bad_block_leaves_the_others_landed_50321(alone):
    world = alone()
    world.submit(1, [1, 2, 3])
    world.run()
    world.settle()
    world.submit(2, [1, 2, 3], is_promotion=True)
    world.run()
    world.settle(failures={2: TierUnavailableError("bad")})
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
    world.settle()
    result = world.results()[1]
    assert (result.transfer_time, result.transfer_bytes) == (1.5, 32)


def test_a_job_id_in_use_gets_a_failed_result_and_the_first_job_its_own(alone):
    world = alone()
    world.submit(1, [1])
    world.submit(1, [2])
    world.run()
    (refused,) = world.manager.get_finished_jobs()
    assert isinstance(refused.error, StateError)
    world.settle()
    (first,) = world.manager.get_finished_jobs()
    assert first.success


@pytest.mark.parametrize("is_promotion", [False, True])
@pytest.mark.parametrize(
    ("numbers", "slots"), [([1, 2], [0]), ([1], [0, 1]), ([1, 1], [0, 1]), ([1], [8]), ([1], [-1])]
)
def test_a_malformed_job_is_refused_at_the_call(alone, is_promotion, numbers, slots):
    world = alone()
    with pytest.raises(StateError):
        world.submit(1, numbers, is_promotion=is_promotion, slots=slots)
    assert not world.manager.has_pending_work()


# -- deadlines ----------------------------------------------------------------------------------


def test_a_hung_job_is_reported_as_disowned_and_released_when_its_copy_ends(alone):
    world = alone(io_timeout_s=3.0)
    world.submit(1)
    world.run()
    world.host.runner.advance(3.0)
    result = world.results()[1]
    assert result.disowned
    assert isinstance(result.error, TierTimeoutError)
    assert not world.manager.get_released_jobs()
    world.settle()
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
    world.settle()
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
    world.settle()
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
    world.settle()  # the old probe: its answer is too late
    world.results()
    assert world.manager.lookup(k(1), newer) is RETRY


def test_a_failed_load_flips_the_verdict_49328(alone):
    world = alone(PROBED)
    world.tier.blocks[k(1)] = np.zeros(16, np.uint8)
    world.manager.lookup(k(1), R)
    world.run()
    world.settle()
    world.results()
    assert world.manager.lookup(k(1), R) is HIT
    world.submit(1, [1], is_promotion=True)
    world.run()
    world.settle(error=OSError("truncated"))
    world.results()
    assert world.manager.lookup(k(1), R) is MISS


def test_what_a_tier_announces_is_found(alone):
    world = alone()
    world.tier.env.blocks_appeared(ks(1, 2))
    world.tier.env.blocks_evicted(ks(2))
    world.results()
    assert [world.manager.lookup(key, R) for key in ks(1, 2)] == [HIT, MISS]


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
    world.settle()
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
    world.settle()
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


# -- drain and shutdown -------------------------------------------------------------------------


def test_drain_waits_for_every_result_and_leaves_them_to_be_taken(alone):
    world = alone()
    world.submit(1)
    world.submit(2, is_promotion=True)
    world.host.runner.loop.call_later(1.0, world.tier.settle_all)
    assert world.manager.drain_jobs(5.0)
    assert set(world.results()) == {1, 2}


def test_drain_gives_up_at_its_deadline(alone):
    world = alone()
    world.submit(1)
    assert not world.manager.drain_jobs(5.0)
    assert world.host.runner.now_s() == pytest.approx(5.0)


def test_abandoned_jobs_fail_now_and_are_released_later(alone):
    world = alone()
    world.submit(1)
    world.run()
    world.submit(2)
    assert list(world.manager.abandon_jobs()) == [1]
    results = world.results()
    assert (results[1].disowned, results[2].disowned) == (True, False)
    world.run()
    assert len(world.tier.parked) == 1, "job 2 is never handed over"
    world.settle()
    world.results()
    assert list(world.manager.get_released_jobs()) == [1]


def test_jobs_that_were_queued_at_shutdown_have_failed_results(alone):
    """The latent fault of vLLM's pool: its shutdown dropped queued tasks without results."""
    world = alone()
    for job_id in range(10):
        world.submit(job_id)
    world.run()  # four run, the others wait in the mailbox
    for job_id in range(10, 15):
        world.submit(job_id)  # these have not even been handed over
    world.manager.shutdown(1.0)
    results = world.results()
    assert set(results) == set(range(15))
    assert all(isinstance(results[i].error, TierClosedError) for i in range(4, 15))


def test_shutdown_is_bounded_with_a_hung_tier_and_says_what_is_left(alone):
    world = alone()
    world.submit(1)
    world.run()
    report = world.manager.shutdown(1.0)
    assert report.unfinished_jobs == (1,)
    assert world.host.runner.now_s() <= 2.5
    assert world.results()[1].disowned
    world.settle()
    world.results()
    assert list(world.manager.get_released_jobs()) == [1]


def test_shutdown_waits_for_running_jobs_to_end(alone):
    world = alone()
    world.submit(1)
    world.run()
    world.host.runner.loop.call_later(0.5, world.tier.settle_all)
    assert world.manager.shutdown(1.0).is_clean
    assert world.results()[1].success
    assert world.tier.close_count == 1


def test_everything_after_shutdown_is_harmless(alone):
    world = alone(PROBED)
    world.manager.lookup(k(1), R)
    world.manager.shutdown(1.0)
    world.submit(5)
    assert isinstance(world.results()[5].error, TierClosedError)
    world.manager.touch(ks(1), R)
    world.manager.on_schedule_end()
    world.manager.on_request_finished(R)
    assert not world.manager.has_pending_work()
    assert world.manager.drain_jobs(1.0)
    assert world.manager.shutdown(1.0) is world.manager.shutdown()


def test_the_view_is_let_go_at_shutdown_also_when_a_job_has_failed():
    class Broken(ExampleTier):
        async def load(self, job):
            env, rows = self._opened()

            def read():
                into = rows[job.block_ids]
                into[:] = 0
                raise OSError(5, "io")

            await env.io.run(Direction.LOAD, read)

    with ManagerHarness(Broken()) as harness:
        harness.submit_load(ks(1), [0])
        harness.wait()
        harness.shutdown()
        assert isinstance(harness.results[0].error.__cause__, OSError)
    gc.collect()


def test_a_tier_on_its_own_brings_its_own_threads_and_takes_them_away():
    buffer = PrimaryBuffer(4, 4096)
    tier = ExampleSecondaryTierManager(None, buffer.view)
    tier.submit_store(make_job(1, ks(1), [0], is_promotion=False))
    assert tier.drain_jobs(10.0)
    assert [result.success for result in tier.get_finished_jobs()] == [True]
    assert tier.get_num_blocks() == 1
    assert tier.shutdown(10.0).is_clean
    assert buffer.release()


def test_a_tier_still_holding_the_view_after_close_is_warned_about(caplog):
    class Clingy(ExampleTier):
        async def open(self, env):
            self.held = pickle.PickleBuffer(env.kv_view)

    host = FakeHost()
    view = memoryview(bytearray(64)).cast("B", (4, 16))
    manager = SecondaryTierManager(None, view, "clingy", Clingy(), runtime=host.bridge)
    manager.shutdown(1.0)
    assert "clingy: the tier still holds the primary's buffer" in caplog.text
    host.runner.close()
