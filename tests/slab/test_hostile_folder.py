"""A directory in which somebody else has put things: nothing outside it is read or changed."""

import os
import stat

import pytest
from faulty_files import FaultyFileOps
from files.traps import REMOVABLE, TRAPS, Outside, folder, link, spring
from slab.stores import KIB, K, SlabStore

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.slab.layout import (
    LOCK,
    MANIFEST,
    NEXT_JOURNAL,
    SESSION,
    TEMP_SUFFIX,
    segment_name,
)


@pytest.fixture
def outside(tmp_path) -> Outside:
    return Outside(tmp_path / "outside")


def is_stored(harness, keys) -> bool:
    assert harness.store(keys) == {}
    assert harness.contains(keys) == frozenset(keys)
    return harness.load(keys) == {}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", [LOCK, MANIFEST])
def test_what_is_in_the_place_of_a_vital_file_is_a_clear_error(
    slab_store, outside, name, trap, is_new
):
    if not is_new:
        with slab_store.open() as harness:
            assert harness.store(K[:4]) == {}
    path = slab_store.folder / name
    spring(path, trap, outside)
    before = path.lstat()
    with pytest.raises(ConfigError, match=r"root_dir: .* cannot be used .*remove it") as caught:
        slab_store.open().close()
    assert str(path) in str(caught.value)
    assert os.path.samestat(path.lstat(), before)
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", REMOVABLE)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_journal_that_is_no_file_says_nothing_and_is_replaced(slab_store, outside, trap, is_new):
    if not is_new:
        with slab_store.open() as harness:
            assert harness.store(K[:4]) == {}
    spring(slab_store.journal, trap, outside)
    with slab_store.open() as harness:
        assert harness.announced() == set()
        assert is_stored(harness, K[:4])
    assert stat.S_ISREG(slab_store.journal.lstat().st_mode)
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:4])
    assert outside.is_untouched()


def test_a_folder_in_the_place_of_the_journal_is_a_clear_error(slab_store, outside):
    spring(slab_store.journal, folder, outside)
    with pytest.raises(ConfigError, match="remove it, or give another directory"):
        slab_store.open().close()


@pytest.mark.parametrize("trap", REMOVABLE)
@pytest.mark.parametrize("name", [MANIFEST + TEMP_SUFFIX, NEXT_JOURNAL])
def test_what_is_in_the_place_of_a_temporary_file_is_replaced(slab_store, outside, name, trap):
    temp = slab_store.folder / name
    spring(temp, trap, outside)
    with slab_store.open() as harness:
        assert is_stored(harness, K[:4])
    spring(slab_store.folder / NEXT_JOURNAL, trap, outside)
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:4])
    assert not os.path.lexists(temp)
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", REMOVABLE)
def test_what_is_in_the_place_of_the_session_is_replaced_and_the_blocks_are_verified(
    slab_store, outside, trap, caplog
):
    with slab_store.open() as harness:
        assert is_stored(harness, K[:4])
    (slab_store.folder / SESSION).unlink()
    spring(slab_store.folder / SESSION, trap, outside)
    with slab_store.open(verify=False) as harness:
        assert harness.announced() == set(K[:4])
        assert harness.load(K[:4]) == {}
    assert "its 4 blocks are verified" in caplog.text
    assert stat.S_ISREG((slab_store.folder / SESSION).lstat().st_mode)
    assert outside.is_untouched()


def test_a_temporary_file_with_another_name_elsewhere_is_not_overwritten(slab_store, outside):
    slab_store.folder.mkdir(parents=True)
    for name in (MANIFEST + TEMP_SUFFIX, NEXT_JOURNAL):
        (slab_store.folder / name).hardlink_to(outside.file)
    with slab_store.open() as harness:
        assert is_stored(harness, K[:4])
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", TRAPS)
def test_a_segment_that_is_no_file_is_no_segment(slab_store, outside, trap):
    with slab_store.open(segment_bytes=64 * KIB) as harness:
        assert harness.store(K[:4]) == {}
    spring(slab_store.folder / segment_name(0), trap, outside)
    with slab_store.open(segment_bytes=64 * KIB) as harness:
        assert harness.announced() == set()
        assert is_stored(harness, K[:8])
    assert os.path.lexists(slab_store.folder / segment_name(0))
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", TRAPS)
def test_a_new_segment_takes_a_name_that_is_free(slab_store, outside, trap):
    with slab_store.open(segment_bytes=64 * KIB) as harness:
        for number in range(4):
            spring(slab_store.folder / segment_name(number), trap, outside)
        assert is_stored(harness, K[:8])
    assert outside.is_untouched()


@pytest.mark.parametrize("trap", [link, *TRAPS])
def test_a_store_that_is_no_folder_is_a_clear_error(slab_store, outside, trap):
    if trap is folder:
        pytest.skip("a folder is one")
    spring(slab_store.folder, trap, outside)
    with pytest.raises(ConfigError, match="not a directory"):
        slab_store.open().close()
    assert outside.is_untouched()


def test_the_root_may_be_a_link_that_is_followed_once(tmp_path, outside):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with SlabStore(tmp_path / "link").open() as harness:
        assert is_stored(harness, K[:4])
    with SlabStore(tmp_path / "real").open() as harness:
        assert harness.announced() == set(K[:4])


def test_no_descriptor_is_left_open(slab_store):
    ops = FaultyFileOps()
    with slab_store.open(ops) as harness:
        assert is_stored(harness, K[:8])
        assert descriptors_below(slab_store)
    assert not descriptors_below(slab_store)
    (slab_store.folder / LOCK).unlink()
    (slab_store.folder / LOCK).mkdir()
    with pytest.raises(ConfigError):
        slab_store.open(ops).close()
    assert not descriptors_below(slab_store)


def descriptors_below(slab_store) -> list[str]:
    """What this process has open in the root."""
    found = []
    for fd in os.scandir("/proc/self/fd"):
        try:
            found.append(os.readlink(fd.path))  # noqa: PTH115 - a descriptor
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(str(slab_store.root))]
