"""Files, rows, and both implementations that move bytes between them."""

import asyncio
import contextlib
import os

import numpy as np

from kvoffload_async.abc.tier import Direction
from kvoffload_async.block_io.choice import _obstacle
from kvoffload_async.block_io.contract import Run
from kvoffload_async.block_io.python_io import PythonBlockIo
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.tiers.files.digests import BlockDigester
from kvoffload_async.tiers.files.ops import FileOps

IMPLEMENTATIONS = ["python", "native"]
ROW = 4096
WAIT_S = 60.0
DIGESTER = BlockDigester("layout")


def is_built() -> bool:
    return not _obstacle()


def key_of(number: int) -> bytes:
    return b"key %d" % number


class World:
    """Rows with known bytes, files, and a `BlockIo` between them."""

    def __init__(self, io, rows, ops, folder):
        self.io = io
        self.rows = rows
        self.ops = ops
        self.folder = folder
        self.fds: list[int] = []
        self.tasks: list[asyncio.Task] = []

    def file(self, name: str = "file") -> int:
        path = str(self.folder / name)
        fd = self.ops.open(path, os.O_RDWR | os.O_CREAT)
        self.fds.append(fd)
        return fd

    async def store(self, rows, runs, keys=None, **options):
        return await self.move(Direction.STORE, rows, runs, keys, **options)

    async def load(self, rows, runs, keys=None, **options):
        return await self.move(Direction.LOAD, rows, runs, keys, **options)

    async def move(self, direction, rows, runs, keys=None, **options):
        moving = self.io.extents(direction, rows, [Run(*run) for run in runs], keys, **options)
        return await asyncio.wait_for(moving, WAIT_S)

    def begin(self, direction, rows, runs):
        runs = [Run(*run) for run in runs]
        self.tasks.append(asyncio.create_task(self.io.extents(direction, rows, runs, None)))
        return self.tasks[-1]

    def digests(self, rows, keys) -> bytes:
        return b"".join(DIGESTER.digests(keys, [self.rows[row].data for row in rows]))


@contextlib.asynccontextmanager
async def world(
    implementation, folder, *, num_rows=16, row_bytes=ROW, slot_bytes=None, threads=2, ops=None
):
    """Open a world; everything is closed afterwards, and nothing held."""
    slot_bytes = slot_bytes or row_bytes
    rows = np.random.default_rng(7).integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)
    pool = IoPool(2, 2, 1)
    view = memoryview(rows)
    calls = ops or FileOps()
    if implementation == "native":
        from kvoffload_async.block_io.native_io import NativeBlockIo

        io = NativeBlockIo(pool, ops, view, DIGESTER.prefix, slot_bytes, threads=threads)
    else:
        io = PythonBlockIo(
            *(pool, calls, view, DIGESTER, slot_bytes),
            threads=threads,
            piece_bytes=4 * slot_bytes,
        )
    here = World(io, rows, calls, folder)
    try:
        yield here
    finally:
        if ops is not None:
            ops.heal()
        if here.tasks:
            await asyncio.wait(here.tasks, timeout=WAIT_S)
        await io.close()
        await io.close()
        for fd in here.fds:
            os.close(fd)
        assert pool.close(WAIT_S) == 0
        view.release()  # raises if somebody still holds it


def run(scenario, implementation, folder, **options):
    """Run a scenario in a world of its own."""

    async def perform():
        async with world(implementation, folder, **options) as here:
            return await scenario(here)

    return asyncio.run(perform())


async def until(condition) -> None:
    """Wait for what another thread does; the test's own timeout is the deadline."""
    while not condition():  # noqa: ASYNC110 - changed by another thread
        await asyncio.sleep(0)
