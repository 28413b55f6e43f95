"""A wait for the device that fails: a later one that succeeds proves nothing."""

import errno

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import FsDirectory, grown_by, load_key, store, store_key
from fs.directories import item as block_of

from kvoffload_async.errors import TierFullError, TierUnavailableError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.fs.operations import StoreStatus

A, B = key_of(1), key_of(2)


def names(call) -> bool:
    """Tell whether a call is about a folder."""
    return not is_temp(call) and not call.path.endswith(".bin")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_block_whose_bytes_may_not_be_on_the_device_fails_and_is_discarded(directory, code):
    ops = FaultyFileOps()
    files = directory.files(ops, fsync=True)
    ops.fail(code, on="fsync", when=is_temp, times=1)
    outcome = store_key(files, A)
    assert outcome.status is StoreStatus.FAILED
    assert isinstance(outcome.error, TierUnavailableError if code == errno.EIO else TierFullError)
    assert not directory.blocks()
    assert not directory.temps()
    assert store_key(files, A).status is StoreStatus.WRITTEN, "into another file"
    assert load_key(files, A) is None


def test_a_block_whose_name_may_not_be_on_the_device_fails_and_is_discarded(directory):
    ops = FaultyFileOps()
    files = directory.files(ops, fsync=True)
    ops.fail(errno.EIO, on="fsync", when=names, times=1)
    outcome = store_key(files, A)
    assert outcome.status is StoreStatus.FAILED
    assert isinstance(outcome.error, TierUnavailableError)
    assert not directory.blocks()
    grown = grown_by(outcome)
    files.remove([A])
    assert grown == 0
    assert store_key(files, A).status is StoreStatus.WRITTEN


def test_a_block_that_cannot_be_discarded_fails_all_the_same(directory, caplog):
    ops = FaultyFileOps()
    files = directory.files(ops, fsync=True)
    ops.fail(errno.EIO, on="fsync", when=names)
    ops.fail(errno.EROFS, on="unlink")
    outcome = store_key(files, A)
    assert outcome.status is StoreStatus.FAILED
    assert directory.blocks() == {A}
    assert "not removed" in caplog.text


def test_a_block_of_another_writer_is_not_discarded_for_a_name_that_is_not_durable(directory):
    ops = FaultyFileOps()
    files = directory.files(ops, fsync=True)
    directory.put(A, has_digest=True)
    ops.fail(errno.EIO, on="fsync", when=names)
    assert store_key(files, A).status is StoreStatus.FAILED
    assert directory.blocks() == {A}


def test_the_folders_above_a_block_are_waited_for_until_they_are_known_to_be_there(directory):
    ops = FaultyFileOps()
    files = directory.files(ops, fsync=True)
    store(files, block_of(A))
    folders = [call.path for call in ops.calls if call.name == "fsync" and names(call)]
    folder = directory.path(A).parent
    assert folders == [str(folder), directory.namespace.folder]
    since = len(ops.calls)
    store(files, block_of(A))
    assert ops.counts(since)["fsync"] == 1, "the folder: somebody may have published it just now"
    files.remove([A])
    folder.rmdir()
    since = len(ops.calls)
    store(files, block_of(A))
    assert ops.counts(since)["fsync"] == 1 + 2, "the folder was made anew"


def test_the_root_is_waited_for_when_a_tier_opens(tmp_path):
    ops = FaultyFileOps()
    with FsDirectory(tmp_path).open(ops, fsync=True):
        assert [call.path for call in ops.calls if call.name == "fsync"] == [str(tmp_path)]
