"""A server that replies with what nobody asked for: refused before anything is made of it."""

import hiredis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote.valkey.tiers import QUICK, tier_at
from servers.hostile_valkey import HostileServer

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote.client import Target
from kvoffload_async.tiers.valkey.replies import ReplyError, ReplyReader, ServerError

K = [key_of(number) for number in range(4)]
REPLY_BYTES = 1 << 16

lines = st.binary(max_size=40).map(lambda text: text.replace(b"\r", b"").replace(b"\n", b""))
leaves = st.one_of(
    st.builds(lambda kind, text: kind + text + b"\r\n", st.sampled_from([b"+", b"-"]), lines),
    st.integers(-(1 << 63), (1 << 63) - 1).map(lambda number: b":%d\r\n" % number),
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


def receive(reader, data):
    while data:
        memory = reader.memory()
        count = min(len(memory), len(data))
        memory[:count] = data[:count]
        reader.received(count)
        data = data[count:]


def feed(data, cuts=(), most_bytes=REPLY_BYTES):
    reader, begin = ReplyReader(), 0
    reader.expect(1000, most_bytes=most_bytes)
    for cut in [*sorted(cuts), len(data)]:
        receive(reader, data[begin:cut])
        begin = max(begin, cut)
    return reader


def parsed(data):
    """Return what the library makes of replies."""
    parser = hiredis.Reader(replyError=ServerError)
    parser.feed(data)
    found = []
    while (reply := parser.gets()) is not False:
        found.append(reply)
    return found


@given(st.lists(replies, min_size=1, max_size=5), st.lists(st.integers(0, 2000), max_size=8))
def test_replies_within_the_bounds_are_parsed_however_they_are_divided(several, cuts):
    data = b"".join(several)
    reader = feed(data, [min(cut, len(data)) for cut in cuts])
    assert repr(reader.replies) == repr(parsed(data))
    with pytest.raises(ReplyError):  # each has ended where it ends: what follows is a header
        receive(reader, b"?\r\n")


@given(
    st.lists(st.one_of(st.binary(max_size=80), st.sampled_from([None, "ERR it says"])), min_size=1),
    st.lists(st.integers(1, 60)),
)
def test_values_are_read_into_their_targets_however_they_are_divided(values, cuts):
    targets = [Target(20, np.zeros(59, dtype=np.uint8)) for _ in values]
    reader, sent = ReplyReader(), []
    reader.expect(len(values), targets)
    for value in values:
        sent.append(b"$-1\r\n" if value is None else b"-ERR it says\r\n")
        if isinstance(value, bytes):
            sent[-1] = b"$%d\r\n%b\r\n" % (len(value), value)
    data = b"".join(sent)
    for cut in cuts:
        receive(reader, data[:cut])
        data = data[cut:]
    receive(reader, data)
    assert reader.is_complete()
    for value, reply, target in zip(values, reader.replies, targets, strict=True):
        if isinstance(value, bytes):
            assert reply == len(value)
            assert target.copy() == value
        else:
            assert str(reply) == str(value)
            assert not any(target.row)


@pytest.mark.parametrize("what", [b"+OK\r\n", b"+O", b"$3\r\nab", b"\r"])
def test_bytes_that_nobody_asked_for_are_refused(what):
    reader = ReplyReader()
    with pytest.raises(ReplyError):
        receive(reader, what)
    reader = ReplyReader()
    reader.expect(1)
    with pytest.raises(ReplyError):
        receive(reader, b":1\r\n" + what)


def test_a_value_longer_than_its_target_is_refused_before_it_is_read():
    reader, target = ReplyReader(), Target(4, np.zeros(16, dtype=np.uint8))
    reader.expect(1, [target])
    with pytest.raises(ReplyError):
        receive(reader, b"$22\r\n" + bytes(range(1, 23)))
    assert not any(target.row)


def test_a_value_without_its_line_end_is_refused():
    reader, target = ReplyReader(), Target(4, np.zeros(16, dtype=np.uint8))
    reader.expect(1, [target])
    with pytest.raises(ReplyError):
        receive(reader, b"$20\r\n" + bytes(22))


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
