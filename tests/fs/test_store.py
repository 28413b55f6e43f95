"""Storing a block: whole or not at all, with its checksum."""

import ctypes
import errno
import itertools
import os

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FsDirectory, grown_by, item, load_key, store, store_key

from kvoffload_async.errors import TierFullError, TierUnavailableError
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.layout import FOLDERS
from kvoffload_async.tiers.fs.operations import StoreStatus

A, B, C, D = (key_of(number) for number in range(4))


def test_a_stored_block_is_a_file_of_its_bytes_with_its_checksum(directory):
    outcome = store_key(directory.files(), A)
    assert outcome.status is StoreStatus.WRITTEN
    assert directory.path(A).read_bytes() == content_of(A, BLOCK).tobytes()
    assert os.getxattr(directory.path(A), ATTRIBUTE) == directory.attribute_of(A)
    assert not directory.temps()


def test_a_present_block_costs_one_probe(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    store_key(files, A)
    before = len(ops.calls)
    assert store_key(files, A).status is StoreStatus.PRESENT
    assert ops.counts(before) == {"stat": 1}


def test_a_block_without_room_is_only_looked_for(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    assert store_key(files, A, may_write=False).status is StoreStatus.ABSENT
    assert ops.counts() == {"stat": 1}
    assert not directory.blocks()


def test_a_missing_folder_is_made_once(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    keys = [type(A)(A[:3] + bytes([n]) + A[4:]) for n in range(3)]  # of one folder
    store(files, *map(item, keys))
    assert ops.counts()["mkdir"] == 1
    assert directory.blocks() == set(keys)


def test_no_folder_is_made_by_a_store_in_an_open_tier(directory):
    ops = FaultyFileOps()
    with directory.open(ops) as harness:
        since = len(ops.calls)
        assert harness.store([A, B, C]) == {}
        assert ops.counts(since)["mkdir"] == 0
    assert {path.name for path in directory.folder.glob("[!.]*")} == set(FOLDERS)


def test_a_lost_race_for_publishing_is_success_and_leaves_no_temp(directory):
    """Regression: in vLLM the rename's EEXIST failed the whole job."""
    ops = FaultyFileOps()
    files = directory.files(ops)

    class Racing(type(ops)):
        def publish(self, source, target):
            directory.put(A, has_digest=True)
            super().publish(source, target)

    ops.__class__ = Racing
    outcome = store_key(files, A)
    assert outcome.status is StoreStatus.PRESENT
    assert outcome.error is None
    assert not directory.temps()
    assert load_key(files, A) is None


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_publishing_never_replaces_a_block(directory, has_renameat2):
    ops = FaultyFileOps()
    if not has_renameat2:
        ops._renameat2 = None
    directory.put(A)
    inode = directory.path(A).stat().st_ino
    temp = directory.path(A).with_suffix(".tmp")
    temp.write_bytes(b"new")
    with pytest.raises(FileExistsError):
        ops.publish(str(temp), str(directory.path(A)))
    assert directory.path(A).stat().st_ino == inode
    directory.path(A).unlink()
    ops.publish(str(temp), str(directory.path(A)))
    assert directory.path(A).read_bytes() == b"new"


def answering(code):
    """Return a renameat2 that fails."""

    def renameat2(*_arguments):
        ctypes.set_errno(code)
        return -1

    return renameat2


def test_publishing_where_the_filesystem_cannot_refuse_checks_first(directory):
    ops = FaultyFileOps()
    ops._renameat2 = answering(errno.EINVAL)
    directory.put(A)
    temp = directory.path(A).with_suffix(".tmp")
    temp.write_bytes(b"new")
    with pytest.raises(FileExistsError):
        ops.publish(str(temp), str(directory.path(A)))
    assert ops._renameat2 is None
    assert temp.exists()


def test_publishing_passes_other_errors_on(directory):
    ops = FaultyFileOps()
    ops._renameat2 = answering(errno.EXDEV)
    outcome = store_key(directory.files(ops), A)
    assert os.strerror(errno.EXDEV) in str(outcome.error)
    assert not directory.temps()


@pytest.mark.parametrize("max_bytes", [1, 100, BLOCK - 1])
def test_short_writes_are_continued(directory, max_bytes):
    ops = FaultyFileOps()
    ops.shorten(max_bytes, on="pwritev", times=5)
    files = directory.files(ops)
    assert store_key(files, A).status is StoreStatus.WRITTEN
    assert load_key(files, A) is None


def test_a_write_without_progress_fails_the_block(directory):
    ops = FaultyFileOps()
    ops.shorten(0, on="pwritev")
    outcome = store_key(directory.files(ops), A)
    assert isinstance(outcome.error, TierUnavailableError)
    assert not directory.temps()
    assert not directory.blocks()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_fails_the_block_as_full(directory, code):
    ops = FaultyFileOps()
    ops.fail(code, on="pwritev", times=1)
    first, second = store(directory.files(ops), item(A), item(B, 1))
    assert isinstance(first.error, TierFullError)
    assert second.status is StoreStatus.WRITTEN
    assert directory.blocks() == {B}
    assert not directory.temps()


def test_the_bytes_are_on_the_device_before_the_block_is_published(directory):
    ops = FaultyFileOps()
    store_key(directory.files(ops, fsync=True), A)
    names = [call.name for call in ops.calls]
    assert names.index("pwritev") < names.index("fsync") < names.index("publish")
    assert names.index("set_xattr") < names.index("fsync")
    assert names.index("close") < names.index("publish")


def test_nothing_waits_for_the_device_unless_asked(directory):
    ops = FaultyFileOps()
    store_key(directory.files(ops), A)
    assert not ops.counts().keys() & {"fsync", "fdatasync"}


SCENARIOS = {
    "fresh": {},
    "victim": {"victim": B},
    "reused": {"victim": B, "reuses_inodes": True},
}


def prepared(directory: FsDirectory, ops: FaultyFileOps, scenario: str):
    directory.put(B, has_digest=True)
    options = dict(SCENARIOS[scenario])
    files = directory.files(ops, reuses_inodes=options.pop("reuses_inodes", False), fsync=True)
    return files, item(A, **options)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_no_error_at_any_call_leaves_a_temp_or_a_partial_block(tmp_path, scenario, code):
    for number in itertools.count(1):
        directory = FsDirectory(tmp_path / str(number))
        ops = FaultyFileOps()
        files, block = prepared(directory, ops, scenario)
        before = directory.disk_bytes()
        ops.fail(code, at=number)
        (outcome,) = store(files, block)
        ops.heal()
        if len(ops.calls) < number:
            assert outcome.status is StoreStatus.WRITTEN
            break
        files.sweep_leftover_temps()
        assert not directory.temps(), ops.calls[number - 1]
        assert directory.every_block_is_whole()
        assert (A in directory.blocks()) == (outcome.status is StoreStatus.WRITTEN)
        assert (B in directory.blocks()) == (block.victim is None or outcome.freed_bytes is None)
        grown = grown_by(outcome)
        # A folder whose size could not be asked for is only found by the next walk.
        assert directory.disk_bytes() - before - grown in {0, 4096}
        assert not ops.open_fds
    assert number > 8


def test_a_temp_that_cannot_be_removed_is_removed_later(directory, caplog):
    ops = FaultyFileOps()
    ops.fail(errno.EIO, on="publish unlink")
    files = directory.files(ops)
    assert store_key(files, A).error is not None
    assert len(directory.temps()) == 1
    with pytest.raises(OSError, match="injected"):
        files.sweep_leftover_temps()
    ops.heal()
    files.sweep_leftover_temps()
    files.sweep_leftover_temps()
    assert not directory.temps()
    assert "not removed" in caplog.text


def test_a_temp_that_cannot_be_removed_keeps_no_other(directory):
    ops = FaultyFileOps()
    files = directory.files(ops)
    ops.fail(errno.EIO, on="publish unlink")
    for key in (A, B, C):
        assert store_key(files, key).error is not None
    stuck, *others = files.leftover_temps
    assert len(others) == 2
    ops.heal()
    ops.fail(errno.EIO, on="unlink", when=lambda call: call.path == stuck)
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            files.sweep_leftover_temps()
        assert files.leftover_temps == [stuck]
        assert len(directory.temps()) == 1


# -- checksums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPERM, errno.E2BIG])
def test_blocks_are_stored_without_checksum_where_there_are_no_attributes(directory, caplog, code):
    ops = FaultyFileOps()
    ops.fail(code, on="set_xattr")
    files = directory.files(ops)
    assert store_key(files, A).status is StoreStatus.WRITTEN
    assert store_key(files, B).status is StoreStatus.WRITTEN
    assert caplog.text.count("without a checksum") == 1
    assert load_key(files, A) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_checksum_that_could_not_be_written_fails_the_block(directory, code):
    ops = FaultyFileOps()
    ops.fail(code, on="set_xattr")
    assert store_key(directory.files(ops), A).status is StoreStatus.FAILED
    assert not directory.blocks()


def test_a_required_checksum_that_could_not_be_written_fails_the_block(directory):
    ops = FaultyFileOps()
    ops.fail(errno.EOPNOTSUPP, on="set_xattr")
    assert store_key(directory.files(ops, verify="required"), A).status is StoreStatus.FAILED
    assert not directory.temps()


def test_no_checksum_is_written_where_none_is_read(directory):
    ops = FaultyFileOps()
    store_key(directory.files(ops, verify="off"), A)
    assert not ops.counts()["set_xattr"]
