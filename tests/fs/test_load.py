import errno
import os
import re

import pytest
from faulty_files import FaultyFileOps, is_block, is_direct
from fs.places import BLOCK, Place, item, load, load_key, store, store_key

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierUnavailableError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester, DigestCache
from kvoffload_async.tiers.fs.operations import StoreStatus
from kvoffload_async.types import make_offload_key

A, B, C, D = (key_of(number) for number in range(4))

RIGHT = content_of(A, BLOCK).tobytes()
FLIPPED = RIGHT[:100] + bytes([RIGHT[100] ^ 1]) + RIGHT[101:]


def test_each_block_of_a_batch_is_checked_on_its_own(place):
    """Regression 50321: one bad block discarded the whole batch."""
    files = place.files()
    store(files, item(A), item(C, 1), item(D, 2))
    place.path(C).write_bytes(FLIPPED)
    failures, rows = load(files, A, B, C, D)
    assert sorted(failures) == [1, 2]
    assert isinstance(failures[1].error, BlockMissingError)
    assert isinstance(failures[2].error, CorruptBlockError)
    assert bytes(rows[0]) == RIGHT
    assert bytes(rows[3]) == content_of(D, BLOCK).tobytes()


@pytest.mark.parametrize("content", [b"", RIGHT[:-1], RIGHT + b"x", FLIPPED, b"x" * BLOCK])
def test_a_block_that_is_short_long_or_wrong_is_deleted_and_fails(place, content):
    files = place.files()
    store_key(files, A)
    before = place.disk_bytes()
    with place.path(A).open("r+b") as file:
        file.truncate()
        file.write(content)
    truncated = place.disk_bytes()
    outcome = load_key(files, A)
    assert isinstance(outcome.error, CorruptBlockError)
    assert not place.path(A).exists()
    assert outcome.freed_bytes == truncated - place.disk_bytes()
    assert place.disk_bytes() == before - BLOCK


def test_a_file_that_shrinks_while_it_is_read_fails(place):
    files = place.files(ops := FaultyFileOps())
    store_key(files, A)

    class Shrinking(type(ops)):
        def preadv(self, fd, buffers, offset):
            os.truncate(place.path(A), 10)
            return super().preadv(fd, buffers, offset)

    ops.__class__ = Shrinking
    assert "ends after 10 bytes" in str(load_key(files, A).error)
    assert not place.path(A).exists()


@pytest.mark.parametrize("max_bytes", [1000, BLOCK - 1])
def test_short_reads_are_continued(place, max_bytes):
    ops = FaultyFileOps()
    ops.shorten(max_bytes, on="preadv")
    files = place.files(ops)
    store_key(files, A)
    assert load_key(files, A) is None


@pytest.mark.parametrize("name", ["open", "get_xattr", "preadv", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EINVAL])
def test_any_other_error_fails_the_block_and_leaves_the_file(place, name, code):
    ops = FaultyFileOps()
    files = place.files(ops)
    place.put(A, has_digest=True)
    ops.fail(code, on=name, when=is_block, times=1)
    is_unreadable = (name, code) == ("open", errno.EACCES)
    kind = BlockMissingError if is_unreadable else TierUnavailableError
    assert isinstance(load_key(files, A).error, kind)
    assert not ops.open_fds
    assert load_key(files, A) is None


def test_a_length_that_cannot_be_asked_for_fails_a_direct_load_and_leaves_the_file(place):
    ops = FaultyFileOps()
    place.put(A, has_digest=True)
    ops.fail(errno.EIO, on="fstat", when=is_direct)
    assert isinstance(load_key(place.files(ops, direct_io=True), A).error, TierUnavailableError)
    assert place.path(A).exists()


@pytest.mark.parametrize("size", [0, 100, BLOCK + 1])
def test_a_file_without_checksum_that_is_not_whole_is_deleted_where_one_is_required(place, size):
    """Else its block would count as stored and be missing for ever."""
    path = place.put(A, bytes(size))
    failure = load_key(place.files(verify="required"), A)
    assert isinstance(failure.error, CorruptBlockError)
    assert not path.exists()


