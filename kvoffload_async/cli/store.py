"""`kvoffload store inspect|verify|gc`: maintenance of the stores that tiers keep."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import typer
from rich.console import Console

from kvoffload_async.abc.maintenance import (
    MAX_LISTED,
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.cli.command import (
    EXIT_INTERRUPTED,
    CommandOptions,
    argument,
    command,
    finish,
    flag,
    running,
)
from kvoffload_async.cli.output import Gauge, progress_bar, shown, summary_tables
from kvoffload_async.config import parse_size_bytes
from kvoffload_async.errors import InputError
from kvoffload_async.facade.maintenance import find_stores, maintenance_kinds
from kvoffload_async.facade.tenants import tag_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoreOptions(CommandOptions):
    """The options of every `kvoffload store` command."""

    directory: str = argument(
        "root_dir of a tier, the folder of one slab store, or the url of an object tier. For a "
        "URL, credentials, region and endpoint come from the environment.",
        metavar="DIR|URL",
        show_default=False,
    )
    as_json: bool = flag(False, "Print JSON instead of tables.", "--json")
    verbose: bool = flag(
        False,
        "Print the log at level DEBUG, and list all problems, not only the first "
        f"{MAX_LISTED} of each store.",
        "--verbose",
        "-v",
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(StoreOptions):
    """The options of `kvoffload store verify`, and some of `gc`."""

    key_file: Path | None = flag(
        None,
        "Key file of the tiers that wrote the blocks (their integrity_key_file), if any; needed to "
        "verify the blocks.",
        "--integrity-key-file",
        metavar="FILE",
        show_default=False,
    )
    encryption_key_files: list[Path] | None = flag(
        None,
        "Key file of the tiers that encrypted the blocks (their encryption_key_file), if any; "
        "repeat the option for several.",
        "--encryption-key-file",
        metavar="FILE",
        show_default=False,
    )
    after: str = flag(
        "",
        "Object stores only: resume an interrupted run after the NAME that it printed.",
        "--after",
        metavar="NAME",
        show_default=False,
    )

    def use_keys(self, store: StoreMaintenance) -> None:
        """Have a store verify with the given keys."""
        if self.key_file is not None:
            store.use_integrity_key_file(str(self.key_file))
        if self.encryption_key_files:
            store.use_encryption_key_files(list(map(str, self.encryption_key_files)))


@dataclass(frozen=True, kw_only=True)
class GcFlags(VerifyOptions):
    """The options of `kvoffload store gc`."""

    older_than: float = flag(
        3600.0,
        "Minimum age for removing temporary files of unknown writers, and unknown files.",
        metavar="SECONDS",
        min=0,
    )
    corrupt: bool = flag(False, "Read every block and remove the corrupt ones.", "--corrupt")
    unknown_files: bool = flag(False, "Remove files that are not blocks.", "--unknown-files")
    max_age: float | None = flag(
        None,
        "Object stores only: remove blocks that were last written or renewed longer ago.",
        metavar="SECONDS",
        min=0,
        show_default=False,
    )
    keep: str | None = flag(
        None,
        "Object stores only: remove the oldest blocks until the rest fits this size, such as "
        '"1TiB".',
        metavar="BYTES",
        show_default=False,
    )
    tenant: str | None = flag(
        None,
        "Remove all blocks of this tenant; end its requests first.",
        metavar="NAME",
        show_default=False,
    )
    dry_run: bool = flag(False, "Report what would be removed; remove nothing.", "--dry-run")


Call: TypeAlias = Callable[[StoreMaintenance, MaintenanceControl], Findings]


@dataclass(slots=True)
class StoreReport:
    """The findings of a maintenance command about one store.

    Attributes:
        store: The store.
        summary: The store's figures; None if the command was stopped before the store's end.
        problems: The first problems found, up to the listing limit.
        num_unlisted: Number of further problems.
    """

    store: StoreMaintenance
    summary: Summary | None = None
    problems: list[Problem] = field(default_factory=list)
    num_unlisted: int = 0

    @property
    def stopped_after(self) -> str:
        """Position for `--after`; empty if the command was not stopped, or cannot be resumed."""
        return "" if self.summary is None else self.summary.stopped_after

    @property
    def complaints(self) -> Iterator[str]:
        """The problems, one line each."""
        for problem in self.problems:
            yield f"{self.store.name}: {problem.text}"
        if self.num_unlisted:
            yield f"{self.store.name}: and {self.num_unlisted:,} more; see --verbose"

    def add(self, problem: Problem, max_listed: int | None) -> None:
        """Record a problem; it is listed up to `max_listed`, and counted beyond that."""
        if max_listed is None or len(self.problems) < max_listed:
            self.problems.append(problem)
        else:
            self.num_unlisted += 1


def look_after(given: StoreOptions, title: str, call: Call, *, shows_part: bool = False) -> None:
    """Call a maintenance operation on every store in a directory and print the findings.

    Raises:
        typer.Exit: The command was interrupted, the input is bad, or a store has a problem.
    """
    with running(given) as (console, interrupt):
        gauge = Gauge()
        control = MaintenanceControl(
            expect=gauge.expect,
            advance=gauge.advance,
            should_stop=lambda: interrupt.is_requested,
            max_listed=None if given.verbose else MAX_LISTED,
            resume_after=given.after if isinstance(given, VerifyOptions) else "",
        )
        with progress_bar(console, gauge.fraction_done, title):
            reports = _run(given, call, control)
        stopped_after = next(filter(None, (report.stopped_after for report in reports)), "")
        if stopped_after:
            typer.echo(f"kvoffload: stopped; resume with --after {shown(stopped_after)}", err=True)
        if interrupt.is_requested and not (shows_part or stopped_after):
            raise typer.Exit(EXIT_INTERRUPTED)
        _publish(given, reports)
    complaints = [shown(line) for report in reports for line in report.complaints]
    finish(complaints, interrupted=interrupt.is_requested)


def _run(given: StoreOptions, call: Call, control: MaintenanceControl) -> list[StoreReport]:
    """Run the maintenance operation on every store, and return a report per store.

    Raises:
        InputError: There is no store, or a store cannot be read.
    """
    try:
        return asyncio.run(_find_and_call(given, call, control))
    except OSError as error:
        where = error.filename or Path(given.directory).absolute()
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from error


async def _find_and_call(
    given: StoreOptions, call: Call, control: MaintenanceControl
) -> list[StoreReport]:
    reports: list[StoreReport] = []
    # All operations are created before the first one runs, because that validates the options.
    stores = await find_stores(given.directory)
    for store in stores:
        if control.resume_after and not store.resumes:
            raise InputError(
                f"--after is for object stores; a {store.tier_type} store cannot resume"
            )
        if isinstance(given, VerifyOptions):
            given.use_keys(store)
    calls = [(store, call(store, control)) for store in stores]
    for store, iterator in calls:
        # A store that can resume is called even then, to report the position.
        if control.should_stop() and not store.resumes:
            break
        report, name = StoreReport(store), shown(store.name)
        reports.append(report)
        async with aclosing(iterator) as findings:
            logger.info("%s: a store of the %s tier", name, store.tier_type)
            began_s = time.monotonic()
            async for finding in findings:
                if isinstance(finding, Summary):
                    report.summary = finding
                elif isinstance(finding, Problem):
                    report.add(finding, control.max_listed)
                    logger.info("%s: %s", name, shown(finding.text))
            logger.info("%s: done after %.1f s", name, time.monotonic() - began_s)
        if report.stopped_after:
            break
    return reports


def _publish(given: StoreOptions, reports: Sequence[StoreReport]) -> None:
    summaries = [(found.store, found.summary) for found in reports if found.summary is not None]
    if not given.as_json:
        for table in summary_tables(summaries):
            Console().print(table)
        return
    where = given.directory if "://" in given.directory else str(Path(given.directory))
    report: dict[str, object] = {"directory": where}
    for kind in maintenance_kinds():
        report[kind.report_key] = [
            found.figures for store, found in summaries if isinstance(store, kind)
        ]
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


store_app = typer.Typer(
    name="store",
    help="Maintain the stores of fs, slab and object tiers.\n\nTiers may have a store open "
    "meanwhile; only gc of a slab store needs exclusive access.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@command(store_app, StoreOptions)
def inspect(given: StoreOptions) -> None:
    """Count blocks and other files in each store. Read-only."""
    look_after(given, "inspect", lambda store, control: store.inspect(control))


@command(store_app, VerifyOptions)
def verify(given: VerifyOptions) -> None:
    """Read every block and check its length and checksum. Read-only."""
    look_after(given, "verify", lambda store, control: store.verify(control))


@command(store_app, GcFlags)
def gc(given: GcFlags) -> None:
    """Remove leftovers of crashed writers.

    Leftovers are temporary files, writer entries and empty directories, also those of a store
    without blocks. Files of running writers are kept. The byte count that fs tiers share is
    corrected.
    """

    def call(store: StoreMaintenance, control: MaintenanceControl) -> Findings:
        options = GcOptions(
            older_than_s=given.older_than,
            corrupt=given.corrupt,
            unknown_files=given.unknown_files,
            dry_run=given.dry_run,
            max_age_s=given.max_age,
            keep_bytes=None if given.keep is None else parse_size_bytes(given.keep, "--keep"),
            tenant_tag=None if given.tenant is None else tag_of(given.tenant),
        )
        if (given.max_age, given.keep) != (None, None) and not store.bounds_blocks:
            raise InputError(
                f"--max-age and --keep are for object stores; bound a {store.tier_type} store by "
                "its tier's capacity_bytes"
            )
        return store.gc(options, control)

    look_after(given, "gc", call, shows_part=True)
