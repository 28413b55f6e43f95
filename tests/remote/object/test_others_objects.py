"""Objects that others put into the bucket, changed or removed: no harm, and no loss."""

import asyncio

import numpy as np
import obstore
import pytest
from remote.object.tiers import BLOCK_BYTES, K, head, loads, objects, stored

from kvoffload_async.errors import CorruptBlockError, TierUnavailableError
from kvoffload_async.testing.harness import content_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.object.client import ObjectClient, ObjectConnection, name_of
from kvoffload_async.tiers.object.packs import MOST_PAYLOAD_BYTES, Chains, Packs
from kvoffload_async.tiers.remote.client import Value

LAYOUT = "0123456789abcdef" * 2


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


def test_an_object_larger_than_any_pack_is_not_read_and_goes(host, connection):
    one = host()
    stored(one, K[:4])
    put(connection, K[0], bytes(MOST_PAYLOAD_BYTES + (1 << 20)))
    get, read = one.tier._client.get, []

    async def watched(*arguments):
        values = await get(*arguments)
        read.extend(len(value.data) for value in values if value is not None)
        return values

    one.tier._client.get = watched
    failures = one.load(K[:4])
    assert isinstance(failures[0], CorruptBlockError)
    assert read[:2] == [0, 0]
    assert objects(connection) == []


def test_an_object_that_was_put_right_meanwhile_is_not_removed(host, connection):
    one = host()
    stored(one, K[:4])
    (name,) = objects(connection)
    good = bytes(obstore.get(connection.open(), name).bytes())
    put(connection, K[0], good[:-1])
    remove_if = one.tier._client.remove_if

    async def late(*arguments):
        put(connection, K[0], good)
        return await remove_if(*arguments)

    one.tier._client.remove_if = late
    assert len(one.load(K[:4])) == 4
    assert one.tier.gauges()["removed"] == 0
    assert loads(one, K[:4])


def test_a_pack_that_cannot_be_read_costs_no_block_that_may_be_elsewhere(host, connection):
    assert host(pack_bytes=0).store(K[:3]) == {}
    one = host()
    one.tier._chains.saw_chain(K)
    put(connection, K[0], b"KVOP" + bytes(1000))
    assert {i: type(error) for i, error in one.load(K[:3]).items()} == {0: CorruptBlockError}
    assert len(objects(connection)) == 2


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


def test_what_is_asked_for_is_found_though_its_pack_was_replaced_by_single_blocks(host, connection):
    one = host()
    stored(one, K[:4])
    (name,) = objects(connection)
    obstore.delete(connection.open(), name)
    assert host(pack_bytes=0).store(K[1:4]) == {}
    assert one.contains(K[:5]) == set(K[1:4])
    assert host(pack_bytes=0).store(K[:1]) == {}
    assert one.contains(K[:5]) == set(K[:4])


def test_a_block_that_was_bad_in_a_pack_is_found_where_it_is_now(host, connection):
    assert host(pack_bytes=0).store(K[:3]) == {}
    one = host()
    rows = [content_of(key, BLOCK_BYTES) for key in K[:3]]
    damaged = one.tier._packs.wrap(K[:3], rows)
    damaged[-1] ^= 1
    get, values = one.tier._client.get, [Value(damaged.data, "1")]

    async def first_the_old_one(*arguments):
        return [values.pop()] if values else await get(*arguments)

    one.tier._chains.saw_object(K[:3])
    one.tier._client.get = first_the_old_one
    assert one.load(K[:3]) == {}
    assert one.tier.gauges()["read_again"] == 1
    assert all(one.holds(K[i], i) for i in range(3))
    assert len(objects(connection)) == 3


def test_a_name_that_can_be_neither_read_nor_written_costs_four_requests_and_its_block(
    host, tmp_path
):
    one = host()
    assert head(one, K[:4]) == 0
    namespace = one.tier._client._namespace
    for key in K[:2]:
        (tmp_path / "blocks" / name_of(namespace, key)).mkdir(parents=True)
    before = one.tier.gauges()["requests"]
    failures = one.store(K[:4])
    assert {i: type(error) for i, error in failures.items()} == dict.fromkeys(
        (0, 1), TierUnavailableError
    )
    assert one.tier.gauges()["requests"] - before == 2 * 4 + 2
    assert loads(one, K[2:4])


def test_who_loses_a_race_to_what_has_gone_meanwhile_stores_it_himself(host, connection):
    one = host()
    assert head(one, K[:4]) == 0
    create, answers = one.tier._client.create, [False]

    async def lost_at_first(*arguments):
        return answers.pop() if answers else await create(*arguments)

    one.tier._client.create = lost_at_first
    assert one.store(K[:4]) == {}
    assert len(objects(connection)) == 1
    assert loads(one, K[:4])
