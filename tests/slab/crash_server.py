"""Workloads on a `slab` store, and the server that runs them. Its own script."""

import random
from collections.abc import Callable
from pathlib import Path

from crashes import load, serve
from faulty_files import FaultyFileOps
from slab.stores import BLOCK, FIXED, KIB, SlabStore

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierFullError
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.slab import layout

K = [key_of(number) for number in range(60)]
BAD = K[1]
CAPACITY = FIXED + 14 * BLOCK
OPTIONS = {"capacity_bytes": CAPACITY, "segment_bytes": 24 * KIB, "io_threads": 2, "stripes": 2}


class UnsyncedFileOps(FaultyFileOps):
    """A kill loses nothing that was written: waiting for the device would test nothing here."""

    def fdatasync(self, fd: int) -> None:
        self._before_fd("fdatasync", fd)


def scripted(
    root: str, kill_at: int | None, *, torn: bool = False, verify: bool | str = True
) -> dict:
    """A workload that makes the same calls every time: grow, evict, compact, find a bad block."""
    ops = UnsyncedFileOps()
    if kill_at is not None:
        ops.kill(kill_at, torn=torn)
    slab_store = SlabStore(Path(root))
    with slab_store.open(ops, verify=verify, **OPTIONS) as harness:
        for first in range(0, 12, 3):
            harness.store(K[first : first + 3])
        load_or_miss(harness, K[:3])
        if verify:
            slab_store.damage(BAD)
        load_or_miss(harness, [K[0], BAD])
        for first in range(12, 36, 4):
            harness.store(K[first : first + 4])
    with slab_store.open(ops, verify=verify, **OPTIONS) as harness:
        harness.store(K[36:38])
        load_or_miss(harness, K[30:38])
    return {"calls": [call.name for call in ops.calls]}


def replacing(
    root: str, kill_at: int | None, *, torn: bool = False, verify: bool | str = True
) -> dict:
    """Replace the store of another identity, which has blocks of the same keys."""
    slab_store = SlabStore(Path(root))
    with slab_store.open_other(UnsyncedFileOps(), verify=verify, **OPTIONS) as harness:
        for first in range(0, 15, 3):
            harness.store(K[first : first + 3])
    ops = UnsyncedFileOps()
    if kill_at is not None:
        ops.kill(kill_at, torn=torn)
    with slab_store.open(ops, on_mismatch="replace", verify=verify, **OPTIONS) as harness:
        load_or_miss(harness, K[:15])
        for first in (3, 12):
            harness.store(K[first : first + 6])
        load_or_miss(harness, K[:18])
    return {"calls": [call.name for call in ops.calls]}


def load_or_miss(harness: TierHarness, keys) -> None:
    """Load blocks, some of which may be missing or bad."""
    for error in load(harness, keys).values():
        if not isinstance(error, BlockMissingError | CorruptBlockError):
            raise error


def traffic(root: str, seed: int, *, verify: bool | str = True) -> dict:
    """Random stores and loads until the process is killed."""
    return work(SlabStore(Path(root)).open, seed, verify=verify)


def contested(root: str, seed: int, *, other: bool, verify: bool | str = True) -> dict:
    """The same, on a store that may be another identity's until then."""
    slab_store = SlabStore(Path(root))
    open_store = slab_store.open_other if other else slab_store.open
    return work(open_store, seed, verify=verify, on_mismatch="replace")


def work(open_store: Callable[..., TierHarness], seed: int, **given) -> dict:
    draw = random.Random(seed)
    options = OPTIONS | {"io_threads": 3, "piece_bytes": 2 * BLOCK} | given
    with open_store(**options) as harness:
        while True:
            keys = draw.sample(K, draw.randint(1, 8))
            if draw.random() < 0.7:
                for error in harness.store(keys).values():
                    if not isinstance(error, TierFullError):
                        raise error
            else:
                load_or_miss(harness, keys)


if __name__ == "__main__":
    layout._LEAST_STRIPE = 4  # so that a store as small as this one has stripes
    serve(scripted=scripted, replacing=replacing, traffic=traffic, contested=contested)
