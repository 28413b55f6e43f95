import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from slab.stores import records_of

from kvoffload_async.tables.keymap import MOST_PARTS
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.slab.addresses import address_of, segment_of, slot_of
from kvoffload_async.tiers.slab.manifest import Manifest, UnreadableManifestError
from kvoffload_async.tiers.slab.records import (
    CHECKPOINT_FRAME_RECORDS,
    HAS_DIGEST,
    MAX_KEY_BYTES,
    RECORD_BYTES,
    addresses_of,
    by_part,
    checkpoint,
    checkpoint_units,
    frame,
    keys_of,
    live_rows,
    picked,
    put_records,
    removal_records,
    scan,
)
from kvoffload_async.types import OffloadKey

SEED = xxhash.xxh3_64_intdigest(b"layout")
SLOTS = {0: 8, 5: 8}
K = [key_of(number) for number in range(12)]

addresses = st.builds(address_of, st.sampled_from([0, 5]), st.integers(0, 7))
operations = st.lists(
    st.lists(st.tuples(st.booleans(), st.sampled_from(K), addresses), min_size=1, max_size=4),
    max_size=8,
)


def num_before_damage(scanned):
    """Return the number of valid records before the last gap in the frames."""
    return int(np.searchsorted(scanned.rows, scanned.damage_at))


def put_record(key, address, digest) -> bytes:
    return put_records([key], address, [digest or b""])


def remove_record(address) -> bytes:
    return removal_records([address])


def journal_of(batches) -> tuple[bytes, list[bytes]]:
    frames = [
        frame(
            sequence,
            b"".join(
                put_record(key, address, b"d" * 16) if puts else remove_record(address)
                for puts, key, address in batch
            ),
            SEED,
        )
        for sequence, batch in enumerate(batches, 1)
    ]
    return b"".join(frames), frames


def model_of(batches) -> dict[int, bytes]:
    at: dict[int, bytes] = {}
    for batch in batches:
        for puts, key, address in batch:
            at.pop(address, None)
            if puts:
                at[address] = key
    return at


def read(content: bytes) -> dict[int, bytes]:
    scanned = scan(content, SEED)
    live = scanned.units[live_rows(scanned, SLOTS)]
    return dict(zip(addresses_of(live), keys_of(live), strict=True))


@given(operations)
def test_what_is_written_is_read_back_the_last_record_of_a_place_counting(batches):
    content, _ = journal_of(batches)
    assert read(content) == model_of(batches)
    scanned = scan(content, SEED)
    assert scanned.end_bytes == len(content)
    assert scanned.sequence == len(batches)
    assert not num_before_damage(scanned)
    assert not scanned.lost_bytes


@given(operations, st.integers(0, 8 * 5 * RECORD_BYTES))
def test_a_torn_tail_costs_the_frames_that_are_not_whole(batches, length):
    content, frames = journal_of(batches)
    torn = content[:length]
    ends = np.cumsum([0] + [len(framed) for framed in frames])
    whole = int((ends <= len(torn)).sum()) - 1
    scanned = scan(torn, SEED)
    assert scanned.end_bytes == ends[whole]
    assert not num_before_damage(scanned)
    assert read(torn) == model_of(batches[:whole])


@given(operations.filter(bool), st.data())
def test_a_flipped_bit_costs_at_most_its_frame_and_makes_what_is_before_suspect(batches, data):
    content, frames = journal_of(batches)
    offset = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[offset] ^= 1 << data.draw(st.integers(0, 7))
    ends = np.cumsum([len(framed) for framed in frames])
    hit = int((ends <= offset).sum())
    scanned = scan(bytes(damaged), SEED)
    if scanned.end_bytes == len(content) and not scanned.lost_bytes:
        assert read(bytes(damaged)) == model_of(batches), "the padding of a header"
        return
    assert read(bytes(damaged)) == model_of(batches[:hit] + batches[hit + 1 :])
    if hit < len(batches) - 1:
        assert num_before_damage(scanned) == sum(map(len, batches[:hit]))
        assert scanned.lost_bytes == len(frames[hit])
    else:
        assert not num_before_damage(scanned)
        assert scanned.end_bytes == len(content) - len(frames[hit])


@given(operations, st.binary(max_size=700), st.integers(0, 5000))
def test_any_bytes_in_the_journal_are_read_as_what_can_be_believed(batches, junk, at):
    content, frames = journal_of(batches)
    at = min(at, len(content))
    fuzzed = content[:at] + junk + content[at + len(junk) :]
    found = records_of(scan(fuzzed, SEED))
    believed = {bytes(record) for record in found}
    written = {
        framed[start : start + RECORD_BYTES]
        for framed in frames
        for start in range(RECORD_BYTES, len(framed), RECORD_BYTES)
    }
    assert believed <= written


def test_a_frame_with_an_old_sequence_number_is_what_an_append_has_left_behind():
    old = frame(3, put_record(K[0], 0, None), SEED)
    new = frame(4, put_record(K[1], 1, None), SEED)
    assert read(new + old) == {1: K[1]}
    assert scan(new + old, SEED).end_bytes == len(new)
    assert not num_before_damage(scan(new + old, SEED))


