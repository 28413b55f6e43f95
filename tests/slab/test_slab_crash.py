"""Processes that are killed while they work on a `slab` store."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from slab.crash_child import BAD, CAPACITY, OPTIONS, K, UnsyncedFileOps
from slab.shelves import Shelves, sound

TESTS = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("crash_child.py")
RANDOM_KILLS = int(os.environ.get("KVOFFLOAD_RANDOM_KILLS", "40"))
DEADLINE_S = 60


class Server:
    """A process that forks children, told and heard in JSON lines."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        )
        self._watchdog = threading.Timer(DEADLINE_S + RANDOM_KILLS, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._watchdog.cancel()

    def run(self, kind: str, **request) -> list[dict]:
        """Have a child do something; return what it and the server said."""
        self._process.stdin.write(json.dumps({"kind": kind} | request) + "\n")
        self._process.stdin.flush()
        said = []
        while not said or "killed" not in said[-1]:
            line = self._process.stdout.readline()
            assert line, "the server has ended"
            said.append(json.loads(line))
        return said


@pytest.fixture(scope="module")
def server():
    process = Server()
    yield process
    process.close()


def check_after_crash(shelves: Shelves, *, verify: bool = True) -> None:
    """No wrong byte, exact accounting, work is accepted; what was announced is there."""
    assert shelves.disk_bytes() <= CAPACITY
    with shelves.open(UnsyncedFileOps(), verify=verify, **OPTIONS) as harness:
        sound(harness.tier)
        assert not list(shelves.folder.glob("*.tmp"))
        announced = sorted(harness.announced())
        failures = harness.load(announced)
        assert {announced[slot] for slot in failures} <= {BAD}
        assert all(
            harness.holds(key, slot) for slot, key in enumerate(announced) if slot not in failures
        ), "wrong bytes were served"
        assert harness.store(K[50:56]) == {}
        assert harness.load(K[50:56], range(30, 36)) == {}
        assert all(harness.holds(K[50 + i], 30 + i) for i in range(6))
        sound(harness.tier)
        assert shelves.disk_bytes() <= CAPACITY


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_kill_at_any_call_serves_no_wrong_byte_and_loses_no_slot(server, tmp_path, verify):
    dry = server.run("scripted", root=str(tmp_path / "dry"), kill_at=None, verify=verify)
    assert dry[-1] == {"killed": False, "status": 0}
    calls = dry[0]["calls"]
    assert {"pwritev", "pwrite", "rename", "truncate", "fallocate", "preadv", "lock"} <= set(calls)
    changing = {"pwritev", "pwrite", "rename", "truncate", "fallocate", "unlink", "open"}
    points = [(n, False) for n, name in enumerate(calls, 1) if name in changing]
    points += [(n, True) for n, name in enumerate(calls, 1) if name in {"pwritev", "pwrite"}]
    points += [(n, True) for n, name in enumerate(calls, 1) if name == "fallocate"]
    for number, torn in points:
        shelves = Shelves(tmp_path / f"{number}-{torn}")
        said = server.run(
            "scripted", root=str(shelves.root), kill_at=number, torn=torn, verify=verify
        )
        assert said[-1]["killed"], f"call {number} was not reached"
        try:
            check_after_crash(shelves, verify=verify)
        except BaseException as error:
            error.add_note(f"killed at call {number} of {len(calls)}, a {calls[number - 1]}")
            raise


@pytest.mark.timeout(60 + RANDOM_KILLS)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_kills_at_random_times_serve_no_wrong_byte_and_lose_no_slot(server, tmp_path, verify):
    draw = random.Random(7)
    shelves = Shelves(tmp_path)
    for number in range(RANDOM_KILLS // 2):
        said = server.run(
            "traffic",
            root=str(tmp_path),
            seed=number,
            verify=verify,
            delay_s=draw.uniform(0.005, 0.1),
        )
        assert said[-1]["killed"]
        check_after_crash(shelves, verify=verify)
