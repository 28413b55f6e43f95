"""Bad objects are replaced, and ages renewed, beside other hosts and with few rights."""

import asyncio
import json
from functools import partial

import obstore
import pytest
from remote.object.test_faults import K, kinds, open_on, recovers
from remote.object.tiers import names_in
from remote.values import read, room, value_of
from servers.scripted_http import ScriptedServer

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.tiers.object.client import ObjectClient, renewal_name_of
from kvoffload_async.tiers.object.tier import ObjectOptions
from kvoffload_async.tiers.remote.client import RefusedError, ValueExistsError


@pytest.fixture(params=["directory", pytest.param("S3", marks=pytest.mark.servers)])
def connection(request, tmp_path):
    if request.param == "directory":
        return ObjectOptions(url=f"file://{tmp_path}/blocks")
    server = request.getfixturevalue("server")
    return server.connection(request.getfixturevalue("prefix"))


async def refused(*_, **__):
    raise obstore.exceptions.PermissionDeniedError("403 Forbidden: <Code>AccessDenied</Code>")


@pytest.fixture
def no_deletes(monkeypatch):
    monkeypatch.setattr(obstore, "delete_async", refused)


@pytest.fixture
def hosts(connection):
    with open_on(connection) as one, open_on(connection) as other:
        yield one, other


def put(connection, host, key, content):
    obstore.put(connection.open(), host.tier._client._name(key), content)


@pytest.mark.parametrize("content", [b"bad", b""])
def test_a_bad_block_heals_where_nothing_may_be_deleted(
    hosts, connection, content, no_deletes, caplog
):
    one, other = hosts
    assert one.store(K[:4]) == {}
    for key in K[:4]:
        put(connection, one, key, content)
    assert kinds(one.load(K[:4])) == {CorruptBlockError if content else BlockMissingError}
    for host in hosts:
        assert host.contains(K[:4]) == frozenset()
        assert host.run(host.tier.longest_prefixes([K[:4]])) == [0]
        assert kinds(host.load(K[:4])) == {BlockMissingError}
    assert other.store(K[:4]) == {}
    assert recovers(one, K[:4])
    assert one.tier.gauges()["removed"] == (4 if content else 0)
    assert one.tier.gauges()["unremoved"] == 0
    assert caplog.text.count("deletion is not permitted") == (1 if content else 0)


def test_a_deleted_block_is_not_listed_where_nothing_may_be_deleted(hosts, no_deletes):
    one, other = hosts
    assert one.store(K[:4]) == {}
    assert one.run(one.tier.delete(K[:2])) == {}
    assert other.contains(K[:4]) == frozenset(K[2:4])
    first, cursor = other.run(other.tier.list_keys(None, 3))
    rest, end = other.run(other.tier.list_keys(cursor, 3))
    assert sorted([*first, *rest]) == sorted(K[2:4])
    assert end is None


def test_a_bad_block_whose_deletion_fails_is_absent_all_the_same(hosts, connection, monkeypatch):
    async def broken(*_):
        raise obstore.exceptions.GenericError("connection reset")

    one, other = hosts
    put(connection, one, K[0], b"bad")
    monkeypatch.setattr(obstore, "delete_async", broken)
    assert kinds(one.load(K[:1])) == {CorruptBlockError}
    assert other.contains(K[:1]) == frozenset()
    assert other.store(K[:1]) == {}
    assert recovers(one, K[:1])


def test_google_cloud_storage_is_told_the_generation_that_is_overwritten():
    def answer(request):
        request.reply(200, b"bad" if request.command == "GET" else b"", x_goog_generation="7")

    with ScriptedServer(answer) as server:
        account = dict.fromkeys(("private_key", "private_key_id", "client_email"), "")
        options = {
            "base_url": f"http://127.0.0.1:{server.port}",
            "service_account_key": json.dumps(account | {"disable_oauth": True}),
            "allow_http": True,
        }
        store = ObjectOptions(url="gs://bucket", store_options=options).open()
        client = ObjectClient(store, "0" * 32, {})

        async def remove():
            (found,) = await client.get(K[:1], [room(1 << 20)])
            return await client.remove_if(K[0], found, "")

        assert asyncio.run(remove())
        methods = [method for method, *_ in server.requests]
        assert methods == ["GET", "HEAD", "PUT", "DELETE"]
        assert server.requests[2][2]["x-goog-if-generation-match"] == "7"


