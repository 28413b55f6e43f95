"""The count of a namespace's disk bytes, shared by all tiers that are open on it.

It is a small file, changed under an advisory lock. Room is reserved before a write and released
after it, so the sum never exceeds the capacity. A job of any size makes one locked change before it
and one after it.

The total is what writers report, corrected by walks. A walk visits the buckets of the namespace in
order, publishes its position, and sums up the bytes that it finds. A reported change is added to
the total, and to the sum of every walk that is past its bucket. If a walk visited the bucket while
the operation was in flight, it may have seen the change or not: added bytes are counted, removed
ones are not, and both are noted as doubt. A walk can also miss a file that is moved from a bucket
ahead of it to one behind it, so writers publish the bytes that they may be moving or removing.
When a walk ends, its sum and all moving bytes replace the total, unless they agree within the
doubt. The total is therefore never too small, and too large by no more than a few operations. Bytes
that no writer has reported count from the first walk on whose doubt is smaller.

Entries of dead writers, with what they had reserved or were moving, are kept until a walk that
began after their deaths has ended. If the count is lost or missing, it is unknown until a walk has
ended; until then no reservations are granted.

This writer's operations and changes are also kept in memory, so that the next change of the file
makes up for a failed one.

The file has two slots of 8 KiB, each with a complete state and a checksum. A change is written to
the older slot with the next sequence number. A torn write loses only that change; the previous
state remains valid. Little-endian:

    0     8 bytes magic, u32 version, u32 features that a reader must know (none yet)
    16    u64 sequence, u64 bytes ever added or removed
    32    u64 XXH3-64 of the rest, up to the last writer
    40    u32 writers, u32 unused
    48    the total
    72    up to 112 times 24 bytes writer's id, u64 reserved bytes, u64 moving bytes, u32 changes
          made, u32 unused, its walk

The total and a walk have 24 bytes: u64 bytes, u64 bytes of doubt, u32 random number (0: none),
u16 buckets visited, u16 buckets visited or being visited. An unknown total is a walk that has not
begun.

A bucket is a folder of blocks; in vLLM's layout, everything below the top folders whose names begin
with the same two digits. The last bucket is everything else.

Run on I/O threads.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, TypeVar

import xxhash

from kvoffload_async.tiers.files.locks import LockedFile
from kvoffload_async.tiers.files.ops import FileOps, read_all, read_file, write_all
from kvoffload_async.tiers.fs.layout import REST
from kvoffload_async.tiers.fs.operations import DiskChange

FILE_NAME: Final = ".usage"
SLOT_BYTES: Final = 8192
FILE_BYTES: Final = 2 * SLOT_BYTES
VERSION: Final = 2

NUM_BUCKETS: Final = REST + 1

_MAGIC: Final = b"kvo.use\n"
_HEADER: Final = struct.Struct("<8sIIQQQI4xQQIHH")
_WRITER: Final = struct.Struct("<24sQQI4xQQIHH")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKSUM_AT: Final = 32
MAX_WRITERS: Final = (SLOT_BYTES - _HEADER.size) // _WRITER.size
_MAX_NUMBER: Final = 1 << 62
WRAP: Final = 1 << 32

Marks = Mapping[int, int]
"""Number of a walk -> number of buckets visited; the walk may see changes of later buckets."""


class NewerCountError(OSError):
    """The shared count has a newer format and must not be modified."""


@dataclass(slots=True)
class Sum:
    """Bytes in the buckets that a walk has visited, with the changes reported since.

    Attributes:
        num_bytes: The bytes, at least those that exist and are not being moved.
        doubt_bytes: Bytes of changes that the walk may or may not have seen: `num_bytes` is too
            large by no more than these.
        number: Random number of the walk; 0 if there is none.
        done: Buckets that have been visited.
        begun: Buckets that have been visited or are being visited.
    """

    num_bytes: int = 0
    doubt_bytes: int = 0
    number: int = 0
    done: int = 0
    begun: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all buckets have been visited."""
        return self.done == NUM_BUCKETS

    @property
    def fields(self) -> tuple[int, ...]:
        """All fields, in order."""
        return self.num_bytes, self.doubt_bytes, self.number, self.done, self.begun

    def change(self, changes: Sequence[DiskChange], before: Marks) -> None:
        """Count an operation's changes of the disk; `before` are the marks when it began."""
        mark = before.get(self.number, 0)
        for bucket, num_bytes in changes:
            if bucket < mark:
                self.num_bytes += num_bytes
            elif bucket < self.begun:
                self.num_bytes += max(0, num_bytes)
                self.doubt_bytes += abs(num_bytes)
        self.num_bytes = max(0, self.num_bytes)

    def advance(self, first: int, done: int, begun: int, found_bytes: int) -> None:
        """Add the bytes found in buckets `first` to `done`; mark those to `begun` as being visited.

        Nothing happens if the walk was lost with the count.
        """
        if self.number and self.done == first:
            self.num_bytes += found_bytes
            self.done, self.begun = done, begun


