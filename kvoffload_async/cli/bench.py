"""`kvoffload bench`: parses the options, runs the benchmark and prints its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvoffload_async.bench.contender import Contender
from kvoffload_async.bench.figures import Figure, Report
from kvoffload_async.bench.plan import Plan
from kvoffload_async.bench.rounds import MEMCPY
from kvoffload_async.bench.run import run_bench
from kvoffload_async.cli.command import CommandOptions, Interrupt, finish, flag, running
from kvoffload_async.cli.inputs import parse_tier
from kvoffload_async.cli.output import Gauge, check_writable, progress_bar, publish, size_text

_TITLES: Final = {
    "store": "Store",
    "load": "Load",
    "store_one_job": "Store, one large job",
    "load_one_job": "Load, one large job",
}
_FILE_WIDTH: Final = 176
_WHOLE: Final = 100
_COLUMNS: Final = (
    *("GiB/s", "from-to", "x base", "x plain", "x recycling"),
    *("p50 ms", "p90", "p99"),
    *("us/job", "us/key", "x base"),
    *("CPU s/GiB", "x base"),
    "switches",
)
_ALL: Final = tuple(range(len(_COLUMNS)))
_NARROW: Final = (0, 2, 3, 5, 7, 9)
"""Indices of the columns that fit into a terminal of 80 characters; `--json` writes all figures."""

Figures = Mapping[str, Figure]


def print_tables(report: Report, console: Console) -> None:
    """Print the tables of a report; at full width if the output is not a terminal."""
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    columns = _ALL if console.width >= _FILE_WIDTH else _NARROW
    for what, title in _TITLES.items():
        table = _pass_table(report, what, title, columns)
        if table.row_count:
            console.print(table)
    console.print(_rest_table(report))
    for remark in _remarks(report):
        console.print(Text(remark))


def _pass_table(report: Report, what: str, title: str, columns: Sequence[int]) -> Table:
    table = _table(title, *(_COLUMNS[column] for column in columns))

    def shown(figures: Figures) -> list[str]:
        cells = _cells(figures)
        return [cells[column] for column in columns]

    for size in report.sizes:
        block = size_text(size.block_bytes)
        table.add_section()
        if what in {"store", "load"}:
            table.add_row(block, MEMCPY, *shown(size.memcpy))
        for directory, kinds in size.baselines.items():
            for kind, passes in kinds.items():
                if what in passes:
                    base = Text(_baseline_name(report, directory, kind))
                    table.add_row(block, base, *shown(passes[what]))
        for name, standing in size.contenders.items():
            if what in standing.passes:
                table.add_row(block, Text(name), *shown(standing.passes[what]))
    return table


def _cells(figures: Figures) -> list[str]:
    speed, owner = figures["gib_per_s"], figures.get("owner_us_per_job")
    return [
        _number(speed),
        f"{speed.low:.2g}-{speed.high:.2g}",
        _times(speed.of_baseline),
        _times(speed.of_plain),
        _times(speed.of_recycling),
        *(_number(figures[f"job_ms_p{q}"]) for q in (50, 90, 99)),
        _number(owner),
        _number(figures.get("owner_us_per_key")),
        _times(owner.of_baseline if owner else None),
        _number(figures["cpu_s_per_gib"]),
        _times(figures["cpu_s_per_gib"].of_baseline),
        _number(figures.get("switches_per_job")),
    ]


def _rest_table(report: Report) -> Table:
    table = _table(
        "Single calls, in us", "submit large store", "submit large load", "idle poll", "lookup"
    )
    for size in report.sizes:
        table.add_section()
        for name, standing in size.contenders.items():
            passes, at_rest = standing.passes, standing.passes["at_rest"]
            table.add_row(
                size_text(size.block_bytes),
                Text(name),
                _number(passes.get("store_one_job", {}).get("submit_us_per_job")),
                _number(passes.get("load_one_job", {}).get("submit_us_per_job")),
                _number(at_rest.get("idle_poll_us")),
                _number(at_rest.get("lookup_us")),
            )
    return table


def _remarks(report: Report) -> Iterator[str]:
    settings, machine = report.settings, report.machine
    is_native = machine["block_io"] == "native"
    base = "the bare native engine with checksums" if is_native else "plain writes or reads"
    yield (
        f"Medians of {settings['rounds']} rounds; each round measures all contenders in turn on "
        f"{'full' if settings['steady'] else 'empty'} stores, with "
        f"{settings['in_flight']} jobs of {settings['keys_per_job']} blocks in flight. ms: latency "
        "of a job until its result is seen. us: time of the owner's thread, in all calls. x base: "
        f"ratio to {base}; x plain: ratio to plain writes or reads; x "
        "recycling, on full stores: ratio to plain calls that overwrite and rename, or read, one "
        f"file per block; all with {settings['threads']} threads. The owner's x base is the ratio "
        "to the time that the baseline takes. switches: voluntary context switches per job of all "
        "Python threads but the owner's, for instance while they wait for the GIL. Every loaded "
        "block was compared with the stored one after the clock had stopped."
    )
    yield (
        f"{machine['date'][:10]}, {machine['processors']} x {machine['processor']}, "
        f"load {machine['load_average']:.1f}; block I/O: {machine['block_io']}"
    )
    for name, facts in report.contenders.items():
        options = "".join(f", {key}={value}" for key, value in facts["options"].items())
        yield f"{name}: in {facts['directory'] or 'memory'}{options}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("block", ""):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _baseline_name(report: Report, directory: str, kind: str) -> str:
    is_only = len(report.sizes[0].baselines) == 1
    return f"base, {kind}" if is_only else f"base, {kind}, {directory}"


def _number(figure: Figure | None) -> str:
    return "" if figure is None else _short(figure.median)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else _short(ratio)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:.3g}"


DEFAULT_TIERS: Final = ("slab", "fs")
"""The tiers that are measured if none is given."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommandOptions):
    """The options of `kvoffload bench`."""

    tier: list[str] | None = flag(
        None,
        "A tier to measure. Repeat the option for more tiers. Default root_dir: a temporary "
        "directory.",
        metavar="TYPE[:key=value,...]",
    )
    block_bytes: str = flag("64KiB,256KiB,1MiB,4MiB", "Block sizes to measure.", metavar="SIZE,...")
    total_bytes: str = flag("128MiB", "Maximum data stored and loaded in one pass.", metavar="SIZE")
    rounds: int = flag(5, "Rounds of measurement.", metavar="N", min=1)
    steady: bool = flag(
        False,
        "Fill bounded tiers before measuring, so that writes replace old blocks, as in "
        "long-running deployments. The baseline overwrites its file too, and another one "
        "overwrites and renames one file per block.",
        "--steady",
    )
    json: str | None = flag(
        None, "Write the figures as JSON; - is standard output.", metavar="PATH|-"
    )


