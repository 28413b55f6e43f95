"""Throughput of pages that are scattered in their slots, over that of contiguous pages.

One rank copies its pages of a model with 8 KV heads of 128 numbers of 2 bytes, in blocks of 16
tokens, K and V apart. Contiguous: each rank has a cell in a slot. Scattered: the ranks' fragments
alternate, as in vLLM's canonical layout; with heads before tokens (HND) a page has one fragment
each for K and V, with tokens before heads (NHD) one each for every token. Both sides alternate in
one process, in an order that changes with every round. Nothing is asserted about time.

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

MIB = 1 << 20
TOKENS, HEADS, HEAD_BYTES = 16, 8, 256
HALF_BYTES = TOKENS * HEADS * HEAD_BYTES
"""Bytes of all heads' keys in a block, or of their values."""
LAYERS, COPIED_BYTES = 8, 16 * MIB


def scattered_runs(ranks, order):
    """Return the runs of the first rank."""
    mine = HALF_BYTES // ranks
    if order == "HND":
        return [CopyRun(0, 0, mine, 2, mine, HALF_BYTES)]
    row = HEADS * HEAD_BYTES
    return [
        CopyRun(half * mine, half * HALF_BYTES, row // ranks, TOKENS, row // ranks, row)
        for half in range(2)
    ]


def copier_of(pages, rows, runs=()):
    """Return what copies between pages, a tensor for each layer, and rows."""
    size = 2 * HALF_BYTES if runs else pages[0].shape[1]
    tables = [PageTable(layer, at * size, size, runs) for at, layer in enumerate(pages)]
    return Copier(KVLayout([tables], 1, size * LAYERS), rows, 0)


def seconds(copier, direction, part):
    begun_s = time.perf_counter()
    copier.copy(direction, 0, part)
    return time.perf_counter() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize(
    ("order", "ranks"), [("HND", 2), ("HND", 4), ("HND", 8), ("NHD", 2), ("NHD", 8)]
)
def test_scattered_over_contiguous_copies(order, ranks, request):
    if implementation().name != "native":
        pytest.skip("the native module is not built")
    is_measured = request.config.getoption("--benchmark-enable")
    page_bytes, runs = 2 * HALF_BYTES // ranks, scattered_runs(ranks, order)
    rounds, num_blocks = (100, COPIED_BYTES // page_bytes // LAYERS) if is_measured else (1, 16)
    pages = [torch.ones(num_blocks, page_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    row_bytes = 2 * HALF_BYTES * LAYERS
    # Shared, as between vLLM's processes.
    rows = np.frombuffer(mmap.mmap(-1, num_blocks * row_bytes), dtype=np.uint8)
    rows[:] = 1
    rows = rows.reshape(num_blocks, row_bytes)
    copiers = {
        "contiguous": copier_of(pages, rows),
        "scattered": copier_of(pages, rows, runs),
    }
    rng = np.random.default_rng(0)
    orders = list(itertools.permutations(copiers))
    for direction in (Direction.STORE, Direction.LOAD):
        took_s = {name: [] for name in copiers}
        for number in range(rounds):
            blocks, slots = (rng.permutation(num_blocks).astype(np.int32) for _ in range(2))
            part = GroupCopies(blocks, slots, np.zeros_like(slots))
            for name in orders[number % len(orders)]:
                took_s[name].append(seconds(copiers[name], direction, part))
        pairs = zip(took_s["contiguous"], took_s["scattered"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        rates = {
            name: num_blocks * LAYERS * page_bytes / MIB / statistics.median(times)
            for name, times in took_s.items()
        }
        print(  # noqa: T201 - the figures are what this is for
            f"\n{order}, {ranks} ranks, fragments of {runs[0].fragment_bytes:5} bytes, "
            f"{direction.name.lower():5}: {rates['scattered']:6,.0f} MiB/s, contiguous "
            f"{rates['contiguous']:6,.0f} MiB/s, median of pairs {ratio:.2f}"
        )
    for copier in copiers.values():
        copier.close()
