"""The shared count as it lies in `.usage`: its format, and one state of it in memory.

The file is two slots of 8 KiB, each a whole state with a checksum. A change goes into the slot that
was not written last, with the next sequence number: a write that is cut off costs that one change,
and the state before it stands. Little-endian:

    0     8 bytes magic, u32 version, u32 features that a reader must know (none yet)
    16    u64 sequence, i64 settled bytes of all buckets that are known
    32    u64 bytes that dead writers had reserved, ever; u64 of these given up again
    48    u32 buckets that are not known, u32 writers
    64    257 times i64 settled bytes (-1: not known), u32 changes in sectors, wrapping
    3200  up to 124 times 24 bytes writer's id, u64 reserved bytes, u32 operations begun, u32 oldest
          operation that has not ended
    8184  u64 XXH3-64 of all before

A bucket is what lies below the top folders whose names begin with the same two digits; the last one
is everything else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
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
_BUCKET: Final = struct.Struct("<qI")
_WRITER: Final = struct.Struct("<24sQII")
_CHECKSUM: Final = struct.Struct("<Q")
_BUCKETS_AT: Final = 64
_WRITERS_AT: Final = 3200
_CHECKSUM_AT: Final = SLOT_BYTES - _CHECKSUM.size
MAX_WRITERS: Final = 124
_UNKNOWN: Final = -1
_SECTOR_BYTES: Final = 512
_WRAP: Final = 1 << 32


class NewerCountError(OSError):
    """The count is of a newer format, which must be left as it is."""


@dataclass(slots=True)
class WriterCount:
    """What a writer has in the count.

    Attributes:
        reserved_bytes: What it has set aside for blocks that it is writing.
        begun: How many operations on the disk it has begun, modulo 2**32.
        oldest: The number of its oldest one that has not ended; `begun` if there is none.
    """

    reserved_bytes: int = 0
    begun: int = 0
    oldest: int = 0

    def has_ended(self, begun: int) -> bool:
        """Tell whether all operations have ended that had begun when `begun` was so."""
        return (self.oldest - begun) % _WRAP < _WRAP // 2


class Usage:
    """One state of the shared count.

    Attributes:
        sequence: Its number.
        settled_bytes: Files and folders that are there, as far as buckets are known.
        presumed_ever: Bytes that writers had reserved when they died, since the beginning.
        presumed_over: Those of them that walks have shown to be counted or free.
        num_unknown: Buckets of which nobody knows what is in them.
        writers: Those that count, by id.
    """

    __slots__ = (
        "_buckets",
        "num_unknown",
        "presumed_ever",
        "presumed_over",
        "sequence",
        "settled_bytes",
        "writers",
    )

    def __init__(self, buckets: bytearray | None = None) -> None:
        """Start with nothing known."""
        self.sequence = 0
        self.settled_bytes = 0
        self.presumed_ever = 0
        self.presumed_over = 0
        self.num_unknown = NUM_BUCKETS
        self.writers: dict[str, WriterCount] = {}
        self._buckets = buckets or bytearray(_BUCKET.pack(_UNKNOWN, 0) * NUM_BUCKETS)

    @property
    def is_complete(self) -> bool:
        """Whether every bucket is known."""
        return not self.num_unknown

    @property
    def presumed_bytes(self) -> int:
        """What dead writers may have written without counting it."""
        return self.presumed_ever - self.presumed_over

    @property
    def all_reserved_bytes(self) -> int:
        """What is set aside by all writers together."""
        return sum([writer.reserved_bytes for writer in self.writers.values()])

    @property
    def reserved_bytes(self) -> dict[str, int]:
        """What each writer has set aside."""
        return {name: writer.reserved_bytes for name, writer in self.writers.items()}

    @property
    def total_bytes(self) -> int:
        """What counts against the capacity, as far as buckets are known."""
        return self.settled_bytes + self.all_reserved_bytes + self.presumed_bytes

    @property
    def changed_bytes(self) -> int:
        """What was added and removed since the beginning, both taken positive; wraps."""
        return sum(self.bucket(number)[1] for number in range(NUM_BUCKETS)) * _SECTOR_BYTES

    def bucket(self, number: int) -> tuple[int | None, int]:
        """Return the settled bytes of a bucket, None if unknown, and a counter of its changes."""
        settled_bytes: int
        changed: int
        settled_bytes, changed = _BUCKET.unpack_from(self._buckets, number * _BUCKET.size)
        return None if settled_bytes == _UNKNOWN else settled_bytes, changed

    def change(self, number: int, added_bytes: int, removed_bytes: int) -> None:
        """Count what was added to a bucket and removed from it."""
        at = number * _BUCKET.size
        settled_bytes, changed = _BUCKET.unpack_from(self._buckets, at)
        sectors = -(-(added_bytes + removed_bytes) // _SECTOR_BYTES)
        if settled_bytes != _UNKNOWN:
            now_bytes = max(0, settled_bytes + added_bytes - removed_bytes)
            self.settled_bytes += now_bytes - settled_bytes
            settled_bytes = now_bytes
        _BUCKET.pack_into(self._buckets, at, settled_bytes, (changed + sectors) % _WRAP)

    def set(self, number: int, disk_bytes: int) -> None:
        """Set what a bucket has."""
        at = number * _BUCKET.size
        settled_bytes, changed = _BUCKET.unpack_from(self._buckets, at)
        if settled_bytes == _UNKNOWN:
            self.num_unknown -= 1
            settled_bytes = 0
        self.settled_bytes += disk_bytes - settled_bytes
        _BUCKET.pack_into(self._buckets, at, disk_bytes, changed)

    def packed(self) -> bytes:
        """Return this state as a slot."""
        slot = bytearray(SLOT_BYTES)
        _HEADER.pack_into(
            slot,
            0,
            *(_MAGIC, VERSION, 0, self.sequence, self.settled_bytes),
            *(self.presumed_ever, self.presumed_over, self.num_unknown, len(self.writers)),
        )
        slot[_BUCKETS_AT : _BUCKETS_AT + len(self._buckets)] = self._buckets
        at = _WRITERS_AT
        for name, writer in self.writers.items():
            counts = (writer.reserved_bytes, writer.begun % _WRAP, writer.oldest % _WRAP)
            _WRITER.pack_into(slot, at, name.encode(), *counts)
            at += _WRITER.size
        _CHECKSUM.pack_into(slot, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(slot[:_CHECKSUM_AT]))
        return bytes(slot)


def changed_since(changed: int, before: int) -> int:
    """Return the bytes between two values of a bucket's counter of changes."""
    return (changed - before) % _WRAP * _SECTOR_BYTES


