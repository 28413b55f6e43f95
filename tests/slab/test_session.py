"""What is believed of a store at the next opening, and what of its segments."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from slab.stores import BLOCK, FIXED, KIB, K, SlabStore, flip, sound

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.layout import BAD_JOURNAL, SESSION, segment_name
from kvoffload_async.tiers.slab.records import RECORD_BYTES
from kvoffload_async.tiers.slab.recovery import Session, read_session


def reboot(slab_store) -> None:
    """Have the machine gone down since the store was open last."""
    seed = slab_store.own_manifest().journal_seed
    last = read_session(FileOps(), str(slab_store.folder), seed)
    header, body = replace(last, boot_id="another boot").encode(seed)
    (slab_store.folder / SESSION).write_bytes(header + body)


def killed(slab_store, harness, root) -> SlabStore:
    """Return what is left of a store if its process is killed now."""
    shutil.copytree(slab_store.root, root)
    return SlabStore(root)


@pytest.mark.parametrize("verify", [True, False])
def test_a_killed_process_loses_nothing_of_what_it_has_written(slab_store, tmp_path, verify):
    with slab_store.open(verify=verify) as harness:
        harness.store(K[:20])
        left = killed(slab_store, harness, tmp_path / "left")
    with left.open(verify=verify) as harness:
        assert harness.announced() == set(K[:20])


def test_after_an_unclean_end_in_another_boot_what_has_no_checksum_is_dropped(
    slab_store, tmp_path, caplog
):
    with slab_store.open(verify=False) as harness:
        harness.store(K[:20])
        left = killed(slab_store, harness, tmp_path / "left")
    reboot(left)
    for _ in range(2):
        with left.open(verify=False) as harness:
            assert not harness.announced()
    assert "its 20 blocks are verified, and 20 without a checksum are dropped" in caplog.text


def test_after_an_unclean_end_in_another_boot_what_has_a_checksum_is_verified_for_ever(
    slab_store, tmp_path
):
    with slab_store.open() as harness:
        harness.store(K[:20])
        left = killed(slab_store, harness, tmp_path / "left")
    reboot(left)
    left.damage(K[3])
    with left.open(verify=False) as harness:
        assert harness.announced() == set(K[:20])
    with left.open(verify=False) as harness:
        failures = harness.load(K[:20])
        assert list(failures) == [3]
        assert isinstance(failures[3], CorruptBlockError)


@pytest.mark.parametrize("options", [{"verify": False}, {"fsync": True}])
def test_a_store_that_was_closed_as_it_should_be_is_believed_in_another_boot(
    slab_store, options, caplog
):
    with slab_store.open(**options) as harness:
        harness.store(K[:20])
    reboot(slab_store)
    with slab_store.open(**options) as harness:
        assert harness.announced() == set(K[:20])
        assert not harness.tier._store.table.has_unverified
    assert not caplog.messages


@pytest.mark.parametrize("verify", [True, False])
def test_no_wrong_block_is_served_with_an_old_journal(slab_store, verify, caplog):
    capacity = FIXED + 40 * BLOCK
    with slab_store.open(verify=verify, capacity_bytes=capacity) as harness:
        harness.store(K[:20])
        old = slab_store.journal.read_bytes()
        for first in range(20, 80, 6):
            harness.store(K[first : first + 6])
    slab_store.journal.write_bytes(old)
    with slab_store.open(verify=verify, capacity_bytes=capacity) as harness:
        present = sorted(harness.announced())
        failures = harness.load(present)
        assert all(
            harness.holds(key, slot) for slot, key in enumerate(present) if slot not in failures
        )
        assert bool(present) is verify
    assert "its journal has lost its end" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_session_vouches_for_nothing(slab_store, damage):
    with slab_store.open(verify=False) as harness:
        harness.store(K[:8])
    path = slab_store.folder / SESSION
    if damage == "flip":
        flip(path, 20)
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "cut" else 0])
    with slab_store.open(verify=False) as harness:
        assert not harness.announced()


def test_of_a_session_whose_uses_are_damaged_the_rest_is_believed():
    session = Session("boot", 7, is_closed=True, is_synced=True)
    header, _ = replace(session, uses={0: np.arange(4, dtype="u4")}).encode(5)
    assert Session.decode(header + b"x" * 40, 5) == session
    assert Session.decode(header, 5) == session
    assert Session.decode(header, 6) == Session()


# -- segments -------------------------------------------------------------------------------------


def test_swapped_segments_are_refused_with_their_blocks(slab_store, caplog):
    with slab_store.open(verify=False) as harness:
        harness.store(K[:40])
        held = {key for key, address in slab_store.addresses().items() if address >> 32 in {0, 1}}
    first, second = (slab_store.folder / segment_name(number) for number in (0, 1))
    first.rename(slab_store.folder / "x")
    second.rename(first)
    (slab_store.folder / "x").rename(second)
    with slab_store.open(verify=False) as harness:
        assert harness.announced() == set(K[:40]) - held
        assert harness.store(K[:40]) == {}
        assert harness.load(K[:40]) == {}
        assert all(harness.holds(K[i], i) for i in range(40))
        sound(harness.tier)
    assert "it is segment 1 of this store; it is removed" in caplog.text
    assert f"{len(held)} of 40 blocks are dropped with unusable segments" in caplog.text


def test_a_segment_of_another_store_is_refused_and_left_alone(slab_store, tmp_path, caplog):
    other = SlabStore(tmp_path / "other")
    for each in (slab_store, other):
        with each.open(verify=False) as harness:
            harness.store(K[:16])
    path = slab_store.folder / segment_name(0)
    content = (other.folder / segment_name(0)).read_bytes()
    path.write_bytes(content)
    with slab_store.open(verify=False) as harness:
        assert not harness.announced()
        assert harness.store(K[:4]) == {}
        assert 0 not in harness.tier._store.catalog.segments
    assert path.read_bytes() == content
    assert f"it is of the store {other.own_manifest().store_uuid}; it is kept" in caplog.text


def test_the_journal_of_another_store_of_the_same_layout_is_not_believed(slab_store, tmp_path):
    other = SlabStore(tmp_path / "other")
    for each, keys in ((slab_store, K[:8]), (other, K[8:16])):
        with each.open(verify=False) as harness:
            harness.store(keys)
    slab_store.journal.write_bytes(other.journal.read_bytes())
    with slab_store.open(verify=False) as harness:
        assert not harness.announced()


# -- the journal ----------------------------------------------------------------------------------


def test_a_frame_that_was_cut_out_is_damage(slab_store, caplog):
    with slab_store.open(verify=False) as harness:
        for number in range(6):
            harness.store([K[number]])
    content = slab_store.journal.read_bytes()
    frame = 2 * RECORD_BYTES
    slab_store.journal.write_bytes(content[: 2 * frame] + content[3 * frame :])
    with slab_store.open(verify=False) as harness:
        assert harness.announced() == {K[3], K[4], K[5]}, "those before are suspect"
    assert "frames are missing in 1 more places" in caplog.text


def test_a_journal_that_cannot_be_read_is_kept_and_reported(slab_store, caplog):
    capacity = 1024 * KIB
    for _ in range(2):
        with slab_store.open(capacity_bytes=capacity) as harness:
            harness.store(K[:20])
        content = bytes(len(slab_store.journal.read_bytes()) - 1) + b"x"
        slab_store.journal.write_bytes(content)
        with slab_store.open(capacity_bytes=capacity) as harness:
            assert not harness.announced()
            assert harness.store(K[:60]) == {}
            assert slab_store.disk_bytes() <= capacity
            sound(harness.tier)
        assert (slab_store.folder / BAD_JOURNAL).read_bytes() == content
        assert f"the journal ({len(content)} bytes) is unreadable: it is kept as" in caplog.text
        caplog.clear()


# -- a smaller capacity ---------------------------------------------------------------------------


@pytest.mark.parametrize("segment_slots", [16, 2000])
def test_a_smaller_capacity_keeps_all_that_fits_but_a_segment(slab_store, caplog, segment_slots):
    options = {"segment_bytes": segment_slots * BLOCK, "num_slots": 64}
    keys = [key_of(1000 + number) for number in range(384)]
    with slab_store.open(capacity_bytes=2048 * KIB, **options) as harness:
        for first in range(0, 384, 16):
            assert harness.store(keys[first : first + 16]) == {}
        harness.load(keys[:16])
    with slab_store.open(capacity_bytes=1024 * KIB, **options) as harness:
        slots = sum(harness.tier._store.catalog.segments.values())
        kept = harness.announced()
        assert len(kept) >= slots - 16 > 150
        assert slab_store.disk_bytes() <= 1024 * KIB
        sound(harness.tier)
        some = sorted(kept)[:64]
        assert harness.load(some) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(some))
    if segment_slots == 16:
        assert set(keys[:16]) <= kept, "used last"
        assert set(keys[-96:]) <= kept
    assert f"{384 - len(kept)} of 384 blocks" in caplog.text
