"""Encrypted blocks in remote tiers: what is stored, and that nothing else is served."""

import logging
from itertools import islice

import numpy as np
import pytest
from remote.fake_store import SLOT_BYTES, FakeClient, World
from remote.tampering import KEYS, NUM_CHANGES, tampered

from kvoffload_async.config import ConfigError
from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.remote.client import Envelopes, Header, is_newer
from kvoffload_async.tiers.remote.settings import RemoteSettings

K = [key_of(number) for number in range(64)]
ROWS = [content_of(key, SLOT_BYTES) for key in K]
TRIES = 10_000


def world(values=None, keys=(KEYS[0],), **options):
    return World(FakeClient(values), encryption_keys=keys, **options)


def stored(keys=(KEYS[0],)):
    with world(keys=keys) as one:
        assert one.store(K[:4]) == {}
        return one.client.values


def is_wiped(one, slot):
    return not any(one._row(slot))


def test_encrypted_blocks_load_and_tell_nothing_of_their_bytes():
    with world() as one:
        assert one.store(K[:4]) == {}
        assert one.load(K[:4]) == {}
        assert all(one.holds(key, slot) for slot, key in enumerate(K[:4]))
        for key, row in zip(K, ROWS[:4], strict=False):
            value = one.client.values[key]
            assert len(value) == 128 + SLOT_BYTES
            assert not [
                at for at in range(0, SLOT_BYTES, 16) if row[at : at + 16].tobytes() in value
            ]
        seals = {value[40:92] for value in one.client.values.values()}
    assert len(seals) == 4


def test_a_header_says_which_key_a_block_has():
    value = memoryview(stored()[K[0]])
    header = Header.parse(value)
    assert (header.version, header.is_keyed, header.key) == (2, True, K[0])
    assert header.key_id == KEYS[0].id
    assert header.digest == value[40:92]
    with world() as one:
        assert header.namespace == one.tier._envelopes.namespace
        assert header.layout == one.env.identity.digest
    assert not is_newer(value)
    unkeyed = bytearray(value)
    unkeyed[6] = 0
    assert Header.parse(memoryview(unkeyed)) is None


def test_the_first_key_encrypts_and_all_decrypt():
    old = stored(keys=(KEYS[1],))
    with world(old, keys=(KEYS[0], KEYS[1])) as one:
        assert one.store(K[4:6]) == {}
        assert one.load(K[:6]) == {}
        assert all(one.holds(key, slot) for slot, key in enumerate(K[:6]))
        assert {Header.parse(memoryview(v)).key_id for v in old.values()} == {
            k.id for k in KEYS[:2]
        }


def test_blocks_of_a_key_that_is_not_given_are_missing_and_stay(caplog):
    values = stored(keys=(KEYS[1],))
    with world(values) as one, caplog.at_level(logging.WARNING):
        for _ in range(2):
            failures = one.load(K[:4])
            assert [type(failures[i]) for i in range(4)] == [BlockMissingError] * 4
        assert all(is_wiped(one, slot) for slot in range(4))
        assert one.gauge("corrupt") == one.gauge("read_again") == 0
    assert sorted(values) == sorted(K[:4])
    assert len(caplog.records) == 1
    assert KEYS[1].id.hex() in caplog.text


def test_a_block_without_encryption_is_missing_and_stays():
    with World() as plain:
        plain.store(K[:1])
        values = plain.client.values
    with world(values) as one:
        failures = one.load(K[:1])
        assert isinstance(failures[0], BlockMissingError)
        assert is_wiped(one, 0)
    assert values
    with World(FakeClient(stored())) as plain:
        assert isinstance(plain.load(K[:1])[0], CorruptBlockError)


def test_what_lies_in_a_row_is_not_changed_by_a_store():
    with world() as one:
        one.store(K[:4])
        assert all(one.holds(key, slot) for slot, key in enumerate(K[:4]))


def test_a_corrupt_block_is_read_twice_and_removed():
    values = stored()
    values[K[1]] = values[K[1]][:-1] + bytes([values[K[1]][-1] ^ 1])
    with world(values) as one:
        failures = one.load(K[:4])
        assert {i: type(why) for i, why in failures.items()} == {1: CorruptBlockError}
        assert is_wiped(one, 1)
        assert one.gauge("read_again") == one.gauge("corrupt") == one.gauge("removed") == 1
    assert K[1] not in values


def test_of_10000_tampered_blocks_none_is_served():
    with world() as one:
        layout = one.env.identity.digest
        changes = tampered(one.tier._envelopes, K, ROWS, layout, seed=7)
        seen, tries = set(), 0
        while tries < TRIES:
            batch = {key: (how, value) for how, key, value in islice(changes, 64)}
            one.client.values = {key: value for key, (_, value) in batch.items()}
            failures = one.load(list(batch))
            assert len(failures) == len(batch)
            assert all(is_wiped(one, slot) for slot in range(len(batch)))
            seen.update(how for how, _ in batch.values())
            tries += len(batch)
    assert len(seen) == NUM_CHANGES


def test_every_single_bit_of_a_header_and_of_some_bytes_of_the_block_counts():
    layout = "0" * 32
    envelopes = Envelopes(layout, 256, None, KEYS[:1])
    row = np.frombuffer(bytes(range(256)), dtype=np.uint8)
    value = envelopes.wrap(K[0], row)
    into = np.empty(256, dtype=np.uint8)
    assert envelopes.unwrap(K[0], value.data, into) is None
    assert into.tobytes() == row.tobytes()
    for bit in range(len(value) * 8):
        changed = value.copy()
        changed[bit // 8] ^= 1 << bit % 8
        assert envelopes.unwrap(K[0], changed.data, into) is not None
        assert not into.any()


def test_an_encryption_key_does_not_go_with_an_integrity_key():
    with pytest.raises(ConfigError, match="integrity_key_file: does not go with encryption_key"):
        RemoteSettings(integrity_key=IntegrityKey(b"1" * 32), encryption_keys=KEYS[:1])


def test_namespaces_of_encrypted_blocks_depend_on_the_layout_alone():
    layouts = ["0" * 32, "1" * 32]
    made = [Envelopes(at, 1, None, [key]).namespace for at in layouts for key in KEYS]
    assert len(set(made)) == 2
    assert not {Envelopes(at, 1).namespace for at in layouts}.intersection(made)
