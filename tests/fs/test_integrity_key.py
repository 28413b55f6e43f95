"""With an integrity key, what a neighbour writes into the directory is never served."""

import errno
import os

import pytest
from faulty_files import FaultyFileOps
from fs.places import BLOCK, FIELDS, Place, load, load_key, store_key
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async import BlockMissingError, CorruptBlockError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.tiers.fs.operations import StoreStatus

KEY, OTHER = IntegrityKey(b"k" * 16), IntegrityKey(b"o" * 16)
K = [key_of(number) for number in range(12)]
A, B = K[:2]


@pytest.fixture(autouse=True)
def attributes(tmp_path):
    try:
        os.setxattr(tmp_path, ATTRIBUTE, b"")
    except OSError:
        pytest.skip("no extended attributes here")


def files(place, key=KEY, ops=None, **options):
    return place.files(ops, verify="required", integrity_key=key, **options)


def keyless(place):
    return place.files()


def opened(place, key=KEY, **options):
    return place.open(verify="required", integrity_key=key, **options)


def set_value(path, value):
    os.setxattr(path, ATTRIBUTE, value)
    return path


def value_by(place, key, block=A, content=None):
    digester = AttributeDigester(place.namespace.layout_of(BLOCK), key)
    data = content_of(block, BLOCK).tobytes() if content is None else content
    return digester.attribute_value(block, memoryview(data))


def test_a_block_has_the_keys_id_and_its_mac(place):
    store_key(files(place), A)
    value = os.getxattr(place.path(A), ATTRIBUTE)
    assert value == b"\x02" + KEY.id + value_by(place, KEY)[-16:]
    assert len(value) == 25
    assert load_key(files(place), A) is None


STORED_BY = {
    "without a checksum": lambda place: place.put(A),
    "without a key": lambda place: place.put(A, has_digest=True),
    "with another key": lambda place: set_value(place.put(A), value_by(place, OTHER)),
}


@pytest.mark.parametrize("put", STORED_BY.values(), ids=STORED_BY)
def test_what_is_not_made_with_the_key_is_a_miss_and_its_file_stays(place, put):
    path = put(place)
    failure = load_key(files(place), A)
    assert isinstance(failure.error, BlockMissingError)
    assert failure.freed_bytes is None
    assert path.exists()


@pytest.mark.parametrize("length", [10, BLOCK])
def test_without_the_key_such_a_block_is_a_miss_and_its_file_stays(place, length):
    store_key(files(place), A)
    os.truncate(place.path(A), length)
    for other in (keyless(place), files(place, OTHER), place.files(verify="required")):
        failure = load_key(other, A)
        assert isinstance(failure.error, BlockMissingError)
        assert "integrity key" in str(failure.error)
        assert failure.freed_bytes is None
    assert place.path(A).exists()


@pytest.mark.parametrize("put", STORED_BY.values(), ids=STORED_BY)
def test_a_store_replaces_what_no_tier_with_the_key_would_serve(place, put):
    put(place)
    outcome = store_key(files(place), A)
    assert outcome.status is StoreStatus.WRITTEN
    assert outcome.removed_bytes == outcome.added_bytes > 0
    assert load_key(files(place), A) is None


def test_a_store_leaves_what_is_made_with_the_key(place):
    store_key(files(place), A)
    before = place.path(A).stat().st_ino
    assert store_key(files(place), A).status is StoreStatus.PRESENT
    assert place.path(A).stat().st_ino == before


def test_a_store_without_a_key_leaves_what_is_made_with_one(place):
    store_key(files(place), A)
    assert store_key(keyless(place), A).status is StoreStatus.PRESENT
    assert load_key(files(place), A) is None


@pytest.mark.parametrize(
    ("method", "status"), [("open", StoreStatus.WRITTEN), ("unlink", StoreStatus.PRESENT)]
)
def test_a_file_that_goes_or_is_replaced_while_it_is_checked_fails_no_store(place, method, status):
    place.put(A)
    ops = FaultyFileOps()
    ops.fail(errno.ENOENT, on=method, times=1)
    outcome = store_key(files(place, ops=ops), A)
    assert (outcome.status, outcome.error) == (status, None)


