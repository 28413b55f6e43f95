"""A directory in which somebody else has put things: nothing outside it is read or changed."""

import os
import shutil

import pytest
from files.traps import REMOVABLE, TRAPS, Outside, folder, link, pipe, spring
from fs.directories import BLOCK, FsDirectory

from kvoffload_async.errors import BlockMissingError, ConfigError, TierUnavailableError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.fs.usage import FILE_NAME
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER

K = [key_of(number) for number in range(8)]
CAPACITIES = [{}, {"capacity_bytes": 64 * BLOCK}]


@pytest.fixture
def outside(tmp_path) -> Outside:
    return Outside(tmp_path / "outside")


def is_stored(harness, keys) -> bool:
    assert harness.store(keys) == {}
    assert harness.contains(keys) == frozenset(keys)
    return harness.load(keys) == {}


# -- the namespace's own files --------------------------------------------------------------------


@pytest.mark.parametrize("options", CAPACITIES)
def test_no_old_file_behind_a_link_in_the_place_of_the_writers_is_removed(
    directory, outside, options
):
    entry = outside.path / "folder" / "1-0123456789ab"
    entry.write_text(f'{{"boot_id": "{boot_id()}"}}')
    directory.folder.mkdir(parents=True)
    (directory.folder / ".writers").symlink_to(outside.path / "folder")
    with directory.open(**options) as harness:
        assert is_stored(harness, K)
    assert (outside.path / "folder" / "file").read_bytes() == b"somebody else's"
    assert entry.exists()


@pytest.mark.parametrize("trap", REMOVABLE)
def test_what_is_in_the_place_of_the_writers_is_replaced(directory, outside, trap):
    spring(directory.folder / ".writers", trap, outside)
    with directory.open() as harness, directory.open() as other:
        assert is_stored(harness, K)
        assert other.load(K) == {}
    assert outside.is_untouched()


def test_of_the_writers_only_what_is_an_entry_is_removed(directory, outside):
    directory.folder.mkdir(parents=True)
    writers = directory.folder / ".writers"
    writers.mkdir()
    text = f'{{"boot_id": "{boot_id()}", "host": "h"}}'
    kept = {"notes.txt", "1-ABC", "2-foreign", "3-link", "4-pipe", "5-folder"}
    (writers / "notes.txt").write_text(text)
    (writers / "1-ABC").write_text(text)
    (writers / "2-foreign").write_text("somebody's notes")
    link(writers / "3-link", outside)
    pipe(writers / "4-pipe", outside)
    folder(writers / "5-folder", outside)
    (writers / "5-folder" / "6-dead").write_text(text)
    (writers / "7-dead").write_text(text)
    for path in writers.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    for _ in range(2):
        with directory.open(capacity_bytes=64 * BLOCK) as harness:
            assert is_stored(harness, K)
    assert {path.name for path in writers.iterdir()} == kept
    assert (writers / "5-folder" / "6-dead").exists()
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", REMOVABLE)
@pytest.mark.parametrize("name", [FILE_NAME, UNVERIFIED_MARKER, "../config"])
def test_what_is_in_the_place_of_a_housekeeping_file_is_replaced_or_left(
    directory, outside, trap, name
):
    path = directory.folder / name
    if name == "../config":
        path = directory.root / directory.namespace.config_path.removeprefix(f"{directory.root}/")
    spring(path, trap, outside)
    with directory.open(capacity_bytes=64 * BLOCK, verify="off") as harness:
        assert is_stored(harness, K)
        if name == FILE_NAME:
            assert directory.counted_bytes() > 8 * BLOCK
    assert outside.is_untouched()


@pytest.mark.parametrize("name", [FILE_NAME, ".writers"])
def test_a_folder_or_file_in_the_place_of_a_vital_one_is_a_clear_error(directory, outside, name):
    path = directory.folder / name
    path.parent.mkdir(parents=True)
    if name == ".writers":
        path.write_bytes(b"")
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=r"root_dir: .* cannot be used .*remove it") as caught:
        directory.open(capacity_bytes=64 * BLOCK).close()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("options", CAPACITIES)
def test_a_namespace_that_is_a_link_is_a_clear_error(directory, outside, options):
    directory.root.mkdir()
    directory.folder.symlink_to(outside.path)
    with pytest.raises(ConfigError, match="not a directory"):
        directory.open(**options).close()
    assert outside.is_untouched()


# -- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*CAPACITIES, {"verify": "off"}, {"direct_io": True}])
@pytest.mark.parametrize("trap", TRAPS)
def test_what_is_in_a_blocks_place_is_no_block(directory, outside, trap, options):
    with directory.open() as harness:
        assert harness.store(K[:4]) == {}
    spring(directory.path(K[0]), trap, outside)
    with directory.open(**options) as harness:
        assert harness.contains(K[:4]) == frozenset(K[1:4])
        assert isinstance(harness.load(K[:4])[0], BlockMissingError)
        if trap is folder:
            assert harness.store(K[:4]).keys() == {0}
            assert harness.contains(K[:4]) == frozenset(K[1:4])
            assert directory.path(K[0]).is_dir()
        else:
            assert is_stored(harness, K[:4])
            assert not directory.path(K[0]).is_symlink()
    assert not directory.temps()
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", TRAPS)
def test_a_block_whose_place_is_taken_while_the_tier_is_open_is_a_miss(directory, outside, trap):
    with directory.open(capacity_bytes=64 * BLOCK) as harness:
        assert harness.store(K[:4]) == {}
        spring(directory.path(K[0]), trap, outside)
        failures = harness.load(K[:4])
        assert failures.keys() == {0}
        assert isinstance(failures[0], BlockMissingError)
        if trap is not folder:
            assert is_stored(harness, K[:4])
    assert outside.is_untouched()


