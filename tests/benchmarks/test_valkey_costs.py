"""CPU seconds per GiB that this process spends on loads and stores through Valkey.

Compared: the tier, with verified blocks; redis-py's pipelines, which read each block through a
stream reader, hiredis and a `bytes` object into its row, and are verified too; and LMCache's client
in C++ where it is installed, which verifies nothing. The server is a process of its own, so its
time does not count. Rounds alternate, so that all sides see the same machine.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round. The
figures belong to docs/remote-tiers.md.
"""

import asyncio
import importlib.machinery
import importlib.util
import itertools
import os
import select
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import xxhash
from redis.asyncio import Redis
from servers.valkey import ValkeyServer

from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.remote.settings import RemoteSettings
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.tier import ValkeyTier

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
JOB_BLOCKS = 64
VOLUME_BYTES = 128 * MIB
PORTION_BYTES = 4 * MIB
ROUNDS = 5
TIMEOUT_S = 100.0
CONNECTIONS = RemoteSettings().connections
LABEL_NAME_BYTES = len("kvo:") + 32
"""The tier's label, which is not deleted between rounds."""
LIMITS = {64: (0.65, 0.5), 256: (0.5, 0.5), 1024: (0.5, 0.5), 4096: (0.5, 0.5)}
"""KiB a block -> what a load and a store of the tier should cost at most, in CPU seconds per GiB,
on the machine on which LMCache's client needs 0.22 to 0.32."""


class Tier:
    """The product's tier."""

    def __init__(self, server, harness):
        self._harness = harness
        self._numbers = itertools.count()

    def next_keys(self):
        self._keys = [key_of(next(self._numbers)) for _ in self._harness.rows]

    def store(self):
        self._run(is_promotion=False)

    def load(self):
        self._run(is_promotion=True)

    def _run(self, *, is_promotion):
        tier, count = self._harness.tier, len(self._keys)
        run = tier.load if is_promotion else tier.store

        async def move(first):
            slots = range(first, min(count, first + JOB_BLOCKS))
            keys = [self._keys[slot] for slot in slots]
            assert not await run(make_job(first, keys, slots, is_promotion=is_promotion))

        async def move_all():
            async with asyncio.TaskGroup() as group:
                for first in range(0, count, JOB_BLOCKS):
                    group.create_task(move(first))

        self._harness.run(move_all())

    def close(self):
        pass


