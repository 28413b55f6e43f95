"""`StoreMaintenance` for namespaces of the `fs` tier."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import ClassVar, Self

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
from kvoffload_async.tiers.files.digests import IntegrityKey, read_key_file
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.files.maintenance import MaintenanceIo
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.format import check_namespace
from kvoffload_async.tiers.fs.maintenance.cleanup import Cleanup
from kvoffload_async.tiers.fs.maintenance.inspection import inspect_namespace
from kvoffload_async.tiers.fs.maintenance.namespaces import FoundNamespace, find_namespaces
from kvoffload_async.tiers.fs.maintenance.scan import scan_namespace
from kvoffload_async.tiers.fs.maintenance.verification import FileVerification, verify_blocks


class FsMaintenance(StoreMaintenance):
    """Inspects and repairs a namespace; works while tiers are open on it."""

    tier_type: ClassVar[str] = "fs"
    report_key: ClassVar[str] = "namespaces"
    appearance: ClassVar[str] = "a folder called <model>_<digest>_r<rank>"
    has_generic_name: ClassVar[bool] = True

    def __init__(self, namespace: FoundNamespace, ops: FileOps) -> None:
        """Use a namespace; `ops` has entered the directory that contains it."""
        self.folder = namespace.folder
        self._namespace = namespace
        self._ops = ops
        self._key: IntegrityKey | None = None

    def use_integrity_key_file(self, path: str) -> None:
        self._key = read_key_file(path)

    @classmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        ops = FileOps()
        namespaces = await anyio.to_thread.run_sync(find_namespaces, ops, directory)
        return [cls(namespace, ops) for namespace in namespaces]

    async def inspect(self, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        if refusal := await self._refusal(io, for_writing=False):
            yield Problem(refusal)
        found, _ = await inspect_namespace(io, self._namespace)
        for text in found.problems:
            yield Problem(text)
        yield Summary("Store", found.rows, asdict(found))

    async def verify(self, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        found, scan = await inspect_namespace(io, self._namespace)
        for text in found.problems:
            yield Problem(text)
        verified = FileVerification(max_listed=control.max_listed)
        blocks = scan.blocks
        if refusal := await self._refusal(io, for_writing=False):
            yield Problem(refusal)
            blocks = []
        async with aclosing(verify_blocks(io, self._namespace, blocks, self._key)) as outcomes:
            async for outcome in outcomes:
                problem = verified.take_in(outcome)
                if problem is not None:
                    yield problem
        figures = asdict(found) | {"verification": asdict(verified)}
        yield Summary("Blocks", verified.rows, figures)

    async def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        """Remove leftovers of crashed writers, stale temporary files and empty folders.

        On request also removes corrupt blocks and unknown files. Afterwards the shared count of
        bytes is correct.
        """
        io = MaintenanceIo(self._ops, control)
        cleanup = Cleanup(self._ops, self._namespace, options)
        if refusal := await self._refusal(io, for_writing=True):
            yield Problem(refusal)
            yield Summary(cleanup.removed.title, cleanup.removed.rows, asdict(cleanup.removed))
            return
        try:
            await io.run(cleanup.register)
            async with aclosing(self._clean_up(io, cleanup, options)) as findings:
                async for finding in findings:
                    yield finding
        finally:
            await io.run(cleanup.unregister)
        for finding in cleanup.take_findings():
            yield finding
        removed = cleanup.removed
        yield Summary(removed.title, removed.rows, asdict(removed))

    def repair(self, options: RepairOptions, control: MaintenanceControl) -> Findings:
        """Remove corrupt blocks like `gc`; there is no index to rebuild."""
        del options  # all options concern a lost manifest
        return self.gc(GcOptions(corrupt=True), control)

    async def _refusal(self, io: MaintenanceIo, *, for_writing: bool) -> str | None:
        """Return the reason why this release must not access the namespace, or None."""
        check = partial(check_namespace, self._ops, self.folder, for_writing=for_writing)
        try:
            await io.run(check)
        except NewerFormatError as error:
            return f"it is of a newer release: {error}"
        return None

    async def _clean_up(self, io: MaintenanceIo, cleanup: Cleanup, options: GcOptions) -> Findings:
        scan = await scan_namespace(io, self._namespace)
        for reason in scan.unreadable:
            cleanup.fail(reason)
        writers = await io.run(cleanup.other_writers)
        if options.corrupt:
            checks = verify_blocks(
                io, self._namespace, scan.blocks, self._key, remove_corrupt=not options.dry_run
            )
            async with aclosing(checks) as outcomes:
                async for outcome in outcomes:
                    cleanup.take_in(outcome)
                    for finding in cleanup.take_findings():
                        yield finding
        if not io.control.should_stop():
            await io.run(cleanup.sweep, scan, writers)
        for finding in cleanup.take_findings():
            yield finding
