"""How many bytes a namespace takes on disk, counted together by all the tiers that are open on it.

A small file, changed under an advisory lock; see `counts` for what is in it. Room is set aside
before a byte is written and given back after, so that the sum never exceeds the capacity. One
locked change before a job and one after it, whatever its size.

What a writer had set aside when it died is presumed used, until walks that began later have seen
every bucket. A count that is lost, or was never there, is not known until walks have seen every
bucket: until then nothing new is granted.

Every writer says which of its operations on the disk have ended. So a walk over a bucket is exact
if those that ran beside it have ended and the bucket's count has not changed since before the walk.

What this writer has set aside and has changed is kept here too, so that a change of the file that
fails is made up for by the next one.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from kvoffload_async.tiers.files.locks import LOCK_TIMEOUT_S, LockedFile
from kvoffload_async.tiers.files.ops import FileOps, write_all
from kvoffload_async.tiers.fs.counts import (
    FILE_BYTES,
    FILE_NAME,
    MAX_WRITERS,
    SLOT_BYTES,
    Usage,
    WriterCount,
    changed_since,
    parsed,
)
from kvoffload_async.tiers.fs.layout import REST
from kvoffload_async.tiers.fs.outcome import DiskChange


class OlderReleaseError(OSError):
    """The count is kept in an older format by a release that is still running."""


@dataclass(slots=True)
class Sighting:
    """What a walk has found in a bucket, until the count is corrected by it.

    Attributes:
        bucket: Which.
        disk_bytes: What was there, less what was swept.
        swept_bytes: Folders that the walk has removed.
        changed: The bucket's counter of changes before the walk.
        waits_for: Writers whose operations ran beside the walk, and how many they had begun; None
            before that was looked at.
        is_exact: Whether the count was set to it.
    """

    bucket: int
    disk_bytes: int
    swept_bytes: int
    changed: int
    waits_for: dict[str, int] | None = None
    is_exact: bool = False


class _Own:
    """What this writer is to have in the count after its next change.

    It never waits for a change that is under way: nothing is lost if that hangs.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.running: set[int] = set()
        self._begun = 0
        self._untold = DiskChange()
        self._mutex = threading.Lock()

    def begin(self) -> int:
        with self._mutex:
            number = self._begun
            self._begun += 1
            self.running.add(number)
        return number

    def end(self, operation: int) -> None:
        with self._mutex:
            self.running.discard(operation)

    def reserve(self, num_bytes: int) -> None:
        with self._mutex:
            self.reserved_bytes = max(0, self.reserved_bytes + num_bytes)

    def add_untold(self, change: DiskChange) -> None:
        with self._mutex:
            self._untold += change

    def take_untold(self) -> DiskChange:
        with self._mutex:
            untold, self._untold = self._untold, DiskChange()
        return untold

    def entry(self) -> WriterCount:
        with self._mutex:
            oldest = min(self.running, default=self._begun)
            return WriterCount(self.reserved_bytes, self._begun, oldest)


