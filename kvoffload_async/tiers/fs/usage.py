"""The count of a namespace's disk bytes, shared by all tiers that are open on it.

It is a small file, changed under an advisory lock; see `counts` for its format. Room is reserved
before a write and released after it, so the sum never exceeds the capacity. A job of any size makes
one locked change before it and one after it.

Reservations of a writer that died are presumed used until later walks have seen every bucket. If
the count is lost or missing, it is unknown until walks have seen every bucket; until then no
reservations are granted.

Every writer publishes which of its disk operations have ended. A walk over a bucket is therefore
exact if concurrent operations have ended and the bucket's count has not changed since before the
walk.

This writer's reservations and changes are also kept in memory, so that the next change of the file
makes up for a failed one.

Run on I/O threads.
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
        is_complete: Whether all buckets were known, and this writer registered, at the last change.
        total_bytes: Bytes counted against the capacity at the last change.
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
        """Set the file.

        Args:
            ops: The system calls.
            namespace_folder: Folder of the file.
            writer_id: This writer's id.
            living: Returns the other living writers. Called under the lock: writers register before
                they join the count.
            lock_timeout_s: Timeout of the lock in seconds.
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
        """Join the count, creating it if missing.

        Args:
            entry_bytes: Disk bytes of this writer's entry, uncounted at `close`.

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
        """Release reservations and leave the count; idempotent."""
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
        """Use another id; reservations are kept.

        The next change replaces the entry.
        """
        self._own.rename(writer_id)

    # -- what a job changes ---------------------------------------------------------------------

    def begin(self) -> int:
        """Begin a disk operation; return its number.

        Other writers see it from the next change on, so there must be a change before the disk is
        modified.
        """
        return self._own.begin()

    def end(self, operation: int) -> None:
        """End an operation that changed nothing; others see it from the next change on."""
        self._own.end(operation)

    def reserve(self, unit_bytes: int, count: int, capacity_bytes: int) -> int:
        """Reserve room for up to `count` units; return the number granted."""
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
        """Release reserved room, and count the change of the disk.

        Args:
            released_bytes: Bytes to release.
            change: The change of the disk.
            operation: The operation that ended.

        Raises:
            OSError: The file could not be changed; the next change catches up.
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
        """Presume dead writers' reservations used; return the total ever presumed."""

        def begin(usage: Usage) -> int:
            self._reap(usage)
            return usage.presumed_ever

        return self._change(begin)

    def end_cycle(self, presumed_ever: int) -> None:
        """Drop what was presumed before the cycle began; requires an exact cycle."""

        def end(usage: Usage) -> None:
            over = min(presumed_ever, usage.presumed_ever)  # if it was created again
            usage.presumed_over = max(usage.presumed_over, over)

        self._change(end)

    def correct(self, bucket_scans: Collection[BucketScan], operation: int) -> list[BucketScan]:
        """Correct the count by walks; return the scans that must wait for operations.

        Args:
            bucket_scans: Results of walks. Scans that are not returned are done. A done scan is
                inexact if its bucket changed during the walk; the count is then corrected only if
                the difference exceeds that change.
            operation: The walk's own operation, which has ended.
        """
        self._own.end(operation)
        return self._change(lambda usage: [s for s in bucket_scans if not is_corrected(usage, s)])

    def give_up(self, bucket_scans: Collection[BucketScan]) -> None:
        """Raise the count by scans whose operations did not end, where it is certainly too low."""

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
        self._enter(usage)  # there may have been no free entry before

    def _enter(self, usage: Usage) -> None:
        """Update this writer's entry in the count, if there is a free one."""
        if self._own.writer_id in usage.writers or len(usage.writers) < MAX_WRITERS:
            usage.writers[self._own.writer_id] = self._own.entry()

    def _change(self, call: Callable[[Usage], T]) -> T:
        """Change the count under its lock, including this writer's pending changes."""
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
        if is_new:  # allocates the file before it is counted
            write_all(self._ops, fd, bytes(FILE_BYTES), 0)
        usage.sequence += 1
        write_all(self._ops, fd, usage.packed(), usage.sequence % 2 * SLOT_BYTES)


def _nothing(usage: Usage) -> None:
    """Change nothing except this writer's pending changes."""


def read_usage(ops: FileOps, namespace_folder: str) -> Usage | None:
    """Return a namespace's count without joining it; None if it is unreadable.

    Raises:
        OSError: It is missing or cannot be read, or its format is newer.
    """
    fd = ops.open(f"{namespace_folder}/{FILE_NAME}", os.O_RDONLY)
    try:  # needs no lock: while one slot is being written, the other is valid
        return parsed(_content(ops, fd, memoryview(bytearray(FILE_BYTES))))
    finally:
        ops.close(fd)


def _content(ops: FileOps, fd: int, buffer: memoryview) -> memoryview:
    """Read a file into the buffer; return the part that was read."""
    done = ops.pread_into(fd, buffer, 0)
    while 0 < done < FILE_BYTES:
        count = ops.pread_into(fd, buffer[done:], done)
        if not count:
            break
        done += count
    return buffer[:done]
