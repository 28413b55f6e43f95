"""`kvoffload store inspect|verify|gc`: looks into directories of the `fs` tier, and cleans up."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import anyio
import typer
from rich.console import Console

from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.interrupt import Interrupt
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.cli.store.collection import Collected, Wishes, collect
from kvoffload_async.cli.store.inspection import Inspection, inspect_store
from kvoffload_async.cli.store.namespaces import FoundNamespace, find_namespaces
from kvoffload_async.cli.store.survey import Walker
from kvoffload_async.cli.store.tables import (
    collection_table,
    inspection_table,
    shown,
    verification_table,
)
from kvoffload_async.cli.store.verification import Verification, verify_blocks
from kvoffload_async.tiers.fs.ops import FileOps

T = TypeVar("T")

IO_THREADS: Final = 4
"""Threads that are in a system call at once; more lose on a local disk."""

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The tier's root_dir.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

store_app = typer.Typer(
    name="store",
    help="Look after directories of the fs tier, whether or not tiers are open on them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@store_app.command()
def inspect(directory: Directory, *, as_json: AsJson = False) -> None:
    """Count what is there, by namespace; changes nothing."""

    async def work(walker: Walker, namespaces: list[FoundNamespace]) -> list[Inspection]:
        return [inspection for inspection, _ in await inspect_store(walker, namespaces)]

    with errors_as_one_line():
        inspections, _ = _run(directory, "inspect", work)
        if as_json:
            _print_json(directory, [inspection.to_dict() for inspection in inspections])
        else:
            Console().print(inspection_table(inspections))
    _end([(i.name, problem) for i in inspections for problem in i.problems])


@store_app.command()
def verify(directory: Directory, *, as_json: AsJson = False) -> None:
    """Read every block, and check its length and checksum; changes nothing."""

    async def work(
        walker: Walker, namespaces: list[FoundNamespace]
    ) -> list[tuple[Inspection, Verification]]:
        return [
            (inspection, await verify_blocks(walker, namespace, survey.blocks))
            for namespace, (inspection, survey) in zip(
                namespaces, await inspect_store(walker, namespaces), strict=True
            )
        ]

    with errors_as_one_line():
        results, _ = _run(directory, "verify", work)
        if as_json:
            _print_json(
                directory, [i.to_dict() | {"verification": v.to_dict()} for i, v in results]
            )
        else:
            Console().print(verification_table([(i.name, v) for i, v in results]))
    _end([(i.name, problem) for i, v in results for problem in (*i.problems, *v.problems)])


@store_app.command()
def gc(
    directory: Directory,
    *,
    older_than: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Age from which temporary files of unknown writers, and strangers, may go.",
        ),
    ] = 3600.0,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Read every block, and remove the corrupt ones.")
    ] = False,
    strangers: Annotated[
        bool, typer.Option("--strangers", help="Remove files that are no blocks.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; tell what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody will use; what living writers own stays.

    That is: temporary files and entries of dead writers, old temporary files of unknown ones,
    empty folders, and on demand corrupt blocks and strangers. The tiers' shared count of bytes is
    right afterwards.
    """
    wishes = Wishes(older_than_s=older_than, corrupt=corrupt, strangers=strangers, dry_run=dry_run)

    async def work(walker: Walker, namespaces: list[FoundNamespace]) -> list[Collected]:
        return [
            await collect(walker, namespace, wishes)
            for namespace in namespaces
            if not walker.should_stop()
        ]

    with errors_as_one_line():
        results, is_interrupted = _run(directory, "gc", work, shows_part=True)
        if as_json:
            _print_json(directory, [collected.to_dict() for collected in results])
        else:
            Console().print(collection_table(results))
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    _end([(c.name, failure) for c in results for failure in (*c.failures, *c.still_wrong)])


def _run(
    directory: Path,
    title: str,
    work: Callable[[Walker, list[FoundNamespace]], Awaitable[T]],
    *,
    shows_part: bool = False,
) -> tuple[T, bool]:
    """Do the work on a store's namespaces; return what it returns, and whether it was stopped.

    Raises:
        InputError: There is no store.
        typer.Exit: It was interrupted, and a part of the result is of no use.
    """
    gauge = Gauge()
    root = directory.absolute()

    async def main(should_stop: Callable[[], bool]) -> T:
        namespaces = await find_namespaces(root)
        walker = Walker(FileOps(), anyio.CapacityLimiter(IO_THREADS), gauge, should_stop)
        return await work(walker, namespaces)

    with (
        Interrupt() as interrupt,
        progress_bar(Console(stderr=True), lambda: gauge.fraction_done, title) as on_change,
    ):
        gauge.on_change = on_change
        result = anyio.run(main, lambda: interrupt.is_requested)
    if interrupt.is_requested and not shows_part:
        raise typer.Exit(EXIT_INTERRUPTED)
    return result, interrupt.is_requested


def _print_json(directory: Path, namespaces: list[dict[str, Any]]) -> None:
    report = {"directory": str(directory), "namespaces": namespaces}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


def _end(problems: list[tuple[str, str]]) -> None:
    for name, problem in problems:
        complain(shown(f"{name}: {problem}"))
    if problems:
        raise typer.Exit(EXIT_FAILED)
