"""`SecondaryTierManager` on real threads: every job has one result, whatever is closed when."""

import random
import threading

import pytest

from kvoffload_async.errors import ClosedError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.runtime.bridge import RuntimeHost
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import Fault, FaultPlan, FaultyTier
from kvoffload_async.testing.harness import ManagerHarness, key_of, make_job
from kvoffload_async.tiers.example import ExampleTier

FAULTS = {
    Fault.NONE: 6.0,
    Fault.IO_ERROR_AFTER: 1.0,
    Fault.SOME_BLOCKS: 1.0,
    Fault.SLOW: 1.0,
    Fault.CANCELLED: 1.0,
}
DEADLINE_S = 60.0


def submit_some(harness, draw, count):
    """Submit jobs on slots of their own: two slots a job, sixty-four in all."""
    for number in range(count):
        keys = [key_of(n) for n in draw.sample(range(12), draw.randint(0, 2))]
        slots = [2 * number + i for i in range(len(keys))]
        submit = harness.submit_store if draw.random() < 0.6 else harness.submit_load
        submit(keys, slots)
        if draw.random() < 0.3:
            harness.collect()


@pytest.mark.parametrize("seed", range(8))
def test_every_job_has_one_result_when_shut_down_in_mid_flight(seed):
    draw = random.Random(seed)
    tier = FaultyTier(ExampleTier(), FaultPlan(seed, FAULTS, slow_s=0.002))
    with ManagerHarness(tier) as harness:
        submit_some(harness, draw, draw.randint(1, 30))
        assert harness.manager.shutdown(DEADLINE_S).is_clean
        submit_some(harness, draw, 2)
        harness.collect()
        assert harness.reported() == harness.submitted
        assert not harness.manager.has_pending_work()


@pytest.mark.parametrize("seed", range(4))
def test_every_job_has_one_result_when_the_loop_is_taken_away_meanwhile(seed):
    draw = random.Random(seed)
    buffer = PrimaryBuffer(64, 4096)
    host = RuntimeHost()
    manager = SecondaryTierManager(None, buffer.view, "t", ExampleTier(), runtime=host.bridge)
    start, results, ids = threading.Event(), [], set()

    def take_away():
        start.wait(DEADLINE_S)
        host.close(DEADLINE_S)

    thief = threading.Thread(target=take_away, name="thief")
    thief.start()
    harness = _Jobs(manager)
    for number in range(60):
        if number == draw.randint(0, 60):
            start.set()
        ids.add(harness.submit(number, draw))
        try:
            results += manager.get_finished_jobs()
        except ClosedError:
            break
    start.set()
    thief.join(DEADLINE_S)
    manager.shutdown(0.5)
    results += manager.get_finished_jobs()
    assert sorted(result.job_id for result in results) == sorted(ids)


class _Jobs:
    def __init__(self, manager):
        self.manager = manager

    def submit(self, number, draw):
        job = make_job(number, [key_of(number % 8)], [number], is_promotion=draw.random() < 0.5)
        (self.manager.submit_load if job.is_promotion else self.manager.submit_store)(job)
        return number
