"""A store whose folder or files are not there any more: nothing is served, and nothing stored."""

import errno
import math
import shutil

import numpy as np
import pytest
from faulty_files import FaultyFileOps
from slab.stores import K
from unmounting import unmounted

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.tiers.slab import transfers
from kvoffload_async.tiers.slab.layout import LOCK, segment_name


def replace(slab_store):
    slab_store.folder.rename(slab_store.root / "away")
    slab_store.folder.mkdir()


def take_away(slab_store):
    slab_store.root.rename(slab_store.root.with_name("away"))


def delete_everything(slab_store):
    shutil.rmtree(slab_store.root)


def delete_what_is_in_it(slab_store):
    for path in slab_store.folder.iterdir():
        path.unlink()


def deleting(name):
    def delete(slab_store):
        (slab_store.folder / name).unlink()

    return delete


def result_of(harness, job):
    harness.wait()
    return harness.result_of(job)


def is_lost(result, slab_store) -> bool:
    assert type(result.error) is TierUnavailableError  # which is a fault of the tier
    assert not result.successful_keys
    message = f"root_dir: '{slab_store.folder}' is not the opened directory any more"
    assert message in str(result.error)
    assert "mount it again, or restart the engine" in str(result.error)
    return True


LOSSES = [
    replace,
    take_away,
    delete_everything,
    delete_what_is_in_it,
    deleting(LOCK),
    deleting(segment_name(0)),
]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_store_is_a_fault_of_every_job(slab_store, lose):
    with slab_store.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        lose(slab_store)
        assert is_lost(result_of(harness, harness.submit_store(K[4:8], range(4, 8))), slab_store)
        assert is_lost(result_of(harness, harness.submit_load(K[:4], range(8, 12))), slab_store)


@pytest.mark.parametrize("lose", LOSSES)
def test_loads_look_after_the_store_once_in_a_while_and_have_the_right_bytes_in_between(
    slab_store, lose, monkeypatch
):
    with slab_store.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        stored = harness.rows[:4].copy()
        monkeypatch.setattr(transfers, "_CHECK_S", math.inf)
        assert result_of(harness, harness.submit_load(K[:4], range(8, 12))).success
        lose(slab_store)
        assert result_of(harness, harness.submit_load(K[:4], range(12, 16))).success
        assert np.array_equal(harness.rows[12:16], stored)
        monkeypatch.setattr(transfers, "_CHECK_S", 0.0)
        for rows in (range(8, 12), range(4, 8)):  # after a look in vain, every load looks
            assert is_lost(result_of(harness, harness.submit_load(K[:4], rows)), slab_store)
            monkeypatch.setattr(transfers, "_CHECK_S", math.inf)


@pytest.mark.parametrize("lose", [replace, take_away, delete_everything])
def test_a_lost_store_that_has_to_grow_is_not_taken_for_a_full_one(slab_store, lose):
    with slab_store.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:16], range(16))).success
        lose(slab_store)
        assert is_lost(result_of(harness, harness.submit_store(K[16:20], range(4))), slab_store)
    assert not slab_store.folder.exists() or list(slab_store.folder.iterdir()) == []


def test_a_store_that_was_lost_before_its_first_block_is_not_taken_for_a_full_one(slab_store):
    with slab_store.manage() as harness:
        take_away(slab_store)
        assert is_lost(result_of(harness, harness.submit_store(K[:4], range(4))), slab_store)
    assert not slab_store.root.exists()


def test_without_its_journal_a_store_takes_no_block_and_serves_those_that_it_has(slab_store):
    with slab_store.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        slab_store.journal.unlink()
        assert is_lost(result_of(harness, harness.submit_store(K[4:8], range(4, 8))), slab_store)
        assert result_of(harness, harness.submit_load(K[:4], range(8, 12))).success


def test_a_store_that_comes_back_is_used_again(slab_store):
    with slab_store.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        take_away(slab_store)
        assert is_lost(result_of(harness, harness.submit_store(K[4:8], range(4, 8))), slab_store)
        slab_store.root.with_name("away").rename(slab_store.root)
        assert result_of(harness, harness.submit_store(K[4:8], range(4, 8))).success
        assert result_of(harness, harness.submit_load(K[:8], range(8, 16))).success
        assert all(harness.holds(K[i], 8 + i) for i in range(8))
    with slab_store.open() as harness:
        assert harness.announced() == set(K[:8])


@pytest.mark.parametrize("lose", [replace, delete_what_is_in_it])
def test_another_store_in_its_place_is_left_alone(slab_store, lose):
    with slab_store.manage() as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        lose(slab_store)
        with slab_store.open() as other:
            assert other.store(K[10:14]) == {}
        content = slab_store.journal.read_bytes()
        assert is_lost(result_of(harness, harness.submit_store(K[4:8], range(4, 8))), slab_store)
    assert slab_store.journal.read_bytes() == content
    with slab_store.open() as other:
        assert other.announced() == set(K[10:14])


def test_a_full_disk_gives_up_no_segment_of_another_store(slab_store):
    ops = FaultyFileOps()
    with slab_store.manage(ops) as harness:
        assert result_of(harness, harness.submit_store(K[:4], range(4))).success
        replace(slab_store)
        segment = slab_store.folder / segment_name(0)
        segment.touch()
        ops.fail(errno.ENOSPC, on="pwritev")
        assert not result_of(harness, harness.submit_store(K[4:8], range(4, 8))).success
        assert segment.exists()


@pytest.mark.parametrize("below", ["", "root"])
def test_a_filesystem_that_was_unmounted_is_a_fault_and_the_disk_below_stays_empty(tmp_path, below):
    told = unmounted("slab", tmp_path, tmp_path / below)
    if told is None:
        pytest.skip("nobody may mount here")
    assert [name for name, _ in told["ends"]] == ["NoneType", *["TierUnavailableError"] * 2]
    assert all("is not the opened directory any more" in text for _, text in told["ends"][1:])
    assert told["below"] == []
