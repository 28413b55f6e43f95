"""Objects that others put into the bucket, and hosts that pack otherwise: no harm, and no loss."""

import asyncio
import threading

import numpy as np
import obstore
import pytest
from remote.object.tiers import names_in, tier_on

from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.tiers.object.chains import Chains, is_lead
from kvoffload_async.tiers.object.client import ObjectClient, ObjectConnection
from kvoffload_async.tiers.object.names import name_of
from kvoffload_async.tiers.object.packs import MOST_PAYLOAD_BYTES, Packs

BLOCK_BYTES = 4096
LAYOUT = "0123456789abcdef" * 2
K = [key for key in map(key_of, range(200)) if not is_lead(key, 64)][:64]


@pytest.fixture
def connection(tmp_path):
    return ObjectConnection(f"file://{tmp_path}/blocks")


@pytest.fixture
def host(connection):
    made = []

    def make(slot_bytes=BLOCK_BYTES, **options):
        tier = tier_on(connection, **{"pack_bytes": 64 * BLOCK_BYTES} | options)
        made.append(TierHarness(tier, 64, slot_bytes))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def head(harness, chain, before=()):
    (length,) = harness.run(harness.tier.longest_prefixes([chain], [before]))
    return length


def stored(harness, chain):
    assert head(harness, chain) == 0
    assert harness.store(chain) == {}


def loads(harness, keys):
    assert harness.load(keys) == {}
    return all(harness.holds(key, slot) for slot, key in enumerate(keys))


def objects(connection):
    return sorted(name for name in names_in(connection) if "_g" in name)


def put(connection, key, value):
    """Put an object where that of a block is, or would be, and return its name."""
    name = name_of(objects(connection)[0].partition("/")[0], key)
    obstore.put(connection.open(), name, value)
    return name


def lies_about(layout):
    """Return a pack of zeros that claims the blocks of others, besides one of its own."""
    rows = [np.zeros(BLOCK_BYTES, dtype=np.uint8)] * 5
    return Packs(layout, BLOCK_BYTES).wrap([K[10], *K[:4]], rows)


# -- what others have put there -----------------------------------------------------------------


def test_a_number_in_a_name_does_not_make_an_error_an_object_that_is_there():
    options = {"endpoint": "http://127.0.0.1:9", "region": "x", "skip_signature": True}
    store = ObjectConnection("s3://bucket", options, allow_http=True).open()
    chains = Chains()
    client = ObjectClient(store, "416" * 10 + "41", {}, Packs(LAYOUT, BLOCK_BYTES), chains)
    with pytest.raises(Exception, match="416") as raised:
        asyncio.run(client.exist([K[0]]))
    assert isinstance(client.mapped(raised.value), TierUnavailableError)
    assert not len(chains)


def test_a_table_that_has_a_block_twice_is_no_table():
    packs = Packs(LAYOUT, BLOCK_BYTES)
    rows = [content_of(key, BLOCK_BYTES) for key in K[:3]]
    twice = packs.wrap([K[0], K[1], K[1]], rows)
    assert packs.table(K[0], twice.data) is None
    assert packs.table(K[0], packs.wrap(K[:3], rows).data) is not None


def test_a_pack_without_blocks_or_with_blocks_of_no_bytes_is_none():
    packs = Packs(LAYOUT, BLOCK_BYTES)
    empty = Packs(LAYOUT, 0).wrap(K[:2], [np.empty(0, dtype=np.uint8)] * 2)
    assert packs.table(K[0], empty.data) is None
    nothing = bytearray(packs.wrap(K[:1], [content_of(K[0], BLOCK_BYTES)]).tobytes())
    nothing[14:16] = bytes(2)
    assert packs.table(K[0], memoryview(nothing)) is None


@pytest.mark.parametrize("block_bytes", [1 << 63, (1 << 64) - 1, (1 << 64) - 64, 1 << 40])
def test_a_length_that_no_memory_has_is_not_believed(block_bytes):
    value = Packs(LAYOUT, BLOCK_BYTES).wrap(K[:2], [content_of(key, BLOCK_BYTES) for key in K[:2]])
    value[16:24] = np.frombuffer(block_bytes.to_bytes(8, "little"), dtype=np.uint8)
    assert Packs(LAYOUT, block_bytes).table(K[0], value.data) is None


