"""CPU seconds per GiB of a remote tier with encrypted blocks, against verified ones.

The server is a process of its own, so its time does not count. Rounds alternate, so that both sides
see the same machine. The ratio is that of the speeds: above 1, encrypted blocks cost less.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round. The
figures belong to docs/remote-tiers.md.
"""

import asyncio
import itertools
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from servers.process import at_length
from servers.seaweedfs import SeaweedServer
from servers.valkey import ValkeyServer

from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of, make_job
from kvoffload_async.tiers.files.sealing import EncryptionKey
from kvoffload_async.tiers.object.tier import ObjectTier
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.tier import ValkeyTier

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
JOB_BLOCKS, VOLUME_BYTES, ROUNDS, TIMEOUT_S = 16, 128 * MIB, 7, 100.0
KEYS = {"verified": None, "encrypted": [EncryptionKey(b"k" * 32)]}
DEADLINES = {"call_timeout_s": TIMEOUT_S, "job_timeout_s": TIMEOUT_S}


def on_valkey(folder, stack):
    server = stack.enter_context(ValkeyServer(folder))
    address = Address.parse(server.url())
    return lambda keys: ValkeyTier(
        ValkeySettings(address=address, encryption_keys=keys, **DEADLINES)
    )


def on_s3(folder, stack):
    server = stack.enter_context(SeaweedServer(folder, "-volume.max=200"))
    connection = server.connection("tier", timeout_s=TIMEOUT_S)
    return lambda keys: ObjectTier(replace(connection, encryption_keys=keys, **DEADLINES))


class Side:
    """A tier that stores and loads all rows of its primary."""

    def __init__(self, tier, rows, stack):
        self._rows = rows
        self._numbers = itertools.count()
        self._harness = stack.enter_context(TierHarness(tier, *rows.shape, TIMEOUT_S))
        self._harness.rows[:] = rows

    def next_keys(self):
        self._keys = [key_of(next(self._numbers)) for _ in self._rows]

    def cpu_s(self, *, is_promotion):
        harness, count = self._harness, len(self._keys)
        run = harness.tier.load if is_promotion else harness.tier.store
        if is_promotion:
            harness.rows[:] = 0

        async def move(first):
            slots = range(first, min(count, first + JOB_BLOCKS))
            keys = [self._keys[slot] for slot in slots]
            assert not await run(make_job(first, keys, slots, is_promotion=is_promotion))

        async def move_all():
            async with asyncio.TaskGroup() as group:
                for first in range(0, count, JOB_BLOCKS):
                    group.create_task(move(first))

        begun_s = time.process_time()
        harness.run(move_all())
        took_s = time.process_time() - begun_s
        assert np.array_equal(harness.rows, self._rows)
        return took_s

    def forget(self):
        assert self._harness.run(self._harness.tier.delete(self._keys)) == {}


@pytest.mark.bench
@pytest.mark.parametrize("block_kib", [64, 1024, 4096])
@pytest.mark.parametrize(
    "tiers_of", [on_valkey, pytest.param(on_s3, marks=[at_length, pytest.mark.servers])]
)
def test_cpu_seconds_per_gib_with_and_without_encryption(tmp_path, request, tiers_of, block_kib):
    is_measured = request.config.getoption("--benchmark-enable")
    block_bytes = block_kib * KIB
    count, rounds = (VOLUME_BYTES // block_bytes, ROUNDS) if is_measured else (4, 1)
    rows = np.random.default_rng(1).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    figures = {phase: {name: [] for name in KEYS} for phase in ("store", "load")}
    with ExitStack() as stack:
        create = tiers_of(tmp_path, stack)
        sides = [(name, Side(create(keys), rows, stack)) for name, keys in KEYS.items()]
        for number in range(rounds + is_measured):  # the first one warms up
            for name, side in sides:
                side.next_keys()
                for phase, seconds in figures.items():
                    took_s = side.cpu_s(is_promotion=phase == "load")
                    if number >= is_measured:
                        seconds[name].append(took_s)
                side.forget()
            sides.reverse()
    gib = count * block_bytes / GIB
    for phase, seconds in figures.items():
        verified, encrypted = (statistics.median(seconds[name]) / gib for name in KEYS)
        print(  # noqa: T201 - the figures are what this is for
            f"\n{tiers_of.__name__:9} {phase:5} {block_kib:4} KiB: verified {verified:.2f}, "
            f"encrypted {encrypted:.2f} CPU s/GiB, speed {verified / encrypted:.2f}"
        )
