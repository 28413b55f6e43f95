"""`replay` of the laboratory: the package's without a fleet, and what a fleet does not take."""

import json

import pytest


def test_without_a_fleet_it_is_the_packages_replay(command):
    result = command.run("replay", command.trace([[1, 2], [1, 2]]), "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["hits"] == {"primary": 2}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--spread", "affinity"), "--spread affinity"),
        (("--spread", "random"), "--spread random"),
        (("--fleet-kill", 3), "--fleet-kill 3"),
    ],
)
def test_an_option_of_a_fleet_without_one_is_refused(command, arguments, option):
    assert f"{option}: needs --fleet" in command.refusal("replay", *arguments)


@pytest.mark.parametrize(
    "flags",
    [
        ("--passes", 2),
        ("--engine", "async"),
        ("--device", "cuda"),
        ("--device-blocks", 100),
        ("--concurrency", 2),
        ("--plot", "replay.png"),
        ("--report", "replay.html"),
        ("--explain", 0),
        ("--trace-out", "timelines.json"),
        ("--spread", "even"),
        ("--tier", "example"),
    ],
)
def test_what_does_not_go_with_a_fleet_is_refused(command, flags):
    trace = command.trace([[1, 2, 3], [1, 2, 4]])
    assert flags[0] in command.refusal("replay", trace, "--fleet", 2, *flags)


@pytest.mark.parametrize("key", ["status_socket", "record_trace"])
def test_a_setting_that_only_one_process_can_have_is_refused(command, key):
    config = command.config(**{key: str(command.directory / "path"), "cpu_bytes_to_use": "1MiB"})
    message = command.refusal("replay", command.trace([[1]]), "--fleet", 2, "--config", config)
    assert f"{key} cannot be combined with --fleet" in message
