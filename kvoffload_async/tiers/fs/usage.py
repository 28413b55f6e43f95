"""The count of a namespace's disk bytes, shared by all tiers that are open on it.

It is a small file, changed under an advisory lock. Room is reserved before a write and released
after it, so the sum never exceeds the capacity. A job of any size makes one locked change before it
and one after it.

Reservations of a writer that died are presumed used until later walks have seen every bucket. If
the count is lost or missing, it is unknown until walks have seen every bucket; until then no
reservations are granted.

Every writer publishes which of its disk operations have ended. A walk over a bucket is therefore
exact if concurrent operations have ended and the bucket's count has not changed since before the
walk.

This writer's reservations and changes are also kept in memory, so that the next change of the file
makes up for a failed one.

The file has two slots of 8 KiB, each with a complete state and a checksum. A change is written to
the older slot with the next sequence number. A torn write loses only that change; the previous
state remains valid. Little-endian:

    0     8 bytes magic, u32 version, u32 features that a reader must know (none yet)
    16    u64 sequence, i64 settled bytes of all known buckets
    32    u64 bytes ever reserved by dead writers, u64 bytes of these written off
    48    u32 unknown buckets, u32 writers
    56    u64 XXH3-64 of the rest, up to the last writer
    64    257 times i64 settled bytes (-1: unknown), u32 changes in sectors, wrapping
    3200  up to 104 times 24 bytes writer's id, u64 reserved bytes, u32 operations begun, u32 oldest
          operation that has not ended, u32 changes made, u32 unused

A bucket is a folder of blocks; in vLLM's layout, everything below the top folders whose names begin
with the same two digits. The last bucket is everything else.

Run on I/O threads.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import xxhash

from kvoffload_async.tiers.files.locks import LOCK_TIMEOUT_S, LockedFile
from kvoffload_async.tiers.files.ops import FileOps, read_all, read_file, write_all
from kvoffload_async.tiers.fs.layout import REST
from kvoffload_async.tiers.fs.outcome import DiskChange

FILE_NAME: Final = ".usage"
SLOT_BYTES: Final = 8192
FILE_BYTES: Final = 2 * SLOT_BYTES
VERSION: Final = 1

NUM_BUCKETS: Final = REST + 1

_MAGIC: Final = b"kvo.use\n"
_HEADER: Final = struct.Struct("<8sIIQqQQII")
_START: Final = struct.Struct("<8sIIQ")
_BUCKET: Final = struct.Struct("<qI")
_WRITER: Final = struct.Struct("<24sQIII4x")
_CHECKSUM: Final = struct.Struct("<Q")
_BUCKETS_AT: Final = 64
_WRITERS_AT: Final = 3200
_CHECKSUM_AT: Final = 56
MAX_WRITERS: Final = 104
_UNKNOWN: Final = -1
_SECTOR_BYTES: Final = 512
WRAP: Final = 1 << 32


class NewerCountError(OSError):
    """The count has a newer format and must not be modified."""


@dataclass(slots=True)
class WriterCount:
    """A writer's entry in the count.

    Attributes:
        reserved_bytes: Bytes reserved for blocks being written.
        begun: Number of disk operations begun, modulo 2**32.
        oldest: Number of the oldest operation that has not ended; `begun` if there is none.
        told: Number of its changes of the count; detects a change that was made although it was
            reported as failed.
    """

    reserved_bytes: int
    begun: int
    oldest: int
    told: int

    def has_ended(self, begun: int) -> bool:
        """Return whether all operations before number `begun` have ended."""
        return (self.oldest - begun) % WRAP < WRAP // 2


class Usage:
    """One state of the shared count.

    Attributes:
        sequence: Sequence number.
        settled_bytes: Bytes of existing files and folders in all known buckets.
        presumed_ever: Bytes reserved by writers at their deaths, in total since the beginning.
        presumed_over: Bytes of these that walks have shown to be counted or free.
        num_unknown: Number of buckets with unknown content.
        writers: Entries of the writers, by id.
    """

    __slots__ = (
        "_slot",
        "num_unknown",
        "presumed_ever",
        "presumed_over",
        "sequence",
        "settled_bytes",
        "writers",
    )

    def __init__(self, slot: bytearray | None = None) -> None:
        """Start with all buckets unknown, or from the content of a slot, which is then owned."""
        self.sequence = 0
        self.settled_bytes = 0
        self.presumed_ever = 0
        self.presumed_over = 0
        self.num_unknown = NUM_BUCKETS
        self.writers: dict[str, WriterCount] = {}
        self._slot = slot or _UNKNOWN_SLOT.copy()

    @property
    def is_complete(self) -> bool:
        """Whether all buckets are known."""
        return not self.num_unknown

    @property
    def presumed_bytes(self) -> int:
        """Bytes that dead writers may have written without counting them."""
        return self.presumed_ever - self.presumed_over

    @property
    def all_reserved_bytes(self) -> int:
        """Bytes reserved by all writers."""
        return sum([writer.reserved_bytes for writer in self.writers.values()])

    @property
    def reserved_bytes(self) -> dict[str, int]:
        """Reserved bytes by writer."""
        return {name: writer.reserved_bytes for name, writer in self.writers.items()}

    @property
    def total_bytes(self) -> int:
        """Bytes counted against the capacity, for the known buckets."""
        return self.settled_bytes + self.all_reserved_bytes + self.presumed_bytes

    @property
    def changed_bytes(self) -> int:
        """Sum of all bytes added and all bytes removed since the beginning; wraps."""
        return sum(self.bucket(number)[1] for number in range(NUM_BUCKETS)) * _SECTOR_BYTES

    def bucket(self, number: int) -> tuple[int | None, int]:
        """Return a bucket's settled bytes (None if unknown) and its change counter."""
        settled_bytes: int
        changed: int
        at = _BUCKETS_AT + number * _BUCKET.size
        settled_bytes, changed = _BUCKET.unpack_from(self._slot, at)
        return None if settled_bytes == _UNKNOWN else settled_bytes, changed

    def change(self, number: int, added_bytes: int, removed_bytes: int) -> None:
        """Count bytes added to and removed from a bucket."""
        at = _BUCKETS_AT + number * _BUCKET.size
        settled_bytes, changed = _BUCKET.unpack_from(self._slot, at)
        sectors = -(-(added_bytes + removed_bytes) // _SECTOR_BYTES)
        if settled_bytes != _UNKNOWN:
            now_bytes = max(0, settled_bytes + added_bytes - removed_bytes)
            self.settled_bytes += now_bytes - settled_bytes
            settled_bytes = now_bytes
        _BUCKET.pack_into(self._slot, at, settled_bytes, (changed + sectors) % WRAP)

    def set(self, number: int, disk_bytes: int) -> None:
        """Set the bytes of a bucket."""
        at = _BUCKETS_AT + number * _BUCKET.size
        settled_bytes, changed = _BUCKET.unpack_from(self._slot, at)
        if settled_bytes == _UNKNOWN:
            self.num_unknown -= 1
            settled_bytes = 0
        self.settled_bytes += disk_bytes - settled_bytes
        _BUCKET.pack_into(self._slot, at, disk_bytes, changed)

    def reap(self, writer_id: str) -> None:
        """Remove a dead writer, whose reservations are presumed used.

        If it died in an operation, at least a byte is, so that the count does not fall until an
        exact cycle of walks has seen what it did.
        """
        writer = self.writers.pop(writer_id)
        self.presumed_ever += max(writer.reserved_bytes, int(writer.oldest != writer.begun))

    def give_up_presumed(self, ever: int, retained_bytes: int) -> None:
        """Drop what was presumed before an exact cycle of walks began.

        Args:
            ever: Bytes presumed until then, in total.
            retained_bytes: Bytes that the cycle itself has presumed; dropped as well if no other
                writer has died since.
        """
        if self.presumed_ever == ever + retained_bytes:
            ever += retained_bytes
        over = min(ever, self.presumed_ever)  # if the count was created again
        self.presumed_over = max(self.presumed_over, over)

    def is_state(self, slot: memoryview) -> bool:
        """Return whether a slot contains this state as packed last."""
        return bool(slot[:_BUCKETS_AT] == memoryview(self._slot)[:_BUCKETS_AT])

    def copy(self) -> Usage:
        """Return an independent copy."""
        copied = Usage(self._slot.copy())
        copied.sequence, copied.num_unknown = self.sequence, self.num_unknown
        copied.settled_bytes = self.settled_bytes
        copied.presumed_ever, copied.presumed_over = self.presumed_ever, self.presumed_over
        copied.writers = {name: replace(writer) for name, writer in self.writers.items()}
        return copied

    def packed(self) -> memoryview:
        """Return this state as the used part of a slot; the memory is shared."""
        slot = self._slot
        _HEADER.pack_into(
            slot,
            0,
            *(_MAGIC, VERSION, 0, self.sequence, self.settled_bytes),
            *(self.presumed_ever, self.presumed_over, self.num_unknown, len(self.writers)),
        )
        at = _WRITERS_AT
        for name, writer in self.writers.items():
            numbers = (writer.begun % WRAP, writer.oldest % WRAP, writer.told % WRAP)
            _WRITER.pack_into(slot, at, name.encode(), writer.reserved_bytes, *numbers)
            at += _WRITER.size
        used = memoryview(slot)[:at]
        _CHECKSUM.pack_into(slot, _CHECKSUM_AT, _checksum(used))
        return used


def _checksum(used: memoryview) -> int:
    digest = xxhash.xxh3_64(used[:_CHECKSUM_AT])
    digest.update(used[_BUCKETS_AT:])
    return digest.intdigest()


def _unknown_slot() -> bytearray:
    slot = bytearray(SLOT_BYTES)
    for number in range(NUM_BUCKETS):
        _BUCKET.pack_into(slot, _BUCKETS_AT + number * _BUCKET.size, _UNKNOWN, 0)
    return slot


_UNKNOWN_SLOT: Final = _unknown_slot()


def changed_since(changed: int, before: int) -> int:
    """Return the bytes changed between two values of a bucket's change counter."""
    return (changed - before) % WRAP * _SECTOR_BYTES


def parsed(content: memoryview, last: Usage | None = None) -> Usage | None:
    """Return the newest valid state of a file; None if there is none.

    Args:
        content: The file's content.
        last: The last state read or written; returned if it is still the newest.

    Raises:
        NewerCountError: The format is newer.
    """
    sequences: list[tuple[int, int]] = []
    for at in (0, SLOT_BYTES):
        if len(content) >= at + SLOT_BYTES:
            magic, version, features, sequence = _START.unpack_from(content, at)
            if magic != _MAGIC:
                continue
            if version > VERSION or features:
                raise NewerCountError(
                    f"its count of bytes has format {version} (features {features:#x}), and this "
                    f"release knows format {VERSION}: use the release that wrote it"
                )
            sequences.append((sequence, at))
    sequences.sort(reverse=True)
    for _, at in sequences:
        slot = content[at : at + SLOT_BYTES]
        if last is not None and last.is_state(slot):
            return last
        usage = _parsed_slot(slot)
        if usage is not None:
            return usage
    return None


def _parsed_slot(slot: memoryview) -> Usage | None:
    sequence, settled_bytes, ever, over, num_unknown, num_writers = _HEADER.unpack_from(slot)[3:]
    end = _WRITERS_AT + _WRITER.size * num_writers
    (checksum,) = _CHECKSUM.unpack_from(slot, _CHECKSUM_AT)
    if num_writers > MAX_WRITERS or _checksum(slot[:end]) != checksum:
        return None
    usage = Usage(bytearray(slot))
    usage.sequence, usage.settled_bytes, usage.num_unknown = sequence, settled_bytes, num_unknown
    usage.presumed_ever, usage.presumed_over = ever, over
    for name, *counts in _WRITER.iter_unpack(slot[_WRITERS_AT:end]):
        usage.writers[name.rstrip(b"\0").decode(errors="replace")] = WriterCount(*counts)
    return usage


@dataclass(slots=True)
class BucketScan:
    """Result of a walk over a bucket, kept until the count is corrected.

    Attributes:
        bucket: The bucket.
        disk_bytes: Its disk bytes, without swept files.
        changed: The bucket's change counter before the walk.
        waits_for: Writers with operations concurrent to the walk, and the number of operations
            that they had begun; None before this was determined.
        is_exact: Whether the count was set to `disk_bytes`.
        retained_bytes: Bytes that are presumed used although the count of the bucket has fallen.
    """

    bucket: int
    disk_bytes: int
    changed: int
    waits_for: dict[str, int] | None = None
    is_exact: bool = False
    retained_bytes: int = 0


def is_corrected(usage: Usage, bucket_scan: BucketScan) -> bool:
    """Correct the count by a walk; return False if operations must be awaited first."""
    writers = usage.writers
    if bucket_scan.waits_for is None:
        bucket_scan.waits_for = {
            name: writer.begun for name, writer in writers.items() if writer.oldest != writer.begun
        }
    bucket_scan.waits_for = {
        name: begun
        for name, begun in bucket_scan.waits_for.items()
        if name in writers and not writers[name].has_ended(begun)
    }
    if bucket_scan.waits_for:
        return False
    settled_bytes, moved_bytes = _moved(usage, bucket_scan)
    found_bytes = bucket_scan.disk_bytes
    bucket_scan.is_exact = not moved_bytes
    if settled_bytes is None or abs(settled_bytes - found_bytes) > moved_bytes:
        # It is unknown which changes the walk has seen: count too much rather than too little.
        usage.set(bucket_scan.bucket, found_bytes + moved_bytes)
        if settled_bytes is not None and usage.presumed_bytes:
            # A dead writer may have moved the missing files to a bucket that is not corrected yet.
            bucket_scan.retained_bytes = max(0, settled_bytes - found_bytes - moved_bytes)
            usage.presumed_ever += bucket_scan.retained_bytes
    return True


def raise_by(usage: Usage, bucket_scan: BucketScan) -> None:
    """Raise a bucket's count if a walk, with operations still unfinished, found more bytes."""
    settled_bytes, moved_bytes = _moved(usage, bucket_scan)
    found_bytes = bucket_scan.disk_bytes
    if settled_bytes is None:
        usage.set(bucket_scan.bucket, found_bytes + moved_bytes)
    elif found_bytes > settled_bytes + moved_bytes + usage.all_reserved_bytes:
        usage.set(bucket_scan.bucket, found_bytes)


def _moved(usage: Usage, bucket_scan: BucketScan) -> tuple[int | None, int]:
    """Return a bucket's settled bytes, and the bytes changed in it since before the walk."""
    settled_bytes, changed = usage.bucket(bucket_scan.bucket)
    return settled_bytes, changed_since(changed, bucket_scan.changed)


class UnreportedUsage:
    """This writer's reservations and disk changes, to be merged into the shared count.

    Methods for jobs do not wait for a change of the file, so nothing is lost if one hangs.
    """

    def __init__(self, writer_id: str) -> None:
        """Start without reservations or operations."""
        self.reserved_bytes = 0
        self.running: set[int] = set()
        self.told = 0
        self.writer_id = writer_id
        self._next_id = writer_id
        self._former_ids: list[str] = []
        self.telling: DiskChange | None = None
        """The last change if it failed; it may have been made nevertheless."""
        self._version = self._reporting_version = self._reported_version = 0
        self._begun = 0
        self._untold = DiskChange()
        self._mutex = threading.Lock()

    def begin(self) -> int:
        """Begin a disk operation; return its number."""
        with self._mutex:
            number = self._begun
            self._begun += 1
            self._version += 1
            self.running.add(number)
        return number

    def end(self, operation: int) -> None:
        """End a disk operation."""
        with self._mutex:
            self._version += 1
            self.running.discard(operation)

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes, or release them if negative."""
        with self._mutex:
            self._version += 1
            self.reserved_bytes = max(0, self.reserved_bytes + num_bytes)

    def add_untold(self, change: DiskChange) -> None:
        """Record a disk change, to be counted with the next change of the file."""
        with self._mutex:
            self._version += 1
            self._untold += change

    @property
    def is_reported(self) -> bool:
        """Whether the file has everything that was recorded before this call."""
        return self._reported_version == self._version

    def rename(self, writer_id: str) -> None:
        """Use another id from the next change on; reservations are kept."""
        self._next_id = writer_id

    def begin_change(self, usage: Usage) -> tuple[DiskChange, WriterCount]:
        """Determine whether a failed last change was made; return the changes to count, and entry.

        Entries under former ids are dropped; their reservations are in the current entry.

        Call with the file's lock held.
        """
        next_id = self._next_id
        if next_id != self.writer_id:
            self._former_ids.append(self.writer_id)
            self.writer_id = next_id
        ids = [self.writer_id, *self._former_ids]
        entry = next((usage.writers[name] for name in ids if name in usage.writers), None)
        if self.telling is not None:
            if entry is not None and entry.told == (self.told + 1) % WRAP:
                self.told += 1
            else:
                self.add_untold(self.telling)
            self.telling = None
        for name in ids[1:]:
            usage.writers.pop(name, None)
        with self._mutex:
            # Together: room that is released counts until the change made in it does.
            untold, self._untold = self._untold, DiskChange()
            self._reporting_version = self._version
            oldest = min(self.running, default=self._begun)
            return untold, WriterCount(self.reserved_bytes, self._begun, oldest, self.told + 1)

    def end_change(self) -> None:
        """Record that the change was made. Call with the file's lock held."""
        self.told += 1
        self._reported_version = self._reporting_version
        self._former_ids.clear()


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
        self._entry = WriterCount(0, 0, 0, 0)
        self._entry_bytes = 0
        self._retained_bytes = 0
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

    def record(self, released_bytes: int, change: DiskChange, operation: int | None = None) -> None:
        """Release reserved room, and note a change of the disk, for the next change of the file.

        Does no I/O, so that a job may call it on any thread.

        Args:
            released_bytes: Bytes to release.
            change: The change of the disk.
            operation: The operation that ended.
        """
        own = self._own
        own.add_untold(change)  # first: a change of the file in between counts too much
        own.reserve(-released_bytes)
        if operation is not None:
            own.end(operation)

    def tell(self) -> None:
        """Count what was recorded, unless another change has done so.

        Raises:
            OSError: The file could not be changed; the next change catches up.
        """
        if not self._own.is_reported:
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

        self._retained_bytes = 0
        return self._change(begin)

    def end_cycle(self, presumed_ever: int) -> None:
        """Drop what was presumed before the cycle began; requires an exact cycle."""
        self._change(lambda usage: usage.give_up_presumed(presumed_ever, self._retained_bytes))

    def correct(self, bucket_scans: Collection[BucketScan], operation: int) -> list[BucketScan]:
        """Correct the count by walks; return the scans that must wait for operations.

        Args:
            bucket_scans: Results of walks. Scans that are not returned are done. A done scan is
                inexact if its bucket changed during the walk; the count is then corrected only if
                the difference exceeds that change.
            operation: The walk's own operation, which has ended.
        """
        self._own.end(operation)
        waiting = self._change(
            lambda usage: [s for s in bucket_scans if not is_corrected(usage, s)]
        )
        self._retained_bytes += sum(scan.retained_bytes for scan in bucket_scans)
        return waiting

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
        for writer_id in usage.writers.keys() - {*self._living(), self._own.writer_id}:
            usage.reap(writer_id)
        self._enter(usage)  # there may have been no free entry before

    def _enter(self, usage: Usage) -> None:
        """Update this writer's entry in the count, if there is a free one."""
        if self._own.writer_id in usage.writers or len(usage.writers) < MAX_WRITERS:
            usage.writers[self._own.writer_id] = self._entry

    def _change(self, call: Callable[[Usage], T]) -> T:
        """Change the count under its lock, including this writer's pending changes."""
        if not self._is_open:
            raise OSError(f"{self._path} is closed")
        with self._file.locked() as fd:
            last, self._last = self._last, None
            content = self._buffer[: read_all(self._ops, fd, self._buffer)]
            found = parsed(content, last)
            usage, is_new = found or Usage(), found is None
            own = self._own
            untold, self._entry = own.begin_change(usage)
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
    # Needs no lock: while one slot is being written, the other is valid.
    return parsed(read_file(ops, f"{namespace_folder}/{FILE_NAME}", FILE_BYTES))
