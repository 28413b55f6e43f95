"""Fleets that bound a bucket, in virtual time: its size, its contents, and what that costs."""

import asyncio
import random
from collections import Counter, OrderedDict

import pytest

from kvoffload_async.errors import CallTimeoutError, TierUnavailableError
from kvoffload_async.testing import VirtualLoop
from kvoffload_async.tiers.object.bound import BucketBound
from kvoffload_async.tiers.object.quota import Account, Listed, Record, Word, joined
from kvoffload_async.tiers.object.tier import ObjectTier
from kvoffload_async.types import make_offload_key

BLOCK_BYTES = 1 << 20
PERIOD_S = ObjectTier.period_s
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
        self.locked = set()
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
        await asyncio.sleep(self.list_s - LATENCY_S)
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
        if not self.locked.isdisjoint(keys):
            raise TierUnavailableError("it is locked")
        for key in keys:
            self.blocks.pop(key, None)


async def _call(request):
    return await request()


async def _in_thread(call):
    return call()


class Host:
    """A host that loads and stores blocks."""

    def __init__(
        self,
        bucket,
        capacity_bytes,
        deleted=lambda _keys: None,
        capacities=(),
        tenant_of=lambda _key: 0,
    ):
        self.bucket = bucket
        self.tenant_of = tenant_of
        self.bound = BucketBound(
            bucket,
            _call,
            _call,
            _in_thread,
            capacities=capacities or [capacity_bytes],
            tenant_of=tenant_of,
            size_of=lambda _key: BLOCK_BYTES,
            deleted=deleted,
            period_s=PERIOD_S,
        )

    @property
    def leads(self):
        return self.figure("leads")

    async def use(self, key):
        """Load a block, or store it if it is absent; return whether it was there."""
        await self.bucket.request("head")
        account = self.bound.accounts[self.tenant_of(key)]
        if key in self.bucket.blocks:
            await self.bucket.request("get")
            self.bound.accounts[0].used([key])
            return True
        if account.admits(BLOCK_BYTES):
            await self.bucket.request("put")
            self.bucket.put(key)
            account.ended(key, BLOCK_BYTES, is_written=True)
        return False

    async def kill(self):
        """End without a farewell, as if the process had died."""
        self.bound._task.cancel()
        await asyncio.wait({self.bound._task})

    def figure(self, name):
        return self.bound.gauges()[name]


async def opened(bucket, count, capacity_bytes, rng):
    hosts = [Host(bucket, capacity_bytes) for _ in range(count)]

    async def open_one(host):
        await asyncio.sleep(rng.random() * PERIOD_S)
        await host.bound.start(2.5)

    async with asyncio.TaskGroup() as group:
        for host in hosts:
            group.create_task(open_one(host))
    return hosts


class Figures:
    def __init__(self):
        self.hot = self.reused = self.kept = self.accesses = 0


async def traffic(hosts, rate, seconds, capacity_blocks, rng):
    """New blocks at a rate, and of blocks used before twice as many uses, mostly of recent ones."""
    figures = Figures()
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


async def fill(hosts, numbers):
    """Offer new blocks, one a second and host."""
    for number in numbers:
        await asyncio.sleep(1.0)
        for index, host in enumerate(hosts):
            await host.use(key_of(number * 1000 + index))


async def close(hosts):
    for host in hosts:
        await host.bound.close()


def run(main):
    """Run a fleet in virtual time."""
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
        declined = sum(host.figure("declined_blocks") for host in hosts)
        await close(hosts)
        return *outcome, declined

    figures, num_hot, declined = run(main())
    assert declined < figures.accesses / 20
    data = sum(bucket.requests[name] for name in ("head", "get", "put"))
    records = sum(bucket.requests.values()) - data - bucket.requests["delete"]
    assert bucket.most_bytes <= 1.05 * capacity_bytes
    assert records <= 0.05 * data
    assert figures.kept >= 0.9 * figures.reused > 0
    assert num_hot == 32


CAPACITY_BYTES = 400 * BLOCK_BYTES


def leaders(hosts):
    return [host for host in hosts if host.leads]


def test_another_host_leads_after_the_leader_has_died_and_no_host_writes_beyond_the_bound():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 4, CAPACITY_BYTES, random.Random(1))
        await fill(hosts, range(150))
        (leader,) = leaders(hosts)
        hosts.remove(leader)
        await leader.kill()
        await fill(hosts, range(150, 210))
        (new,) = leaders(hosts)
        before = new.figure("bound_deletions")
        await fill(hosts, range(210, 300))
        assert new.figure("bound_deletions") > before
        assert leaders(hosts) == [new]
        await close(hosts)

    run(main())
    assert 0.6 * CAPACITY_BYTES < bucket.used_bytes <= bucket.most_bytes <= CAPACITY_BYTES


