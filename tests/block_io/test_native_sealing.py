"""The native engine encrypts as `Sealer` does, in every length, and refuses what it cannot hold."""

import os
import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from native_engine import Block, native, opened_engine, outcomes
from xxh3 import addresses

from kvoffload_async.block_io import hashes
from kvoffload_async.block_io.contract import NOT_DECRYPTED, SEAL_BYTES, TAG_AT
from kvoffload_async.tiers.files.sealing import EncryptionKey, Sealer

KEY, OTHER = EncryptionKey(bytes(range(32))), EncryptionKey(bytes(range(64)))
SEALER = Sealer([OTHER, KEY], "slab 3", "layout")
READER = Sealer([KEY, OTHER], "slab 3", "layout")


def sealing(sealer=SEALER):
    return native.Sealing(hashes.cipher_addresses(), sealer.secrets, sealer.info)


@pytest.fixture(scope="module")
def sealing_engine():
    with opened_engine(piece_bytes=4096, sealing=sealing()) as engine:
        yield engine


@pytest.fixture(scope="module")
def file():
    fd = os.memfd_create("sealed")
    yield fd
    os.close(fd)


def moved(engine, fd, rows, keys, seals=b"", *, pad=SEAL_BYTES, is_store):
    """Store or load rows of one length at the beginning of a file."""
    row_bytes = len(rows) // len(keys)
    memory, runs = engine.map(rows, row_bytes, row_bytes + pad), [(fd, 0, len(keys))]
    numbers = range(len(keys))
    ticket = engine.extents(memory, is_store, numbers, runs, keys, SEALER.prefix, seals)
    outcome = outcomes(engine, ticket)
    memory.release()
    return outcome


lengths = st.one_of(st.integers(1, 600), st.integers(1, 20_000), st.sampled_from([4096, 8192]))


@given(lengths, st.integers(0, 5000), st.lists(st.binary(max_size=100), min_size=1, max_size=6))
def test_both_implementations_have_one_format(sealing_engine, file, row_bytes, pad, keys):
    rows, pad = os.urandom(row_bytes * len(keys)), SEAL_BYTES + pad
    begins = SEALER.begin(len(keys))
    errors, seals = moved(sealing_engine, file, rows, keys, begins, pad=pad, is_store=True)
    assert errors == {}
    for index, key in enumerate(keys):
        slot = os.pread(file, row_bytes + pad, index * (row_bytes + pad))
        body, seal = bytearray(slot[:row_bytes]), slot[row_bytes : row_bytes + SEAL_BYTES]
        assert seal[:TAG_AT] == begins[index * TAG_AT : (index + 1) * TAG_AT]
        assert seal == seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
        assert not any(slot[row_bytes + SEAL_BYTES :])
        assert READER.open_into(key, seal, memoryview(body))
        assert body == rows[index * row_bytes : (index + 1) * row_bytes]
    for index, key in enumerate(keys):  # now those of Python, with the other key
        row = memoryview(rows)[index * row_bytes : (index + 1) * row_bytes]
        body = bytearray(row_bytes)
        seal = READER.seal(key, row, memoryview(body))
        os.pwrite(file, bytes(body) + seal, index * (row_bytes + pad))
    loaded = bytearray(len(rows))
    errors, _ = moved(sealing_engine, file, loaded, keys, pad=pad, is_store=False)
    assert errors == {}
    assert loaded == rows


