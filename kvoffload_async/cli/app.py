"""The commands of `kvoffload`; the exit statuses are defined in `ending`."""

from __future__ import annotations

import platform
from collections.abc import Collection
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.cli.bench import bench
from kvoffload_async.cli.catalogue import common_options, geometry_table, option_table, tier_entries
from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupt,
    OneLineGroup,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.logs import Verbose, logging_to
from kvoffload_async.cli.output import (
    STDOUT,
    check_page,
    check_picture,
    check_writable,
    write_figures,
)
from kvoffload_async.cli.replay_report import (
    PLOT,
    TimelineOutput,
    bar_per_pass,
    print_table,
    publish_fleet,
    publish_pictures,
    replay_on_fleet,
)
from kvoffload_async.cli.settings import (
    BUILT_IN_PASSES,
    CONFIG_VARIABLE,
    STDIN,
    Flags,
    ScratchFolder,
    read_config,
    resolve,
)
from kvoffload_async.cli.store import store_app
from kvoffload_async.cli.top import top
from kvoffload_async.errors import InputError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.fleet.plan import RANDOM, SPREADS
from kvoffload_async.replay.fleet.run import FleetOptions, FleetReport
from kvoffload_async.replay.run import DEVICES, ENGINES, PassReports, ReplayOptions, replay_passes
from kvoffload_async.replay.source import ChatWorkload, TraceFile

