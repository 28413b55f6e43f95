"""Removes from a namespace what nobody will use: the work of `kvoffload store gc`.

What living writers own stays. The walk comes before the judgement over the writers: whoever has
left a temporary file that the walk has found had registered before, and so is known by then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import anyio.to_thread

from kvoffload_async.cli.store.inspection import Writers, judge_writers, sort_temps
from kvoffload_async.cli.store.namespaces import FoundNamespace
from kvoffload_async.cli.store.survey import FoundFile, Survey, Walker, take_survey
from kvoffload_async.cli.store.verification import verify_blocks
from kvoffload_async.cli.store.wishes import Wishes
from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.inventory import take_inventory, writer_of
from kvoffload_async.tiers.fs.outcome import DiskChange
from kvoffload_async.tiers.fs.usage import FILE_NAME, UsageFile
from kvoffload_async.tiers.fs.writers import FOLDER, WriterRegistry


@dataclass(slots=True)
class Collected:
    """What was removed from one namespace, or would be.

    Attributes:
        name: The namespace's folder's name.
        dry_run: Whether nothing was changed.
        temps_of_dead: Temporary files of dead writers.
        temps_foreign: Old temporary files of writers that are not known here.
        corrupt: Blocks that do not verify.
        strangers: Files that are no blocks.
        writers: Entries of dead writers.
        folders: Empty folders.
        freed_bytes: Disk bytes of all of these.
        counted_bytes: The shared count afterwards, where there is one.
        failures: What could not be removed or read, and why.
    """

    name: str
    dry_run: bool
    temps_of_dead: list[str] = field(default_factory=list)
    temps_foreign: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    counted_bytes: int | None = None
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @property
    def still_wrong(self) -> list[str]:
        """What a dry run has left as it is, though it is wrong, a line each."""
        if not self.dry_run:
            return []
        return [
            *(f"corrupt: {path}" for path in self.corrupt),
            *(f"left by a dead writer: {path}" for path in self.temps_of_dead),
        ]


async def collect(walker: Walker, namespace: FoundNamespace, wishes: Wishes) -> Collected:
    """Clean up one namespace; once stopped, what is left to do is left out.

    Raises:
        InputError: It cannot be written.
    """
    run = partial(anyio.to_thread.run_sync, limiter=walker.limiter)
    broom = Broom(walker.ops, namespace, wishes)
    await run(broom.enter)
    try:
        survey = await take_survey(walker, namespace)
        broom.collected.failures += survey.unreadable
        writers = await run(broom.judge)
        if wishes.corrupt:
            await _remove_corrupt(walker, namespace, survey, broom)
        if not walker.should_stop():
            await run(broom.sweep, survey, writers)
    finally:
        await run(broom.leave)
    return broom.collected


async def _remove_corrupt(
    walker: Walker, namespace: FoundNamespace, survey: Survey, broom: Broom
) -> None:
    found = await verify_blocks(
        walker, namespace, survey.blocks, remove_corrupt=not broom.wishes.dry_run
    )
    sizes = {block.path: block.disk_bytes for block in survey.blocks}
    for bad in found.corrupt:
        if bad.is_removed or broom.wishes.dry_run:
            broom.note(broom.collected.corrupt, bad.path, sizes[bad.path])
    stays = [*found.unreadable, *(bad for bad in found.corrupt if not bad.is_removed)]
    if not broom.wishes.dry_run:
        broom.collected.failures += [str(bad) for bad in stays]


class Broom:
    """Sweeps one namespace, as a writer among the others. Thread: an I/O thread, one at a time.

    Attributes:
        collected: What came of it so far.
        wishes: What to do.
    """

    def __init__(self, ops: FileOps, namespace: FoundNamespace, wishes: Wishes) -> None:
        self.wishes = wishes
        self.collected = Collected(namespace.name, wishes.dry_run)
        self._ops = ops
        self._namespace = namespace
        self._writers: WriterRegistry | None = None
        self._gone: set[str] = set()

    def enter(self) -> None:
        """Register, where there are writers: their count is shared, and so is their clock.

        Raises:
            InputError: The namespace cannot be written.
        """
        if self.wishes.dry_run or not self._ops.exists(f"{self._namespace.folder}/{FOLDER}"):
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

    def judge(self) -> Writers:
        """Return who is writing."""
        writers = judge_writers(self._ops, self._namespace.folder, self._now_s())
        own_id = {self._writers.writer_id} if self._writers else set()
        return Writers(writers.living - own_id, writers.dead - own_id)

    def sweep(self, survey: Survey, writers: Writers) -> None:
        """Remove files, entries and folders that nobody will use."""
        collected = self.collected
        latest_s = self._now_s() - self.wishes.older_than_s
        temps = sort_temps(survey.temps, writers)
        old_foreign = [temp for temp in temps.foreign if temp.modified_s <= latest_s]
        self._remove_files(temps.dead, collected.temps_of_dead)
        self._remove_files(old_foreign, collected.temps_foreign)
        if self.wishes.strangers:
            old = [file for file in survey.strangers if file.modified_s <= latest_s]
            self._remove_files(old, collected.strangers)
        left = {writer_of(t.path) for t in temps.dead if t.path not in self._gone}
        self._forget(sorted(writers.dead - left))
        self._remove_folders(survey)

    def leave(self) -> None:
        """Set the shared count right, and say goodbye."""
        writers, self._writers = self._writers, None
        if writers is None:
            return
        try:
            if self._ops.exists(f"{self._namespace.folder}/{FILE_NAME}"):
                self.collected.counted_bytes = self._recount(writers)
        except OSError as error:
            self.collected.failures.append(f"the count of bytes: {error.strerror or error}")
        finally:
            writers.unregister()

    def note(self, removed: list[str], path: str, freed_bytes: int) -> None:
        """Note that something is gone."""
        removed.append(path)
        self._gone.add(path)
        self.collected.freed_bytes += freed_bytes

    # -- inside ---------------------------------------------------------------------------------

    def _now_s(self) -> float:
        """Return the time by the filesystem's clock, where this writer has an entry there."""
        if self._writers is None:
            return time.time()
        self._writers.heartbeat()
        return self._ops.stat(self._entry(self._writers.writer_id)).st_mtime

    def _entry(self, writer_id: str) -> str:
        return f"{self._namespace.folder}/{FOLDER}/{writer_id}"

    def _remove_files(self, files: Iterable[FoundFile], removed: list[str]) -> None:
        for file in files:
            self._remove(file.path, file.disk_bytes, removed, self._ops.unlink)

    def _forget(self, writer_ids: Iterable[str]) -> None:
        for writer_id in writer_ids:
            path = self._entry(writer_id)
            with contextlib.suppress(FileNotFoundError):
                size_bytes = disk_bytes(self._ops.stat(path))
                self._remove(path, size_bytes, self.collected.writers, self._ops.unlink)

    def _remove_folders(self, survey: Survey) -> None:
        """Remove empty folders, the deepest first. A writer makes one again that it misses."""
        occupied: set[str] = set()
        files = (*survey.blocks, *survey.temps, *survey.strangers)
        for path in (*(file.path for file in files), *survey.other_folders):
            if path not in self._gone:
                _add_parents(occupied, path)
        for folder in sorted(survey.folders, reverse=True):
            if folder not in occupied:
                with contextlib.suppress(FileNotFoundError):
                    size_bytes = disk_bytes(self._ops.stat(folder))
                    self._remove(folder, size_bytes, self.collected.folders, self._ops.rmdir)

    def _remove(
        self, path: str, size_bytes: int, removed: list[str], call: Callable[[str], None]
    ) -> None:
        if not self.wishes.dry_run:
            try:
                call(path)
            except FileNotFoundError:
                return
            except OSError as error:
                if call != self._ops.rmdir:  # a folder that is in use again is no failure
                    self.collected.failures.append(f"{path}: {error.strerror or error}")
                return
        self.note(removed, path, size_bytes)

    def _recount(self, writers: WriterRegistry) -> int:
        """Correct the shared count by a walk, as far as living writers let it be known."""

        def on_disk() -> int:
            living = {*writers.living(), writers.writer_id}
            inventory = take_inventory(self._ops, self._namespace)
            own_bytes = disk_bytes(self._ops.stat(self._entry(writers.writer_id)))
            return inventory.settled_bytes(living) - own_bytes

        usage = UsageFile(self._ops, self._namespace.folder, writers.writer_id, on_disk)
        usage.open()
        try:
            before = usage.settle(0, DiskChange(removed_bytes=self.collected.freed_bytes))
            return usage.correct(before, on_disk(), writers.living).settled_bytes
        finally:
            usage.close()


def _add_parents(folders: set[str], path: str) -> None:
    parent = path.rpartition("/")[0]
    while parent and parent not in folders:
        folders.add(parent)
        parent = parent.rpartition("/")[0]
