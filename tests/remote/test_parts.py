"""The parts of remote tiers by themselves."""

import asyncio

import numpy as np
import pytest
from remote.fake_store import SLOT_BYTES, FakeClient, LibraryError, World
from virtual_runner import VirtualRunner

from kvoffload_async.config import without_user_info
from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.remote import existence as memory_module
from kvoffload_async.tiers.remote.calls import run_together
from kvoffload_async.tiers.remote.client import Envelopes, Header, is_newer
from kvoffload_async.tiers.remote.existence import ExistenceCache
from kvoffload_async.tiers.remote.settings import Redactor
from kvoffload_async.waiting import LastingFuture

K = [key_of(number) for number in range(200)]


# -- heads --------------------------------------------------------------------------------------


def test_where_one_call_answers_for_many_keys_one_is_made():
    with World(FakeClient(dict.fromkeys(K[:50], b""))) as world:
        assert world.heads(K[:64], [*K[:10], *K[100:110]], []) == [50, 10, 0]
        assert world.client.calls["exist"] == 1


def test_what_was_answered_lately_needs_no_question():
    client = FakeClient(dict.fromkeys(K[:50], b""))
    with World(client, positive_cache_ttl_s=9.0, negative_cache_ttl_s=9.0) as world:
        world.heads(K[:64])
        asked = client.calls["exist"]
        assert world.heads(K[:64]) == [50]
        assert client.calls["exist"] == asked


def test_one_question_that_fails_fails_the_probe():
    with World(FakeClient(answers_many=False), max_retries=0) as world:
        world.client.failures = [None, LibraryError()]
        with pytest.raises(TierUnavailableError):
            world.run(world.tier.contains(K[:40]))
        assert world.client.calls["exist"] < 40


# -- remembered answers -------------------------------------------------------------------------


def test_answers_are_believed_for_their_time():
    now = [0.0]
    memory = ExistenceCache(10.0, 1.0, lambda: now[0])
    memory.appeared(K[:1])
    memory.vanished(K[1:2])
    assert [memory.get(key) for key in K[:3]] == [True, False, None]
    now[0] = 1.0
    assert [memory.get(key) for key in K[:3]] == [True, None, None]
    now[0] = 10.0
    assert memory.get(K[0]) is None


def test_the_last_answer_counts():
    memory = ExistenceCache(10.0, 10.0, lambda: 0.0)
    memory.vanished(K[:1])
    memory.appeared(K[:1])
    assert memory.get(K[0]) is True
    memory.vanished(K[:1])
    assert memory.get(K[0]) is False


def test_an_answer_that_was_contradicted_does_not_come_back():
    now = [0.0]
    memory = ExistenceCache(1.0, 10.0, lambda: now[0])
    memory.vanished(K[:1])
    memory.appeared(K[:1])
    now[0] = 2.0
    assert memory.get(K[0]) is None


def test_nothing_is_remembered_for_no_time():
    memory = ExistenceCache(0.0, 0.0, lambda: 0.0)
    memory.appeared(K[:1])
    memory.vanished(K[1:2])
    assert not memory._present._expiry
    assert not memory._absent._expiry


def test_expired_answers_leave_and_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(memory_module, "MOST_KEYS", 10)
    now = [0.0]
    memory = ExistenceCache(10.0, 10.0, lambda: now[0])
    memory.appeared(K[:30])
    assert len(memory._present._expiry) == 10
    assert memory.get(K[29]) is True
    now[0] = 20.0
    memory.appeared(K[40:41])
    assert len(memory._present._expiry) == 9, "no call takes long"
    memory.appeared(K[41:45])
    assert list(memory._present._expiry) == K[40:45]


# -- together -----------------------------------------------------------------------------------


def test_the_first_error_ends_the_others_and_is_raised():
    runner, ended = VirtualRunner(), []

    async def fail():
        await asyncio.sleep(1.0)
        raise ValueError("first")

    async def wait():
        try:
            await asyncio.sleep(9.0)
        finally:
            ended.append(runner.loop.time())

    with pytest.raises(ValueError, match="first"):
        runner.run(run_together([wait(), fail(), wait()], "test"), 10.0)
    assert ended == [1.0, 1.0]
    runner.close()


