"""What lies in a namespace: one walk, its subfolders side by side."""

from __future__ import annotations

import os
import re
import stat as stat_module
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from kvoffload_async.cli.gauge import Gauge
from kvoffload_async.cli.store.namespaces import FoundNamespace
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX
from kvoffload_async.types import OffloadKey

Batch = TypeVar("Batch")
Checked = TypeVar("Checked")

_BLOCK_FOLDER: Final = re.compile(r"[0-9a-f]{1,3}(/[0-9a-f]{0,2}_g[0-9]+)?")
_Entries = list[tuple[str, os.stat_result]]


@dataclass(slots=True)
class Walker:
    """What the work on a store shares.

    Attributes:
        ops: The system calls.
        limiter: Bounds the threads that are in one.
        gauge: Told of what there is to do.
        should_stop: Asked between two pieces of work.
    """

    ops: FileOps
    limiter: anyio.CapacityLimiter
    gauge: Gauge
    should_stop: Callable[[], bool] = lambda: False

    async def share_out(
        self,
        batches: Iterator[Batch],
        check: Callable[[Batch], Checked],
        take_in: Callable[[Batch, Checked], None],
    ) -> None:
        """Go through all batches, or until stopped.

        Args:
            batches: Each is checked once.
            check: Called in threads, several side by side.
            take_in: Called on the loop with each batch and what its check has returned.
        """

        async def work() -> None:
            for batch in batches:  # shared by all: each batch goes to one
                if self.should_stop():
                    return
                take_in(batch, await anyio.to_thread.run_sync(check, batch, limiter=self.limiter))

        async with anyio.create_task_group() as group:
            for _ in range(int(self.limiter.total_tokens)):
                group.start_soon(work)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file; `disk_bytes` as allocated, `modified_s` in seconds since the epoch."""

    path: str
    length_bytes: int
    disk_bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class FoundBlock(FoundFile):
    """A block's file."""

    key: OffloadKey


@dataclass(slots=True)
class Survey:
    """What a walk has found.

    Attributes:
        blocks: Files whose path is that of a block.
        temps: Temporary files.
        strangers: Anything else that is no folder.
        folders: Folders for blocks.
        other_folders: Folders that are none.
        total_bytes: Disk bytes of everything, folders and housekeeping included.
        grown_bytes: What folders take beyond their first allocation.
        unreadable: Why folders could not be walked.
    """

    blocks: list[FoundBlock] = field(default_factory=list)
    temps: list[FoundFile] = field(default_factory=list)
    strangers: list[FoundFile] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    other_folders: list[str] = field(default_factory=list)
    total_bytes: int = 0
    grown_bytes: int = 0
    unreadable: list[str] = field(default_factory=list)


async def take_survey(walker: Walker, namespace: FoundNamespace) -> Survey:
    """Walk over a namespace; what vanishes meanwhile is left out. Incomplete once stopped."""
    survey = Survey()

    async def walk(folder: str) -> None:
        if not walker.should_stop():
            entries, error = await anyio.to_thread.run_sync(
                _walk, walker.ops, folder, limiter=walker.limiter
            )
            _take_in(survey, namespace, entries)
            if error is not None:
                survey.unreadable.append(f"{folder}: {error.strerror or error}")
        walker.gauge.advance(1)

    top, error = await anyio.to_thread.run_sync(
        _list, walker.ops, namespace.folder, limiter=walker.limiter
    )
    if error is not None:
        survey.unreadable.append(f"{namespace.folder}: {error.strerror or error}")
    _take_in(survey, namespace, top)
    folders = [
        path
        for path, status in top
        if path != namespace.folder and stat_module.S_ISDIR(status.st_mode)
    ]
    walker.gauge.expect(len(folders))
    async with anyio.create_task_group() as group:
        for folder in folders:
            group.start_soon(walk, folder)
    return survey


def _list(ops: FileOps, folder: str) -> tuple[_Entries, OSError | None]:
    """Return a folder and what is directly in it. Thread: any."""
    entries: _Entries = []
    try:
        entries.append((folder, ops.stat(folder)))
        with os.scandir(folder) as found:
            for entry in found:
                try:
                    entries.append((entry.path, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return entries, None
    except OSError as error:
        return entries, error
    return entries, None


def _walk(ops: FileOps, folder: str) -> tuple[_Entries, OSError | None]:
    """Return everything below a folder. Thread: any."""
    entries: _Entries = []
    try:
        entries.extend(ops.walk(folder))
    except OSError as error:
        return entries, error
    return entries, None


def _take_in(survey: Survey, namespace: FoundNamespace, entries: _Entries) -> None:
    for path, status in entries:
        allocated_bytes = disk_bytes(status)
        survey.total_bytes += allocated_bytes
        name = path[len(namespace.folder) + 1 :]
        if stat_module.S_ISDIR(status.st_mode):
            survey.grown_bytes += max(0, allocated_bytes - status.st_blksize)
            if _BLOCK_FOLDER.fullmatch(name):
                survey.folders.append(path)
            elif name and not name.startswith("."):
                survey.other_folders.append(path)
            continue
        if name.startswith("."):
            continue
        file = (path, status.st_size, allocated_bytes, status.st_mtime)
        key = namespace.key_of(path)
        if not stat_module.S_ISREG(status.st_mode):
            survey.strangers.append(FoundFile(*file))
        elif key is not None:
            survey.blocks.append(FoundBlock(*file, key))
        elif name.endswith(TEMP_SUFFIX):
            survey.temps.append(FoundFile(*file))
        else:
            survey.strangers.append(FoundFile(*file))
