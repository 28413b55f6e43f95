"""The journal's records, and reading them back. Pure: bytes in, arrays out.

See the package's docstring for the format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload_async.tables.keymap import LAST_HASH_BYTE, MOST_PARTS
from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.slab.places import SlotAddress, SlotNumbers
from kvoffload_async.types import OffloadKey

RECORD_BYTES: Final = 128
"""Bytes of a unit: a record, or the header of a frame of records."""

MAX_KEY_BYTES: Final = 96
CHECKPOINT_FRAME_RECORDS: Final = 64
"""Records of one frame of a checkpoint: what one flipped bit can cost."""

PUT: Final = 1
REMOVE: Final = 2

HAS_DIGEST: Final = 1
"""Flag: the record has a checksum."""
NEEDS_VERIFY: Final = 2
"""Flag: the block must be verified before it is served, whatever the configuration says."""
KEYED: Final = 4
"""Flag: the checksum is made with the store's integrity key."""

RECORD: Final = np.dtype(
    [
        ("kind", "u1"),
        ("key_bytes", "u1"),
        ("flags", "<u2"),
        ("place", "<i8"),
        ("use", "<u4"),
        ("digest", f"V{DIGEST_BYTES}"),
        ("key", f"V{MAX_KEY_BYTES}"),
    ]
)
Records = npt.NDArray[np.void]
"""Records, shape `[n]`, dtype `RECORD`."""

RecordRows = npt.NDArray[np.int64]
"""Which of several records are meant, ascending, shape `[n]`."""

_MAGIC: Final = b"KVSLABF1"
_RECORD = struct.Struct(f"<BBHqI{DIGEST_BYTES}s{MAX_KEY_BYTES}s")
DIGEST_AT: Final = struct.calcsize("<BBHqI")
"""Where in a record its checksum begins."""
KEY_AT: Final = DIGEST_AT + DIGEST_BYTES
"""Where in a record its key begins."""

_PREFIX = struct.Struct("<8sQII")
_CHECK = struct.Struct("<Q")
_HEADER_PADDING: Final = bytes(RECORD_BYTES - _PREFIX.size - _CHECK.size)

PackedRun = tuple[SlotAddress, bytes]
"""The first place of a run of blocks, and their packed records."""


def put_records(
    keys: Sequence[OffloadKey],
    first: SlotAddress,
    digests: Sequence[bytes],
    use: int = 0,
    *,
    is_keyed: bool = False,
) -> bytes:
    """Return the records of blocks whose places are neighbours from one on.

    One whose checksum is empty cannot be verified. `use` is the tick of their last use.
    """
    pack = _RECORD.pack
    flags = HAS_DIGEST | KEYED if is_keyed else HAS_DIGEST
    return b"".join(
        [
            pack(PUT, len(key), flags if digest else 0, place, use, digest, key)
            for place, (key, digest) in enumerate(zip(keys, digests, strict=True), first)
        ]
    )


def removal_records(places: Iterable[SlotAddress]) -> bytes:
    """Return the records that say that places have no block."""
    pack = _RECORD.pack
    return b"".join([pack(REMOVE, 0, 0, place, 0, b"", b"") for place in places])


def frame(sequence: int, body: bytes, seed: int, skipped: int = 0) -> bytes:
    """Return a frame around records, given as bytes.

    Args:
        sequence: Its number.
        body: The records.
        seed: See `Manifest.journal_seed`.
        skipped: How many numbers before it no frame has: those of appends that failed.
    """
    prefix = _PREFIX.pack(_MAGIC, sequence, len(body) // RECORD_BYTES, skipped)
    check = xxhash.xxh3_64_intdigest(prefix + body, seed)
    return b"".join((prefix, _CHECK.pack(check), _HEADER_PADDING, body))


def checkpoint(sequence: int, records: Records, seed: int) -> Iterator[bytes]:
    """Yield the frames of a checkpoint; each has the next sequence number."""
    for start in range(0, len(records), CHECKPOINT_FRAME_RECORDS):
        yield frame(sequence, records[start : start + CHECKPOINT_FRAME_RECORDS].tobytes(), seed)
        sequence += 1


def checkpoint_units(count: int) -> int:
    """Return how many units a checkpoint of so many records has."""
    return count - (-count // CHECKPOINT_FRAME_RECORDS)


def keys_of(records: Records) -> list[OffloadKey]:
    """Return the keys of records."""
    if not len(records):
        return []
    lengths = records["key_bytes"]
    longest = int(lengths.max())
    if (lengths == longest).all():
        keys: list[OffloadKey] = records.view(_key_only(longest))["key"].tolist()
        return keys
    columns = records.view(np.uint8).reshape(-1, RECORD_BYTES)[:, -MAX_KEY_BYTES:]
    packed = columns[:, :longest].tobytes()
    starts = range(0, len(packed), longest)
    ends = (np.arange(len(records)) * longest + lengths).tolist()
    return [OffloadKey(packed[start:end]) for start, end in zip(starts, ends, strict=True)]


def _key_only(key_bytes: int) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": ["key"],
            "formats": [f"V{key_bytes}"],
            "offsets": [KEY_AT],
            "itemsize": RECORD_BYTES,
        }
    )


def by_part(units: Records, rows: RecordRows) -> RecordRows:
    """Return in which order of some units keys come together that are in one part of a `KeyMap`."""
    columns = units.view(np.uint8).reshape(-1, RECORD_BYTES)
    at = KEY_AT + LAST_HASH_BYTE + units["key_bytes"][rows].astype(np.int64)
    last = columns[rows, np.minimum(at, RECORD_BYTES - 1)].astype(np.int16)
    parts = (last + columns[rows, KEY_AT]) % MOST_PARTS
    order: RecordRows = np.argsort(parts, kind="stable")
    return order


