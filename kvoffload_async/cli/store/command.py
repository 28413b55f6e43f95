"""`kvoffload store inspect|verify|gc|repair`: looks into directories of tiers, and cleans up."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import anyio.to_thread
import typer
from rich.console import Console
from rich.table import Table

from kvoffload_async.cli.ending import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    complain,
    errors_as_one_line,
)
from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.interrupt import Interrupt
from kvoffload_async.cli.progress import progress_bar
from kvoffload_async.cli.store.collection import collect
from kvoffload_async.cli.store.inspection import inspect_store
from kvoffload_async.cli.store.namespaces import FoundNamespace, find_namespaces
from kvoffload_async.cli.store.slab.inspection import inspect_slab
from kvoffload_async.cli.store.slab.manifests import read_given
from kvoffload_async.cli.store.slab.mending import collect_slab, repair_slab
from kvoffload_async.cli.store.slab.stores import SlabStore, find_slab_stores
from kvoffload_async.cli.store.slab.tables import (
    mended_table,
    slab_inspection_table,
    slab_verification_table,
)
from kvoffload_async.cli.store.slab.verification import verify_slab
from kvoffload_async.cli.store.survey import Walker
from kvoffload_async.cli.store.tables import (
    collection_table,
    inspection_table,
    shown,
    verification_table,
)
from kvoffload_async.cli.store.verification import verify_blocks
from kvoffload_async.cli.store.wishes import Wishes
from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.ops import FileOps

IO_THREADS: Final = 4
"""Threads that are in a system call at once; more lose on a local disk."""

Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The tier's root_dir; of a slab store, its own folder will do.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
OlderThan = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Age from which temporary files of unknown writers, and strangers, may go.",
    ),
]

store_app = typer.Typer(
    name="store",
    help="Look after what fs and slab tiers keep in a directory, while tiers are open on it too; "
    "only gc and repair of a slab store need it for themselves.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class Stores:
    """What lies in a directory: namespaces of fs tiers, and slab stores."""

    namespaces: Sequence[FoundNamespace]
    slabs: Sequence[SlabStore]


@dataclass(slots=True)
class Findings:
    """What a command has to tell.

    Attributes:
        namespaces: A JSON object for each namespace, and `slab_stores` for each slab store.
        tables: The same for people.
        problems: What is wrong, each with the name of what it is wrong with.
    """

    namespaces: list[dict[str, Any]] = field(default_factory=list)
    slab_stores: list[dict[str, Any]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


Work = Callable[[Walker, Stores], Awaitable[Findings]]


@store_app.command()
def inspect(directory: Directory, *, as_json: AsJson = False) -> None:
    """Count what is there, by namespace and slab store; changes nothing."""

    async def work(walker: Walker, stores: Stores) -> Findings:
        namespaces = [found for found, _ in await inspect_store(walker, stores.namespaces)]
        slabs = [(await inspect_slab(walker, slab))[0] for slab in stores.slabs]
        return Findings(
            [found.to_dict() for found in namespaces],
            [found.to_dict() for found in slabs],
            [
                *([inspection_table(namespaces)] if namespaces else []),
                *([slab_inspection_table(slabs)] if slabs else []),
            ],
            [
                *((found.name, problem) for found in namespaces for problem in found.problems),
                *((found.name, problem) for found in slabs for problem in found.problems),
            ],
        )

    _command(directory, "inspect", work, as_json=as_json)


@store_app.command()
def verify(directory: Directory, *, as_json: AsJson = False) -> None:
    """Read every block, and check its length and checksum; changes nothing."""

    async def work(walker: Walker, stores: Stores) -> Findings:
        findings = Findings()
        inspected = await inspect_store(walker, stores.namespaces)
        blocks = []
        for namespace, (inspection, survey) in zip(stores.namespaces, inspected, strict=True):
            found = await verify_blocks(walker, namespace, survey.blocks)
            blocks.append((inspection.name, found))
            findings.namespaces.append(inspection.to_dict() | {"verification": found.to_dict()})
            problems = (*inspection.problems, *found.problems)
            findings.problems += [(inspection.name, problem) for problem in problems]
        slots = []
        for slab in stores.slabs:
            looked, contents = await inspect_slab(walker, slab)
            judged = (await verify_slab(walker, slab, contents)).found
            slots.append((slab.name, judged))
            findings.slab_stores.append(looked.to_dict() | {"verification": judged.to_dict()})
            problems = (*looked.problems, *judged.problems)
            findings.problems += [(slab.name, problem) for problem in problems]
        findings.tables += [verification_table(blocks)] if blocks else []
        findings.tables += [slab_verification_table(slots)] if slots else []
        return findings

    _command(directory, "verify", work, as_json=as_json)


@store_app.command()
def gc(
    directory: Directory,
    *,
    older_than: OlderThan = 3600.0,
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
    empty folders, and on demand corrupt blocks and strangers. The fs tiers' shared count of bytes
    is right afterwards.
    """
    wishes = Wishes(older_than_s=older_than, corrupt=corrupt, strangers=strangers, dry_run=dry_run)

    async def work(walker: Walker, stores: Stores) -> Findings:
        findings = await _collected(walker, stores, wishes)
        mended = [
            await collect_slab(walker, slab, wishes)
            for slab in stores.slabs
            if not walker.should_stop()
        ]
        findings.slab_stores = [found.to_dict() for found in mended]
        findings.tables += [mended_table("Removed", mended)] if mended else []
        findings.problems += [(m.name, p) for m in mended for p in (*m.failures, *m.still_wrong)]
        return findings

    _command(directory, "gc", work, as_json=as_json, shows_part=True)


