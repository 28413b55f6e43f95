"""How many threads a tier on disk should have: the data behind `suitable_threads`.

    python tests/benchmarks/thread_counts.py --folder /srv/kv --rounds 15 > table.txt

A job of 48 blocks of 360 KiB, a prompt of 768 tokens of a small model, is stored and loaded by
managers that differ only in the number of threads that prefer loads; one more prefers stores. They
alternate: each round measures all of them, beginning with another one each time. Printed are the
median of the rounds in milliseconds, the fastest round, and the median over the rounds of the ratio
to the first number of threads, which other work on the machine disturbs least.

warm: the page cache has the blocks. cold: it was told to drop them. direct: it is bypassed. With
`--busy` as many processes as there are CPUs compute meanwhile, as a model does that runs on them.
`KVOFFLOAD_NATIVE=0` measures the threads of Python.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvoffload_async.facade.secondary import (
    FileSystemTierManager,
    SecondaryTierManager,
    SlabTierManager,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import key_of, make_job

BLOCKS = 48
BLOCK_BYTES = 360 << 10
CAPACITY_BYTES = 256 << 20
TIERS = ("fs", "slab")
MODES = ("warm", "cold", "direct")
DEADLINE_S = 120.0
_COMPUTES = [sys.executable, "-c", "while True: pass"]


class Contender:
    """A tier with a number of threads, and one job at a time."""

    _ids = itertools.count()

    def __init__(
        self, kind: str, view: memoryview, folder: Path, threads: int, *, is_direct: bool
    ) -> None:
        options = {
            "root_dir": str(folder),
            "model": "bench",
            "capacity_bytes": CAPACITY_BYTES,
            "direct_io": is_direct,
            "io_timeout_s": DEADLINE_S,
        }
        self._folder = folder
        self._manager: SecondaryTierManager
        if kind == "fs":
            options |= {"n_read_threads": threads, "n_write_threads": 1}
            self._manager = FileSystemTierManager(None, view, **options)
        else:
            self._manager = SlabTierManager(None, view, io_threads=threads + 1, **options)
        self._numbers = range(0)

    def store(self) -> float:
        """Store new blocks; return the milliseconds."""
        first = self._numbers.stop
        self._numbers = range(first, first + BLOCKS)
        return self._run(is_promotion=False)

    def load(self, *, is_cold: bool) -> float:
        """Load the last blocks that were stored; return the milliseconds."""
        if is_cold:
            for path in self._folder.rglob("*"):
                if path.is_file():
                    fd = os.open(path, os.O_RDONLY)
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
        return self._run(is_promotion=True)

    def close(self) -> None:
        """Shut the tier down and remove its files."""
        assert self._manager.shutdown(DEADLINE_S).is_clean
        shutil.rmtree(self._folder)

    def _run(self, *, is_promotion: bool) -> float:
        keys = [key_of(number) for number in self._numbers]
        job = make_job(next(self._ids), keys, range(BLOCKS), is_promotion=is_promotion)
        begun_s = time.perf_counter()
        (self._manager.submit_load if is_promotion else self._manager.submit_store)(job)
        assert self._manager.drain_jobs(DEADLINE_S)
        took_s = time.perf_counter() - begun_s
        (result,) = self._manager.get_finished_jobs()
        assert result.success, result.error
        return took_s * 1000


@contextmanager
def computing(processes: int) -> Iterator[None]:
    """Keep as many CPUs busy."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        running += (subprocess.Popen(_COMPUTES) for _ in range(processes))
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(
    kind: str, mode: str, counts: list[int], rounds: int, folder: Path
) -> dict[tuple[str, int], list[float]]:
    """Return the milliseconds by direction and number of threads."""
    took = defaultdict(list)
    buffer = PrimaryBuffer(BLOCKS, BLOCK_BYTES)
    with ExitStack() as stack:
        contenders = {}
        for threads in counts:
            directory = folder / f"{kind}-{mode}-{threads}"
            contenders[threads] = Contender(
                kind, buffer.view, directory, threads, is_direct=mode == "direct"
            )
            stack.callback(contenders[threads].close)
            contenders[threads].store()
        for number in range(rounds):
            turn = number % len(counts)
            for threads in counts[turn:] + counts[:turn]:
                took["store", threads].append(contenders[threads].store())
                load_ms = contenders[threads].load(is_cold=mode == "cold")
                took["load", threads].append(load_ms)
    assert buffer.release()
    return took


def described(took: list[float], first: list[float]) -> str:
    """Return median, minimum and ratio."""
    ratio = statistics.median(own / other for own, other in zip(took, first, strict=True))
    return f"{statistics.median(took):.1f} {min(took):.1f} x{ratio:.2f}"


def main() -> None:
    """Measure, and print a line per tier, mode and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 3, 7])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tier", nargs="*", choices=TIERS, default=TIERS)
    parser.add_argument("--mode", nargs="*", choices=MODES, default=MODES)
    parser.add_argument("--busy", action="store_true")
    given = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    state = "busy" if given.busy else "idle"
    heads = "".join(f"{count:>22}" for count in given.threads)
    sys.stdout.write(f"{cpus} CPUs, {state}; ms by number of threads that load\n{'':22}{heads}\n")
    with (
        TemporaryDirectory(dir=given.folder) as directory,
        computing(cpus if given.busy else 0),
    ):
        for kind, mode in itertools.product(given.tier, given.mode):
            took = measure(kind, mode, given.threads, given.rounds, Path(directory))
            for direction in ("load", "store"):
                cells = [took[direction, count] for count in given.threads]
                texts = "".join(f"{described(each, cells[0]):>22}" for each in cells)
                sys.stdout.write(f"{kind:5} {mode:7} {direction:6}  {texts}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
