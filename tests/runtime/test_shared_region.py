"""The mapping that participants share: exclusive, checked for room, and without a trace."""

import os
import platform
import resource
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest
from runtime.beside import DEADLINE_S, SLOTS, STRIDE, join

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.runtime import shared_region
from kvoffload_async.runtime.shared_region import SharedBuffer, _await_size, file_name

HEADER_BYTES = 4096
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


@pytest.fixture
def directory(tmp_path):
    return tmp_path


def files(directory):
    return [path.name for path in directory.glob("kvoffload-*")]


def test_what_one_participant_writes_the_other_reads_and_the_name_goes_with_the_last(directory):
    first = join(directory, 0)
    assert first.is_creator
    assert len(files(directory)) == 1
    second = join(directory, 1)
    assert not second.is_creator
    assert files(directory) == []
    assert first.view.shape == (SLOTS, STRIDE)
    first.view[SLOTS - 1, STRIDE - 1] = 7
    second.slot_flags[SLOTS - 1] = 9
    assert second.view[SLOTS - 1, STRIDE - 1] == 7
    assert first.slot_flags[SLOTS - 1] == 9
    assert bytes(first.slot_flags) == b"\0\0\0\0\x09"
    assert first.release()
    assert second.view[SLOTS - 1, STRIDE - 1] == 7
    assert second.release()
    assert second.release()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory")
@pytest.mark.skipif(KERNEL < (5, 14), reason="this kernel maps pages when they are accessed")
@pytest.mark.parametrize("participant", [0, 1])
def test_the_first_access_to_a_page_is_no_page_fault(participant):
    name, pages = f"faults-{os.getpid()}", 2_000
    shared = {"num_participants": 2, "directory": "/dev/shm"}
    other = SharedBuffer(name, pages * 4096, 4096, participant=1 - participant, **shared)
    mine = SharedBuffer(name, pages * 4096, 4096, participant=participant, **shared)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    np.asarray(mine.view)[:, 0] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert mine.release()
    assert other.release()
    assert faults < pages / 10


def test_participants_of_one_process_and_of_another_share_the_rows(directory, started):
    mine = join(directory, 0)
    other = started(directory, 1, "mapped")
    assert files(directory) == []
    other.kill()
    assert mine.release()


def test_one_participant_alone_leaves_no_name(directory):
    buffer = join(directory, 0, 1)
    assert files(directory) == []
    assert buffer.release()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_name_stays_until_the_last_one_whoever_that_is(directory, order):
    buffers = []
    for index, participant in enumerate(order):
        buffers.append(join(directory, participant, 3))
        assert len(files(directory)) == (index < 2)
    assert [buffer.is_creator for buffer in buffers] == [True, False, False]
    for buffer in buffers:
        buffer.release()