def test_a_host_that_dies_in_the_middle_of_a_sweep_leaves_the_rest_to_its_successor():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 3, CAPACITY_BYTES, random.Random(2))
        await fill(hosts, range(100))
        (leader,) = leaders(hosts)
        hosts.remove(leader)
        remove = bucket.remove

        async def die(keys):
            await remove(keys[:3])
            leader.bound._task.cancel()
            await asyncio.sleep(1)

        leader.bound._store = _With(bucket, remove=die)
        await fill(hosts, range(100, 300))
        assert len(leaders(hosts)) == 1
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= CAPACITY_BYTES


class _With:
    """A bucket with other methods."""

    def __init__(self, bucket, **methods):
        self._bucket = bucket
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self._bucket, name)


def test_a_leader_that_leaves_is_followed_at_once():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 3, CAPACITY_BYTES, random.Random(3))
        (leader,) = leaders(hosts)
        hosts.remove(leader)
        await leader.bound.close()
        await asyncio.sleep(1.5 * PERIOD_S)
        assert len(leaders(hosts)) == 1
        await close(hosts)

    run(main())
    assert bucket.records == {}


def test_of_two_leaders_the_smaller_host_stays():
    bucket = Bucket()

    async def main():
        hosts = [Host(bucket, CAPACITY_BYTES) for _ in range(2)]
        await hosts[0].bound.start(2.5)
        word = bucket.records.pop("word")
        await hosts[1].bound.start(2.5)
        await asyncio.sleep(PERIOD_S)
        del word
        await asyncio.sleep(5 * PERIOD_S)
        assert len(leaders(hosts)) == 1
        await close(hosts)

    run(main())


def test_after_a_restart_of_the_only_host_it_leads_from_the_start():
    bucket = Bucket()

    async def main():
        for _ in range(3):
            host = Host(bucket, CAPACITY_BYTES)
            await host.bound.start(2.5)
            assert host.leads
            assert not await host.use(key_of(1)) or bucket.blocks
            await host.bound.close()

    run(main())
    assert len(bucket.blocks) == 1


def test_a_host_without_a_leader_declines_beyond_its_grant_and_goes_on_when_the_store_is_back():
    bucket = Bucket()

    async def main():
        (host,) = hosts = await opened(bucket, 1, CAPACITY_BYTES, random.Random(4))
        host.bucket = _With(bucket, request=_nothing)
        bucket.is_down = True
        await fill(hosts, range(600))
        assert host.figure("bound_failures")
        assert host.figure("declined_blocks")
        assert bucket.used_bytes <= CAPACITY_BYTES
        bucket.is_down = False
        declined = host.figure("declined_blocks")
        await fill(hosts, range(600, 620))
        declined = host.figure("declined_blocks")
        await fill(hosts, range(620, 660))
        assert host.figure("declined_blocks") == declined
        await close(hosts)

    run(main())


async def _nothing(_name):
    pass


def test_a_slow_list_delays_neither_opening_nor_later_the_bound():
    bucket = Bucket()
    bucket.list_s = 4.0

    async def main():
        bucket.blocks = {key_of(10**6 + n): (BLOCK_BYTES, 0.0) for n in range(9000)}
        host = Host(bucket, CAPACITY_BYTES)
        await host.bound.start(2.5)
        assert asyncio.get_running_loop().time() < 3
        await host.use(key_of(1))
        assert host.figure("declined_blocks") == 1
        await asyncio.sleep(20 * PERIOD_S)
        assert host.figure("used_bytes") <= CAPACITY_BYTES
        await fill([host], range(30))
        declined = host.figure("declined_blocks")
        await fill([host], range(30, 60))
        assert host.figure("declined_blocks") == declined < 10
        await host.bound.close()

    run(main())
    assert bucket.used_bytes <= CAPACITY_BYTES


