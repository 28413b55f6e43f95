"""Shared pages are everybody's until the last participant releases them; then they go."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from runtime.beside import map_pages
from runtime.smaps import address_of, resident_bytes

from kvoffload_async.abc.transport import hold_pages
from kvoffload_async.runtime.shared_region import SharedBuffer

SLOTS, STRIDE = 64, 65536
ROWS_BYTES = SLOTS * STRIDE


class Region:
    """Where participants meet, and what of it is in memory."""

    def __init__(self, directory):
        self.directory = directory

    def join(self, participant):
        buffer = SharedBuffer(
            "t",
            ROWS_BYTES,
            STRIDE,
            participant=participant,
            num_participants=2,
            directory=self.directory,
        )
        for path in self.directory.iterdir():  # until the last one has joined
            self.file = os.open(path, os.O_RDONLY)
        return buffer

    @property
    def used_bytes(self):
        """Bytes behind the participants' marks, which go with the file."""
        return os.fstat(self.file).st_blocks * 512 - 4096


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def region():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        region = Region(Path(name))
        yield region
        os.close(region.file)


def test_whoever_leaves_first_takes_nothing_from_the_others(region):
    first, second = region.join(0), region.join(1)
    np.asarray(first.view)[:] = 7
    rows = np.asarray(first.view)
    assert not first.release()
    assert resident_bytes(address_of(rows.data)) == 0, "its own part in them"
    assert np.asarray(second.view).all()
    assert region.used_bytes >= ROWS_BYTES
    assert second.release()
    del rows
    assert first.release()


@pytest.mark.parametrize("holders", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_to_release_gives_the_pages_back_whoever_holds_views(region, holders, order):
    buffers = [region.join(0), region.join(1)]
    np.asarray(buffers[0].view)[:] = 7
    held = {number: np.asarray(buffers[number].view) for number in holders}
    for number in order:
        assert region.used_bytes >= ROWS_BYTES
        assert buffers[number].release() == (number not in held)
    assert region.used_bytes == 0
    held.clear()
    assert buffers[0].release()
    assert buffers[1].release()


def test_a_participant_that_was_killed_keeps_no_pages(region, run_beside):
    first = region.join(0)
    other = run_beside(map_pages, region.directory)
    assert other.reported() == "mapped"
    other.kill()
    rows = np.asarray(first.view)
    rows[:] = 7
    assert not first.release()
    assert region.used_bytes == 0
    del rows
    assert first.release()


def test_pages_stay_while_a_copy_of_whoever_released_before_still_runs(region):
    first, second = region.join(0), region.join(1)
    np.asarray(first.view)[:] = 7
    release = hold_pages(first.view, "a transport")
    assert not first.release()
    assert second.release()
    assert np.asarray(first.view).all()
    release()
    assert region.used_bytes == 0
    assert first.release()


def test_whoever_may_still_copy_at_its_release_keeps_the_pages(region):
    first, second = region.join(0), region.join(1)
    rows = np.asarray(first.view)
    rows[:] = 7
    assert not first.release(is_idle=False)
    assert second.release()
    assert rows.all()
    del rows
    assert first.release()


def test_flags_that_somebody_holds_stop_nothing(region, caplog):
    first, second = region.join(0), region.join(1)
    flags = np.asarray(first.slot_flags)
    assert second.release()
    assert not first.release()
    assert "still in use" in caplog.text
    assert region.used_bytes == 0
    del flags
    assert first.release()


def test_a_release_leaves_no_descriptor(region):
    first, second = region.join(0), region.join(1)
    before = open_files()
    for buffer in (first, second):
        assert buffer.release()
    assert open_files() == before - 4, "a file and a mapping each"
