"""What the maintenance of stores shares: threads, keys of a report, verdicts of `verify`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Generic, Protocol, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from kvoffload_async.abc.maintenance import MAX_LISTED, MaintenanceControl, Problem
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.waiting import all_done


class BadBlock(Protocol):
    """A block that is not as it should be; as text, which and why."""

    @property
    def what(self) -> str:
        """Which block."""
        ...


Bad = TypeVar("Bad", bound=BadBlock)


class Verdict(Enum):
    """What is found about one block."""

    VERIFIED = auto()
    """Its bytes are those that its digest is of."""
    WITHOUT_DIGEST = auto()
    """It is all there, and has no digest."""
    CORRUPT = auto()
    UNREADABLE = auto()
    NEWER = auto()
    """It is all there, and its digest is of a newer release."""
    OTHER_KEY = auto()
    """Nobody can tell without its integrity key, or it was not made with the one that is given."""
    GONE = auto()
    """It was removed or replaced meanwhile."""


def problem_of(verdict: Verdict, bad: BadBlock) -> Problem:
    """Return what is wrong with a block, by its verdict."""
    return Problem(f"{verdict.name.lower()}: {bad}", bad.what)


@dataclass(slots=True, kw_only=True)
class Verification(Generic[Bad]):
    """How many blocks are as they should be, and which are not.

    Attributes:
        max_listed: How many of the corrupt and of the unreadable ones are listed; None: all.
        checked: Blocks that were read.
        verified: Those whose digest is right.
        without_digest: Those of the right length that have none.
        newer: Those whose digest is of a newer release.
        other_key: Those whose digest cannot be compared with the integrity key that was given.
        corrupt_blocks: Those of a wrong length or with a wrong digest.
        unreadable_blocks: Those that could not be read.
        corrupt: The first of the corrupt ones, and `unreadable` of the unreadable ones.
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
        """The figures for people."""
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
        """Take in a block that is not gone; `bad` names it, should it be one that is a problem."""
        if verdict is Verdict.UNREADABLE:
            self.unreadable_blocks += 1
            self._list(self.unreadable, bad)
            return problem_of(verdict, bad)
        self.checked += 1
        if verdict is Verdict.CORRUPT:
            self.corrupt_blocks += 1
            self._list(self.corrupt, bad)
            return problem_of(verdict, bad)
        if verdict is Verdict.VERIFIED:
            self.verified += 1
        elif verdict is Verdict.NEWER:
            self.newer += 1
        elif verdict is Verdict.OTHER_KEY:
            self.other_key += 1
        else:
            self.without_digest += 1
        return None

    def _list(self, listed: list[Bad], bad: Bad) -> None:
        if self.max_listed is None or len(listed) < self.max_listed:
            listed.append(bad)


IO_THREADS: Final = 4
"""Threads that are in a system call at once; more lose on a local disk."""

Batch = TypeVar("Batch")
Checked = TypeVar("Checked")
Arguments = TypeVarTuple("Arguments")


class MaintenanceIo:
    """Runs the calls of one piece of maintenance in a few threads.

    Attributes:
        ops: The system calls.
        control: Whom to tell, and whom to ask whether to stop.
    """

    def __init__(self, ops: FileOps, control: MaintenanceControl) -> None:
        self.ops = ops
        self.control = control
        self._limiter = anyio.CapacityLimiter(IO_THREADS)

    async def run(self, call: Callable[[*Arguments], Checked], *arguments: *Arguments) -> Checked:
        """Return what a call returns that blocks; a cancellation is delivered when it has ended."""
        task = self._start(call, *arguments)
        await _settle([task])
        return task.result()

    async def share_out(
        self, batches: Iterator[Batch], check: Callable[[Batch], Checked]
    ) -> AsyncGenerator[tuple[Batch, Checked], None]:
        """Check batches in threads, several at once; yield each with its result, or until stopped.

        To be closed by whoever does not iterate to the end: no check runs any more after that.
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
            await _settle(running)

    def _start(
        self, call: Callable[[*Arguments], Checked], *arguments: *Arguments
    ) -> asyncio.Task[Checked]:
        in_thread = anyio.to_thread.run_sync(call, *arguments, limiter=self._limiter)
        return asyncio.create_task(in_thread, name="kvoffload-maintenance")


async def _settle(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended, however often it is cancelled; then be cancelled."""
    with anyio.CancelScope(shield=True):
        await all_done(*tasks)
