"""At a limit of threads an engine either starts as a whole or leaves nothing; it always closes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import thread_refusals

from kvoffload_async.limits import thread_limits

TESTS = Path(__file__).parents[1]
DEADLINE_S = 300
LIMIT = 1
NOBODY = 65534


def run(folder, tiers, kind, native=""):
    environment = os.environ | {
        "LD_PRELOAD": str(thread_refusals.library(folder)),
        "PYTHONPATH": str(TESTS),
        "KVOFFLOAD_NATIVE": native,
    }
    script = [sys.executable, TESTS / "async_engine" / "short_of_threads.py"]
    done = subprocess.run(
        [*script, folder, json.dumps(tiers), kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def tiers_in(folder, **options):
    """Return tiers with no more threads of a kind than needed: each has a schedule of its own."""
    slab = {"type": "slab", "root_dir": f"{folder}/slab", "capacity_bytes": "8MiB", **options}
    fs = {"type": "fs", "root_dir": f"{folder}/fs", **options}
    return [slab | {"io_threads": 2}, fs | {"n_read_threads": 1}]


def test_closing_starts_no_thread(tmp_path):
    assert run(tmp_path, tiers_in(tmp_path), "closing") == [
        "0 ran, 0 starts while closing",
        "again ran, 0 starts while closing",
    ]


REQUIRED = pytest.param({}, id="required", marks=pytest.mark.sweep)
PYTHON = pytest.param("0", id="python", marks=pytest.mark.sweep)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["once", "always"])
@pytest.mark.parametrize("options", [pytest.param({"required": False}, id="optional"), REQUIRED])
@pytest.mark.parametrize("native", [pytest.param("", id="native"), PYTHON])
def test_whichever_thread_cannot_be_started_nothing_stays(tmp_path, kind, options, native):
    lines = run(tmp_path, tiers_in(tmp_path, **options), kind, native)
    *schedules, last, again = lines
    assert len(schedules) > 12
    assert not any("failed" in line for line in lines), lines
    assert any("refused" in line for line in schedules)
    if kind == "always":
        assert all("refused" in line for line in schedules)
    assert last.split(maxsplit=1)[1] == again.split(maxsplit=1)[1]


IN_GROUP = """
import asyncio, os, sys, pathlib, threading, torch
from kvoffload_async import OffloadEngine
folder, group = sys.argv[1:]
limit = pathlib.Path(group, "pids.max")
tier = {"type": "slab", "root_dir": folder, "capacity_bytes": "8MiB"}
config = {"cpu_bytes_to_use": "1MiB", "model": "m", "secondary_tiers": [tier]}
def engine():
    return OffloadEngine(config, kv_caches={"layer": torch.zeros(8, 16384, dtype=torch.uint8)})
async def main():
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
    async with engine() as one, one.request("r", [b"k" * 32]) as request:
        await one.store(request, [1])
        limit.write_text("1")
    print([thread.name for thread in threading.enumerate()], flush=True)
    for _ in range(3):
        try:
            await engine().__aenter__()
        except Exception as error:
            print(type(error).__name__, error)
        print([thread.name for thread in threading.enumerate()], flush=True)
    limit.write_text("max")
    async with engine() as one, one.request("r", [b"k" * 32]) as request:
        print("found", await one.lookup(request))
asyncio.run(main())
"""


@pytest.mark.slow
def test_at_a_limit_of_its_control_group_an_engine_closes_and_a_start_names_the_limit(tmp_path):
    parent = Path("/sys/fs/cgroup/pids")
    group = (parent if parent.is_dir() else parent.parent) / f"kvoffload-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not (group / "pids.max").exists():
            pytest.skip("control groups do not limit processes here")
        done = subprocess.run(
            [sys.executable, "-c", IN_GROUP, tmp_path / "slab", group],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    none, *starts, found = done.stdout.splitlines()
    assert none == "['MainThread']"
    for refused, left in zip(starts[::2], starts[1::2], strict=True):
        assert re.fullmatch(rf"TierUnavailableError .*{group}/pids\.max is 1", refused)
        assert left == none
    assert found == "found 1"


AS_NOBODY = f"""
import asyncio, os, resource, torch
from kvoffload_async import OffloadEngine
from kvoffload_async.transport.host import HostTransport
from kvoffload_async.transport.layout import register_kv_caches
caches = {{"layer": torch.zeros(4, 4096, dtype=torch.uint8)}}
config = {{"cpu_bytes_to_use": "1MiB", "block_bytes": 4096, "model": "m"}}
async def start():
    async with OffloadEngine(config, lambda view: HostTransport(register_kv_caches(caches), view)):
        pass
asyncio.run(start())  # imports what another user may not be able to read
os.setuid({NOBODY})
resource.setrlimit(resource.RLIMIT_NPROC, ({LIMIT}, {LIMIT}))
try:
    asyncio.run(start())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_at_the_users_limit_a_start_names_it():
    if os.geteuid():
        pytest.skip("only root may become another user, whose threads alone are counted")
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=False
    )
    assert re.match(rf"TierUnavailableError .*RLIMIT_NPROC is {LIMIT},", done.stdout), done


def test_limits_are_named_and_a_full_group_alone(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("8:pids:/pod/one\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/pids/pod/one"
    group.mkdir(parents=True)
    (group / "pids.max").write_text("max\n")
    (group.parent / "pids.max").write_text("100\n")
    (group.parent / "pids.current").write_text("42\n")
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/threads-max").write_text("5000\n")
    text = thread_limits(tmp_path)
    assert f"{group.parent}/pids.max is 100" in text
    assert "threads-max is 5000" in text
    (group.parent / "pids.current").write_text("100\n")
    assert thread_limits(tmp_path) == f"{group.parent}/pids.max is 100"
