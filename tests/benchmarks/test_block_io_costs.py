"""What a job of the tiers on disk costs the process, by native code and by Python: printed.

Jobs of 16 blocks, one after the other, 16 at once, and these while the thread that waits for them
computes, again and again, in alternation. Printed for one job: voluntary
context switches of Python's threads (from /proc/self/task: the loop, the I/O threads, and the one
that waits for them), calls that are handed to I/O threads, system calls for files; and the
processor's seconds for a GiB. What is counted in Python is counted in a round of its own, as
counting costs something; what native threads are, by their names.

    pytest tests/benchmarks/test_block_io_costs.py --benchmark-enable -s
"""

import asyncio
import itertools
import resource
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvoffload_async.block_io.choice import VARIABLE, implementation
from kvoffload_async.registry import create_policy
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier

pytestmark = pytest.mark.bench

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
BLOCKS = 16
FIELDS = {"model_name": "bench"}
CALLS = [
    *("open", "close", "pwrite", "pwritev", "pread_into", "preadv", "stat", "fstat", "leads_to"),
    *("set_xattr", "get_xattr", "truncate", "publish", "rename", "unlink", "mkdir", "rmdir"),
    *("lock", "unlock", "fsync", "fdatasync"),
]
"""Of `FileOps`; each is a system call, or a few."""

ENVIRONMENT = {"python": "0", "native": "require"}


def fs(root: Path, **options) -> FsTier:
    return FsTier(FsSettings(root_dir=str(root), run_config=FIELDS, **options))


def slab(root: Path) -> SlabTier:
    settings = SlabSettings(
        root_dir=str(root), run_config=FIELDS, capacity_bytes=512 * MIB, segment_bytes=64 * MIB
    )
    return SlabTier(settings, partial(create_policy, "lru"))


TIERS = {
    "slab": slab,
    "fs": fs,
    "fs with a capacity": partial(fs, capacity_bytes=4 * GIB),
}


class Counted:
    """Counts what one process does meanwhile.

    Attributes:
        hand_overs: Calls that were given to I/O threads.
        python_calls: Of `FileOps`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hand_overs = self.python_calls = 0
        for name in CALLS:
            monkeypatch.setattr(FileOps, name, self._counting(getattr(FileOps, name)))
        run = IoPool.run

        def counting(pool, direction, call, *, helpers=0, withdraw=None):
            self.hand_overs += 1 + helpers
            return run(pool, direction, call, helpers=helpers, withdraw=withdraw)

        monkeypatch.setattr(IoPool, "run", counting)

    def _counting(self, call):
        def counting(*args, **kwargs):
            self.python_calls += 1
            return call(*args, **kwargs)

        return counting


class Side:
    """A tier that moves bytes by one implementation."""

    def __init__(self, name: str, make, root: Path, num_jobs: int, block_bytes: int) -> None:
        self.name = name
        self.num_jobs = num_jobs
        self.harness = TierHarness(make(root), num_jobs * BLOCKS, block_bytes, timeout_s=60.0)
        self.round_bytes = num_jobs * BLOCKS * block_bytes
        self.keys = (key_of(number) for number in itertools.count())
        self.stored: list = []
        self.is_busy = False

    def run(self, num_at_once: int, *, is_store: bool) -> None:
        """Run the jobs of one round, some at once."""
        if is_store:
            self.stored = list(itertools.islice(self.keys, self.num_jobs * BLOCKS))
        for first in range(0, self.num_jobs, num_at_once):
            self.run_at_once(range(first, first + num_at_once), is_store=is_store)

    def run_at_once(self, numbers: range, *, is_store: bool) -> None:
        """Run some jobs, and wait for them."""
        harness = self.harness
        operation = harness.tier.store if is_store else harness.tier.load

        async def round_of_jobs():
            jobs = [
                harness.job(
                    self.stored[first : first + BLOCKS],
                    range(first, first + BLOCKS),
                    is_promotion=not is_store,
                )
                for first in range(numbers.start * BLOCKS, numbers.stop * BLOCKS, BLOCKS)
            ]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(operation(job)) for job in jobs]
            assert all(task.result() == {} for task in tasks)

        tasks: list = []
        harness.on_loop(lambda: tasks.append(asyncio.create_task(round_of_jobs())))
        while self.is_busy and not tasks[0].done():
            sum(range(10_000))
        harness.run(ended(tasks.pop()))

    def native_calls(self) -> int:
        """Return how many system calls native threads have made."""
        tier = self.harness.tier
        if isinstance(tier, SlabTier):
            engine = getattr(tier._transfers._block_io, "_engine", None)
        else:
            engine = tier._native and tier._native._file_io._engine
        return engine.counters()["system_calls"] if engine else 0


async def ended(task: asyncio.Task) -> None:
    await task


def switches() -> int:
    """Return the voluntary context switches of the process's Python threads."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if not (task / "comm").read_text().startswith("kvoffload"):
            status = (task / "status").read_text()
            total += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture
def sides(request, tmp_path, monkeypatch, benchmark) -> Iterator[list[Side]]:
    num_jobs, block_bytes = (16, 256 * KIB) if benchmark.enabled else (4, 16 * KIB)
    opened = []
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(VARIABLE, value)
        make = TIERS[request.param]
        opened.append(Side(name, make, tmp_path / name, num_jobs, block_bytes))
    yield opened
    for side in reversed(opened):  # each looks that no thread is left of those it has begun
        side.harness.close()


@pytest.mark.parametrize(
    "how",
    ["alone", "at once", pytest.param("beside a busy owner", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("sides", TIERS, indirect=True)
def test_costs_of_a_job(sides, how, monkeypatch, benchmark, request):
    if implementation().name != "native":
        pytest.skip("the native module is not built")
    benchmark(lambda: None)
    rounds = 12 if benchmark.enabled else 2
    lines = [f"\n{request.node.callspec.id}, per job of {BLOCKS} blocks:"]
    for is_store in (True, False):
        total = {side.name: [0.0, 0.0] for side in sides}
        num_at_once = 1 if how == "alone" else sides[0].num_jobs
        for side in sides:
            side.is_busy = how == "beside a busy owner"
            side.run(num_at_once, is_store=is_store)
        for _ in range(rounds):
            for side in sides:
                before = switches(), cpu_s()
                side.run(num_at_once, is_store=is_store)
                total[side.name][0] += switches() - before[0]
                total[side.name][1] += cpu_s() - before[1]
        for side in sides:  # what the test's own thread costs is no part of a job
            before = switches()
            for _ in range(rounds * side.num_jobs // num_at_once):
                side.run_at_once(range(0), is_store=is_store)
            total[side.name][0] -= switches() - before
        for side in sides:
            with monkeypatch.context() as patch:
                counted = Counted(patch)
                before_calls = side.native_calls()
                side.run(num_at_once, is_store=is_store)
                native = side.native_calls() - before_calls
            num_switches, seconds = total[side.name]
            jobs = rounds * side.num_jobs
            lines.append(
                f"  {'store' if is_store else 'load':6}{side.name:8}"
                f"{num_switches / jobs:8.2f} context switches"
                f"{counted.hand_overs / side.num_jobs:7.2f} hand-overs"
                f"{counted.python_calls / side.num_jobs:8.1f} calls of Python's"
                f"{native / side.num_jobs:8.1f} native"
                f"{seconds * GIB / (rounds * side.round_bytes):8.3f} CPU s/GiB"
            )
            assert counted.python_calls + native > 0
            assert (native > 0) == (side.name == "native")
    sys.stdout.write("\n".join(lines))
