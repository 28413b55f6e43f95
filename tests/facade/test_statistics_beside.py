"""What another thread than the owner's reads: one moment, whatever the owner is doing."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from facade.worlds import EXCLUSIVE, MISS, PROBED, World, ks

from kvoffload_async import OffloadingStatistics
from kvoffload_async.facade.secondary import SecondaryTierManager

DEADLINE_S = 60.0


def check_sums(stats: OffloadingStatistics):
    """Check what `kvoffload_async.statistics` says that always holds."""
    primary, planner = stats.primary, stats.planner
    assert primary.lookups == primary.hits + primary.pending_hits + primary.misses
    assert planner.lookups == (
        planner.hits + planner.pending_hits + planner.retries + sum(planner.misses.values())
    )
    in_flight = sum(tier.jobs_in_flight for tier in stats.tiers)
    assert planner.jobs_submitted == planner.job_results + in_flight
    for tier in stats.tiers:
        assert tier.lookups == tier.hits + tier.misses + tier.undecided
        assert tier.submitted_jobs == tier.finished_jobs + tier.jobs_in_flight
        assert tier.failed_jobs == sum(tier.failed_jobs_by_error.values())
        assert tier.dropped_blocks == sum(tier.dropped.values())


@pytest.fixture
def elsewhere():
    """Call something on another thread."""
    with ThreadPoolExecutor(1) as executor:
        yield lambda call: executor.submit(call).result(DEADLINE_S)


@pytest.fixture
def worlds():
    made = []

    def make(*tiers, **options):
        made.append(World(*tiers, **options))
        made[-1].begin("r")
        return made[-1]

    yield make
    for world in made:
        world.end()


def test_in_the_middle_of_a_lookup_it_reads_what_was_at_the_end_of_the_last_step(worlds, elsewhere):
    seen = []

    class Asked(SecondaryTierManager):
        def lookup(self, key, req_context):
            seen.append(elsewhere(world.manager.stats))
            return MISS

    world = worlds(EXCLUSIVE, manager_class=Asked)
    world.step()
    for number in range(3):
        assert world.lookup(number) is MISS
    world.step()
    assert world.lookup(3) is MISS
    for stats in seen:
        check_sums(stats)
    assert [stats.planner.lookups for stats in seen] == [0, 0, 0, 3]
    assert world.manager.stats().planner.lookups == 4, "the owner reads how it is now"


def test_in_the_middle_of_a_submission_it_reads_no_half_of_it(worlds, elsewhere):
    seen = []

    class Given(SecondaryTierManager):
        def submit_store(self, job_metadata):
            seen.append(elsewhere(world.manager.stats))
            super().submit_store(job_metadata)

        def get_finished_jobs(self):
            yield from super().get_finished_jobs()
            seen.append(elsewhere(world.manager.stats))

    world = worlds(EXCLUSIVE, manager_class=Given)
    world.store(1, 2)
    world.rest()
    assert seen
    for stats in seen:
        check_sums(stats)
    assert elsewhere(world.manager.stats).tiers[0].stored_blocks == 2


def test_what_was_read_does_not_change_with_what_follows(worlds, elsewhere):
    world = worlds(EXCLUSIVE, PROBED)
    world.step()
    before = elsewhere(world.manager.stats)
    copy = repr(before)
    world.store(1)
    world.lookup(2)
    world.rest()
    assert repr(before) == copy
    assert elsewhere(world.manager.stats).primary.stored_blocks == 1


def test_a_closed_manager_tells_every_thread_how_it_ended(worlds, elsewhere):
    world = worlds(EXCLUSIVE)
    world.store(1)
    world.step()
    world.manager.shutdown(0.0)
    stats = elsewhere(world.manager.stats)
    check_sums(stats)
    assert stats == world.manager.stats()
    assert stats.tiers[0].jobs_in_flight == 0


def test_sums_hold_in_every_reading_beside_an_owner_at_work(worlds):
    world = worlds(EXCLUSIVE, PROBED)
    stop, errors, readings = threading.Event(), [], []

    def read():
        while not stop.is_set():
            try:
                check_sums(world.manager.stats())
            except AssertionError as error:
                errors.append(error)
            readings.append(1)

    interval_s = sys.getswitchinterval()
    reader = threading.Thread(target=read)
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for number in range(100):
            world.store(number)
            for other in range(number + 5):
                world.lookup(other)
            world.manager.touch(ks(number), world.contexts["r"])
            world.step()
            world.finish_all()
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        reader.join(DEADLINE_S)
    assert readings
    assert not errors