@given(lengths, st.integers(0), st.sampled_from(["bit", "key", "layout", "secret"]))
def test_what_was_changed_is_not_opened_and_leaves_no_byte(
    sealing_engine, file, row_bytes, at, change
):
    row, key = os.urandom(row_bytes), b"key"
    made = {
        "layout": Sealer([KEY], "slab 3", "another"),
        "secret": Sealer([EncryptionKey(bytes(16))], "slab 3", "layout"),
    }.get(change, SEALER)
    body = bytearray(row_bytes)
    seal = made.seal(key, memoryview(row), memoryview(body))
    slot = body + seal
    if change == "bit":
        slot[at // 8 % len(slot)] ^= 1 << at % 8
    os.pwrite(file, slot, 0)
    loaded = bytearray(b"\xff" * row_bytes)
    asked = b"yek" if change == "key" else key
    errors, found = moved(sealing_engine, file, loaded, [asked], is_store=False)
    assert errors == {0: NOT_DECRYPTED}
    assert not any(loaded)
    assert found == slot[row_bytes:], "its seal tells which key it needs"


def test_a_nonce_is_used_as_it_is_given(sealing_engine, file):
    begin = bytes(OTHER.id) + bytes(16) + b"nonce 12byte"
    _, seal = moved(sealing_engine, file, b"data" * 500, [b"k"], begin, is_store=True)
    subkey = OTHER.subkey(bytes(16), b"kvoffload-seal slab 3")
    bound = SEALER.prefix + struct.pack("<Q", 1) + b"k"
    expected = AESGCM(subkey).encrypt(begin[24:], b"data" * 500, bound)
    assert os.pread(file, 2000, 0) + seal[TAG_AT:] == expected


# -- what could cause invalid memory accesses ------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"seals": b""}, "seals: 0 items instead of 216"),
        ({"seals": bytes(217)}, "seals: 217 items instead of 216"),
        ({"keys": None}, "keys: None is no tuple"),
        ({"keys": [b"k"] * 5}, "keys: 5 items instead of 6"),
        ({"keys": [b"k" * 4096] * 6}, "keys: one has 4096 bytes, more than 4096 with the prefix"),
        ({"prefix": bytes(5000)}, "keys: one has 5 bytes, more than 4096 with the prefix"),
    ],
)
def test_stores_that_do_not_fit_their_seals_are_refused(sealing_engine, tmp_path, changed, why):
    block = Block(sealing_engine, tmp_path, 6, 1000, 1052)
    try:
        with pytest.raises((ValueError, TypeError), match=why):
            block.extents(is_store=True, **{"seals": SEALER.begin(6)} | changed)
    finally:
        block.close()


def test_a_slot_needs_room_for_a_seal(sealing_engine, file):
    with pytest.raises(ValueError, match="rows of 100 bytes do not fit slots of 151"):
        moved(sealing_engine, file, bytes(100), [b"k"], SEALER.begin(1), pad=51, is_store=True)


def test_an_attribute_holds_a_seal(sealing_engine, tmp_path):
    block = Block(sealing_engine, tmp_path, 6, 1000)
    try:
        with pytest.raises(ValueError, match="value_prefix: 13 bytes are more than 12"):
            block.load_files(value_prefix=bytes(13))
    finally:
        block.close()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ciphers": (1, 2)}, "ciphers: 16 items instead of 72"),
        ({"secrets": b""}, "sealing: 0 bytes are no keys"),
        ({"secrets": SEALER.secrets[:-1]}, "sealing: 159 bytes are no keys"),
        ({"secrets": struct.pack("8sQ64s", b"", 65, b"")}, "sealing: key 0 is too long"),
        ({"ciphers": (0,) * 9}, "ciphers: address 0 is zero"),
    ],
)
def test_keys_that_are_none_are_refused(changed, why):
    with pytest.raises(ValueError, match=why):
        native.Engine(1, 1, 0, 8, addresses(), sealing=sealing()._replace(**changed))


def test_no_secret_is_in_a_text():
    assert repr(sealing()) == "Sealing(info=b'kvoffload-seal slab 3\\x01')"


def test_the_check_finds_functions_that_do_not_encrypt(monkeypatch):
    native.check_ciphers(addresses(), hashes.cipher_addresses())
    names = [*hashes._CIPHER_NAMES]
    names[6] = "EVP_aes_128_gcm"
    monkeypatch.setattr(hashes, "_CIPHER_NAMES", tuple(names))
    with pytest.raises(RuntimeError, match="ciphers: the functions do not compute AES-256-GCM"):
        native.check_ciphers(addresses(), hashes.cipher_addresses())
