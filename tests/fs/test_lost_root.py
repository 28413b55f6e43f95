"""A root that is not the directory that was opened: nothing is served, and nothing written."""

import pytest
from fs.directories import BLOCK, FsDirectory
from unmounting import unmounted

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import key_of

K = [key_of(number) for number in range(16)]
CAPACITIES = [{}, {"capacity_bytes": 64 * BLOCK}]


def replace(directory):
    directory.root.rename(directory.root.with_name("away"))
    directory.root.mkdir()


def take_away(directory):
    directory.root.rename(directory.root.with_name("away"))


def turn_into_a_file(directory):
    directory.root.rename(directory.root.with_name("away"))
    directory.root.touch()


def blocks_in(folder):
    """Return the files of blocks, temporary ones included."""
    return sorted(folder.rglob("*.bin*"))


def result_of(harness, job):
    harness.wait()
    return harness.result_of(job)


def is_lost(result, root) -> bool:
    assert type(result.error) is TierUnavailableError  # which is a fault of the tier
    assert not result.successful_keys
    assert f"root_dir: '{root}' is not the opened directory any more" in str(result.error)
    assert "mount it again, or restart the engine" in str(result.error)
    return True


@pytest.mark.parametrize("options", CAPACITIES)
@pytest.mark.parametrize("lose", [replace, take_away, turn_into_a_file])
def test_a_lost_root_is_a_fault_and_nothing_is_written_in_its_place(directory, options, lose):
    with directory.manage(**options) as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        lose(directory)
        away = directory.root.with_name("away")
        left, lost = sorted(directory.root.rglob("*")), blocks_in(away)
        assert len(lost) == 4
        assert is_lost(
            result_of(harness, harness.submit_store(K[4:8], range(4, 8))), directory.root
        )
        assert is_lost(result_of(harness, harness.submit_store(K[:4], range(4))), directory.root)
        assert is_lost(result_of(harness, harness.submit_load(K[:4], range(8, 12))), directory.root)
        assert blocks_in(away) == lost, "nor is anything written to what was lost"
    assert sorted(directory.root.rglob("*")) == left


@pytest.mark.parametrize("options", CAPACITIES)
def test_a_root_that_comes_back_is_used_again(directory, options):
    away = directory.root.with_name("away")
    with directory.manage(**options) as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        take_away(directory)
        assert is_lost(
            result_of(harness, harness.submit_store(K[4:8], range(4, 8))), directory.root
        )
        away.rename(directory.root)
        assert result_of(harness, harness.submit_store(K[4:8], range(4, 8))).success
        assert result_of(harness, harness.submit_load(K[:8], range(8, 16))).success
        assert all(harness.holds(K[i], 8 + i) for i in range(8))


def test_a_full_store_evicts_nothing_for_a_lost_root(directory):
    with directory.manage(capacity_bytes=24 * BLOCK) as harness:
        for first in range(0, 12, 4):
            harness.submit_store(K[first : first + 4], range(4))
            harness.wait()
        before = directory.blocks()
        take_away(directory)
        assert is_lost(result_of(harness, harness.submit_store(K[12:], range(4))), directory.root)
        directory.root.with_name("away").rename(directory.root)
        assert directory.blocks() == before
        assert result_of(harness, harness.submit_store(K[12:], range(4))).success


def test_a_link_that_leads_elsewhere_is_a_lost_root(tmp_path):
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    first.mkdir()
    second.mkdir()
    link.symlink_to(first)
    with FsDirectory(link).manage() as harness:
        assert result_of(harness, harness.submit_store(K[:1], [0])).success
        link.unlink()
        link.symlink_to(second)
        assert is_lost(result_of(harness, harness.submit_store(K[1:2], [1])), link)
    assert list(second.iterdir()) == []


def test_a_namespace_that_was_emptied_below_its_root_is_filled_again(directory):
    with directory.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        directory.folder.rename(directory.root.with_name("away"))
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        assert directory.blocks() == set(K[:4])


@pytest.mark.parametrize("below", ["", "root"])
def test_a_filesystem_that_was_unmounted_is_a_fault_and_the_disk_below_stays_empty(tmp_path, below):
    told = unmounted("fs", tmp_path, tmp_path / below)
    if told is None:
        pytest.skip("nobody may mount here")
    assert [name for name, _ in told["ends"]] == ["NoneType", *["TierUnavailableError"] * 2]
    assert all("is not the opened directory any more" in text for _, text in told["ends"][1:])
    assert told["below"] == []
