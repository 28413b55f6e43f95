"""Objects that others put into the bucket, changed or removed: no harm, and no loss."""

import obstore
import pytest
from remote.object.tiers import K, head, loads, objects, stored

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierUnavailableError
from kvoffload_async.tiers.object.client import name_of


def put(connection, key, value):
    """Put an object where that of a block is, or would be, and return its name."""
    name = name_of(objects(connection)[0].partition("/")[0], key)
    obstore.put(connection.open(), name, value)
    return name


# -- what others have put there -----------------------------------------------------------------


@pytest.mark.parametrize("content", [b"KVOP", b"KVOB", b"x" * 10_000])
def test_an_object_that_is_no_block_is_removed_when_it_is_loaded(host, connection, content):
    one = host()
    stored(one, K[:2])
    put(connection, K[0], content)
    assert head(host(), K[:2]) == 2, "something is there"
    failures = one.load(K[:2])
    assert {i: type(error) for i, error in failures.items()} == {0: CorruptBlockError}
    figures = one.tier.gauges()
    assert (figures["read_again"], figures["corrupt"], figures["removed"]) == (1, 1, 1)
    assert len(objects(connection)) == 1
    assert one.store(K[:2]) == {}
    assert loads(host(), K[:2])


def test_an_object_that_was_put_right_meanwhile_is_not_removed(host, connection):
    one = host()
    stored(one, K[:1])
    (name,) = objects(connection)
    good = bytes(obstore.get(connection.open(), name).bytes())
    put(connection, K[0], good[:-1])
    remove_if = one.tier._client.remove_if

    async def late(*arguments):
        put(connection, K[0], good)
        return await remove_if(*arguments)

    one.tier._client.remove_if = late
    assert len(one.load(K[:1])) == 1
    assert one.tier.gauges()["removed"] == 0
    assert loads(one, K[:1])


# -- what has changed since it was seen ----------------------------------------------------------


def test_that_an_object_has_gone_is_remembered_though_it_was_just_there(host, connection):
    one = host(positive_cache_ttl_s=60.0)
    stored(one, K[:8])
    assert head(one, K[:8]) == 8
    for name in objects(connection):
        obstore.delete(connection.open(), name)
    assert {type(error) for error in one.load(K[:8]).values()} == {BlockMissingError}
    assert head(one, K[:8]) == 0
    assert one.store(K[:8]) == {}
    assert loads(one, K[:8])


def test_a_name_that_can_be_neither_read_nor_written_costs_its_block_alone(host, tmp_path):
    one = host(max_retries=0)
    assert head(one, K[:4]) == 0
    namespace = one.tier._client._namespace
    for key in K[:2]:
        (tmp_path / "blocks" / name_of(namespace, key)).mkdir(parents=True)
    failures = one.store(K[:4])
    assert {i: type(error) for i, error in failures.items()} == dict.fromkeys(
        (0, 1), TierUnavailableError
    )
    assert loads(one, K[2:4])


def test_who_loses_a_race_to_an_object_that_has_gone_meanwhile_stores_it(
    host, connection, monkeypatch
):
    one = host()
    assert head(one, K[:4]) == 0
    put_async, lost = obstore.put_async, set()

    async def lost_at_first(store, name, content, **options):
        if options.get("mode") == "create" and name not in lost:
            lost.add(name)
            raise obstore.exceptions.AlreadyExistsError("409 Conflict")
        return await put_async(store, name, content, **options)

    monkeypatch.setattr(obstore, "put_async", lost_at_first)
    assert one.store(K[:4]) == {}
    assert len(lost) == len(objects(connection)) == 4
    assert loads(one, K[:4])


def test_a_lost_race_counts_as_stored_and_measures_no_rate(host, connection, monkeypatch):
    one, other = host(negative_cache_ttl_s=60.0), host()
    assert one.contains(K[:6]) == frozenset()
    stored(other, K[:4])
    ended, sizes = one.tier._stores.arrives, []

    def noted(departure, num_bytes):
        sizes.append(num_bytes)
        ended(departure, num_bytes)

    monkeypatch.setattr(one.tier._stores, "arrives", noted)
    assert one.store(K[:6]) == {}
    assert sorted(map(bool, sizes)) == [False] * 4 + [True] * 2, "its bytes may not have been sent"
    assert one.tier.gauges()["present_blocks"] == 4
    assert len(objects(connection)) == 6
    assert loads(one, K[:6])