def parsed(content: bytes) -> Usage | None:
    """Return the newest whole state of a file; None if there is none.

    Raises:
        NewerCountError: The format is newer.
    """
    sequences = []
    for at in (0, SLOT_BYTES):
        if len(content) >= at + SLOT_BYTES and content[at : at + 8] == _MAGIC:
            _, version, features, sequence, *_ = _HEADER.unpack_from(content, at)
            if version > VERSION or features:
                raise NewerCountError(
                    f"its count of bytes has format {version} (features {features:#x}), and this "
                    f"release knows format {VERSION}: use the release that wrote it"
                )
            sequences.append((sequence, at))
    for _, at in sorted(sequences, reverse=True):
        usage = _parsed_slot(content[at : at + SLOT_BYTES])
        if usage is not None:
            return usage
    return None


def _parsed_slot(slot: bytes) -> Usage | None:
    (checksum,) = _CHECKSUM.unpack_from(slot, _CHECKSUM_AT)
    if xxhash.xxh3_64_intdigest(slot[:_CHECKSUM_AT]) != checksum:
        return None
    size = _BUCKET.size * NUM_BUCKETS
    usage = Usage(bytearray(slot[_BUCKETS_AT : _BUCKETS_AT + size]))
    sequence, settled_bytes, ever, over, num_unknown, num_writers = _HEADER.unpack_from(slot)[3:]
    if num_writers > MAX_WRITERS:
        return None
    usage.sequence, usage.settled_bytes, usage.num_unknown = sequence, settled_bytes, num_unknown
    usage.presumed_ever, usage.presumed_over = ever, over
    end = _WRITERS_AT + _WRITER.size * num_writers
    for name, *counts in _WRITER.iter_unpack(slot[_WRITERS_AT:end]):
        usage.writers[name.rstrip(b"\0").decode(errors="replace")] = WriterCount(*counts)
    return usage
