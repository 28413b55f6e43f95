"""Scripted fakes, faults: that they do as they are told, and the same every time."""

import asyncio

import pytest
from scripted_tier import Operation, ScriptedTier
from virtual_runner import VirtualRunner

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import BlockMissingError, StateError, TierClosedError, TierError
from kvoffload_async.testing import Fault, FaultPlan, FaultyTier, InlineIo, ScriptedIo, TierHarness
from kvoffload_async.testing.harness import ManagerHarness, key_of, make_job
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.tiers.example import ExampleTier

LOAD = Direction.LOAD


@pytest.fixture
def runner():
    with VirtualRunner() as runner:
        yield runner


@pytest.fixture
def env():
    events = []
    view = memoryview(bytearray(8 * 16)).cast("B", (8, 16))
    return ActorEnvironment(view, InlineIo(), events.append)


def start(runner, coroutine):
    task = runner.loop.create_task(coroutine, name="call")
    runner.run_ready()
    return task


# -- I/O ----------------------------------------------------------------------------------------


def test_inline_io_runs_a_call_at_once(runner):
    assert runner.run(InlineIo().run(LOAD, lambda: 5), 1.0) == 5


def test_a_parked_call_runs_when_it_is_finished(runner):
    io, ran = ScriptedIo(), []
    task = start(runner, io.run(LOAD, lambda: ran.append(1) or 7))
    assert not ran
    assert not task.done()
    io.finish(io.parked[0])
    runner.run_ready()
    assert task.result() == 7
    assert not io.parked


@pytest.mark.parametrize("after_run", [False, True])
def test_a_parked_call_fails_before_or_after_it_ran(runner, after_run):
    io, ran = ScriptedIo(), []
    task = start(runner, io.run(LOAD, lambda: ran.append(1)))
    io.finish(io.parked[0], OSError("io"), after_run=after_run)
    runner.run_ready()
    assert isinstance(task.exception(), OSError)
    assert bool(ran) is after_run


def test_a_parked_call_that_raises_by_itself_fails(runner):
    io = ScriptedIo()
    task = start(runner, io.run(LOAD, lambda: 1 / 0))
    io.finish(io.parked[0])
    runner.run_ready()
    assert isinstance(task.exception(), ZeroDivisionError)


def test_a_parked_call_outlives_its_cancellation(runner):
    io = ScriptedIo()
    task = start(runner, io.run(LOAD, int))
    task.cancel()
    runner.run_ready()
    assert not task.done()
    io.finish(io.parked[0])
    runner.run_ready()
    assert task.cancelled()


# -- the scripted tier --------------------------------------------------------------------------


def test_bytes_move_when_an_operation_is_finished_and_not_before(runner, env):
    tier = ScriptedTier()
    runner.run(tier.open(env), 1.0)
    env.kv_view[0, 0] = 1
    task = start(runner, tier.store(make_job(1, [key_of(1)], [0], is_promotion=False)))
    env.kv_view[0, 0] = 2
    tier.finish_all()
    runner.run_ready()
    assert task.result() == {}
    assert tier.blocks[key_of(1)][0] == 2


def test_failed_blocks_do_not_move_and_missing_ones_fail(runner, env):
    tier = ScriptedTier()
    runner.run(tier.open(env), 1.0)
    keys = [key_of(1), key_of(2)]
    start(runner, tier.store(make_job(1, keys, [0, 1], is_promotion=False)))
    tier.finish(tier.parked[0], {0: TierError("bad")})
    runner.run_ready()
    assert list(tier.blocks) == [key_of(2)]
    task = start(runner, tier.load(make_job(2, keys, [2, 3], is_promotion=True)))
    tier.finish_all()
    runner.run_ready()
    assert isinstance(task.result()[0], BlockMissingError)


def test_an_operation_can_fail_or_be_cancelled(runner, env):
    tier = ScriptedTier()
    runner.run(tier.open(env), 1.0)
    failing = start(runner, tier.contains([key_of(1)]))
    cancelled = start(runner, tier.contains([key_of(1)]))
    assert [p.kind for p in tier.parked] == [Operation.CONTAINS] * 2
    tier.finish(tier.parked[0], error=OSError("io"))
    tier.finish(tier.parked[0], error=asyncio.CancelledError())
    runner.run_ready()
    assert isinstance(failing.exception(), OSError)
    assert cancelled.cancelled()


def test_a_scripted_tier_knows_whether_it_is_open(runner, env):
    tier = ScriptedTier()
    with pytest.raises(TierClosedError):
        _ = tier.env
    with pytest.raises(StateError, match="not open"):
        runner.run(tier.contains([]), 1.0)
    runner.run(tier.open(env), 1.0)
    assert tier.is_open
    runner.run(tier.close(), 1.0)
    assert not tier.is_open
    assert tier.close_count == 1


# -- faults -------------------------------------------------------------------------------------


def plan_all(fault, **options):
    return FaultPlan(weights={fault: 1.0}, **options)


