"""A loop that a tier stops, or that ends: nobody waits for ever, and no hook raises."""

import asyncio
import threading
from contextlib import closing

import pytest
from scripted_tier import ScriptedTier

from kvoffload_async.errors import TierClosedError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.loop import LoopRunner, LoopThread
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.example import ExampleTier

DEADLINE_S = 60.0


def view():
    return memoryview(bytearray(4 * 64)).cast("B", (4, 64))


def job(job_id):
    return make_job(job_id, [key_of(job_id)], [0], is_promotion=False)


def results(manager, *job_ids):
    """Drain, and return whether each job has succeeded."""
    assert manager.drain_jobs(DEADLINE_S)
    ended = {result.job_id: result for result in manager.get_finished_jobs()}
    return [ended[job_id] for job_id in job_ids]


class Stopping(ExampleTier):
    """Stops the loop whenever it stores."""

    async def store(self, job):
        asyncio.get_running_loop().stop()
        return await super().store(job)


def test_a_tier_that_stops_the_loop_ends_nobodys_job(caplog):
    with closing(Bridge(LoopThread())) as bridge:
        managers = [
            SecondaryTierManager(None, view(), f"t{i}", tier, runtime=bridge)
            for i, tier in enumerate((Stopping(), ExampleTier()))
        ]
        for job_id in range(3):
            for manager in managers:
                manager.submit_store(job(job_id))
                manager.on_schedule_end()
        for manager in managers:
            assert all(result.success for result in results(manager, 0, 1, 2))
            assert manager.shutdown(DEADLINE_S).is_clean
    assert caplog.text.count("was restarted") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_loop_dies_every_job_fails_and_no_call_raises(caplog):
    loop = LoopThread()
    tier = ScriptedTier()
    manager = SecondaryTierManager(None, view(), "t", tier, runtime=Bridge(loop))
    begun = threading.Event()
    park = tier._park

    async def parked(*operation):
        begun.set()
        return await park(*operation)

    tier._park = parked
    manager.submit_store(job(0))
    manager.on_schedule_end()
    assert begun.wait(DEADLINE_S)

    def die():
        raise KeyboardInterrupt

    loop.call_soon(die)
    loop._thread.join(DEADLINE_S)
    manager.submit_store(job(1))
    manager.on_schedule_end()
    manager.submit_store(job(2))
    manager.on_schedule_end()
    in_flight, undelivered, later = results(manager, 0, 1, 2)
    assert all(isinstance(r.error, TierClosedError) for r in (in_flight, undelivered, later))
    assert [r.orphaned for r in (in_flight, undelivered, later)] == [True, False, False]
    assert not manager.has_pending_work()
    assert caplog.text.count("has ended") == 1
    assert manager.shutdown(0.1).unfinished_jobs == (0,)


def test_a_loop_that_ends_between_two_looks_costs_no_call_either():
    loop = asyncio.new_event_loop()

    class Deaf(LoopRunner):
        """Knows only when it is called that its loop has ended."""

        def has_ended(self):
            return False

    helper = threading.Thread(target=loop.run_forever)
    helper.start()
    runner = Deaf(loop)
    manager = SecondaryTierManager(None, view(), "t", ExampleTier(), runtime=Bridge(runner))
    loop.call_soon_threadsafe(loop.stop)
    helper.join(DEADLINE_S)
    loop.close()
    manager.submit_store(job(0))
    manager.on_schedule_end()
    (result,) = results(manager, 0)
    assert isinstance(result.error, TierClosedError)
    manager.shutdown(0.1)
