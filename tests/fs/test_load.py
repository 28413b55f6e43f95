import errno
import os
import re

import pytest
from faulty_files import FaultyFileOps, is_block, is_direct
from fs.directories import BLOCK, FsDirectory, item, load, load_key, store, store_key

from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierUnavailableError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.blockfile import BlockFiles
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester, DigestCache
from kvoffload_async.tiers.fs.operations import StoreStatus
from kvoffload_async.types import make_offload_key

A, B, C, D = (key_of(number) for number in range(4))

RIGHT = content_of(A, BLOCK).tobytes()
FLIPPED = RIGHT[:100] + bytes([RIGHT[100] ^ 1]) + RIGHT[101:]


def test_each_block_of_a_batch_is_checked_on_its_own(directory):
    """Regression 50321: one bad block discarded the whole batch."""
    files = directory.files()
    store(files, item(A), item(C, 1), item(D, 2))
    directory.path(C).write_bytes(FLIPPED)
    failures, rows = load(files, A, B, C, D)
    assert sorted(failures) == [1, 2]
    assert isinstance(failures[1].error, BlockMissingError)
    assert isinstance(failures[2].error, CorruptBlockError)
    assert bytes(rows[0]) == RIGHT
    assert bytes(rows[3]) == content_of(D, BLOCK).tobytes()


@pytest.mark.parametrize("content", [b"", RIGHT[:-1], RIGHT + b"x", FLIPPED, b"x" * BLOCK])
def test_a_block_that_is_short_long_or_wrong_is_deleted_and_fails(directory, content):
    files = directory.files()
    store_key(files, A)
    before = directory.disk_bytes()
    with directory.path(A).open("r+b") as file:
        file.truncate()
        file.write(content)
    truncated = directory.disk_bytes()
    outcome = load_key(files, A)
    assert isinstance(outcome.error, CorruptBlockError)
    assert not directory.path(A).exists()
    assert outcome.freed_bytes == truncated - directory.disk_bytes()
    assert directory.disk_bytes() == before - BLOCK


def test_a_file_that_shrinks_while_it_is_read_fails(directory):
    files = directory.files(ops := FaultyFileOps())
    store_key(files, A)

    class Shrinking(type(ops)):
        def preadv(self, fd, buffers, offset):
            os.truncate(directory.path(A), 10)
            return super().preadv(fd, buffers, offset)

    ops.__class__ = Shrinking
    assert "ends after 10 bytes" in str(load_key(files, A).error)
    assert not directory.path(A).exists()


@pytest.mark.parametrize("max_bytes", [1000, BLOCK - 1])
def test_short_reads_are_continued(directory, max_bytes):
    ops = FaultyFileOps()
    ops.shorten(max_bytes, on="preadv")
    files = directory.files(ops)
    store_key(files, A)
    assert load_key(files, A) is None


@pytest.mark.parametrize("name", ["open", "get_xattr", "preadv", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EINVAL])
def test_any_other_error_fails_the_block_and_leaves_the_file(directory, name, code):
    ops = FaultyFileOps()
    files = directory.files(ops)
    directory.put(A, has_digest=True)
    ops.fail(code, on=name, when=is_block, times=1)
    is_unreadable = (name, code) == ("open", errno.EACCES)
    kind = BlockMissingError if is_unreadable else TierUnavailableError
    assert isinstance(load_key(files, A).error, kind)
    assert not ops.open_fds
    assert load_key(files, A) is None


def test_a_length_that_cannot_be_asked_for_fails_a_direct_load_and_leaves_the_file(directory):
    ops = FaultyFileOps()
    directory.put(A, has_digest=True)
    ops.fail(errno.EIO, on="fstat", when=is_direct)
    assert isinstance(load_key(directory.files(ops, direct_io=True), A).error, TierUnavailableError)
    assert directory.path(A).exists()


