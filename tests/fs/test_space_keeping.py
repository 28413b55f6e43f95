"""What others add and remove is learned; room is made in the background."""

import errno
import os
import re

import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK, KIB
from fs.spaces import (
    ROOM_FOR_8,
    K,
    check,
    end_of,
    evicted,
    rescan,
    rescanned,
    room_for,
    start,
    trim,
)

from kvoffload_async.abc.events import BlocksAppeared


def test_a_rescan_corrects_what_strangers_have_added_and_removed(directory):
    with directory.open(capacity_bytes=room_for(41)) as harness:
        harness.store(K[:10])
        for key in K[:3]:
            directory.path(key).unlink()
        for key in K[10:15]:
            directory.put(key)
        (directory.folder / "stranger").write_bytes(b"x" * 10_000)
        assert directory.counted_bytes() != directory.disk_bytes()
        rescan(harness)
        check(directory, harness, room_for(41))
        assert directory.blocks() == set(K[3:15])


def test_a_rescan_announces_what_others_have_removed(directory):
    with directory.open(capacity_bytes=room_for(41)) as harness:
        harness.store(K[:4])
        for key in K[:2]:
            directory.path(key).unlink()
        rescan(harness)
        assert evicted(harness) == set(K[:2])


def test_a_look_up_announces_what_others_have_removed_and_learns_when_they_store_it_again(
    directory,
):
    with directory.open(capacity_bytes=room_for(41)) as harness:
        harness.store(K[:4])
        for key in K[:2]:
            directory.path(key).unlink()
        assert harness.contains(K[:6]) == frozenset(K[2:4])
        assert evicted(harness) == set(K[:2])
        directory.put(K[0])
        rescan(harness)
        assert appeared(harness) == [K[0]]
        check(directory, harness, room_for(41))


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, None])
def test_a_look_up_that_fails_proves_no_removal(directory, error):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=room_for(41)) as harness:
        harness.store(K[:4])
        if error is None:  # the directory is gone, and with it the proof
            for key in K[:4]:
                directory.path(key).unlink()
            directory.root.rename(directory.root.with_name("moved"))
        else:
            ops.fail(error, on="stat has_file")
        assert harness.contains(K[:4]) == frozenset()
        assert not evicted(harness)
        if error is None:
            directory.root.with_name("moved").rename(directory.root)


def test_a_look_up_leaves_blocks_alone_that_a_job_uses(directory):
    with directory.open(capacity_bytes=room_for(41)) as harness:
        harness.store(K[:2])
        harness.tier.pin(K[:1])
        for key in K[:2]:
            directory.path(key).unlink()
        assert harness.contains(K[:2]) == frozenset()
        assert evicted(harness) == set(K[1:2])
        harness.tier.unpin(K[:1])


def test_blocks_of_others_and_of_former_runs_are_announced_once_and_not_the_own_ones(directory):
    directory.put(K[0])
    with directory.open(capacity_bytes=room_for(41)) as harness:
        assert appeared(harness) == [K[0]]
        harness.store(K[1:3])
        for key in K[3:5]:
            directory.put(key)
        rescan(harness)
        rescan(harness)
        assert sorted(appeared(harness)) == sorted([K[0], *K[3:5]])
        directory.put(K[5])
        assert harness.load(K[5:6]) == {}
        assert appeared(harness)[-1] == K[5]


def appeared(harness) -> list:
    return [k for event in harness.events if isinstance(event, BlocksAppeared) for k in event.keys]


def test_storing_what_others_have_removed_announces_that_it_was_gone(directory):
    with directory.open(capacity_bytes=room_for(41)) as harness:
        harness.store(K[:2])
        directory.path(K[0]).unlink()
        assert harness.store(K[:2]) == {}
        assert evicted(harness) == {K[0]}
        assert directory.blocks() == set(K[:2])


@pytest.mark.usefixtures("folders_on_disk")
def test_strangers_are_evicted_in_their_turn_and_loaded_before(directory):
    for number, key in enumerate(K[:20]):
        path = directory.put(key)
        os.utime(path, (number, number))
    with directory.open(capacity_bytes=room_for(30)) as harness:
        assert harness.load(K[:1]) == {}
        harness.store(K[30:42])
        assert K[0] in directory.blocks()
        assert K[1] not in directory.blocks()
        check(directory, harness, room_for(30))


def test_room_is_made_at_the_start_the_oldest_first(directory):
    for number, key in enumerate(K[:50]):
        path = directory.put(key)
        os.utime(path, (number, number))
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        check(directory, harness, ROOM_FOR_8)
        kept = directory.blocks()
        assert kept
        assert kept == set(K[50 - len(kept) : 50])
        assert harness.store(K[60:63]) == {}
        check(directory, harness, ROOM_FOR_8)


