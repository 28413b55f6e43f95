"""The maintenance of slab stores; see `StoreMaintenance`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import islice
from typing import ClassVar, Final, Self

import anyio.to_thread

from kvoffload_async.abc.maintenance import (
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    RepairOptions,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.tiers.files.integrity import IntegrityKey, read_key_file
from kvoffload_async.tiers.files.maintenance import MaintenanceIo, figures_of
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.layout import MANIFEST
from kvoffload_async.tiers.slab.maintenance.changes import Changes
from kvoffload_async.tiers.slab.maintenance.inspection import inspect_slab
from kvoffload_async.tiers.slab.maintenance.manifests import (
    decode_given,
    newer_format,
    recover_manifest,
)
from kvoffload_async.tiers.slab.maintenance.stores import (
    Contents,
    SlabStore,
    find_slab_stores,
    key_problem,
    locked,
    read_contents,
    user_of,
)
from kvoffload_async.tiers.slab.maintenance.verification import verify_slab
from kvoffload_async.tiers.slab.manifest import Manifest

_PROBLEMS_AT_ONCE: Final = 1000


class SlabMaintenance(StoreMaintenance):
    """Looks after a slab store; only `gc` and `repair` need it for themselves."""

    tier_type: ClassVar[str] = "slab"
    report_key: ClassVar[str] = "slab_stores"
    appearance: ClassVar[str] = f"a folder with {MANIFEST}, a journal or segments"

    def __init__(self, store: SlabStore, ops: FileOps) -> None:
        """Look after a store; `ops` has entered the directory in which it was found."""
        self.folder = store.folder
        self._store = store
        self._ops = ops
        self._key: IntegrityKey | None = None

    def use_integrity_key_file(self, path: str) -> None:
        self._key = read_key_file(path)

    @classmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        ops = FileOps()
        stores = await anyio.to_thread.run_sync(find_slab_stores, ops, directory)
        return [cls(store, ops) for store in stores]

    async def inspect(self, control: MaintenanceControl) -> Findings:
        found, _ = await inspect_slab(MaintenanceIo(self._ops, control), self._store)
        for text in found.problems:
            yield Problem(text)
        yield Summary("Slab stores", found.rows, figures_of(found))

    async def verify(self, control: MaintenanceControl) -> Findings:
        """Read every block and compare it with its digest; changes nothing.

        A block that a tier has replaced meanwhile is not corrupt, so all are named at the end.
        """
        io = MaintenanceIo(self._ops, control)
        found, contents = await inspect_slab(io, self._store)
        for text in found.problems:
            yield Problem(text)
        if problem := key_problem(contents, self._key):
            yield Problem(problem)
        judged = await verify_slab(io, self._store, contents, self._key)
        problems = judged.problems
        while some := await io.run(_next_of, problems):
            for bad in some:
                yield bad
        verified = await io.run(judged.verification, control.max_listed)
        rows = [*verified.rows, ("changed meanwhile", f"{verified.changed:,}")]
        figures = figures_of(found) | {"verification": figures_of(verified)}
        yield Summary("Blocks", rows, figures)

    async def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        changes = Changes(self._ops, self._store, dry_run=options.dry_run)
        if problem := await io.run(newer_format, self._ops, self._store):
            changes.fail(problem)
        else:
            async with nullcontext() if options.dry_run else self._locked(io):
                await self._clean_up(io, changes, options)
        for finding in changes.take_findings():
            yield finding
        title = "Would be removed" if options.dry_run else "Removed"
        yield Summary(title, changes.changed.rows, figures_of(changes.changed))

    def repair(self, options: RepairOptions, control: MaintenanceControl) -> Findings:
        """Keep all that verifies, and drop the rest; changes nothing where nothing is wrong.

        Manifest and journal are written anew where they are damaged.
        """
        given = None if options.manifest is None else decode_given(options.manifest)
        return self._repair(given, control)

    async def _repair(self, given: Manifest | None, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        changes = Changes(self._ops, self._store)
        if problem := await io.run(newer_format, self._ops, self._store):
            changes.fail(problem)
        else:
            async with self._locked(io):
                await self._rebuild(io, changes, given)
        for finding in changes.take_findings():
            yield finding
        yield Summary("Repaired", changes.changed.rows, figures_of(changes.changed))

    @asynccontextmanager
    async def _locked(self, io: MaintenanceIo) -> AsyncIterator[None]:
        """Keep tiers away from the store."""
        lock = locked(self._ops, self._store)
        try:
            await io.run(lock.__enter__)
            yield
        finally:
            await io.run(lock.__exit__, None, None, None)

    async def _clean_up(self, io: MaintenanceIo, changes: Changes, options: GcOptions) -> None:
        contents = await io.run(read_contents, self._ops, self._store)
        user = await io.run(user_of, self._ops, self._store)
        if options.dry_run and user:
            contents.found.temps.clear()  # they are being written
        if contents.manifest_problem:
            changes.fail(f"{contents.manifest_problem}; see repair")
        changes.changed.blocks = len(contents.live)
        if options.corrupt and (problem := key_problem(contents, self._key)):
            changes.fail(problem)
        elif options.corrupt and contents.manifest is not None:
            judged = await verify_slab(io, self._store, contents, self._key)
            if io.control.should_stop():
                return
            await io.run(changes.drop_corrupt, contents, judged)
        await io.run(changes.remove_files, contents, options)

    async def _rebuild(self, io: MaintenanceIo, changes: Changes, given: Manifest | None) -> None:
        contents: Contents = await io.run(read_contents, self._ops, self._store)
        is_recovered = contents.manifest is None
        if is_recovered:
            manifest = await io.run(recover_manifest, self._ops, self._store, given, self._key)
            if manifest is None:
                changes.fail(
                    f"{contents.manifest_problem}, and nothing says what its blocks are; give "
                    f"--manifest with the {MANIFEST} of a store of the same model and block size"
                )
                return
            contents = await io.run(read_contents, self._ops, self._store, manifest)
        if problem := key_problem(contents, self._key):
            changes.fail(problem)
            return
        judged = await verify_slab(io, self._store, contents, self._key)
        if is_recovered and self._key is not None and not judged.is_good.any():
            changes.fail("no block verifies with the integrity key: it may be another one")
            return
        if not io.control.should_stop():
            await io.run(lambda: changes.rebuild(contents, judged, is_recovered=is_recovered))


def _next_of(problems: Iterator[Problem]) -> list[Problem]:
    return list(islice(problems, _PROBLEMS_AT_ONCE))