@dataclass(slots=True)
class WriterCount:
    """A writer's entry in the shared count.

    Attributes:
        reserved_bytes: Bytes reserved for blocks being written.
        moving_bytes: Bytes of existing blocks that may be moved or removed at the moment.
        num_changes: Number of its changes of the count; detects a change that was made although it
            was reported as failed.
        walk: Its walk.
    """

    reserved_bytes: int = 0
    moving_bytes: int = 0
    num_changes: int = 0
    walk: Sum = field(default_factory=Sum)


@dataclass(slots=True)
class Usage:
    """One state of the shared count.

    Attributes:
        sequence: Sequence number.
        changed_bytes: Sum of all bytes added and all bytes removed since the beginning.
        total: Bytes of existing files and folders.
        writers: Entries of the writers, by id.
    """

    sequence: int = 0
    changed_bytes: int = 0
    total: Sum = field(default_factory=Sum)
    writers: dict[str, WriterCount] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the total is known."""
        return self.total.is_whole

    @property
    def is_possible(self) -> bool:
        """Whether all numbers are in the range that is possible for a directory."""
        numbers = [self.sequence, self.changed_bytes, *self.total.fields]
        for writer in self.writers.values():
            numbers += [writer.reserved_bytes, writer.moving_bytes, *writer.walk.fields]
        return max(numbers) < _MAX_NUMBER

    @property
    def settled_bytes(self) -> int:
        """Bytes of existing files and folders, if known."""
        return self.total.num_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved by all writers."""
        return sum([writer.reserved_bytes for writer in self.writers.values()])

    @property
    def moving_bytes(self) -> int:
        """Bytes of blocks that writers may be moving or removing, which a walk may miss."""
        return sum([writer.moving_bytes for writer in self.writers.values()])

    @property
    def total_bytes(self) -> int:
        """Bytes counted against the capacity."""
        return self.settled_bytes + self.reserved_bytes

    @property
    def marks(self) -> Marks:
        """The progress of the total and of each walk, for operations that begin now."""
        return {counted.number: counted.done for counted in self._sums()}

    def change(self, changes: Sequence[DiskChange], before: Marks) -> None:
        """Count an operation's changes of the disk; `before` are the marks when it began."""
        for counted in self._sums():
            counted.change(changes, before)
        self.changed_bytes += sum([abs(num_bytes) for _, num_bytes in changes])

    def end_walk(self, walker: WriterCount, dead: Collection[str]) -> None:
        """Correct the total by a walk, unless the walk was lost or has not visited every bucket.

        Args:
            walker: The entry of the walk.
            dead: Writers that were dead when it began, so that it has seen all they left.
        """
        walk, walker.walk = walker.walk, Sum()
        if not walk.is_whole:
            return
        for writer_id in self.writers.keys() & dead:
            self.remove_dead(writer_id)
        most_bytes = walk.num_bytes + self.moving_bytes
        if (
            not self.is_complete
            or not walk.num_bytes - walk.doubt_bytes <= self.settled_bytes <= most_bytes
        ):
            walk.num_bytes = most_bytes
            self.total = walk

    def remove_dead(self, writer_id: str) -> None:
        """Remove a dead writer's entry; the bytes that it had reserved are presumed to be on disk.

        A walk under way may also have missed what it was moving, which is in the total.
        """
        writer = self.writers.pop(writer_id)
        self.total.num_bytes += writer.reserved_bytes
        for other in self.writers.values():
            other.walk.num_bytes += writer.reserved_bytes + writer.moving_bytes
            other.walk.doubt_bytes += writer.reserved_bytes + writer.moving_bytes

    def packed(self) -> bytearray:
        """Encode this state as the used part of a slot of the file."""
        header = (_MAGIC, VERSION, 0, *_bounded(self.sequence, self.changed_bytes))
        total = _bounded(*self.total.fields)
        slot = bytearray(_HEADER.pack(*header, 0, len(self.writers), *total))
        for name, writer in self.writers.items():
            counts = (writer.reserved_bytes, writer.moving_bytes, writer.num_changes)
            slot += _WRITER.pack(name.encode(), *_bounded(*counts, *writer.walk.fields))
        _CHECKSUM.pack_into(slot, _CHECKSUM_AT, _checksum(memoryview(slot)))
        return slot

    def _sums(self) -> list[Sum]:
        sums = [self.total, *[writer.walk for writer in self.writers.values()]]
        return [counted for counted in sums if counted.begun]


