"""A server that replies with what nobody asked for: refused before anything is made of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio import Connection
from remote.valkey.tiers import QUICK, tier_at
from servers.hostile_valkey import HostileServer

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.valkey.nodes import (
    ReplyBounds,
    ReplyError,
    RoutedConnection,
    replies_up_to,
)

K = [key_of(number) for number in range(4)]
REPLY_BYTES = 1 << 16

lines = st.binary(max_size=40).map(lambda text: text.replace(b"\r", b"").replace(b"\n", b""))
leaves = st.one_of(
    st.builds(lambda kind, text: kind + text + b"\r\n", st.sampled_from([b"+", b"-", b":"]), lines),
    st.binary(max_size=600).map(lambda data: b"$%d\r\n%b\r\n" % (len(data), data)),
    st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n"]),
)
replies = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4).map(lambda r: b"*%d\r\n" % len(r) + b"".join(r)),
    max_leaves=12,
).filter(lambda reply: not reply.startswith(b"*1\r\n" * 8))

EXCESSIVE = {
    "an array of 2^31 elements": b"*2147483647\r\n",
    "an array of 10^5 elements": b"*100000\r\n",
    "a string of 512 MiB": b"$536870912\r\nx",
    "a string of 2^63 bytes": b"$9223372036854775807\r\n",
    "a length of many digits": b"$" + b"9" * 4000 + b"\r\n",
    "a string without an end": b"$100000000\r\n" + b"x" * 100_000,
    "a line without an end": b"+" + b"x" * 100_000,
    "a length that is no number": b"*1e9\r\n",
    "arrays in arrays": b"*1\r\n" * 9,
    "arrays of arrays": b"*4096\r\n" * 8,
    "a type of RESP3": b"%1\r\n",
    "a message that was not asked for": b">2\r\n",
    "an empty line": b"\r\n",
}


def feed(data, cuts=(), most_bytes=REPLY_BYTES):
    bounds = ReplyBounds()
    begin = 0
    with replies_up_to(most_bytes):
        for cut in [*sorted(cuts), len(data)]:
            bounds.feed(data[begin:cut])
            begin = max(begin, cut)
    return bounds


@given(st.lists(replies, min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=8))
def test_replies_within_the_bounds_pass_however_they_are_divided(several, cuts):
    data = b"".join(several)
    bounds = feed(data, [min(cut, len(data)) for cut in cuts])
    with pytest.raises(ReplyError):  # each has ended where it ends: what follows is a header
        bounds.feed(b"?\r\n")


@pytest.mark.parametrize("reply", EXCESSIVE.values(), ids=EXCESSIVE)
@pytest.mark.parametrize("before", [b"", b"+OK\r\n$3\r\nabc\r\n*1\r\n:1\r\n"])
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_what_exceeds_the_bounds_is_refused_however_it_is_divided(reply, before, step):
    data = before + reply
    with pytest.raises(ReplyError):
        feed(data, range(step, len(data), step))


def test_each_reply_has_the_whole_bound_for_itself():
    feed(b"$%d\r\n%b\r\n" % (REPLY_BYTES, bytes(REPLY_BYTES)) * 3)
    with pytest.raises(ReplyError):
        feed(b"$%d\r\n" % (REPLY_BYTES + 5000))


def test_a_reply_to_a_question_is_short():
    with pytest.raises(ReplyError):
        feed(b"$%d\r\n" % REPLY_BYTES, most_bytes=0)


@pytest.mark.parametrize("reply", EXCESSIVE.values(), ids=EXCESSIVE)
def test_a_server_whose_replies_are_excessive_is_a_tier_that_is_down(reply):
    with HostileServer(reply) as server:
        url = f"valkey://127.0.0.1:{server.port}/0"
        options = QUICK | {"max_retries": 0}
        with TierHarness(tier_at(url, **options), 64, timeout_s=60.0) as harness:
            server.is_hostile = True
            with pytest.raises(TierUnavailableError, match="ReplyError"):
                harness.contains(K)
            with pytest.raises(TierUnavailableError, match="ReplyError"):
                harness.load(K)


def test_an_opening_with_an_excessive_reply_fails():
    with HostileServer(EXCESSIVE["an array of 2^31 elements"]) as server:
        server.is_hostile = True
        with pytest.raises(TierUnavailableError, match="ReplyError"):
            TierHarness(tier_at(f"valkey://127.0.0.1:{server.port}/0", **QUICK), 64)


def test_the_librarys_parser_in_python_reads_nothing(monkeypatch):
    """redis-py falls back to it, without a word, if hiredis is older than it wants."""

    def set_parser(connection, _parser_class):
        Connection.set_parser(connection, _AsyncRESP2Parser)

    monkeypatch.setattr(RoutedConnection, "set_parser", set_parser)
    with (
        HostileServer(EXCESSIVE["a string of 512 MiB"]) as server,
        pytest.raises(TierUnavailableError, match="redis-py parses without hiredis"),
    ):
        TierHarness(tier_at(f"valkey://127.0.0.1:{server.port}/0", **QUICK), 64)
