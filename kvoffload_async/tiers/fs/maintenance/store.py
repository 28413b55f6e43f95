"""Maintenance of namespaces of the `fs` tier; files of living writers are kept.

The walk precedes the check of the writers: a writer registers before it creates temporary files, so
the writers of all files found by the walk are known by then.
"""

from __future__ import annotations

import contextlib
import math
import stat as stat_module
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import ClassVar, Self

from kvoffload_async.abc.maintenance import (
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    Removal,
    Summary,
)
from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.features import NewerFormatError
from kvoffload_async.tiers.files.maintenance import (
    Cleanup,
    FolderMaintenance,
    MaintenanceIo,
    Removed,
    Verdict,
    Verification,
    problem_of,
)
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes, names_in
from kvoffload_async.tiers.fs.maintenance.inspection import (
    BlockChecker,
    FoundFile,
    FoundNamespace,
    Outcome,
    Scan,
    find_namespaces,
    inspect_namespace,
    judge_writers,
    scan_namespace,
    sort_temps,
)
from kvoffload_async.tiers.fs.namespace_init import check_namespace
from kvoffload_async.tiers.fs.usage import FILE_NAME, UsageFile
from kvoffload_async.tiers.fs.walk import NamespaceWalk, writer_of
from kvoffload_async.tiers.fs.writers import FOLDER, WriterRegistry, Writers, remove_entry


@dataclass
class RemovedFiles(Removed):
    """What `gc` removed from one namespace.

    Attributes:
        temps_of_dead: Temporary files of dead writers.
        temps_foreign: Old temporary files of unknown writers.
        writers: Entries of dead writers.
        folders: Empty folders; last the namespace's own, if nothing is left in it.
        counted_bytes: The shared count afterwards, if there is one.
    """

    temps_of_dead: list[str] = field(default_factory=list)
    temps_foreign: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    counted_bytes: int | None = None

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [
            ("temporary files of dead writers", f"{len(self.temps_of_dead):,}"),
            ("old temporary files of unknown ones", f"{len(self.temps_foreign):,}"),
            ("entries of dead writers", f"{len(self.writers):,}"),
            ("empty folders", f"{len(self.folders):,}"),
            *super().rows,
        ]


