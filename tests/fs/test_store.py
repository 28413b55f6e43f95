import ctypes
import errno
import itertools
import os

import pytest
from fs.places import BLOCK, Place, item, load_key, store, store_key

from kvoffload_async.errors import TierFullError, TierUnavailableError
from kvoffload_async.testing.fileops import FaultyFileOps, is_block, is_temp
from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.fs.outcome import StoreItem, StoreStatus
from kvoffload_async.tiers.fs.seal import ATTRIBUTE

A, B, C, D = (key_of(number) for number in range(4))


def on_disk(place: Place) -> int:
    return place.disk_bytes()


def test_a_stored_block_is_a_file_of_its_bytes_with_its_checksum(place):
    outcome = store_key(place.files(), A)
    assert outcome.status is StoreStatus.WRITTEN
    assert place.path(A).read_bytes() == content_of(A, BLOCK).tobytes()
    assert os.getxattr(place.path(A), ATTRIBUTE) == place.seal_of(A)
    assert not place.temps()


def test_a_present_block_costs_one_probe(place):
    ops = FaultyFileOps()
    files = place.files(ops)
    store_key(files, A)
    before = len(ops.calls)
    assert store_key(files, A).status is StoreStatus.PRESENT
    assert ops.counts(before) == {"stat": 1}


def test_a_block_without_room_is_only_looked_for(place):
    ops = FaultyFileOps()
    files = place.files(ops)
    assert store_key(files, A, may_write=False).status is StoreStatus.ABSENT
    assert ops.counts() == {"stat": 1}
    assert not place.blocks()


def test_leaf_folders_are_made_once_and_remembered(place):
    ops = FaultyFileOps()
    files = place.files(ops)
    keys = [type(A)(A[:3] + bytes([n]) + A[4:]) for n in range(3)]  # one leaf folder
    store(files, *map(item, keys))
    assert ops.counts()["mkdir"] == 2
    assert place.blocks() == set(keys)


def test_a_lost_race_for_publishing_is_success_and_leaves_no_temp(place):
    """Regression: in vLLM the rename's EEXIST failed the whole job."""
    ops = FaultyFileOps()
    files = place.files(ops)

    class Racing(type(ops)):
        def publish(self, source, target):
            place.put(A, sealed=True)
            super().publish(source, target)

    ops.__class__ = Racing
    outcome = store_key(files, A)
    assert outcome.status is StoreStatus.PRESENT
    assert outcome.error is None
    assert not place.temps()
    assert load_key(files, A) is None


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_publishing_never_replaces_a_block(place, has_renameat2):
    ops = FaultyFileOps()
    if not has_renameat2:
        ops._renameat2 = None
    place.put(A)
    inode = place.path(A).stat().st_ino
    temp = place.path(A).with_suffix(".tmp")
    temp.write_bytes(b"new")
    with pytest.raises(FileExistsError):
        ops.publish(str(temp), str(place.path(A)))
    assert place.path(A).stat().st_ino == inode
    place.path(A).unlink()
    ops.publish(str(temp), str(place.path(A)))
    assert place.path(A).read_bytes() == b"new"


def answering(code):
    """Return a renameat2 that fails."""

    def renameat2(*_arguments):
        ctypes.set_errno(code)
        return -1

    return renameat2


def test_publishing_where_the_filesystem_cannot_refuse_checks_first(place):
    ops = FaultyFileOps()
    ops._renameat2 = answering(errno.EINVAL)
    place.put(A)
    temp = place.path(A).with_suffix(".tmp")
    temp.write_bytes(b"new")
    with pytest.raises(FileExistsError):
        ops.publish(str(temp), str(place.path(A)))
    assert ops._renameat2 is None
    assert temp.exists()


def test_publishing_passes_other_errors_on(place):
    ops = FaultyFileOps()
    ops._renameat2 = answering(errno.EXDEV)
    outcome = store_key(place.files(ops), A)
    assert os.strerror(errno.EXDEV) in str(outcome.error)
    assert not place.temps()


@pytest.mark.parametrize("max_bytes", [1, 100, BLOCK - 1])
def test_short_writes_are_continued(place, max_bytes):
    ops = FaultyFileOps()
    ops.shorten(max_bytes, on="pwrite", times=5)
    files = place.files(ops)
    assert store_key(files, A).status is StoreStatus.WRITTEN
    assert load_key(files, A) is None


