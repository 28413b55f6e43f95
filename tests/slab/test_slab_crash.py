"""Processes that are killed while they work on a `slab` store."""

import random
from pathlib import Path

import pytest
from crashes import RANDOM_KILLS, Process
from slab.crash_server import BAD, CAPACITY, OPTIONS, K, UnsyncedFileOps
from slab.shelves import Shelves, sound

SERVER = Path(__file__).with_name("crash_server.py")


@pytest.fixture(scope="module")
def server():
    with Process(SERVER) as process:
        yield process


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
