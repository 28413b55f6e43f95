"""`SecondaryTierManager` alone: drain, abandonment and shutdown."""

import asyncio
import gc
import pickle
import threading

import pytest
from facade.worlds import (
    PROBED,
    FakeHost,
    k,
    ks,
)

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import (
    TierClosedError,
)
from kvoffload_async.facade.secondary import ExampleSecondaryTierManager, SecondaryTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import ManagerHarness, make_job
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.types import ReqContext

R = ReqContext("r")
DEADLINE_S = 60.0


def test_drain_waits_for_every_result_and_leaves_them_to_be_taken(alone):
    world = alone()
    world.submit(1)
    world.submit(2, is_promotion=True)
    world.host.runner.loop.call_later(1.0, world.tier.finish_all)
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
    assert (results[1].orphaned, results[2].orphaned) == (True, False)
    world.run()
    assert len(world.tier.parked) == 1, "job 2 is never handed over"
    world.finish_job()
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
    assert world.results()[1].orphaned
    world.finish_job()
    world.results()
    assert list(world.manager.get_released_jobs()) == [1]


def test_shutdown_waits_for_running_jobs_to_end(alone):
    world = alone()
    world.submit(1)
    world.run()
    world.host.runner.loop.call_later(0.5, world.tier.finish_all)
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


class SlowlyClosing(ExampleTier):
    """Counts how often it is closed, and waits for a thread of its pool meanwhile."""

    def __init__(self):
        super().__init__()
        self.closed = 0
        self.begun, self.goes_on = threading.Event(), threading.Event()

    async def close(self):
        self.closed += 1
        self.begun.set()
        env, _ = self._opened()
        await env.io.run(Direction.METADATA, lambda: self.goes_on.wait(DEADLINE_S))
        await super().close()


def test_a_shutdown_that_was_interrupted_is_completed_by_the_next_one(monkeypatch, threads_left):
    tier = SlowlyClosing()
    with ManagerHarness(tier) as harness:
        runner = harness.manager.link.bridge.runner
        run = type(runner).run

        def interrupted(self, coroutine, timeout_s):
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            assert tier.begun.wait(DEADLINE_S)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(runner), "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                harness.manager.shutdown(DEADLINE_S)
        assert type(runner).run is run
        tier.goes_on.set()
        assert harness.manager.shutdown(DEADLINE_S).is_clean
        assert tier.closed == 1
    assert not threads_left()
