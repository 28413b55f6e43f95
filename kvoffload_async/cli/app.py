"""The commands of `kvoffload`, and the tables of `tiers`; `command` defines the exit statuses."""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvoffload_async.block_io.choice import implementation
from kvoffload_async.cli.bench import BenchOptions, bench
from kvoffload_async.cli.cache import cache
from kvoffload_async.cli.command import (
    OneLineGroup,
    command,
    errors_as_one_line,
    finish,
    running,
)
from kvoffload_async.cli.host_config import derived_settings, geometry_table, host_config
from kvoffload_async.cli.output import (
    STDOUT,
    check_page,
    check_picture,
    check_writable,
    publish,
)
from kvoffload_async.cli.replay_report import (
    PLOT,
    TimelineOutput,
    bar_of_pass,
    check_explained,
    print_table,
    publish_pictures,
)
from kvoffload_async.cli.settings import (
    BUILT_IN_PASSES,
    CONFIG_VARIABLE,
    ReplayFlags,
    ScratchFolder,
    read_config,
    resolve,
)
from kvoffload_async.cli.simulate import SimulateOptions, simulate
from kvoffload_async.cli.store import store_app
from kvoffload_async.cli.top import top
from kvoffload_async.config import REQUIRED, Option, TierOptions
from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import EngineTierOptions, SecondaryTierFactory
from kvoffload_async.facade.tier_options import options_of
from kvoffload_async.replay.drivers import ENGINES, ReplayOptions
from kvoffload_async.replay.run import replay_passes
from kvoffload_async.replay.source import ChatWorkload, RequestSource, TraceFile

if TYPE_CHECKING:
    from kvoffload_async.transport.streams import DeviceRuntime

app = typer.Typer(
    cls=OneLineGroup,
    help="A multi-tier KV-cache offload engine for LLM serving: replay traces, benchmark tiers, "
    "monitor engines, maintain stores.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command(app, BenchOptions)(bench)
command(app, SimulateOptions)(simulate)
app.command()(top)
app.command()(cache)
app.add_typer(store_app)


def main() -> None:
    """Run the `kvoffload` command; never returns."""
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


_DEVICES: Final = ("cpu", "cuda")


@command(app, ReplayFlags)
def replay(given: ReplayFlags) -> None:
    """Replay a serving trace through the whole engine.

    The replay moves real data, and compares every loaded block with the stored one. Without a
    trace and a tier, it replays a built-in workload twice over files in a temporary directory.
    """
    with (
        running(given) as (console, interrupt),
        ScratchFolder() as scratch,
        closing(TimelineOutput(given.explain, given.trace_out)) as timelines,
    ):
        trace = given.trace
        check_writable("--json", given.json)
        check_picture("--plot", given.plot, PLOT)
        check_page("--report", given.report, PLOT)
        check_choice("--engine", given.engine, ENGINES)
        check_choice("--device", given.device, _DEVICES)
        spec = timelines.recording(resolve(given, scratch), given.concurrency)
        num_passes = given.passes or (BUILT_IN_PASSES if scratch.is_used else 1)
        if given.arrivals is None and not given.prefetch:
            raise InputError("--no-prefetch: no request waits; give --arrivals, too")
        if trace and num_passes > 1 and not trace.is_file():
            raise InputError(f"--passes {num_passes}: {trace} cannot be read more than once")
        open_source = partial(open_requests, given)
        if given.explain is not None and (trace is None or trace.is_file()):
            check_explained(given.explain, open_source)
        options = ReplayOptions(
            concurrency=given.concurrency,
            arrivals=given.arrivals,
            prefetch=given.prefetch,
            engine=given.engine,
            runtime=_runtime_of(given.device),
            device_blocks=given.device_blocks,
            has_samples=bool(given.plot or given.report),
            should_stop=lambda: interrupt.is_requested,
        )
        reports = replay_passes(
            spec,
            open_source,
            options,
            num_passes,
            follow=partial(bar_of_pass, console, num_passes),
            watch=timelines.watch if timelines.is_wanted else None,
        )
        publish(given.json, partial(print_table, reports), reports.to_json())
        if given.plot or given.report:
            publish_pictures(reports, trace, given.plot, given.report)
        timelines.publish(Console(stderr=given.json == STDOUT))
    finish(reports.complaints, interrupted=reports.interrupted)


def open_requests(given: ReplayFlags) -> RequestSource:
    """Return the requests of a trace, or those of the built-in workload."""
    per_chunk = given.blocks_per_chunk or 1
    if given.trace is None:
        return ChatWorkload(given.limit, blocks_per_chunk=per_chunk)
    return TraceFile(given.trace, given.limit, per_chunk)


def _runtime_of(device: str) -> DeviceRuntime | None:
    """Return a device's runtime, None for the host; raises ConfigError if it is unavailable."""
    if device == "cpu":
        return None
    from kvoffload_async.transport.streams import DeviceRuntime  # noqa: PLC0415 - loads torch

    runtime = DeviceRuntime()
    if not runtime.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; give cpu")
    return runtime


@app.command()
def check_config(
    file: Annotated[
        Path,
        typer.Argument(
            envvar=CONFIG_VARIABLE,
            help="Configuration of an engine or of a host, JSON or YAML; - reads standard input.",
        ),
    ],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the derived settings as JSON.")
    ] = False,
) -> None:
    """Validate a configuration and print derived settings.

    The command does not start an engine and creates no files. It also accepts the JSON of vLLM's
    --kv-transfer-config, LMCache's --l2-adapter and SGLang's
    --hicache-storage-backend-extra-config, and checks them as these hosts do; none need be
    installed. What only the host knows, such as the size of a block, is not checked.
    """
    with errors_as_one_line():
        config = read_config(file)
        found = host_config(config)
        spec = TieringOffloadingSpec(found.engine | found.placeholders)
        figures = derived_settings(spec, found)
        if as_json:
            typer.echo(json.dumps(figures, indent=2))
        else:
            Console().print(geometry_table(figures))


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