def test_a_write_without_progress_fails_the_block(place):
    ops = FaultyFileOps()
    ops.shorten(0, on="pwrite")
    outcome = store_key(place.files(ops), A)
    assert isinstance(outcome.error, TierUnavailableError)
    assert not place.temps()
    assert not place.blocks()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_fails_the_block_as_full(place, code):
    ops = FaultyFileOps()
    ops.fail(code, on="pwrite", times=1)
    first, second = store(place.files(ops), item(A), item(B, 1))
    assert isinstance(first.error, TierFullError)
    assert second.status is StoreStatus.WRITTEN
    assert place.blocks() == {B}
    assert not place.temps()


def test_the_bytes_are_on_the_device_before_the_block_is_published(place):
    ops = FaultyFileOps()
    store_key(place.files(ops, fsync=True), A)
    names = [call.name for call in ops.calls]
    assert names.index("pwrite") < names.index("fdatasync") < names.index("publish")
    assert names.index("set_xattr") < names.index("fdatasync")
    assert names.index("close") < names.index("publish")


def test_nothing_waits_for_the_device_unless_asked(place):
    ops = FaultyFileOps()
    store_key(place.files(ops), A)
    assert not ops.counts()["fdatasync"]


SCENARIOS = {
    "fresh": {},
    "victim": {"victim": B},
    "reused": {"victim": B, "reuses_inodes": True},
}


def prepared(place: Place, ops: FaultyFileOps, scenario: str):
    place.put(B, sealed=True)
    options = dict(SCENARIOS[scenario])
    files = place.files(ops, reuses_inodes=options.pop("reuses_inodes", False), fsync=True)
    return files, item(A, **options)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_no_error_at_any_call_leaves_a_temp_or_a_partial_block(tmp_path, scenario, code):
    for number in itertools.count(1):
        place = Place(tmp_path / str(number))
        ops = FaultyFileOps()
        files, block = prepared(place, ops, scenario)
        before = on_disk(place)
        ops.fail(code, at=number)
        (outcome,) = store(files, block)
        ops.heal()
        if len(ops.calls) < number:
            assert outcome.status is StoreStatus.WRITTEN
            break
        files.writer.sweep_litter()
        assert not place.temps(), ops.calls[number - 1]
        assert place.every_block_is_whole()
        assert (A in place.blocks()) == (outcome.status is StoreStatus.WRITTEN)
        assert (B in place.blocks()) == (block.victim is None or not outcome.victim_taken)
        grown = outcome.change.added_bytes - outcome.change.removed_bytes
        # A folder whose size could not be asked for is only found by the next walk.
        assert on_disk(place) - before - grown in {0, 4096}
        assert not ops.open_fds
    assert number > 8


def test_a_temp_that_cannot_be_removed_is_removed_later(place, caplog):
    ops = FaultyFileOps()
    ops.fail(errno.EIO, on="publish unlink")
    files = place.files(ops)
    assert store_key(files, A).error is not None
    assert len(place.temps()) == 1
    with pytest.raises(OSError, match="injected"):
        files.writer.sweep_litter()
    ops.heal()
    files.writer.sweep_litter()
    files.writer.sweep_litter()
    assert not place.temps()
    assert "stays behind" in caplog.text


# -- victims ------------------------------------------------------------------------------------


def test_a_victims_inode_is_reused(place):
    files = place.files(reuses_inodes=True)
    store_key(files, B)
    inode = place.path(B).stat().st_ino
    outcome = store_key(files, A, victim=B)
    assert outcome.victim_taken
    assert place.path(A).stat().st_ino == inode
    assert place.blocks() == {A}
    assert load_key(files, A) is None


def has_new_inode(place: Place, files) -> bool:
    """Store A in the place of B; is the file another one? (B's is kept open, so that its inode
    cannot come back by chance.)"""
    fd = os.open(place.path(B), os.O_RDONLY)
    try:
        outcome = store_key(files, A, victim=B)
        assert outcome.status is StoreStatus.WRITTEN
        assert outcome.victim_taken
        assert place.blocks() == {A}
        assert load_key(files, A) is None
        return os.fstat(fd).st_ino != place.path(A).stat().st_ino
    finally:
        os.close(fd)


