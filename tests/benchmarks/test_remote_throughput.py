"""Store and load through a remote tier against its client library alone, in one run.

The library alone, with its own defaults, makes as many calls at once as the tier has connections,
from the same loop: each block is one put or get, one copy out of its row or into it, and one XXH3
of 128 bits. Mooncake's blocks: its calls take the blocks of a job each, on as many threads as the
tier has, from and into the rows, without a copy. The tier is behind its manager,
with all jobs submitted at once, and asks before each store what is there.
Rounds alternate, so that both sides see the same machine.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round. The
S3 server needs time: `KVOFFLOAD_SERVERS=all` lets it have it, and Mooncake's library. The figures
belong to docs/remote-tiers.md.
"""

import asyncio
import itertools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import obstore
import pytest
import xxhash
from redis.asyncio import Redis
from servers.mooncake import Library, MooncakeMaster
from servers.process import at_length
from servers.seaweedfs import SeaweedServer
from servers.valkey import ValkeyServer

from kvoffload_async.testing.harness import ManagerHarness, key_of, make_job
from kvoffload_async.tiers.mooncake.tier import MooncakeTier
from kvoffload_async.tiers.object.tier import ObjectTier
from kvoffload_async.tiers.remote.settings import RemoteSettings
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.tier import ValkeyTier

KIB, MIB = 1 << 10, 1 << 20
JOB_BLOCKS = 16
JOBS = {64: 16, 1024: 8, 4096: 4}
"""By KiB a block."""
ROUNDS, LOADS = 5, 2
TIMEOUT_S = 100.0
THREADS = 2
"""As many as a tier has here by default: each helps in the direction that it does not prefer."""
DEADLINES = {"call_timeout_s": TIMEOUT_S, "job_timeout_s": TIMEOUT_S}
REMOTE = RemoteSettings()


class Valkey:
    """A server, which forgets what was stored between rounds."""

    def __init__(self, folder, stack):
        server = stack.enter_context(ValkeyServer(folder))
        address = Address.parse(server.url())
        self.tier = ValkeyTier(ValkeySettings(address=address, **DEADLINES))
        self._admin = stack.enter_context(server.client())
        self._library = Redis(host="127.0.0.1", port=server.port)

    async def put(self, name, content):
        await self._library.set(name, content, nx=True)

    async def get(self, name):
        return await self._library.get(name)

    async def close(self):
        await self._library.aclose()

    def forget(self):
        names = list(self._admin.scan_iter("*:*:*", count=1000))  # all but the tier's label
        if names:
            self._admin.delete(*names)


class Object:
    """A server, which keeps everything: its space comes back much later than objects go."""

    def __init__(self, folder, stack):
        server = stack.enter_context(SeaweedServer(folder, "-volume.max=200"))
        connection = server.connection("tier", timeout_s=TIMEOUT_S)
        self.tier = ObjectTier(replace(connection, **DEADLINES))
        self._store = server.connection("alone", timeout_s=TIMEOUT_S).open()

    async def put(self, name, content):
        await obstore.put_async(self._store, name, content, mode="create", use_multipart=False)

    async def get(self, name):
        return await (await obstore.get_async(self._store, name)).bytes_async()

    async def close(self):
        pass

    def forget(self):
        pass


class Mooncake:
    """A master, and a client that gives it memory; what was stored is removed between rounds."""

    def __init__(self, folder, stack):
        os.environ.setdefault("MC_FORCE_TCP", "1")  # read by the library
        self._master = stack.enter_context(MooncakeMaster(folder, segment_bytes=2 << 30))
        self.tier = MooncakeTier(self._master.connection())
        self.library = Library(self._master.connection())

    async def close(self):
        self.library.close()

    def forget(self):
        self._master.host.store.remove_all(True)


class LibraryAlone:
    def __init__(self, harness, server):
        self._harness = harness
        self._server = server
        self._round = itertools.count()

    def next_keys(self):
        first = f"alone:{next(self._round)}"
        self._names = [f"{first}:{number}" for number in range(len(self._harness.rows))]
        self._digests = [b""] * len(self._names)

    def store(self):
        self._run(self._put)

    def load(self):
        self._run(self._get)

    def _run(self, operation):
        async def perform():
            numbers = iter(range(len(self._names)))

            async def work():
                for number in numbers:
                    await operation(number)

            async with asyncio.TaskGroup() as group:
                for _ in range(REMOTE.connections):
                    group.create_task(work())

        self._harness.run(perform())

    async def _put(self, number):
        content = self._harness.rows[number].copy().data
        self._digests[number] = xxhash.xxh3_128_digest(content)
        await self._server.put(self._names[number], content)

    async def _get(self, number):
        content = np.frombuffer(await self._server.get(self._names[number]), dtype=np.uint8)
        assert xxhash.xxh3_128_digest(content.data) == self._digests[number]
        self._harness.rows[number] = content


