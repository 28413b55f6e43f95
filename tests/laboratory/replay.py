"""`replay` of the laboratory: the package's command, also on a fleet of processes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from kvoffload_async.cli.app import check_choice, open_requests
from kvoffload_async.cli.app import replay as replay_alone
from kvoffload_async.cli.command import errors_as_one_line, finish, flag, running
from kvoffload_async.cli.output import Gauge, check_writable, progress_bar, publish
from kvoffload_async.cli.settings import ReplayFlags, ScratchFolder, resolve
from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import InputError
from laboratory.fleet.plan import RANDOM, SPREADS
from laboratory.fleet.run import PASSES, FleetOptions, FleetReport, run_fleet

_MOST_PROCESSES: Final = 256
_REFUSED: Final = (
    *("passes", "engine", "device", "device_blocks", "concurrency"),
    *("plot", "report", "explain", "trace_out"),
)
"""Options of a replay that a fleet does not take."""
_TITLES: Final = {
    "alone": "each alone",
    "lockstep": "shared, in lockstep",
    "free": "shared, free-running",
}


@dataclass(frozen=True, kw_only=True)
class FleetFlags(ReplayFlags):
    """The options of a replay, and those of a fleet."""

    fleet: int | None = flag(
        None,
        "Replay on N processes. Each has its own primary and slab tier; all other tiers are "
        "shared. Three passes: nothing shared, shared in lockstep, shared free-running.",
        metavar="N",
        min=1,
        max=_MOST_PROCESSES,
    )
    spread: str | None = flag(
        None,
        "Routing within a fleet: random, or affinity, to the process that has seen at least half "
        "of the prompt. Default: random.",
        metavar="random|affinity",
    )
    fleet_kill: int | None = flag(
        None,
        "Kill the process that handles the K-th request, before it in lockstep and amid it in the "
        "free-running pass, and start a replacement.",
        metavar="K",
        min=1,
    )


def replay(given: FleetFlags) -> None:
    """Replay a trace as `kvoffload replay` does, or on a fleet of processes that share a tier."""
    if given.fleet is None:
        with errors_as_one_line():
            for option, value in (("--spread", given.spread), ("--fleet-kill", given.fleet_kill)):
                if value is not None:
                    raise InputError(f"{option} {value}: needs --fleet; give both, or neither")
        replay_alone(given)
        return
    with running(given) as (console, interrupt), ScratchFolder() as scratch:
        check_writable("--json", given.json)
        spread = given.spread or RANDOM
        check_choice("--spread", spread, SPREADS)
        config = resolve(given, scratch).config
        _check_combination(given, config)
        with closing(open_requests(given)) as source:
            requests = list(source)
        gauge = Gauge()
        gauge.expect(len(PASSES) * len(requests))
        with progress_bar(console, gauge.fraction_done, "fleet"):
            options = FleetOptions(
                size=given.fleet,
                spread=spread,
                kill_at=given.fleet_kill,
                should_stop=lambda: interrupt.is_requested,
                on_request=lambda: gauge.advance(1),
            )
            report = run_fleet(config, requests, options, Path(scratch.path))
        publish(given.json, partial(print_fleet, report), report.to_json())
    finish(report.complaints, interrupted=report.interrupted)


def _check_combination(given: FleetFlags, config: OffloadConfig) -> None:
    """Raise InputError if an option or a setting cannot be combined with a fleet."""
    defaults = ReplayFlags()
    refused = [
        f"--{name.replace('_', '-')}"
        for name in _REFUSED
        if getattr(given, name) != getattr(defaults, name)
    ]
    refused += [key for key in ("status_socket", "record_trace") if getattr(config, key)]
    if refused:
        raise InputError(f"{refused[0]} cannot be combined with --fleet; omit it")


def print_fleet(report: FleetReport, console: Console) -> None:
    """Print the figures of a fleet as tables."""
    title = f"{report.fleet} processes, {report.spread}"
    table = Table(title=f"{title}, interrupted" if report.interrupted else title)
    table.title_justify = "left"
    table.add_column(style="bold")
    for name in ("hit ratio", "jobs / results / failed", "corrupt", "killed", "wall time"):
        table.add_column(name, justify="right")
    for one in report.passes:
        total = one.total
        jobs = (total.jobs_submitted, total.job_results, total.job_failures)
        table.add_row(
            _TITLES[one.name],
            f"{total.hit_ratio:.4f}",
            " / ".join(f"{count:,}" for count in jobs),
            f"{total.corrupt_blocks:,}",
            f"{one.killed:,}",
            f"{one.wall_s:.1f} s",
        )
    table.add_row("one unbounded cache", f"{report.unbounded:.4f}", "", "", "", "")
    console.print(table)
    costs = Table("tier", "", title="Traffic of shared tiers", title_justify="left")
    for name in ("requests", "GiB stored", "GiB loaded"):
        costs.add_column(name, justify="right")
    for one in report.passes:
        for tier, cost in one.costs.items():
            costs.add_row(
                tier,
                _TITLES[one.name],
                f"{cost['requests']:,.0f}",
                f"{cost['stored_gib']:.3f}",
                f"{cost['loaded_gib']:.3f}",
            )
    console.print(costs)
