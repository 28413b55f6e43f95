"""Processes that are killed, and processes that work side by side, on one directory."""

import contextlib
import os
import random
import threading
from pathlib import Path

import pytest
from crashes import DEADLINE_S, RANDOM_KILLS, Process
from fs.crash_server import BAD, CAPACITY, SHARED_CAPACITY, K
from fs.directories import KIB, FsDirectory
from powercuts import problems
from sweeps import shares, sizes

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.maintenance.store import FsMaintenance
from kvoffload_async.tiers.fs.usage import Usage, read_usage

pytestmark = pytest.mark.slow

SHARES = 8

UNIT = 4 * KIB
"""What a block takes on disk."""

SERVER = Path(__file__).with_name("crash_server.py")


@pytest.fixture(scope="module")
def server():
    with Process(SERVER) as process:
        yield process


def check_after_crash(
    directory: FsDirectory, capacity_bytes: int = CAPACITY, verify: str = "when_present"
) -> None:
    is_whole = directory.every_block_is_whole(is_encrypted=verify == "encrypted")
    assert is_whole, "a partial or wrong block was published"
    options = {"capacity_bytes": capacity_bytes, "rescan_interval_s": 3600.0, "verify": verify}
    with directory.open(**options) as harness:
        assert not directory.temps(), "a temporary file of a dead writer is left"
        assert directory.counted_bytes() == directory.disk_bytes() <= capacity_bytes
        assert not directory.usage().reserved_bytes
        assert harness.store(K[20:23]) == {}
        assert harness.load(K[20:23], [30, 31, 32]) == {}
        assert all(harness.holds(K[20 + i], 30 + i) for i in range(3))
        assert directory.counted_bytes() == directory.disk_bytes() <= capacity_bytes
        known = sorted(directory.blocks())
        failures = harness.load(known)
        assert {known[slot] for slot in failures} <= {BAD}
        served = [(slot, key) for slot, key in enumerate(known) if slot not in failures]
        assert all(harness.holds(key, slot) for slot, key in served)


@shares(SHARES)
@pytest.mark.parametrize("verify", ["when_present", "encrypted"])
def test_a_kill_at_any_system_call_leaves_no_partial_block_and_a_right_count(
    server, tmp_path, verify, share
):
    dry = server.run("scripted", root=str(tmp_path / "dry"), kill_at=None, verify=verify)
    assert dry[-1] == {"killed": False, "status": 0}
    calls = dry[0]["calls"]
    # Each of the 256 folders is looked at and made in the same way: every 32nd of these calls.
    alike = {"stat", "walk", "mkdir"}
    points = [(n, False) for n, name in enumerate(calls, 1) if name not in alike or n % 32 == 0]
    points += [(n, True) for n, name in enumerate(calls, 1) if name in {"pwrite", "pwritev"}]
    assert {"publish", "rename", "get_xattr", "set_xattr", "unlink"} <= set(calls)
    for number, torn in points[share::SHARES]:
        directory = FsDirectory(tmp_path / f"{number}-{torn}")
        said = server.run(
            "scripted", root=str(directory.root), kill_at=number, torn=torn, verify=verify
        )
        assert said[-1]["killed"], f"call {number} was not reached"
        try:
            check_after_crash(directory, verify=verify)
        except BaseException as error:
            error.add_note(f"killed at call {number} of {len(calls)}, a {calls[number - 1]}")
            raise


@sizes("kills", 8, RANDOM_KILLS)
@pytest.mark.parametrize("verify", ["when_present", "encrypted"])
def test_kills_at_random_times_leave_no_partial_block_and_a_right_count(
    server, tmp_path, verify, kills
):
    draw = random.Random(7)
    directory = FsDirectory(tmp_path)
    for number in range(kills):
        said = server.run(
            "traffic",
            root=str(tmp_path),
            seed=number,
            rounds=10**6,
            capacity_bytes=CAPACITY,
            verify=verify,
            delay_s=draw.uniform(0.005, 0.15),
        )
        assert said[-1]["killed"]
        check_after_crash(directory, verify=verify)


@sizes("kills", 10, RANDOM_KILLS // 2)
@pytest.mark.parametrize("verify", ["when_present", "off", "encrypted"])
def test_kills_of_three_processes_leave_no_partial_block_and_a_right_count(
    server, tmp_path, verify, kills
):
    """Each goes on where a killed one has left it; at the end of a round nobody is left."""
    directory = FsDirectory(tmp_path)
    done = number = 0
    while done < kills:
        largest = Largest(directory)
        said = server.run("several", root=str(tmp_path), kills=10, seed=number, verify=verify)
        done, number = done + said[0]["kills"], number + 1
        assert said[-1] == {"killed": False, "status": 0}
        assert largest.stop() <= SHARED_CAPACITY + 6 * UNIT
        check_after_crash(directory, SHARED_CAPACITY, verify if verify == "encrypted" else "off")
        assert not problems(FsMaintenance, tmp_path, verify)


@sizes("processes", 2, 4)
def test_processes_that_share_a_directory_get_right_bytes_and_keep_the_right_count(
    tmp_path, processes
):
    """Capacity at a fifth of the working set, so that each evicts the others' blocks."""
    directory = FsDirectory(tmp_path)
    capacity_bytes = 4 * KIB * (6 + processes) + len(K) // 5 * UNIT
    children = [
        Process(
            SERVER,
            {
                "root": str(tmp_path),
                "seed": seed,
                "rounds": 75 * processes,
                "capacity_bytes": capacity_bytes,
            },
        )
        for seed in range(processes)
    ]
    try:
        largest = Largest(directory)
        quiet = [child.hear() for child in children]
        excess = largest.stop() - capacity_bytes
        assert all(q["phase"] == "quiet" for q in quiet)
        assert sum(q["served"] for q in quiet) > 0
        # One job of up to 6 blocks at a time each.
        assert excess <= processes * 6 * UNIT
        assert directory.every_block_is_whole()
        for child in children:  # one after the other: each makes room as it finds too much
            child.tell()
            count = child.hear()
            assert count["reserved"] == 0
            assert count["counted"] == directory.disk_bytes()
        for child in children:
            child.tell()
            child.hear()
    finally:
        for child in children:
            child.close()
    assert not directory.temps()
    assert directory.every_block_is_whole()


class Largest:
    """Measures, again and again, what a directory takes on disk at the least.

    A walk takes time, and may meet a block that others evict and the one that they store for it. So
    files are told apart by inode, and what others say they have changed meanwhile does not count.
    """

    def __init__(self, directory: FsDirectory) -> None:
        self._place = directory
        self._stopping = threading.Event()
        self._largest = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        return self._largest

    def _watch(self) -> None:
        while not self._stopping.wait(0.01):
            if self._place.has_count() and (before := self._count()) is not None:
                found, after = self._file_bytes(), self._count()
                assert after is not None, "the count cannot be read"
                moved_bytes = after.changed_bytes - before.changed_bytes
                self._largest = max(self._largest, found - moved_bytes)

    def _count(self) -> Usage | None:
        return read_usage(FileOps(), str(self._place.folder))

    def _file_bytes(self) -> int:
        found: dict[int, int] = {}
        for folder, _, names in os.walk(self._place.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = (Path(folder) / name).lstat()
                    found[status.st_ino] = status.st_blocks * 512
        return sum(found.values())


def test_disk_bytes_are_those_allocated(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 20)
    assert disk_bytes(path.stat()) == 0
