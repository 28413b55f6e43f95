"""What a `slab` store costs with few and with many blocks: opening, checkpoints, closing, memory.

Method: a store of blocks without bytes (its segments are sparse, and what is written to them is
thrown away), as all of this is about what is known of the blocks. Opening: processor time; that of
reading the journal and checking its frames, below which it cannot be; and the longest time that
another thread, which asks for nothing but the interpreter, had to wait, also beside one that does
nothing; each the best of three. Delay: the longest time on the clock that a store of 64 blocks took
while new blocks replaced old ones for longer than the journal's checkpoint needs, and the most
bytes that one wrote to journals. Closing: processor time. Bytes: what tracemalloc counts once the
store is open, the owner's map of its keys included.

Wanted for a million blocks: opening 1 s, closing 0.2 s, delays and pauses 20 ms, 400 bytes a block.
Asserted is what no other work on the machine changes: the bytes, and what an append writes.

    pytest tests/benchmarks/test_slab_scale.py --benchmark-enable

Without the option it only shows that it works, with few blocks. `KVOFFLOAD_SCALE_BLOCKS=4000000`
adds a size. The segments take no disk, the journals do: 512 bytes a block.
"""

import gc
import os
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mapped import counted_tables

from kvoffload_async.registry import create_policy
from kvoffload_async.testing.harness import TierHarness, make_job
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.records import RECORD_BYTES
from kvoffload_async.tiers.slab.recovery import read_journal, read_manifest
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier
from kvoffload_async.types import make_offload_key

pytestmark = pytest.mark.bench

BLOCK = 4096
KEYS_A_JOB = 64
MEASURED_SIZES = (10_000, 100_000, 1_000_000)
PLAIN_SIZES = (500,)


REPEATED = 3
"""The best of so many openings counts: what else the machine does only adds to them."""
MOST_BYTES = 400
"""Of memory a block."""
MOST_APPENDED = 24
"""How many times the bytes of its own records a store writes to journals, at most."""


class NoPayload(FileOps):
    """Segments are sparse, what is written to them is thrown away; journals' bytes are counted."""

    appended = 0

    def pwrite(self, fd, data, offset):
        self.appended += len(data)
        return super().pwrite(fd, data, offset)

    def fallocate(self, fd, size_bytes):
        os.ftruncate(fd, size_bytes)

    def pwritev(self, _fd, buffers, _offset):
        return sum(map(len, buffers))


class Waiting:
    """The longest time that a thread had to wait for the interpreter, while this is entered."""

    def __enter__(self):
        self.longest_s = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._ended = True
        self._thread.join()

    def _wait(self):
        nap = threading.Event()
        last_s = time.perf_counter()
        while not self._ended:
            nap.wait(0.0005)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s - 0.0005)
            last_s = now_s


def tier_of(root: Path, num_blocks: int, ops: FileOps | None) -> SlabTier:
    capacity_bytes = (1 << 20) + num_blocks * (BLOCK + 700)
    settings = SlabSettings(
        root_dir=str(root),
        run_config={"model_name": "m"},
        capacity_bytes=capacity_bytes,
        segment_bytes=1 << 28,
        io_threads=3,
        stripes=3,
    )
    return SlabTier(settings, partial(create_policy, "lru"), ops or NoPayload())


def open_store(root: Path, num_blocks: int, ops: FileOps | None = None) -> TierHarness:
    return TierHarness(tier_of(root, num_blocks, ops), KEYS_A_JOB, BLOCK, timeout_s=300)


def keys_from(number: int, count: int) -> list:
    hashes = np.random.default_rng(number).bytes(32 * count)
    return [make_offload_key(hashes[i : i + 32]) for i in range(0, len(hashes), 32)]


def store_jobs(harness: TierHarness, ops: NoPayload, first: int, num_jobs: int):
    """Store new blocks; return the seconds that each job took, and the most bytes appended."""
    seconds, most = [], 0
    for number in range(first, first + num_jobs):
        job = make_job(number, keys_from(number, KEYS_A_JOB), range(KEYS_A_JOB), is_promotion=False)

        async def timed(job=job):
            began_s = time.perf_counter()
            assert await harness.tier.store(job) == {}
            return time.perf_counter() - began_s

        before = ops.appended
        seconds.append(harness.run(timed()))
        most = max(most, ops.appended - before)
    return seconds, most