class NamespaceCleanup(Cleanup[RemovedFiles]):
    """Cleans up one namespace as one of its writers."""

    def __init__(self, ops: FileOps, namespace: FoundNamespace, options: GcOptions) -> None:
        super().__init__(ops, RemovedFiles(namespace.name, options.dry_run))
        self._options = options
        self._namespace = namespace
        self._writers: WriterRegistry | None = None
        self._gone: set[str] = set()
        self._is_empty = False

    # -- blocking calls, in this order ------------------------------------------------------------

    def register(self) -> None:
        """Register as a writer if the namespace has writers, to use their count and clock.

        Raises:
            InputError: The namespace is not writable.
        """
        if self._options.dry_run or not self._ops.exists(f"{self._namespace.folder}/{FOLDER}"):
            return
        writers = WriterRegistry(self._ops, self._namespace.folder)
        try:
            writers.register()
        except OSError as error:
            writers.die()
            raise InputError(
                f"{self._namespace.folder}: cannot be written: {error.strerror or error}"
            ) from error
        self._writers = writers

    def other_writers(self) -> Writers:
        """Return the other writers of the namespace by their state."""
        registry = self._writers or WriterRegistry(self._ops, self._namespace.folder)
        return judge_writers(registry, self._now_s())

    def sweep(self, scan: Scan, writers: Writers) -> None:
        """Remove unused files, entries of dead writers, and empty folders."""
        removed = self.removed
        latest_s = self._now_s() - self._options.older_than_s
        temps = sort_temps(scan.temps, writers)
        for temp in temps.dead:
            reason = "left by a dead writer"
            self._unlink(temp, removed.temps_of_dead, reason, f"{reason}: {temp.path}")
        for temp in temps.foreign:
            if temp.modified_s <= latest_s:
                self._unlink(temp, removed.temps_foreign, "old, of an unknown writer")
        for file in scan.unknown_files if self._options.unknown_files else ():
            if file.modified_s <= latest_s:
                self._unlink(file, removed.unknown_files, "no block")
        for block in scan.blocks:
            if self._options.selects(block.key):
                self._unlink(block, removed.tenant_blocks, "of the tenant")
        left = {writer_of(t.path) for t in temps.dead if t.path not in self._gone}
        self._remove_entries(sorted(writers.dead - left))
        self._remove_folders(scan)
        files = (*scan.blocks, *scan.temps, *scan.unknown_files)
        is_own = self._ops.exists(f"{self._namespace.folder}/{FOLDER}")  # not only vLLM's
        self._is_empty = is_own and not (
            writers.living
            or scan.other_folders
            or scan.unreadable
            or any(file.path not in self._gone for file in files)
        )
        if self._is_empty and self._options.dry_run:
            self.note(removed.folders, Removal(self._namespace.folder, "empty"))

    def unregister(self) -> None:
        """Correct the shared count, unregister, and remove the namespace if it is empty."""
        writers, self._writers = self._writers, None
        if writers is None:
            return
        try:
            if self._ops.exists(f"{self._namespace.folder}/{FILE_NAME}"):
                self.removed.counted_bytes = self._recount(writers)
        except OSError as error:
            self.fail(f"the count of bytes: {error.strerror or error}")
        finally:
            writers.unregister()
        if self._is_empty:
            self._remove_namespace()

    # -- calls that do not block ------------------------------------------------------------------

    def take_in(self, outcome: Outcome) -> None:
        """Record the outcome of checking a block."""
        bad, dry_run = outcome.bad, self.removed.dry_run
        problem = problem_of(outcome.verdict, bad).text
        if outcome.verdict is Verdict.CORRUPT and (outcome.is_removed or dry_run):
            removal = Removal(bad.what, bad.reason, outcome.block.disk_bytes)
            self.note(self.removed.corrupt, removal, problem)
        elif outcome.verdict in {Verdict.CORRUPT, Verdict.UNREADABLE}:
            self.fail(problem, bad.what)

    # -- inside -----------------------------------------------------------------------------------

    def _now_s(self) -> float:
        """Return the time of the filesystem's clock; without a registration, of this host's."""
        if self._writers is None:
            return time.time()
        self._writers.heartbeat()
        return self._ops.stat(self._entry(self._writers.writer_id)).st_mtime

    def _entry(self, writer_id: str) -> str:
        return f"{self._namespace.folder}/{FOLDER}/{writer_id}"

    def note(self, removed: list[str], removal: Removal, problem: str = "") -> None:
        super().note(removed, removal, problem)
        self._gone.add(removal.what)

    def _unlink(self, file: FoundFile, removed: list[str], reason: str, problem: str = "") -> None:
        removal = Removal(file.path, reason, file.disk_bytes)
        self.remove(removed, removal, partial(self._ops.unlink, file.path), problem)

    def _remove_entries(self, writer_ids: Iterable[str]) -> None:
        for writer_id in writer_ids:
            path = self._entry(writer_id)
            with contextlib.suppress(FileNotFoundError):
                removal = Removal(path, "of a dead writer", disk_bytes(self._ops.stat(path)))
                call = partial(remove_entry, self._ops, path)
                self.remove(self.removed.writers, removal, call)

    def _remove_folders(self, scan: Scan) -> None:
        """Remove empty folders in vLLM's layout, deepest first; writers create them again."""
        if not self._namespace.is_vllms:
            return
        files = (*scan.blocks, *scan.temps, *scan.unknown_files)
        occupied: set[str] = set()
        for path in {*(file.path for file in files), *scan.other_folders} - self._gone:
            above = path.rpartition("/")[0]
            while above and above not in occupied:  # else its parents are known, too
                occupied.add(above)
                above = above.rpartition("/")[0]
        for folder in sorted(set(scan.folders) - occupied, reverse=True):
            with contextlib.suppress(OSError):  # it is in use again
                removal = Removal(folder, "empty", disk_bytes(self._ops.stat(folder)))
                if not self.removed.dry_run:
                    self._ops.rmdir(folder)
                self.note(self.removed.folders, removal)

    def _remove_namespace(self) -> None:
        """Remove a namespace without blocks, unless a tier opens it meanwhile.

        The folder of writers goes first: it is not empty while a tier is registered. A tier that
        registers later makes missing folders again, and counts again.
        """
        folder, ops = self._namespace.folder, self._ops
        try:
            ops.rmdir(f"{folder}/{FOLDER}")
            for path, status in ops.entries(folder):
                if stat_module.S_ISDIR(status.st_mode):
                    ops.rmdir(path)
                else:
                    ops.unlink(path)
            ops.rmdir(folder)
        except OSError:  # it is in use again
            return
        self.note(self.removed.folders, Removal(folder, "empty"))
        config_path = self._namespace.config_path
        base = config_path.rpartition("/")[0]
        others = names_in(ops, base.rpartition("/")[0])
        if not any(name.startswith(f"{base.rpartition('/')[2]}_r") for name in others):
            with contextlib.suppress(OSError):  # it is of another version, or in use again
                ops.unlink(config_path)
                ops.rmdir(base)

    def _recount(self, writers: WriterRegistry) -> int:
        """Correct the shared count by a walk, as far as concurrent writers allow, and return it."""
        entry_bytes = writers.entry_bytes()
        usage = UsageFile(self._ops, self._namespace.folder, writers.writer_id, writers.living)
        usage.open(entry_bytes)
        try:
            walk = NamespaceWalk(self._ops, self._namespace, writers, usage)
            step = walk.step(math.inf, lambda: False)
            if step.error is not None:
                raise step.error
            return usage.read().settled_bytes - entry_bytes
        finally:
            usage.close()


