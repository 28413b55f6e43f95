"""`kvoffload store inspect|verify|gc|repair`: maintenance of the stores that tiers keep."""

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
from typing import Annotated, Final, TypeAlias

import typer
from rich.console import Console

from kvoffload_async.abc.maintenance import (
    MAX_LISTED,
    Finding,
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    RepairOptions,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Interrupt,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.logs import Verbose, logging_to
from kvoffload_async.cli.output import shown, summary_tables
from kvoffload_async.cli.progress import Gauge, progress_bar
from kvoffload_async.config import parse_size_bytes
from kvoffload_async.errors import ConfigError, InputError
from kvoffload_async.facade.maintenance import find_stores, maintenance_kinds

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[StoreMaintenance, MaintenanceControl], Findings]


@dataclass(slots=True)
class StoreReport:
    """The findings about one store.

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
        """Position for `--after`; empty if the work was not stopped, or cannot be resumed."""
        return "" if self.summary is None else self.summary.stopped_after

    def take_in(self, finding: Finding, max_listed: int | None) -> None:
        """Record a finding; problems are listed up to `max_listed`, and counted beyond that."""
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
    """Call a maintenance operation on every store in a directory and print the findings.

    Raises:
        typer.Exit: The command was interrupted, the input is bad, or a store has a problem.
    """
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
            typer.echo(f"kvoffload: stopped; resume with --after {shown(stopped_after)}", err=True)
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
    """Run the operation and return a report per store.

    Raises:
        InputError: There is no store, or a store cannot be read.
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
    # All operations are created before the first one runs, because that validates the options.
    stores = await find_stores(directory)
    if key_file is not None:
        for store in stores:
            store.use_integrity_key_file(str(key_file))
    calls = [(store, call(store, control)) for store in stores]
    for store, iterator in calls:
        if was_stopped or (control.should_stop() and not store.resumes):
            break
        was_stopped = control.should_stop()  # this store is still called, to report its position
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


Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIR|URL",
        help="root_dir of a tier, the folder of one slab store, or the url of an object tier. For "
        "a URL, credentials, region and endpoint come from the environment.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ListsAll = Annotated[
    bool,
    typer.Option(
        "--all", help=f"List all problems, not only the first {MAX_LISTED} of each store."
    ),
]
OlderThan = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Minimum age for removing temporary files of unknown writers, and unknown files.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--integrity-key-file",
        metavar="FILE",
        help="Key file of the tiers that wrote the blocks (their integrity_key_file), if any; "
        "needed to verify the blocks.",
        show_default=False,
    ),
]
After = Annotated[
    str,
    typer.Option(
        "--after",
        metavar="NAME",
        help="Object stores only: resume an interrupted run after the NAME that it printed.",
        show_default=False,
    ),
]


_MAX_MANIFEST_BYTES: Final = 1 << 20

store_app = typer.Typer(
    name="store",
    help="Maintain the stores of fs, slab and object tiers.\n\nTiers may have a store open "
    "meanwhile; only gc and repair of a slab store need exclusive access.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@store_app.command()
def inspect(
    directory: Directory,
    *,
    as_json: AsJson = False,
    lists_all: ListsAll = False,
    verbose: Verbose = False,
) -> None:
    """Count blocks and other files in each store. Read-only."""
    look_after(
        directory,
        "inspect",
        lambda store, control: store.inspect(control),
        as_json=as_json,
        lists_all=lists_all,
        verbose=verbose,
    )


@store_app.command()
def verify(
    directory: Directory,
    *,
    key_file: KeyFile = None,
    after: After = "",
    as_json: AsJson = False,
    lists_all: ListsAll = False,
    verbose: Verbose = False,
) -> None:
    """Read every block and check its length and checksum. Read-only."""
    look_after(
        directory,
        "verify",
        lambda store, control: _resumable(store, control).verify(control),
        key_file=key_file,
        after=after,
        as_json=as_json,
        lists_all=lists_all,
        verbose=verbose,
    )


@store_app.command()
def gc(
    directory: Directory,
    *,
    older_than: OlderThan = 3600.0,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Read every block and remove the corrupt ones.")
    ] = False,
    unknown_files: Annotated[
        bool, typer.Option("--unknown-files", help="Remove files that are not blocks.")
    ] = False,
    max_age: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Object stores only: remove blocks that were last written or renewed longer ago.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Object stores only: remove the oldest blocks until the rest fits this size, such "
            'as "1TiB".',
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be removed; remove nothing.")
    ] = False,
    key_file: KeyFile = None,
    after: After = "",
    as_json: AsJson = False,
    lists_all: ListsAll = False,
    verbose: Verbose = False,
) -> None:
    """Remove leftovers of crashed writers.

    Leftovers are temporary files, writer entries and empty directories. Files of running writers
    are kept. The byte count that fs tiers share is corrected.
    """
    with errors_as_one_line():
        options = GcOptions(
            older_than_s=older_than,
            corrupt=corrupt,
            unknown_files=unknown_files,
            dry_run=dry_run,
            max_age_s=max_age,
            keep_bytes=None if keep is None else parse_size_bytes(keep, "--keep"),
        )

    def call(store: StoreMaintenance, control: MaintenanceControl) -> Findings:
        if (max_age, keep) != (None, None) and not store.bounds_blocks:
            raise InputError(
                f"--max-age and --keep are for object stores; bound a {store.tier_type} store by "
                "its tier's capacity_bytes"
            )
        return _resumable(store, control).gc(options, control)

    look_after(
        directory,
        "gc",
        call,
        key_file=key_file,
        after=after,
        as_json=as_json,
        lists_all=lists_all,
        verbose=verbose,
        shows_part=True,
    )


@store_app.command()
def repair(
    directory: Directory,
    *,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replacement for a lost manifest.json of a slab store: that of another rank with "
            "the same model and block size.",
        ),
    ] = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
    lists_all: ListsAll = False,
    verbose: Verbose = False,
) -> None:
    """Keep all blocks that verify, and remove the rest.

    In a slab store, rewrite the manifest and the journal if they are damaged. An fs store has
    neither, so only its corrupt blocks are removed, as by `gc --corrupt`.
    """
    with errors_as_one_line():
        content = None if manifest is None else _read(manifest)

    def call(store: StoreMaintenance, control: MaintenanceControl) -> Findings:
        try:
            return store.repair(RepairOptions(manifest=content), control)
        except ConfigError as error:
            raise InputError(f"--manifest {manifest}: {error}") from error

    look_after(
        directory,
        "repair",
        call,
        key_file=key_file,
        as_json=as_json,
        lists_all=lists_all,
        verbose=verbose,
        shows_part=True,
    )


def _resumable(store: StoreMaintenance, control: MaintenanceControl) -> StoreMaintenance:
    """Return the store; raises InputError if `--after` is given but the store cannot resume."""
    if control.resume_after and not store.resumes:
        raise InputError(f"--after is for object stores; a {store.tier_type} store cannot resume")
    return store


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise InputError(f"--manifest {path}: cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_MANIFEST_BYTES:
        raise InputError(
            f"--manifest {path}: more than {_MAX_MANIFEST_BYTES} bytes; give a manifest.json"
        )
    return content
