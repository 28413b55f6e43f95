"""With an integrity key, what a neighbour writes into the directory is never served."""

import errno
import os

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FIELDS, FsDirectory, load, load_key, store_key
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


def files(directory, key=KEY, ops=None, **options):
    return directory.files(ops, verify="required", integrity_key=key, **options)


def keyless(directory):
    return directory.files()


def opened(directory, key=KEY, **options):
    return directory.open(verify="required", integrity_key=key, **options)


def set_value(path, value):
    os.setxattr(path, ATTRIBUTE, value)
    return path


def value_by(directory, key, block=A, content=None):
    digester = AttributeDigester(directory.namespace.layout_of(BLOCK), key)
    data = content_of(block, BLOCK).tobytes() if content is None else content
    return digester.attribute_value(block, memoryview(data))


def test_a_block_has_the_keys_id_and_its_mac(directory):
    store_key(files(directory), A)
    value = os.getxattr(directory.path(A), ATTRIBUTE)
    assert value == b"\x02" + KEY.id + value_by(directory, KEY)[-16:]
    assert len(value) == 25
    assert load_key(files(directory), A) is None


STORED_BY = {
    "without a checksum": lambda directory: directory.put(A),
    "without a key": lambda directory: directory.put(A, has_digest=True),
    "with another key": lambda directory: set_value(directory.put(A), value_by(directory, OTHER)),
}


@pytest.mark.parametrize("put", STORED_BY.values(), ids=STORED_BY)
def test_what_is_not_made_with_the_key_is_a_miss_and_its_file_stays(directory, put):
    path = put(directory)
    failure = load_key(files(directory), A)
    assert isinstance(failure.error, BlockMissingError)
    assert failure.freed_bytes is None
    assert path.exists()


@pytest.mark.parametrize("length", [10, BLOCK])
def test_without_the_key_such_a_block_is_a_miss_and_its_file_stays(directory, length):
    store_key(files(directory), A)
    os.truncate(directory.path(A), length)
    for other in (keyless(directory), files(directory, OTHER), directory.files(verify="required")):
        failure = load_key(other, A)
        assert isinstance(failure.error, BlockMissingError)
        assert "tier's key" in str(failure.error)
        assert failure.freed_bytes is None
    assert directory.path(A).exists()


@pytest.mark.parametrize("put", STORED_BY.values(), ids=STORED_BY)
def test_a_store_replaces_what_no_tier_with_the_key_would_serve(directory, put):
    put(directory)
    outcome = store_key(files(directory), A)
    assert outcome.status is StoreStatus.WRITTEN
    assert outcome.removed_bytes == outcome.added_bytes > 0
    assert load_key(files(directory), A) is None


def test_a_store_leaves_what_is_made_with_the_key(directory):
    store_key(files(directory), A)
    before = directory.path(A).stat().st_ino
    assert store_key(files(directory), A).status is StoreStatus.PRESENT
    assert directory.path(A).stat().st_ino == before


def test_a_store_without_a_key_leaves_what_is_made_with_one(directory):
    store_key(files(directory), A)
    assert store_key(keyless(directory), A).status is StoreStatus.PRESENT
    assert load_key(files(directory), A) is None


@pytest.mark.parametrize(
    ("method", "status"), [("open", StoreStatus.WRITTEN), ("unlink", StoreStatus.PRESENT)]
)
def test_a_file_that_goes_or_is_replaced_while_it_is_checked_fails_no_store(
    directory, method, status
):
    directory.put(A)
    ops = FaultyFileOps()
    ops.fail(errno.ENOENT, on=method, times=1)
    outcome = store_key(files(directory, ops=ops), A)
    assert (outcome.status, outcome.error) == (status, None)