def test_equal_seeds_give_equal_faults_in_any_order():
    weights = dict.fromkeys(Fault, 1.0)
    some = [
        make_job(i, [key_of(j) for j in range(5)], range(5), is_promotion=True) for i in range(50)
    ]
    first, second = FaultPlan(3, weights), FaultPlan(3, weights)
    assert [first.fault_of(j) for j in some] == [second.fault_of(j) for j in some[::-1]][::-1]
    assert {first.fault_of(j) for j in some} == set(Fault)
    assert [first.failed_blocks(j) for j in some] == [second.failed_blocks(j) for j in some]
    assert [FaultPlan(4, weights).fault_of(j) for j in some] != [first.fault_of(j) for j in some]


def test_a_plan_by_hand_comes_first():
    job = make_job(7, [], [], is_promotion=True)
    assert FaultPlan(by_job={7: Fault.HANG}).fault_of(job) is Fault.HANG
    assert FaultPlan().fault_of(job) is Fault.NONE
    assert FaultPlan().failed_blocks(job) == []


@pytest.mark.parametrize(
    ("fault", "stored"), [(Fault.IO_ERROR_BEFORE, False), (Fault.IO_ERROR_AFTER, True)]
)
def test_an_io_error_comes_before_or_after_the_bytes_have_moved(fault, stored):
    tier = FaultyTier(ExampleTier(), plan_all(fault))
    with TierHarness(tier) as harness:
        with pytest.raises(OSError, match="injected"):
            harness.store([key_of(1)])
        assert bool(harness.contains([key_of(1)])) is stored
    assert [f for _, f in tier.injected] == [fault]


def test_some_blocks_fail_and_the_others_keep_their_places():
    tier = FaultyTier(ExampleTier(), plan_all(Fault.SOME_BLOCKS))
    keys = [key_of(n) for n in range(8)]
    with TierHarness(tier) as harness:
        failures = harness.store(keys)
        assert failures
        kept = harness.contains(keys)
        assert kept == {key for i, key in enumerate(keys) if i not in failures}
        loaded = harness.load(keys)
        for index, key in enumerate(keys):
            assert (index in loaded) or (key in kept and harness.holds(key, index))
        assert harness.store([]) == {}


def test_a_slow_job_takes_its_time(runner, env):
    tier = FaultyTier(ScriptedTier(), plan_all(Fault.SLOW, slow_s=5.0))
    runner.run(tier.open(env), 1.0)
    task = start(runner, tier.store(make_job(1, [], [], is_promotion=False)))
    runner.advance(4.9)
    assert not tier.inner.parked
    runner.advance(0.1)
    tier.inner.finish_all()
    runner.run_ready()
    assert task.result() == {}


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_hung_job_waits_for_its_release_deaf_to_cancellation(runner, env, is_cancelled):
    tier = FaultyTier(ExampleTier(), plan_all(Fault.HANG))
    runner.run(tier.open(env), 1.0)
    task = start(runner, tier.store(make_job(1, [key_of(1)], [0], is_promotion=False)))
    if is_cancelled:
        task.cancel()
    runner.advance(1000.0)
    assert not task.done()
    tier.release()
    runner.run_ready()
    assert task.cancelled() is is_cancelled
    late = start(runner, tier.store(make_job(2, [key_of(2)], [0], is_promotion=False)))
    assert late.result() == {}, "after the release nothing hangs any more"


def test_a_job_can_be_cancelled_in_mid_flight(runner, env):
    tier = FaultyTier(ExampleTier(), plan_all(Fault.CANCELLED))
    runner.run(tier.open(env), 1.0)
    task = start(runner, tier.load(make_job(1, [key_of(1)], [0], is_promotion=True)))
    assert task.cancelled()


def test_a_faulty_tier_is_otherwise_the_tier_that_it_wraps(runner, env):
    inner = ScriptedTier()
    tier = FaultyTier(inner)
    assert tier.capabilities is inner.capabilities
    assert tier.bounds is inner.bounds
    assert inner.describe() in tier.describe()
    tier.touch([key_of(1)])
    assert inner.touched == [key_of(1)]
    runner.run(tier.open(env), 1.0)
    runner.run(tier.close(), 1.0)
    assert inner.close_count == 1


# -- the harness --------------------------------------------------------------------------------


def test_a_harness_closes_what_fails_to_open():
    for harness in (TierHarness, ManagerHarness):
        with pytest.raises(OSError, match="no"):
            harness(ScriptedTier(open_error=OSError("no")))


def test_a_harness_finds_a_task_that_was_left():
    class Leaky(ExampleTier):
        async def open(self, env):
            await super().open(env)
            loop = asyncio.get_running_loop()
            self.left = loop.create_task(asyncio.Event().wait(), name="leaked")

    with pytest.raises(AssertionError, match="leaked"), TierHarness(Leaky()):
        pass


def test_a_harness_finds_a_job_without_a_result():
    harness = ManagerHarness(ExampleTier())
    harness.submit_store([key_of(1)], [0])
    harness.submitted[99] += 1
    with pytest.raises(AssertionError, match="one result"):
        harness.__exit__(None, None, None)


def test_a_harness_knows_what_a_tier_announced_and_did_not_take_back():
    class Announcing(ExampleTier):
        async def open(self, env):
            await super().open(env)
            env.blocks_appeared([key_of(1), key_of(2)])
            env.blocks_evicted([key_of(2)])

    with TierHarness(Announcing()) as harness:
        assert harness.announced() == {key_of(1)}