def _bounded(*numbers: int) -> Iterator[int]:
    """Limit numbers to those that can be packed; a limited number makes the state unknown."""
    return (min(number, _MAX_NUMBER) for number in numbers)


def _checksum(used: memoryview) -> int:
    digest = xxhash.xxh3_64(used[:_CHECKSUM_AT])
    digest.update(used[_CHECKSUM_AT + _CHECKSUM.size :])
    return digest.intdigest()


def parsed(content: memoryview) -> Usage | None:
    """Decode the newest valid state in a disk usage file; None if it has none of this format.

    Numbers that no directory has make the count unknown. The state before them is not used instead:
    the next changes would be lost, as they lead to such numbers again.

    Raises:
        NewerCountError: The format is newer.
    """
    slots: list[tuple[int, memoryview]] = []
    for at in (0, SLOT_BYTES):
        slot = content[at : at + SLOT_BYTES]
        if len(slot) < SLOT_BYTES:
            break
        magic, version, features, sequence, *_ = _HEADER.unpack_from(slot)
        if magic != _MAGIC or version < VERSION:
            continue
        if version > VERSION or features:
            raise NewerCountError(
                f"the namespace's disk usage file has format {version} "
                f"(features {features:#x}), and this release knows format {VERSION}: use the "
                "release that wrote it"
            )
        slots.append((sequence, slot))
    slots.sort(key=itemgetter(0), reverse=True)
    usages = (_parsed_slot(slot) for _, slot in slots)
    newest = next((usage for usage in usages if usage is not None), None)
    return newest if newest is not None and newest.is_possible else None


def _parsed_slot(slot: memoryview) -> Usage | None:
    sequence, changed_bytes, checksum, num_writers, *total = _HEADER.unpack_from(slot)[3:]
    end = _HEADER.size + _WRITER.size * num_writers
    if num_writers > MAX_WRITERS or _checksum(slot[:end]) != checksum:
        return None
    usage = Usage(sequence, changed_bytes, Sum(*total))
    for name, reserved_bytes, moving_bytes, num_changes, *walk in _WRITER.iter_unpack(
        slot[_HEADER.size : end]
    ):
        writer = WriterCount(reserved_bytes, moving_bytes, num_changes, Sum(*walk))
        usage.writers[name.rstrip(b"\0").decode(errors="replace")] = writer
    return usage


@dataclass(slots=True, eq=False)
class Operation:
    """An operation of this writer that changes the disk.

    Attributes:
        before: The marks when it began.
        reserved_bytes: Bytes reserved for it.
        moving_bytes: Bytes of existing blocks that it may move or remove.
        changes: Its changes, once it has ended.
    """

    before: Marks = field(default_factory=dict)
    reserved_bytes: int = 0
    moving_bytes: int = 0
    changes: Sequence[DiskChange] = ()


T = TypeVar("T")


