"""One of two processes on a directory is killed at each of its system calls; the other goes on."""

from pathlib import Path

import pytest
from crashes import Process
from fs.crash_server import CAPACITY, K
from fs.directories import KIB, FsDirectory
from fs.spaces import rescan
from sweeps import shares

pytestmark = pytest.mark.slow

SERVER = Path(__file__).with_name("crash_server.py")
JOB_BYTES = 3 * 4 * KIB
"""The largest job of the script: three blocks."""
SHARES = 24


@pytest.fixture(scope="module")
def server():
    with Process(SERVER) as process:
        yield process


def open_beside(directory: FsDirectory):
    return directory.open(capacity_bytes=CAPACITY, rescan_interval_s=3600.0)


def kill(server: Process, directory: FsDirectory, number: int, *, torn: bool) -> None:
    said = server.run("scripted", root=str(directory.root), kill_at=number, torn=torn)
    assert said[-1]["killed"], f"call {number} was not reached"


def num_calls(server: Process, directory: FsDirectory) -> list[str]:
    with open_beside(directory) as harness:
        harness.store(K[30:32])
        said = server.run("scripted", root=str(directory.root), kill_at=None)
    assert said[-1] == {"killed": False, "status": 0}
    return said[0]["calls"]


@shares(SHARES)
def test_a_kill_beside_another_process_passes_the_capacity_by_no_more_than_its_job(
    server, tmp_path, share
):
    calls = num_calls(server, FsDirectory(tmp_path / "dry"))
    assert {"publish", "rename", "get_xattr", "set_xattr", "unlink"} <= set(calls)
    # Each of the 256 folders is looked at in the same way: every 32nd of these calls.
    alike = {"stat", "walk"}
    points = [n for n, name in enumerate(calls, 1) if name not in alike or n % 32 == 0]
    for number in points[share::SHARES]:
        directory = FsDirectory(tmp_path / str(number))
        try:
            check(server, directory, number, torn=calls[number - 1] in {"pwrite", "pwritev"})
        except BaseException as error:
            error.add_note(f"killed at call {number} of {len(calls)}, a {calls[number - 1]}")
            raise


def check(server: Process, directory: FsDirectory, number: int, *, torn: bool) -> None:
    with open_beside(directory) as harness:
        harness.store(K[30:32])
        kill(server, directory, number, torn=torn)
        for first in range(40, 58, 3):
            harness.store(K[first : first + 3])
            assert directory.disk_bytes() <= CAPACITY + JOB_BYTES
        with open_beside(
            directory
        ) as late:  # it finds the other dead, and takes nobody's word for it
            for first in range(30, 54, 3):
                late.store(K[first : first + 3])
                harness.store(K[first + 3 : first + 6])
                assert directory.disk_bytes() <= CAPACITY
            rescan(late)
            assert directory.usage().moving_bytes == 0
            assert directory.counted_bytes() == directory.disk_bytes()
        assert directory.usage().writers.keys() == {harness.tier._housekeeping._writers.writer_id}
        assert not directory.temps()
        assert directory.every_block_is_whole()
