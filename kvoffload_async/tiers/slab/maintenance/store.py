"""Maintenance of slab stores; only `gc` changes a store.

Files are rewritten via a temporary file and rename, so that a killed `gc` leaves the store as
found. Changes are made on an I/O thread, one at a time; calls block.
"""

from __future__ import annotations

import contextlib
import math
import stat as stat_module
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import ClassVar, Self

import numpy as np

from kvoffload_async.abc.maintenance import (
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    Removal,
    Summary,
)
from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.locks import InUseError, lock_for_process
from kvoffload_async.tiers.files.maintenance import (
    BadBlock,
    Cleanup,
    FolderMaintenance,
    MaintenanceIo,
    Removed,
    Verdict,
    Verification,
    problem_of,
)
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.slab.layout import JOURNAL, LOCK, MANIFEST, SESSION
from kvoffload_async.tiers.slab.maintenance.inspection import (
    Contents,
    find_slab_stores,
    inspect_slab,
    key_problem,
    read_contents,
    read_known_manifest,
    user_of,
    verify_slab,
)
from kvoffload_async.tiers.slab.records import (
    CHECKPOINT_FRAME_RECORDS,
    Records,
    checkpoint,
    keys_of,
)
from kvoffload_async.tiers.slab.recovery import Session, replace_file


@dataclass
class RemovedParts(Removed):
    """What `gc` removed from one store; slots of corrupt blocks stay allocated.

    Attributes:
        blocks: Number of blocks kept.
        temps: Leftovers of a killed writer.
    """

    blocks: int = 0
    temps: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [
            ("blocks kept", f"{self.blocks:,}"),
            ("files of killed writers", f"{len(self.temps):,}"),
            *super().rows,
        ]


