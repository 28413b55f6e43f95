"""Evicted blocks' files: whose inodes are used again, and whose are not."""

import errno
import os
import shutil

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, FsDirectory, grown_by, item, load_key, store, store_key
from fs.spaces import room_for

from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.operations import StoreStatus

A, B, C, D = (key_of(number) for number in range(4))


def test_a_victims_inode_is_reused(directory):
    files = directory.files(reuses_inodes=True)
    store_key(files, B)
    inode = directory.path(B).stat().st_ino
    outcome = store_key(files, A, victim=B)
    assert outcome.freed_bytes is not None
    assert directory.path(A).stat().st_ino == inode
    assert directory.blocks() == {A}
    assert load_key(files, A) is None


def has_new_inode(directory: FsDirectory, files) -> bool:
    """Store A in the place of B; is the file another one? (B's is kept open, so that its inode
    cannot come back by chance.)"""
    fd = os.open(directory.path(B), os.O_RDONLY)
    try:
        outcome = store_key(files, A, victim=B)
        assert outcome.status is StoreStatus.WRITTEN
        assert outcome.freed_bytes is not None
        assert directory.blocks() == {A}
        assert load_key(files, A) is None
        return os.fstat(fd).st_ino != directory.path(A).stat().st_ino
    finally:
        os.close(fd)


def test_an_inode_is_not_reused_where_somebody_reads_without_verifying(directory):
    files = directory.files(reuses_inodes=True)
    store_key(files, B)
    (directory.folder / ".unverified-readers").touch()
    assert has_new_inode(directory, files)


def test_an_inode_without_a_checksum_is_not_reused(directory):
    """Whoever serves files without one and has it open would take the new bytes for the old."""
    directory.put(B)
    assert has_new_inode(directory, directory.files(reuses_inodes=True))


def test_an_inode_with_another_name_is_not_reused(directory):
    directory.put(B, has_digest=True)
    kept = directory.root / "kept"
    os.link(directory.path(B), kept)
    assert has_new_inode(directory, directory.files(reuses_inodes=True))
    assert kept.read_bytes() == content_of(B, BLOCK).tobytes()


def test_what_a_symbolic_link_points_to_is_not_overwritten(directory):
    directory.put(B, has_digest=True)
    kept = directory.root / "kept"
    directory.path(B).rename(kept)
    directory.path(B).symlink_to(kept)
    files = directory.files(reuses_inodes=True)
    assert store_key(files, A, victim=B).status is StoreStatus.WRITTEN
    assert kept.read_bytes() == content_of(B, BLOCK).tobytes()
    assert not directory.path(A).is_symlink()


def test_an_inode_that_may_not_be_written_is_not_reused(directory):
    ops = FaultyFileOps()
    directory.put(B, has_digest=True)
    ops.fail(errno.EACCES, on="open", times=1)
    assert has_new_inode(directory, directory.files(ops, reuses_inodes=True))


def test_an_inode_is_not_reused_unless_allowed(directory):
    directory.put(B, has_digest=True)
    assert has_new_inode(directory, directory.files())


def test_a_victim_of_another_length_becomes_a_whole_block(directory):
    for content in (b"", b"x" * 10, b"x" * 3 * BLOCK):
        directory.put(B, content)
        os.setxattr(directory.path(B), ATTRIBUTE, b"any")
        before = directory.disk_bytes()
        outcome = store_key(directory.files(reuses_inodes=True), A, victim=B)
        grown = grown_by(outcome)
        assert directory.disk_bytes() - before == grown
        assert directory.every_block_is_whole()
        assert directory.blocks() == {A}
        directory.path(A).unlink()


def test_a_victims_old_checksum_never_stays(directory):
    ops = FaultyFileOps()
    directory.put(B, has_digest=True)
    ops.fail(errno.EOPNOTSUPP, on="set_xattr")
    outcome = store_key(directory.files(ops, reuses_inodes=True), A, victim=B)
    assert outcome.status is StoreStatus.FAILED
    assert outcome.freed_bytes is not None
    assert not directory.blocks()
    assert not directory.temps()


def test_a_victim_that_is_gone_already_is_reported(directory):
    files = directory.files(reuses_inodes=True)
    outcome = store_key(files, A, victim=B)
    assert outcome.status is StoreStatus.VICTIM_GONE
    assert outcome.freed_bytes is None
    assert not directory.blocks()


def test_a_victim_that_goes_in_the_last_moment_is_reported(directory):
    ops = FaultyFileOps()
    directory.put(B, has_digest=True)
    ops.fail(errno.ENOENT, on="rename")
    outcome = store_key(directory.files(ops, reuses_inodes=True), A, victim=B)
    assert outcome.status is StoreStatus.VICTIM_GONE
    assert directory.blocks() == {B}


@pytest.mark.parametrize("victim", [None, B])
def test_a_folder_that_somebody_removed_is_made_again(directory, victim):
    files = directory.files(reuses_inodes=True)
    if victim:
        store_key(files, victim)
    store_key(files, A)
    shutil.rmtree(directory.path(A).parent)
    outcome = store_key(files, A, victim=victim)
    assert outcome.status is StoreStatus.WRITTEN
    assert load_key(files, A) is None
    assert directory.blocks() == {A}


def test_the_folders_of_blocks_stay_when_they_are_empty(directory):
    files = directory.files()
    store_key(files, A)
    files.remove([A])
    assert directory.path(A).parent.exists()


def test_removing_is_checked_block_by_block(directory, caplog):
    ops = FaultyFileOps()
    files = directory.files(ops)
    store(files, item(A), item(B, 1), item(C, 2))
    before = directory.disk_bytes()
    ops.fail(errno.EACCES, on="unlink", when=lambda call: call.path == str(directory.path(B)))
    changes = files.remove([D, A, B, C])
    assert directory.blocks() == {B}
    assert sum(num_bytes for _, num_bytes in changes) == directory.disk_bytes() - before
    assert "not removed" in caplog.text


def evict_by_storing(directory: FsDirectory) -> bool:
    """Store C and D in a tier that is full of A and B; return whether their files were reused."""
    with directory.open(capacity_bytes=room_for(2)) as harness:
        assert harness.store([A, B]) == {}
        readers = {
            directory.path(key).stat().st_ino: directory.path(key).open("rb") for key in (A, B)
        }
        assert harness.store([C, D]) == {}
        assert directory.blocks() == {C, D}
        assert harness.load([C, D]) == {}
        inodes = {directory.path(key).stat().st_ino for key in (C, D)}
        reused = readers.keys() & inodes
        assert reused in (set(), inodes)
        for key, reader in zip((A, B), readers.values(), strict=True):
            with reader:
                is_old = reader.read() == content_of(key, BLOCK).tobytes()
                assert is_old == (not reused), "who has it open sees the new bytes, or the old"
        return bool(reused)


def test_a_full_tier_reuses_files_unless_somebody_reads_without_verifying(tmp_path):
    assert evict_by_storing(FsDirectory(tmp_path / "verified"))
    marked = FsDirectory(tmp_path / "marked")
    with marked.open(verify="off"):
        pass
    assert not evict_by_storing(marked)


def test_a_full_tier_reuses_no_file_in_vllms_directory(tmp_path):
    assert not evict_by_storing(FsDirectory(tmp_path, is_vllms=True))