def test_an_object_larger_than_any_pack_is_not_read_and_goes(host, connection):
    one = host()
    stored(one, K[:4])
    put(connection, K[0], bytes(MOST_PAYLOAD_BYTES + (1 << 20)))
    failures = one.load(K[:4])
    assert isinstance(failures[0], CorruptBlockError)
    assert objects(connection) == []


def test_a_pack_that_claims_the_blocks_of_others_costs_them_one_load(host, connection):
    one = host()
    stored(one, K[:4])
    lies = lies_about(one.tier._env.identity.digest)
    lies[-BLOCK_BYTES:] = 1  # not even what its checksum says
    name = put(connection, K[10], lies.data)
    other = host()
    assert head(other, [K[10], *K[:4]]) == 5
    assert isinstance(other.load(K[:4])[3], CorruptBlockError)
    assert name not in objects(connection)
    assert loads(other, K[:4]), "their own object is still there"


def test_who_holds_no_integrity_key_cannot_say_where_the_blocks_of_others_are(host, connection):
    options = {"integrity_key": IntegrityKey(b"k" * 32)}
    one = host(**options)
    stored(one, K[:4])
    put(connection, K[10], lies_about(one.tier._env.identity.digest).data)
    other = host(**options)
    assert head(other, [K[10], *K[:4]]) == 5, "what is no pack, and the pack of four"
    assert loads(other, K[:4])


# -- what has changed since it was seen ----------------------------------------------------------


def test_blocks_are_stored_though_their_object_was_replaced_by_one_without_them(host, connection):
    one = host(remember_present_s=60.0)
    stored(one, K[:8])
    (name,) = objects(connection)
    obstore.delete(connection.open(), name)
    assert host(pack_bytes=0).store(K[:1]) == {}
    assert one.store(K[:8]) == {}
    assert loads(host(), K[:1])
    assert head(host(), K[:8]) == 8
    assert loads(one, K[:8])


def test_blocks_that_are_in_the_middle_of_a_pack_are_not_stored_again(host, connection):
    stored(host(), K[:20])
    other = host()
    assert head(other, K[10:30], K[:10]) == 10
    assert other.store(K[10:30]) == {}
    figures = other.tier.gauges()
    assert (figures["present_blocks"], figures["packed_blocks"]) == (10, 10)


def test_a_block_whose_pack_has_gone_is_stored_by_itself(host, connection):
    stored(host(), K[:20])
    other = host()
    assert head(other, K[10:20], K[:10]) == 10
    (name,) = objects(connection)
    obstore.delete(connection.open(), name)
    assert other.store(K[10:20]) == {}
    assert other.tier.gauges()["packed_blocks"] == 10
    assert loads(other, K[10:20])


def test_a_name_that_can_be_neither_read_nor_written_costs_two_requests_a_block(host, tmp_path):
    one = host()
    assert head(one, K[:4]) == 0
    namespace = one.tier._client._namespace
    for key in K[:4]:
        (tmp_path / "blocks" / name_of(namespace, key)).mkdir(parents=True)
    before = one.tier.gauges()["requests"]
    assert one.store(K[:4]) == {}
    assert one.tier.gauges()["requests"] - before <= 3 * 4


# -- hosts that pack otherwise --------------------------------------------------------------------


def test_packs_of_blocks_that_need_padding_are_no_larger_than_readers_believe(host, connection):
    block_bytes = 266_305  # 63 of them are less than 16 MiB, but not if each is padded
    chain = [key for key in K if not is_lead(key, 32)][:60]
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
    writer = host(remember_absent_s=60.0)
    assert head(writer, K[:30]) == 0
    for begin, end in zip([0, *ends], ends, strict=False):
        assert writer.store(K[begin:end]) == {}
    reader = host()
    reader.tier._chains.saw_chain(K)
    assert loads(reader, K[:30])


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
    unwrap, ended, never = one.tier._packs.unwrap, threading.Event(), threading.Event()

    def slow(*arguments):
        never.wait(0.6)
        bad = unwrap(*arguments)
        ended.set()
        return bad

    one.tier._packs.unwrap = slow
    failures = one.load(K[:10])
    assert ended.is_set(), "the load has ended before its copy"
    assert all(isinstance(error, TierError) for error in failures.values())
    assert one.tier.gauges()["bytes_in_flight"] == 0
