"""A prompt of 312 blocks of 1 MiB over a link of 50 ms: seconds as a multiple of bytes / limit.

Beside the tiers, verified: plain clients with as many calls at once, and LMCache's client in C++
where it is installed. Rounds alternate.

Run with `--benchmark-enable -s` for the measured size; as a plain test it is one small round.
"""

import asyncio
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import obstore
import pytest
from benchmarks.test_valkey_costs import LMCache, RedisPy, Tier, lmcache_client
from servers.link import Link
from servers.process import at_length
from servers.seaweedfs import SeaweedServer
from servers.valkey import ValkeyServer

from kvoffload_async.testing import TierHarness
from kvoffload_async.tiers.object.tier import ObjectTier
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.tier import ValkeyTier

MIB = 1 << 20
PROMPT, ROUNDS = 312, 5
BYTES_PER_S = 150 * MIB
RTT_S = 0.05
TIMEOUT_S = 100.0
DEADLINES = {"call_timeout_s": TIMEOUT_S, "job_timeout_s": TIMEOUT_S}
CALLS = 256
"""Calls at once of the plain client of an object store: the tier's `connections`."""


class Obstore:
    """The library alone: as many GETs at once as the tier may have, each body into its row."""

    def __init__(self, connection, harness):
        self._harness, self._store = harness, connection.open()

    def next_keys(self):
        pass

    def store(self):
        self._run(self._put)

    def load(self):
        self._run(self._get)

    def _run(self, operation):
        async def move_all():
            numbers = iter(range(len(self._harness.rows)))

            async def work():
                for number in numbers:
                    await operation(number)

            async with asyncio.TaskGroup() as group:
                for _ in range(CALLS):
                    group.create_task(work())

        self._harness.run(move_all())

    async def _put(self, number):
        content = self._harness.rows[number].copy().data
        await obstore.put_async(self._store, f"alone-{number}", content, use_multipart=False)

    async def _get(self, number):
        content = await (await obstore.get_async(self._store, f"alone-{number}")).bytes_async()
        self._harness.rows[number] = np.frombuffer(content, dtype=np.uint8)

    def close(self):
        pass


def valkey(folder, stack):
    """Return a link to a server, a tier over it, and what makes the other sides."""
    server = stack.enter_context(ValkeyServer(folder))
    link = stack.enter_context(Link(server.port, BYTES_PER_S, RTT_S))
    tier = ValkeyTier(ValkeySettings(address=Address.parse(server.url(link.port)), **DEADLINES))
    sides = [Tier, RedisPy, *([LMCache] if lmcache_client() else [])]
    return tier, [lambda harness, side=side: side(link, harness) for side in sides]


def object_store(folder, stack):
    server = stack.enter_context(SeaweedServer(folder, "-volume.max=200"))
    link = stack.enter_context(Link(server.port, BYTES_PER_S, RTT_S))
    options = {"port": link.port, "timeout_s": TIMEOUT_S}
    tier = ObjectTier(replace(server.connection("tier", **options), **DEADLINES))
    plain = server.connection("alone", **options)
    return tier, [
        lambda harness: Tier(link, harness),
        lambda harness: Obstore(plain, harness),
    ]


@pytest.mark.bench
@pytest.mark.parametrize(
    "store_of",
    [valkey, pytest.param(object_store, marks=[at_length, pytest.mark.servers])],
)
def test_a_prompt_over_a_link(tmp_path, request, store_of):
    is_measured = request.config.getoption("--benchmark-enable")
    count, rounds = (PROMPT, ROUNDS) if is_measured else (4, 1)
    rows = np.random.default_rng(1).integers(0, 256, (count, MIB), dtype=np.uint8)
    with ExitStack() as stack:
        tier, makers = store_of(tmp_path, stack)
        harness = stack.enter_context(TierHarness(tier, count, MIB, TIMEOUT_S))
        sides = [make(harness) for make in makers]
        took_s = {type(side).__name__: [] for side in sides}
        harness.rows[:] = rows
        for side in sides:
            side.next_keys()
            side.store()
        for number in range(rounds + is_measured):  # the first one warms up
            for side in sides:
                harness.rows[:] = 0
                began_s = time.perf_counter()
                side.load()
                seconds = time.perf_counter() - began_s
                assert np.array_equal(harness.rows, rows)
                if number >= is_measured:
                    took_s[type(side).__name__].append(seconds)
            sides.reverse()
        for side in sides:
            side.close()
    for name, seconds in took_s.items():
        ratio = statistics.median(seconds) / (count * MIB / BYTES_PER_S)
        print(  # noqa: T201 - the figures are what this is for
            f"\n{store_of.__name__:12} {name:8} {count} x 1 MiB over {BYTES_PER_S / MIB:.0f} MiB/s "
            f"and {RTT_S * 1000:.0f} ms: {ratio:.2f} x bytes / limit"
        )
