"""`kvoffload replay --fleet N`: several processes that share a tier."""

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
    """Replay on a fleet and return the figures of its three passes.

    Args:
        spec: Configuration of one process.
        open_source: Returns the requests.
        fleet: Options of the fleet.
        given: Options of any replay.
        passes: Value of `--passes`, which a fleet does not take.
        scratch: Directory for the processes' slabs.
        console: Shows the progress bar.

    Raises:
        InputError: An option cannot be combined with `--fleet`; also the errors of `run_fleet`.
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
            raise InputError(f"{option} cannot be combined with --fleet; omit it")
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
    """Print the figures as tables and, if `json` is given, write them as JSON."""
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
