"""Nothing outside a root that was entered can be reached, by whatever name or call."""

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest
from files.traps import REMOVABLE, TRAPS, Outside, folder, spring

from kvoffload_async.tiers.files.ops import (
    FileOps,
    NotRegularFileError,
    names_in,
    open_by_components,
    open_by_kernel,
    suitable_opener,
)

CREATE = os.O_RDWR | os.O_CREAT
REFUSED = (NotADirectoryError, NotRegularFileError)


@pytest.fixture
def outside(tmp_path) -> Outside:
    return Outside(tmp_path / "outside")


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    (path / "folder").mkdir(parents=True)
    (path / "folder" / "file").write_bytes(b"ours")
    return path


@pytest.fixture(params=[open_by_kernel, open_by_components, None])
def ops(request, root):
    ops = FileOps(request.param)
    ops.enter(str(root))
    yield ops
    ops.leave(str(root))


def num_open(root: Path) -> int:
    """How many descriptors this process has of a folder and what is in it."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += link.readlink().is_relative_to(root)
    return found


def content(ops: FileOps, path) -> bytes:
    fd = ops.open(str(path), os.O_RDONLY)
    try:
        buffer = bytearray(100)
        return bytes(buffer[: ops.pread_into(fd, memoryview(buffer), 0)])
    finally:
        ops.close(fd)


CALLS = {
    "open": lambda ops, path: ops.open(path, os.O_RDONLY),
    "open to write": lambda ops, path: ops.open(path, os.O_RDWR | os.O_TRUNC),
    "create": lambda ops, path: ops.open(path, CREATE),
    "create or fail": lambda ops, path: ops.open(path, CREATE | os.O_EXCL),
    "open own": lambda ops, path: ops.open_own(path, os.O_RDWR),
    "create anew": lambda ops, path: ops.create_anew(path),
    "stat": lambda ops, path: ops.stat(path),
    "unlink": lambda ops, path: ops.unlink(path),
    "utime": lambda ops, path: ops.utime(path),
    "mkdir": lambda ops, path: ops.mkdir(path),
    "make folders": lambda ops, path: ops.make_folders(path),
    "rmdir": lambda ops, path: ops.rmdir(path),
    "entries": lambda ops, path: ops.entries(path),
    "names": names_in,
    "rename away": lambda ops, path: ops.rename(path, path.rpartition("/")[0] + "/../stolen"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["file", "folder", "absent"])
def test_no_call_goes_through_a_link_in_a_folders_place(ops, root, outside, call, name):
    (root / "way").symlink_to(outside.path)
    with pytest.raises(REFUSED):
        CALLS[call](ops, f"{root}/way/{name}")
    assert outside.is_untouched()


def test_nothing_is_moved_through_a_link(ops, root, outside):
    (root / "way").symlink_to(outside.path)
    for move in (ops.rename, ops.publish):
        for source, target in (("folder/file", "way/file"), ("way/file", "folder/new")):
            with pytest.raises(NotADirectoryError):
                move(f"{root}/{source}", f"{root}/{target}")
    assert outside.is_untouched()
    assert content(ops, root / "folder" / "file") == b"ours"


def test_a_link_within_the_root_is_no_way_either(ops, root):
    (root / "way").symlink_to("folder")
    with pytest.raises(REFUSED):
        ops.open(f"{root}/way/file", os.O_RDONLY)
    assert not ops.exists(f"{root}/way/file")
    assert list(ops.walk(f"{root}/way")) == []


@pytest.mark.parametrize("name", ["../outside/file", "folder/../../outside/file"])
def test_two_dots_lead_nowhere(ops, root, outside, name):
    for call in (CALLS["open"], CALLS["stat"], CALLS["unlink"], CALLS["create anew"]):
        with pytest.raises(OSError, match=r"cross-device|Invalid"):
            call(ops, f"{root}/{name}")
    with pytest.raises(OSError, match="not a file name"):
        ops.stat(f"{root}/..")
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, CREATE])
def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(ops, root, outside, trap, flags):
    path = root / "folder" / "file"
    spring(path, trap, outside)
    before = path.lstat()
    num_fds = num_open(root)
    with pytest.raises(NotRegularFileError, match="not a regular file") as caught:
        ops.open(str(path), flags)
    assert caught.value.filename == str(path)
    assert os.path.samestat(path.lstat(), before)
    assert not ops.has_file(str(path))
    assert ops.exists(str(path))
    assert num_open(root) == num_fds
    assert outside.is_untouched()


def test_a_device_is_not_opened(ops, root):
    path = root / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices can be made here")
    with pytest.raises(NotRegularFileError):
        ops.open(str(path), os.O_RDWR)


@pytest.mark.parametrize("trap", REMOVABLE)
def test_what_is_in_the_place_of_a_file_of_ours_is_removed_by_its_own_name(
    ops, root, outside, trap
):
    for name, make in (("own", lambda p: ops.open_own(p, os.O_RDWR)), ("anew", ops.create_anew)):
        path = root / name
        trap(path, outside)
        fd = make(str(path))
        ops.pwrite(fd, memoryview(b"ours"), 0)
        ops.close(fd)
        assert stat.S_ISREG(path.lstat().st_mode)
        assert content(ops, path) == b"ours"
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", REMOVABLE)
def test_what_is_in_the_place_of_a_folder_of_ours_is_removed_by_its_own_name(
    ops, root, outside, trap
):
    trap(root / "own", outside)
    ops.mkdir_own(str(root / "own"))
    assert (root / "own").is_dir()
    assert not (root / "own").is_symlink()
    for name in ("own", "folder/file"):
        with pytest.raises(FileExistsError):
            ops.mkdir_own(f"{root}/{name}")
    assert outside.is_untouched()


def test_a_folder_in_the_place_of_a_file_stays(ops, root, outside):
    folder(root / "own", outside)
    (root / "own" / "file").write_bytes(b"x")
    for make in (lambda p: ops.open_own(p, os.O_RDWR), ops.create_anew, ops.clear):
        with pytest.raises((NotRegularFileError, IsADirectoryError)):
            make(str(root / "own"))
    assert (root / "own" / "file").exists()


def test_a_file_is_no_obstacle_to_be_cleared_away(ops, root):
    with pytest.raises(NotRegularFileError):
        ops.clear(f"{root}/folder/file")
    assert content(ops, root / "folder" / "file") == b"ours"


def test_a_file_that_is_made_anew_leaves_its_other_names_alone(ops, root, outside):
    (root / "temp").hardlink_to(outside.file)
    fd = ops.create_anew(f"{root}/temp")
    ops.pwrite(fd, memoryview(b"ours"), 0)
    ops.close(fd)
    assert outside.is_untouched()


def test_a_walk_yields_links_and_does_not_follow_them(ops, root, outside):
    (root / "way").symlink_to(outside.path)
    found = dict(ops.walk(str(root)))
    assert sorted(found) == [f"{root}/folder", f"{root}/folder/file", f"{root}/way"]
    assert dict(ops.entries(str(root))).keys() == {f"{root}/folder", f"{root}/way"}
    assert set(names_in(ops, str(root))) == {"folder", "way"}
    (root / "way").unlink()
    (root / "way").symlink_to(root)  # a circle
    assert len(list(ops.walk(str(root)))) == 3


def test_a_walk_ends_however_deep_somebody_has_gone(ops, root):
    deep = root / "/".join(["x"] * 60)
    deep.mkdir(parents=True)
    assert len(list(ops.walk(str(root)))) == 2 + 17


def test_an_open_without_exclusion_opens_what_is_there_or_makes_it(ops, root):
    for _ in range(2):
        fd = ops.open(f"{root}/new", CREATE)
        assert os.get_inheritable(fd) is False
        ops.pwrite(fd, memoryview(b"four"), 0)
        ops.close(fd)
    assert content(ops, root / "new") == b"four"
    ops.close(ops.open(f"{root}/new", CREATE | os.O_TRUNC))
    assert content(ops, root / "new") == b""
    with pytest.raises(FileExistsError):
        ops.open(f"{root}/new", CREATE | os.O_EXCL)


def test_folders_are_made_as_far_as_they_are_not_there(ops, root):
    for _ in range(2):
        ops.make_folders(f"{root}/folder/a/b")
    assert (root / "folder" / "a" / "b").is_dir()
    ops.make_folders(str(root))
    with pytest.raises(NotADirectoryError):
        ops.make_folders(f"{root}/folder/file/c")


# -- the root -------------------------------------------------------------------------------------


def test_the_root_may_be_a_link_which_is_followed_once(root, outside, tmp_path):
    way = tmp_path / "way"
    way.symlink_to(root)
    ops = FileOps()
    ops.enter(f"{way}/")
    way.unlink()
    way.symlink_to(outside.path)
    assert content(ops, way / "folder" / "file") == b"ours"
    ops.unlink(f"{way}/folder/file")
    assert outside.is_untouched()
    assert os.path.samestat(ops.stat(str(way)), root.stat())
    assert os.path.samestat(ops.leads_to(str(way)), outside.path.stat())


def test_before_a_root_is_entered_no_link_at_all_is_followed(root, tmp_path):
    (tmp_path / "way").symlink_to(root)
    assert content(FileOps(), root / "folder" / "file") == b"ours"
    with pytest.raises(REFUSED):
        FileOps().open(f"{tmp_path}/way/folder/file", os.O_RDONLY)
    with pytest.raises(OSError, match="not an absolute path"):
        FileOps().stat("folder/file")


def test_a_root_that_is_not_to_be_made_must_be_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileOps().enter(f"{tmp_path}/absent", make=False)
    FileOps().enter(f"{tmp_path}/absent/too")
    assert (tmp_path / "absent" / "too").is_dir()


def test_the_roots_descriptor_stays_open_for_a_call_under_way(root):
    num_fds = num_open(root)
    ops = FileOps()
    ops.enter(str(root))
    ops.enter(str(root))
    kept, name = ops.locate(f"{root}/folder")
    ops.leave(str(root))
    ops.leave(str(root))
    assert num_open(root) == num_fds + 1
    ops.close(kept.open(kept.fd, name, os.O_RDONLY))
    del kept
    assert num_open(root) == num_fds


def test_the_innermost_root_counts(root, outside):
    (root / "way").symlink_to(outside.path)
    ops = FileOps()
    ops.enter(f"{root}/way")
    ops.enter(str(root))
    assert ops.has_file(f"{root}/way/file")
    ops.leave(f"{root}/way")
    assert not ops.has_file(f"{root}/way/file")


def test_where_the_kernel_has_no_such_call_components_are_opened_one_by_one(root):
    fd = os.open(root, os.O_PATH)
    try:
        os.close(suitable_opener(fd)(fd, "folder/file", os.O_RDONLY))
    finally:
        os.close(fd)
    assert suitable_opener(-1) is open_by_components


@pytest.mark.parametrize("opener", [open_by_kernel, open_by_components])
def test_an_opener_takes_no_null_byte_no_absolute_name_and_no_link(root, opener):
    fd = os.open(root, os.O_PATH)
    try:
        with pytest.raises(ValueError, match="null"):
            opener(fd, "folder/file\0x", os.O_RDONLY)
        with pytest.raises(OSError, match="cross-device"):
            opener(fd, "/etc/hostname", os.O_RDONLY)
        (root / "link").symlink_to("folder/file")
        with pytest.raises(OSError, match="symbolic links"):
            opener(fd, "link", os.O_RDONLY)
    finally:
        os.close(fd)


# -- a batch of calls -----------------------------------------------------------------------------


def test_a_batch_finds_a_folder_that_was_removed_and_made_again(ops, root):
    with ops.batch():
        assert not ops.exists(f"{root}/folder/new")
        (root / "folder" / "file").unlink()
        (root / "folder").rmdir()
        with pytest.raises(FileNotFoundError):
            ops.open(f"{root}/folder/new", CREATE)
        ops.mkdir(f"{root}/folder")
        ops.close(ops.open(f"{root}/folder/new", CREATE | os.O_EXCL))
    assert (root / "folder" / "new").exists()


def test_a_batch_keeps_few_descriptors_and_gives_all_back(ops, root):
    for number in range(20):
        (root / f"{number}").mkdir()
    num_fds = num_open(root)
    with ops.batch():
        for number in range(20):
            ops.close(ops.open(f"{root}/{number}/file", CREATE | os.O_EXCL))
            ops.rename(f"{root}/{number}/file", f"{root}/{(number + 7) % 20}/other")
            assert num_open(root) <= num_fds + 4
    assert num_open(root) == num_fds
    assert len(list(root.rglob("other"))) == 20


def test_threads_do_not_share_the_descriptors_of_their_batches(ops, root):
    inside, go_on = threading.Event(), threading.Event()

    def other():
        with ops.batch():
            ops.stat(f"{root}/folder/file")
            inside.set()
            go_on.wait()
            found.append(ops.stat(f"{root}/folder/file"))

    found: list[os.stat_result] = []
    thread = threading.Thread(target=other)
    with ops.batch():
        thread.start()
        inside.wait()
        ops.stat(f"{root}/folder/file")
    go_on.set()
    thread.join()
    assert os.path.samestat(found[0], ops.stat(f"{root}/folder/file"))
