"""Format of the shared count of bytes, and one state of it in memory.

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

A bucket is everything below the top folders whose names begin with the same two digits; the last
bucket is everything else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

import xxhash

from kvoffload_async.tiers.fs.layout import REST

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