def check_choice(option: str, value: str, allowed: Collection[str]) -> None:
    """Check that the value of an option is allowed; raises InputError."""
    if value not in allowed:
        raise InputError(f"{option} {value}: expected {' or '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One registered tier.

    Attributes:
        name: Its `type` in the configuration.
        summary: One line; the reason if the tier cannot be used.
        options: Its own options, without those common to all tiers.
    """

    name: str
    summary: str
    options: tuple[Option, ...] = ()


def tier_entries() -> list[TierEntry]:
    """Return every registered tier, including those that cannot be imported."""
    return [_entry(name) for name in SecondaryTierFactory.names()]


def common_options() -> list[Option]:
    """Return the options common to all tiers, including those handled by the factory."""
    return TierOptions.described() + EngineTierOptions.described()


def _entry(name: str) -> TierEntry:
    try:
        cls = SecondaryTierFactory.get_tier_class(name)
    except (ImportError, AttributeError, ConfigError) as error:
        return TierEntry(name, f"cannot be used: {error}")
    lines = (inspect.getdoc(cls.tier_class or cls) or "").splitlines()
    return TierEntry(name, lines[0] if lines else "", tuple(_own_options(cls)))


def _own_options(cls: type[SecondaryTierManager]) -> Iterator[Option]:
    """Yield the options that are specific to a tier, with their declared summaries."""
    declares = cls.tier_class.declares if cls.tier_class else None
    summaries = {one.name: one.summary for one in declares.described()} if declares else {}
    for name, default in options_of(cls).items():
        if name not in options_of(SecondaryTierManager):
            yield Option(name, default, summaries.get(name, ""))


def option_table(options: Sequence[Option]) -> Table:
    """Return a table of a tier's options."""
    table = Table("option", "default", "")
    for option in options:
        default = "required" if option.default is REQUIRED else json.dumps(option.default)
        table.add_row(option.name, Text(default), Text(option.summary))
    return table