def test_a_block_behind_a_link_is_not_served_even_if_it_is_right(directory, tmp_path):
    with directory.open() as harness:
        assert harness.store(K[:1]) == {}
    away = tmp_path / "away.bin"
    directory.path(K[0]).rename(away)
    directory.path(K[0]).symlink_to(away)
    with directory.open() as harness:
        assert isinstance(harness.load(K[:1])[0], BlockMissingError)


@pytest.mark.parametrize("options", CAPACITIES)
@pytest.mark.parametrize("trap", REMOVABLE)
def test_no_block_is_written_or_read_through_a_link_in_its_folders_place(
    directory, outside, trap, options
):
    with directory.open(**options) as harness:
        assert harness.store(K[:1]) == {}
        taken = directory.path(K[0]).parent
        spring(taken, trap, outside)
        assert harness.contains(K[:1]) == frozenset()
        assert isinstance(harness.load(K[:1])[0], BlockMissingError)
        assert is_stored(harness, K)
        assert taken.is_dir()
        assert not taken.is_symlink()
    assert outside.is_untouched()


def test_a_folder_of_blocks_that_became_a_link_after_a_restart_is_replaced(directory, outside):
    with directory.open() as harness:
        assert harness.store(K) == {}
    spring(directory.path(K[0]).parent, link, outside)
    with directory.open(capacity_bytes=64 * BLOCK) as harness:
        assert is_stored(harness, K)
    assert outside.is_untouched()


def test_evicting_removes_no_folder_and_nothing_behind_a_link(directory, outside):
    with directory.open(capacity_bytes=24 * BLOCK) as harness:
        assert harness.store(K[:4]) == {}
        for key, trap in zip(K[:4], (link, folder, pipe, folder), strict=True):
            spring(directory.path(key), trap, outside)
        harness.store([key_of(100 + number) for number in range(8)])
        assert directory.path(K[1]).is_dir()
    assert outside.is_untouched()


def test_temporary_files_of_the_dead_are_removed_only_if_they_are_files(directory, outside):
    directory.folder.mkdir(parents=True)
    (directory.folder / ".writers").mkdir()
    (directory.folder / ".writers" / "7-dead").write_text(f'{{"boot_id": "{boot_id()}"}}')
    leaf = directory.path(K[0]).parent
    leaf.mkdir(parents=True)
    names = {
        trap: leaf / f"{directory.path(K[0]).name}.7-dead.{i}.tmp" for i, trap in enumerate(TRAPS)
    }
    for trap, path in names.items():
        trap(path, outside)
    plain = leaf / f"{directory.path(K[0]).name}.7-dead.99.tmp"
    plain.write_bytes(b"half")
    with directory.open(capacity_bytes=64 * BLOCK) as harness:
        assert is_stored(harness, K)
    assert not plain.exists()
    assert all(os.path.lexists(path) for path in names.values())
    assert outside.is_untouched()


def test_a_circle_of_links_ends_no_walk(directory):
    directory.folder.mkdir(parents=True)
    (directory.folder / "000").symlink_to(directory.root)
    with directory.open(capacity_bytes=64 * BLOCK) as harness:
        assert is_stored(harness, K)


@pytest.mark.parametrize("options", CAPACITIES)
def test_a_block_that_may_not_be_read_is_a_miss(directory, options):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    with directory.open(**options) as harness:
        assert harness.store(K[:2]) == {}
        directory.path(K[0]).chmod(0)
        assert isinstance(harness.load(K[:2])[0], BlockMissingError)


# -- the root -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CAPACITIES)
def test_the_root_may_be_a_link(tmp_path, options):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with FsDirectory(tmp_path / "link").open(**options) as harness:
        assert is_stored(harness, K)
    assert FsDirectory(tmp_path / "real").blocks() == set(K)


def test_no_descriptor_is_left_open(directory):
    with directory.open(capacity_bytes=64 * BLOCK) as harness:
        assert is_stored(harness, K)
        assert 1 <= len(descriptors_below(directory)) <= 4
    assert not descriptors_below(directory)


def descriptors_below(directory):
    """What this process has open in the root."""
    found = []
    for fd in os.scandir("/proc/self/fd"):
        try:
            found.append(os.readlink(fd.path))  # noqa: PTH115 - a descriptor
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(str(directory.root))]


def test_a_failed_opening_leaves_no_descriptor_open(directory, outside):
    directory.root.mkdir()
    directory.folder.symlink_to(outside.path)
    with pytest.raises(ConfigError):
        directory.open().close()
    assert not descriptors_below(directory)


def test_a_root_that_was_deleted_is_a_fault(directory):
    with directory.open() as harness:
        assert harness.store(K) == {}
        shutil.rmtree(directory.root)
        directory.root.mkdir()
        with pytest.raises(TierUnavailableError):
            harness.store(K)
    assert list(directory.root.iterdir()) == []
