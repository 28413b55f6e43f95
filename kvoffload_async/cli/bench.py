"""`kvoffload bench`: from the command line to the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from kvoffload_async.bench.figures import Report
from kvoffload_async.bench.peers import PEERS
from kvoffload_async.bench.plan import Plan
from kvoffload_async.bench.run import run_bench
from kvoffload_async.cli.bench_tables import print_tables
from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.interrupt import Interrupt
from kvoffload_async.cli.logs import Verbose, logging_to
from kvoffload_async.cli.output import STDOUT, as_unwritable, check_writable, write_figures
from kvoffload_async.cli.pictures import check_picture, drawing_module
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.cli.tierspec import parse_tier
from kvoffload_async.runtime.io_pool import suitable_threads

DEFAULT_TIERS: Final = ("slab", "fs")
"""What is measured if nobody asks for anything."""

_PLOT: Final = "kvoffload_async.bench.plot"


def bench(
    *,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE[:key=value,...]",
            help="A tier to measure, as in a replay; repeat it for more. Without root_dir it lies "
            "in a temporary directory.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:key=value,...]",
            help=f"Another engine's tier to measure beside them: {', '.join(PEERS)}.",
        ),
    ] = None,
    block_bytes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Block sizes, one after the other.")
    ] = "64KiB,256KiB,1MiB,4MiB",
    total_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="What is stored and loaded in one pass, at most.")
    ] = "128MiB",
    keys_per_job: Annotated[
        int, typer.Option(min=1, metavar="N", help="Blocks of each of the many jobs.")
    ] = 16,
    one_job: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Blocks of a single large job, measured as well; no more than --total-bytes has. "
            "0: none.",
        ),
    ] = 256,
    in_flight: Annotated[
        int, typer.Option(min=1, max=1024, metavar="N", help="Jobs under way at once.")
    ] = 16,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often all of it is measured.")
    ] = 5,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, metavar="N", help="Threads of the floor; by default as many as a tier's."
        ),
    ] = None,
    direct_floor: Annotated[
        bool,
        typer.Option("--direct-floor", help="The floor bypasses the page cache (O_DIRECT)."),
    ] = False,
    steady: Annotated[
        bool,
        typer.Option(
            "--steady",
            help="Fill what has a capacity before it is measured, so that it writes over what it "
            "has, as it will most of its life; the floor does too.",
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Give everybody one store for all rounds of a block size, in place of a new one "
            "each: what is never removed takes new memory every time, as where a server only adds.",
        ),
    ] = False,
    warm_up: Annotated[
        bool,
        typer.Option(
            help="Touch memory for the page cache before a store is opened: a virtual machine may "
            "have given it back, and is ten times slower at first.",
        ),
    ] = True,
    json: Annotated[
        str | None,
        typer.Option(metavar="PATH|-", help="Write the figures as JSON; - for standard output."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw the figures; needs kvoffload-async[plot]."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Measure tiers on this machine, each beside what the machine can do.

    Every round measures in turn: memcpy; plain reads and writes of a preallocated file, in joined
    calls; every tier and peer, on a new store, or with --keep on that of the round before, in a
    directory that is removed afterwards. Bytes stay in the page cache where a tier does not bypass
    it. Every loaded block is compared with what was stored, after the clock has stopped.
    """
    console = Console(stderr=True)
    with (
        errors_as_one_line(),
        logging_to(console, verbose=verbose),
        Interrupt() as interrupt,
    ):
        check_writable("--json", json)
        check_picture("--plot", plot, _PLOT)
        plan = Plan.parse(
            block_bytes,
            total_bytes,
            keys_per_job=keys_per_job,
            one_job=one_job,
            in_flight=in_flight,
            rounds=rounds,
            threads=suitable_threads() if threads is None else threads,
            direct=direct_floor,
            steady=steady,
            keep=keep,
            warm_up=warm_up,
        )
        own = [parse_tier(text) for text in tier or (() if peer else DEFAULT_TIERS)]
        others = [parse_tier(text, "--peer") for text in peer or ()]
        gauge = Gauge()
        with progress_bar(console, lambda: gauge.fraction_done, "bench") as on_change:
            gauge.on_change = on_change
            report = run_bench(
                plan,
                own,
                others,
                expect=gauge.expect,
                advance=gauge.advance,
                should_stop=lambda: interrupt.is_requested,
            )
        if report.sizes:
            _publish(report, json, plot)
    for complaint in report.complaints:
        complain(complaint)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.complaints:
        raise typer.Exit(EXIT_FAILED)


def _publish(report: Report, json: str | None, plot: Path | None) -> None:
    if json != STDOUT:
        print_tables(report, Console())
    if json is not None:
        write_figures("--json", json, report.to_json())
    if plot is not None:
        with as_unwritable("--plot", str(plot)):
            drawing_module("--plot", _PLOT).draw(report, plot)
