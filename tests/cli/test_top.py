"""`kvoffload top`: what it shows of an engine, and how it ends."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import replace

import pytest
from command_line import IGNORING
from facade.worlds import EXCLUSIVE, World
from rich.console import Console

from kvoffload_async import CPUPrimaryTierOffloadingManager, TieringOffloadingSpec
from kvoffload_async.cli import top as top_module
from kvoffload_async.cli.output import size_text
from kvoffload_async.cli.top import _count, _percent, _seconds, _short, picture
from kvoffload_async.statistics import (
    EngineStatistics,
    HistogramStatistics,
    UnopenedStatistics,
)
from kvoffload_async.status.changes import Readings
from kvoffload_async.status.client import EngineReport
from kvoffload_async.timeline import SlowRequest

DEADLINE_S = 100.0
CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "org/model"}


@pytest.fixture(scope="module")
def stats():
    """Those of an engine with a tier that has stored a block."""
    world = World(EXCLUSIVE)
    world.begin("r")
    world.store(1)
    world.rest()
    found = world.manager.stats()
    world.end()
    return found


def report(stats, **changes):
    fields = {"version": 1, "pid": 7, "model": "org/model", "time_s": 0.0, "uptime_s": 3661.0}
    return EngineReport(**{**fields, "statistics": stats, **changes})


def screen(stats, width=80, height=24, complaint="", **changes):
    """Return the lines of a picture."""
    readings = Readings()
    readings.add(report(stats, **changes))
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123 - closed below
    console.print(
        picture(readings, width=width, height=height, path="/run/kv.sock", complaint=complaint)
    )
    console.file.close()
    return console.export_text().splitlines()


def tier_of(stats, **changes):
    return replace(stats, tiers=(replace(stats.tiers[0], **changes),))


def row_of(lines, name):
    """Return a line's cells."""
    return next(line.split() for line in lines if line.startswith(name))


# -- the picture --------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (132, 50), (200, 60)])
@pytest.mark.parametrize("num_tiers", [1, 4, 20])
def test_it_fits_on_the_screen(stats, width, height, num_tiers):
    wide = replace(
        stats.tiers[0],
        name="a-tier-with-a-long-name",
        loaded_bytes=10**15,
        stored_bytes=10**15,
        used_bytes=999 * 2.0**40,
        capacity_bytes=2.0**50,
        dropped={"evicted": 1_234_567},
        failed_jobs=99_999,
        queued_jobs=12_345,
        jobs_in_flight=12_345,
        bytes_in_flight=1023 * 2.0**20,
        bytes_in_flight_limit=1023 * 2.0**20,
    )
    dead = replace(wide, **not_open(reason="no such place " * 20))
    many = replace(stats, tiers=(wide,) * (num_tiers // 2) + (dead,) * -(-num_tiers // 2))
    lines = screen(many, width, height)
    assert any("not open for" in line for line in lines)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert any("slowest phases" in line for line in lines)
    assert "…" not in "".join(lines).replace("a-tier-with…", "")


def test_tiers_beyond_eight_are_counted(stats):
    lines = screen(replace(stats, tiers=stats.tiers * 10))
    assert sum(line.startswith("tier0 ") for line in lines) == 8
    assert row_of(lines, "2 more")


def test_the_first_line_says_which_engine_it_is(stats):
    lines = screen(stats)
    assert "org/model" in lines[0]
    assert "pid 7  up 1:01:01  /run/kv.sock" in lines[0]
    assert "Python" in screen(stats, width=120)[0]


def test_a_tier_has_its_figures(stats):
    lines = screen(
        tier_of(
            stats,
            hits=3,
            misses=1,
            used_bytes=512.0 * 2**20,
            capacity_bytes=2.0**30,
            loaded_bytes=3661 * 2**20,
            stored_bytes=3661 * 2048,
            queued_jobs=5,
            jobs_in_flight=6,
            failed_jobs=7,
            dropped_blocks=1000,
            dropped={"evicted": 5, "reset": 600, "closed": 395},
            failed_store_blocks=3,
        )
    )
    row = "tier0 512M 50% 75% 1.0M 2.0K 5 6 7 8 ok"
    assert row_of(lines, "tier0") == row.split()


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ({"load": "closed", "store": "closed"}, "ok"),
        ({"load": "open", "store": "closed"}, "no load"),
        ({"load": "half_open", "store": "open"}, "stopped"),
    ],
)
def test_an_open_breaker_is_named_by_direction(stats, states, shown):
    lines = screen(tier_of(stats, breakers=states))
    assert any(line.startswith("tier0") and line.rstrip().endswith(shown) for line in lines)


def not_open(**changes):
    fields = {"since_s": 100.0, "attempts": 3, "reason": "refused", "next_attempt_s": 139.0}
    return {"is_open": False, "unopened": UnopenedStatistics(**{**fields, **changes})}