app = typer.Typer(
    cls=OneLineGroup,
    help="A multi-tier KV-cache offload engine for LLM serving: replay traces, benchmark tiers, "
    "monitor engines, maintain stores.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(bench)
app.command()(top)
app.add_typer(store_app)


def main() -> None:
    """Run the command; never returns."""
    app(prog_name="kvoffload")


def _print_version(wanted: bool) -> None:
    """Print the versions and exit, if `wanted`."""
    if wanted:
        with errors_as_one_line():
            moves = implementation()
        package, python = version("kvoffload-async"), platform.python_version()
        typer.echo(f"kvoffload {package}, Python {python}; block I/O: {moves}")
        raise typer.Exit


@app.callback()
def common(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print versions, and whether native code or Python moves blocks.",
        ),
    ] = False,
) -> None:
    """Handle the options that precede a command."""


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Trace file of JSON lines with hash_ids; - reads standard input. Default: a "
            "built-in chat workload."
        ),
    ] = None,
    *,
    primary_blocks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Capacity of the primary tier, in blocks."),
    ] = None,
    primary_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help='Alternative to --primary-blocks: capacity in bytes, such as "1GiB".',
        ),
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of one block. Default: 16KiB.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="lru|arc", help="Eviction policy of the primary tier. Default: lru."),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE[:key=value,...]",
            help="A secondary tier. Repeat the option for more tiers, in lookup order. "
            "`kvoffload tiers` lists types and keys.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar=CONFIG_VARIABLE,
            help="Engine configuration, JSON or YAML; - reads standard input. Options of the "
            "command line override it.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Replay only the first N requests.")
    ] = None,
    passes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Replay the trace N times, each time with a new engine over the same tiers. "
            "Default: 1; 2 for the built-in workload with its built-in tier.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, metavar="K", help="Number of concurrent requests.")
    ] = 1,
    engine: Annotated[
        str,
        typer.Option(
            metavar="sync|async",
            help="API to drive: sync, the connector for schedulers, step by step; or async, "
            "OffloadEngine on an event loop.",
        ),
    ] = "sync",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Location of the simulated device memory.")
    ] = "cpu",
    device_blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Give the device N blocks and a prefix cache. Default: enough blocks for the "
            "concurrent requests, and no prefix cache.",
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option(min=1, metavar="L", help="Number of tensors in device memory.")
    ] = 2,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare loaded blocks with stored ones.")
    ] = False,
    fleet: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Replay on N processes. Each has its own primary and slab tier; all other tiers "
            "are shared. Three passes: nothing shared, shared in lockstep, shared free-running.",
        ),
    ] = None,
    spread: Annotated[
        str,
        typer.Option(
            metavar="random|affinity",
            help="Routing within a fleet: random, or affinity, to the process that has seen at "
            "least half of the prompt.",
        ),
    ] = RANDOM,
    fleet_kill: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Kill the process that handles the K-th request, and start a replacement.",
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="PATH|-", help="Write the figures as JSON; - is standard output."),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Print the timeline of request N in each pass; the first request is 0.",
        ),
    ] = None,
    trace_out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the timelines of all requests as trace events for Perfetto.",
        ),
    ] = None,
    status_socket: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Serve the engine's status on this socket, for `kvoffload top`."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Plot the replay over time; needs kvoffload-async[plot]."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="HTML",
            help="Write a page with figures and plots; needs kvoffload-async[plot].",
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Replay a serving trace through the whole engine.

    The replay moves real data, and compares every loaded block with the stored one. Without a
    trace and a tier, it replays a built-in workload twice over files in a temporary directory.
    """
    flags = Flags(
        primary_blocks=primary_blocks,
        primary_bytes=primary_bytes,
        block_bytes=block_bytes,
        policy=policy,
        tiers=tier or (),
        config=config,
        status_socket=status_socket,
        is_built_in=trace is None,
    )
    console = Console(stderr=True)
    with (
        errors_as_one_line(),
        logging_to(console, verbose=verbose),
        Interrupt() as interrupt,
        ScratchFolder() as scratch,
        TimelineOutput(explain, trace_out) as timelines,
    ):
        check_writable("--json", json)
        check_picture("--plot", plot, PLOT)
        check_page("--report", report, PLOT)
        _check_choice("--engine", engine, ENGINES)
        _check_choice("--device", device, DEVICES)
        spec = timelines.recording(resolve(flags, scratch), concurrency)
        num_passes = passes or (BUILT_IN_PASSES if scratch.is_used else 1)
        if str(trace) == STDIN == str(config):
            raise InputError("TRACE and --config are both -; standard input can be read only once")
        if trace and num_passes > 1 and not trace.is_file():
            raise InputError(f"--passes {num_passes}: {trace} cannot be read more than once")
        _check_choice("--spread", spread, SPREADS)
        options = ReplayOptions(
            concurrency=concurrency,
            verify=not no_verify,
            engine=engine,
            device=device,
            device_blocks=device_blocks,
            layers=layers,
            has_samples=bool(plot or report),
            should_stop=lambda: interrupt.is_requested,
        )
        open_source = partial(TraceFile, trace, limit) if trace else partial(ChatWorkload, limit)
        reports: PassReports | FleetReport
        if fleet is not None:
            of_fleet = FleetOptions(size=fleet, spread=spread, kill_at=fleet_kill)
            reports = replay_on_fleet(
                spec,
                open_source,
                of_fleet,
                options,
                passes=passes,
                scratch=scratch,
                console=console,
            )
            publish_fleet(reports, json)
        else:
            reports = replay_passes(
                spec,
                open_source,
                options,
                num_passes,
                follow=bar_per_pass(console, num_passes),
                watch=timelines.watch if timelines.is_wanted else None,
            )
            _publish(reports, json)
            if plot or report:
                publish_pictures(reports, trace, plot, report)
            timelines.publish(Console(stderr=json == STDOUT))
    for complaint in reports.complaints:
        complain(complaint)
    if reports.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if reports.complaints:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def check_config(
    file: Annotated[
        Path,
        typer.Argument(
            envvar=CONFIG_VARIABLE,
            help="Engine configuration, JSON or YAML; - reads standard input.",
        ),
    ],
) -> None:
    """Validate a configuration and print derived settings.

    The command does not start an engine and creates no files.
    """
    with errors_as_one_line():
        spec = TieringOffloadingSpec(read_config(file))
        Console().print(geometry_table(spec))


@app.command()
def tiers() -> None:
    """List the registered tier types and their options."""
    console = Console()
    for entry in tier_entries():
        console.print(Text.assemble((entry.name, "bold"), f": {entry.summary}"))
        if entry.options:
            console.print(option_table(entry.options))
    console.print(Text("Options of every tier:"))
    console.print(option_table(common_options()))


def _check_choice(option: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise InputError(f"{option} {value}: expected {' or '.join(allowed)}")


def _publish(reports: PassReports, json: str | None) -> None:
    if json != STDOUT:
        print_table(Console(), reports)
    if json is not None:
        write_figures("--json", json, reports.to_json())