@pytest.mark.parametrize("capacity_bytes", [None, 512 << 10])
def test_a_directory_from_before_the_key_fills_again_and_its_count_stays_right(
    place, capacity_bytes
):
    with place.open(capacity_bytes=capacity_bytes) as harness:
        assert harness.store(K) == {}
    with opened(place, capacity_bytes=capacity_bytes) as harness:
        assert set(harness.load(K)) == set(range(len(K)))
        assert harness.store(K) == {}
        assert harness.load(K) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K))
        if capacity_bytes:
            assert place.counted_bytes() == place.disk_bytes()


def test_an_evicted_block_with_a_mac_may_be_overwritten(place):
    tier = files(place, reuses_inodes=True)
    store_key(tier, A)
    inode = place.path(A).stat().st_ino
    assert store_key(tier, B, victim=A).freed_bytes is not None
    assert place.path(B).stat().st_ino == inode
    assert load_key(files(place), B) is None


# -- the neighbour ---------------------------------------------------------------------------------


ATTACKS = {
    "the checksum of right bytes": lambda place: value_by(place, KEY),
    "a checksum that needs no key": lambda place: value_by(place, None, content=bytes(BLOCK)),
    "that without its version": lambda place: (
        b"\x02" + KEY.id + value_by(place, None, content=bytes(BLOCK))[1:]
    ),
    "a key of his own": lambda place: value_by(place, OTHER, content=bytes(BLOCK)),
    "a key of his own under this one's id": lambda place: (
        b"\x02" + KEY.id + value_by(place, OTHER, content=bytes(BLOCK))[-16:]
    ),
    "another block's": lambda place: value_by(place, KEY, B, bytes(BLOCK)),
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("remembers", [False, True])
def test_bytes_of_a_neighbour_are_not_served(place, attack, remembers):
    tier = files(place)
    if remembers:  # it knows the checksum of what it has stored itself
        store_key(tier, A)
    set_value(place.put(A, bytes(BLOCK)), attack(place))
    assert load_key(tier, A) is not None
    store_key(tier, A)
    assert load_key(tier, A) is None


def test_a_block_under_another_name_or_of_another_rank_is_not_served(place):
    store_key(files(place), A)
    value, content = os.getxattr(place.path(A), ATTRIBUTE), place.path(A).read_bytes()
    set_value(place.put(B, content), value)
    other = Place(place.root, rank=1)
    set_value(other.put(A, content), value)
    assert isinstance(load_key(files(place), B).error, CorruptBlockError)
    assert isinstance(load_key(files(other), A).error, CorruptBlockError)


def test_an_old_block_of_the_same_key_has_the_same_bytes(place):
    """The one thing that a neighbour can have served: what was stored under that key before."""
    tier = files(place)
    store_key(tier, A)
    saved = os.getxattr(place.path(A), ATTRIBUTE), place.path(A).read_bytes()
    place.path(A).unlink()
    set_value(place.put(A, saved[1]), saved[0])
    assert load_key(files(place), A) is None


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=BLOCK + 10))
def test_no_attribute_makes_other_bytes_right(tmp_path_factory, value, content):
    place = Place(tmp_path_factory.mktemp("root"))
    set_value(place.put(A, content), value)
    failures, _ = load(files(place), A)
    assert failures


def test_two_keys_in_one_directory_never_serve_each_others_blocks(place):
    for turn in range(4):
        mine, others = (KEY, OTHER) if turn % 2 else (OTHER, KEY)
        assert store_key(files(place, mine), A).status is StoreStatus.WRITTEN
        assert load_key(files(place, mine), A) is None
        assert isinstance(load_key(files(place, others), A).error, BlockMissingError)


def test_the_key_is_no_part_of_the_namespace(place):
    assert Namespace(str(place.root), FIELDS).folder == str(place.folder)
    with opened(place) as harness:
        harness.store([A])
    assert place.blocks() == {A}