@pytest.mark.parametrize("status", [404, 409, 412])
def test_a_bad_object_that_has_changed_meanwhile_is_neither_emptied_nor_deleted(status):
    def answer(request):
        request.reply(status if request.command == "PUT" else 200, b"bad")

    with ScriptedServer(answer) as server:
        options = {"endpoint": f"http://127.0.0.1:{server.port}", "skip_signature": True}
        options["allow_http"] = True
        store = ObjectOptions(url="s3://bucket", store_options=options).open()
        client = ObjectClient(store, "0" * 32, {})

        async def remove():
            (found,) = await client.get(K[:1], [room(1 << 20)])
            return await client.remove_if(K[0], found, "")

        assert asyncio.run(remove()) is False
        methods = [method for method, *_ in server.requests]
        assert methods == ["GET", "HEAD", "PUT"]
        assert server.requests[2][2]["if-match"] == '"1"'


def test_of_two_hosts_that_overwrite_an_emptied_object_the_first_one_wins(
    connection, hosts, monkeypatch
):
    one, other = hosts
    put(connection, one, K[0], b"")
    head, late = obstore.head_async, [True]

    async def head_and_then_the_other(*arguments):
        found = await head(*arguments)
        if late:
            late.clear()
            assert await other.tier._client.put(K[:1], [value]) == [None]
        return found

    value = value_of(other, K[0], 0)
    monkeypatch.setattr(obstore, "head_async", head_and_then_the_other)
    (error,) = one.run(one.tier._client.put(K[:1], [value]))
    is_directory = connection.url.startswith("file:")
    assert type(error) is (type(None) if is_directory else ValueExistsError)
    assert read(one, K[0], value[0].nbytes).data == value[0]


def test_what_the_server_forbids_to_delete_is_known_by_its_answer():
    with ScriptedServer(lambda request: request.reply(403, b"<Code>AccessDenied</Code>")) as server:
        options = {"endpoint": f"http://127.0.0.1:{server.port}", "skip_signature": True}
        options["allow_http"] = True
        store = ObjectOptions(url="s3://bucket", store_options=options).open()
        with pytest.raises(obstore.exceptions.PermissionDeniedError) as raised:
            obstore.delete(store, "name")
        assert server.requests[0][0] == "DELETE"
    assert isinstance(ObjectClient(store, "0" * 32, {}).mapped(raised.value), RefusedError)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_an_object_that_another_host_renews_at_the_same_time_costs_no_other(
    connection, monkeypatch, copies
):
    with open_on(connection) as one:
        one.store(K[:3])
        client = one.tier._client
        copy_async, delete = obstore.copy_async, partial(obstore.delete, connection.open())
        done = []

        async def beside_another_host(store, source, target):
            await copy_async(store, source, target)
            copy = renewal_name_of(client._namespace, K[1])
            done.append((source, target))
            if len([pair for pair in done if copy in pair]) == copies and copy in (source, target):
                delete(copy)

        monkeypatch.setattr(obstore, "copy_async", beside_another_host)
        one.run(client.renew(K[:3]))
        assert sum("renewals" in name for name in names_in(connection)) == 0
        assert recovers(one, K[:3])


def test_ages_are_renewed_where_nothing_may_be_deleted(connection, no_deletes, caplog):
    with open_on(connection) as one:
        one.store(K[:3])
        one.run(one.tier._client.renew(K[:3]))
        one.run(one.tier._client.renew(K[:3]))
        assert recovers(one, K[:3])
    assert caplog.text.count("deletion is not permitted") == 1
