"""A script: open an engine in each of the ways there are, on a mount that does not answer."""

import asyncio
import sys

import numpy as np
from faulty_files import FaultyFileOps
from fs.directories import FIELDS

from kvoffload_async import FileSystemTierManager, OffloadEngine, TieringOffloadingSpec
from kvoffload_async.errors import TierTimeoutError

TIMEOUT_S = 0.2


def tier_options(root: str) -> dict:
    ops = FaultyFileOps()
    ops.hang()
    return {"root_dir": root, "open_timeout_s": TIMEOUT_S, "ops": ops, "run_config": FIELDS}


def config(root: str) -> dict:
    return {
        "cpu_bytes_to_use": "64KiB",
        "block_bytes": 4096,
        "model": "m",
        "secondary_tiers": [{"type": "example"}, {"type": "fs", **tier_options(root)}],
    }


def open_manager(root: str) -> None:
    view = memoryview(np.zeros((4, 4096), np.uint8))
    FileSystemTierManager(None, view, **tier_options(root))


def open_spec(root: str) -> None:
    TieringOffloadingSpec(config(root)).get_manager()


def open_engine(root: str) -> None:
    async def run() -> None:
        async with OffloadEngine(config(root), lambda _view: None):
            pass

    asyncio.run(run())


if __name__ == "__main__":
    for way in (open_manager, open_spec, open_engine):
        try:
            way(sys.argv[1])
        except TierTimeoutError as error:
            sys.stdout.write(f"{error}\n")
