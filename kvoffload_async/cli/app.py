"""The commands; `ending` says what their exit status means."""

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
    help="A multi-tier KV-cache offload engine: replays traces, looks after what tiers leave.",
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
    """Print versions, and end."""
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
            help="Print versions, and what moves blocks: native code or Python, and why.",
        ),
    ] = False,
) -> None:
    """Take what is not of one command."""


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="JSON lines with hash_ids, - for standard input; without it, a built-in chat "
            "workload."
        ),
    ] = None,
    *,
    primary_blocks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Capacity of the primary tier, in blocks."),
    ] = None,
    primary_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help='The same, in bytes, such as "1GiB".')
    ] = None,
    block_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of one block; by default 16KiB.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="lru|arc", help="Eviction policy; by default lru.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE[:key=value,...]",
            help="A secondary tier; repeat it for more, in the order of lookup. See `tiers`.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar=CONFIG_VARIABLE,
            help="JSON or YAML of engine settings, - for standard input; flags override it.",
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
            help="Replay N times, each time on a new engine over the same tiers; by default 1, "
            "and 2 for the built-in workload over its own tier.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, metavar="K", help="Requests in flight at once.")
    ] = 1,
    engine: Annotated[
        str,
        typer.Option(
            metavar="sync|async",
            help="sync: a scheduler's adapter, step by step; async: OffloadEngine, on a loop.",
        ),
    ] = "sync",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where the simulated device memory lies.")
    ] = "cpu",
    device_blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Blocks that the device has room for, which it also keeps between requests; by "
            "default enough for the requests in flight, and it keeps nothing.",
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option(min=1, metavar="L", help="Tensors of the device memory.")
    ] = 2,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the loaded bytes.")
    ] = False,
    fleet: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="N processes, each with a primary and a slab of its own, share the other tiers: "
            "three passes, alone, in lockstep, and free-running.",
        ),
    ] = None,
    spread: Annotated[
        str,
        typer.Option(
            metavar="random|affinity",
            help="Which process of a fleet gets a request: any, or the one that knows its prefix.",
        ),
    ] = RANDOM,
    fleet_kill: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Kill the process that gets the K-th request while it works, and replace it.",
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="PATH|-", help="Write the figures as JSON; - for standard output."),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Print what request N went through, in each pass; the first one is 0.",
        ),
    ] = None,
    trace_out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write what every request went through, as trace events that Perfetto opens.",
        ),
    ] = None,
    status_socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Serve the engine's status there, for `kvoffload top`."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw how it went; needs kvoffload-async[plot]."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="HTML",
            help="Write figures and pictures as one page; needs kvoffload-async[plot].",
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Replay a serving trace through the whole engine, with real bytes.

    Without a trace and a tier: a built-in workload over files in a temporary directory, twice.
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
            raise InputError("- is both TRACE and --config; standard input can be read once")
        if trace and num_passes > 1 and not trace.is_file():
            raise InputError(f"--passes {num_passes}: {trace} is no file that can be read again")
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
            envvar=CONFIG_VARIABLE, help="JSON or YAML of settings; - for standard input."
        ),
    ],
) -> None:
    """Check a configuration, and show what follows from it; nothing is started."""
    with errors_as_one_line():
        spec = TieringOffloadingSpec(read_config(file))
        Console().print(geometry_table(spec))


@app.command()
def tiers() -> None:
    """List the registered tiers and the options that they take."""
    console = Console()
    for entry in tier_entries():
        console.print(Text.assemble((entry.name, "bold"), f": {entry.summary}"))
        if entry.options:
            console.print(option_table(entry.options))
    console.print(Text("Options of every tier:"))
    console.print(option_table(common_options()))


def _check_choice(option: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise InputError(f"{option} {value}: it must be {' or '.join(allowed)}")


def _publish(reports: PassReports, json: str | None) -> None:
    if json != STDOUT:
        print_table(Console(), reports)
    if json is not None:
        write_figures("--json", json, reports.to_json())
