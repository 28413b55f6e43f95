"""Store and load through the `fs` tier against the bare system calls, in one run.

The bare side writes and reads the same files by the very same threads, the tier's own pool, and
like the tier's jobs its threads take the next file when they are free: the same paths below
another root, their folders made on both sides; create, pwrite, rename; open, preadv, close. Rounds
alternate, so that both sides see the same machine. A third side, bare calls and xxh3 over each
piece that was just read, is the floor of a verified load: from the page cache, all are bound by
memory and by the interpreter's lock.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round.
"""

import asyncio
import itertools
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvoffload_async.abc.tier import Direction
from kvoffload_async.config import suitable_threads
from kvoffload_async.facade.secondary import FileSystemTierManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.fs.layout import Namespace

KIB = 1024
FIELDS = {"model_name": "bench"}
THREADS = suitable_threads()
"""Of both sides: where there are two processors, a third thread makes either slower."""
SIZES = [(256, 64, 8), (1024, 32, 4), (4096, 16, 4)]
"""KiB a block, blocks a job, jobs."""
LOADS = 5
LOADED_BYTES = 1 << 30
"""What one measurement of loading moves at least: less is over before the threads are apart."""
PIECE_BYTES = 256 * KIB
DEADLINE_S = 120.0
STEP_S = 0.001
"""Between two polls of the tier."""