def test_blocks_that_others_store_without_a_record_are_counted_and_deleted_too():
    bucket = Bucket()
    deleted = []

    async def main():
        bucket.foreign = 3
        host = Host(bucket, CAPACITY_BYTES, deleted.extend)
        await host.bound.start(2.5)
        for number in range(600):
            bucket.put(key_of(number))
        await asyncio.sleep(3 * PERIOD_S)
        assert host.figure("used_bytes") == bucket.used_bytes <= CAPACITY_BYTES
        assert host.figure("foreign_objects") == 3
        assert len(deleted) == host.figure("bound_deletions") == 600 - len(bucket.blocks)
        (gone, *_) = bucket.blocks
        del bucket.blocks[gone]
        await asyncio.sleep(2 * PERIOD_S)
        assert deleted[-1] == gone
        assert host.figure("used_bytes") == bucket.used_bytes
        await host.bound.close()

    run(main())


def test_the_smallest_bound_holds_and_each_host_warns_once(caplog):
    bucket = Bucket()

    async def main():
        hosts = [Host(bucket, CAPACITY_BYTES), Host(bucket, CAPACITY_BYTES // 2)]
        for host in hosts:
            await host.bound.start(2.5)
        await fill(hosts, range(400))
        assert {host.figure("capacity_bytes") for host in hosts} == {CAPACITY_BYTES // 2}
        await close(hosts)

    run(main())
    assert bucket.used_bytes <= CAPACITY_BYTES // 2
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert f"from {CAPACITY_BYTES // 2} to {CAPACITY_BYTES} bytes; the smallest holds" in texts[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"anything",
        joined(
            [Record(b"12345678", BLOCK_BYTES, 0, 0, 0, 1)]
        ),  # of another host than its name says
        joined([Record(bytes(8), BLOCK_BYTES, 0, 0, 0, 1)] * 2),  # of two tenants
        joined([Record(bytes(8), BLOCK_BYTES, 0, 0, 0, 1)]).replace(b"KVOR\1", b"KVOR\2"),
    ],
)
@pytest.mark.parametrize("name", ["00" * 8 + "-1", "readme"])
def test_records_of_others_and_of_newer_releases_are_ignored_and_warned_of_once(
    caplog, content, name
):
    bucket = Bucket()

    async def main():
        host = Host(bucket, CAPACITY_BYTES)
        host.bound.host = b"\xff" * 8
        host.bound.accounts = [Account(host.bound.host, CAPACITY_BYTES)]
        await host.bound.start(2.5)
        for _ in range(5):
            await bucket.write_record(name, content)
            await asyncio.sleep(PERIOD_S)
        assert host.leads
        assert host.figure("capacity_bytes") == CAPACITY_BYTES
        await host.bound.close()

    run(main())
    assert len(caplog.records) == 1
    assert "of other tenants or of strangers are ignored" in caplog.text


def test_a_word_of_a_newer_release_is_replaced_once_no_leader_writes_it(caplog):
    bucket = Bucket()

    async def main():
        word = joined([Word(b"12345678", 0, CAPACITY_BYTES, CAPACITY_BYTES, 1, 0, {})])
        await bucket.write_record("word", word.replace(b"KVOW\1", b"KVOW\2"))
        host = Host(bucket, CAPACITY_BYTES)
        await host.bound.start(2.5)
        assert not host.leads
        await asyncio.sleep(5 * PERIOD_S)
        assert host.leads
        await host.bound.close()

    run(main())
    assert len(caplog.records) == 1


def test_a_record_that_could_not_be_read_is_read_the_next_time():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 2, CAPACITY_BYTES, random.Random(5))
        await asyncio.sleep(2 * PERIOD_S)
        (leader,) = leaders(hosts)
        read = bucket.read_record

        async def fail(name):
            if name != "word":
                raise CallTimeoutError("slow")
            return await read(name)

        leader.bound._store = _With(bucket, read_record=fail)
        other = hosts[1 - hosts.index(leader)]
        await other.use(key_of(1))
        await asyncio.sleep(2.5 * PERIOD_S)
        assert leader.figure("bound_failures")
        leader.bound._store = bucket
        await asyncio.sleep(2.5 * PERIOD_S)
        assert leader.figure("used_bytes") == BLOCK_BYTES
        await close(hosts)

    run(main())


def test_records_of_hosts_that_died_are_removed():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 3, CAPACITY_BYTES, random.Random(6))
        (leader,) = leaders(hosts)
        for host in hosts:
            if host is not leader:
                await host.kill()
        await asyncio.sleep(6 * PERIOD_S)
        assert len(bucket.records) <= 5
        await leader.bound.close()

    run(main())
    assert bucket.records == {}


