"""`SecondaryTierManager` on real threads: every job has one result, whatever is closed when."""

import errno
import os
import random
import threading
from contextlib import closing

import pytest
from own_threads import Threadless, open_files

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.block_io import native_io
from kvoffload_async.block_io.choice import implementation
from kvoffload_async.errors import ClosedError, TierUnavailableError
from kvoffload_async.facade.secondary import (
    ExampleSecondaryTierManager,
    FileSystemTierManager,
    SecondaryTierManager,
    SlabTierManager,
)
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.loop import LoopThread
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
TIERS = {
    "example": ExampleSecondaryTierManager,
    "fs": FileSystemTierManager,
    "slab": SlabTierManager,
}


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
    bridge = Bridge(LoopThread())
    manager = SecondaryTierManager(None, buffer.view, "t", ExampleTier(), runtime=bridge)
    start, results, ids = threading.Event(), [], set()

    def take_away():
        start.wait(DEADLINE_S)
        bridge.close(DEADLINE_S)

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


# -- shortages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_manager_without_all_its_threads_keeps_none_and_says_what_to_do(
    monkeypatch, threads_left, allowed
):
    buffer = PrimaryBuffer(4, 4096)
    files = open_files()
    Threadless(monkeypatch, [None] * allowed)
    with pytest.raises(TierUnavailableError) as raised:
        SecondaryTierManager(None, buffer.view, "t", ExampleTier(), n_read_threads=3)
    message = str(raised.value)
    assert "n_read_threads: 3, n_write_threads: 1: the threads of tier t cannot be start" in message
    assert "can't start new thread" in message
    assert "ulimit -u" in message
    assert not threads_left()
    assert open_files() == files
    assert buffer.release()


def test_a_manager_whose_tier_fails_before_it_is_opened_keeps_no_thread(threads_left):
    class Defective(ExampleTier):
        def opening_s(self, block_bytes):
            raise ZeroDivisionError("third-party code")

    buffer = PrimaryBuffer(4, 4096)
    files = open_files()
    with pytest.raises(ZeroDivisionError):
        SecondaryTierManager(None, buffer.view, "t", Defective())
    assert not threads_left()
    assert open_files() == files


def test_a_spec_without_a_thread_for_its_loop_says_what_to_do(monkeypatch, threads_left):
    config = {"cpu_bytes_to_use": 1 << 20, "block_bytes": 4096, "model": "m"}
    spec = TieringOffloadingSpec(config | {"secondary_tiers": [{"type": "example"}]})
    files = open_files()
    Threadless(monkeypatch, [])
    with pytest.raises(TierUnavailableError, match=r"event loop of the tiers.*ulimit -u"):
        spec.get_manager()
    assert not threads_left()
    assert open_files() == files
    monkeypatch.undo()
    spec.get_manager()
    spec.shutdown()


@pytest.mark.skipif(implementation().name != "native", reason="native code is not used")
@pytest.mark.parametrize("kind", ["fs", "slab"])
def test_a_tier_without_its_native_threads_is_closed_and_opens_later(
    monkeypatch, threads_left, tmp_path, kind
):
    def fail(*_arguments):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def open_tier():
        options = {"type": kind, "root_dir": str(tmp_path / "root"), "model": "m"}
        options |= {"capacity_bytes": "8MiB"}
        return SecondaryTierFactory.create_secondary_tier(options, buffer.view, None)

    buffer = PrimaryBuffer(4, 4096)
    files = open_files()
    monkeypatch.setattr(native_io, "open_engine", fail)
    with pytest.raises(TierUnavailableError, match=r"native threads cannot be started.*ulimit -u"):
        open_tier()
    monkeypatch.undo()
    assert not threads_left()
    assert open_files() == files
    assert open_tier().shutdown().is_clean
    assert buffer.release()


@pytest.mark.parametrize(
    ("kind", "options", "loads"),
    [
        ("fs", {}, 3),
        ("fs", {"n_read_threads": 2}, 2),
        ("slab", {"capacity_bytes": "8MiB"}, 1),
        ("slab", {"capacity_bytes": "8MiB", "direct_io": True}, 3),
        ("slab", {"capacity_bytes": "8MiB", "direct_io": True, "io_threads": 3}, 2),
        ("example", {}, 1),
    ],
)
def test_tiers_that_wait_for_a_device_have_four_threads_on_any_number_of_cpus(
    tmp_path, monkeypatch, kind, options, loads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    pools = []
    with closing(LoopThread()) as loop:
        bridge = Bridge(loop, lambda *given: pools.append(given[:2]) or IoPool(*given))
        buffer = PrimaryBuffer(4, 4096)
        root = {} if kind == "example" else {"root_dir": str(tmp_path)}
        manager = TIERS[kind](None, buffer.view, model="m", runtime=bridge, **root, **options)
        assert pools == [(loads, 1)]
        assert manager.shutdown(10).is_clean
        assert buffer.release()
