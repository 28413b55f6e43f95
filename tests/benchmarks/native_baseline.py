"""What the bare native engine moves: the floor beneath the tiers, and how its pieces were chosen.

    python tests/benchmarks/native_baseline.py --folder /dev/shm --threads 3 --piece 256 --part 1024

Each round moves 16 batches of 16 blocks, with checksums, to and from one file in the page cache;
beside it `pwritev` and `preadv` without, in as many threads of Python. GiB/s, the best round of
each, and CPU seconds a GiB.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kvoffload_async.block_io import engine as native_engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from xxh3 import addresses

BATCHES = BLOCKS = 16
SIZES_KIB = (64, 256, 1024, 4096)
KEYS = [bytes([index]) * 32 for index in range(BLOCKS)]


class Native:
    """The engine, with the rows of a buffer."""

    def __init__(
        self, options: argparse.Namespace, buffer: bytearray, block_bytes: int, fd: int
    ) -> None:
        loads = max(1, options.threads - 1)
        self._engine = native_engine.Engine(
            load_threads=loads,
            store_threads=max(1, options.threads - loads),
            spare_threads=0,
            queued=64,
            hashes=addresses(),
            piece_bytes=options.piece << 10,
            part_bytes=options.part << 10,
        )
        self._memory = self._engine.map(buffer, block_bytes, block_bytes)
        self._fd = fd
        self._batch_bytes = BLOCKS * block_bytes
        self._num_rows = len(buffer) // block_bytes

    def move(self, *, is_store: bool) -> None:
        """Move all batches at once."""
        for index in range(BATCHES):
            first = index * BLOCKS % self._num_rows
            self._engine.extents(
                self._memory,
                is_store=is_store,
                rows=range(first, first + BLOCKS),
                runs=[(self._fd, index * self._batch_bytes, BLOCKS)],
                keys=KEYS,
                prefix=b"floor\0",
            )
        num_ended = 0
        while num_ended < BATCHES:
            select.select([self._engine.fd], [], [])
            for _, outcome in self._engine.take():
                num_ended += 1
                assert outcome[0] == {}, outcome[0]

    def close(self) -> None:
        """End the threads."""
        assert self._engine.close(5.0) == 0


def plain(
    pool: ThreadPoolExecutor, buffer: bytearray, block_bytes: int, fd: int, *, is_store: bool
) -> None:
    """Move the same by one system call a batch, without checksums."""
    view, call = memoryview(buffer), os.pwritev if is_store else os.preadv
    size = BLOCKS * block_bytes

    def move(index: int) -> int:
        first = index * size % len(buffer)
        return call(fd, [view[first : first + size]], index * size)

    assert sum(pool.map(move, range(BATCHES))) == BATCHES * size


@contextmanager
def opened(folder: Path, size_bytes: int) -> Iterator[int]:
    """Yield a file whose pages are in the cache."""
    with TemporaryDirectory(dir=folder) as directory:
        fd = os.open(f"{directory}/floor", os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            yield fd
        finally:
            os.close(fd)


def measured(moves: Sequence[Callable[[], None]], rounds: int) -> list[tuple[float, float]]:
    """Return the best seconds of each, in alternation, and its processor seconds a round."""
    times: list[list[float]] = [[] for _ in moves]
    processor = [0.0 for _ in moves]
    for turn in range(rounds + 1):
        for index, move in enumerate(moves):
            used, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            move()
            if turn:  # the first warms up
                times[index].append(time.perf_counter() - start)
                now = resource.getrusage(resource.RUSAGE_SELF)
                processor[index] += now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return [(min(each), used / rounds) for each, used in zip(times, processor, strict=True)]


def main() -> None:
    """Measure, and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--piece", type=int, default=256, help="KiB")
    parser.add_argument("--part", type=int, default=1024, help="KiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, nargs="*", default=SIZES_KIB, help="KiB")
    options = parser.parse_args()
    what = f"{options.folder}, {options.threads} threads, {options.piece}/{options.part} KiB"
    sys.stdout.write(f"{what}: GiB/s (CPU s/GiB)\n")
    sys.stdout.write(f"{'block':>8} {'load':>14} {'preadv':>14} {'store':>14} {'pwritev':>14}\n")
    for block_bytes in (size << 10 for size in options.block):
        size = BATCHES * BLOCKS * block_bytes
        buffer = bytearray(os.urandom(1 << 20) * (min(size, 256 << 20) >> 20))
        with opened(options.folder, size) as fd, ThreadPoolExecutor(options.threads) as pool:
            native = Native(options, buffer, block_bytes, fd)
            moves = [
                partial(native.move, is_store=False),
                partial(plain, pool, buffer, block_bytes, fd, is_store=False),
                partial(native.move, is_store=True),
                partial(plain, pool, buffer, block_bytes, fd, is_store=True),
            ]
            gib = size / (1 << 30)
            cells = [
                f"{gib / seconds:7.2f} ({used / gib:.2f})"
                for seconds, used in measured(moves, options.rounds)
            ]
            native.close()
        line = " ".join(f"{cell:>14}" for cell in cells)
        sys.stdout.write(f"{block_bytes >> 10:>4} KiB {line}\n")


if __name__ == "__main__":
    main()
