"""Common parts of store maintenance: threads, verdicts and figures of `verify`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Generic, Protocol, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from kvoffload_async.abc.maintenance import MAX_LISTED, MaintenanceControl, Problem
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.waiting import all_done


class BadBlock(Protocol):
    """A bad block; `str()` gives its name and the reason."""

    @property
    def what(self) -> str:
        """Name of the block."""
        ...


Bad = TypeVar("Bad", bound=BadBlock)


class Verdict(Enum):
    """Result of verifying one block."""

    VERIFIED = auto()
    """The digest matches."""
    WITHOUT_DIGEST = auto()
    """The length is right, and there is no digest."""
    CORRUPT = auto()
    UNREADABLE = auto()
    NEWER = auto()
    """The length is right, and the digest is of a newer release."""
    OTHER_KEY = auto()
    """The digest cannot be compared: the integrity key is missing or a different one."""
    GONE = auto()
    """Removed or replaced meanwhile."""


FIGURE_OF: Final = {
    Verdict.VERIFIED: "verified",
    Verdict.WITHOUT_DIGEST: "without_digest",
    Verdict.NEWER: "newer",
    Verdict.OTHER_KEY: "other_key",
    Verdict.CORRUPT: "corrupt_blocks",
    Verdict.UNREADABLE: "unreadable_blocks",
}
"""Verdict on an existing block -> the figure of a `Verification` that counts it."""


def problem_of(verdict: Verdict, bad: BadBlock) -> Problem:
    """Convert a verdict to a problem."""
    return Problem(f"{verdict.name.lower()}: {bad}", bad.what)


@dataclass(slots=True, kw_only=True)
class Verification(Generic[Bad]):
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
    corrupt: list[Bad] = field(default_factory=list)
    unreadable: list[Bad] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each figure, for people."""
        return [
            ("blocks read", f"{self.checked:,}"),
            ("verified", f"{self.verified:,}"),
            ("without a digest", f"{self.without_digest:,}"),
            ("of a newer release", f"{self.newer:,}"),
            ("of another integrity key", f"{self.other_key:,}"),
            ("corrupt", f"{self.corrupt_blocks:,}"),
            ("unreadable", f"{self.unreadable_blocks:,}"),
        ]

    def count(self, verdict: Verdict, bad: Bad) -> Problem | None:
        """Count a block that still exists; return a problem if it is bad."""
        name = FIGURE_OF[verdict]
        setattr(self, name, getattr(self, name) + 1)
        self.checked += verdict is not Verdict.UNREADABLE
        listed = {Verdict.CORRUPT: self.corrupt, Verdict.UNREADABLE: self.unreadable}.get(verdict)
        if listed is None:
            return None
        if self.max_listed is None or len(listed) < self.max_listed:
            listed.append(bad)
        return problem_of(verdict, bad)


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
        self._manifests = ThreadPoolExecutor(1, "kvoffload-manifests")  # ends with this object

    async def run(self, call: Callable[[*Arguments], Checked], *arguments: *Arguments) -> Checked:
        """Return a blocking call's result; a cancellation is delivered after it has ended."""
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

        threads = self._manifests
        file = await aiofiles.open(path, "rb", opener=self.ops.open, executor=threads)
        try:
            return await file.read(max_bytes)
        finally:
            await file.close()  # `async with` would close it in the loop's default executor

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
