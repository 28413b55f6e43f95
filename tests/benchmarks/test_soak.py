"""Hours of random requests, cancellations, faults and resets: nothing is lost, and nothing grows.

Method: an engine over `fs` and `slab`, both with a capacity and with faults in their system calls,
is driven in rounds: through `OffloadEngine`, and another one through the scheduler adapter. In a
round, requests share prefixes, some are cancelled or cut off, and a fault meets one of the tiers:
calls that fail, a full disk, short calls, a call that hangs. At the end of each round the engine
comes to rest, and is reset now and then; every invariant is checked, every byte that was loaded has
been compared, and the process's memory, tasks, threads and file descriptors are noted. After the
first tenth of the time they must be flat.

    pytest -m soak tests/benchmarks/test_soak.py -s                   # a minute each
    KVOFFLOAD_SOAK_S=7200 nox -s soak                                 # two hours, both together
    KVOFFLOAD_SOAK_SEED=1 pytest -m soak tests/benchmarks/test_soak.py

The seed is printed. A run is not repeatable to the byte, as threads and disks take part in it.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import random
import statistics
import threading
import time
import tracemalloc
from dataclasses import astuple, dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

import numpy as np
import pytest
from faulty_files import FaultyFileOps
from planner_invariants import check_quiescent

from kvoffload_async import OffloadEngine, TieringOffloadingSpec
from kvoffload_async.errors import BusyError, TransportError
from kvoffload_async.facade.secondary import FileSystemTierManager, SlabTierManager
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.replay.device import FramePool
from kvoffload_async.replay.drivers import Arrivals, ReplayOptions
from kvoffload_async.replay.drivers.stepwise import StepwiseDriver
from kvoffload_async.replay.drivers.workers import Workers
from kvoffload_async.replay.report import Tally
from kvoffload_async.runtime.loop import new_event_loop
from kvoffload_async.transport.paged import PagedMemory

# Bounded by itself, by the time that it is given.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

SOAK_S = float(os.environ.get("KVOFFLOAD_SOAK_S", "120"))
BLOCK = 4096
MOST_BLOCKS = 8
REQUESTS_A_ROUND = 48
CONCURRENCY = 8
REST_S = 60.0
STORES, LOADS = "pwrite pwritev fallocate publish fdatasync", "preadv pread_into"
OWN = tracemalloc.Filter(inclusive=True, filename_pattern="*/kvoffload_async/*")
WARM_UP = 0.1
"""The share of the time after which everything must be flat."""


# -- the engine ---------------------------------------------------------------------------------


class Soak:
    """What a run is made of.

    Attributes:
        chance: Where every decision comes from.
        config: The engine's.
        faulty: The system calls of each tier.
    """

    def __init__(self, folder: Path, monkeypatch) -> None:
        drawn = random.SystemRandom().getrandbits(32)
        self.seed = int(os.environ.get("KVOFFLOAD_SOAK_SEED", drawn))
        print(f"\nKVOFFLOAD_SOAK_SEED={self.seed}")  # noqa: T201 - to repeat the run
        self.chance = random.Random(self.seed)
        self.log_path = folder / "soak.log"
        self.faulty = [FaultyFileOps(), FaultyFileOps()]
        registry = SecondaryTierFactory._registry
        loaders = dict(registry._loaders)
        for name, kind, ops in zip(
            ("soak_fs", "soak_slab"),
            (FileSystemTierManager, SlabTierManager),
            self.faulty,
            strict=True,
        ):
            loaders[name] = lambda kind=kind, ops=ops: over(kind, ops)
        monkeypatch.setattr(registry, "_loaders", loaders)
        tier = {"io_timeout_s": 2.0, "close_timeout_s": 10.0}
        self.config = {
            "cpu_bytes_to_use": 48 * BLOCK,
            "block_bytes": BLOCK,
            "model": "soak",
            "breaker_retry_s": 0.1,
            "deferral_timeout_s": 5.0,
            "check_invariants": True,
            "secondary_tiers": [
                {
                    **tier,
                    "type": "soak_fs",
                    "root_dir": str(folder / "fs"),
                    "capacity_bytes": 160 * BLOCK * 3,
                    "rescan_interval_s": 1.0,
                },
                {
                    **tier,
                    "type": "soak_slab",
                    "root_dir": str(folder / "slab"),
                    "capacity_bytes": 1 << 20,
                    "segment_bytes": 128 << 10,
                },
            ],
        }
        self.end_s = time.monotonic() + SOAK_S / 2
        self.began_s = time.monotonic()
        self.samples: list[tuple[float, Usage]] = []
        self.rounds = 0

    @contextlib.contextmanager
    def log_in_a_file(self):
        """Keep the log out of memory, where pytest would hold every record and its error."""
        logger = logging.getLogger("kvoffload_async")
        handler = RotatingFileHandler(self.log_path, maxBytes=1 << 20, backupCount=1)
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = True
            logger.removeHandler(handler)
            handler.close()

    def is_over(self) -> bool:
        return time.monotonic() >= self.end_s

    def prompts(self):
        """Yield a round's requests: paths in a few trees, so that they share their heads.

        There are 2,040 blocks in all: tables that remember keys must have seen them soon.
        """
        for _ in range(REQUESTS_A_ROUND):
            ids = [8 + self.chance.randrange(8)]
            for _ in range(self.chance.randrange(MOST_BLOCKS)):
                ids.append(2 * ids[-1] + self.chance.randrange(2))
            yield ids

    @contextlib.contextmanager
    def fault(self):
        """Have a fault in one of the tiers; everything works again at the end."""
        ops, count = self.chance.choice(self.faulty), self.chance.randint(1, 40)
        timer = None
        match self.chance.randrange(7):
            case 0:
                ops.fail(errno.EIO, on=STORES, times=count)
            case 1:
                ops.fail(errno.ENOSPC, on=STORES, times=count)
            case 2:
                ops.fail(errno.EIO, on=LOADS, times=count)
            case 3:
                ops.shorten(1000, on=self.chance.choice(("pwrite", "preadv")), times=count)
            case 4:
                hang = ops.hang(on=f"{STORES} {LOADS}", times=2)
                # Now and then for longer than a job may take.
                timer = threading.Timer(self.chance.choice((0.1, 0.5, 2.5)), hang.release)
                timer.start()
            case _:
                pass
        try:
            yield
        finally:
            if timer is not None:
                timer.join()
            for each in self.faulty:
                each.heal()
                each._hangs.clear()
                each.calls.clear()

    def at_rest(self, manager, tasks: int) -> None:
        """Check what must hold when nothing moves, and note what the process uses."""
        check_quiescent(manager.planner)
        counters = manager.planner.counters
        assert counters.jobs_submitted == counters.job_results, "a job without its one result"
        self.rounds += 1
        gc.collect()
        self.samples.append((time.monotonic() - self.began_s, Usage.now(tasks)))

    def check(self) -> None:
        """Check that nothing has grown since the first tenth."""
        warm_s = WARM_UP * SOAK_S / 2
        flat = [usage for at_s, usage in self.samples if at_s >= warm_s]
        assert len(flat) >= 6, f"only {self.rounds} rounds: give it more time"
        part = max(3, len(flat) // 9)
        first, last = Usage.median(flat[:part]), Usage.median(flat[-part:])
        print(f"{self.rounds} rounds: {first} -> {last}")  # noqa: T201 - what was measured
        assert last.tasks <= first.tasks, self.seed
        assert last.threads <= first.threads, self.seed
        assert last.files <= first.files + 4, self.seed
        assert last.own_bytes <= first.own_bytes * 1.05 + (256 << 10), self.seed
        assert last.resident_bytes <= first.resident_bytes * 1.05 + (8 << 20), self.seed


def over(kind, ops):
    """Return a tier class whose system calls are these."""

    class Faulty(kind):
        def __init__(self, offloading_spec, primary_kv_view, tier_type=kind.__name__, **options):
            super().__init__(offloading_spec, primary_kv_view, tier_type, ops=ops, **options)

    return Faulty


@dataclass(frozen=True)
class Usage:
    """What the process has at one time.

    Attributes:
        own_bytes: What the package's own lines have allocated: elsewhere, the interpreter's table
            of interned strings grows by megabytes at once.
    """

    tasks: float
    threads: float
    files: float
    own_bytes: float
    resident_bytes: float

    @classmethod
    def now(cls, tasks):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
        snapshot = tracemalloc.take_snapshot().filter_traces([OWN])
        own_bytes = sum(trace.size for trace in snapshot.traces)
        resident_bytes = pages * os.sysconf("SC_PAGESIZE")
        return cls(tasks, threading.active_count(), files, own_bytes, resident_bytes)

    @classmethod
    def median(cls, usages):
        return cls(*map(statistics.median, zip(*map(astuple, usages), strict=True)))


def has_work(manager):
    """Tell whether anything moves, copies that were given up included."""
    return manager.has_pending_work() or bool(manager.planner.orphaned)


@pytest.fixture
def soak(tmp_path, monkeypatch):
    tracemalloc.start()
    yield Soak(tmp_path, monkeypatch)
    tracemalloc.stop()


# -- through the asynchronous surface -----------------------------------------------------------


def test_an_engine_under_an_event_loop_neither_loses_nor_grows(soak):
    with soak.log_in_a_file(), asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(awaited(soak))
    soak.check()


async def awaited(soak):
    memory = PagedMemory(REQUESTS_A_ROUND * MOST_BLOCKS, BLOCK)
    async with OffloadEngine(soak.config, kv_caches=memory.kv_caches) as engine:
        while not soak.is_over():
            # Frames are used once a round: copies of cancelled calls go on until its end.
            frames = iter(range(1, REQUESTS_A_ROUND * MOST_BLOCKS + 1))
            requests = enumerate(list(soak.prompts()))
            with soak.fault():
                async with asyncio.TaskGroup() as group:
                    for number in range(CONCURRENCY):
                        serving = serve(engine, memory, soak, requests, frames)
                        group.create_task(serving, name=f"soak:{number}")
            deadline_s = time.monotonic() + REST_S
            while not await engine.quiesce(1.0) or has_work(engine.driver):
                assert time.monotonic() < deadline_s, f"not at rest; seed {soak.seed}"
                await engine.wait_for_progress(0.05)
            await asyncio.sleep(0)
            if soak.chance.random() < 0.1:
                engine.driver.reset_cache_now()
                engine.driver.planner.reset_flushed()
            soak.at_rest(engine.driver, len(asyncio.all_tasks()))


async def serve(engine, memory, soak, requests, frames):
    for number, ids in requests:
        names = np.array(ids, dtype=np.uint64)
        mine = [next(frames) for _ in ids]
        with contextlib.suppress(BusyError, TransportError, TimeoutError):
            # Cut off: what is under way then is cancelled.
            limit_s = soak.chance.choice((0.001, 0.01, 0.05, 5.0, 5.0, 5.0))
            async with asyncio.timeout(limit_s):
                await serve_one(engine, memory, f"{soak.rounds}/{number}", names, mine)


async def serve_one(engine, memory, name, names, frames):
    hashes = [int(i).to_bytes(16, "big") for i in names]
    async with engine.request(name, hashes) as request:
        found = await engine.lookup(request, 2.0)
        await engine.load(request, memory.device_blocks(frames[:found]))
        assert memory.count_wrong(names[:found], frames[:found]) == 0, "wrong bytes were served"
        memory.compute(names[found:], frames[found:])
        await engine.store(request, memory.device_blocks(frames), timeout_s=1.0)


# -- through the scheduler adapter --------------------------------------------------------------


def test_an_engine_under_a_scheduler_neither_loses_nor_grows(soak):
    with soak.log_in_a_file(), TieringOffloadingSpec(soak.config) as spec:
        manager = spec.get_manager()
        num_frames = 4 * CONCURRENCY * MOST_BLOCKS // 3
        memory = PagedMemory(num_frames, BLOCK)
        names = ["fs", "slab"]
        tally = Tally.of_tiers(names, device_keeps=True)
        workers = Workers(spec, [memory], tally)
        try:
            while not soak.is_over():
                one_round(soak, manager, workers, FramePool(num_frames, keeps_contents=True), tally)
                soak.at_rest(manager, spec.runtime.runner.run(count_tasks(), 10.0))
        finally:
            workers.shutdown(10.0)
    soak.check()


def one_round(soak, manager, workers, pool, tally):
    steps = iter(range(soak.chance.choice((20, 100, 100_000))))
    driver = StepwiseDriver(
        manager,
        workers,
        pool,
        tally,
        ReplayOptions(
            concurrency=CONCURRENCY,
            # What is still in flight then is ended as a cancelled request is.
            should_stop=lambda: next(steps, None) is None,
        ),
        stall_timeout_s=120.0,
        blocks_per_step=4,
    )
    with soak.fault():
        driver.run(Arrivals.at_once(soak.prompts()))
    assert driver.drain(REST_S), f"not at rest; seed {soak.seed}"
    deadline_s = time.monotonic() + REST_S
    while has_work(manager):
        assert time.monotonic() < deadline_s, f"not at rest; seed {soak.seed}"
        manager.wait_for_progress(0.05)
        manager.on_schedule_end()
    assert tally.corrupt_blocks == 0, f"wrong bytes were served; seed {soak.seed}"
    del tally.owner_ns[:]
    if soak.chance.random() < 0.1:
        manager.reset_cache()
        manager.on_reset_flushed()


async def count_tasks():
    return len(asyncio.all_tasks())
