"""`kvoffload replay --fleet N`: several processes over one shared tier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvoffload_async.cli.output import STDOUT, write_figures
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.cli.settings import ScratchFolder
from kvoffload_async.errors import InputError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.fleet import FleetOptions, FleetReport, run_fleet
from kvoffload_async.replay.run import SYNC, ReplayOptions
from kvoffload_async.replay.source import RequestSource

_TITLES = {"alone": "each alone", "lockstep": "shared, in lockstep", "free": "shared, free-running"}


def replay_on_fleet(
    spec: TieringOffloadingSpec,
    open_source: Callable[[], RequestSource],
    fleet: FleetOptions,
    given: ReplayOptions,
    *,
    passes: int | None,
    scratch: ScratchFolder,
    console: Console,
) -> FleetReport:
    """Replay on a fleet; raises what `run_fleet` does, and InputError for what does not go with it.

    Args:
        spec: Of one process.
        open_source: Returns the requests.
        fleet: What is of fleets alone.
        given: What was asked for of any replay.
        passes: How many passes were asked for; a fleet has its own.
        scratch: Where processes may have slabs.
        console: Where a progress bar may be shown.
    """
    for option, is_plain in (
        ("--passes", passes in {None, 1}),
        ("--engine", given.engine == SYNC),
        ("--device", given.device == "cpu"),
        ("--device-blocks", given.device_blocks is None),
        ("--concurrency", given.concurrency == 1),
        ("--plot or --report", not given.has_samples),
        ("--explain or --trace-out", not spec.config.explain_requests),
        ("--status-socket", spec.config.status_socket is None),
    ):
        if not is_plain:
            raise InputError(f"{option} does not go with --fleet; leave it out")
    with closing(open_source()) as source:
        requests = list(source)
    done = 0.0

    def set_done(fraction: float) -> None:
        nonlocal done
        done = fraction
        on_step()

    with progress_bar(console, lambda: done, "fleet") as on_step:
        options = replace(
            fleet,
            verify=given.verify,
            layers=given.layers,
            should_stop=given.should_stop,
            on_step=set_done,
        )
        return run_fleet(spec.config, requests, options, Path(scratch.path))


def publish_fleet(report: FleetReport, json: str | None) -> None:
    """Print the figures for people, and write them for programs where that was asked for."""
    if json != STDOUT:
        _print_tables(Console(), report)
    if json is not None:
        write_figures("--json", json, report.to_json())


def _print_tables(console: Console, report: FleetReport) -> None:
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
    costs = Table("tier", "", title="What moved", title_justify="left")
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