def test_frames_of_another_layout_do_not_count():
    assert not len(records_of(scan(frame(1, put_record(K[0], 0, None), SEED + 1), SEED)))


def test_a_good_frame_far_behind_damage_is_found():
    first = frame(1, put_record(K[0], 0, None), SEED)
    last = frame(2, put_record(K[1], 1, None), SEED)
    hole = bytes(RECORD_BYTES * 70_000)
    scanned = scan(first + hole + last, SEED)
    assert read(first + hole + last) == {0: K[0], 1: K[1]}
    assert num_before_damage(scanned) == 1
    assert scanned.lost_bytes == len(hole)


def test_records_of_places_that_do_not_exist_are_left_out():
    body = b"".join(put_record(K[i], address_of(n, i), None) for i, n in enumerate([0, 3, 5, 9]))
    body += put_record(K[4], address_of(5, 8), None)
    assert read(frame(1, body, SEED)) == {address_of(0, 0): K[0], address_of(5, 2): K[2]}
    assert not len(live_rows(scan(b"", SEED), SLOTS))
    assert not len(live_rows(scan(frame(1, body, SEED), SEED), {}))


@given(st.lists(st.binary(min_size=4, max_size=MAX_KEY_BYTES), min_size=1, max_size=20))
def test_keys_of_any_length_come_back(keys):
    body = b"".join(put_record(OffloadKey(key), i, None) for i, key in enumerate(keys))
    assert keys_of(records_of(scan(frame(1, body, SEED), SEED))) == keys


@given(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 32) - 2))
def test_an_address_is_its_segment_and_slot(segment, slot):
    address = address_of(segment, slot)
    assert (segment_of(address), slot_of(address)) == (segment, slot)
    body = put_record(K[0], address, None)
    assert addresses_of(records_of(scan(frame(1, body, SEED), SEED))) == [address]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_a_checkpoint_is_frames_of_limited_size_with_rising_sequence_numbers(count):
    body = b"".join(put_record(K[i % 12], i, b"x" * 16) for i in range(count))
    records = records_of(scan(frame(1, body, SEED) if count else b"", SEED))
    frames = list(checkpoint(10, records, SEED))
    content = b"".join(frames)
    assert len(content) == checkpoint_units(count) * RECORD_BYTES
    assert all(len(f) <= (1 + CHECKPOINT_FRAME_RECORDS) * RECORD_BYTES for f in frames)
    scanned = scan(content, SEED)
    assert records_of(scanned).tobytes() == records.tobytes()
    assert scanned.sequence == (9 + len(frames) if count else 0)
    assert (records_of(scanned)["flags"] == HAS_DIGEST).all()


MANIFEST = Manifest(
    4096, 4096, 2, "0123456789ab:2:4096", {"model_name": "m\u00fc", "dtype": "bf16"}
).of_new_store()


def test_a_manifest_comes_back():
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST


@given(st.data())
def test_a_flipped_bit_in_the_manifest_is_seen_or_changes_nothing(data):
    content = bytearray(MANIFEST.encode())
    offset = data.draw(st.integers(0, len(content) - 1))
    content[offset] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = Manifest.decode(bytes(content))
    except (UnreadableManifestError, NewerFormatError):  # the bit may be one of the version's
        return
    assert found == MANIFEST


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"7", "not the manifest of a slab store"),
        (b"{}", "not the manifest of a slab store"),
        (MANIFEST.encode()[:-20], "not JSON"),
    ],
)
def test_what_is_no_manifest_says_why(content, reason):
    with pytest.raises(UnreadableManifestError, match=reason):
        Manifest.decode(content)


# -- what follows the last good frame --------------------------------------------------------------


def test_a_frame_that_is_there_as_a_whole_and_damaged_is_not_torn():
    whole = frame(1, put_record(K[0], 0, b"d" * 16), SEED)
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    assert not scan(damaged, SEED).is_torn
    assert scan(whole[:-1], SEED).is_torn
    assert scan(whole[:RECORD_BYTES], SEED).is_torn
    assert scan(b"", SEED).is_torn
    assert not scan(bytes(RECORD_BYTES), SEED).is_torn, "zeros are no frame, and as long as one"


# -- keys ------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(K), unique=True, min_size=1), st.booleans())
def test_keys_of_one_part_of_a_map_come_together_and_none_is_left_out(keys, has_longer):
    if has_longer:
        keys = [*keys, OffloadKey(K[0] * 2)]
    units = scan(frame(1, put_records(keys, 0, [b""] * len(keys)), SEED), SEED).units
    rows = np.arange(1, 1 + len(keys))
    order = by_part(units, rows)
    found = keys_of(picked(units, rows[order]))
    assert found == [keys[number] for number in order.tolist()]
    parts = [(key[0] + key[-5]) % MOST_PARTS for key in found]
    assert parts == sorted((key[0] + key[-5]) % MOST_PARTS for key in keys)