class FsMaintenance(FolderMaintenance):
    """Inspects and cleans a namespace; works while tiers are open on it."""

    tier_type: ClassVar[str] = "fs"
    report_key: ClassVar[str] = "namespaces"
    appearance: ClassVar[str] = "a folder called <model>_<digest>_r<rank>"
    has_generic_name: ClassVar[bool] = True

    def __init__(self, namespace: FoundNamespace, ops: FileOps) -> None:
        super().__init__(namespace.folder, ops)
        self._namespace = namespace

    @classmethod
    async def _find(cls, io: MaintenanceIo, directory: str) -> Sequence[Self]:
        return [cls(namespace, io.ops) for namespace in await find_namespaces(io, directory)]

    async def inspect(self, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        if refusal := await self._refusal(io, for_writing=False):
            yield Problem(refusal)
        found = await inspect_namespace(io, self._namespace)
        for text in found.problems:
            yield Problem(text)
        yield Summary("Store", found.rows, found.figures)

    async def verify(self, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        found = await inspect_namespace(io, self._namespace)
        for text in found.problems:
            yield Problem(text)
        verified = Verification(max_listed=control.max_listed)
        blocks = found.scan.blocks
        if refusal := await self._refusal(io, for_writing=False):
            yield Problem(refusal)
            blocks = []
        checker = BlockChecker(self._ops, self._namespace, blocks, self._key)
        async with aclosing(checker.outcomes(io)) as outcomes:
            async for outcome in outcomes:
                if problem := verified.count(outcome.verdict, outcome.bad):
                    yield problem
        figures = found.figures | {"verification": asdict(verified)}
        yield Summary("Blocks", verified.rows, figures)

    async def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        """Remove leftovers of crashed writers, stale temporary files and empty folders.

        On request also removes corrupt blocks and unknown files. Afterwards the shared count of
        bytes is correct.
        """
        io = MaintenanceIo(self._ops, control)
        cleanup = NamespaceCleanup(self._ops, self._namespace, options)
        if refusal := await self._refusal(io, for_writing=True):
            yield Problem(refusal)
            yield cleanup.removed.summary
            return
        try:
            await io.run(cleanup.register)
            scan = await scan_namespace(io, self._namespace)
            for reason in scan.unreadable:
                cleanup.fail(reason)
            writers = await io.run(cleanup.other_writers)
            kept = [block for block in scan.blocks if not options.selects(block.key)]
            blocks = kept if options.corrupt else []
            checker = BlockChecker(
                *(self._ops, self._namespace, blocks, self._key),
                remove_corrupt=not options.dry_run,
            )
            async with aclosing(checker.outcomes(io)) as outcomes:
                async for outcome in outcomes:
                    cleanup.take_in(outcome)
                    for finding in cleanup.take_findings():
                        yield finding
            if not io.control.should_stop():
                await io.run(cleanup.sweep, scan, writers)
        finally:
            await io.run(cleanup.unregister)
        for finding in cleanup.take_findings():
            yield finding
        yield cleanup.removed.summary

    async def _refusal(self, io: MaintenanceIo, *, for_writing: bool) -> str | None:
        """Return the reason why this release must not access the namespace, or None."""
        try:
            await io.run(partial(check_namespace, self._ops, self.folder, for_writing=for_writing))
        except NewerFormatError as error:
            return f"it is of a newer release: {error}"
        return None
