"""A pack as bytes: what is written is read back, and nothing else is believed."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.digests import IntegrityKey, create_digester
from kvoffload_async.tiers.object.packs import (
    MOST_BLOCKS,
    MOST_PAYLOAD_BYTES,
    PackHeader,
    Packs,
    head_bytes,
    is_newer_pack,
    is_pack,
)

LAYOUT = "0123456789abcdef" * 2
BLOCK_BYTES = 1000
KEYS = [key_of(number) for number in range(MOST_BLOCKS)]
ROWS = [content_of(key, BLOCK_BYTES) for key in KEYS]
PLAIN = Packs(LAYOUT, BLOCK_BYTES)
KEYED = Packs(LAYOUT, BLOCK_BYTES, IntegrityKey(b"k" * 32))


def packed(count=5, packs=PLAIN):
    return memoryview(packs.wrap(KEYS[:count], ROWS[:count]).tobytes())


def loaded(value, packs=PLAIN, wanted=KEYS):
    """Return the rows of what a pack has, or None if it is none; and the errors."""
    table = packs.table(KEYS[0], value)
    if table is None:
        return None
    rows = {key: np.zeros(BLOCK_BYTES, dtype=np.uint8) for key in wanted}
    bad = packs.unwrap(table, value, rows)
    return {key: rows[key].tobytes() for key in table.keys if key in rows}, bad


@pytest.mark.parametrize("packs", [PLAIN, KEYED])
@pytest.mark.parametrize("count", [1, 2, 5, MOST_BLOCKS])
def test_what_is_packed_is_unpacked(packs, count):
    value = packed(count, packs)
    expected = {key: row.tobytes() for key, row in zip(KEYS[:count], ROWS[:count], strict=True)}
    assert loaded(value, packs) == (expected, {})
    assert is_pack(value)
    assert len(value) <= packs.most_bytes(len(KEYS[0]))


def test_a_pack_is_the_same_bytes_as_ever():
    """Those of another release are read by this one, as long as its version is 1."""
    digests = [hashlib.sha256(packed(5, packs)).hexdigest() for packs in (PLAIN, KEYED)]
    assert digests == [
        "d564fb899860b53ed2dbd4290229672ef55a3da95cc2e17cf07b0fd07aa92b68",
        "054cc58d6f1a8818fa8cde5756af5dd0dde0eef4ebc469aa84b60d1f4870435e",
    ]


def test_the_head_of_a_pack_is_enough_for_its_table():
    value = packed(MOST_BLOCKS)
    table = PLAIN.table(KEYS[0], value[: head_bytes(len(KEYS[0]))])
    assert table.keys == tuple(KEYS)
    assert table.value_bytes == len(value)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), is_keyed=st.booleans())
def test_no_bit_that_is_flipped_changes_a_block_that_is_served(at, bit, is_keyed):
    packs = KEYED if is_keyed else PLAIN
    value = bytearray(packed(5, packs))
    value[at % len(value)] ^= 1 << bit
    found = loaded(memoryview(value), packs)
    if found is None:
        return
    rows, bad = found
    for key, row in zip(KEYS[:5], ROWS, strict=False):
        assert (key in bad) != (rows[key] == row.tobytes())
        assert key not in bad or rows[key] == bytes(BLOCK_BYTES), "the row was touched"


@pytest.mark.parametrize("packs", [PLAIN, KEYED])
def test_a_table_is_believed_only_if_no_bit_of_it_has_changed(packs):
    value = bytearray(packed(5, packs))
    for at in range(PackHeader.parse(memoryview(value)).payload_offset):
        value[at] ^= 1 << at % 8
        assert packs.table(KEYS[0], memoryview(value)) is None
        value[at] ^= 1 << at % 8
    assert packs.table(KEYS[0], memoryview(value)) is not None


def with_its_checksum(value):
    """Return a pack with the checksum that goes with what its header and table say now."""
    value = bytearray(value)
    value[40:56] = bytes(16)
    (offset,) = struct.unpack_from("<I", value, 8)
    value[40:56] = create_digester(LAYOUT, None).digest(KEYS[0], memoryview(value)[:offset])
    return memoryview(value)


def test_a_pack_with_its_checksum_made_again_is_right():
    assert with_its_checksum(packed()) == packed()


@pytest.mark.parametrize("block_bytes", [0, 999, 1 << 24, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_blocks_of_another_length_are_not_believed_whatever_the_checksum_is(block_bytes):
    value = bytearray(packed())
    value[16:24] = block_bytes.to_bytes(8, "little")
    assert PLAIN.table(KEYS[0], with_its_checksum(value)) is None


@pytest.mark.parametrize("block_bytes", [MOST_PAYLOAD_BYTES // 5 + 1, 1 << 63, (1 << 64) - 1])
def test_no_pack_is_larger_than_any_may_be_whatever_its_checksum_is(block_bytes):
    value = bytearray(packed())
    value[16:24] = block_bytes.to_bytes(8, "little")
    assert Packs(LAYOUT, block_bytes).table(KEYS[0], with_its_checksum(value)) is None


def test_a_table_has_some_blocks_and_none_of_them_twice():
    none = bytearray(packed(1)[:64])
    none[8:12], none[14:16] = (64).to_bytes(4, "little"), bytes(2)
    assert PLAIN.table(KEYS[0], with_its_checksum(none)) is None
    many = Packs(LAYOUT, BLOCK_BYTES).wrap([*KEYS, KEYS[0][::-1]], [*ROWS, ROWS[0]])
    assert PLAIN.table(KEYS[0], many.data) is None
    assert PLAIN.table(KEYS[0], PLAIN.wrap([KEYS[0], *KEYS[1:2] * 2], ROWS[:3]).data) is None
    assert PLAIN.table(KEYS[0], PLAIN.wrap(KEYS[:1] * 2, ROWS[:2]).data) is None


def test_keys_of_no_length_are_those_of_no_pack():
    value = PLAIN.wrap([b""], ROWS[:1])
    assert PLAIN.table(KEYS[0], value.data) is None


def test_what_is_behind_the_table_is_zeros_whatever_the_checksum_is():
    value = bytearray(packed(1))
    value[64 + len(KEYS[0]) + 16] = 1
    assert PLAIN.table(KEYS[0], with_its_checksum(value)) is None


def test_a_pack_says_whether_its_checksums_are_keyed_whatever_the_id_is():
    value = bytearray(packed())
    value[6] = 1  # keyed, by the key whose id is zeros
    assert PLAIN.table(KEYS[0], with_its_checksum(value)) is None


@given(length=st.integers(0, 6000))
def test_a_pack_that_was_cut_off_serves_nothing(length):
    value = packed(5)[:length]
    found = loaded(value)
    assert found is None or set(found[1]) == set(KEYS[:5]) or length >= len(packed(5))


@given(st.binary(max_size=300).map(lambda tail: b"KVOP" + tail))
def test_bytes_that_somebody_made_up_are_no_pack(value):
    assert PLAIN.table(KEYS[0], memoryview(value)) is None


@pytest.mark.parametrize(
    ("packs", "first"),
    [
        (Packs(LAYOUT[::-1], BLOCK_BYTES), KEYS[0]),
        (Packs(LAYOUT, BLOCK_BYTES + 64), KEYS[0]),
        (KEYED, KEYS[0]),
        (PLAIN, KEYS[1]),
    ],
    ids=["layout", "block", "key", "name"],
)
def test_a_pack_of_others_is_none(packs, first):
    assert packs.table(first, packed()) is None


def test_a_keyed_pack_is_nothing_to_whoever_has_no_key_or_another():
    assert PLAIN.table(KEYS[0], packed(packs=KEYED)) is None
    other = Packs(LAYOUT, BLOCK_BYTES, IntegrityKey(b"x" * 32))
    assert other.table(KEYS[0], packed(packs=KEYED)) is None


def test_a_block_may_not_take_the_place_of_another():
    value = bytearray(packed())
    header = PackHeader.parse(memoryview(value))
    first, second = (header.payload_offset + n * 1024 for n in (0, 1))
    block = bytes(value[first : first + 1024])
    value[first : first + 1024] = value[second : second + 1024]
    value[second : second + 1024] = block
    rows, bad = loaded(memoryview(value))
    assert set(bad) == set(KEYS[:2])
    assert all(isinstance(error, CorruptBlockError) for error in bad.values())
    assert rows[KEYS[2]] == ROWS[2].tobytes()


def test_a_pack_of_a_newer_release_is_told_from_a_damaged_one():
    value = bytearray(packed())
    value[4] = 2
    assert is_newer_pack(memoryview(value))
    assert not is_newer_pack(packed())
    assert not is_newer_pack(memoryview(b"KVOP"))
    assert PackHeader.parse(memoryview(value)) is None


def test_a_header_says_in_which_namespace_it_is_believed():
    plain, keyed = (PackHeader.parse(packed(packs=packs)).namespace for packs in (PLAIN, KEYED))
    assert plain != keyed
    assert len(plain) == len(keyed) == 32