def bench(given: BenchOptions) -> None:
    """Benchmark tiers against a raw I/O baseline.

    Each round measures in turn: memcpy; the baseline, which reads and writes a preallocated file;
    and every tier, in a temporary directory. Each round uses a new store. Data stays in the page
    cache unless a tier bypasses it. Every loaded block is compared with the stored one after the
    clock has stopped.
    """
    with running(given) as (console, interrupt):
        check_writable("--json", given.json)
        plan = Plan.parse(
            given.block_bytes, given.total_bytes, rounds=given.rounds, steady=given.steady
        )
        report = measure(plan, given.tier or DEFAULT_TIERS, console, interrupt)
        if report.sizes:
            publish(given.json, partial(print_tables, report), report.to_json())
    finish(report.complaints, interrupted=report.interrupted)


def measure(
    plan: Plan,
    tiers: Sequence[str],
    console: Console,
    interrupt: Interrupt,
    others: Sequence[Contender] = (),
) -> Report:
    """Run a benchmark with a progress bar.

    Args:
        plan: Settings.
        tiers: Tiers to measure, as for `--tier`.
        console: Shows the progress bar.
        interrupt: Stops the benchmark early.
        others: Further contenders.

    Raises:
        OffloadError: See `run_bench`; InputError also if a tier's text is invalid.
    """
    gauge = Gauge()
    with progress_bar(console, gauge.fraction_done, "bench"):
        return run_bench(
            plan,
            [parse_tier(text) for text in tiers],
            others,
            expect=gauge.expect,
            advance=gauge.advance,
            should_stop=lambda: interrupt.is_requested,
        )
