"""Store and load through the `slab` tier against the bare system calls, in one run.

The bare side moves the same rows to and from one preallocated file, by as many threads, 1 MiB a
call. Rounds alternate, so that both sides see the same machine. Both overwrite in every round what
they wrote in the round before, the tier by evicting it: that is how a full store lives. With
`verify` the tier computes a checksum of every byte, the bare side never does.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round.
"""

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.config import suitable_threads
from kvoffload_async.registry import create_policy
from kvoffload_async.testing.harness import TierHarness, key_of, make_job
from kvoffload_async.tiers.slab.opening import Verify
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier

KIB = 1024
MIB = 1024 * KIB
THREADS = suitable_threads()
SIZES = [(64, 16, 256), (64, 256, 16), (256, 16, 64), (1024, 16, 16), (1024, 256, 1), (4096, 16, 4)]
"""KiB a block, blocks a job, jobs: 256 MiB in all."""
LOADS = 5


class BareFile:
    """As many threads as the tier has, each taking the next MiB."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self._view = view
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, len(view))

    def store(self) -> None:
        self._spread(os.pwritev)

    def load(self) -> None:
        self._spread(os.preadv)

    def close(self) -> None:
        os.close(self._fd)

    def _spread(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        starts = itertools.count(step=MIB)

        def work() -> None:
            while (start := next(starts)) < len(self._view):
                piece = self._view[start : start + MIB]
                assert call(self._fd, [piece], start) == len(piece)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class TierSide:
    """The tier, with all jobs submitted at once, a few of which run at a time."""

    def __init__(self, harness: TierHarness, per_job: int) -> None:
        self._harness = harness
        self._per_job = per_job
        self._round = itertools.count()
        self.next_keys()

    def next_keys(self) -> None:
        count, per_job = len(self._harness.rows), self._per_job
        first = next(self._round) * count
        keys = [key_of(first + number) for number in range(count)]
        self._jobs = {
            is_promotion: [
                make_job(
                    start,
                    keys[start : start + per_job],
                    range(start, min(count, start + per_job)),
                    is_promotion=is_promotion,
                )
                for start in range(0, count, per_job)
            ]
            for is_promotion in (False, True)
        }

    def store(self) -> None:
        self._run(self._harness.tier.store, is_promotion=False)

    def load(self) -> None:
        self._run(self._harness.tier.load, is_promotion=True)

    def _run(self, operation, *, is_promotion: bool) -> None:
        async def perform() -> None:
            bounds = self._harness.tier.bounds
            at_once = max(bounds.concurrent_stores, bounds.concurrent_blocks // self._per_job)
            bound = asyncio.Semaphore(at_once)

            async def one(job) -> None:
                async with bound:
                    assert not await operation(job)

            async with asyncio.TaskGroup() as group:
                for job in self._jobs[is_promotion]:
                    group.create_task(one(job))

        self._harness.run(perform())


def seconds(call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}KiB-{size[1]}")
def test_throughput_against_a_bare_file(tmp_path, request, size, verify):
    kib, per_job, jobs = size
    is_measured = request.config.getoption("benchmark_enable")
    rounds = 7 if is_measured else 2
    count = jobs * per_job if is_measured else min(8, jobs * per_job)
    block_bytes = kib * KIB
    total_bytes = count * block_bytes
    settings = SlabSettings(
        root_dir=str(tmp_path / "tier"),
        run_config={"model_name": "bench"},
        capacity_bytes=total_bytes + total_bytes // 8 + MIB,
        verify=Verify.REQUIRED if verify else Verify.OFF,
        io_threads=THREADS,
    )
    figures = {"store": [], "load": []}
    tier = SlabTier(settings, partial(create_policy, "lru"))
    tier.bounds = TierBounds(THREADS - 1, 1)  # the harness makes as many threads
    rows = np.random.default_rng(1).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    with TierHarness(tier, count, block_bytes, timeout_s=120) as harness:
        harness.rows[:] = rows
        view = harness.buffer.view.cast("B")
        bare = BareFile(tmp_path / "bare", view)
        side = TierSide(harness, per_job)
        sides = {"bare": bare, "tier": side}
        order = ["bare", "tier"]
        side.store()
        bare.store()
        for _ in range(rounds):
            side.next_keys()
            for phase in ["store"] + ["load"] * (LOADS if is_measured else 1):
                took = {}
                for name in order:
                    if is_measured and phase == "store":
                        os.sync()  # so that neither pays for what the other has written
                    took[name] = seconds(getattr(sides[name], phase))
                figures[phase].append((took["bare"], took["tier"]))
                order.reverse()
            assert np.array_equal(harness.rows, rows)
        bare.close()
        view.release()
    for phase, pairs in figures.items():
        ratio = statistics.median(bare / tier for bare, tier in pairs)
        bare_s, tier_s = (statistics.median(side) for side in zip(*pairs, strict=True))
        gib = total_bytes / (1 << 30)
        how = "verified" if verify else "unverified"
        print(  # noqa: T201 - the figures are what this is for
            f"\n{phase:5} {how:10} {kib:5} KiB, {per_job:3} a job: "
            f"bare {gib / bare_s:6.2f} GiB/s, tier {gib / tier_s:6.2f} GiB/s, ratio {ratio:.2f}"
        )