@pytest.mark.parametrize("capacity_bytes", [None, 512 << 10])
def test_a_directory_from_before_the_key_fills_again_and_its_count_stays_right(
    directory, capacity_bytes
):
    with directory.open(capacity_bytes=capacity_bytes) as harness:
        assert harness.store(K) == {}
    with opened(directory, capacity_bytes=capacity_bytes) as harness:
        assert set(harness.load(K)) == set(range(len(K)))
        assert harness.store(K) == {}
        assert harness.load(K) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K))
        if capacity_bytes:
            assert directory.counted_bytes() == directory.disk_bytes()


def test_an_evicted_block_with_a_mac_may_be_overwritten(directory):
    tier = files(directory, reuses_inodes=True)
    store_key(tier, A)
    inode = directory.path(A).stat().st_ino
    assert store_key(tier, B, victim=A).freed_bytes is not None
    assert directory.path(B).stat().st_ino == inode
    assert load_key(files(directory), B) is None


# -- the neighbour ---------------------------------------------------------------------------------


ATTACKS = {
    "the checksum of right bytes": lambda directory: value_by(directory, KEY),
    "a checksum that needs no key": lambda directory: value_by(
        directory, None, content=bytes(BLOCK)
    ),
    "that without its version": lambda directory: (
        b"\x02" + KEY.id + value_by(directory, None, content=bytes(BLOCK))[1:]
    ),
    "a key of his own": lambda directory: value_by(directory, OTHER, content=bytes(BLOCK)),
    "a key of his own under this one's id": lambda directory: (
        b"\x02" + KEY.id + value_by(directory, OTHER, content=bytes(BLOCK))[-16:]
    ),
    "another block's": lambda directory: value_by(directory, KEY, B, bytes(BLOCK)),
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("remembers", [False, True])
def test_bytes_of_a_neighbour_are_not_served(directory, attack, remembers):
    tier = files(directory)
    if remembers:  # it knows the checksum of what it has stored itself
        store_key(tier, A)
    set_value(directory.put(A, bytes(BLOCK)), attack(directory))
    assert load_key(tier, A) is not None
    store_key(tier, A)
    assert load_key(tier, A) is None


def test_a_block_under_another_name_or_of_another_rank_is_not_served(directory):
    store_key(files(directory), A)
    value, content = os.getxattr(directory.path(A), ATTRIBUTE), directory.path(A).read_bytes()
    set_value(directory.put(B, content), value)
    other = FsDirectory(directory.root, rank=1)
    set_value(other.put(A, content), value)
    assert isinstance(load_key(files(directory), B).error, CorruptBlockError)
    assert isinstance(load_key(files(other), A).error, CorruptBlockError)


def test_an_old_block_of_the_same_key_has_the_same_bytes(directory):
    """The one thing that a neighbour can have served: what was stored under that key before."""
    tier = files(directory)
    store_key(tier, A)
    saved = os.getxattr(directory.path(A), ATTRIBUTE), directory.path(A).read_bytes()
    directory.path(A).unlink()
    set_value(directory.put(A, saved[1]), saved[0])
    assert load_key(files(directory), A) is None


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=BLOCK + 10))
def test_no_attribute_makes_other_bytes_right(tmp_path_factory, value, content):
    directory = FsDirectory(tmp_path_factory.mktemp("root"))
    set_value(directory.put(A, content), value)
    failures, _ = load(files(directory), A)
    assert failures


def test_two_keys_in_one_directory_never_serve_each_others_blocks(directory):
    for turn in range(4):
        mine, others = (KEY, OTHER) if turn % 2 else (OTHER, KEY)
        assert store_key(files(directory, mine), A).status is StoreStatus.WRITTEN
        assert load_key(files(directory, mine), A) is None
        assert isinstance(load_key(files(directory, others), A).error, BlockMissingError)


def test_the_key_is_no_part_of_the_namespace(directory):
    assert Namespace(str(directory.root), FIELDS).folder == str(directory.folder)
    with opened(directory) as harness:
        harness.store([A])
    assert directory.blocks() == {A}
