"""What the commands of `kvoffload store` have in common: to run over stores, and to tell."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import typer
from rich.console import Console

from kvoffload_async.abc.maintenance import (
    MAX_LISTED,
    Finding,
    Findings,
    MaintenanceControl,
    Problem,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.interrupt import Interrupt
from kvoffload_async.cli.logs import logging_to
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.cli.store_tables import shown, summary_tables
from kvoffload_async.errors import InputError
from kvoffload_async.facade.maintenance import find_stores, maintenance_kinds

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[StoreMaintenance, MaintenanceControl], Findings]


@dataclass(slots=True)
class StoreReport:
    """What one store has come to.

    Attributes:
        store: The store.
        summary: Its figures; None if it was stopped before.
        problems: The first of what is wrong with it.
        num_unlisted: How much more is.
    """

    store: StoreMaintenance
    summary: Summary | None = None
    problems: list[Problem] = field(default_factory=list)
    num_unlisted: int = 0

    @property
    def stopped_after(self) -> str:
        """Where the work was stopped; empty where it was not, or begins anew."""
        return "" if self.summary is None else self.summary.stopped_after

    def take_in(self, finding: Finding, max_listed: int | None) -> None:
        """Note a finding; problems up to a number."""
        if isinstance(finding, Summary):
            self.summary = finding
        elif isinstance(finding, Problem):
            if max_listed is None or len(self.problems) < max_listed:
                self.problems.append(finding)
            else:
                self.num_unlisted += 1


def look_after(
    directory: str,
    title: str,
    call: Call,
    *,
    key_file: Path | None = None,
    after: str = "",
    as_json: bool,
    lists_all: bool,
    verbose: bool,
    shows_part: bool = False,
) -> None:
    """Look after every store in a directory, tell what was found, and end with a status."""
    console = Console(stderr=True)
    with (
        errors_as_one_line(),
        logging_to(console, verbose=verbose),
        Interrupt() as interrupt,
    ):
        max_listed = None if lists_all else MAX_LISTED
        with _followed(console, title, interrupt, max_listed, after) as control:
            reports = _run(directory, call, key_file, control)
        stopped_after = next(filter(None, (report.stopped_after for report in reports)), "")
        if stopped_after:
            typer.echo(f"kvoffload: stopped; go on with --after {shown(stopped_after)}", err=True)
        if interrupt.is_requested and not (shows_part or stopped_after):
            raise typer.Exit(EXIT_INTERRUPTED)
        _publish(directory, reports, as_json=as_json)
    for report in reports:
        for problem in report.problems:
            complain(shown(f"{report.store.name}: {problem.text}"))
        if report.num_unlisted:
            complain(shown(f"{report.store.name}: and {report.num_unlisted:,} more; see --all"))
    if interrupt.is_requested:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(report.problems for report in reports):
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _followed(
    console: Console, title: str, interrupt: Interrupt, max_listed: int | None, after: str
) -> Iterator[MaintenanceControl]:
    gauge = Gauge()
    with progress_bar(console, lambda: gauge.fraction_done, title) as on_change:
        gauge.on_change = on_change
        yield MaintenanceControl(
            expect=gauge.expect,
            advance=gauge.advance,
            should_stop=lambda: interrupt.is_requested,
            max_listed=max_listed,
            resume_after=after,
        )


def _run(
    directory: str, call: Call, key_file: Path | None, control: MaintenanceControl
) -> list[StoreReport]:
    """Return what every store has come to, and what is wrong with it.

    Raises:
        InputError: There is no store, or it cannot be read.
    """
    try:
        return asyncio.run(_find_and_call(directory, call, key_file, control))
    except OSError as error:
        where = error.filename or Path(directory).absolute()
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from error


async def _find_and_call(
    directory: str, call: Call, key_file: Path | None, control: MaintenanceControl
) -> list[StoreReport]:
    reports: list[StoreReport] = []
    was_stopped = False
    # All are called before the first one starts: that checks the options.
    stores = await find_stores(directory)
    if key_file is not None:
        for store in stores:
            store.use_integrity_key_file(str(key_file))
    calls = [(store, call(store, control)) for store in stores]
    for store, iterator in calls:
        if was_stopped or (control.should_stop() and not store.resumes):
            break
        was_stopped = control.should_stop()  # this one is still called, and says where to go on
        reports.append(StoreReport(store))
        async with aclosing(iterator) as findings:
            logger.info("%s: a store of the %s tier", shown(store.name), store.tier_type)
            began_s = time.monotonic()
            async for finding in findings:
                reports[-1].take_in(finding, control.max_listed)
                if isinstance(finding, Problem):
                    logger.info("%s: %s", shown(store.name), shown(finding.text))
            logger.info("%s: done after %.1f s", shown(store.name), time.monotonic() - began_s)
        was_stopped = was_stopped or reports[-1].stopped_after != ""
    return reports


def _publish(directory: str, reports: Sequence[StoreReport], *, as_json: bool) -> None:
    summaries = [(found.store, found.summary) for found in reports if found.summary is not None]
    if not as_json:
        for table in summary_tables(summaries):
            Console().print(table)
        return
    report: dict[str, object] = {
        "directory": directory if "://" in directory else str(Path(directory))
    }
    for kind in maintenance_kinds():
        report[kind.report_key] = [
            found.figures for store, found in summaries if isinstance(store, kind)
        ]
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