class BareFiles:
    """The same files by bare system calls, on the threads of the tier."""

    def __init__(
        self, loop: LoopThread, pool: IoPool, root: Path, rows: list[memoryview], *, hashes: bool
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._hashes = hashes
        namespace = Namespace(str(root), FIELDS)
        self._paths = [namespace.get_file_name(key_of(number)) for number in range(len(rows))]
        self._rows = rows

    def store(self) -> None:
        self._spread(Direction.STORE, self._write, 1)

    def load(self, passes: int) -> None:
        self._spread(Direction.LOAD, self._read_hashing if self._hashes else self._read, passes)

    def _spread(self, direction: Direction, call: Callable[[int], None], passes: int) -> None:
        numbers = itertools.chain.from_iterable([range(len(self._rows))] * passes)

        def work() -> None:
            for number in numbers:
                call(number)

        async def perform() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(THREADS):
                    group.create_task(self._pool.run(direction, work))

        self._loop.run(perform(), DEADLINE_S)

    def _write(self, number: int) -> None:
        path = self._paths[number]
        temp = f"{path}.tmp"
        os.makedirs(path.rpartition("/")[0], exist_ok=True)  # noqa: PTH103 - the bare call
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert os.pwrite(fd, self._rows[number], 0) == len(self._rows[number])
        os.close(fd)
        os.rename(temp, path)  # noqa: PTH104 - the bare call

    def _read(self, number: int) -> None:
        fd = os.open(self._paths[number], os.O_RDONLY)
        assert os.preadv(fd, [self._rows[number]], 0) == len(self._rows[number])
        os.close(fd)

    def _read_hashing(self, number: int) -> None:
        row = self._rows[number]
        fd = os.open(self._paths[number], os.O_RDONLY)
        running = xxhash.xxh3_128(seed=1)
        for begin in range(0, len(row), PIECE_BYTES):
            piece = row[begin : begin + PIECE_BYTES]
            assert os.preadv(fd, [piece], begin) == len(piece)
            running.update(piece)
        os.close(fd)
        running.digest()


class TierFiles:
    """The tier, as a scheduler drives it, with all jobs submitted at once."""

    def __init__(self, manager: FileSystemTierManager, count: int, per_job: int) -> None:
        self._manager = manager
        self._step = threading.Event()
        self._ids = itertools.count()
        keys = [key_of(number) for number in range(count)]
        self._jobs = [
            (keys[start : start + per_job], range(start, min(count, start + per_job)))
            for start in range(0, count, per_job)
        ]

    def store(self) -> None:
        self._run(self._manager.submit_store, 1, is_promotion=False)

    def load(self, passes: int) -> None:
        self._run(self._manager.submit_load, passes, is_promotion=True)

    def _run(self, submit, passes: int, *, is_promotion: bool) -> None:
        jobs = self._jobs * passes
        for keys, slots in jobs:
            submit(make_job(next(self._ids), keys, slots, is_promotion=is_promotion))
        self._manager.on_schedule_end()
        ended = 0
        while ended < len(jobs):
            self._step.wait(STEP_S)  # what a scheduler does between two polls is not waiting
            for result in self._manager.get_finished_jobs():
                assert result.success
                ended += 1


def seconds(call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize("verify", ["when_present", "off"])
@pytest.mark.parametrize("size", SIZES, ids=[f"{kib}-KiB" for kib, _, _ in SIZES])
def test_throughput_against_bare_files(tmp_path, request, size, verify):
    kib, per_job, jobs = size
    is_measured = request.config.getoption("benchmark_enable")
    rounds = 7 if is_measured else 1
    count = jobs * per_job if is_measured else 4
    block_bytes = kib * KIB
    passes = -(-LOADED_BYTES // (count * block_bytes)) if is_measured else 1
    figures = {"store": [], "load": [], "floor": []}
    content = np.random.default_rng(1).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    buffer = PrimaryBuffer(count, block_bytes)
    rows = np.asarray(buffer.view)
    rows[:] = content
    view = buffer.view.cast("B")
    pieces = [view[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
    for number in range(rounds):
        pools = []
        bare_root = tmp_path / "bare"
        bare_root.mkdir()
        with closing(LoopThread()) as loop:
            bridge = Bridge(
                loop, lambda *threads, pools=pools: pools.append(IoPool(*threads)) or pools[-1]
            )
            manager = FileSystemTierManager(
                None,
                buffer.view,
                root_dir=tmp_path / "tier",
                run_config=FIELDS,
                verify=verify,
                runtime=bridge,
                io_timeout_s=DEADLINE_S,
                n_read_threads=THREADS - 1,
                n_write_threads=1,
            )
            sides = {
                "bare": BareFiles(loop, pools[0], bare_root, pieces, hashes=False),
                "floor": BareFiles(loop, pools[0], bare_root, pieces, hashes=True),
                "tier": TierFiles(manager, count, per_job),
            }
            order = ["bare", "tier"] if number % 2 else ["tier", "bare"]
            stored = {}
            for name in order:
                if is_measured:
                    os.sync()  # so that neither pays for what the other has written
                stored[name] = seconds(sides[name].store)
            figures["store"].append((stored["bare"], stored["tier"]))
            order = [*order, "floor"]
            for turn in range(LOADS if is_measured else 1):
                rows[:] = 0
                loaded = {}
                for name in order[turn % 3 :] + order[: turn % 3]:
                    loaded[name] = seconds(partial(sides[name].load, passes))
                    assert np.array_equal(rows, content)
                figures["load"].append((loaded["bare"], loaded["tier"]))
                figures["floor"].append((loaded["bare"], loaded["floor"]))
            assert manager.shutdown(DEADLINE_S).is_clean
        shutil.rmtree(bare_root)
        shutil.rmtree(tmp_path / "tier")
    for piece in pieces:
        piece.release()
    view.release()
    del rows
    assert buffer.release()
    for phase, pairs in figures.items():
        total = count * block_bytes / (1 << 30) * (1 if phase == "store" else passes)
        ratio = statistics.median(bare / other for bare, other in pairs)
        bare, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(  # noqa: T201 - the figures are what this is for
            f"\n{phase:5} {kib:5} KiB x {count}, verify {verify}: bare {total / bare:6.2f} GiB/s, "
            f"{'floor' if phase == 'floor' else 'tier'} {total / other:6.2f} GiB/s, "
            f"ratio {ratio:.2f}"
        )
