"""A listing on a real server: complete, in bounded pages, and only the tier's own blocks."""

import pytest
from remote.valkey.tiers import QUICK, documented, tier_at
from servers.hostile_valkey import HostileServer

from kvoffload_async.errors import TierError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(48)]


def pages_of(harness, count):
    cursor = None
    while True:
        keys, cursor = harness.run(harness.tier.list_keys(cursor, count))
        assert len(keys) <= count
        yield keys
        if cursor is None:
            return


@pytest.mark.parametrize("others", [1, 3000])
@pytest.mark.parametrize("count", [1, 5, 512])
def test_every_block_is_listed_among_the_keys_of_others(server, count, others):
    with server.client() as client:
        client.mset({f"other:{number}": b"x" for number in range(others)})
        with TierHarness(tier_at(server.url(), **QUICK), 64) as harness:
            assert harness.store(K) == {}
            name = harness.tier._client._prefix
            client.set(name + bytes(200), b"no key of a block")
            listed = [key for keys in pages_of(harness, count) for key in keys]
            assert set(listed) == set(K)
            assert len(list(pages_of(harness, 512))) < 4


def test_blocks_that_stay_are_listed_while_the_servers_table_changes_its_size(server):
    with server.client() as client, TierHarness(tier_at(server.url(), **QUICK), 64) as harness:
        assert harness.store(K) == {}
        listed = set()
        for number, keys in enumerate(pages_of(harness, 4)):
            listed.update(keys)
            if number == 2:
                client.mset({f"other:{n}": b"x" for n in range(20_000)})
            if number == 40:
                client.delete(*(f"other:{n}" for n in range(20_000)))
        assert listed == set(K)


def test_a_user_without_the_right_to_list_gets_the_servers_own_words(server):
    with server.client() as client:
        rights = [right for right in documented() if right != "+scan"]
        client.acl_setuser(
            "kv", reset=True, enabled=True, nopass=True, keys="kvo:*", commands=rights
        )
    url = f"valkey://kv:any@127.0.0.1:{server.port}/0"
    with TierHarness(tier_at(url, **QUICK), 64) as harness:
        with pytest.raises(TierUnavailableError, match="no permissions to run the 'scan'"):
            harness.run(harness.tier.list_keys(None, 8))
        assert harness.store(K[:1]) == {}


@pytest.mark.parametrize("cursor", ["", "x", "0/0/00", "0/0/0123456789abcdef/abc"])
def test_a_cursor_that_no_listing_has_returned_is_refused(server, cursor):
    with (
        TierHarness(tier_at(server.url(), **QUICK), 64) as harness,
        pytest.raises(TierError, match=r"cursor: .* is not valid"),
    ):
        harness.run(harness.tier.list_keys(cursor, 8))


@pytest.mark.parametrize(
    "reply",
    [
        b"*2\r\n$1\r\n5\r\n:3\r\n",
        b"*1\r\n$1\r\n0\r\n",
        b"*2\r\n$2\r\n-1\r\n*0\r\n",
        b"*2\r\n$1\r\n7\r\n*0\r\n",  # again and again
        b"*2\r\n$1\r\n0\r\n*1\r\n$5\r\nother\r\n",
        b"*2\r\n$1\r\n0\r\n*10000000\r\n",
        b"$1\r\n0\r\n",
    ],
)
def test_a_reply_that_is_no_page_is_an_error(reply):
    with HostileServer(reply) as server:
        url = f"valkey://127.0.0.1:{server.port}/0"
        with TierHarness(tier_at(url, **QUICK | {"max_retries": 0}), 64) as harness:
            server.is_hostile = True
            with pytest.raises(TierUnavailableError, match=r"ReplyError|ValueError"):
                harness.run(harness.tier.list_keys(None, 8))