class RedisPy:
    """Pipelines of the library, as many at once as the tier has connections; XXH3 of each block."""

    def __init__(self, server, harness):
        self._harness = harness
        self._library = Redis(host="127.0.0.1", port=server.port)
        self._numbers = itertools.count()
        self._digests = {}

    def next_keys(self):
        self._names = [f"redis-py:{next(self._numbers)}" for _ in self._harness.rows]

    def store(self):
        self._run(self._put)

    def load(self):
        self._run(self._get)

    def _run(self, operation):
        rows = self._harness.rows
        step = max(1, PORTION_BYTES // rows.shape[1])
        portions = iter(range(0, len(rows), step))

        async def work():
            for first in portions:
                await operation(range(first, min(len(rows), first + step)))

        async def work_all():
            async with asyncio.TaskGroup() as group:
                for _ in range(CONNECTIONS):
                    group.create_task(work())

        self._harness.run(work_all())

    async def _put(self, numbers):
        async with self._library.pipeline(transaction=False) as pipeline:
            for number in numbers:
                content = self._harness.rows[number].copy().data
                self._digests[number] = xxhash.xxh3_128_digest(content)
                pipeline.set(self._names[number], content, nx=True)
            await pipeline.execute()

    async def _get(self, numbers):
        async with self._library.pipeline(transaction=False) as pipeline:
            for number in numbers:
                pipeline.get(self._names[number])
            found = await pipeline.execute()
        for number, data in zip(numbers, found, strict=True):
            self._harness.rows[number] = np.frombuffer(data, dtype=np.uint8)
            digest = xxhash.xxh3_128_digest(self._harness.rows[number].data)
            assert digest == self._digests[number]

    def close(self):
        self._harness.run(self._library.aclose())


def lmcache_client():
    """Return LMCache's module in C++; None unless the package is installed.

    It is loaded without its package, whose import would need CUDA.
    """
    found = importlib.util.find_spec("lmcache")
    for folder in found.submodule_search_locations if found else ():
        for path in Path(folder).glob("lmcache_redis*.so"):
            importlib.import_module("torch")  # it is linked with its library
            loader = importlib.machinery.ExtensionFileLoader("lmcache.lmcache_redis", str(path))
            spec = importlib.util.spec_from_loader(loader.name, loader)
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            return module
    return None


class LMCache:
    """LMCache's client in C++: threads that read into the rows, and verify nothing."""

    def __init__(self, server, harness):
        self._harness = harness
        self._client = lmcache_client().LMCacheRedisClient("127.0.0.1", server.port, CONNECTIONS)
        self._numbers = itertools.count()

    def next_keys(self):
        self._names = [f"lmcache:{next(self._numbers)}" for _ in self._harness.rows]

    def store(self):
        self._run(self._client.submit_batch_set)

    def load(self):
        self._run(self._client.submit_batch_get)

    def _run(self, submit):
        rows = self._harness.rows
        pending = set()
        for first in range(0, len(rows), JOB_BLOCKS):
            some = rows[first : first + JOB_BLOCKS]
            names = self._names[first : first + JOB_BLOCKS]
            pending.add(submit(names, [row.data for row in some]))
        while pending:
            assert select.select([self._client.event_fd()], [], [], TIMEOUT_S)[0]
            os.read(self._client.event_fd(), 8)
            for ended in self._client.drain_completions():
                assert ended[1], ended
                pending.discard(ended[0])

    def close(self):
        self._client.close()


def cpu_seconds(call):
    begun_s = time.process_time()
    call()
    return time.process_time() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize("block_kib", list(LIMITS))
def test_cpu_seconds_per_gib(tmp_path, request, block_kib):
    is_measured = request.config.getoption("--benchmark-enable")
    block_bytes = block_kib * KIB
    count, rounds = (VOLUME_BYTES // block_bytes, ROUNDS) if is_measured else (4, 1)
    rows = np.random.default_rng(1).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    kinds = [Tier, RedisPy, *([LMCache] if lmcache_client() else [])]
    figures = {(kind, phase): [] for kind in kinds for phase in ("store", "load")}
    with ExitStack() as stack:
        server = stack.enter_context(ValkeyServer(tmp_path))
        admin = stack.enter_context(server.client())
        deadlines = {"call_timeout_s": TIMEOUT_S, "job_timeout_s": TIMEOUT_S}
        tier = ValkeyTier(ValkeySettings(address=Address.parse(server.url()), **deadlines))
        harness = stack.enter_context(TierHarness(tier, count, block_bytes, TIMEOUT_S))
        sides = [kind(server, harness) for kind in kinds]
        harness.rows[:] = rows
        for number in range(rounds + is_measured):  # the first one warms up
            for side in sides:
                side.next_keys()
                for phase in ("store", "load"):
                    if phase == "load":
                        harness.rows[:] = 0
                    took_s = cpu_seconds(getattr(side, phase))
                    assert np.array_equal(harness.rows, rows)
                    if number >= is_measured:
                        figures[type(side), phase].append(took_s)
                names = admin.keys("*")
                admin.delete(*(name for name in names if len(name) != LABEL_NAME_BYTES))
            sides.reverse()
        for side in sides:
            side.close()
    gib = count * block_bytes / GIB
    for (kind, phase), seconds in figures.items():
        cost = statistics.median(seconds) / gib
        print(f"\n{kind.__name__:8} {phase:5} {block_kib:4} KiB: {cost:.2f} CPU s/GiB")  # noqa: T201