class BlockingLibraryAlone(LibraryAlone):
    """The same where calls block, and take many blocks each."""

    def __init__(self, harness, server):
        super().__init__(harness, server)
        rows = harness.rows
        server.library.register(rows.ctypes.data, rows.nbytes)

    def _run(self, operation):
        count = len(self._names)
        portions = [range(at, min(count, at + JOB_BLOCKS)) for at in range(0, count, JOB_BLOCKS)]
        with ThreadPoolExecutor(THREADS) as pool:
            for statuses in pool.map(operation, portions):
                assert min(statuses) >= 0

    def _memory_of(self, portion):
        rows = self._harness.rows
        names = [self._names[number] for number in portion]
        addresses = [[rows[number].ctypes.data] for number in portion]
        return names, addresses, [[rows.shape[1]] for _ in portion]

    def _put(self, portion):
        for number in portion:
            self._digests[number] = xxhash.xxh3_128_digest(self._harness.rows[number].data)
        return self._server.library.put(*self._memory_of(portion))

    def _get(self, portion):
        statuses = self._server.library.get(*self._memory_of(portion))
        for number in portion:
            digest = xxhash.xxh3_128_digest(self._harness.rows[number].data)
            assert digest == self._digests[number]
        return statuses


class TierSide:
    def __init__(self, harness):
        self._harness = harness
        self._keys = itertools.count()
        self._job_ids = itertools.count(1)

    def next_keys(self):
        self._names = [key_of(next(self._keys)) for _ in self._harness.rows]

    def store(self):
        self._run(is_promotion=False)

    def load(self):
        self._run(is_promotion=True)

    def _run(self, *, is_promotion):
        count, harness = len(self._names), self._harness
        for first in range(0, count, JOB_BLOCKS):
            slots = range(first, min(count, first + JOB_BLOCKS))
            keys = [self._names[slot] for slot in slots]
            harness.submit(make_job(next(self._job_ids), keys, slots, is_promotion=is_promotion))
        harness.wait()
        assert all(result.success for result in harness.results)


def seconds(call):
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize("block_kib", list(JOBS))
@pytest.mark.parametrize(
    "server_of",
    [
        Valkey,
        pytest.param(Object, marks=[at_length, pytest.mark.servers]),
        pytest.param(Mooncake, marks=[at_length, pytest.mark.servers]),
    ],
)
def test_throughput_against_the_client_library(tmp_path, request, server_of, block_kib):
    is_measured = request.config.getoption("--benchmark-enable")
    rounds, loads = (ROUNDS, LOADS) if is_measured else (1, 1)
    count = JOBS[block_kib] * JOB_BLOCKS if is_measured else 4
    block_bytes = block_kib * KIB
    rows = np.random.default_rng(1).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    figures = {"store": [], "load": []}
    with ExitStack() as stack:
        server = server_of(tmp_path, stack)
        harness = stack.enter_context(
            ManagerHarness(server.tier, count, block_bytes, TIMEOUT_S, io_timeout_s=TIMEOUT_S)
        )
        alone = BlockingLibraryAlone if server_of is Mooncake else LibraryAlone
        sides = {"alone": alone(harness, server), "tier": TierSide(harness)}
        order = list(sides)
        harness.rows[:] = rows
        for number in range(rounds + is_measured):  # the first one warms up
            server.forget()
            for side in sides.values():
                side.next_keys()
            for phase in ["store"] + ["load"] * loads:
                took_s = {}
                for name in order:
                    if phase == "load":
                        harness.rows[:] = 0
                    took_s[name] = seconds(getattr(sides[name], phase))
                    assert np.array_equal(harness.rows, rows)
                if number >= is_measured:
                    figures[phase].append((took_s["alone"], took_s["tier"]))
                order.reverse()
        harness.run(server.close())
    mib = count * block_bytes / MIB
    for phase, pairs in figures.items():
        ratio = statistics.median(alone_s / tier_s for alone_s, tier_s in pairs)
        alone, tier = (mib / statistics.median(side) for side in zip(*pairs, strict=True))
        print(  # noqa: T201 - the figures are what this is for
            f"\n{server_of.__name__.lower():6} {phase:5} {block_kib:5} KiB: "
            f"alone {alone:5,.0f} MiB/s, tier {tier:5,.0f} MiB/s, ratio {ratio:.2f}"
        )