@pytest.mark.usefixtures("folders_on_disk")
def test_a_capacity_that_became_smaller_says_how_many_blocks_and_bytes_it_costs(directory, caplog):
    with directory.open(capacity_bytes=room_for(86)) as harness:
        harness.store(K[:30])
    before_bytes, num_blocks = directory.disk_bytes(), len(directory.blocks())
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        removed = num_blocks - len(directory.blocks())
        check(directory, harness, ROOM_FOR_8)
        after_bytes = directory.disk_bytes()
    assert removed > 20
    (line,) = [line for line in caplog.messages if "capacity_bytes" in line]
    assert f"capacity_bytes is {ROOM_FOR_8}: {removed} blocks were removed, the least" in line
    assert f" {after_bytes} bytes are stored now" in line
    (there_bytes,) = re.findall(r": (\d+) bytes were stored", line)
    assert before_bytes <= int(there_bytes) <= before_bytes + 4 * KIB  # this writer's entry


def test_a_capacity_that_suffices_is_not_remarked_upon(directory, caplog):
    for _ in range(2):
        with directory.open(capacity_bytes=ROOM_FOR_8, high=0.6, low=0.3) as h:
            h.store(K[:40])
            trim(h)
    assert "capacity_bytes" not in caplog.text


def test_the_count_is_right_after_a_restart_whatever_the_file_says(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
    (directory.folder / ".usage").write_text('[7, {"9-dead": 99999}, 0]', encoding="ascii")
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        check(directory, harness, ROOM_FOR_8)


@pytest.mark.usefixtures("folders_on_disk")
def test_what_was_stored_during_a_walk_is_not_forgotten_nor_what_was_evicted_learned(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        space = harness.tier._space
        hang = ops.hang(on="walk", times=1)
        walking = start(harness, rescanned(harness.tier._housekeeping))
        assert hang.entered.wait(60)
        found = sorted(directory.blocks())
        harness.store(K[4:12])
        assert not set(K[:4]) & directory.blocks()
        assert not set(space.blocks.learn(found))
        hang.release()
        harness.run(end_of(walking))
        assert set(space._policy) == directory.blocks()


def test_a_bad_block_that_a_load_removed_is_given_back(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        directory.path(K[0]).write_bytes(b"x" * BLOCK)
        directory.path(K[1]).unlink()
        assert sorted(harness.load(K[:4])) == [0, 1]
        assert set(harness.tier._space._policy) == set(K[2:4])
        rescan(harness)
        check(directory, harness, ROOM_FOR_8)


def test_a_file_that_has_shrunk_and_is_removed_does_not_make_the_count_too_small(directory):
    with directory.open(capacity_bytes=ROOM_FOR_8) as harness:
        harness.store(K[:4])
        os.truncate(directory.path(K[0]), 0)
        rescan(harness)
        harness.load(K[:1])
        assert directory.counted_bytes() == directory.disk_bytes()


# -- watermarks ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("folders_on_disk")
def test_room_is_made_from_the_high_down_to_the_low_watermark(directory):
    capacity_bytes = 250 * KIB
    with directory.open(capacity_bytes=capacity_bytes, high=0.5, low=0.3) as harness:
        harness.store(K[:15])
        trim(harness)
        assert evicted(harness) == set()
        harness.store(K[15:30])
        assert directory.disk_bytes() > 0.5 * capacity_bytes
        trim(harness)
        assert directory.disk_bytes() <= 0.3 * capacity_bytes
        assert directory.disk_bytes() > 0.2 * capacity_bytes
        check(directory, harness, capacity_bytes)
        assert K[29] in directory.blocks()


def test_the_house_is_kept_in_the_background(directory):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8, rescan_interval_s=0.02) as harness:
        harness.store(K[:4])
        hang = ops.hang(on="walk", times=1)
        assert hang.entered.wait(60)
        directory.path(K[0]).unlink()
        hang.release()
        again = ops.hang(on="walk", times=1)
        assert again.entered.wait(60)
        again.release()
        rescan(harness)
        check(directory, harness, ROOM_FOR_8)


@pytest.mark.parametrize("error", [errno.EIO, ValueError("unexpected")])
def test_keeping_house_survives_errors(directory, caplog, error):
    ops = FaultyFileOps()
    with directory.open(ops, capacity_bytes=ROOM_FOR_8, rescan_interval_s=0.02) as harness:
        ops.fail(error, on="utime walk", times=3)
        seen = ops.hang(on="walk", times=1)
        assert seen.entered.wait(60)
        seen.release()
        assert harness.store(K[:4]) == {}
    assert "housekeeping failed" in caplog.text


def test_without_a_capacity_the_heartbeat_goes_on(directory):
    ops = FaultyFileOps()
    with directory.open(ops, rescan_interval_s=0.02):
        hang = ops.hang(on="utime", times=1)
        assert hang.entered.wait(60)
        hang.release()