@pytest.mark.parametrize("error", [CallTimeoutError("slow"), RuntimeError("a defect")], ids=repr)
def test_a_report_that_failed_is_part_of_the_next_one(error):
    bucket = Bucket()

    async def main():
        (host,) = await opened(bucket, 1, CAPACITY_BYTES, random.Random(7))

        async def fail(name, content):
            raise error

        await host.use(key_of(1))
        host.bound._store = _With(bucket, write_record=fail)
        await asyncio.sleep(1.5 * PERIOD_S)
        host.bound._store = bucket
        await asyncio.sleep(1.5 * PERIOD_S)
        assert host.figure("bound_failures")
        assert host.figure("used_bytes") == BLOCK_BYTES
        await host.bound.close()

    run(main())


def test_a_store_that_is_down_does_not_keep_a_host_from_leaving():
    bucket = Bucket()

    async def main():
        host = Host(bucket, CAPACITY_BYTES)
        await host.bound.close()
        await host.bound.start(2.5)

        async def fail(names):
            raise CallTimeoutError("slow")

        host.bound._store = _With(bucket, discard_records=fail)
        await host.bound.close()
        assert host.figure("bound_failures") == 1

    run(main())


def test_uses_of_blocks_that_only_primaries_have_take_no_room_in_the_bucket():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 2, CAPACITY_BYTES, random.Random(8))
        for round_ in range(30):
            for host in hosts:
                host.bound.accounts[0].used([key_of(10**9 + n) for n in range(2000)])
            await fill(hosts, range(10 * round_, 10 * round_ + 10))
        (leader,) = leaders(hosts)
        assert leader.figure("used_bytes") <= bucket.used_bytes
        await close(hosts)

    run(main())
    assert bucket.used_bytes > 0.8 * CAPACITY_BYTES


def test_uses_that_no_record_has_room_for_are_counted():
    host = Host(Bucket(), CAPACITY_BYTES)
    host.bound.accounts[0].used([key_of(n) for n in range(5000)])
    assert host.figure("dropped_uses") == 5000 - 4096


def test_objects_that_cannot_be_deleted_hold_up_neither_the_others_nor_the_grants():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 2, CAPACITY_BYTES, random.Random(9))
        await fill(hosts, range(50))
        bucket.locked = set(list(bucket.blocks)[:10])
        await fill(hosts, range(50, 350))
        assert bucket.locked <= bucket.blocks.keys()
        (leader,) = leaders(hosts)
        assert leader.figure("bound_failures")
        declined = sum(host.figure("declined_blocks") for host in hosts)
        await fill(hosts, range(350, 400))
        assert sum(host.figure("declined_blocks") for host in hosts) == declined
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= CAPACITY_BYTES


def test_a_store_that_deletes_nothing_is_filled_to_the_bound_and_not_asked_for_ever():
    bucket = Bucket()

    async def main():
        (host,) = hosts = await opened(bucket, 1, CAPACITY_BYTES, random.Random(10))
        bucket.locked = {key_of(number * 1000) for number in range(600)}
        await fill(hosts, range(600))
        assert host.leads
        assert host.figure("declined_blocks") > 100
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= CAPACITY_BYTES
    assert bucket.requests["delete"] <= 64 * 61


def test_a_record_that_cannot_be_read_holds_up_no_other_host():
    bucket = Bucket()

    async def main():
        hosts = await opened(bucket, 3, CAPACITY_BYTES, random.Random(11))
        await asyncio.sleep(3 * PERIOD_S)
        (leader,) = leaders(hosts)
        bad, good = (host for host in hosts if host is not leader)
        read = bucket.read_record

        async def fail(name):
            if name.startswith(bad.bound.host.hex()):
                raise CallTimeoutError("slow")
            return await read(name)

        leader.bound._store = _With(bucket, read_record=fail)
        await fill([good], range(400))
        assert leader.figure("bound_failures")
        assert good.figure("declined_blocks") < 100  # the other may still have its grant
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= CAPACITY_BYTES


@pytest.mark.parametrize("list_s", [5.0, 9.0, 12.0])
def test_lists_that_take_nearly_a_period_or_longer_do_not_keep_the_leader_from_deleting(list_s):
    bucket = Bucket()
    bucket.list_s = list_s

    async def main():
        hosts = await opened(bucket, 2, CAPACITY_BYTES, random.Random(12))
        await fill(hosts, range(400))
        assert len(leaders(hosts)) == 1
        assert sum(host.figure("bound_deletions") for host in hosts) > 100
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= CAPACITY_BYTES


