"""Store and load through the `fs` tier against the bare system calls, in one run.

The bare side writes and reads the same files, by as many threads: the same paths below another
root, their folders made on both sides; create, pwrite, rename; open, preadv. Rounds alternate, so
that both sides see the same machine. A third side, bare calls and one xxh3 pass over the same
bytes, shows what verifying costs by itself: from the page cache, all are bound by memory.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round.
"""

import asyncio
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvoffload_async.factory import create_policy
from kvoffload_async.testing.harness import TierHarness, key_of, make_job
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.tiers.fs.tier import FsSettings, FsTier

KIB = 1024
FIELDS = {"model_name": "bench"}
THREADS = 3
SIZES = [(256, 64, 8), (1024, 32, 4), (4096, 16, 4)]
"""KiB a block, blocks a job, jobs."""
LOADS = 5


class BareFiles:
    """As many threads as the tier has, each with its share of the files."""

    def __init__(self, root: Path, rows: list[memoryview], *, hashes: bool = False) -> None:
        self._hashes = hashes
        namespace = Namespace(str(root), FIELDS)
        self._paths = [namespace.get_file_name(key_of(number)) for number in range(len(rows))]
        self._rows = rows

    def store(self) -> None:
        self._spread(self._write)

    def load(self) -> None:
        self._spread(self._read)

    def _spread(self, call: Callable[[int], None]) -> None:
        def work(first: int) -> None:
            for number in range(first, len(self._rows), THREADS):
                call(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

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
        if self._hashes:
            xxhash.xxh3_128_digest(self._rows[number], 1)


class TierFiles:
    """The tier, with all jobs submitted at once."""

    def __init__(self, harness: TierHarness, count: int, per_job: int) -> None:
        self._harness = harness
        keys = [key_of(number) for number in range(count)]
        self._jobs = [
            (keys[start : start + per_job], range(start, min(count, start + per_job)))
            for start in range(0, count, per_job)
        ]

    def store(self) -> None:
        self._run(self._harness.tier.store, is_promotion=False)

    def load(self) -> None:
        self._run(self._harness.tier.load, is_promotion=True)

    def _run(self, operation, *, is_promotion: bool) -> None:
        jobs = [
            make_job(number, keys, slots, is_promotion=is_promotion)
            for number, (keys, slots) in enumerate(self._jobs)
        ]

        async def perform() -> None:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(operation(job)) for job in jobs]
            assert not any(task.result() for task in tasks)

        self._harness.run(perform())


def seconds(call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize(("kib", "per_job", "jobs"), SIZES)
def test_throughput_against_bare_files(tmp_path, request, kib, per_job, jobs):
    is_measured = request.config.getoption("benchmark_enable")
    rounds = 9 if is_measured else 1
    count = jobs * per_job if is_measured else 4
    block_bytes = kib * KIB
    figures = {"store": [], "load": [], "verified": []}
    settings = FsSettings(
        root_dir=str(tmp_path / "tier"),
        run_config=FIELDS,
        verify=Verify.WHEN_PRESENT,
        io_threads=THREADS,
    )
    rows = np.random.default_rng(1).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for number in range(rounds):
        tier = FsTier(settings, partial(create_policy, "lru"))
        harness = TierHarness(tier, count, block_bytes, timeout_s=120)
        with harness:
            harness.rows[:] = rows
            bare_root = tmp_path / "bare"
            bare_root.mkdir()
            view = harness.buffer.view.cast("B")
            pieces = [view[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
            sides = {
                "bare": BareFiles(bare_root, pieces),
                "hashing": BareFiles(bare_root, pieces, hashes=True),
                "tier": TierFiles(harness, count, per_job),
            }
            order = ["bare", "tier"] if number % 2 else ["tier", "bare"]
            for phase in ["store"] + ["load"] * (LOADS if is_measured else 1):
                took = {}
                for name in order:
                    if is_measured and phase == "store":
                        os.sync()  # so that neither pays for what the other has written
                    took[name] = seconds(getattr(sides[name], phase))
                if phase == "load":
                    hashed_s = seconds(sides["hashing"].load)
                    figures["verified"].append((hashed_s, took["tier"]))
                figures[phase].append((took["bare"], took["tier"]))
                order.reverse()
            assert np.array_equal(harness.rows, rows)
            for piece in pieces:
                piece.release()
            view.release()
            sides.clear()
            shutil.rmtree(bare_root)
        shutil.rmtree(tmp_path / "tier")
    total = count * block_bytes / (1 << 30)
    for phase, pairs in figures.items():
        ratio = statistics.median(bare / tier for bare, tier in pairs)
        bare, tier = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(  # noqa: T201 - the figures are what this is for
            f"\n{phase:8} {kib:5} KiB x {count}: bare {total / bare:6.2f} GiB/s, "
            f"tier {total / tier:6.2f} GiB/s, ratio {ratio:.2f}"
        )