@pytest.mark.parametrize(
    ("next_attempt_s", "following"),
    [(139.0, "next try in 4 s"), (134.0, "being tried again")],
)
def test_a_tier_that_is_not_open_says_since_when_why_and_what_follows(
    stats, next_attempt_s, following
):
    lines = screen(tier_of(stats, **not_open(next_attempt_s=next_attempt_s)), time_s=135.0)
    assert any(line.startswith("tier0") and line.rstrip().endswith("not open") for line in lines)
    assert f"tier0: not open for 0:00:35, {following}: refused" in [x.rstrip() for x in lines]


def test_a_long_reason_is_wrapped_and_a_suspension_has_one_too(stats):
    reason = "valkey: ConnectionError: Error 111 connecting to 127.0.0.1:6390. Connection refused."
    states = {"load": "closed", "store": "open"}
    lines = screen(tier_of(stats, breakers=states, breaker_reasons={"store": reason}))
    assert any(line.startswith("tier0: stores are suspended: valkey:") for line in lines)
    assert any(line.strip().endswith("Connection refused.") for line in lines)


def test_a_closed_tier_is_shown_as_closed(stats):
    lines = screen(tier_of(stats, is_open=False))
    assert row_of(lines, "tier0")[-1] == "closed"


def test_a_tier_that_says_nothing_of_its_size_or_has_no_bound(stats):
    assert row_of(screen(tier_of(stats, used_bytes=None)), "tier0")[1] == "-"
    lines = screen(tier_of(stats, used_bytes=2.0**20, capacity_bytes=None))
    assert row_of(lines, "tier0")[1:3] == ["1.0M", "-"]


def test_a_wide_screen_shows_what_is_in_flight_and_what_may_be(stats):
    remote = tier_of(stats, bytes_in_flight=16.0 * 2**20, bytes_in_flight_limit=64.0 * 2**20)
    heads = next(line for line in screen(remote, width=140) if "in flight" in line)
    assert heads.index("jobs") < heads.index("in flight") < heads.index("overdue")
    assert "16M 25%" in " ".join(screen(remote, width=140))
    assert "in flight" not in " ".join(screen(remote, width=120))


def test_the_slowest_requests_are_shown_where_the_engine_records_them(stats):
    slow = [SlowRequest(req_id=f"[r{n}]", seconds=n, longest_phase="fs: load") for n in range(9)]
    lines = screen(stats, slowest=tuple(slow))
    assert row_of(lines, "slowest requests")
    assert row_of(lines, "[r1]") == ["[r1]", "1.0", "s", "fs:", "load"]
    assert not any("[r5]" in line for line in lines)
    assert not any("slowest requests" in line for line in screen(stats))


def test_names_reach_the_terminal_as_letters_alone(stats):
    evil = "[/x]\x1b]0;title\x07\x1b[2J\ud800\nx"
    slow = SlowRequest(req_id=evil, seconds=1.0, longest_phase=evil)
    named = tier_of(stats, name=evil, breakers={f"{evil}": "open"})
    lines = screen(named, width=200, complaint=evil, model=evil, slowest=(slow,))
    assert all(line.isprintable() for line in lines)
    assert sum("[/x]" in line for line in lines) >= 4


def test_a_primary_alone_is_shown_without_tiers(stats):
    lines = screen(CPUPrimaryTierOffloadingManager(3).stats())
    assert "3 blocks" in lines[2]
    assert not any(line.startswith(("tier", "requests")) for line in lines)


def test_an_engine_shows_its_copies(stats):
    parts = {name: getattr(stats, name) for name in ("primary", "tiers", "planner", "runtime")}
    engine = EngineStatistics(
        **parts,
        copies=2,
        waiting_loads=3,
        waiting_stores=4,
        missed_events=0,
        failed_copies=5,
        load_copy_seconds=HistogramStatistics(),
        store_copy_seconds=HistogramStatistics(),
    )
    assert "2 copies now  7 calls waiting  failed 5" in " ".join(screen(engine))


def test_operations_deletions_and_pins_are_shown_while_there_are_any(stats):
    assert not any(line.startswith("cache ") for line in screen(stats))
    planner = replace(stats.planner, deleting_blocks=4096, pinned_blocks=1)
    primary = replace(stats.primary, row_bytes=4096, deleted_blocks=36_610)
    running = {"delete": 1, "list": 2, "copy": 0}
    busy = replace(stats, planner=planner, primary=primary, cache_operations=running)
    lines = screen(busy)
    assert any("deleted 10/s" in line for line in lines)
    share = 1 / primary.num_slots
    line = f"cache     delete 1  list 2  deleting 4,096 blocks  kept 1 blocks, 4 KiB, {share:.1%}"
    assert line in lines


def test_what_went_wrong_is_shown_only_where_it_did(stats):
    calm = " ".join(screen(stats))
    assert "no slot" not in calm
    planner = replace(stats.planner, promotions_refused=3, deferrals_expired=4)
    assert "no slot 3  too late 4" in " ".join(screen(replace(stats, planner=planner)))


def test_why_there_is_no_newer_reading(stats):
    assert screen(stats, complaint="no reading: [gone]")[1].startswith("no reading: [gone]")