class StoreCleanup(Cleanup[RemovedParts]):
    """Cleans up one store, which is locked unless in a dry run."""

    def __init__(self, ops: FileOps, folder: str, options: GcOptions) -> None:
        super().__init__(ops, RemovedParts(folder.rpartition("/")[2], options.dry_run))
        self._folder = folder
        self._options = options

    def drop(self, contents: Contents, corrupt: Mapping[int, BadBlock]) -> None:
        """Remove corrupt blocks, given by their row in `contents.live`, from the journal.

        And those of the tenant.
        """
        keys = keys_of(contents.live) if self._options.tenant_tag is not None else []
        owned = {row: key for row, key in enumerate(keys) if self._options.selects(key)}
        if not (corrupt or owned):
            return
        is_kept = np.ones(len(contents.live), dtype=np.bool_)
        is_kept[[*corrupt, *owned]] = False
        if not self._options.dry_run:
            try:
                self._write_journal(contents, contents.live[is_kept])
            except OSError as error:
                self.fail(f"the journal cannot be written: {error.strerror or error}")
                return
        self.removed.blocks = int(is_kept.sum())
        for key in owned.values():
            self.note(self.removed.tenant_blocks, Removal(key.hex(), "of the tenant"))
        for bad in corrupt.values():
            problem = problem_of(Verdict.CORRUPT, bad).text
            self.note(self.removed.corrupt, Removal(bad.what, bad.reason), problem)

    def remove_files(self, contents: Contents) -> None:
        """Remove leftovers of killed writers and, if selected, unknown files."""
        for name in contents.found.temps:
            reason = "left by a killed writer"
            self._unlink(name, self.removed.temps, reason, problem=f"{reason}: {name}")
        latest_s = time.time() - self._options.older_than_s
        for name in contents.found.unknown_files if self._options.unknown_files else ():
            reason = "not part of a store"
            self._unlink(name, self.removed.unknown_files, reason, latest_s=latest_s)

    # -- internal ---------------------------------------------------------------------------------

    def _unlink(
        self,
        name: str,
        removed: list[str],
        reason: str,
        *,
        latest_s: float = math.inf,
        problem: str = "",
    ) -> None:
        """Remove a file that was not modified after `latest_s`."""
        path = f"{self._folder}/{name}"
        with contextlib.suppress(FileNotFoundError):
            status = self._ops.stat(path)
            if status.st_mtime <= latest_s and not stat_module.S_ISDIR(status.st_mode):
                removal = Removal(name, reason, disk_bytes(status))
                self.remove(removed, removal, partial(self._ops.unlink, path), problem)

    def _write_journal(self, contents: Contents, kept: Records) -> None:
        """Rewrite the journal with only the records of kept blocks."""
        if contents.manifest is None:
            return
        seed = contents.manifest.journal_seed
        sequence = contents.scanned.sequence
        records = checkpoint(sequence + 1, kept, seed)
        replace_file(self._ops, f"{self._folder}/{JOURNAL}", records)
        # The journal now has all verification marks; other blocks were read in this boot.
        frames = -(-len(kept) // CHECKPOINT_FRAME_RECORDS)
        session = Session(boot_id(), sequence + frames)
        replace_file(self._ops, f"{self._folder}/{SESSION}", session.encode(seed))


class SlabMaintenance(FolderMaintenance):
    """Maintains a slab store; only `gc` needs exclusive access."""

    tier_type: ClassVar[str] = "slab"
    report_key: ClassVar[str] = "slab_stores"
    appearance: ClassVar[str] = f"a folder with {MANIFEST}, a journal or segments"

    @classmethod
    async def _find(cls, io: MaintenanceIo, directory: str) -> Sequence[Self]:
        folders = await io.run(find_slab_stores, io.ops, directory)
        return [cls(folder, io.ops) for folder in folders]

    async def inspect(self, control: MaintenanceControl) -> Findings:
        found, _ = await inspect_slab(MaintenanceIo(self._ops, control), self.folder)
        for text in found.problems:
            yield Problem(text)
        yield Summary("Slab stores", found.rows, asdict(found))

    async def verify(self, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        found, contents = await inspect_slab(io, self.folder)
        for text in found.problems:
            yield Problem(text)
        verified = Verification(max_listed=control.max_listed)
        if refusal := key_problem(contents, self._key):
            yield Problem(refusal)
            verified.other_key = len(contents.live)
        else:
            async with aclosing(verify_slab(io, self.folder, contents, self._key)) as checked:
                async for outcome in checked:
                    if problem := verified.count(outcome.verdict, outcome.bad):
                        yield problem
        yield Summary("Blocks", verified.rows, asdict(found) | {"verification": asdict(verified)})

    async def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        cleanup = StoreCleanup(self._ops, self.folder, options)
        check = partial(read_known_manifest, self._ops, self.folder, for_writing=True)
        _, refusal = await io.run(check)  # before locking, which writes into the store
        if refusal:
            cleanup.fail(refusal)
        else:
            async with nullcontext() if options.dry_run else self._locked(io):
                await self._clean_up(io, cleanup, options)
        for finding in cleanup.take_findings():
            yield finding
        yield cleanup.removed.summary

    @asynccontextmanager
    async def _locked(self, io: MaintenanceIo) -> AsyncIterator[None]:
        """Lock the store, so that no tier can open it.

        Raises:
            InputError: A tier has it open, or it cannot be written to.
        """
        fds: list[int] = []
        try:
            await io.run(lambda: fds.append(_lock(self._ops, self.folder)))
            yield
        finally:
            for fd in fds:
                await io.run(self._ops.close, fd)

    async def _clean_up(self, io: MaintenanceIo, cleanup: StoreCleanup, options: GcOptions) -> None:
        contents = await io.run(read_contents, self._ops, self.folder)
        if options.dry_run and (await io.run(user_of, self._ops, self.folder)) is not None:
            contents.found.temps.clear()  # they are being written
        cleanup.removed.blocks = len(contents.live)
        corrupt: dict[int, BadBlock] = {}
        if options.corrupt and (refusal := key_problem(contents, self._key)):
            cleanup.fail(refusal)
        elif options.corrupt:
            async with aclosing(verify_slab(io, self.folder, contents, self._key)) as checked:
                async for outcome in checked:
                    if outcome.verdict is Verdict.CORRUPT:
                        corrupt[outcome.row] = outcome.bad
                    elif outcome.verdict is Verdict.UNREADABLE:
                        problem = problem_of(outcome.verdict, outcome.bad)
                        cleanup.fail(problem.text, problem.what)
            if io.control.should_stop():
                return
        await io.run(cleanup.drop, contents, corrupt)
        await io.run(cleanup.remove_files, contents)


def _lock(ops: FileOps, folder: str) -> int:
    try:
        return lock_for_process(ops, f"{folder}/{LOCK}")
    except InUseError as error:
        raise InputError(
            f"{folder}: already opened by process {error}; close it there first: "
            "gc needs exclusive access (inspect and verify do not)"
        ) from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
