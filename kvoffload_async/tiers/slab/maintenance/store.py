"""Maintenance of slab stores; `gc` and `repair` change a store.

Files are rewritten via a temporary file and rename, so that a killed repair leaves the store as
found. Changes are made on an I/O thread, one at a time; calls block.
"""

from __future__ import annotations

import stat as stat_module
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import ClassVar, Final, Self

import numpy as np

from kvoffload_async.abc.maintenance import (
    Finding,
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    Removal,
    RepairOptions,
    Rewrite,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.tiers.files.digests import IntegrityKey, read_key_file
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.maintenance import MaintenanceIo, Verdict, problem_of
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.slab.layout import JOURNAL, MANIFEST, SESSION
from kvoffload_async.tiers.slab.maintenance.inspection import (
    BadSlot,
    Judged,
    inspect_slab,
    inspection_of,
    verify_slab,
)
from kvoffload_async.tiers.slab.maintenance.stores import (
    Contents,
    SlabStore,
    decode_given,
    find_slab_stores,
    key_problem,
    locked,
    newer_format,
    read_contents,
    recover_manifest,
    user_of,
)
from kvoffload_async.tiers.slab.manifest import Manifest
from kvoffload_async.tiers.slab.records import (
    CHECKPOINT_FRAME_RECORDS,
    NEEDS_VERIFY,
    Records,
    checkpoint,
)
from kvoffload_async.tiers.slab.recovery import Session, replace_file


@dataclass(slots=True)
class Changed:
    """Changes made to one store, or planned in a dry run.

    Attributes:
        name: Name of the store's folder.
        dry_run: Whether nothing was changed.
        blocks: Number of blocks kept.
        temps: Removed leftovers of a killed writer.
        unknown_files: Removed files that are not part of a store.
        dropped: Blocks that do not verify, or cannot be read.
        manifest_rebuilt: Whether the manifest was rewritten.
        journal_rebuilt: Whether the journal was rewritten.
        freed_bytes: Disk bytes of removed files; slots of dropped blocks stay allocated.
        failures: Changes that failed, and why.
    """

    name: str
    dry_run: bool = False
    blocks: int = 0
    temps: list[str] = field(default_factory=list)
    unknown_files: list[str] = field(default_factory=list)
    dropped: list[BadSlot] = field(default_factory=list)
    manifest_rebuilt: bool = False
    journal_rebuilt: bool = False
    freed_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each figure, for people."""
        return [
            ("blocks kept", f"{self.blocks:,}"),
            ("blocks dropped", f"{len(self.dropped):,}"),
            ("files of killed writers", f"{len(self.temps):,}"),
            ("unknown files", f"{len(self.unknown_files):,}"),
            ("bytes of files", f"{self.freed_bytes:,}"),
            ("manifest rewritten", "yes" if self.manifest_rebuilt else "no"),
            ("journal rewritten", "yes" if self.journal_rebuilt else "no"),
        ]


class Changes:
    """Changes one store, or collects the changes of a dry run.

    Attributes:
        changed: Changes so far.
    """

    def __init__(self, ops: FileOps, store: SlabStore, *, dry_run: bool = False) -> None:
        self.changed = Changed(store.name, dry_run)
        self._ops = ops
        self._store = store
        self._findings: list[Finding] = []

    def take_findings(self) -> list[Finding]:
        """Return the findings since the last call."""
        findings, self._findings = self._findings, []
        return findings

    def fail(self, text: str, what: str = "") -> None:
        """Record a failure."""
        self.changed.failures.append(text)
        self._findings.append(Problem(text, what))

    def rebuild(self, contents: Contents, judged: Judged, *, is_recovered: bool) -> None:
        """Rewrite lost or damaged files, and check the result.

        Args:
            contents: The store's contents; the manifest must be known.
            judged: Results of the verification.
            is_recovered: Whether the manifest was recovered, and is not in the store.
        """
        manifest, scanned, changed = contents.manifest, contents.scanned, self.changed
        if manifest is None:
            return
        self._drop(judged, Verdict.CORRUPT)
        self._drop(judged, Verdict.UNREADABLE)
        kept = contents.live[judged.is_good]
        kept["flags"] &= np.uint16(0xFFFF ^ NEEDS_VERIFY)  # they passed verification
        is_damaged = (
            changed.dropped
            or scanned.is_damaged
            or not contents.is_trusted
            or contents.journal_bytes != scanned.end_bytes
            or not contents.found.has_journal
        )
        try:
            if is_recovered:
                self._replace(MANIFEST, [manifest.encode()])
                changed.manifest_rebuilt = True
            if is_damaged:
                self._write_journal(contents, kept)
            for name in contents.found.temps:
                self._remove(name, changed.temps, "left by a killed writer")
            now = read_contents(self._ops, self._store)
        except OSError as error:
            self.fail(f"cannot be written: {error.strerror or error}")
            return
        changed.blocks = len(now.live)
        for problem in inspection_of(self._store, now, None).problems:
            self.fail(problem)
        if len(now.live) != len(kept):
            self.fail(f"{len(now.live)} blocks exist instead of {len(kept)}")

    def drop_corrupt(self, contents: Contents, judged: Judged) -> None:
        """Drop the blocks that fail verification; keep unreadable ones.

        Raises:
            OSError: The journal cannot be written.
        """
        for verdict, bad in judged.bad(Verdict.UNREADABLE):
            self.fail(problem_of(verdict, bad).text, bad.what)
        self._drop(judged, Verdict.CORRUPT)
        if not self.changed.dropped:
            return
        kept = contents.live[judged.is_good | judged.are(Verdict.UNREADABLE)]
        self.changed.blocks = len(kept)
        if not self.changed.dry_run:
            self._write_journal(contents, kept)
            return
        self._findings += (problem_of(verdict, bad) for verdict, bad in judged.bad(Verdict.CORRUPT))

    def remove_files(self, contents: Contents, options: GcOptions) -> None:
        """Remove leftovers of killed writers and, if selected, unknown files."""
        for name in contents.found.temps:
            self._remove(name, self.changed.temps, "left by a killed writer")
        if self.changed.dry_run:
            for name in self.changed.temps:
                self._findings.append(Problem(f"left by a killed writer: {name}", name))
        if not options.unknown_files:
            return
        for name in contents.found.unknown_files:
            status = self._ops.stat(f"{self._store.folder}/{name}")
            is_old = time.time() - status.st_mtime >= options.older_than_s
            if is_old and not stat_module.S_ISDIR(status.st_mode):
                self._remove(name, self.changed.unknown_files, "not part of a store")

    # -- internal ---------------------------------------------------------------------------------

    def _drop(self, judged: Judged, verdict: Verdict) -> None:
        for _, bad in judged.bad(verdict):
            self.changed.dropped.append(bad)
            self._findings.append(Removal(bad.what, bad.reason))

    def _remove(self, name: str, removed: list[str], reason: str) -> None:
        path = f"{self._store.folder}/{name}"
        try:
            size_bytes = disk_bytes(self._ops.stat(path))
            if not self.changed.dry_run:
                self._ops.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self.fail(f"{name}: cannot be removed: {error.strerror or error}", name)
            return
        removed.append(name)
        self.changed.freed_bytes += size_bytes
        self._findings.append(Removal(name, reason, size_bytes))

    def _write_journal(self, contents: Contents, kept: Records) -> None:
        """Rewrite the journal with only these blocks."""
        if contents.manifest is None:
            return
        seed = contents.manifest.journal_seed
        sequence = contents.scanned.sequence
        self._replace(JOURNAL, checkpoint(sequence + 1, kept, seed))
        # The journal now has all verification marks; other blocks were read in this boot.
        frames = -(-len(kept) // CHECKPOINT_FRAME_RECORDS)
        self._replace(SESSION, Session(boot_id(), sequence + frames).encode(seed))
        self.changed.journal_rebuilt = True

    def _replace(self, name: str, parts: Iterable[bytes]) -> None:
        """Rewrite a file atomically."""
        replace_file(self._ops, f"{self._store.folder}/{name}", parts)
        self._findings.append(Rewrite(name))


_PROBLEMS_AT_ONCE: Final = 1000


class SlabMaintenance(StoreMaintenance):
    """Maintains a slab store; only `gc` and `repair` need exclusive access."""

    tier_type: ClassVar[str] = "slab"
    report_key: ClassVar[str] = "slab_stores"
    appearance: ClassVar[str] = f"a folder with {MANIFEST}, a journal or segments"

    def __init__(self, store: SlabStore, ops: FileOps) -> None:
        """Maintain a store; `ops` must have entered the directory in which it was found."""
        self.folder = store.folder
        self._store = store
        self._ops = ops
        self._key: IntegrityKey | None = None

    def use_integrity_key_file(self, path: str) -> None:
        self._key = read_key_file(path)

    @classmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        ops = FileOps()
        io = MaintenanceIo(ops, MaintenanceControl())
        stores = await io.run(find_slab_stores, ops, directory)
        return [cls(store, ops) for store in stores]

    async def inspect(self, control: MaintenanceControl) -> Findings:
        found, _ = await inspect_slab(MaintenanceIo(self._ops, control), self._store)
        for text in found.problems:
            yield Problem(text)
        yield Summary("Slab stores", found.rows, asdict(found))

    async def verify(self, control: MaintenanceControl) -> Findings:
        """Read every block and check its digest; changes nothing.

        Bad blocks are reported at the end, because those replaced by a tier meanwhile do not count.
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
        figures = asdict(found) | {"verification": asdict(verified)}
        yield Summary("Blocks", rows, figures)

    async def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        changes = Changes(self._ops, self._store, dry_run=options.dry_run)
        if problem := await newer_format(io, self._store):
            changes.fail(problem)
        else:
            async with nullcontext() if options.dry_run else self._locked(io):
                await self._clean_up(io, changes, options)
        for finding in changes.take_findings():
            yield finding
        title = "Would be removed" if options.dry_run else "Removed"
        yield Summary(title, changes.changed.rows, asdict(changes.changed))

    def repair(self, options: RepairOptions, control: MaintenanceControl) -> Findings:
        """Keep all blocks that verify, and drop the rest; an intact store is not changed.

        Manifest and journal are rewritten if damaged.
        """
        given = None if options.manifest is None else decode_given(options.manifest)
        return self._repair(given, control)

    async def _repair(self, given: Manifest | None, control: MaintenanceControl) -> Findings:
        io = MaintenanceIo(self._ops, control)
        changes = Changes(self._ops, self._store)
        if problem := await newer_format(io, self._store):
            changes.fail(problem)
        else:
            async with self._locked(io):
                await self._rebuild(io, changes, given)
        for finding in changes.take_findings():
            yield finding
        yield Summary("Repaired", changes.changed.rows, asdict(changes.changed))

    @asynccontextmanager
    async def _locked(self, io: MaintenanceIo) -> AsyncIterator[None]:
        """Lock the store against tiers."""
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
            changes.fail(f"{contents.manifest_problem}; run repair")
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
                    f"{contents.manifest_problem}, and it cannot be reconstructed; give "
                    f"--manifest with the {MANIFEST} of a store of the same model and block size"
                )
                return
            contents = await io.run(read_contents, self._ops, self._store, manifest)
        if problem := key_problem(contents, self._key):
            changes.fail(problem)
            return
        judged = await verify_slab(io, self._store, contents, self._key)
        if is_recovered and self._key is not None and not judged.is_good.any():
            changes.fail("no block verifies with the integrity key: it may be the wrong key")
            return
        if not io.control.should_stop():
            await io.run(lambda: changes.rebuild(contents, judged, is_recovered=is_recovered))


def _next_of(problems: Iterator[Problem]) -> list[Problem]:
    return list(islice(problems, _PROBLEMS_AT_ONCE))
