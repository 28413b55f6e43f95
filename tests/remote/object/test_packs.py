"""The `object` tier with packs: fewer requests, and the same promises."""

import asyncio

import obstore
import pytest
from remote.object.tiers import BLOCK_BYTES, K, damage, head, loads, objects, stored

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.packs import is_chunk_boundary
from kvoffload_async.types import make_offload_key

LEAD = next(key for key in map(key_of, range(1000)) if is_chunk_boundary(key, 64))


def requests(harness, call):
    before = harness.tier.gauges()["requests"]
    result = call()
    return result, harness.tier.gauges()["requests"] - before


def test_blocks_that_follow_each_other_are_one_object_and_one_request_each_way(host, connection):
    one, other = host(negative_cache_ttl_s=60.0), host()
    stored(one, K)
    assert len(objects(connection)) == 1
    assert one.tier.gauges()["stored_packs"] == 1
    assert one.tier.gauges()["packed_blocks"] == 64
    assert head(one, K) == 64, "that it was absent is remembered no more"
    assert head(other, K) == 64
    assert requests(other, lambda: loads(other, K)) == (True, 1)


def test_a_store_of_blocks_of_which_nothing_is_known_costs_an_object_each(host, connection):
    one = host()
    assert one.store(K[:8]) == {}
    assert len(objects(connection)) == 8
    assert head(host(), K) >= 7


def test_blocks_that_do_not_follow_each_other_are_not_packed(host, connection):
    one = host()
    assert head(one, K[:4]) == head(one, K[10:14]) == 0
    assert one.store([*K[:4], *K[10:14]]) == {}
    assert len(objects(connection)) == 2
    other = host()
    assert (head(other, K[:4]), head(other, K[10:14])) == (4, 4)


def test_keys_of_several_lengths_are_in_several_packs(host, connection):
    chain = [*K[:3], *(make_offload_key(key[:16]) for key in K[3:6]), *K[6:8]]
    stored(host(), chain)
    assert len(objects(connection)) == 3
    other = host()
    assert head(other, chain) == 8
    assert loads(other, chain)


def test_a_pack_ends_before_a_block_that_leads(host, connection):
    chain = [*K[:5], LEAD, *K[5:9]]
    stored(host(), chain)
    assert len(objects(connection)) == 2
    assert head(host(), chain) == 10


def test_a_pack_is_no_larger_than_it_may_be(host, connection):
    stored(host(pack_bytes=8 * BLOCK_BYTES), [k for k in K if not is_chunk_boundary(k, 8)][:16])
    assert len(objects(connection)) == 2


def test_what_is_stored_already_is_not_stored_again(host, connection):
    one, other = host(), host()
    stored(one, K[:20])
    assert head(other, K[:30]) == 20
    assert other.store(K[:30]) == {}
    assert len(objects(connection)) == 2
    assert other.tier.gauges()["present_blocks"] == 20
    assert head(host(), K[:30]) == 30


def test_two_hosts_that_store_the_same_at_once_leave_one_object(host, connection):
    hosts = [host(negative_cache_ttl_s=60.0) for _ in range(2)]
    assert [head(one, K[:20]) for one in hosts] == [0, 0]
    assert hosts[0].store(K[:20]) == {}
    assert requests(hosts[1], lambda: hosts[1].store(K[:20])) == ({}, 2)
    assert len(objects(connection)) == 1
    assert [one.tier.gauges()["lost_races"] for one in hosts] == [0, 1]
    assert loads(hosts[1], K[:20])


def test_who_loses_the_race_stores_what_the_winner_has_not(host, connection):
    one, other = (host(negative_cache_ttl_s=60.0) for _ in range(2))
    assert head(other, K[:30]) == 0
    stored(one, K[:20])
    assert other.store(K[:30]) == {}
    assert len(objects(connection)) == 2
    assert head(host(), K[:30]) == 30


def test_a_host_that_has_the_head_elsewhere_loads_the_rest_of_the_pack(host):
    stored(host(), K[:30])
    other = host()
    assert head(other, K[10:40], K[:10]) == 20
    assert loads(other, K[10:30])


def test_a_process_that_remembers_nothing_loads_all_the_same(host):
    stored(host(), K[:30])
    other = host()
    assert head(other, K) == 30
    assert loads(other, K[4:9])


def test_of_a_chain_that_was_never_looked_at_what_leads_is_found(host):
    stored(host(), K[:30])
    other = host()
    failures = other.load(K[:3])
    assert 0 not in failures
    assert other.holds(K[0], 0)
    assert {type(error) for error in failures.values()} <= {BlockMissingError}