@pytest.mark.parametrize("size", [0, 100, BLOCK + 1])
def test_a_file_without_checksum_that_is_not_whole_is_deleted_where_one_is_required(
    directory, size
):
    """Else its block would count as stored and be missing for ever."""
    path = directory.put(A, bytes(size))
    failure = load_key(directory.files(verify="required"), A)
    assert isinstance(failure.error, CorruptBlockError)
    assert not path.exists()


@pytest.mark.parametrize("verify", ["required", "when_present", "off"])
def test_a_file_without_checksum_is_served_unless_one_is_required(directory, verify):
    path = directory.put(A)
    failure = load_key(directory.files(verify=verify), A)
    if verify == "required":
        assert isinstance(failure.error, BlockMissingError)
        assert failure.freed_bytes is None
    else:
        assert failure is None
    assert path.exists()


@pytest.mark.parametrize("verify", ["required", "when_present"])
def test_a_file_with_anothers_checksum_is_deleted(directory, verify):
    directory.put(A)
    os.setxattr(directory.path(A), ATTRIBUTE, directory.attribute_of(B))
    assert isinstance(load_key(directory.files(verify=verify), A).error, CorruptBlockError)
    assert not directory.path(A).exists()


def test_checksums_are_not_looked_at_where_verifying_is_off(directory):
    directory.put(A)
    os.setxattr(directory.path(A), ATTRIBUTE, directory.attribute_of(B))
    assert load_key(directory.files(verify="off"), A) is None


@pytest.mark.parametrize("name", ["fstat", "stat", "unlink"])
def test_a_bad_file_that_cannot_be_deleted_is_corrupt_all_the_same(directory, caplog, name):
    ops = FaultyFileOps()
    directory.put(A, FLIPPED)
    os.setxattr(directory.path(A), ATTRIBUTE, directory.attribute_of(A))
    ops.fail(errno.EACCES, on=name)
    files = directory.files(ops)
    for _ in range(2):
        outcome = load_key(files, A)
        assert isinstance(outcome.error, CorruptBlockError)
        assert outcome.freed_bytes is None
    assert "not removed" in caplog.text


