"""Hosts that pack otherwise, or nothing; many requests at once; and time that runs out."""

import asyncio
import threading

import pytest
from remote.object.tiers import BLOCK_BYTES, K, head, loads, stored

from kvoffload_async.errors import (
    BlockMissingError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.object.packs import MOST_PAYLOAD_BYTES, is_chunk_boundary

# -- hosts that pack otherwise --------------------------------------------------------------------


def test_packs_of_blocks_that_need_padding_are_no_larger_than_readers_believe(host, connection):
    block_bytes = 266_305  # 63 of them are less than 16 MiB, but not if each is padded
    chain = [key for key in K if not is_chunk_boundary(key, 32)][:60]
    one = host(block_bytes, pack_bytes=MOST_PAYLOAD_BYTES)
    packs = one.tier._packs
    most = packs.most_blocks(MOST_PAYLOAD_BYTES)
    assert most == 62
    value = packs.wrap(K[:most], [content_of(K[0], block_bytes)] * most)
    assert packs.table(K[0], value.data) is not None
    assert len(value) <= packs.most_bytes(len(K[0]))
    stored(one, chain)
    assert loads(one, chain)
    assert one.tier._most_blocks == most


def test_where_no_two_blocks_fit_a_pack_what_precedes_a_chain_costs_nothing(host):
    one = host(pack_bytes=BLOCK_BYTES)
    assert head(one, K[10:12], K[:10]) == 0
    assert one.tier.gauges()["probed_keys"] == 1


def test_the_bytes_of_a_larger_pack_than_ones_own_are_counted_once_it_was_looked_at(host):
    stored(host(), K[:32])
    other = host(pack_bytes=8 * BLOCK_BYTES)
    assert head(other, K[:32]) == 32
    get, taken = other.tier._client.get, []

    async def watched(*arguments):
        taken.append(other.tier.gauges()["bytes_in_flight"])
        return await get(*arguments)

    other.tier._client.get = watched
    assert other.load(K[30:31]) == {}
    assert taken == [32 * BLOCK_BYTES]
    assert other.tier.gauges()["bytes_in_flight"] == 0


def test_small_packs_begin_where_readers_of_small_packs_look(host):
    chain = [key_of(number) for number in range(64)]
    stored(host(pack_bytes=4 * BLOCK_BYTES), chain)
    assert head(host(pack_bytes=4 * BLOCK_BYTES), chain) == 64


def test_what_no_probe_has_looked_at_is_counted_as_a_pack_of_ones_own(host):
    one = host(pack_bytes=8 * BLOCK_BYTES)
    get, taken = one.tier._client.get, []

    async def watched(*arguments):
        taken.append(one.tier.gauges()["bytes_in_flight"])
        return await get(*arguments)

    one.tier._client.get = watched
    assert len(one.load(K[:1])) == 1
    assert taken == [8 * BLOCK_BYTES]


def slowed(harness, seconds=0.05):
    """Have every read take a while; return how many went on at once, at most."""
    get, going = harness.tier._client.get, [0, 0]

    async def slow(*arguments):
        going[0] += 1
        going[1] = max(going)
        await asyncio.sleep(seconds)
        going[0] -= 1
        return await get(*arguments)

    harness.tier._client.get = slow
    return going


def test_blocks_that_have_an_object_each_are_loaded_several_at_once(host):
    assert host(pack_bytes=0).store(K[:40]) == {}
    one = host(connections=5)
    one.tier._chains.saw_chain(K)
    going = slowed(one)
    assert loads(one, K[:40])
    assert 4 <= going[1] <= 5
    assert one.tier.gauges()["requests"] <= 45


def test_what_is_behind_a_pack_that_was_looked_at_is_loaded_beside_it(host):
    writer = host(negative_cache_ttl_s=60.0)
    assert head(writer, K[:30]) == 0
    assert writer.store(K[:10]) == {}
    assert writer.store(K[10:30]) == {}
    reader = host()
    assert head(reader, K[:10]) == 10
    reader.tier._chains.saw_chain(K)
    going = slowed(reader)
    assert loads(reader, K[:30])
    assert going[1] == 2


def test_packs_that_begin_where_every_pack_does_are_loaded_at_once(host):
    lead = next(key for key in map(key_of, range(1000)) if is_chunk_boundary(key, 64))
    chain = [*K[:10], lead, *K[10:20]]
    stored(host(), chain)
    reader = host()
    reader.tier._chains.saw_chain(chain)
    going = slowed(reader)
    assert loads(reader, chain)
    assert going[1] == 2


def test_blocks_of_a_pack_that_has_gone_are_missed_several_at_once(host):
    one = host(connections=5)
    one.tier._chains.saw_chain(K)
    going = slowed(one)
    failures = one.load(K[:20])
    assert {type(error) for error in failures.values()} == {BlockMissingError}
    assert len(failures) == 20
    assert 4 <= going[1] <= 5


@pytest.mark.parametrize("ends", [[1, 2, 30], [1, 2, 3, 4, 30], [1, 20, 21, 22, 30]])
def test_a_pack_behind_blocks_that_have_an_object_each_is_found(host, ends):
    writer = host(negative_cache_ttl_s=60.0)
    assert head(writer, K[:30]) == 0
    for begin, end in zip([0, *ends], ends, strict=False):
        assert writer.store(K[begin:end]) == {}
    reader = host()
    reader.tier._chains.saw_chain(K)
    assert loads(reader, K[:30])


def test_hundreds_of_requests_at_once_stay_within_the_bytes_that_may_be_in_flight(host):
    one = host(bytes_in_flight=16 * BLOCK_BYTES, pack_bytes=4 * BLOCK_BYTES, connections=8)
    most = 0  # of stores
    chains = [[key_of(4 * number + i) for i in range(4)] for number in range(200)]
    create = one.tier._client.create

    async def watched(*arguments):
        nonlocal most
        most = max(most, one.tier._stores.limiter.bytes_in_flight)
        return await create(*arguments)

    one.tier._client.create = watched
    one.rows[:] = 0

    async def request(number, chain):
        slots = [4 * (number % 16) + i for i in range(4)]
        assert await one.tier.longest_prefixes([chain]) == [0]
        assert await one.tier.store(one.job(chain, slots, is_promotion=False)) == {}
        assert await one.tier.longest_prefixes([chain]) == [4]
        assert await one.tier.load(one.job(chain, slots, is_promotion=True)) == {}

    async def everybody():
        async with asyncio.TaskGroup() as group:
            for number, chain in enumerate(chains):
                group.create_task(request(number, chain))

    one.run(everybody())
    assert 8 * BLOCK_BYTES < most <= 16 * BLOCK_BYTES
    assert one.tier.gauges()["bytes_in_flight"] == 0


# -- time runs out --------------------------------------------------------------------------------


def test_an_object_that_cannot_be_read_costs_the_blocks_of_the_others_nothing(host):
    writer = host()
    assert head(writer, K[:30]) == 0
    assert writer.store(K[:10]) == {}
    assert writer.store(K[10:30]) == {}
    reader = host(max_retries=0)
    reader.tier._chains.saw_chain(K)
    get = reader.tier._client.get

    async def breaks(keys, most_bytes):
        if keys == [K[10]]:
            raise OSError("the connection is gone")
        return await get(keys, most_bytes)

    reader.tier._client.get = breaks
    failures = reader.load(K[:30])
    assert set(failures) == set(range(10, 30))
    assert all(reader.holds(K[i], i) for i in range(10))
    assert {type(error) for error in failures.values()} == {TierUnavailableError}


@pytest.mark.parametrize("direction", ["load", "store"])
def test_when_time_runs_out_in_the_middle_of_a_pack_nothing_is_left_in_flight(host, direction):
    stored(host(), K[:10])
    one = host(job_timeout_s=0.3, call_timeout_s=5.0)
    assert head(one, K[:10]) == 10
    chain = K[:10] if direction == "load" else K[10:20]

    async def hangs(*_):
        await asyncio.sleep(60.0)

    setattr(one.tier._client, "get" if direction == "load" else "create", hangs)
    failures = getattr(one, direction)(chain)
    assert {type(error) for error in failures.values()} == {TierTimeoutError}
    assert len(failures) == 10
    assert one.tier.gauges()["bytes_in_flight"] == 0
    assert direction == "store" or all(one.is_untouched(i) for i in range(10))


def test_no_row_is_touched_after_a_load_has_ended_though_its_time_ran_out_in_the_copy(host):
    stored(host(), K[:10])
    one = host(job_timeout_s=0.2)
    assert head(one, K[:10]) == 10
    unwrap, never = one.tier._packs.unwrap, threading.Event()
    begun, ended = threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        never.wait(0.6)
        bad = unwrap(*arguments)
        ended.set()
        return bad

    one.tier._packs.unwrap = slow
    failures = one.load(K[:10])
    # On a busy machine its time may have run out before the copy.
    assert ended.is_set() or not begun.is_set(), "the load has ended before its copy"
    assert all(isinstance(error, TierError) for error in failures.values())
    assert one.tier.gauges()["bytes_in_flight"] == 0