class UsageFile:
    """The file of the shared count, and this writer's operations that are not counted yet.

    A job does not wait for a change of the file to end an operation, so nothing is lost if one
    hangs.

    Attributes:
        is_complete: Whether the total was known, and this writer registered, at the last change.
        total_bytes: Bytes counted against the capacity at the last change.
        marks: The marks at the last change.
    """

    def __init__(
        self,
        ops: FileOps,
        namespace_folder: str,
        writer_id: str,
        living: Callable[[], Collection[str]],
        *,
        leftover_bytes: Callable[[], int] = int,
    ) -> None:
        """Configure the file; `open` joins the count.

        Args:
            ops: The system calls.
            namespace_folder: Folder of the file.
            writer_id: This writer's id.
            living: Returns the other living writers. Called under the lock: writers register before
                they join the count.
            leftover_bytes: Returns the bytes of temporary files that ended operations could not
                remove: they stay reserved, because walks do not count those of living writers.
        """
        self.is_complete = False
        self.total_bytes = 0
        self.marks: Marks = {}
        self._ops = ops
        self._path = f"{namespace_folder}/{FILE_NAME}"
        self._living = living
        self._leftover_bytes = leftover_bytes
        self._file = LockedFile(ops, self._path)
        self._is_open = False
        self._mutex = threading.Lock()
        # Under the mutex:
        self._running: set[Operation] = set()
        self._ended: list[Operation] = []
        # Under the file's lock:
        self._buffer = memoryview(bytearray(FILE_BYTES))
        self._writer_id = writer_id
        self._ids = [writer_id]
        """Ids that this writer's entry may have: the id of the last change, and newer ids."""
        self._entry = WriterCount()
        self._entry_bytes = 0
        self._num_changes = 0
        self._reporting: list[Operation] = []
        """Operations of the last change if it failed; it may have been made nevertheless."""
        self._dead: frozenset[str] = frozenset()

    def open(self, entry_bytes: int = 0) -> None:
        """Join the count, creating it if missing.

        Args:
            entry_bytes: Disk bytes of this writer's entry, uncounted at `close`.

        Raises:
            OSError: The file cannot be used.
            NewerCountError: Its format is newer.
        """
        self._is_open = True
        try:
            self._change(lambda usage: usage.change([(REST, entry_bytes)], usage.marks))
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
            usage.writers.pop(self._writer_id, None)
            usage.change([(REST, -self._entry_bytes)], usage.marks)

        try:
            self._change(leave)
        finally:
            self._is_open = False
            self._file.close()

    def rename_writer(self, writer_id: str) -> None:
        """Use another writer id from the next change of the file on; reservations are kept."""
        self._ids.append(writer_id)

    # -- what a job changes ---------------------------------------------------------------------

    def begin(
        self, unit_bytes: int, count: int, capacity_bytes: int = 0, num_replacing: int = 0
    ) -> Operation:
        """Begin an operation on up to `count` blocks, and publish it.

        Room is reserved for as many new blocks as the capacity allows, but for `num_replacing`; the
        operation may move or remove existing blocks in the number of the others. If it cannot be
        published, the next change releases its room.
        """
        operation = Operation()

        def begin(usage: Usage) -> None:
            room_bytes = capacity_bytes - usage.total_bytes if self._counts_in(usage) else 0
            granted = min(count - num_replacing, max(0, room_bytes) // unit_bytes)
            operation.reserved_bytes = granted * unit_bytes
            operation.moving_bytes = (count - granted) * unit_bytes
            operation.before = usage.marks
            with self._mutex:
                self._running.add(operation)
            self._entry.reserved_bytes += operation.reserved_bytes
            self._entry.moving_bytes += operation.moving_bytes

        try:
            self._change(begin)
        except BaseException:
            with self._mutex:
                self._running.discard(operation)
            raise
        return operation

    def end(self, operation: Operation, changes: Sequence[DiskChange] = ()) -> None:
        """End an operation; the next change of the file counts its changes of the disk.

        Does no I/O, so that a job may call it on any thread.
        """
        operation.changes = changes
        with self._mutex:
            self._running.discard(operation)
            self._ended.append(operation)

    def report(self) -> None:
        """Count the operations that have ended, unless another change has counted them.

        Raises:
            OSError: The file could not be changed; the next change catches up.
        """
        if self._ended or self._reporting:
            self.read()

    def read(self) -> Usage:
        """Return the shared count, including this writer's ended operations."""
        return self._change(lambda usage: usage)

    # -- walks ----------------------------------------------------------------------------------

    def begin_walk(self) -> None:
        """Begin this writer's walk at the first bucket."""

        def begin(usage: Usage) -> None:
            self._dead = frozenset(self._dead_in(usage))
            self._entry.walk = Sum(number=1 + secrets.randbelow(WRAP - 1))

        self._change(begin)

    def advance(self, first: int, done: int, begun: int, found_bytes: int = 0) -> None:
        """Publish that the walk visited buckets `first` to `done`; those to `begun` are next.

        A bucket must be published before its visit. A walk that was lost with the count goes on
        without effect.
        """
        self._change(lambda _: self._entry.walk.advance(first, done, begun, found_bytes))

    def end_walk(self) -> None:
        """Correct the total by this writer's walk."""
        self._change(lambda usage: usage.end_walk(self._entry, self._dead))

    # -- inside ---------------------------------------------------------------------------------

    def _counts_in(self, usage: Usage) -> bool:
        return usage.is_complete and self._writer_id in usage.writers

    def _dead_in(self, usage: Usage) -> Collection[str]:
        return usage.writers.keys() - {*self._living(), self._writer_id}

    def _enter(self, usage: Usage) -> None:
        """Add this writer's entry to the count, if the count has room for it."""
        if len(usage.writers) >= MAX_WRITERS:
            for dead in self._dead_in(usage):
                usage.remove_dead(dead)
        if len(usage.writers) < MAX_WRITERS:
            usage.writers[self._writer_id] = self._entry

    def _merge(self, usage: Usage) -> WriterCount:
        """Count all ended operations, remove this writer's former entry, and return a new one.

        Determines whether a failed last change was made.
        """
        ids = self._ids.copy()
        self._writer_id = ids[-1]
        former = next((usage.writers[i] for i in reversed(ids) if i in usage.writers), None)
        entry = former or WriterCount()
        if entry.num_changes == (self._num_changes + 1) % WRAP:
            self._num_changes += 1
            self._reporting = []
        with self._mutex:
            # Together: room that is released counts until the change made in it does.
            self._reporting, self._ended = self._reporting + self._ended, []
            running = list(self._running)
        for operation in self._reporting:
            usage.change(operation.changes, operation.before)
        for writer_id in ids:
            usage.writers.pop(writer_id, None)
        return WriterCount(
            sum([operation.reserved_bytes for operation in running]) + self._leftover_bytes(),
            sum([operation.moving_bytes for operation in running]),
            (self._num_changes + 1) % WRAP,
            entry.walk,
        )

    def _change(self, call: Callable[[Usage], T]) -> T:
        """Change the shared count under its lock, and apply this writer's pending changes."""
        if not self._is_open:
            raise OSError(f"{self._path} is closed")
        with self._file.locked() as fd:
            content = self._buffer[: read_all(self._ops, fd, self._buffer)]
            found = parsed(content)
            usage = found or Usage()
            self._entry = self._merge(usage)
            self._enter(usage)
            result = call(usage)
            if found is None:  # allocates the file before it is counted
                write_all(self._ops, fd, bytes(FILE_BYTES), 0)
            usage.sequence += 1
            write_all(self._ops, fd, usage.packed(), usage.sequence % 2 * SLOT_BYTES)
            self._num_changes += 1
            self._reporting = []
            del self._ids[: self._ids.index(self._writer_id)]
            self.is_complete = self._counts_in(usage)
            self.total_bytes, self.marks = usage.total_bytes, usage.marks
            return result


def read_usage(ops: FileOps, namespace_folder: str) -> Usage | None:
    """Return a namespace's count without joining it; None if it is unreadable.

    Raises:
        OSError: It is missing or cannot be read, or its format is newer.
    """
    # Needs no lock: while one slot is being written, the other is valid.
    return parsed(read_file(ops, f"{namespace_folder}/{FILE_NAME}", FILE_BYTES))