def test_one_bad_block_costs_itself_and_the_pack_goes(host, connection):
    one = host()
    stored(one, K[:8])
    assert damage(connection, K[0])  # the last byte of the object: of its last block
    failures = one.load(K[:8])
    assert {i: type(error) for i, error in failures.items()} == {7: CorruptBlockError}
    assert all(one.holds(K[i], i) for i in range(7))
    figures = one.tier.gauges()
    assert (figures["read_again"], figures["corrupt"], figures["removed"]) == (1, 1, 1)
    assert objects(connection) == []
    assert head(one, K[:8]) == 0
    assert one.store(K[:8]) == {}
    assert loads(host(), K[:1])


def test_every_bad_block_of_a_pack_is_counted_and_the_pack_once(host, connection):
    one = host()
    stored(one, K[:8])
    (name,) = objects(connection)
    value = bytearray(bytes(obstore.get(connection.open(), name).bytes()))
    for number in (1, 3):
        value[-number * BLOCK_BYTES] ^= 1
    obstore.put(connection.open(), name, bytes(value))
    assert set(one.load(K[:8])) == {5, 7}
    figures = one.tier.gauges()
    assert (figures["read_again"], figures["corrupt"], figures["removed"]) == (2, 2, 1)


@pytest.mark.parametrize("content", [b"KVOP", b"KVOB", b"x" * 10_000])
def test_an_object_that_is_nothing_is_removed_when_it_is_loaded(host, connection, content):
    one = host()
    stored(one, K[:8])
    (name,) = objects(connection)
    obstore.put(connection.open(), name, content)
    assert head(host(), K[:8]) == 1, "something is there"
    assert one.tier.gauges()["corrupt"] == 0
    failures = one.load(K[:8])
    assert len(failures) == 8
    assert isinstance(failures[0], CorruptBlockError)
    assert objects(connection) == []
    assert one.store(K[:8]) == {}
    assert loads(one, K[:8])


def test_a_pack_that_has_gone_is_a_miss_and_is_stored_anew(host, connection):
    one = host()
    stored(one, K[:8])
    (name,) = objects(connection)
    obstore.delete(connection.open(), name)
    assert {type(error) for error in one.load(K[:8]).values()} == {BlockMissingError}
    assert one.contains(K[:8]) == frozenset()
    assert one.store(K[:8]) == {}
    assert loads(one, K[:8])


def test_that_a_pack_has_gone_is_remembered_though_it_was_just_there(host, connection):
    one = host(remember_present_s=60.0)
    stored(one, K[:8])
    assert head(one, K[:8]) == 8
    (name,) = objects(connection)
    obstore.delete(connection.open(), name)
    assert len(one.load(K[:8])) == 8
    assert head(one, K[:8]) == 0


def test_blocks_whose_pack_was_replaced_by_single_ones_are_found(host, connection):
    one = host()
    stored(one, K[:4])
    for name in objects(connection):
        obstore.delete(connection.open(), name)
    assert host().store(K[:4]) == {}
    assert len(objects(connection)) == 4
    assert loads(one, K[:4])


def test_a_host_that_packs_nothing_reads_what_others_have_packed(host, connection):
    stored(host(), K[:8])
    plain = host(pack_bytes=0)
    assert head(plain, K[:8]) == 1
    assert plain.load(K[:1]) == {}
    assert plain.tier.gauges()["corrupt"] == 0
    assert len(objects(connection)) == 1


def test_what_was_just_stored_needs_no_renewal(host):
    one = host(ttl_s=600.0)
    stored(one, K[:8])
    one.on_loop(lambda: one.tier.touch(K[:8]))
    assert not one.tier._renewal._waiting


def test_a_use_renews_the_object_that_a_block_is_in(host, connection):
    one = host(ttl_s=0.4)
    stored(one, K[:8])
    names = objects(connection)
    client, asked = one.tier._client, []
    renew = client.renew

    async def noted(keys):
        asked.append(tuple(keys))
        await renew(keys)

    client.renew = noted

    async def renewed():
        async with asyncio.timeout(60.0):
            while not one.tier.gauges()["renewed"]:
                one.tier.touch(K[3:5])
                await asyncio.sleep(0.02)

    one.run(renewed())
    assert set(asked) == {(K[0],)}, "one object, though two blocks were used"
    assert objects(connection) == names
    assert loads(one, K[:8])
