"""Common parts of the maintenance of stores: threads, figures of `verify`, removal by `gc`."""

from __future__ import annotations

import asyncio
import stat as stat_module
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final, Generic, Self, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from kvoffload_async.abc.maintenance import (
    MAX_LISTED,
    Finding,
    MaintenanceControl,
    Problem,
    Removal,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.digests import read_key_file
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.files.sealing import BlockKey, parse_encryption_keys
from kvoffload_async.waiting import all_done


@dataclass(frozen=True, slots=True)
class BadBlock:
    """Name of a corrupt or unreadable block, and the reason."""

    what: str
    reason: str


class Verdict(Enum):
    """Result of verifying one block; the value is the figure of `Verification` that counts it."""

    VERIFIED = "verified"
    """The digest matches."""
    WITHOUT_DIGEST = "without_digest"
    """The length is right, and there is no digest."""
    NEWER = "newer"
    """The length is right, and the digest is of a newer release."""
    OTHER_KEY = "other_key"
    """The digest cannot be compared: the integrity key is missing or a different one."""
    CORRUPT = "corrupt_blocks"
    UNREADABLE = "unreadable_blocks"
    GONE = "gone"
    """The block was removed or replaced meanwhile."""


def problem_of(verdict: Verdict, bad: BadBlock) -> Problem:
    """Convert the verdict on a bad block to a problem."""
    return Problem(f"{verdict.name.lower()}: {bad.what}: {bad.reason}", bad.what)


@dataclass(slots=True, kw_only=True)
class Verification:
    """Counts of blocks by verdict, with the bad ones.

    Attributes:
        max_listed: Maximum length of the lists of corrupt and unreadable blocks; None: no limit.
        checked: Blocks that were read.
        verified: Blocks with the right digest.
        without_digest: Blocks of the right length without a digest.
        newer: Blocks with a digest of a newer release.
        other_key: Blocks whose digest cannot be compared with the given integrity key.
        corrupt_blocks: Blocks with a wrong length or digest.
        unreadable_blocks: Blocks that could not be read.
        gone: Blocks that were removed or replaced meanwhile.
        corrupt: The first corrupt blocks; `unreadable`: the first unreadable ones.
    """

    max_listed: int | None = MAX_LISTED
    checked: int = 0
    verified: int = 0
    without_digest: int = 0
    newer: int = 0
    other_key: int = 0
    corrupt_blocks: int = 0
    unreadable_blocks: int = 0
    gone: int = 0
    corrupt: list[BadBlock] = field(default_factory=list)
    unreadable: list[BadBlock] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each figure, for people."""
        return [
            ("blocks read", f"{self.checked:,}"),
            ("verified", f"{self.verified:,}"),
            ("without a digest", f"{self.without_digest:,}"),
            ("of a newer release", f"{self.newer:,}"),
            ("of another key", f"{self.other_key:,}"),
            ("corrupt", f"{self.corrupt_blocks:,}"),
            ("unreadable", f"{self.unreadable_blocks:,}"),
            ("removed or replaced meanwhile", f"{self.gone:,}"),
        ]

    def count(self, verdict: Verdict, bad: BadBlock) -> Problem | None:
        """Count a block under its verdict; return a problem if the block is bad."""
        setattr(self, verdict.value, getattr(self, verdict.value) + 1)
        self.checked += verdict not in {Verdict.UNREADABLE, Verdict.GONE}
        listed = {Verdict.CORRUPT: self.corrupt, Verdict.UNREADABLE: self.unreadable}.get(verdict)
        if listed is None:
            return None
        if self.max_listed is None or len(listed) < self.max_listed:
            listed.append(bad)
        return problem_of(verdict, bad)


@dataclass
class Removed:
    """What `gc` removed from one store, or would remove.

    Attributes:
        name: Name of the store's folder.
        dry_run: Whether nothing was changed.
        corrupt: Corrupt blocks.
        unknown_files: Files that are not part of a store.
        tenant_blocks: Blocks of the given tenant.
        freed_bytes: Disk bytes of everything removed.
        failures: What could not be removed or read, and why.
    """

    name: str
    dry_run: bool
    corrupt: list[str] = field(default_factory=list)
    unknown_files: list[str] = field(default_factory=list)
    tenant_blocks: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each figure, for people."""
        return [
            ("corrupt blocks", f"{len(self.corrupt):,}"),
            ("unknown files", f"{len(self.unknown_files):,}"),
            ("blocks of the tenant", f"{len(self.tenant_blocks):,}"),
            ("bytes on disk", f"{self.freed_bytes:,}"),
        ]

    @property
    def summary(self) -> Summary:
        """The summary that `gc` yields as its last finding."""
        title = "Would be removed" if self.dry_run else "Removed"
        return Summary(title, self.rows, asdict(self))


AnyRemoved = TypeVar("AnyRemoved", bound=Removed)


class Cleanup(Generic[AnyRemoved]):
    """Removes parts of one store; in a dry run, only lists them. Not thread-safe.

    Attributes:
        removed: What was removed so far.
    """

    def __init__(self, ops: FileOps, removed: AnyRemoved) -> None:
        self.removed = removed
        self._ops = ops
        self._findings: list[Finding] = []

    def take_findings(self) -> list[Finding]:
        """Return the findings since the last call."""
        findings, self._findings = self._findings, []
        return findings

    def fail(self, text: str, what: str = "") -> None:
        """Record a failure."""
        self.removed.failures.append(text)
        self._findings.append(Problem(text, what))

    def note(self, removed: list[str], removal: Removal, problem: str = "") -> None:
        """Record a removal in one of the lists of `removed`; in a dry run, also as a problem."""
        removed.append(removal.what)
        self.removed.freed_bytes += removal.freed_bytes
        self._findings.append(removal)
        if problem and self.removed.dry_run:
            self._findings.append(Problem(problem, removal.what))

    def remove(
        self, removed: list[str], removal: Removal, call: Callable[[], None], problem: str = ""
    ) -> None:
        """Remove a part by `call`, unless in a dry run, and record the removal or the failure."""
        if not self.removed.dry_run:
            try:
                call()
            except FileNotFoundError:
                return
            except OSError as error:
                what = removal.what
                self.fail(f"{what}: cannot be removed: {error.strerror or error}", what)
                return
        self.note(removed, removal, problem)


IO_THREADS: Final = 4
"""Number of threads that make system calls; more would be slower on a local disk."""

Batch = TypeVar("Batch")
Checked = TypeVar("Checked")
Arguments = TypeVarTuple("Arguments")


class MaintenanceIo:
    """Runs blocking calls of one maintenance operation in a few threads.

    Attributes:
        ops: System calls.
        control: Progress callbacks and stop request.
    """

    def __init__(self, ops: FileOps, control: MaintenanceControl) -> None:
        self.ops = ops
        self.control = control
        self._limiter = anyio.CapacityLimiter(IO_THREADS)

    async def run(self, call: Callable[[*Arguments], Checked], *arguments: *Arguments) -> Checked:
        """Run a blocking call in a thread; a cancellation is delivered after the call has ended."""
        return await _result_of(self._start(call, *arguments))

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """Return a small file's content, or its first `max_bytes`; links are not followed.

        A cancellation is delivered after the file is closed.

        Raises:
            OSError: It cannot be read, or is not a regular file.
        """
        reading = self._read(path, max_bytes)
        return await _result_of(asyncio.create_task(reading, name="kvoffload-maintenance"))

    async def share_out(
        self, batches: Iterator[Batch], check: Callable[[Batch], Checked]
    ) -> AsyncGenerator[tuple[Batch, Checked], None]:
        """Check batches in threads; yield each with its result, until stopped.

        Close the iterator if it is not exhausted; no check runs after that.
        """
        running: dict[asyncio.Task[Checked], Batch] = {}
        try:
            while True:
                while len(running) < IO_THREADS and not self.control.should_stop():
                    batch = next(batches, None)
                    if batch is None:
                        break
                    running[self._start(check, batch)] = batch
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield running.pop(task), task.result()
        finally:
            await _all_ended(running)

    async def _read(self, path: str, max_bytes: int) -> bytes:
        import aiofiles  # noqa: PLC0415 - only maintenance needs it

        threads = ThreadPoolExecutor(1, "kvoffload-manifests")
        try:
            file = await aiofiles.open(path, "rb", opener=self.ops.open, executor=threads)
            try:
                return await file.read(max_bytes)
            finally:
                await file.close()  # `async with` would close it in the loop's default executor
        finally:
            threads.shutdown(wait=False)

    def _start(
        self, call: Callable[[*Arguments], Checked], *arguments: *Arguments
    ) -> asyncio.Task[Checked]:
        in_thread = anyio.to_thread.run_sync(call, *arguments, limiter=self._limiter)
        return asyncio.create_task(in_thread, name="kvoffload-maintenance")


async def _result_of(task: asyncio.Task[Checked]) -> Checked:
    """Wait until a task has ended even if cancelled; return its result, or raise its error."""
    try:
        await _all_ended([task])
        return task.result()
    finally:
        del task  # break the cycle: exception, traceback, frame, task


async def _all_ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended even if cancelled; then raise the cancellation."""
    with anyio.CancelScope(shield=True):
        await all_done(*tasks)


class FolderMaintenance(StoreMaintenance):
    """Maintains a store in a folder."""

    def __init__(self, folder: str, ops: FileOps) -> None:
        """Maintain the store in a folder; `ops` must have entered the folder's directory."""
        self.folder = folder
        self._ops = ops
        self._key: BlockKey = None

    def use_integrity_key_file(self, path: str) -> None:
        self._key = read_key_file(path)

    def use_encryption_key_files(self, paths: Sequence[str]) -> None:
        self._key = parse_encryption_keys(list(paths), "encryption_key_file")

    @classmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        ops = FileOps()
        try:
            return await cls._find(MaintenanceIo(ops, MaintenanceControl()), directory)
        except OSError as error:
            raise InputError(f"{directory}: cannot be read: {error.strerror or error}") from error

    @classmethod
    @abstractmethod
    async def _find(cls, io: MaintenanceIo, directory: str) -> Sequence[Self]:
        """Return the stores at or directly inside a directory; see `find`."""


def folders_in(ops: FileOps, directory: str) -> list[str]:
    """Enter a directory and return the paths of the folders in it, sorted."""
    ops.enter(directory, make=False)
    inside = ops.entries(directory)
    return sorted(path for path, status in inside if stat_module.S_ISDIR(status.st_mode))
