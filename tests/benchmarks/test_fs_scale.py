"""What the `fs` tier's walks cost with many blocks, and what opening and closing cost beside them.

Method: a namespace of empty files, each where a block would be, with the folders above it; the
blocks' bytes do not matter to a walk. Printed for each number of blocks:

    opening     processor time and time on the clock until the tier is open
    share       processor time of the process in seconds of background walking, of one core
    cycle       processor time of a walk over everything, made without rests; blocks a second
    pause       the longest time that the loop was kept from running meanwhile: on the clock, and of
                its own processor time, which is what the tier answers for on a machine that is busy
    close       as opening
    memory      bytes a block that the tier keeps of the blocks that it knows
    look-up     processor time of a look-up, of half of `SAMPLE` blocks, `JOB` at a time
    baseline    processor time of a bare `lstat` of a file, of the other half, alternating with the
                look-ups: what the kernel itself takes longer to find a name among more
    eviction    processor time of choosing and removing a block, of as many

Goals with two million blocks: 50,000 walked a second; look-up, beyond the baseline, and eviction
within 1.3 times of what they cost with 20,000.

    pytest tests/benchmarks/test_fs_scale.py --benchmark-enable -s      # 10,000 to a million
    KVOFFLOAD_SCALE=20000,2000000 pytest ... --basetemp=/dev/shm/scale      # needs as many inodes

Without the option it only shows that it works, with few blocks. Nothing is asserted about time.
"""

import asyncio
import os
import shutil
import time
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from fs.directories import KIB, FsDirectory
from mapped import counted_tables

from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ranking import KeyRanking
from kvoffload_async.tiers.fs import housekeeping as housekeeping_module
from kvoffload_async.tiers.fs.known_blocks import KnownBlocks

pytestmark = [pytest.mark.bench, pytest.mark.timeout(0)]

MEASURED = [int(n) for n in os.environ.get("KVOFFLOAD_SCALE", "10000,100000,1000000").split(",")]
MEASURED_BACKGROUND_S, PLAIN_BACKGROUND_S = 30.0, 0.05
PLAIN = [500]
PORTION = 1024
BEAT_S = 0.001
SAMPLE, JOB = 8192, 64
OPENING_S = housekeeping_module._OPENING_S
STEP_S = housekeeping_module._STEP_S


def make_blocks(directory: FsDirectory, count: int) -> None:
    made = set()
    for number in range(count):
        path = directory.namespace.get_file_name(key_of(number))
        leaf = path.rpartition("/")[0]
        if leaf not in made:
            Path(leaf).mkdir(parents=True, exist_ok=True)
            made.add(leaf)
        os.mknod(path)


class Pulse:
    """Runs on the loop, and notes the longest time between two beats."""

    def __init__(self) -> None:
        self.longest_s = self.longest_own_s = 0.0
        self._task = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._beat(), name="pulse")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _beat(self) -> None:
        while True:
            wall_s, own_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - wall_s - BEAT_S)
            self.longest_own_s = max(self.longest_own_s, time.thread_time() - own_s)


async def whole_cycle(housekeeping) -> tuple[float, int]:
    """Walk over everything without rests; return the processor time, and how many were found."""
    cpu_s, found = 0.0, 0
    async with housekeeping._walking:
        housekeeping._walk.begin_anew()
        while True:
            step = await housekeeping._take_step(lambda: False)
            cpu_s += step.cpu_s
            found += len(step.found)
            if step.ends_cycle:
                return cpu_s, found


@contextmanager
def timed(figures: dict, name: str):
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    yield
    figures[name] = (time.process_time() - cpu_s, time.perf_counter() - wall_s)


def bytes_a_block(count: int) -> float:
    tracemalloc.start()
    try:
        with counted_tables() as table_bytes:
            known = KnownBlocks(KeyRanking(LruPolicy(count)), (), list)
            for first in range(0, count, PORTION):
                known.learn([key_of(n) for n in range(first, min(first + PORTION, count))])
            return (tracemalloc.get_traced_memory()[0] + table_bytes()) / count
    finally:
        tracemalloc.stop()


@pytest.fixture(autouse=True)
def usual_openings(monkeypatch):
    """What opening takes is measured: it is not as patient as in other tests."""
    monkeypatch.setattr(housekeeping_module, "_OPENING_S", OPENING_S)
    monkeypatch.setattr(housekeeping_module, "_STEP_S", STEP_S)


