"""Fleets that bound a bucket, in virtual time: its size, its contents, and what that costs."""

import asyncio
import random
from collections import Counter, OrderedDict

import pytest

from kvoffload_async.errors import CallTimeoutError, TierUnavailableError
from kvoffload_async.testing import VirtualLoop
from kvoffload_async.tiers.object.bound import PERIOD_S, BoundKeeper
from kvoffload_async.tiers.object.quota import Account, Listed, Record, Word
from kvoffload_async.types import make_offload_key

BLOCK_BYTES = 1 << 20
LATENCY_S = 0.02


def key_of(number):
    return make_offload_key(number.to_bytes(16, "big"), 0)


class Bucket:
    """A bucket in memory, shared by all hosts; each request takes some time and is counted."""

    def __init__(self):
        self.blocks = {}
        self.records = {}
        self.foreign = 0
        self.requests = Counter()
        self.most_bytes = 0
        self.list_s = LATENCY_S
        self.is_down = False
        self._versions = 0

    @property
    def used_bytes(self):
        return sum(size for size, _ in self.blocks.values())

    async def request(self, name, seconds=LATENCY_S):
        self.requests[name] += 1
        await asyncio.sleep(seconds)
        if self.is_down:
            raise TierUnavailableError("down")

    def put(self, key):
        now_s = asyncio.get_running_loop().time()
        self.blocks[key] = (BLOCK_BYTES, now_s)
        self.most_bytes = max(self.most_bytes, len(self.blocks) * BLOCK_BYTES)

    async def list_records(self):
        await self.request("list_records")
        return [(name, int(at_s), str(v)) for name, (_, at_s, v) in self.records.items()]

    async def read_record(self, name):
        await self.request("read_record")
        return self.records[name][0] if name in self.records else None

    async def write_record(self, name, content):
        await self.request("write_record")
        self._versions += 1
        self.records[name] = (content, asyncio.get_running_loop().time(), self._versions)

    async def discard_records(self, names):
        for name in names:
            await self.request("discard_record")
            self.records.pop(name, None)

    async def list_blocks(self, cursor, count):
        await self.request("list_blocks", self.list_s)
        keys = sorted(key for key in self.blocks if cursor is None or key.hex() > cursor)[:count]
        page = [Listed(key, *self.blocks[key]) for key in keys]
        return page, self.foreign, keys[-1].hex() if len(keys) == count else None

    async def remove(self, keys):
        self.requests["delete"] += len(keys)
        await asyncio.sleep(LATENCY_S)
        for key in keys:
            self.blocks.pop(key, None)


async def _call(request):
    return await request()


async def _in_thread(call):
    return call()


class Host:
    """A host that loads and stores blocks."""

    def __init__(self, bucket, capacity_bytes, deleted=lambda _keys: None):
        self.bucket = bucket
        self.keeper = BoundKeeper(
            bucket,
            _call,
            _in_thread,
            capacity_bytes=capacity_bytes,
            size_of=lambda _key: BLOCK_BYTES,
            deleted=deleted,
        )

    @property
    def leads(self):
        return self.keeper.gauges()["leads"]

    async def use(self, key):
        """Load a block, or store it if it is absent; return whether it was there."""
        await self.bucket.request("head")
        account = self.keeper.account
        if key in self.bucket.blocks:
            await self.bucket.request("get")
            account.used([key])
            return True
        if account.admits(BLOCK_BYTES):
            await self.bucket.request("put")
            self.bucket.put(key)
            account.ended(key, BLOCK_BYTES, is_written=True)
        return False

    async def kill(self):
        self.keeper._task.cancel()
        await asyncio.wait({self.keeper._task})


async def opened(bucket, count, capacity_bytes, rng):
    hosts = [Host(bucket, capacity_bytes) for _ in range(count)]

    async def open_one(host):
        await asyncio.sleep(rng.random() * PERIOD_S)
        await host.keeper.start(2.5)

    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(open_one(host))
    return hosts


class Figures:
    def __init__(self):
        self.hot = self.reused = self.kept = self.accesses = 0


async def traffic(hosts, rate, seconds, capacity_blocks, rng, figures=None):
    """New blocks at a rate, and of blocks used before twice as many uses, mostly of recent ones."""
    figures = figures or Figures()
    lru, history, number = OrderedDict(), [], 0
    hot = [key_of((1 << 100) + n) for n in range(32)]
    end_s = asyncio.get_running_loop().time() + seconds

    async def use(key):
        in_lru = key in lru
        lru[key] = None
        lru.move_to_end(key)
        if len(lru) > capacity_blocks:
            lru.popitem(last=False)
        was_there = await rng.choice(hosts).use(key)
        figures.accesses += 1
        if in_lru and len(history) > capacity_blocks:
            figures.reused += 1
            figures.kept += was_there

    async with asyncio.TaskGroup() as group:
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(rng.expovariate(rate))
            number += 1
            history.append(key_of(number))
            group.create_task(use(history[-1]))
            group.create_task(use(rng.choice(hot)))
            distance = min(len(history), 1 + int(rng.expovariate(3 / capacity_blocks)))
            group.create_task(use(history[-distance]))
    return figures, sum(key in hosts[0].bucket.blocks for key in hot)


def run(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@pytest.mark.parametrize(("count", "rate"), [(8, 16), (8, 40), (100, 200)])
def test_a_fleet_keeps_a_bucket_within_its_bound_and_what_is_used_in_it(count, rate):
    capacity_blocks = rate * 180
    capacity_bytes = capacity_blocks * BLOCK_BYTES
    rng = random.Random(count + rate)
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, count, capacity_bytes, rng)
        bucket.requests.clear()
        outcome = await traffic(hosts, rate, 450, capacity_blocks, rng)
        declined = sum(host.keeper.gauges()["declined_blocks"] for host in hosts)
        for host in hosts:
            await host.keeper.close()
        return *outcome, declined

    figures, num_hot, declined = run(main())
    data = sum(bucket.requests[name] for name in ("head", "get", "put"))
    records = sum(bucket.requests.values()) - data - bucket.requests["delete"]
    print(
        bucket.most_bytes / capacity_bytes, len(bucket.blocks) / capacity_blocks,
        records / data, figures.kept, figures.reused, num_hot, declined, bucket.requests,
    )
    assert bucket.most_bytes <= 1.05 * capacity_bytes
    assert records <= 0.05 * data
    assert figures.kept >= 0.9 * figures.reused > 0
    assert num_hot == 32