def test_figures_have_three_digits_or_so():
    assert [size_text(n) for n in (64 << 10, 1 << 20, 150 << 20, 3 << 29)] == [
        *("64 KiB", "1.0 MiB", "150.0 MiB", "1.50 GiB")
    ]
    assert [_short(n) for n in (0, 999, 1000, 9950, 123456, 10**7)] == [
        *("0", "999", "1.0K", "10K", "123K", "10M")
    ]
    assert [_short(n, 1024) for n in (0.4, 1023, 3 << 20)] == ["0", "1.0K", "3.0M"]
    assert [_seconds(s) for s in (0, 25e-6, 0.00099, 0.1, 0.9999, 30)] == [
        *("0.0 us", "25.0 us", "990 us", "100 ms", "1.0 s", "30.0 s")
    ]
    assert [_percent(s) for s in (None, 0, 0.5, 1)] == ["-", "0.0%", "50.0%", "100%"]
    assert [_count(n) for n in (0, 0.25, 9.94, 12345.6)] == ["0", "0.2", "9.9", "12,346"]


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path_factory):
    """The path of a running engine's socket."""
    path = tmp_path_factory.mktemp("s") / "kv.sock"
    config = {**CONFIG, "secondary_tiers": [{"type": "example"}], "status_socket": str(path)}
    with TieringOffloadingSpec(config) as spec:
        spec.get_manager()
        yield path


def test_json_is_one_reading(command, engine):
    result = command.run("top", engine, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["pid"] == os.getpid()
    assert [tier["name"] for tier in shown["statistics"]["tiers"]] == ["example"]


def test_without_a_terminal_one_picture_is_printed(command, engine):
    result = command.run("top", engine)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("org/model")
    assert "example" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_variable_names_the_socket(command, engine, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_STATUS_SOCKET", str(engine))
    assert command.run("top").stdout.startswith("org/model")


def test_where_no_engine_is_one_line_says_so(command):
    result = command.run("top", command.directory / "none.sock")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "none.sock: no engine answers: No such file or directory; start one" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_interval_must_be_sensible(command, engine):
    assert "--interval" in command.refusal("top", engine, "--interval", 0)


def test_an_engine_that_goes_and_comes_back_is_shown_again(engine):
    readings = Readings()
    readings.add(top_module.parse_report(top_module.ask(str(engine)), str(engine)))
    elsewhere = str(engine.with_name("gone"))
    assert "no engine answers" in top_module._read_again(readings, elsewhere)
    before = readings.last
    assert top_module._read_again(readings, str(engine)) == ""
    assert readings.last is not before


class Terminal:
    """`kvoffload top` on a terminal of its own."""

    def __init__(self, engine, columns=80, prefix=()):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
        command = [sys.executable, "-m", "kvoffload_async", "top", str(engine), "--interval", "0.1"]
        self.process = subprocess.Popen(
            [*prefix, *command],
            stdout=slave,
            stderr=subprocess.PIPE,
            env=environment | {"TERM": "xterm"},
        )
        os.close(slave)
        self._guard = threading.Timer(DEADLINE_S, self.process.kill)
        self._guard.start()

    def pictures(self, count, of=b"slowest phases"):
        """Return what is shown up to so many more pictures."""
        shown = b""
        while shown.count(of) < count:
            shown += os.read(self._master, 1 << 16)
        return shown

    def end(self, number):
        """Send a signal; return the exit status and what was said."""
        self.process.send_signal(number)
        reader = threading.Thread(target=_drain, args=(self._master,))
        reader.start()
        _, err = self.process.communicate(timeout=DEADLINE_S)
        self._guard.cancel()
        reader.join(DEADLINE_S)
        os.close(self._master)
        return self.process.returncode, err


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_it_is_live_until_ctrl_c(engine, columns):
    terminal = Terminal(engine, columns)
    shown = terminal.pictures(3)
    assert terminal.end(signal.SIGINT) == (130, b"")
    assert shown.startswith(b"\x1b[?1049h")  # a screen of its own


def test_on_a_terminal_it_waits_for_an_engine_that_starts_later(tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "kv.sock"
    terminal = Terminal(path)
    shown = terminal.pictures(2, of=b"waiting for an engine")
    assert b"no engine answers" in b" ".join(shown.split())
    with TieringOffloadingSpec({**CONFIG, "status_socket": str(path)}) as spec:
        spec.get_manager()
        terminal.pictures(1)
        assert terminal.end(signal.SIGINT) == (130, b"")


def test_as_nohup_and_a_script_start_it_it_stays_live(engine):
    terminal = Terminal(engine, prefix=IGNORING)
    terminal.pictures(1)
    terminal.process.send_signal(signal.SIGHUP)
    terminal.process.send_signal(signal.SIGINT)
    terminal.pictures(3)
    assert terminal.end(signal.SIGTERM) == (-signal.SIGTERM, b"")


def _drain(master):
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:  # the other side was closed
        pass
