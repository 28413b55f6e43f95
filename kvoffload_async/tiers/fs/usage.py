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

import os
from collections.abc import Callable, Collection
from typing import TypeVar

from kvoffload_async.tiers.files.locks import LOCK_TIMEOUT_S, LockedFile
from kvoffload_async.tiers.files.ops import FileOps, write_all
from kvoffload_async.tiers.fs.corrections import BucketScan, is_corrected, raise_by
from kvoffload_async.tiers.fs.counts import (
    FILE_BYTES,
    FILE_NAME,
    MAX_WRITERS,
    SLOT_BYTES,
    Usage,
    parsed,
)
from kvoffload_async.tiers.fs.layout import REST
from kvoffload_async.tiers.fs.outcome import DiskChange
from kvoffload_async.tiers.fs.unreported_usage import UnreportedUsage

T = TypeVar("T")


class UsageFile:
    """The shared count's file.

    Attributes:
        is_complete: Whether the count was known, and this writer in it, at the last change.
        total_bytes: What counted against the capacity after it.
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
        self.total_bytes = 0
        self._ops = ops
        self._path = f"{namespace_folder}/{FILE_NAME}"
        self._living = living
        self._file = LockedFile(ops, self._path, timeout_s=lock_timeout_s)
        self._is_open = False
        # Under its lock:
        self._buffer = memoryview(bytearray(FILE_BYTES))
        self._last: Usage | None = None
        self._entry_bytes = 0
        self._own = UnreportedUsage(writer_id)

    def open(self, entry_bytes: int = 0) -> None:
        """Join the count, which is made if it is not there.

        Args:
            entry_bytes: Disk bytes that are this writer's own, and go with it.

        Raises:
            OSError: The file cannot be used.
            NewerCountError: Its format is newer.
        """

        def join(usage: Usage) -> None:
            self._reap(usage)
            usage.change(REST, entry_bytes, 0)

        self._is_open = True
        try:
            self._change(join)
        except BaseException:
            self._is_open = False
            self._file.close()
            raise
        self._entry_bytes = entry_bytes

    def close(self) -> None:
        """Give back what this writer had set aside, and leave the count; idempotent."""
        if not self._is_open:
            return

        def leave(usage: Usage) -> None:
            usage.writers.pop(self._own.writer_id, None)
            usage.change(REST, 0, self._entry_bytes)

        try:
            self._change(leave)
        finally:
            self._is_open = False
            self._file.close()

    def rename_writer(self, writer_id: str) -> None:
        """Go on under another id; what the old one had set aside is the new one's.

        The next change drops the old one's entry and makes the new one's.
        """
        self._own.rename(writer_id)

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

        def grant(usage: Usage) -> None:
            nonlocal granted
            if self._counts_in(usage):
                room = max(0, capacity_bytes - usage.total_bytes) // unit_bytes
                granted = min(count, room)
                self._own.reserve(granted * unit_bytes)
                usage.writers[self._own.writer_id].reserved_bytes += granted * unit_bytes

        try:
            self._change(grant)
        except BaseException:
            self._own.reserve(-granted * unit_bytes)
            raise
        return granted

    def settle(self, released_bytes: int, change: DiskChange, operation: int | None = None) -> None:
        """Give back room that was set aside, and count what became of it.

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
        self._change(_nothing)

    def read(self) -> Usage:
        """Return the count."""
        return self._change(Usage.copy)

    # -- walks ----------------------------------------------------------------------------------

    def begin_cycle(self) -> int:
        """Presume what the dead had reserved used; return how much was ever presumed so."""

        def begin(usage: Usage) -> int:
            self._reap(usage)
            return usage.presumed_ever

        return self._change(begin)

    def end_cycle(self, presumed_ever: int) -> None:
        """Give up what was presumed before the cycle began, all of whose buckets were exact."""

        def end(usage: Usage) -> None:
            over = min(presumed_ever, usage.presumed_ever)  # if it was made anew meanwhile
            usage.presumed_over = max(usage.presumed_over, over)

        self._change(end)

    def correct(self, bucket_scans: Collection[BucketScan], operation: int) -> list[BucketScan]:
        """Correct the count by what walks have found; return what must be waited for.

        Args:
            bucket_scans: What they have found. Those that are not returned are done with; not exact
                are those whose bucket was changed meanwhile: their count is corrected only if it
                is off by more than that.
            operation: The walk's own, which has ended.
        """
        self._own.end(operation)
        return self._change(lambda usage: [s for s in bucket_scans if not is_corrected(usage, s)])

    def give_up(self, bucket_scans: Collection[BucketScan]) -> None:
        """Correct the count by what was waited for in vain, as far as it is certainly too small."""

        def give_up(usage: Usage) -> None:
            for bucket_scan in bucket_scans:
                raise_by(usage, bucket_scan)

        self._change(give_up)

    # -- inside ---------------------------------------------------------------------------------

    def _counts_in(self, usage: Usage) -> bool:
        return usage.is_complete and self._own.writer_id in usage.writers

    def _reap(self, usage: Usage) -> None:
        dead = usage.writers.keys() - {*self._living(), self._own.writer_id}
        for writer_id in dead:
            usage.presumed_ever += usage.writers.pop(writer_id).reserved_bytes
        self._enter(usage)  # there may have been no place before

    def _enter(self, usage: Usage) -> None:
        """Say in the count what this writer has reserved and begun, if there is a place."""
        if self._own.writer_id in usage.writers or len(usage.writers) < MAX_WRITERS:
            usage.writers[self._own.writer_id] = self._own.entry()

    def _change(self, call: Callable[[Usage], T]) -> T:
        """Change the count under its lock, with all that this writer has to say."""
        if not self._is_open:
            raise OSError(f"{self._path} is closed")
        with self._file.locked() as fd:
            last, self._last = self._last, None
            content = _content(self._ops, fd, self._buffer)
            found = parsed(content, last)
            usage, is_new = found or Usage(), found is None
            own = self._own
            untold = own.begin_change(usage)
            try:
                for bucket, (added_bytes, removed_bytes) in untold.buckets.items():
                    usage.change(bucket, added_bytes, removed_bytes)
                self._enter(usage)
                result = call(usage)
                self._write(fd, usage, is_new=is_new)
            except BaseException:
                own.telling = untold
                raise
            own.end_change()
            self._last = usage
            self.is_complete = self._counts_in(usage)
            self.total_bytes = usage.total_bytes
            return result

    def _write(self, fd: int, usage: Usage, *, is_new: bool) -> None:
        if is_new:  # it takes its place on disk before that is counted
            write_all(self._ops, fd, bytes(FILE_BYTES), 0)
        usage.sequence += 1
        write_all(self._ops, fd, usage.packed(), usage.sequence % 2 * SLOT_BYTES)


def _nothing(usage: Usage) -> None:
    """Change nothing but what this writer has to say."""


def read_usage(ops: FileOps, namespace_folder: str) -> Usage | None:
    """Return a namespace's count without joining it; None if it is unreadable.

    Raises:
        OSError: There is none, it cannot be read, or its format is newer.
    """
    fd = ops.open(f"{namespace_folder}/{FILE_NAME}", os.O_RDONLY)
    try:  # no lock: of a slot that is half written, the other is whole
        return parsed(_content(ops, fd, memoryview(bytearray(FILE_BYTES))))
    finally:
        ops.close(fd)


def _content(ops: FileOps, fd: int, buffer: memoryview) -> memoryview:
    """Read a file into the buffer; return what it has."""
    done = ops.pread_into(fd, buffer, 0)
    while 0 < done < FILE_BYTES:
        count = ops.pread_into(fd, buffer[done:], done)
        if not count:
            break
        done += count
    return buffer[:done]