def test_an_inode_is_not_reused_where_somebody_reads_without_verifying(place):
    files = place.files(reuses_inodes=True)
    store_key(files, B)
    (place.folder / ".unverified-readers").touch()
    assert has_new_inode(place, files)


def test_an_inode_without_a_checksum_is_not_reused(place):
    """Whoever serves files without one and has it open would take the new bytes for the old."""
    place.put(B)
    assert has_new_inode(place, place.files(reuses_inodes=True))


def test_an_inode_with_another_name_is_not_reused(place):
    place.put(B, sealed=True)
    kept = place.root / "kept"
    os.link(place.path(B), kept)
    assert has_new_inode(place, place.files(reuses_inodes=True))
    assert kept.read_bytes() == content_of(B, BLOCK).tobytes()


def test_what_a_symbolic_link_points_to_is_not_overwritten(place):
    place.put(B, sealed=True)
    kept = place.root / "kept"
    place.path(B).rename(kept)
    place.path(B).symlink_to(kept)
    files = place.files(reuses_inodes=True)
    assert store_key(files, A, victim=B).status is StoreStatus.WRITTEN
    assert kept.read_bytes() == content_of(B, BLOCK).tobytes()
    assert not place.path(A).is_symlink()


def test_an_inode_that_may_not_be_written_is_not_reused(place):
    ops = FaultyFileOps()
    place.put(B, sealed=True)
    ops.fail(errno.EACCES, on="open", times=1)
    assert has_new_inode(place, place.files(ops, reuses_inodes=True))


def test_an_inode_is_not_reused_unless_allowed(place):
    place.put(B, sealed=True)
    assert has_new_inode(place, place.files())


def test_a_victim_of_another_length_becomes_a_whole_block(place):
    for content in (b"", b"x" * 10, b"x" * 3 * BLOCK):
        place.put(B, content)
        os.setxattr(place.path(B), ATTRIBUTE, b"any")
        before = on_disk(place)
        outcome = store_key(place.files(reuses_inodes=True), A, victim=B)
        grown = outcome.change.added_bytes - outcome.change.removed_bytes
        assert on_disk(place) - before == grown
        assert place.every_block_is_whole()
        assert place.blocks() == {A}
        place.path(A).unlink()


def test_a_victims_old_checksum_never_stays(place):
    ops = FaultyFileOps()
    place.put(B, sealed=True)
    ops.fail(errno.EOPNOTSUPP, on="set_xattr")
    outcome = store_key(place.files(ops, reuses_inodes=True), A, victim=B)
    assert outcome.status is StoreStatus.FAILED
    assert outcome.victim_taken
    assert not place.blocks()
    assert not place.temps()


def test_a_victim_that_is_gone_already_is_reported(place):
    files = place.files(reuses_inodes=True)
    outcome = store_key(files, A, victim=B)
    assert outcome.status is StoreStatus.VICTIM_GONE
    assert not outcome.victim_taken
    assert not place.blocks()


def test_a_victim_that_goes_in_the_last_moment_is_reported(place):
    ops = FaultyFileOps()
    place.put(B, sealed=True)
    ops.fail(errno.ENOENT, on="rename")
    outcome = store_key(place.files(ops, reuses_inodes=True), A, victim=B)
    assert outcome.status is StoreStatus.VICTIM_GONE
    assert place.blocks() == {B}


@pytest.mark.parametrize("victim", [None, B])
def test_a_remembered_folder_that_somebody_removed_is_made_again(place, victim):
    """Another process evicts the last block of a folder, and removes the folder."""
    files = place.files(reuses_inodes=True)
    if victim:
        store_key(files, victim)
    store_key(files, A)
    before = on_disk(place)
    place.files().remove([A])
    outcome = store_key(files, A, victim=victim)
    assert outcome.status is StoreStatus.WRITTEN
    grown = outcome.change.added_bytes - outcome.change.removed_bytes
    assert load_key(files, A) is None
    assert on_disk(place) - before == grown - BLOCK - 2 * 4096


def test_empty_folders_go_with_their_last_block(place):
    files = place.files()
    store_key(files, A)
    store_key(files, B)
    files.remove([A])
    assert not place.path(A).parent.parent.exists()
    files.remove([B])
    assert [path.name for path in place.folder.iterdir()] == []


