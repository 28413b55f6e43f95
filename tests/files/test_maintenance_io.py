"""Calls of maintenance: what they leave behind when they end, fail or are cancelled."""

import asyncio
import gc
import threading

import pytest
from faulty_files import FaultyFileOps

from kvoffload_async.abc.maintenance import MaintenanceControl
from kvoffload_async.tiers.files.maintenance import MaintenanceIo

JOIN_S = 60.0
"""Deadline of a thread that must end."""


class Watched(FaultyFileOps):
    """Notes the threads that open files."""

    def __init__(self):
        super().__init__()
        self.openers = []

    def open(self, path, flags):
        self.openers.append(threading.current_thread())
        return super().open(path, flags)


@pytest.fixture
def watched(tmp_path):
    """System calls in a directory, without a garbage collector that ends what is left behind."""
    ops = Watched()
    ops.enter(str(tmp_path), make=False)
    gc.disable()
    try:
        yield ops
        (opener,) = ops.openers
        opener.join(JOIN_S)
        assert not opener.is_alive()
    finally:
        gc.enable()
        ops.heal()
        ops.leave(str(tmp_path))


def test_a_read_file_leaves_no_thread(watched, tmp_path):
    (tmp_path / "config.json").write_bytes(b"0123456789")
    io = MaintenanceIo(watched, MaintenanceControl())
    assert asyncio.run(io.read_file(f"{tmp_path}/config.json", 4)) == b"0123"


@pytest.mark.parametrize("content", [None, "link", "folder"])
def test_a_file_that_cannot_be_read_leaves_no_thread(watched, tmp_path, content):
    path = tmp_path / "config.json"
    if content == "link":
        path.symlink_to(tmp_path / "other")
        (tmp_path / "other").write_bytes(b"{}")
    elif content == "folder":
        path.mkdir()
    io = MaintenanceIo(watched, MaintenanceControl())
    with pytest.raises(OSError, match=r"config\.json"):
        asyncio.run(io.read_file(str(path), 4))


def test_a_cancelled_read_leaves_no_thread_and_is_over_before_the_cancellation_comes(
    watched, tmp_path
):
    (tmp_path / "config.json").write_bytes(b"0123456789")
    hang = watched.hang(on="open")
    io = MaintenanceIo(watched, MaintenanceControl())

    async def cancel():
        reading = asyncio.create_task(io.read_file(f"{tmp_path}/config.json", 4))
        while not hang.entered.is_set():  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0)
        for _ in range(2):
            reading.cancel()
            await asyncio.sleep(0)
        assert not reading.done()
        hang.release()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(cancel())