class UsageFile:
    """The shared count's file.

    Attributes:
        is_complete: Whether the count was known, and this writer in it, at the last change.
    """

    def __init__(
        self,
        ops: FileOps,
        namespace_folder: str,
        writer_id: str,
        living: Callable[[], Collection[str]],
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        """Describe where.

        Args:
            ops: The system calls.
            namespace_folder: Where the file is.
            writer_id: Who counts.
            living: Returns the other writers that live. Asked under the lock: who is in the count
                by then has registered before.
            lock_timeout_s: Seconds for taking its lock.
        """
        self.is_complete = False
        self._ops = ops
        self._path = f"{namespace_folder}/{FILE_NAME}"
        self._writer_id = writer_id
        self._living = living
        self._file = LockedFile(ops, self._path, timeout_s=lock_timeout_s)
        self._is_open = False
        self._entry_bytes = 0
        self._own = _Own()

    def open(self, entry_bytes: int = 0) -> Usage:
        """Join the count, which is made if it is not there.

        Args:
            entry_bytes: Disk bytes that are this writer's own, and go with it.

        Raises:
            OSError: The file cannot be used.
            NewerCountError: Its format is newer.
            OlderReleaseError: An older release is counting in it.
        """
        self._is_open = True
        try:
            with self._changed() as usage:
                self._reap(usage)
                usage.change(REST, entry_bytes, 0)
        except BaseException:
            self._is_open = False
            self._file.close()
            raise
        self._entry_bytes = entry_bytes
        return usage

    def close(self) -> None:
        """Give back what this writer had set aside, and leave the count; idempotent."""
        if not self._is_open:
            return
        try:
            with self._changed() as usage:
                usage.writers.pop(self._writer_id, None)
                usage.change(REST, 0, self._entry_bytes)
        finally:
            self._is_open = False
            self._file.close()

    # -- what a job changes ---------------------------------------------------------------------

    def begin(self) -> int:
        """Begin an operation on the disk; return its number.

        The other writers see it from the next change on: there must be one before the disk is
        touched.
        """
        return self._own.begin()

    def end(self, operation: int) -> None:
        """End an operation that has changed nothing; the others see it from the next change on."""
        self._own.end(operation)

    def reserve(self, unit_bytes: int, count: int, capacity_bytes: int) -> int:
        """Set room aside for up to `count` units; return for how many there was room."""
        granted = 0
        try:
            with self._changed() as usage:
                room = max(0, capacity_bytes - usage.total_bytes) // unit_bytes
                granted = min(count, room) if self._counts_in(usage) else 0
                self._own.reserve(granted * unit_bytes)
                self._enter(usage)
        except BaseException:
            self._own.reserve(-granted * unit_bytes)
            raise
        return granted

    def settle(
        self, released_bytes: int, change: DiskChange, operation: int | None = None
    ) -> Usage:
        """Give back room that was set aside, and count what became of it; return the count.

        Args:
            released_bytes: What is given back.
            change: What was done to the disk.
            operation: What has ended with it.

        Raises:
            OSError: The file could not be changed; the next change will tell.
        """
        own = self._own
        own.reserve(-released_bytes)
        own.add_untold(change)
        if operation is not None:
            own.end(operation)
        return self.read()

    def read(self) -> Usage:
        """Return the count."""
        with self._changed() as usage:
            pass
        return usage

    # -- walks ----------------------------------------------------------------------------------

    def begin_cycle(self) -> int:
        """Presume what the dead had reserved used; return how much was ever presumed so."""
        with self._changed() as usage:
            self._reap(usage)
        return usage.presumed_ever

    def end_cycle(self, presumed_ever: int) -> Usage:
        """Give up what was presumed before the cycle began, all of whose buckets were exact."""
        with self._changed() as usage:
            over = min(presumed_ever, usage.presumed_ever)  # if it was made anew meanwhile
            usage.presumed_over = max(usage.presumed_over, over)
        return usage

    def correct(self, sightings: Collection[Sighting], operation: int) -> list[Sighting]:
        """Correct the count by what walks have found; return what must be waited for.

        Args:
            sightings: What they have found. Those that are not returned are done with; not exact
                are those whose bucket was changed meanwhile: their count is corrected only if it
                is off by more than that.
            operation: The walk's own, which has ended.
        """
        self._own.end(operation)
        with self._changed() as usage:
            return [sighting for sighting in sightings if not _corrected(usage, sighting)]

    def give_up(self, sightings: Collection[Sighting]) -> None:
        """Correct the count by what was waited for in vain, as far as it is certainly too small."""
        with self._changed() as usage:
            for sighting in sightings:
                _raise(usage, sighting)

    # -- inside ---------------------------------------------------------------------------------

    def _counts_in(self, usage: Usage) -> bool:
        return usage.is_complete and self._writer_id in usage.writers

    def _reap(self, usage: Usage) -> None:
        dead = usage.writers.keys() - {*self._living(), self._writer_id}
        for writer_id in dead:
            usage.presumed_ever += usage.writers.pop(writer_id).reserved_bytes
        self._enter(usage)  # there may have been no place before

    def _enter(self, usage: Usage) -> None:
        """Say in the count what this writer has reserved and begun, if there is a place."""
        if self._writer_id in usage.writers or len(usage.writers) < MAX_WRITERS:
            usage.writers[self._writer_id] = self._own.entry()

    @contextlib.contextmanager
    def _changed(self) -> Iterator[Usage]:
        if not self._is_open:
            raise OSError(f"{self._path} is closed")
        with self._file.held() as fd:
            content = _content(self._ops, fd)
            usage = parsed(content)
            is_new = usage is None
            if usage is None:
                self._check_older(content)
                usage = Usage()
            untold = self._own.take_untold()
            try:
                for bucket, (added_bytes, removed_bytes) in untold.buckets.items():
                    usage.change(bucket, added_bytes, removed_bytes)
                self._enter(usage)
                yield usage
                self._write(fd, usage, is_new=is_new)
            except BaseException:
                self._own.add_untold(untold)
                raise
            self.is_complete = self._counts_in(usage)

    def _write(self, fd: int, usage: Usage, *, is_new: bool) -> None:
        if is_new:  # both slots: it takes its place on disk before that is counted
            write_all(self._ops, fd, usage.packed(), 0)
        usage.sequence += 1
        write_all(self._ops, fd, usage.packed(), usage.sequence % 2 * SLOT_BYTES)

    def _check_older(self, content: bytes) -> None:
        """Check that nobody counts in the format of before, of which a state is a JSON list."""
        try:
            _, reserved, _ = json.loads(content)
            counting = set(reserved) & set(self._living())
        except (ValueError, TypeError, RecursionError):
            return
        if counting:
            raise OlderReleaseError(
                f"{self._path} is kept by an older release that is running ({min(counting)}): "
                "end that, or use another directory"
            )


def read_usage(ops: FileOps, namespace_folder: str) -> Usage | None:
    """Return a namespace's count without joining it; None if it is unreadable.

    Raises:
        OSError: There is none, it cannot be read, or its format is newer.
    """
    fd = ops.open(f"{namespace_folder}/{FILE_NAME}", os.O_RDONLY)
    try:  # no lock: of a slot that is half written, the other is whole
        return parsed(_content(ops, fd))
    finally:
        ops.close(fd)


def _content(ops: FileOps, fd: int) -> bytes:
    buffer = memoryview(bytearray(FILE_BYTES))
    done = 0
    while done < FILE_BYTES:
        count = ops.pread_into(fd, buffer[done:], done)
        if not count:
            break
        done += count
    return bytes(buffer[:done])


def _corrected(usage: Usage, sighting: Sighting) -> bool:
    """Correct the count by a walk; tell whether that is done."""
    writers = usage.writers
    if sighting.waits_for is None:
        sighting.waits_for = {
            name: writer.begun for name, writer in writers.items() if writer.oldest != writer.begun
        }
    sighting.waits_for = {
        name: begun
        for name, begun in sighting.waits_for.items()
        if name in writers and not writers[name].has_ended(begun)
    }
    if sighting.waits_for:
        return False
    settled_bytes, moved_bytes = _moved(usage, sighting)
    found_bytes = sighting.disk_bytes
    sighting.is_exact = not moved_bytes
    if settled_bytes is None or abs(settled_bytes - found_bytes) > moved_bytes:
        # Which of the changes the walk has seen is not known: rather too much than too little.
        usage.set(sighting.bucket, found_bytes + moved_bytes)
    if sighting.swept_bytes:  # other walks may have seen it: they are not exact
        usage.change(sighting.bucket, sighting.swept_bytes, sighting.swept_bytes)
    return True


def _raise(usage: Usage, sighting: Sighting) -> None:
    """Correct the count upwards by a walk beside which an operation has not ended."""
    settled_bytes, moved_bytes = _moved(usage, sighting)
    found_bytes = sighting.disk_bytes
    if settled_bytes is None:
        usage.set(sighting.bucket, found_bytes + moved_bytes)
    elif found_bytes > settled_bytes + moved_bytes + usage.all_reserved_bytes:
        usage.set(sighting.bucket, found_bytes)


def _moved(usage: Usage, sighting: Sighting) -> tuple[int | None, int]:
    """Return a bucket's settled bytes, and what was changed in it since before the walk."""
    settled_bytes, changed = usage.bucket(sighting.bucket)
    return settled_bytes, changed_since(changed, sighting.changed)
