"""What the command takes beside files: a version, completion, standard input, YAML, a variable."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import python
from rich.console import Console

from kvoffload_async.cli.command import logging_to
from kvoffload_async.cli.inputs import parse_yaml
from kvoffload_async.errors import InputError
from kvoffload_async.replay.source import ChatWorkload
from kvoffload_async.status.client import ask, parse_report

SETTINGS = """
cpu_bytes_to_use: 4MiB
block_bytes: 16KiB  # of one worker
secondary_tiers:
  - type: example
"""
AS_JSON = '{"cpu_bytes_to_use": "4MiB", "block_bytes": 16384}'


def run(*arguments, given="", **variables):
    return subprocess.run(
        [python(), "-c", "from kvoffload_async.cli.app import main; main()", *arguments],
        env=os.environ | {"TERM": "dumb"} | variables,
        input=given,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_version_is_that_of_package_and_interpreter(command):
    result = command.run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("kvoffload ")
    assert f"Python {sys.version.split()[0]}" in result.stdout


def test_a_shell_can_complete_commands():
    asked = {"COMP_WORDS": "kvoffload rep", "COMP_CWORD": "1"}
    assert run(_KVOFFLOAD_COMPLETE="complete_bash", **asked).stdout.split() == ["replay"]


def test_a_trace_comes_through_standard_input():
    lines = '{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2, 3]}\n'
    result = run("replay", "-", "--tier", "example", "--json", "-", given=lines)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["requests"] == 2


def test_an_empty_trace_is_bad_input(command):
    assert "no request" in command.refusal("replay", command.file("\n\n", "trace.jsonl"))
    result = run("replay", "-", "--tier", "example")
    assert (result.returncode, result.stdout) == (2, "")


def test_standard_input_is_read_once():
    result = run("replay", "-", "--config", "-", given="{}")
    assert (result.returncode, "can be read only once" in result.stderr) == (2, True)


@pytest.mark.parametrize("given", [SETTINGS, AS_JSON])
def test_a_configuration_comes_through_standard_input_as_json_or_yaml(given):
    result = run("check-config", "-", given=given)
    assert result.returncode == 0, result.stderr
    assert "4,194,304" in result.stdout


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_a_configuration_may_be_yaml(command, suffix):
    result = command.run("check-config", command.file(SETTINGS, f"settings.{suffix}"))
    assert result.exit_code == 0, result.output
    assert "secondary tier 1 │ example" in result.stdout


def test_a_variable_names_the_configuration_where_nothing_else_does(command, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_CONFIG", str(command.file(SETTINGS, "settings.yaml")))
    assert "4,194,304" in command.run("check-config").stdout


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2", "the key 'a' is given twice"),
        ("a: {b: 1, b: 2}", "the key 'b' is given twice"),
        ("a: &x [1]\nb: *x", "an alias"),
        ("1: 2", "the key '1' is not text"),
        ("a: 2026-01-01", "is read as a date"),
        ("a: .inf", "not a JSON number"),
        ("a: [1", "not YAML"),
        ("a: !!python/object:os.system 1", "not YAML"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested more than 32 deep"),
        ("a: " + "{b: " * 5000 + "}" * 5000, "nested more than 32 deep"),
        ("a: !!binary aGk=", "is read as a bytes"),
        ("a: !!omap [x: 1]", "a list has the tag .*omap"),
        ("a: [!!pairs [x: 1, x: 2]]", "a list has the tag .*pairs"),
        ("a: !!set {x, y}", "is read as a set"),
        ("a: 0x" + "f" * 5000, "not YAML"),
        ("a: " + "9" * 200, "a number of 200 digits is too large"),
    ],
)
def test_what_json_cannot_say_is_refused(text, reason):
    with pytest.raises(InputError, match=reason):
        parse_yaml(text)


def test_without_pyyaml_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InputError, match=r"install kvoffload-async\[yaml\]"):
        parse_yaml("a: 1")


@pytest.mark.parametrize(
    ("level", "verbose", "shown"),
    [("", False, 1), ("", True, 2), ("error", True, 2), ("DEBUG", False, 2), ("warning", False, 1)],
)
def test_the_log_is_shown_once_a_line_and_all_of_it_if_asked_for(
    monkeypatch, level, verbose, shown
):
    monkeypatch.setenv("KVOFFLOAD_LOG_LEVEL", level)
    console = Console(file=io.StringIO(), width=30)
    log = logging.getLogger("kvoffload_async.tiers")
    with logging_to(console, verbose=verbose):
        log.warning("tier %s: [a line that is longer than the console is wide]", "fs")
        log.debug("a job ended")
    log.warning("after the command")
    lines = console.file.getvalue().splitlines()
    assert len(lines) == shown
    assert lines[0].endswith("tier fs: [a line that is longer than the console is wide]")


def test_a_level_that_there_is_not_is_refused(command, monkeypatch):
    monkeypatch.setenv("KVOFFLOAD_LOG_LEVEL", "debgu")
    message = command.refusal("replay", "--limit", 1)
    assert "KVOFFLOAD_LOG_LEVEL: 'debgu' is unknown (did you mean 'debug'?); allowed:" in message


def test_a_replay_serves_its_status(command, monkeypatch, tmp_path_factory):
    socket = str(tmp_path_factory.mktemp("s") / "kv.sock")  # a socket's path is short
    monkeypatch.setenv("KVOFFLOAD_STATUS_SOCKET", socket)
    seen = []
    requests = ChatWorkload._requests

    def watched(source):
        for request in requests(source):
            if not seen:
                seen.append(parse_report(ask(socket), socket))
            yield request

    monkeypatch.setattr(ChatWorkload, "_requests", watched)
    command.figures("--limit", 3, "--tier", "example")
    assert [tier.name for tier in seen[0].statistics.tiers] == ["example"]
    assert not Path(socket).exists()