@pytest.fixture
def filled(tmp_path, request):
    directory = FsDirectory(tmp_path / "root")
    make_blocks(directory, request.param)
    yield directory, request.param
    shutil.rmtree(directory.root)


def pytest_generate_tests(metafunc):
    is_measured = metafunc.config.getoption("--benchmark-enable")
    metafunc.parametrize("filled", MEASURED if is_measured else PLAIN, indirect=True)


def test_walks_over_many_blocks(filled, request, capsys):
    directory, count = filled
    is_measured = request.config.getoption("--benchmark-enable")
    background_s = MEASURED_BACKGROUND_S if is_measured else PLAIN_BACKGROUND_S
    figures: dict[str, tuple[float, float]] = {}
    capacity_bytes = 100_000 * KIB + count * 24 * KIB
    pulse = Pulse()
    learn_the_count(directory, capacity_bytes)
    with timed(figures, "opening"):
        harness = directory.open(capacity_bytes=capacity_bytes)
    harness.timeout_s = 600.0
    try:
        share = background_share(harness, background_s)
        harness.run(pulse.start())
        cpu_s, found = harness.run(whole_cycle(harness.tier._housekeeping))
        harness.run(pulse.stop())
        assert found == count
        assert len(harness.tier._space._policy) == count
        sample = [key_of(n) for n in range(0, count, max(1, count // SAMPLE))][:SAMPLE]
        parts = parts_of(sample)
        walking = harness.tier._housekeeping._walking
        harness.run(walking.acquire())  # no walk uses processor time meanwhile
        look_up_us, baseline_us = look_ups(directory, harness, parts[::2], parts[1::2])
        with timed(figures, "eviction"):
            for part in parts_of(sample[: count // 2]):
                harness.run(evict(harness.tier, len(part)))
        harness.on_loop(walking.release)
        left = count - len(sample[: count // 2])
        assert len(harness.tier._space._policy) == left
    finally:
        with timed(figures, "close"):
            harness.close()
    with capsys.disabled():
        print(  # noqa: T201 - it is what the benchmark is for
            f"\n{count:>9,} blocks: opening {figures['opening'][0]:.2f} s"
            f" ({figures['opening'][1]:.2f} on the clock), share {share:.1%},"
            f" cycle {cpu_s:.2f} s ({count / cpu_s:,.0f} a second),"
            f" pause {1e3 * pulse.longest_s:.1f} ms ({1e3 * pulse.longest_own_s:.1f} its own),"
            f" close {figures['close'][0]:.2f} s ({figures['close'][1]:.2f}),"
            f" memory {bytes_a_block(count):.0f} bytes a block,"
            f" look-up {look_up_us:.1f} us (baseline {baseline_us:.1f}),"
            f" eviction {1e6 * figures['eviction'][0] / len(sample[: count // 2]):.1f} us"
        )


def parts_of(keys):
    return [keys[first : first + JOB] for first in range(0, len(keys), JOB)]


def look_ups(directory: FsDirectory, harness, parts, bare_parts) -> tuple[float, float]:
    """Return the microseconds a block of look-ups, and of bare calls on other files."""
    figures: dict[str, tuple[float, float]] = {}
    costs_s: Counter[str] = Counter()
    for part, bare_part in zip(parts, bare_parts, strict=True):
        names = [directory.namespace.get_file_name(key) for key in bare_part]
        with timed(figures, "look-up"):
            found = harness.run(harness.tier.contains(part))
        assert len(found) == len(part)
        with timed(figures, "baseline"):
            for name in names:
                os.lstat(name)
        costs_s.update({what: cpu_s for what, (cpu_s, _) in figures.items()})
    counts = {"look-up": sum(map(len, parts)), "baseline": sum(map(len, bare_parts))}
    return tuple(1e6 * costs_s[what] / count for what, count in counts.items())


async def evict(tier, count: int) -> None:
    """Evict as a tier does in the background."""
    victims = tier._space.evict_idle(count)
    assert len(victims) == count
    await tier._space.remove(victims, tier._run_store)


def learn_the_count(directory: FsDirectory, capacity_bytes: int) -> None:
    """Have a tier make the count, which is not known in a new namespace."""
    with directory.open(capacity_bytes=capacity_bytes) as harness:
        harness.timeout_s = 600.0
        harness.run(whole_cycle(harness.tier._housekeeping))


def background_share(harness, seconds: float) -> float:
    figures: dict[str, tuple[float, float]] = {}
    with timed(figures, "background"):
        harness.run(asyncio.sleep(seconds))
    cpu_s, wall_s = figures["background"]
    return cpu_s / wall_s