@pytest.mark.parametrize("name", ["ff" * 8 + "-1", "00" * 8 + "-1", "word"])
def test_objects_with_times_of_the_future_neither_lead_nor_make_hosts_look_dead(name):
    bucket = Bucket()

    async def main():
        await bucket.write_record(name, joined([Word(b"\xff" * 8, 0, 1, 1, 1, 0, {})]))
        bucket.records[name] = (bucket.records[name][0], 1e9, 0)
        hosts = await opened(bucket, 3, CAPACITY_BYTES, random.Random(13))
        await fill(hosts, range(100))
        assert len(leaders(hosts)) == 1
        declined = [host.figure("declined_blocks") for host in hosts]
        await fill(hosts, range(100, 150))
        assert [host.figure("declined_blocks") for host in hosts] == declined
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= CAPACITY_BYTES


def test_a_record_of_a_bound_below_a_block_deletes_nothing(caplog):
    bucket = Bucket()

    async def main():
        (host,) = hosts = await opened(bucket, 1, CAPACITY_BYTES, random.Random(14))
        await fill(hosts, range(50))
        stranger = Record(b"12345678", BLOCK_BYTES - 1, 0, 0, 0, 1)
        await bucket.write_record(f"{stranger.host.hex()}-1", joined([stranger]))
        await asyncio.sleep(2 * PERIOD_S)
        assert host.figure("capacity_bytes") == CAPACITY_BYTES
        await close(hosts)

    run(main())
    assert len(caplog.records) == 1
    assert bucket.requests["delete"] == 0


def test_a_successor_that_lists_a_large_bucket_slowly_grants_no_more_than_was_granted_before():
    bucket = Bucket()
    blocks = 8000

    async def main():
        hosts = await opened(bucket, 4, blocks * BLOCK_BYTES, random.Random(15))
        for number in range(blocks - 1500):
            bucket.put(key_of(10**9 + number))
        await asyncio.sleep(12 * PERIOD_S)  # the leader finds them
        await fill(hosts, range(30))
        bucket.list_s = 8.0
        (leader,) = leaders(hosts)
        hosts.remove(leader)
        await leader.kill()
        for round_ in range(15):
            for host in hosts:
                for number in range(100):
                    await host.use(key_of(10**6 * hosts.index(host) + 1000 * round_ + number))
            await asyncio.sleep(PERIOD_S)
        await close(hosts)

    run(main())
    assert bucket.most_bytes <= blocks * BLOCK_BYTES


def test_a_leader_that_is_closed_in_the_middle_of_a_sweep_leaves_at_once():
    bucket = Bucket()

    async def main():
        (host,) = hosts = await opened(bucket, 1, CAPACITY_BYTES, random.Random(16))
        stalled = []

        async def stall(keys):
            stalled.extend(keys)
            await asyncio.sleep(3600)

        host.bound._store = _With(bucket, remove=stall)
        await fill(hosts, range(500))
        assert stalled
        began_s = asyncio.get_running_loop().time()
        await close(hosts)
        assert asyncio.get_running_loop().time() < began_s + 1

    run(main())
    assert bucket.records == {}


def test_a_tenant_that_floods_evicts_its_own_blocks_alone_and_each_stays_within_its_quota():
    bucket = Bucket()
    parts = [100 * BLOCK_BYTES, 300 * BLOCK_BYTES]
    most = Counter()

    def tenant_of(key):
        return int(int.from_bytes(key[:16], "big") >= 10**9)

    async def main():
        hosts = [Host(bucket, 0, capacities=parts, tenant_of=tenant_of) for _ in range(3)]
        for host in hosts:
            await host.bound.start(2.5)
        await asyncio.sleep(2 * PERIOD_S)
        kept = [key_of(10**9 + n) for n in range(200)]
        for key in kept:
            await asyncio.sleep(0.5)
            await hosts[0].use(key)
            assert {host.figure("tenant_0_bytes") for host in hosts} == {0}
        assert sum(key in bucket.blocks for key in kept) > 190
        kept = [key for key in kept if key in bucket.blocks]
        for number in range(300):
            await asyncio.sleep(1.0)
            for index, host in enumerate(hosts):
                await host.use(key_of(number * 1000 + index))
            for tenant, count in Counter(map(tenant_of, bucket.blocks)).items():
                most[tenant] = max(most[tenant], count)
        assert all(key in bucket.blocks for key in kept)
        (leader,) = leaders(hosts)
        assert leader.figure("tenant_1_bytes") == len(kept) * BLOCK_BYTES
        assert leader.figure("tenant_0_bytes") > 0
        assert leader.figure("capacity_bytes") == CAPACITY_BYTES
        await close(hosts)

    run(main())
    assert 60 < most[0] <= 100
    assert most[1] <= 300
