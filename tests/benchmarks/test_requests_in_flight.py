"""What a block costs `OffloadEngine`'s loop with few and with many requests in flight.

Method: one process and one thread, the loop's. Tier and device move no bytes: each operation ends
after a millisecond, a bounded number at a time, so that many requests wait for one another's room
in the tier. A request looks up 16 blocks, of which the tier has the first 8, loads those and stores
the others. As soon as one ends, the next begins. The processor time of the thread is taken, divided
by all blocks of all requests. The sizes take turns, three rounds of them; printed is the best of
each, and its ratio to that of the fewest requests, which is the floor. Nothing is asserted about
time; that a request asks for its blocks as often among many as among few is, in
`tests/async_engine/test_waking.py`. The goal is a ratio of at most 1.3.

    pytest tests/benchmarks/test_requests_in_flight.py --benchmark-enable

Without the option it only shows that it works, with few requests.
"""

import asyncio
import gc
import hashlib
import time

import pytest

from kvoffload_async import AsyncTier, OffloadEngine, TierCapabilities
from kvoffload_async.abc.tier import TierBounds
from kvoffload_async.abc.transport import TransferOutcome, Transport
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.transport.completion import CompletableTransfer
from kvoffload_async.types import make_offload_key

pytestmark = pytest.mark.bench

KNOWN_BLOCKS, NEW_BLOCKS = 8, 8
SLOT_BYTES = 4096
OPERATION_S = 0.001
MEASURED_SIZES, MEASURED_REQUESTS, MEASURED_ROUNDS = (16, 128, 512), 1024, 3
PLAIN_SIZES, PLAIN_REQUESTS, PLAIN_ROUNDS = (2, 8), 16, 1


def hashes(number):
    """Return the chained hashes of a request's blocks."""
    blocks = range(KNOWN_BLOCKS + NEW_BLOCKS)
    return [hashlib.sha256(b"%d %d" % (number, block)).digest() for block in blocks]


class IdleTier(AsyncTier):
    """Has the first blocks of every request, and moves no bytes."""

    capabilities = TierCapabilities(exclusive=True)
    bounds = TierBounds(concurrent_loads=8, concurrent_stores=8, queued_jobs=4096)

    def __init__(self, requests=0):
        self.requests = requests

    async def open(self, env):
        for number in range(self.requests):
            env.blocks_appeared([make_offload_key(h) for h in hashes(number)[:KNOWN_BLOCKS]])

    async def contains(self, keys):
        return frozenset()

    async def store(self, job):
        await asyncio.sleep(OPERATION_S)
        return {}

    async def load(self, job):
        await asyncio.sleep(OPERATION_S)
        return {}

    async def close(self):
        pass


class IdleTransport(Transport):
    """Ends every copy after a while, and moves no bytes."""

    def __init__(self, loop):
        self.loop = loop

    def record_compute(self):
        return None

    def submit(self, copies, after):
        transfer = CompletableTransfer()
        self.loop.call_later(OPERATION_S, transfer.end, TransferOutcome(0))
        return transfer

    def close(self, timeout_s):
        return True


async def serve(engine, numbers):
    """Serve requests one after the other."""
    for number in numbers:
        async with engine.request(f"r{number}", hashes(number)) as request:
            found = await engine.lookup(request)
            assert found == KNOWN_BLOCKS
            await engine.load(request, range(found))
            await engine.store(request, range(found, len(request.keys)), found)


async def seconds_a_block(in_flight, requests):
    """Return the processor time of a block."""
    loop = asyncio.get_running_loop()
    config = {
        "cpu_bytes_to_use": 2 * requests * (KNOWN_BLOCKS + NEW_BLOCKS) * SLOT_BYTES,
        "block_bytes": SLOT_BYTES,
        "model": "bench",
        "prefault": False,
        "secondary_tiers": [{"type": "idle", "requests": requests}],
    }
    async with OffloadEngine(config, lambda _view: IdleTransport(loop)) as engine:
        numbers = iter(range(requests))
        gc.collect()
        began_s = time.thread_time()
        async with asyncio.TaskGroup() as workers:
            for _ in range(in_flight):
                workers.create_task(serve(engine, numbers))
        seconds = time.thread_time() - began_s
        await engine.quiesce()
    return seconds / (requests * (KNOWN_BLOCKS + NEW_BLOCKS))


def test_the_cost_of_a_block_with_few_and_with_many_requests_in_flight(
    benchmark, capsys, request, monkeypatch
):
    registry = SecondaryTierFactory._registry
    monkeypatch.setattr(registry, "_loaders", {**registry._loaders, "idle": lambda: IdleTier})
    sizes, requests, rounds = PLAIN_SIZES, PLAIN_REQUESTS, PLAIN_ROUNDS
    if request.config.getoption("benchmark_enable"):
        sizes, requests, rounds = MEASURED_SIZES, MEASURED_REQUESTS, MEASURED_ROUNDS
    best = benchmark.pedantic(costs, (sizes, requests, rounds))
    with capsys.disabled():
        for in_flight, seconds in best.items():
            ratio = seconds / best[sizes[0]]
            tell(
                f"\n{in_flight} in flight: {1e6 * seconds:.1f} us a block, {ratio:.2f} of the floor"
            )


def costs(sizes, requests, rounds):
    """Return the best cost of each size; the sizes take turns."""
    best = dict.fromkeys(sizes, float("inf"))
    for _ in range(rounds):
        for in_flight in sizes:
            best[in_flight] = min(
                best[in_flight], asyncio.run(seconds_a_block(in_flight, requests))
            )
    return best


def tell(text):
    print(text)  # noqa: T201 - what a benchmark is for
