"""The directory of a tier, which the tier creates: its entry, and those of its parents."""

import errno
import os
from pathlib import Path

import pytest
from faulty_files import FaultyFileOps
from fs.directories import FsDirectory
from slab.stores import SlabStore

from kvoffload_async import ConfigError
from kvoffload_async.tiers.files.modes import Modes
from kvoffload_async.tiers.files.ops import FileOps, make_root

OPEN = {
    "fs": lambda root, ops, sync: FsDirectory(root).open(ops, fsync=sync),
    "slab": lambda root, ops, sync: SlabStore(root).open(ops, fsync=sync),
}


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """The folders and files for which somebody has waited, in order."""
    paths: list[str] = []
    real = os.fsync

    def fsync(fd):
        paths.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


@pytest.mark.parametrize("tier", OPEN)
def test_the_entry_of_a_new_directory_is_on_the_device_before_the_tier_is_open(
    tmp_path, synced, tier
):
    with OPEN[tier](tmp_path / "a" / "b", FileOps(), True):
        first = [str(tmp_path.parent), str(tmp_path)]
        assert synced[:4] == [*first, str(tmp_path), str(tmp_path / "a")], "each before the next"
        assert str(tmp_path / "a" / "b") in synced[4:]


@pytest.mark.parametrize("tier", OPEN)
def test_nobody_waits_for_it_where_blocks_may_be_lost(tmp_path, synced, tier):
    ops = FaultyFileOps()
    with OPEN[tier](tmp_path / "root", ops, False):
        assert str(tmp_path) not in synced
        assert not ops.counts()["sync_entry"]


@pytest.mark.parametrize("tier", OPEN)
def test_one_that_a_killed_process_has_created_is_waited_for_as_well(tmp_path, synced, tier):
    (tmp_path / "root").mkdir()
    with OPEN[tier](tmp_path / "root", FileOps(), True):
        assert synced[0] == str(tmp_path)


@pytest.mark.parametrize("tier", OPEN)
def test_a_directory_whose_entry_cannot_be_synced_is_refused(tmp_path, tier):
    ops = FaultyFileOps()
    ops.fail(errno.EIO, on="sync_entry")
    with pytest.raises(ConfigError, match="root_dir"):
        OPEN[tier](tmp_path / "root", ops, True)
    assert not ops.open_fds


def test_of_others_directories_the_parents_need_not_be_readable(tmp_path):
    def refuse(path):
        raise PermissionError(errno.EACCES, "not readable", path)

    (tmp_path / "root").mkdir()
    make_root(str(tmp_path / "root"), 0o700, refuse)
    with pytest.raises(PermissionError):
        make_root(str(tmp_path / "new"), 0o700, refuse)


def test_a_mount_points_entry_is_nothing_to_wait_for(synced):
    FileOps().sync_entry("/proc")
    assert not synced


def test_a_link_that_leads_nowhere_is_not_followed_for_ever(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for path in ("link/root", "link/deep/root"):
        with pytest.raises(FileNotFoundError):
            FileOps().enter(str(tmp_path / path), Modes())
    assert not Path(tmp_path / "absent").exists()
