"""Whole fleets: every process imports much, so there are few of these tests."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvoffload_async import OffloadConfig
from kvoffload_async.errors import InputError, OffloadError, StalledError
from laboratory.fleet.process import READY, MemberProcess, Start, settings_of
from laboratory.fleet.run import FleetOptions, run_fleet

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DEADLINE_S = 100
REQUESTS = [[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [7, 8], [1, 2, 4, 6], [7, 8, 9]]


def config(*tiers, **settings):
    tiers = [{"type": "example"}, *tiers]
    given = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "replay"}
    return OffloadConfig.parse(given | {"secondary_tiers": tiers} | settings)


def members():
    """Return the process ids of what runs in a fleet now."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"laboratory.fleet.member" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
    return found


def of_parent(pid):
    """Return those of them that have a given parent, or had it when they were started."""
    own = set()
    for member in members():
        with contextlib.suppress(OSError):
            if str(pid).encode() in Path(f"/proc/{member}/cmdline").read_bytes().split(b"\0"):
                own.add(member)
    return own


def until(is_so):
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        select.select([], [], [], 0.02)


def test_in_lockstep_a_fleet_finds_what_one_unbounded_cache_does_also_beside_a_kill(
    command, tmp_path
):
    trace = command.trace(REQUESTS)
    shared = f"fs:root_dir={tmp_path}/bucket,probe_timeout_s=60"  # a late answer is a miss
    report = command.figures(
        *(trace, "--fleet", 2, "--primary-blocks", 8, "--tier", shared, "--fleet-kill", 3)
    )
    assert report["shared"] == report["unbounded"] == report["hit_ratio"]
    assert report["alone"] < report["shared"]
    found_again = len(REQUESTS[2]) / sum(map(len, REQUESTS))  # blocks of its own, after the kill
    assert report["shared_free_running"] <= report["shared"] + found_again + 1e-9
    assert report["requests"] == len(REQUESTS)
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0
    assert [one["killed"] for one in report["passes"].values()] == [0, 1, 1]
    for one in report["passes"].values():
        assert one["jobs_submitted"] == one["job_results"] > 0
        assert sum(member["requests"] for member in one["members"]) == len(REQUESTS)
    assert report["tiers"].keys() == {"slab", "fs"}
    assert report["passes"]["lockstep"]["costs"]["fs"]["stored_gib"] > 0
    assert of_parent(os.getpid()) == set()


def test_the_processes_share_no_status_socket_where_the_environment_names_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("KVOFFLOAD_STATUS_SOCKET", str(tmp_path / "kv.sock"))
    with contextlib.ExitStack() as killed:
        for number in range(2):
            one = MemberProcess(f"process {number}", start_of(config()))
            killed.callback(one.kill)
            one.flush(DEADLINE_S)
            one.wait_for(READY, DEADLINE_S)
    assert list(tmp_path.iterdir()) == []


def test_the_figures_for_people_name_all_passes(command, tmp_path):
    trace = command.trace(REQUESTS[:2])
    result = command.run(
        *("replay", trace, "--fleet", 1, "--primary-blocks", 8, "--spread", "affinity"),
        *("--tier", f"fs:root_dir={tmp_path}/bucket", "--tier", "example"),
    )
    assert result.exit_code == 0, result.output
    for text in ("each alone", "lockstep", "free-running", "unbounded", "1 processes, affinity"):
        assert text in result.stdout


def test_a_fleet_without_a_tier_replays_the_built_in_workload(command):
    result = command.run("replay", "--fleet", 2, "--limit", 3)
    assert result.exit_code == 0, result.output
    assert "shared, in lockstep" in result.stdout


def test_a_fleet_that_is_stopped_ends_what_it_has_begun(tmp_path):
    stopped = []
    options = FleetOptions(
        size=2,
        should_stop=lambda: bool(stopped),
        before_request=lambda _pass, number: stopped.append(1) if number == 2 else None,
    )
    shared = {"type": "fs", "root_dir": str(tmp_path / "bucket")}
    own = {"type": "slab", "root_dir": str(tmp_path / "own"), "capacity_bytes": "4MiB"}
    report = run_fleet(config(own, shared), REQUESTS, options, tmp_path)
    assert list((tmp_path / "own").iterdir()) == []
    assert report.interrupted
    (one,) = report.passes
    assert 1 <= one.total.requests < len(REQUESTS)
    assert one.total.jobs_submitted == one.total.job_results
    assert report.complaints == []
    assert '"shared": null' in report.to_json()
    assert of_parent(os.getpid()) == set()


def test_a_tier_that_cannot_be_opened_is_said_in_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    shared = {"type": "fs", "root_dir": str(tmp_path / "bucket")}
    one = MemberProcess("process 0", start_of(config({**shared, "root_dir": "/proc/no"})))
    try:
        one.flush(DEADLINE_S)
        with pytest.raises(InputError, match=r"process 0: .*/proc"):
            one.wait_for(READY, DEADLINE_S)
    finally:
        one.kill()


def start_of(settings):
    return Start(config=settings_of(settings), most_blocks=4, verify=True, layers=2)


def test_no_process_is_started_for_a_configuration_that_cannot_be_sent():
    start = Start(config={"no": object()}, most_blocks=4, verify=True, layers=2)
    with pytest.raises(TypeError):
        MemberProcess("process 0", start)
    assert of_parent(os.getpid()) == set()


@pytest.fixture
def member():
    """A process of a fleet that waits for requests."""
    one = MemberProcess("process 0", start_of(config()))
    one.flush(DEADLINE_S)
    one.wait_for(READY, DEADLINE_S)
    yield one
    one.kill()
    one.kill()


def test_a_process_that_dies_is_an_error_and_not_a_wait(member):
    member._process.send_signal(signal.SIGKILL)
    with pytest.raises(OffloadError, match="process 0 has ended with status -9"):
        member.wait_for("done", DEADLINE_S)
    with pytest.raises(OffloadError, match="has ended"):
        member.send([1], DEADLINE_S)


def test_a_process_that_hangs_is_an_error_at_the_deadline(member):
    member._process.send_signal(signal.SIGSTOP)
    with pytest.raises(StalledError, match=r"was not done after 0\.1 s"):
        member.wait_for("done", 0.1)
    with pytest.raises(StalledError, match="has taken nothing"):
        member.send(range(100_000), 0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_parent(tmp_path, number):
    pipe = tmp_path / "trace"
    pipe.write_text('{"hash_ids": [1, 2]}\n' * 2000)
    command = [sys.executable, "-m", "tests.laboratory", "replay", str(pipe), "--fleet", "2"]
    parent = subprocess.Popen(
        [*command, "--tier", f"fs:root_dir={tmp_path}/bucket", "--json", str(tmp_path / "out")],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(of_parent(parent.pid)) == 2)
        parent.send_signal(number)
        assert parent.wait(DEADLINE_S) == {signal.SIGKILL: -9, signal.SIGINT: 130}[number]
        until(lambda: not of_parent(parent.pid))
    finally:
        parent.kill()
        parent.wait()