def test_removing_is_judged_block_by_block(place, caplog):
    ops = FaultyFileOps()
    files = place.files(ops)
    store(files, item(A), item(B, 1), item(C, 2))
    before = on_disk(place)
    ops.fail(errno.EACCES, on="unlink", when=lambda call: call.path == str(place.path(B)))
    change = files.remove([D, A, B, C])
    assert place.blocks() == {B}
    assert change.removed_bytes == before - on_disk(place)
    assert "stays behind" in caplog.text


# -- checksums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPERM, errno.E2BIG])
def test_blocks_are_stored_without_checksum_where_there_are_no_attributes(place, caplog, code):
    ops = FaultyFileOps()
    ops.fail(code, on="set_xattr")
    files = place.files(ops)
    assert store_key(files, A).status is StoreStatus.WRITTEN
    assert store_key(files, B).status is StoreStatus.WRITTEN
    assert caplog.text.count("without a checksum") == 1
    assert load_key(files, A) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_checksum_that_could_not_be_written_fails_the_block(place, code):
    ops = FaultyFileOps()
    ops.fail(code, on="set_xattr")
    assert store_key(place.files(ops), A).status is StoreStatus.FAILED
    assert not place.blocks()


def test_a_required_checksum_that_could_not_be_written_fails_the_block(place):
    ops = FaultyFileOps()
    ops.fail(errno.EOPNOTSUPP, on="set_xattr")
    assert store_key(place.files(ops, verify="required"), A).status is StoreStatus.FAILED
    assert not place.temps()


def test_no_checksum_is_written_where_none_is_read(place):
    ops = FaultyFileOps()
    store_key(place.files(ops, verify="off"), A)
    assert not ops.counts()["set_xattr"]


# -- direct I/O ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_direct_io_that_a_store_cannot_have_is_given_up_with_one_warning(place, caplog, call):
    """Regressions 43674, 44016, 49734: the tier was silently dead."""
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on=call, when=lambda c: bool(c.flags & os.O_DIRECT))
    files = place.files(ops, direct_io=True)
    for key in (A, B):
        assert store_key(files, key).status is StoreStatus.WRITTEN
        assert load_key(files, key) is None
    assert caplog.text.count("direct I/O does not work here") == 1
    assert not place.temps()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_direct_io_that_a_load_cannot_have_is_given_up_with_one_warning(place, caplog, call):
    store(place.files(), item(A), item(B, 1))
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on=call, when=lambda c: bool(c.flags & os.O_DIRECT))
    files = place.files(ops, direct_io=True)
    assert load_key(files, A) is None
    assert load_key(files, B) is None
    assert caplog.text.count("direct I/O does not work here") == 1


def test_direct_io_is_given_up_in_a_reused_file_too(place):
    ops = FaultyFileOps()
    ops.fail(errno.EINVAL, on="pwrite", when=lambda c: bool(c.flags & os.O_DIRECT))
    files = place.files(ops, direct_io=True, reuses_inodes=True)
    place.put(B, sealed=True)
    assert store_key(files, A, victim=B).status is StoreStatus.WRITTEN
    assert load_key(files, A) is None


def test_one_threads_giving_up_does_not_fail_another_that_is_in_a_call(place, caplog):
    ops = FaultyFileOps()
    files = place.files(ops, direct_io=True)
    flag = files._direct.flag
    error = OSError(errno.EINVAL, "x")
    assert files._direct.refused(flag, error)
    assert files._direct.refused(flag, error)
    assert not files._direct.refused(0, error)
    assert not files._direct.refused(flag, OSError(errno.EIO, "x"))
    assert caplog.text.count("direct I/O") == 1


def test_a_real_misaligned_direct_transfer_falls_back(place):
    files = place.files(direct_io=True)
    buffer = bytearray(BLOCK + 1)
    buffer[1:] = content_of(A, BLOCK).tobytes()
    (outcome,) = store(files, StoreItem(0, A, memoryview(buffer)[1:]))
    assert outcome.status is StoreStatus.WRITTEN
    assert load_key(files, A) is None


def test_rules_tell_blocks_from_temps(place):
    ops = FaultyFileOps()
    store_key(place.files(ops), A)
    names = {call.name for call in ops.calls if is_temp(call)}
    assert {"open", "pwrite", "set_xattr", "close", "publish"} <= names
    assert {call.name for call in ops.calls if is_block(call)} == {"stat"}