@store_app.command()
def repair(
    directory: Directory,
    *,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="manifest.json of a slab store of the same model and block size, of any rank, "
            "for one that has lost its own.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep all blocks that verify, and drop the rest.

    Of a slab store, manifest and journal are written anew where they are damaged. A namespace of
    the fs tier has neither and needs no repair: of that, corrupt blocks are removed, as by `gc
    --corrupt`.
    """

    async def work(walker: Walker, stores: Stores) -> Findings:
        given = None if manifest is None else read_given(manifest)
        findings = await _collected(walker, stores, Wishes(corrupt=True))
        mended = [
            await repair_slab(walker, slab, given)
            for slab in stores.slabs
            if not walker.should_stop()
        ]
        findings.slab_stores = [found.to_dict() for found in mended]
        findings.tables += [mended_table("Repaired", mended)] if mended else []
        findings.problems += [(found.name, p) for found in mended for p in found.failures]
        return findings

    _command(directory, "repair", work, as_json=as_json, shows_part=True)


async def _collected(walker: Walker, stores: Stores, wishes: Wishes) -> Findings:
    collected = [
        await collect(walker, namespace, wishes)
        for namespace in stores.namespaces
        if not walker.should_stop()
    ]
    return Findings(
        namespaces=[found.to_dict() for found in collected],
        tables=[collection_table(collected)] if collected else [],
        problems=[(c.name, p) for c in collected for p in (*c.failures, *c.still_wrong)],
    )


def _command(
    directory: Path, title: str, work: Work, *, as_json: bool, shows_part: bool = False
) -> None:
    """Do the work on what lies in a directory, tell what it has found, and end with a status."""
    with errors_as_one_line():
        findings, is_interrupted = _run(directory.absolute(), title, work)
        if is_interrupted and not shows_part:
            raise typer.Exit(EXIT_INTERRUPTED)
        if as_json:
            report = {
                "directory": str(directory),
                "namespaces": findings.namespaces,
                "slab_stores": findings.slab_stores,
            }
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            for table in findings.tables:
                Console().print(table)
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    for name, problem in findings.problems:
        complain(shown(f"{name}: {problem}"))
    if findings.problems:
        raise typer.Exit(EXIT_FAILED)


def _run(root: Path, title: str, work: Work) -> tuple[Findings, bool]:
    """Return what the work has found, and whether it was stopped.

    Raises:
        InputError: There is no store, or it cannot be read.
    """
    gauge = Gauge()

    async def main(should_stop: Callable[[], bool]) -> Findings:
        walker = Walker(FileOps(), anyio.CapacityLimiter(IO_THREADS), gauge, should_stop)
        return await work(walker, await _find(root))

    with (
        Interrupt() as interrupt,
        progress_bar(Console(stderr=True), lambda: gauge.fraction_done, title) as on_change,
    ):
        gauge.on_change = on_change
        try:
            findings = anyio.run(main, lambda: interrupt.is_requested)
        except OSError as error:
            where = error.filename or root
            raise InputError(f"{where}: cannot be read: {error.strerror or error}") from error
    return findings, interrupt.is_requested


async def _find(root: Path) -> Stores:
    slabs = await anyio.to_thread.run_sync(find_slab_stores, root)
    folders = {slab.folder for slab in slabs}
    namespaces = [n for n in await find_namespaces(root) if n.folder not in folders]
    if not slabs and not namespaces:
        raise InputError(
            f"{root}: no fs store and no slab store: no folder in it is called "
            "<model>_<digest>_r<rank> or has a slab store's files; give the tier's root_dir"
        )
    return Stores(namespaces, slabs)
