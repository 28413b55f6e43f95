"""`kvoffload replay --explain` and `--trace-out`."""

import io
import json
import os
import threading

import pytest
from observe.test_trace_events import valid
from rich.console import Console

from kvoffload_async.cli.command import complain
from kvoffload_async.cli.replay_report import TimelineOutput
from kvoffload_async.timeline import Note, RequestTimeline

DEADLINE_S = 100.0
TRACE = [[1, 2, 3], [1, 2, 4], [5, 6]]


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_one_request_is_explained_for_each_pass(command, engine):
    trace = command.trace(TRACE)
    result = command.run(
        *("replay", trace, "--tier", "example", "--explain", 1, "--passes", 2, "--engine", engine)
    )
    assert result.exit_code == 0
    text = result.output[result.output.index("pass 1, request request-1: ended") :]
    assert "pass 2, request request-1: ended" in text
    assert "primary: 2 found" in text
    assert "ends: no copies in flight" in text
    assert max(map(len, text.splitlines())) <= 80


def test_every_request_of_every_pass_is_in_the_trace_file(command, tmp_path):
    trace, out = command.trace(TRACE), tmp_path / "trace.json"
    figures = command.figures(trace, "--tier", "example", "--passes", 2, "--trace-out", out)
    events = valid(json.loads(out.read_text()))
    requests = [event["args"]["request"] for event in events if event["cat"] == "request"]
    assert requests == 2 * [f"request-{number}" for number in range(3)]
    copies = [event for event in events if event["cat"] == "copy"]
    assert len(copies) == figures["jobs_submitted"] + figures["warm"]["jobs_submitted"]
    assert all(event["args"]["has_ended"] for event in events if event["cat"] == "request")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace-out", "-"), "--trace-out -: expected a file"),
        (("--trace-out", "/nowhere/trace.json"), "the directory does not exist"),
        (("--explain", 9), "--explain 9: the replay has 3 requests; give a number from 0 to 2"),
        (("--explain", 1, "--limit", 1), "--explain 1: the replay has 1 requests"),
    ],
)
def test_what_cannot_be_had_is_said(command, arguments, said):
    trace = command.trace(TRACE)
    assert said in command.refusal("replay", trace, "--tier", "example", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace-out", "/dev/full"), "--trace-out /dev/full: cannot be written"),
    ],
)
def test_what_turns_out_later_is_said_behind_the_figures(command, arguments, said):
    trace = command.trace(TRACE)
    result = command.run("replay", trace, "--tier", "example", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "hit ratio" in result.stdout


def test_what_a_tier_says_reaches_the_terminal_as_letters_alone():
    output, console = TimelineOutput(0, None), Console(record=True, file=io.StringIO())
    failed = Note(0.0, "pending", 1, "fs", "\x1b]0;title\x07\x1b[2J\ud800")
    output.watch(1, RequestTimeline("request-0", 0.0, None, None, (failed,)))
    output.publish(console)
    assert all(line.isprintable() for line in console.export_text().splitlines())


def test_an_error_reaches_the_terminal_as_letters_alone(capsys):
    complain("\x1b]0;title\x07\x1b[2J\ud800 is wrong")
    assert (
        capsys.readouterr().err
        == "kvoffload: error: \ufffd]0;title\ufffd\ufffd[2J\\ud800 is wrong\n"
    )


def test_a_file_stays_as_it_was_when_something_else_is_wrong(command, tmp_path):
    out = tmp_path / "trace.json"
    out.write_text("of yesterday")
    result = command.run(
        *("replay", command.trace(TRACE), "--trace-out", out, "--plot", tmp_path / "plot.exe")
    )
    assert result.exit_code == 2
    assert out.read_text() == "of yesterday"


def test_a_trace_that_can_be_read_only_once_is_checked_after_the_replay(command):
    text = command.trace(TRACE).read_text()
    pipe = command.directory / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=pipe.write_text, args=(text,))
    feeder.start()
    result = command.run("replay", pipe, "--tier", "example", "--explain", "9")
    feeder.join(DEADLINE_S)
    assert result.exit_code == 2
    assert "--explain 9: the replay had no such request" in result.stderr
    assert "hit ratio" in result.stdout