def picked(units: Records, rows: RecordRows) -> Records:
    """Return a copy of some units; as bytes without fields, which is several times as fast."""
    records: Records = units.view(f"V{RECORD_BYTES}").take(rows).view(RECORD)
    return records


def places_of(records: Records) -> list[SlotAddress]:
    """Return the places of records."""
    places: list[SlotAddress] = records["place"].tolist()
    return places


@dataclass(frozen=True, slots=True)
class Scan:
    """What a journal says.

    Attributes:
        units: The journal's units, as records; most of them are.
        rows: Which of them are records that can be believed, ascending.
        end_bytes: Where the last good frame ends; behind it there is at most a torn tail.
        sequence: The highest sequence number; the next frame needs a higher one.
        damage_at: Which unit comes behind the last place where frames are missing; one of those
            missing may have been the removal of any record before.
        lost_bytes: Bytes of the places where frames are missing, a torn tail left out.
        num_gaps: How many of those places show only by the numbers of the frames around them.
        is_torn: Whether what follows the last good frame begins as one that is longer than what is
            left of the file.
    """

    units: Records
    rows: RecordRows
    end_bytes: int
    sequence: int
    damage_at: int
    lost_bytes: int
    num_gaps: int
    is_torn: bool

    @property
    def records(self) -> Records:
        """A copy of the records that can be believed, in order."""
        records: Records = self.units[self.rows]
        return records

    @property
    def num_before_damage(self) -> int:
        """How many of the records come before a place where frames are missing."""
        return int(np.searchsorted(self.rows, self.damage_at))

    @property
    def is_damaged(self) -> bool:
        """Whether frames are missing."""
        return bool(self.lost_bytes or self.num_gaps)


def scan(data: bytes | bytearray | memoryview, seed: int) -> Scan:
    """Read a journal, whatever bytes it has; where these can be written to, so can its units.

    A frame counts if its checksum is right and its sequence number higher than that of the one
    before. What comes before such a frame and is none itself has been damaged, and where numbers
    are missing, so have the frames that had them.
    """
    num_units = len(data) // RECORD_BYTES
    view = memoryview(data)
    units: Records = np.frombuffer(view, dtype=RECORD, count=num_units)
    is_record = np.zeros(num_units, dtype=np.bool_)
    position = sequence = end = lost_units = damage_at = num_gaps = 0
    while position < num_units:
        count, found, skipped = _read_frame(view, position, sequence, seed)
        if not count:
            position = _next_magic(units, position + 1)
            continue
        if position > end:
            lost_units += position - end
            damage_at = position
        elif sequence and found - skipped != sequence + 1:
            num_gaps += 1
            damage_at = position
        is_record[position + 1 : position + 1 + count] = True
        sequence = found
        position = end = position + 1 + count
    rows = np.flatnonzero(is_record)
    return Scan(
        units,
        rows,
        end * RECORD_BYTES,
        sequence,
        damage_at,
        lost_units * RECORD_BYTES,
        num_gaps,
        _is_torn(view[end * RECORD_BYTES :]),
    )


def _is_torn(rest: memoryview) -> bool:
    if len(rest) < RECORD_BYTES:
        return True
    magic, _, count, _ = _PREFIX.unpack_from(rest)
    return bool(magic == _MAGIC and RECORD_BYTES * (1 + count) > len(rest))


def _read_frame(view: memoryview, position: int, sequence: int, seed: int) -> tuple[int, int, int]:
    """Return a frame's number of records, its sequence number, and how many it skips.

    All are 0 if there is no good one.
    """
    start = position * RECORD_BYTES
    magic, found, count, skipped = _PREFIX.unpack_from(view, start)
    stop = start + RECORD_BYTES * (1 + count)
    if magic != _MAGIC or found <= sequence or not count or stop > len(view):
        return 0, 0, 0
    hasher = xxhash.xxh3_64(view[start : start + _PREFIX.size], seed)
    hasher.update(view[start + RECORD_BYTES : stop])
    (check,) = _CHECK.unpack_from(view, start + _PREFIX.size)
    return (count, found, skipped) if hasher.intdigest() == check else (0, 0, 0)


def _next_magic(units: npt.NDArray[Any], position: int) -> int:
    """Return the next position, from one on, where a frame may begin."""
    step = 1 << 16
    while position < len(units):
        part = units[position : position + step].view(np.uint64).reshape(-1, RECORD_BYTES // 8)
        hits = np.flatnonzero(part[:, 0] == np.frombuffer(_MAGIC, np.uint64)[0])
        if len(hits):
            return position + int(hits[0])
        position += step
    return len(units)


def live_rows(scanned: Scan, segments: Mapping[int, int]) -> RecordRows:
    """Return which of a journal's units are of blocks that are there, in its order.

    The last record of a place is what holds for it.

    Args:
        scanned: The journal.
        segments: Segment -> its slots; records of places elsewhere are left out.
    """
    slots = SlotNumbers(segments)
    index, exists = slots.of(scanned.units["place"][scanned.rows])
    index, rows = index[exists], scanned.rows[exists]
    last = np.empty(slots.total, dtype=np.int64)
    last[index] = rows  # of equal indices, the last one stays
    live: RecordRows = rows[(last[index] == rows) & (scanned.units["kind"][rows] == PUT)]
    return live
