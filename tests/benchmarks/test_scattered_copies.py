"""Throughput of pages that are scattered in their slots, over that of contiguous pages.

A rank copies pages of 64 KiB to and from rows with the pages of eight ranks. Contiguous: each rank
has a cell. Scattered: fragments of all ranks alternate, as in vLLM's canonical layout; 256 bytes
are one head of a token at a tensor-parallel size of 8, with tokens before heads (NHD). Both sides
alternate in one process, in an order that changes with every round. Nothing is asserted about
time.

    pytest tests/benchmarks/test_scattered_copies.py --benchmark-enable -s

As a plain test it is one small round.
"""

import itertools
import mmap
import statistics
import time

import numpy as np
import pytest
import torch

from kvoffload_async.abc.tier import Direction
from kvoffload_async.abc.transport import GroupCopies
from kvoffload_async.block_io.choice import implementation
from kvoffload_async.transport.host import Copier
from kvoffload_async.transport.layout import CopyRun, KVLayout, PageTable

KIB, MIB = 1 << 10, 1 << 20
RANKS, PAGE_BYTES, LAYERS = 8, 64 * KIB, 4


class Side:
    """The copies of one rank with one layout."""

    def __init__(self, pages, rows, fragment_bytes):
        self.rows = rows
        count = PAGE_BYTES // fragment_bytes
        run = CopyRun(0, 0, fragment_bytes, count, fragment_bytes, RANKS * fragment_bytes)
        if count == 1:
            run = CopyRun(0, 0, PAGE_BYTES)
        size = RANKS * PAGE_BYTES
        tables = [
            PageTable(layer, number * size, size, [run]) for number, layer in enumerate(pages)
        ]
        self.copier = Copier(KVLayout([tables], 1, size * LAYERS), rows, 0)

    def seconds(self, direction, part):
        begun_s = time.perf_counter()
        self.copier.copy(direction, 0, part)
        return time.perf_counter() - begun_s


def rows_of(num_slots):
    """Return slots in memory that is shared, as it is between vLLM's processes."""
    row_bytes = RANKS * PAGE_BYTES * LAYERS
    rows = np.frombuffer(mmap.mmap(-1, num_slots * row_bytes), dtype=np.uint8)
    rows[:] = 1
    return rows.reshape(num_slots, row_bytes)


@pytest.mark.bench
@pytest.mark.parametrize("fragment_bytes", [256, 1 * KIB, 4 * KIB, 16 * KIB])
def test_scattered_over_contiguous_copies(fragment_bytes, request):
    if implementation().name != "native":
        pytest.skip("the native module is not built")
    is_measured = request.config.getoption("--benchmark-enable")
    rounds, num_blocks = (60, 64) if is_measured else (1, 4)
    pages = [torch.ones(num_blocks, PAGE_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
    rows = rows_of(num_blocks)
    sides = {
        "contiguous": Side(pages, rows, PAGE_BYTES),
        "scattered": Side(pages, rows, fragment_bytes),
    }
    rng = np.random.default_rng(0)
    orders = list(itertools.permutations(sides))
    for direction in (Direction.STORE, Direction.LOAD):
        took_s = {name: [] for name in sides}
        for number in range(rounds):
            blocks, slots = (rng.permutation(num_blocks).astype(np.int32) for _ in range(2))
            part = GroupCopies(blocks, slots, np.zeros_like(slots))
            for name in orders[number % len(orders)]:
                took_s[name].append(sides[name].seconds(direction, part))
        pairs = zip(took_s["contiguous"], took_s["scattered"], strict=True)
        rates = {
            name: num_blocks * LAYERS * PAGE_BYTES / MIB / statistics.median(seconds)
            for name, seconds in took_s.items()
        }
        print(  # noqa: T201 - the figures are what this is for
            f"\n{direction.name.lower():5} fragments of {fragment_bytes:5} bytes: scattered "
            f"{rates['scattered']:7,.0f} MiB/s, contiguous {rates['contiguous']:7,.0f} MiB/s; "
            f"median of pairs {statistics.median(one / other for one, other in pairs):.2f}"
        )
    for side in sides.values():
        side.copier.close()
