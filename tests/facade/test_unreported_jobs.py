"""A manager that never reports a job: it keeps its share, and nobody waits for it for ever."""

import pytest
from facade.worlds import EXCLUSIVE, HIT, MISS, PENDING, Hearing, filled, k

from kvoffload_async.core.invariants import check_state

TIMEOUT_S = 5.0


class Silent(Hearing):
    """Does its jobs, and says nothing of them while it is told to be silent."""

    is_silent = True

    def get_finished_jobs(self):
        return [] if self.is_silent else super().get_finished_jobs()

    def get_released_jobs(self):
        return [] if self.is_silent else super().get_released_jobs()


@pytest.fixture
def world(worlds):
    return worlds(EXCLUSIVE, manager_class=Silent, io_timeout_s=TIMEOUT_S, num_slots=4)


def stats_of(world):
    (tier,) = world.manager.stats().tiers
    return tier.jobs_in_flight, tier.overdue_jobs, tier.failed_jobs


def test_a_store_that_is_never_reported_fails_and_keeps_its_block_until_it_is(world, caplog):
    world.begin("r")
    world.store(1)
    world.step()
    world.finish_job()
    world.runner.advance(2 * TIMEOUT_S - 0.5)
    world.poll()
    assert stats_of(world) == (1, 0, 0)
    world.runner.advance(0.5)
    world.poll()
    assert stats_of(world) == (0, 1, 1)
    assert "has not reported the store of 1 blocks for request r" in caplog.text
    assert not world.manager.planner.has_pending_work
    check_state(world.manager.planner)
    assert world.counts["pinned"] == 1, "the copy may read its slot"
    (silent,) = world.secondaries
    silent.is_silent = False
    world.poll()
    assert stats_of(world) == (0, 0, 1)
    assert world.counts["pinned"] == 0


def test_a_load_that_is_never_reported_is_a_miss_and_keeps_its_slot_until_it_is(world):
    (silent,) = world.secondaries
    silent.is_silent = False
    filled(world, 1)
    silent.is_silent = True
    world.begin("r")
    assert world.lookup(1) is PENDING
    world.step()
    world.runner.advance(2 * TIMEOUT_S)
    world.poll()
    assert world.lookup(1, "r") is MISS
    assert world.counts["held"] == 1, "the copy may write its slot"
    assert stats_of(world)[1] == 1
    silent.is_silent = False
    world.finish_job()
    world.poll()
    assert world.counts["held"] == 0
    world.begin("again")
    assert world.lookup(1, "again") is PENDING
    world.rest()
    assert world.lookup(1, "again") is HIT
    world.load(1, req_id="again")


def test_a_manager_that_keeps_its_own_deadline_is_asked_no_earlier(worlds):
    world = worlds(EXCLUSIVE, manager_class=Hearing, io_timeout_s=TIMEOUT_S)
    world.begin("r")
    world.store(1)
    world.step()
    world.runner.advance(3 * TIMEOUT_S)
    world.poll()
    assert stats_of(world) == (0, 1, 1)
    world.finish_job()
    world.poll()
    assert stats_of(world) == (0, 0, 1)
    assert world.counts["pinned"] == 0
    assert k(1) in world.tiers[0].blocks