def fill(root: Path, num_blocks: int) -> float:
    """Make a store and fill it; return the longest time of a job in seconds."""
    with open_store(root, num_blocks, ops := NoPayload()) as harness:
        return max(store_jobs(harness, ops, 0, num_blocks // KEYS_A_JOB)[0])


def cpu_of_reading(root: Path) -> float:
    """Return the seconds of processor time that its journal costs whoever opens a store."""
    ops = FileOps()
    (folder,) = map(str, root.iterdir())
    seed = read_manifest(ops, folder).journal_seed
    cpu_s = time.process_time()
    assert len(read_journal(ops, folder, seed).rows)
    return time.process_time() - cpu_s


def opened(root: Path, num_blocks: int) -> tuple[float, float, int]:
    """Open a store; return processor time, the longest pause, and how many blocks it has."""
    gc.collect()
    cpu_s = time.process_time()
    with Waiting() as waiting:
        harness = open_store(root, num_blocks)
        cpu_s = time.process_time() - cpu_s
    with harness:
        return cpu_s, waiting.longest_s, int(harness.tier.gauges()["blocks"])


def closed(root: Path, num_blocks: int) -> float:
    """Open and close a store; return the processor time of closing."""
    with open_store(root, num_blocks) as harness:
        cpu_s = time.process_time()
        harness.run(harness.tier.close())
        return time.process_time() - cpu_s


def idle_pause() -> float:
    """Return the longest pause of a thread beside one that does nothing."""
    with Waiting() as waiting:
        threading.Event().wait(1.0)
    return waiting.longest_s


def measure(root: Path, num_blocks: int) -> dict[str, float]:
    num_jobs = num_blocks // KEYS_A_JOB
    filling = fill(root, num_blocks)
    idle = idle_pause()
    openings = [opened(root, num_blocks) for _ in range(REPEATED)]
    cpu_s, pause_s, count = map(min, zip(*openings, strict=True))
    assert count > 0.9 * num_jobs * KEYS_A_JOB
    close_s = closed(root, num_blocks)
    reading_s = cpu_of_reading(root)
    with open_store(root, num_blocks, ops := NoPayload()) as harness:
        replacing, appended = store_jobs(harness, ops, num_jobs, 2 * num_jobs)
        ahead = harness.tier._allocator._budget.slots_ahead
    gc.collect()
    tracemalloc.start()
    with counted_tables() as table_bytes, open_store(root, num_blocks) as harness:
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0] + table_bytes()
    tracemalloc.stop()
    return {
        "open, CPU s": cpu_s,
        "  of it reading and checking, s": reading_s,
        "open, longest pause ms": 1e3 * pause_s,
        "  of a thread beside an idle one, ms": 1e3 * idle,
        "store, median ms": 1e3 * float(np.median(replacing)),
        "store, longest ms while it fills": 1e3 * filling,
        "store, longest ms while it replaces": 1e3 * max(replacing),
        "  most appended, times its records": appended / ((2 * KEYS_A_JOB + ahead) * RECORD_BYTES),
        "close, CPU s": close_s,
        "bytes a block": num_bytes / count,
    }


def tell(text):
    print(text)  # noqa: T201 - what a benchmark is for


@pytest.mark.slow
def test_what_few_and_many_blocks_cost(tmp_path, capsys, benchmark, request):
    sizes = PLAIN_SIZES
    if request.config.getoption("benchmark_enable"):
        extra = os.environ.get("KVOFFLOAD_SCALE_BLOCKS")
        sizes = (*MEASURED_SIZES, *([int(extra)] if extra else []))
    root = Path(os.environ.get("KVOFFLOAD_SCALE_DIR", tmp_path))
    figures = benchmark.pedantic(
        lambda: {size: measure(root / f"s{size}", size) for size in sizes}, rounds=1
    )
    with capsys.disabled():
        tell("\n" + " " * 38 + "".join(f"{size:>14,}" for size in sizes))
        for name in next(iter(figures.values())):
            tell(f"{name:<38}" + "".join(f"{figures[size][name]:>14.3f}" for size in sizes))
    for size, of_size in figures.items():
        assert of_size["  most appended, times its records"] < MOST_APPENDED
        if size > max(PLAIN_SIZES):
            assert of_size["bytes a block"] < MOST_BYTES