@pytest.mark.parametrize("verify", ["required", "when_present", "off"])
def test_a_file_without_checksum_is_served_unless_one_is_required(place, verify):
    path = place.put(A)
    failure = load_key(place.files(verify=verify), A)
    if verify == "required":
        assert isinstance(failure.error, BlockMissingError)
        assert failure.freed_bytes is None
    else:
        assert failure is None
    assert path.exists()


@pytest.mark.parametrize("verify", ["required", "when_present"])
def test_a_file_with_anothers_checksum_is_deleted(place, verify):
    place.put(A)
    os.setxattr(place.path(A), ATTRIBUTE, place.attribute_of(B))
    assert isinstance(load_key(place.files(verify=verify), A).error, CorruptBlockError)
    assert not place.path(A).exists()


def test_checksums_are_not_looked_at_where_verifying_is_off(place):
    place.put(A)
    os.setxattr(place.path(A), ATTRIBUTE, place.attribute_of(B))
    assert load_key(place.files(verify="off"), A) is None


@pytest.mark.parametrize("name", ["fstat", "stat", "unlink"])
def test_a_bad_file_that_cannot_be_deleted_is_corrupt_all_the_same(place, caplog, name):
    ops = FaultyFileOps()
    place.put(A, FLIPPED)
    os.setxattr(place.path(A), ATTRIBUTE, place.attribute_of(A))
    ops.fail(errno.EACCES, on=name)
    files = place.files(ops)
    for _ in range(2):
        outcome = load_key(files, A)
        assert isinstance(outcome.error, CorruptBlockError)
        assert outcome.freed_bytes is None
    assert "not removed" in caplog.text


def test_a_bad_file_that_somebody_has_replaced_is_not_deleted(place):
    ops = FaultyFileOps()
    files = place.files(ops)
    place.put(A, FLIPPED[:-1])

    class Replacing(type(ops)):
        def stat(self, path):
            if path == str(place.path(A)):
                place.path(A).unlink()
                place.put(B)
                place.put(A, has_digest=True)
            return super().stat(path)

    ops.__class__ = Replacing
    with place.path(A).open("rb"):  # so that its inode number cannot come back
        assert load_key(files, A).freed_bytes is None
    ops.__class__ = FaultyFileOps
    assert load_key(files, A) is None


def test_a_bad_file_that_somebody_has_deleted_counts_as_gone(place):
    ops = FaultyFileOps()
    place.put(A, FLIPPED[:-1])
    ops.fail(errno.ENOENT, on="unlink")
    assert load_key(place.files(ops), A).freed_bytes == 0


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("moment", ["open", "get_xattr", "preadv"])
def test_a_reader_of_a_reused_inode_never_gets_the_other_blocks_bytes(place, moment, is_remembered):
    """Another process evicts what this one is reading, and overwrites the file."""
    place.put(A, has_digest=True)
    files = place.files(ops := FaultyFileOps())
    if is_remembered:
        assert load_key(files, A) is None
        if moment == "get_xattr":  # asked for only where other bytes than the remembered are read
            place.put(A, FLIPPED)
    evictor = place.files(reuses_inodes=True)
    ops.__class__ = Evicted
    ops.arm(moment, evictor)
    assert load_key(files, A) is not None
    assert load_key(evictor, B) is None, "a good block was deleted"


# -- remembered digests ---------------------------------------------------------------------------


@pytest.fixture
def reader(place) -> BlockFiles:
    """Files that remember the digest of A."""
    place.put(A, has_digest=True)
    reader = place.files()
    assert load_key(reader, A) is None
    return reader


def test_other_bytes_with_a_checksum_of_their_own_are_served_though_others_are_remembered(
    place, reader
):
    """Another host has computed the same block, not quite alike."""
    path = place.put(A, FLIPPED)
    os.setxattr(
        path,
        ATTRIBUTE,
        AttributeDigester(place.namespace.layout_of(BLOCK)).attribute_value(A, FLIPPED),
    )
    for _ in range(2):
        failures, (row,) = load(reader, A)
        assert not failures
        assert bytes(row) == FLIPPED


@pytest.mark.parametrize("content", [RIGHT, FLIPPED])
def test_a_file_that_another_writer_replaced_without_a_checksum_is_served(place, reader, content):
    place.path(A).unlink()
    place.put(A, content)
    failures, (row,) = load(reader, A)
    assert not failures
    assert bytes(row) == content


