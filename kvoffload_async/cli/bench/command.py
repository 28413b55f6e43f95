"""`kvoffload bench`: from the command line to the figures."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from kvoffload_async.cli.bench.contender import Contender
from kvoffload_async.cli.bench.figures import Report, summarize
from kvoffload_async.cli.bench.floor import Floor
from kvoffload_async.cli.bench.peers import PEERS, load_peer
from kvoffload_async.cli.bench.plan import Plan
from kvoffload_async.cli.bench.rounds import measure, rehearse, turns
from kvoffload_async.cli.bench.tables import print_tables
from kvoffload_async.cli.bench.tiers import OwnTier
from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.interrupt import Interrupt
from kvoffload_async.cli.output import STDOUT, as_unwritable, check_writable, write_figures
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.errors import InputError
from kvoffload_async.runtime.buffer import PAGE_BYTES
from kvoffload_async.runtime.io_pool import suitable_threads

DEFAULT_TIERS: Final = ("slab", "fs")
"""What is measured if nobody asks for anything."""

_PLOT: Final = "kvoffload_async.cli.bench.plot"


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
) -> None:
    """Measure tiers on this machine, each beside what the machine can do.

    Every round measures in turn: memcpy; plain reads and writes of a preallocated file, in joined
    calls; every tier and peer, on a new store, or with --keep on that of the round before, in a
    directory that is removed afterwards. Bytes stay in the page cache where a tier does not bypass
    it. Every loaded block is compared with what was stored, after the clock has stopped.
    """
    with errors_as_one_line(), Interrupt() as interrupt, ExitStack() as stack:
        check_writable("--json", json)
        _check_plot(plot)
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
        names = tier or (() if peer else DEFAULT_TIERS)
        own = [OwnTier(text) for text in names]
        peers = [load_peer(text) for text in peer or ()]
        for one in own:
            one.check_capacity(plan.stored_bytes)
        contenders = _named_apart([*own, *peers])
        floors = _floors(contenders, plan, stack)
        rehearse(plan, contenders)
        report = _measured(plan, contenders, floors, [p.name for p in peers], interrupt)
        if report.sizes:
            _publish(report, json, plot)
    for complaint in report.complaints:
        complain(complaint)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.complaints:
        raise typer.Exit(EXIT_FAILED)


def _measured(
    plan: Plan,
    contenders: Sequence[Contender],
    floors: dict[str, Floor | None],
    peers: Sequence[str],
    interrupt: Interrupt,
) -> Report:
    different = list(dict.fromkeys(floor for floor in floors.values() if floor is not None))
    gauge = Gauge()
    gauge.expect(turns(plan, different, contenders))
    with progress_bar(Console(stderr=True), lambda: gauge.fraction_done, "bench") as on_change:
        gauge.on_change = on_change
        measured = measure(
            plan,
            different,
            contenders,
            on_turn=lambda: gauge.advance(1),
            should_stop=lambda: interrupt.is_requested,
        )
        sizes = tuple(summarize(samples, floors, peers) for samples in measured)
    return Report(
        interrupted=len(sizes) < len(plan.works),
        settings=_settings(plan),
        machine=_machine(),
        contenders={contender.name: _facts(contender, floors) for contender in contenders},
        sizes=sizes,
    )


def _named_apart(contenders: Sequence[Contender]) -> Sequence[Contender]:
    """Number those that have a name in common, so that each has figures of its own."""
    names = [contender.name for contender in contenders]
    for index, contender in enumerate(contenders):
        if names.count(names[index]) > 1:
            contender.name = f"{names[index]}#{names[: index + 1].count(names[index])}"
    return contenders


def _floors(
    contenders: Sequence[Contender], plan: Plan, stack: ExitStack
) -> dict[str, Floor | None]:
    """Return each one's floor: one a filesystem, since that is what is compared."""
    by_device: dict[int, Floor] = {}
    floors: dict[str, Floor | None] = {}
    for contender in contenders:
        place = contender.place
        if place is None:
            floors[contender.name] = None
            continue
        stack.enter_context(place)
        place.check_room(max(plan.room_bytes, _capacity_bytes(contender, plan)))
        floors[contender.name] = by_device.setdefault(place.device, Floor(place))
    return floors


def _capacity_bytes(contender: Contender, plan: Plan) -> int:
    """Return what it may take on disk besides what a round stores."""
    sizes = [contender.capacity_bytes(work.stored_bytes) or 0 for work in plan.works]
    return max(sizes) if plan.steady else 0


def _facts(contender: Contender, floors: dict[str, Floor | None]) -> dict[str, Any]:
    floor = floors[contender.name]
    return {
        "options": dict(contender.options),
        "directory": str(contender.place.path) if contender.place else None,
        "floor": floor.name if floor else None,
    }


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "total_bytes": plan.total_bytes,
        "keys_per_job": plan.keys_per_job,
        "one_job": plan.one_job,
        "in_flight": plan.in_flight,
        "rounds": plan.rounds,
        "threads": plan.threads,
        "direct_floor": plan.direct,
        "steady": plan.steady,
        "keep": plan.keep,
        "warm_up": plan.warm_up,
    }


def _machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES,
        "system": platform.platform(),
        "python": platform.python_version(),
        "kvoffload_async": version("kvoffload-async"),
    }


def _check_plot(path: Path | None) -> None:
    """Find out before the measuring whether the picture can be drawn."""
    if path is None:
        return
    check_writable("--plot", str(path))
    known = _plotter().check_suffix(path)
    if known is not None:
        raise InputError(
            f"--plot {path}: {path.suffix!r} is no kind of picture; use one of {known}"
        )


def _plotter() -> Any:  # noqa: ANN401 - a module
    try:
        return importlib.import_module(_PLOT)
    except ImportError as error:
        raise InputError(
            f"--plot needs matplotlib ({error}); pip install 'kvoffload-async[plot]'"
        ) from error


def _publish(report: Report, json: str | None, plot: Path | None) -> None:
    if json != STDOUT:
        print_tables(report)
    if json is not None:
        write_figures("--json", json, report.to_json())
    if plot is not None:
        with as_unwritable("--plot", str(plot)):
            _plotter().draw(report, plot)