def test_they_have_ended_when_their_caller_has_however_often_it_is_cancelled():
    runner, ended = VirtualRunner(), []

    async def last():
        future = LastingFuture()
        runner.loop.call_later(5.0, future.set_result, None)
        try:
            await future
        finally:
            ended.append(runner.loop.time())

    async def cancel_twice():
        task = asyncio.create_task(run_together([last(), last()], "test"))
        for _ in range(3):
            await asyncio.sleep(1.0)
            task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    runner.run(cancel_twice(), 10.0)
    assert ended == [5.0, 5.0]
    runner.close()


# -- secrets ------------------------------------------------------------------------------------


def test_secrets_are_hidden_however_a_url_writes_them():
    redact = Redactor(["p@ss/word", "ab", ""])
    text = "p@ss/word p%40ss%2Fword redis://user:x@host:1/0 able"
    assert redact(text) == "*** *** redis://***@host:1/0 able"
    assert "p@ss" not in repr(redact)
    assert redact(ValueError("p@ss/word")) == "***"


def test_a_url_without_a_user_stays_as_it_is():
    assert without_user_info("see http://host/a b@c") == "see http://host/a b@c"
    assert without_user_info("'s3://u:p/w@host/x'") == "'s3://***@host/x'"


# -- envelopes ----------------------------------------------------------------------------------


def test_a_value_says_what_it_is():
    with World() as world:
        world.store(K[:1])
        value = world.client.values[K[0]]
        header = Header.parse(memoryview(value))
    assert header.key == K[0]
    assert header.layout == world.env.identity.digest
    assert header.payload_offset % 64 == 0
    assert header.payload_offset + header.payload_bytes == len(value)
    assert not header.is_keyed
    for bad in (b"", b"KVOB", b"X" + value[1:], value[:100], value[:4] + b"\3\0" + value[6:]):
        assert Header.parse(memoryview(bad)) is None
    assert is_newer(memoryview(value[:4] + b"\3\0" + value[6:]))
    assert not is_newer(memoryview(value))
    assert not is_newer(memoryview(value)[:10])


def test_blocks_of_another_integrity_key_do_not_verify():
    one, other = IntegrityKey(b"1" * 32), IntegrityKey(b"2" * 32)
    with World(integrity_key=one) as world:
        world.store(K[:1])
        values = world.client.values
        assert Header.parse(memoryview(values[K[0]])).is_keyed
        assert world.load(K[:1]) == {}
    for key in (other, None):
        with World(FakeClient(dict(values)), integrity_key=key) as world:
            assert list(world.load(K[:1])) == [0]


def test_forged_blocks_are_not_served_with_an_integrity_key():
    """Whoever can write a store knows its blocks, and their key's id, but not the key."""
    own, other = IntegrityKey(b"1" * 32), IntegrityKey(b"2" * 32)
    with World(integrity_key=own) as world:
        world.store(K[:2])
        values, layout = dict(world.client.values), world.env.identity.digest
    row, num_bytes = bytes(SLOT_BYTES), len(values[K[0]])
    header_bytes = num_bytes - SLOT_BYTES
    forged = [values[K[1]], values[K[1]].replace(K[1], K[0]), values[K[0]][:header_bytes] + row]
    for key in (None, other):
        value = Envelopes(layout, SLOT_BYTES, key).wrap(K[0], np.frombuffer(row, np.uint8))
        forged += [value.tobytes()]
        forged += [values[K[0]][:40] + forged[-1][40:56] + values[K[0]][56:header_bytes] + row]
    for value in forged:
        assert len(value) == num_bytes
        with World(FakeClient({K[0]: value}), integrity_key=own) as world:
            assert list(world.load(K[:1])) == [0]
    with World(FakeClient(values), integrity_key=own) as world:
        assert world.load(K[:2]) == {}


def test_namespaces_differ_in_layout_and_integrity_key():
    layouts = ["0" * 32, "1" * 32]
    keys = [None, IntegrityKey(b"1" * 32), IntegrityKey(b"2" * 32)]
    assert len({Envelopes(layout, 1, key).namespace for layout in layouts for key in keys}) == 6