def test_participants_that_arrive_at_once_all_map_one_file(directory):
    count = 8
    buffers = {}
    gate = threading.Barrier(count)

    def arrive(participant):
        gate.wait(DEADLINE_S)
        buffers[participant] = join(directory, participant, count)

    threads = [threading.Thread(target=arrive, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sum(buffer.is_creator for buffer in buffers.values()) == 1
    assert files(directory) == []
    buffers[0].view[0, 0] = 5
    assert {buffer.view[0, 0] for buffer in buffers.values()} == {5}
    for buffer in buffers.values():
        assert buffer.release()


def test_whoever_leaves_early_takes_the_name_along(directory):
    join(directory, 0).release()
    assert files(directory) == []


def test_leaving_removes_the_name_and_keeps_the_memory(directory):
    buffer = join(directory, 0)
    buffer.remove_name()
    assert files(directory) == []
    buffer.view[0, 0] = 1
    assert buffer.release()


def test_memory_in_use_stays_mapped_but_its_name_goes(directory, caplog):
    buffer = join(directory, 0)
    row = buffer.view[:]
    assert not buffer.release()
    assert "still in use" in caplog.text
    assert files(directory) == []
    row[0, 0] = 3
    row.release()
    assert buffer.release()


# -- room ---------------------------------------------------------------------------------------


def test_too_little_room_is_an_error_before_the_file_has_a_size(directory, monkeypatch):
    seen = []

    def free_bytes(where):
        seen.extend(path.stat().st_size for path in where.glob("kvoffload-*"))
        return 40_000

    monkeypatch.setattr(shared_region, "free_space_bytes", free_bytes)
    with pytest.raises(ConfigError) as caught:
        join(directory)
    message = str(caught.value)
    assert "cpu_bytes_to_use: the primary needs 45056 bytes" in message
    assert "only 40000 are free" in message
    assert "--shm-size" in message
    assert str(directory) in message
    assert seen[0] <= HEADER_BYTES
    assert files(directory) == []


def test_a_filesystem_without_a_limit_has_room(directory, monkeypatch):
    monkeypatch.setattr(shared_region, "free_space_bytes", lambda _where: None)
    assert join(directory, 0, 1).release()


def test_exactly_enough_room_is_enough(directory, monkeypatch):
    monkeypatch.setattr(shared_region, "free_space_bytes", lambda _where: 45056)
    assert join(directory, 0, 1).release()


@pytest.fixture
def small_tmpfs(tmp_path):
    directory = tmp_path / "small"
    directory.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("cannot mount")
    mounted = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("may not mount")
    yield directory
    subprocess.run([umount, "-l", str(directory)], check=True)


def test_a_small_tmpfs_is_found_out_beforehand(small_tmpfs):
    with pytest.raises(ConfigError, match=r"needs 167936 bytes .* only 61440 are free"):
        join(small_tmpfs, num_slots=20)
    assert files(small_tmpfs) == []


def test_room_that_vanishes_after_the_check_is_an_error_and_no_bus_error(small_tmpfs, monkeypatch):
    monkeypatch.setattr(shared_region, "free_space_bytes", lambda _where: 1 << 30)
    with pytest.raises(ConfigError, match="No space left on device"):
        join(small_tmpfs, num_slots=20)
    assert files(small_tmpfs) == []


# -- participants that do not get along ---------------------------------------------------------


def test_a_joiner_with_another_size_is_refused_and_the_file_stays(directory):
    first = join(directory, 0)
    with pytest.raises(ConfigError, match="same configuration"):
        join(directory, 1, num_slots=SLOTS + 1)
    assert len(files(directory)) == 1
    assert join(directory, 1).release()
    assert first.release()


def test_a_second_engine_under_the_same_name_is_refused(directory):
    first = join(directory, 0)
    with pytest.raises(ConfigError, match="engine_id"):
        join(directory, 0)
    assert len(files(directory)) == 1
    assert first.release()


def test_a_joiner_gives_up_when_nobody_gives_the_file_its_size(directory, started):
    creator = started(directory, 0, "before ftruncate")
    with pytest.raises(TimeoutError, match="hangs"):
        join(directory, 1, join_timeout_s=0.05)
    creator.kill()
    assert files(directory) == []


def test_a_joiner_learns_that_whoever_made_the_file_has_failed(directory):
    path = directory / "kvoffload-t"
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    path.unlink()  # what a creator does when it fails
    with pytest.raises(StateError, match="has failed"):
        _await_size(file, 8192, path, time.monotonic() + DEADLINE_S, HEADER_BYTES)
    os.close(file)


@pytest.mark.parametrize(
    "point",
    ["before ftruncate", "after ftruncate", "before pwrite", "mapped"],
)
def test_a_creator_that_is_killed_leaves_nothing_to_whoever_starts_next(directory, started, point):
    started(directory, 0, point).kill()
    assert len(files(directory)) == 1
    fresh = join(directory, 1)
    assert fresh.is_creator
    assert len(files(directory)) == 1
    assert not join(directory, 0).is_creator
    assert files(directory) == []


@pytest.mark.parametrize("point", ["after open", "before pwrite"])
def test_a_joiner_that_is_killed_on_its_way_leaves_nothing_to_whoever_starts_next(
    directory, started, point
):
    creator = started(directory, 0, "mapped")
    started(directory, 1, point).kill()
    creator.kill()
    assert len(files(directory)) == 1
    assert join(directory, 0, 1).release()
    assert files(directory) == []


def test_a_file_that_is_taken_for_an_orphan_before_it_is_locked_is_made_anew(directory, started):
    slow = started(directory, 0, "after open")
    mine = join(directory, 1)
    assert mine.is_creator
    slow.go_on()
    assert slow.reported() == "shares it"
    assert files(directory) == []
    assert mine.release()


def test_a_kill_after_all_have_arrived_leaves_no_file(directory, started):
    first = started(directory, 0, "mapped")
    second = started(directory, 1, "mapped")
    assert files(directory) == []
    first.kill()
    second.kill()
    assert files(directory) == []


def test_the_file_of_participants_that_live_is_no_orphan(directory, started):
    waiting = started(directory, 0, "mapped")
    other = SharedBuffer(
        "other", 4096, 4096, participant=0, num_participants=1, directory=directory
    )
    assert len(files(directory)) == 1
    late = join(directory, 1)
    assert not late.is_creator
    assert files(directory) == []
    waiting.kill()
    assert late.release()
    assert other.release()


def test_any_text_is_a_name_and_no_two_names_meet(directory):
    names = ["a/b", "a_b", "a/../b", "", "x" * 1000, "ä\0"]
    buffers = [
        SharedBuffer(name, 4096, 4096, participant=0, num_participants=2, directory=directory)
        for name in names
    ]
    assert all(buffer.is_creator for buffer in buffers)
    assert sorted(files(directory)) == sorted(file_name(name) for name in names)
    for buffer in buffers:
        assert buffer.release()
    assert list(directory.iterdir()) == []


# -- cells of unequal size ----------------------------------------------------------------------

SIZE_BYTES = 98304  # 12 rows of two pages, or 8 of three: the files would have the same size


def join_with(directory, participant, cell_bytes, **options):
    options = {"num_participants": 3, "join_timeout_s": DEADLINE_S} | options
    return SharedBuffer(
        "t", SIZE_BYTES, cell_bytes, participant=participant, directory=directory, **options
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_participants_of_unequal_cells_share_rows_of_the_largest(directory, order):
    cells = {0: 5000, 1: 5000, 2: 9000}
    buffers = {}

    def arrive(participant):
        buffers[participant] = join_with(directory, participant, cells[participant], unequal={1, 2})

    threads = [threading.Thread(target=arrive, args=(participant,)) for participant in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {buffer.view.shape for buffer in buffers.values()} == {(8, 12288)}
    assert {buffer.cell_bytes for buffer in buffers.values()} == {9000}
    assert files(directory) == []
    buffers[2].slot_flags[7] = 5
    assert buffers[0].slot_flags[7] == 5
    for buffer in buffers.values():
        assert buffer.release()


def test_cells_that_must_be_equal_and_are_not_are_refused_at_once_although_the_file_fits(directory):
    first = join_with(directory, 1, 5000)
    with pytest.raises(ConfigError, match=r"unequal size: \{1: 5000, 2: 9000\}"):
        join_with(directory, 2, 9000)
    assert len(files(directory)) == 1
    assert first.release()


def test_a_participant_whose_size_does_not_come_is_named(directory):
    with pytest.raises(TimeoutError, match=r"participants \[2\] .* have not arrived in time"):
        join_with(directory, 1, 5000, unequal={1, 2}, join_timeout_s=0.05)
    assert files(directory) == []


def test_rows_of_the_largest_cell_that_do_not_fit_are_refused_and_leave_no_file(directory):
    with pytest.raises(ConfigError, match="98304 bytes hold no block; one takes 102400 bytes"):
        join_with(directory, 1, 100_000, unequal={1})
    assert files(directory) == []
