"""The command as a process: how it is started, and how Ctrl-C ends it."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading

import pytest
from command_line import IGNORING
from preloaded import python

DEADLINE_S = 100
PIPE_BYTES = 1 << 17  # more than a pipe and a reader's buffer hold


def start(*arguments, prefix=(), **options):
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "kvoffload_async", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.slow
def test_the_module_runs_the_command():
    status, out, err = finish(start("replay", "--limit", "20", "--json", "-"))
    assert (status, err) == (0, "")
    assert json.loads(out)["requests"] == 20


def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvoffload", "replay", "--limit", "3", "--json", "-"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvoffload_async", run_name="__main__")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 3


def test_bad_input_has_no_traceback():
    status, out, err = finish(start("replay", "no-such-trace", executable=python()))
    assert (status, out) == (2, "")
    assert err == "kvoffload: error: no-such-trace: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("json_flag", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_ends_in_order_with_the_figures_so_far(tmp_path, json_flag):
    pipe = tmp_path / "trace"
    os.mkfifo(pipe)
    output = ["--json", "-"] if json_flag else []
    process = start(
        "replay", str(pipe), "--tier", "example", "--concurrency", "4", *output, executable=python()
    )
    is_running = threading.Event()

    def feed():
        """Write a trace without an end, until nobody reads it."""
        written = 0
        try:
            with pipe.open("w") as trace:
                for first in range(0, 10**9, 8):
                    line = json.dumps({"hash_ids": list(range(first, first + 16))}) + "\n"
                    written += trace.write(line)
                    if written > PIPE_BYTES:
                        is_running.set()
        except BrokenPipeError:
            pass

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        assert is_running.wait(DEADLINE_S)
        process.send_signal(signal.SIGINT)
        status, out, err = finish(process)
    finally:
        process.kill()
    feeder.join(DEADLINE_S)
    assert not feeder.is_alive()
    assert (status, err) == (130, "")
    if not json_flag:
        assert "Replay, interrupted" in out
        return
    report = json.loads(out)
    assert report["interrupted"]
    assert report["requests"] > 0
    assert report["jobs_submitted"] == report["job_results"] > 0
    assert report["corrupt_blocks"] == report["leaked_pins"] == 0


def test_a_full_standard_output_is_one_line():
    command = [sys.executable, "-m", "kvoffload_async", "tiers"]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=DEADLINE_S
        )
    assert ended.returncode == 2
    assert ended.stderr == (
        "kvoffload: error: standard output cannot be written: No space left on device; "
        "free space, or redirect it\n"
    )


@pytest.mark.slow
def test_as_nohup_and_a_script_start_it_it_goes_on_to_the_end(tmp_path):
    """Both ignore signals: the one that a closed terminal sends, the other Ctrl-C."""
    pipe = tmp_path / "trace"
    os.mkfifo(pipe)
    process = start("replay", str(pipe), "--tier", "example", "--json", "-", prefix=IGNORING)
    guard = threading.Timer(DEADLINE_S, process.kill)
    guard.start()
    requests = 100
    with pipe.open("w") as trace:
        for number in range(requests):
            if number == requests // 2:  # it reads: the pipe does not hold as much
                process.send_signal(signal.SIGHUP)
                process.send_signal(signal.SIGINT)
            request = {"hash_ids": [number], "text": "x" * (4 * PIPE_BYTES // requests)}
            trace.write(json.dumps(request) + "\n")
    status, out, err = finish(process)
    guard.cancel()
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["requests"], report["interrupted"]) == (requests, False)


IMPORTS = """
import sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "kvoffload_async":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
import kvoffload_command
kvoffload_command.main()
"""


def test_ctrl_c_while_the_command_is_imported_has_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert finish(process) == (130, "", "")


def test_ctrl_c_before_a_command_handles_signals_has_no_traceback(command, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("kvoffload_async.cli.app.implementation", interrupted)
    result = command.run("--version")
    assert result.exit_code == 130
    assert not result.output.strip()
