"""Processes that are killed while they work on a `slab` store."""

import random
from pathlib import Path

import pytest
from crashes import RANDOM_KILLS, Process
from powercuts import problems
from slab.crash_server import BAD, CAPACITY, OPTIONS, K, UnsyncedFileOps
from slab.stores import SlabStore, sound
from sweeps import shares, sizes

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.slab.maintenance.store import SlabMaintenance

pytestmark = pytest.mark.slow

SHARES = 16

SERVER = Path(__file__).with_name("crash_server.py")


@pytest.fixture(scope="module")
def server():
    with Process(SERVER) as process:
        yield process


NEXT = ["the same", "the replaced", "one that replaces back"]
"""Who opens a store after one that was to replace it."""

MODES = pytest.mark.parametrize(
    "verify", [True, False, "encrypted"], ids=["verified", "unverified", "encrypted"]
)

CHANGING = {"pwritev", "pwrite", "rename", "truncate", "fallocate", "unlink", "open"}
TEARABLE = {"pwritev", "pwrite", "fallocate"}


def kill_points(calls: list[str]) -> list[tuple[int, bool]]:
    """Return each call that changes something, and once more torn where it can be."""
    points = [(n, False) for n, name in enumerate(calls, 1) if name in CHANGING]
    return points + [(n, True) for n, name in enumerate(calls, 1) if name in TEARABLE]


def check_after_crash(slab_store: SlabStore, open_store=None, **options) -> None:
    """No wrong byte, exact accounting, work is accepted; what was announced is there."""
    assert slab_store.disk_bytes() <= CAPACITY
    with (open_store or slab_store.open)(UnsyncedFileOps(), **OPTIONS, **options) as harness:
        sound(harness.tier)
        assert not list(slab_store.folder.glob("*.tmp"))
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
        assert slab_store.disk_bytes() <= CAPACITY
    assert not problems(SlabMaintenance, slab_store.root, options.get("verify"))


@shares(SHARES)
@MODES
def test_a_kill_at_any_call_serves_no_wrong_byte_and_loses_no_slot(server, tmp_path, verify, share):
    dry = server.run("scripted", root=str(tmp_path / "dry"), kill_at=None, verify=verify)
    assert dry[-1] == {"killed": False, "status": 0}
    calls = dry[0]["calls"]
    assert {"pwritev", "pwrite", "rename", "truncate", "fallocate", "preadv", "lock"} <= set(calls)
    for number, torn in kill_points(calls)[(share + bool(verify)) % SHARES :: SHARES]:
        slab_store = SlabStore(tmp_path / f"{number}-{torn}")
        said = server.run(
            "scripted", root=str(slab_store.root), kill_at=number, torn=torn, verify=verify
        )
        assert said[-1]["killed"], f"call {number} was not reached"
        try:
            check_after_crash(slab_store, verify=verify)
        except BaseException as error:
            error.add_note(f"killed at call {number} of {len(calls)}, a {calls[number - 1]}")
            raise


@shares(SHARES)
@MODES
@pytest.mark.parametrize("next_one", NEXT)
def test_a_kill_at_any_call_of_a_replacement_serves_nobody_what_is_not_his(
    server, tmp_path, verify, next_one, share
):
    dry = server.run("replacing", root=str(tmp_path / "dry"), kill_at=None, verify=verify)
    assert dry[-1] == {"killed": False, "status": 0}
    calls = dry[0]["calls"]
    assert calls.index("unlink") < calls.index("rename") < calls.index("fallocate")
    refused = []
    points = kill_points(calls)[(share + NEXT.index(next_one) + bool(verify)) % SHARES :: SHARES]
    for number, torn in points:
        slab_store = SlabStore(tmp_path / f"{number}-{torn}")
        said = server.run(
            "replacing", root=str(slab_store.root), kill_at=number, torn=torn, verify=verify
        )
        assert said[-1]["killed"], f"call {number} was not reached"
        try:
            if next_one == "the same":
                check_after_crash(slab_store, verify=verify, on_mismatch="replace")
            elif next_one == "one that replaces back":
                check_after_crash(
                    slab_store, slab_store.open_other, verify=verify, on_mismatch="replace"
                )
            else:
                try:
                    check_after_crash(slab_store, slab_store.open_other, verify=verify)
                except ConfigError as error:
                    if "another fingerprint" not in str(error):
                        raise
                    refused.append(number)
        except BaseException as error:
            error.add_note(f"killed at call {number} of {len(calls)}, a {calls[number - 1]}")
            raise
    if next_one == "the replaced":
        manifest = calls.index("rename") + 1
        assert set(refused) == {n for n, _ in points if n > manifest}


@sizes("kills", 5, RANDOM_KILLS // 2)
@MODES
def test_kills_while_two_identities_replace_each_other_serve_nobody_what_is_not_his(
    server, tmp_path, verify, kills
):
    draw = random.Random(11)
    slab_store = SlabStore(tmp_path)
    for number in range(kills):
        said = server.run(
            "contested",
            root=str(tmp_path),
            seed=number,
            other=draw.random() < 0.5,
            verify=verify,
            delay_s=draw.uniform(0.001, 0.05),
        )
        assert said[-1]["killed"]
        open_store = draw.choice([slab_store.open, slab_store.open_other])
        check_after_crash(slab_store, open_store, verify=verify, on_mismatch="replace")


@sizes("kills", 5, RANDOM_KILLS // 2)
@MODES
def test_kills_at_random_times_serve_no_wrong_byte_and_lose_no_slot(
    server, tmp_path, verify, kills
):
    draw = random.Random(7)
    slab_store = SlabStore(tmp_path)
    for number in range(kills):
        said = server.run(
            "traffic",
            root=str(tmp_path),
            seed=number,
            verify=verify,
            delay_s=draw.uniform(0.005, 0.1),
        )
        assert said[-1]["killed"]
        check_after_crash(slab_store, verify=verify)
