"""Numbers on the command line that are too small, too large, or no numbers."""

import sys
from dataclasses import fields
from typing import get_type_hints

import pytest
import typer

from kvoffload_async.cli.bench import BenchOptions
from kvoffload_async.cli.command import errors_as_one_line
from kvoffload_async.cli.settings import ReplayFlags
from kvoffload_async.cli.simulate import SimulateOptions
from kvoffload_async.cli.store import GcFlags, VerifyOptions

COMMANDS = {
    ("replay", "--limit", "1"): ReplayFlags,
    ("bench",): BenchOptions,
    ("simulate", "TRACE"): SimulateOptions,
    ("store", "verify", "."): VerifyOptions,
    ("store", "gc", "."): GcFlags,
}
NUMBERS = (int, float, int | None, float | None)
SIZES = [
    ("replay", "--block-bytes"),
    *(("bench", f"--{name}") for name in ("block-bytes", "total-bytes")),
]


def numeric_options():
    for command, options in COMMANDS.items():
        hints = get_type_hints(options)
        for field in fields(options):
            if hints[field.name] in NUMBERS:
                declared = field.metadata["declared"]
                (name,) = declared.param_decls or [f"--{field.name.replace('_', '-')}"]
                yield pytest.param(command, name, declared, id=f"{command[0]} {name}")
    yield pytest.param(("top", "x.sock"), "--interval", None, id="top --interval")


def hostile(declared):
    yield from ("", "x", "-1", "1" + "0" * 30, "9" * 5000, "-" + "9" * 5000, "1e400", "0x10")
    if declared is not None:
        assert declared.min is not None
        assert declared.max is not None, "every option that takes a number has a maximum"
        yield from (str(declared.min - 1), str(declared.max + 1))


@pytest.mark.parametrize(("before", "name", "declared"), list(numeric_options()))
def test_a_number_beyond_the_bounds_of_its_option_is_one_line(command, before, name, declared):
    trace = command.trace([[1, 2], [1, 3]])
    arguments = [trace if argument == "TRACE" else argument for argument in before]
    for value in hostile(declared):
        assert name in command.refusal(*arguments, f"{name}={value}"), value[:40]


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("value", ["", "0", "-1", "9" * 5000, "9" * 5000 + "GiB", "8EiB", "1e9"])
def test_a_size_that_is_none_is_one_line(command, before, value):
    name, option = before
    assert len(command.refusal(name, f"{option}={value}")) < 1000


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--concurrency", 1 << 16), "--concurrency: "),
        (("--device-blocks", 10**9), "--device-blocks: "),
        (("--engine", "async", "--device-blocks", 10**9), "--device-blocks: "),
        (("--primary-blocks", 10**9), "cpu_bytes_to_use: "),
    ],
)
def test_a_replay_that_does_not_fit_into_memory_is_refused_before_it_takes_any(
    command, options, complaint
):
    def peak_kib():
        with open("/proc/self/status") as status:  # noqa: PTH123 - of this process
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

    command.run("replay", "--limit", "1")
    before = peak_kib()
    assert complaint in command.refusal("replay", "--limit", "1", *options)
    assert peak_kib() - before < 256 << 10


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM")
@pytest.mark.parametrize("tier", [(), ("--tier-blocks", 10**8)])
def test_the_largest_capacities_can_be_simulated(command, tier):
    trace = command.trace([[1, 2], [1, 3]])
    options = ("--capacity", f"{10**8}", "--policy", "lru,arc,hd", *tier)
    assert command.run("simulate", trace, *options).exit_code == 0


@pytest.mark.parametrize(
    "capacity",
    ["", "0", "1,", "1,,2", "-1", f"{10**8 + 1}", "9" * 5000, "1" * 33, "\u00b2"],
)
def test_a_capacity_beyond_its_bounds_is_one_short_line(command, capacity):
    said = command.refusal("simulate", command.trace([[1]]), f"--capacity={capacity}")
    assert "give numbers of blocks from 1 to 100000000" in said
    assert len(said) < 600


@pytest.mark.parametrize("subcommand", ["inspect", "verify", "gc"])
def test_an_empty_name_of_a_store_is_not_the_current_folder(command, subcommand):
    assert "is empty" in command.refusal("store", subcommand, "")


def test_memory_that_runs_out_is_one_line(capsys):
    with pytest.raises(typer.Exit) as ended, errors_as_one_line():
        raise MemoryError("no address space for a table")
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err.count("\n") == 1