@pytest.mark.parametrize("content", [b"", RIGHT[:-1], RIGHT + b"x", FLIPPED])
def test_a_remembered_block_that_went_bad_is_deleted_and_fails(place, reader, content):
    with place.path(A).open("r+b") as file:
        file.truncate()
        file.write(content)
    assert isinstance(load_key(reader, A).error, CorruptBlockError)
    assert not place.path(A).exists()
    assert isinstance(load_key(reader, A).error, BlockMissingError)


def test_what_a_store_replaces_is_no_longer_verified_by_what_was_there_before(place, reader):
    place.path(A).unlink()
    outcome = store_key(reader, A, FLIPPED)
    assert outcome.status is StoreStatus.WRITTEN
    failures, (row,) = load(reader, A)
    assert not failures
    assert bytes(row) == FLIPPED


def test_bytes_that_nobody_has_verified_are_not_remembered_as_right(place):
    ops = FaultyFileOps()
    files = place.files(ops)
    place.put(A, FLIPPED)
    assert load(files, A)[0] == {}
    os.setxattr(place.path(A), ATTRIBUTE, place.attribute_of(A))
    assert isinstance(load(files, A)[0][0].error, CorruptBlockError)


def test_a_remembered_block_is_read_directly_too(place):
    class Aligned(FaultyFileOps):
        def open(self, path, flags):
            return super().open(path, flags & ~os.O_DIRECT)

        def preadv(self, fd, buffers, offset):
            if sum(map(len, buffers)) % BLOCK:
                raise OSError(errno.EINVAL, "misaligned")
            return super().preadv(fd, buffers, offset)

    files = place.files(Aligned(), direct_io=True)
    place.put(A, has_digest=True)
    for _ in range(2):
        assert load_key(files, A) is None
    assert files._direct.flag


def test_the_memory_of_seals_is_bounded_and_keeps_the_latest():
    memory = DigestCache(4)
    keys = [key_of(number) for number in range(100)]
    for number, key in enumerate(keys):
        memory.remember(key, key)
        assert len(memory) <= 8
        assert all(memory.recall(late) == late for late in keys[max(0, number - 3) : number + 1])
    assert memory.recall(keys[0]) is None


class Evicted(FaultyFileOps):
    """Another tier evicts A in favour of B at one moment of a load."""

    def arm(self, moment: str, evictor: BlockFiles) -> None:
        self._moment = moment
        self._evictor = evictor

    def open(self, *args):
        fd = super().open(*args)
        self._evict(self._moment == "open")
        return fd

    def get_xattr(self, fd, name):
        self._evict(self._moment == "get_xattr")
        return super().get_xattr(fd, name)

    def preadv(self, fd, buffers, offset):
        self._evict(self._moment == "preadv")
        return super().preadv(fd, buffers, offset)

    def _evict(self, is_the_moment: bool) -> None:
        if is_the_moment:
            self._moment = ""
            store_key(self._evictor, B, victim=A)


def test_probes_answer_for_what_has_a_file(place):
    files = place.files()
    store(files, item(A), item(C, 1))
    assert files.present([A, B, C, D]) == {A, C}


def test_what_cannot_be_asked_for_counts_as_absent(place):
    ops = FaultyFileOps()
    files = place.files(ops)
    store(files, item(A), item(C, 1))
    ops.fail(errno.EIO, on="stat", when=lambda call: call.path == str(place.path(A)))
    assert files.present([A, C]) == {C}


def test_a_folder_that_is_a_file_is_a_miss(place):
    place.folder.mkdir(parents=True)
    place.path(A).parent.write_bytes(b"")
    assert isinstance(load_key(place.files(), A).error, BlockMissingError)
    assert place.files().present([A]) == frozenset()


@pytest.mark.parametrize("is_vllms", [False, True])
def test_the_error_of_a_damaged_block_names_the_digits_of_its_file(tmp_path, is_vllms):
    place = Place(tmp_path / "root", is_vllms=is_vllms)
    files = place.files()
    key = make_offload_key(bytes(range(32)), 1)
    store(files, item(key))
    path = place.path(key)
    path.write_bytes(FLIPPED)
    (digits,) = re.findall("[0-9a-f]{16,}", str(load_key(files, key).error))
    assert digits in path.name
