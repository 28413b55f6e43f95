"""Who may read and write what the tiers make."""

import os
import stat
import subprocess
import sys

import pytest
from fs.directories import BLOCK, FsDirectory
from slab.stores import SlabStore

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import FileSystemTierManager, SlabTierManager
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps

K = [key_of(number) for number in range(8)]
OTHER_GROUP = 54321


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture(params=["fs", "slab"])
def filled(request, tmp_path):
    """Fill a tier in a root; return the modes of everything below it."""

    def fill(prepare=lambda root: None, **options):
        root = tmp_path / "above" / "root"
        prepare(root)
        if request.param == "fs":
            tier = FsDirectory(root).open(capacity_bytes=64 * BLOCK, **options)
        else:
            tier = SlabStore(root).open(**options)
        with tier as harness:
            assert harness.store(K) == {}
            statuses = [path.lstat() for path in root.rglob("*")]
            statuses.append(root.lstat())
        files = {stat.S_IMODE(s.st_mode) for s in statuses if stat.S_ISREG(s.st_mode)}
        folders = {stat.S_IMODE(s.st_mode) for s in statuses if stat.S_ISDIR(s.st_mode)}
        return files, folders, {s.st_gid for s in statuses}

    return fill


def made(mode, group=None):
    def prepare(root):
        root.mkdir(parents=True)
        if group is not None:
            try:
                os.chown(root, -1, group)
            except PermissionError:
                pytest.skip("another group cannot be given here")
        root.chmod(mode)

    return prepare


def test_what_is_made_is_nobody_elses(filled, umask, tmp_path):
    assert filled()[:2] == ({0o600}, {0o700})
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("root", "files", "folders"),
    [
        (0o700, 0o600, 0o700),
        (0o755, 0o640, 0o750),
        (0o770, 0o660, 0o770),
        (0o775, 0o660, 0o770),
        (0o2770, 0o660, 0o2770),
        (0o777, 0o666, 0o777),
        (0o1777, 0o660, 0o770),
    ],
)
def test_a_directory_that_exists_keeps_its_way_whatever_the_umask(
    filled, umask, root, files, folders
):
    assert filled(made(root))[:2] == ({files}, {folders, root})


@pytest.mark.parametrize("root", [0o770, 0o2770])
def test_what_is_made_for_a_group_is_of_that_group(filled, umask, root):
    files, folders, groups = filled(made(root, OTHER_GROUP))
    assert (files, folders, groups) == ({0o660}, {root}, {OTHER_GROUP})


def test_given_modes_hold_whatever_directory_and_umask_say(filled, umask):
    files, folders, _ = filled(made(0o700), file_mode=0o640)
    assert (files, folders) == ({0o640}, {0o750, 0o700})


def test_given_modes_hold_for_the_root_too(filled, umask, tmp_path):
    assert filled(file_mode=0o644)[:2] == ({0o644}, {0o755})


SOMEBODY_ELSE = """
import os, sys
from kvoffload_async.tiers.files.ops import FileOps
ops = FileOps()
ops.enter(sys.argv[1])
os.setgroups([])
os.setgid(23456)
os.setuid(23456)
ops.mkdir(sys.argv[1] + "/folder")
ops.close(ops.open(sys.argv[1] + "/file", os.O_RDWR | os.O_CREAT))
"""


def test_without_permission_to_give_files_to_its_group_a_directory_is_not_shared_with_any(tmp_path):
    """Its bits would be for the process's own group, about which they say nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    root = tmp_path / "root"
    made(0o777, OTHER_GROUP)(root)
    subprocess.run([sys.executable, "-c", SOMEBODY_ELSE, root], check=True)
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o606
    assert stat.S_IMODE((root / "folder").stat().st_mode) == 0o707


def test_a_filesystem_without_modes_is_no_obstacle(tmp_path, monkeypatch):
    def refused(*_arguments):
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o770)
    monkeypatch.setattr(os, "fchmod", refused)
    ops = FileOps()
    ops.enter(str(tmp_path))
    ops.mkdir(f"{tmp_path}/folder")
    ops.close(ops.open(f"{tmp_path}/folder/file", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "folder" / "file").exists()


# -- the options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0640", "640", "0o640", 0o640])
def test_a_mode_is_octal_text_or_a_number(tmp_path, value):
    view = memoryview(bytearray(4 * BLOCK)).cast("B", (4, BLOCK))
    options = {"model": "m/x", "root_dir": str(tmp_path / "root"), "file_mode": value}
    FileSystemTierManager(None, view, **options).shutdown()
    (path,) = (tmp_path / "root").glob("*/config.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("manager", [FileSystemTierManager, SlabTierManager])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file_mode", "0440"),
        ("file_mode", "0700"),
        ("file_mode", 640),
        ("file_mode", True),
        ("file_mode", "rw-r-----"),
        ("file_mode", ""),
        ("file_mode", -1),
        ("file_mode", 0.5),
        ("file_mode", ["0600"]),
    ],
)
def test_any_other_mode_is_refused_by_name_and_value(tmp_path, manager, key, value):
    view = memoryview(bytearray(4 * BLOCK)).cast("B", (4, BLOCK))
    options = {"model": "m/x", "root_dir": str(tmp_path / "root"), "capacity_bytes": "1MiB"}
    with pytest.raises(ConfigError, match=rf"^{key}: .* is not valid; give octal digits as text"):
        manager(None, view, **options, **{key: value})
    assert not (tmp_path / "root").exists()


# -- the warning ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode_and_owner", "reason"),
    [
        ((0o775, None), "its mode is 0775"),
        ((0o1777, None), "its mode is 1777"),
        ((0o755, 12345), "it belongs to user 12345"),
        ((0o770, 12345), "it belongs to user 12345 and its mode is 0770"),
        ((0o755, None), None),
        ((0o700, None), None),
    ],
)
@pytest.mark.parametrize("store", [FsDirectory, SlabStore])
def test_a_directory_that_others_may_write_to_is_warned_of_once(
    tmp_path, caplog, store, mode_and_owner, reason
):
    root, (mode, owner) = tmp_path / "root", mode_and_owner
    made(mode)(root)
    if owner is not None:
        try:
            os.chown(root, owner, -1)
        except PermissionError:
            pytest.skip("only root can give a directory away")
    with store(root).open() as harness:
        assert harness.store(K) == {}
    warnings = [r.getMessage() for r in caplog.records if "others may write" in r.getMessage()]
    if reason is None:
        assert not warnings
    else:
        (warning,) = warnings
        assert f"root_dir: others may write to '{root}' ({reason})" in warning