def test_a_bad_file_that_somebody_has_replaced_is_not_deleted(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    directory.put(A, FLIPPED[:-1])

    class Replacing(type(ops)):
        def stat(self, path):
            if path == str(directory.path(A)):
                directory.path(A).unlink()
                directory.put(B)
                directory.put(A, has_digest=True)
            return super().stat(path)

    ops.__class__ = Replacing
    with directory.path(A).open("rb"):  # so that its inode number cannot come back
        assert load_key(files, A).freed_bytes is None
    ops.__class__ = FaultyFileOps
    assert load_key(files, A) is None


def test_a_bad_file_that_somebody_has_deleted_counts_as_gone(directory):
    ops = FaultyFileOps()
    directory.put(A, FLIPPED[:-1])
    ops.fail(errno.ENOENT, on="unlink")
    assert load_key(directory.files(ops), A).freed_bytes == 0


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize("moment", ["open", "get_xattr", "preadv"])
def test_a_reader_of_a_reused_inode_never_gets_the_other_blocks_bytes(
    directory, moment, is_remembered
):
    """Another process evicts what this one is reading, and overwrites the file."""
    directory.put(A, has_digest=True)
    files = directory.files(ops := FaultyFileOps())
    if is_remembered:
        assert load_key(files, A) is None
        if moment == "get_xattr":  # asked for only where other bytes than the remembered are read
            directory.put(A, FLIPPED)
    evictor = directory.files(reuses_inodes=True)
    ops.__class__ = Evicted
    ops.arm(moment, evictor)
    assert load_key(files, A) is not None
    assert load_key(evictor, B) is None, "a good block was deleted"


# -- remembered digests ---------------------------------------------------------------------------


@pytest.fixture
def reader(directory) -> BlockFiles:
    """Files that remember the digest of A."""
    directory.put(A, has_digest=True)
    reader = directory.files()
    assert load_key(reader, A) is None
    return reader


def test_other_bytes_with_a_checksum_of_their_own_are_served_though_others_are_remembered(
    directory, reader
):
    """Another host has computed the same block, not quite alike."""
    path = directory.put(A, FLIPPED)
    os.setxattr(
        path,
        ATTRIBUTE,
        AttributeDigester(directory.namespace.layout_of(BLOCK)).attribute_value(A, FLIPPED),
    )
    for _ in range(2):
        failures, (row,) = load(reader, A)
        assert not failures
        assert bytes(row) == FLIPPED


@pytest.mark.parametrize("content", [RIGHT, FLIPPED])
def test_a_file_that_another_writer_replaced_without_a_checksum_is_served(
    directory, reader, content
):
    directory.path(A).unlink()
    directory.put(A, content)
    failures, (row,) = load(reader, A)
    assert not failures
    assert bytes(row) == content


@pytest.mark.parametrize("content", [b"", RIGHT[:-1], RIGHT + b"x", FLIPPED])
def test_a_remembered_block_that_went_bad_is_deleted_and_fails(directory, reader, content):
    with directory.path(A).open("r+b") as file:
        file.truncate()
        file.write(content)
    assert isinstance(load_key(reader, A).error, CorruptBlockError)
    assert not directory.path(A).exists()
    assert isinstance(load_key(reader, A).error, BlockMissingError)


def test_what_a_store_replaces_is_no_longer_verified_by_what_was_there_before(directory, reader):
    directory.path(A).unlink()
    outcome = store_key(reader, A, FLIPPED)
    assert outcome.status is StoreStatus.WRITTEN
    failures, (row,) = load(reader, A)
    assert not failures
    assert bytes(row) == FLIPPED


def test_bytes_that_nobody_has_verified_are_not_remembered_as_right(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    directory.put(A, FLIPPED)
    assert load(files, A)[0] == {}
    os.setxattr(directory.path(A), ATTRIBUTE, directory.attribute_of(A))
    assert isinstance(load(files, A)[0][0].error, CorruptBlockError)


def test_a_remembered_block_is_read_directly_too(directory):
    class Aligned(FaultyFileOps):
        def open(self, path, flags):
            return super().open(path, flags & ~os.O_DIRECT)

        def preadv(self, fd, buffers, offset):
            if sum(map(len, buffers)) % BLOCK:
                raise OSError(errno.EINVAL, "misaligned")
            return super().preadv(fd, buffers, offset)

    files = directory.files(Aligned(), direct_io=True)
    directory.put(A, has_digest=True)
    for _ in range(2):
        assert load_key(files, A) is None
    assert files._direct.flag


def test_the_memory_of_seals_is_bounded_and_keeps_the_latest():
    memory = DigestCache(4)
    keys = [key_of(number) for number in range(100)]
    for number, key in enumerate(keys):
        memory.remember(key, key)
        assert len(memory._young) + len(memory._old) <= 8
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


def test_probes_answer_for_what_has_a_file(directory):
    files = directory.files()
    store(files, item(A), item(C, 1))
    assert files.present([A, B, C, D]) == {A, C}


def test_what_cannot_be_asked_for_counts_as_absent(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    store(files, item(A), item(C, 1))
    ops.fail(errno.EIO, on="stat", when=lambda call: call.path == str(directory.path(A)))
    assert files.present([A, C]) == {C}


def test_a_folder_that_is_a_file_is_a_miss(directory):
    directory.folder.mkdir(parents=True)
    directory.path(A).parent.write_bytes(b"")
    assert isinstance(load_key(directory.files(), A).error, BlockMissingError)
    assert directory.files().present([A]) == frozenset()


@pytest.mark.parametrize("is_vllms", [False, True])
def test_the_error_of_a_damaged_block_names_the_digits_of_its_file(tmp_path, is_vllms):
    directory = FsDirectory(tmp_path / "root", is_vllms=is_vllms)
    files = directory.files()
    key = make_offload_key(bytes(range(32)), 1)
    store(files, item(key))
    path = directory.path(key)
    path.write_bytes(FLIPPED)
    (digits,) = re.findall("[0-9a-f]{16,}", str(load_key(files, key).error))
    assert digits in path.name
