"""What the facade costs the scheduler's thread.

Method: one process, one owner thread, the loop and the I/O on threads of their own, as in a server.
pytest-benchmark calls the function under test in rounds (`--benchmark-enable`; without it each runs
once, as a plain test) and reports the distribution; the figure to read is the median. Nothing is
asserted about time, which depends on the machine; the number of wake-ups of the loop thread, which
does not, is. Goals on one core of a present server: `get_finished_jobs` on an idle tier and
`lookup` of a known key 0.5 us, `submit_store` and `submit_load` of 256 keys 27 us.

    pytest tests/benchmarks --benchmark-enable --benchmark-only

Submitting is measured with its hand-over at the end of the step; between rounds, unmeasured, the
jobs end and their results are taken.
"""

import itertools
from dataclasses import fields
from functools import partial

import pytest

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.facade.secondary import (
    ExampleSecondaryTierManager,
    FileSystemTierManager,
    SlabTierManager,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.types import LookupResult, ReqContext

pytestmark = pytest.mark.bench

NUM_BLOCKS = 512
NUM_KEYS = 256
DEADLINE_S = 10.0


TIERS = {
    "example": ExampleSecondaryTierManager,
    "fs": partial(FileSystemTierManager, model="bench"),
    "slab": partial(SlabTierManager, model="bench", capacity_bytes="16MiB", segment_bytes="1MiB"),
}


@pytest.fixture(params=TIERS)
def tier(request, tmp_path):
    buffer = PrimaryBuffer(NUM_BLOCKS, 4096)
    root = {} if request.param == "example" else {"root_dir": str(tmp_path)}
    tier = TIERS[request.param](None, buffer.view, **root)
    yield tier
    assert tier.shutdown(DEADLINE_S).is_clean
    assert buffer.release()


@pytest.fixture
def manager():
    config = {
        "cpu_bytes_to_use": NUM_BLOCKS * 4096,
        "block_bytes": 4096,
        "secondary_tiers": [{"type": "example"}, {"type": "example"}],
    }
    with TieringOffloadingSpec(config) as spec:
        yield spec.get_manager()


def test_polling_an_idle_tier(benchmark, tier):
    assert not benchmark(tier.get_finished_jobs)


@pytest.mark.parametrize("is_promotion", [False, True], ids=["store", "load"])
def test_submitting_a_job_of_256_keys(benchmark, tier, is_promotion):
    keys = [key_of(number) for number in range(NUM_KEYS)]
    ids = itertools.count()
    ended = []
    submit = tier.submit_load if is_promotion else tier.submit_store

    def next_job():
        assert tier.drain_jobs(DEADLINE_S)
        ended.extend(tier.get_finished_jobs())
        return (make_job(next(ids), keys, range(NUM_KEYS), is_promotion=is_promotion),), {}

    def end_step(job):
        submit(job)
        tier.on_schedule_end()

    tier.submit_store(make_job(next(ids), keys, range(NUM_KEYS), is_promotion=False))
    benchmark.pedantic(end_step, setup=next_job, rounds=100)
    next_job()
    assert all(result.success for result in ended)


def test_looking_up_a_key_that_the_tier_has(benchmark, tier):
    ctx = ReqContext("r")
    tier.on_new_request(ctx)
    tier.submit_store(make_job(1, [key_of(1)], [0], is_promotion=False))
    assert tier.drain_jobs(DEADLINE_S)
    assert all(result.success for result in tier.get_finished_jobs())
    while tier.lookup(key_of(1), ctx) is LookupResult.RETRY:  # others share it: asked once
        tier.on_schedule_end()
        assert tier.link.bridge.wait_for_progress(DEADLINE_S)
        assert not tier.get_finished_jobs()
    assert benchmark(tier.lookup, key_of(1), ctx) is LookupResult.HIT


def test_looking_up_a_key_that_the_primary_has(benchmark, manager):
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    manager.prepare_store([key_of(1)], ctx)
    manager.complete_store([key_of(1)], ctx)
    assert benchmark(manager.lookup, key_of(1), ctx) is LookupResult.HIT


def test_looking_up_a_key_that_nobody_has(benchmark, manager):
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    assert benchmark(manager.lookup, key_of(1), ctx) is LookupResult.MISS


def test_an_idle_step(benchmark, manager):
    benchmark(manager.on_schedule_end)
    assert not manager.has_pending_work()


def test_a_step_wakes_the_loop_thread_once_however_much_it_submits(manager):
    bridge = manager.secondary_tiers[0].link.bridge
    woken = []
    call_soon = bridge.runner.call_soon
    bridge.runner.call_soon = lambda *args: woken.append(args) or call_soon(*args)
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    for number in range(64):
        manager.prepare_store([key_of(number)], ctx)
        manager.complete_store([key_of(number)], ctx)
    assert not woken, "nothing is handed over before the end of the step"
    manager.on_schedule_end()
    assert len(woken) == 1
    jobs = sum(len(effects) for _, effects in woken[0][1])
    assert jobs == 128, "sixty-four stores to each of two tiers"
    while manager.has_pending_work():
        assert manager.wait_for_progress(DEADLINE_S)
        manager.on_schedule_end()
    assert len(woken) == 1, "steps that submit nothing wake nobody"


def test_reading_the_statistics(benchmark, manager):
    """Of a primary and two tiers; it must not grow with what they hold. Goal: 50 us."""
    fill(manager)
    read = benchmark(manager.stats)
    assert read.primary.stored_blocks == NUM_KEYS
    assert [tier.cascading_blocks for tier in read.tiers] == 2 * [NUM_BLOCKS // 4]


def test_the_floor_of_reading_the_statistics(benchmark, manager):
    """The same tree made of values that are there: what no reading can do without."""
    fill(manager)
    read = manager.stats()

    def rebuilt(part):
        return type(part), {each.name: getattr(part, each.name) for each in fields(part)}

    parts = [rebuilt(part) for part in (read, read.primary, read.planner, read.runtime)]
    parts.append(rebuilt(read.primary.slots))
    for tier in read.tiers:
        parts += [rebuilt(tier), rebuilt(tier.load_seconds), rebuilt(tier.store_seconds)]

    def build():
        return [kind(**values) for kind, values in parts]

    assert benchmark(build)[0] == read


def fill(manager):
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    keys = [key_of(number) for number in range(NUM_KEYS)]
    manager.prepare_store(keys, ctx)
    manager.complete_store(keys, ctx)
