"""Encoding and decoding of the journal's records. Pure functions on bytes and arrays.

See the package's docstring for the format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload_async.tables.keymap import LAST_HASH_BYTE, MOST_PARTS
from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.slab.addresses import SlotAddress, SlotNumbers
from kvoffload_async.types import OffloadKey

RECORD_BYTES: Final = 128
"""Size of a unit: a record, or the header of a frame of records."""

MAX_KEY_BYTES: Final = 96
CHECKPOINT_FRAME_RECORDS: Final = 64
"""Records per frame of a checkpoint; bounds the loss from one flipped bit."""

PUT: Final = 1
REMOVE: Final = 2

HAS_DIGEST: Final = 1
"""Flag: the record has a checksum."""
NEEDS_VERIFY: Final = 2
"""Flag: the block must be verified before it is served, regardless of the configuration."""
KEYED: Final = 4
"""Flag: the checksum is made with the store's integrity key."""
KNOWN_FLAGS: Final = HAS_DIGEST | NEEDS_VERIFY | KEYED
"""Flags known to this release; a block whose record has another flag is not served."""

RECORD: Final = np.dtype(
    [
        ("kind", "u1"),
        ("key_bytes", "u1"),
        ("flags", "<u2"),
        ("address", "<i8"),
        ("use", "<u4"),
        ("digest", f"V{DIGEST_BYTES}"),
        ("key", f"V{MAX_KEY_BYTES}"),
    ]
)
Records = npt.NDArray[np.void]
"""Records, shape `[n]`, dtype `RECORD`."""

RecordRows = npt.NDArray[np.int64]
"""Indices of records, ascending, shape `[n]`, int64."""

Uses = npt.NDArray[np.uint32]
"""The tick of each slot's last use, shape `[slots]`."""

_MAGIC: Final = b"KVSLABF1"
_RECORD = struct.Struct(f"<BBHqI{DIGEST_BYTES}s{MAX_KEY_BYTES}s")
DIGEST_AT: Final = struct.calcsize("<BBHqI")
"""Offset of the checksum in a record."""
KEY_AT: Final = DIGEST_AT + DIGEST_BYTES
"""Offset of the key in a record."""

_PREFIX = struct.Struct("<8sQII")
_CHECK = struct.Struct("<Q")
_HEADER_PADDING: Final = bytes(RECORD_BYTES - _PREFIX.size - _CHECK.size)

PackedRun = tuple[SlotAddress, bytes]
"""The first address of a run of adjacent blocks, and their packed records."""


def put_records(
    keys: Sequence[OffloadKey],
    first: SlotAddress,
    digests: Sequence[bytes],
    use: int = 0,
    *,
    is_keyed: bool = False,
) -> bytes:
    """Return the packed records of blocks at consecutive addresses.

    Blocks with an empty digest have no checksum. `use` is the tick of the last use.
    """
    pack = _RECORD.pack
    flags = HAS_DIGEST | KEYED if is_keyed else HAS_DIGEST
    return b"".join(
        [
            pack(PUT, len(key), flags if digest else 0, address, use, digest, key)
            for address, (key, digest) in enumerate(zip(keys, digests, strict=True), first)
        ]
    )


def removal_records(addresses: Iterable[SlotAddress]) -> bytes:
    """Return packed removal records for addresses."""
    pack = _RECORD.pack
    return b"".join([pack(REMOVE, 0, 0, address, 0, b"", b"") for address in addresses])


def frame(sequence: int, body: bytes, seed: int, skipped: int = 0) -> bytes:
    """Return a frame with packed records.

    Args:
        sequence: Sequence number of the frame.
        body: The packed records.
        seed: See `Manifest.journal_seed`.
        skipped: Number of sequence numbers skipped before it, because their appends failed.
    """
    prefix = _PREFIX.pack(_MAGIC, sequence, len(body) // RECORD_BYTES, skipped)
    check = xxhash.xxh3_64_intdigest(prefix + body, seed)
    return b"".join((prefix, _CHECK.pack(check), _HEADER_PADDING, body))


def checkpoint(sequence: int, records: Records, seed: int) -> Iterator[bytes]:
    """Yield the frames of a checkpoint, with consecutive sequence numbers."""
    for start in range(0, len(records), CHECKPOINT_FRAME_RECORDS):
        yield frame(sequence, records[start : start + CHECKPOINT_FRAME_RECORDS].tobytes(), seed)
        sequence += 1


def checkpoint_units(count: int) -> int:
    """Return the number of units of a checkpoint with `count` records."""
    return count - (-count // CHECKPOINT_FRAME_RECORDS)


def keys_of(records: Records) -> list[OffloadKey]:
    """Return the records' keys."""
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
    """Return an order of `rows` that groups keys of the same part of a `KeyMap`."""
    columns = units.view(np.uint8).reshape(-1, RECORD_BYTES)
    at = KEY_AT + LAST_HASH_BYTE + units["key_bytes"][rows].astype(np.int64)
    last = columns[rows, np.minimum(at, RECORD_BYTES - 1)].astype(np.int16)
    parts = (last + columns[rows, KEY_AT]) % MOST_PARTS
    order: RecordRows = np.argsort(parts, kind="stable")
    return order


def picked(units: Records, rows: RecordRows) -> Records:
    """Return a copy of selected units, made as raw bytes, which is several times faster."""
    records: Records = units.view(f"V{RECORD_BYTES}").take(rows).view(RECORD)
    return records


def addresses_of(records: Records) -> list[SlotAddress]:
    """Return the records' addresses."""
    addresses: list[SlotAddress] = records["address"].tolist()
    return addresses


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of scanning a journal.

    Attributes:
        units: The journal's units, viewed as records; frame headers are included.
        rows: Indices of the units that are valid records, ascending.
        end_bytes: End of the last good frame; only a torn tail can follow.
        sequence: The highest sequence number; the next frame needs a higher one.
        damage_at: Index of the unit behind the last gap in the frames. A missing frame may have
            removed any block recorded before.
        lost_bytes: Total size of damaged gaps, without a torn tail.
        num_gaps: Number of gaps that show only as missing sequence numbers.
        is_torn: Whether the last good frame is followed by the beginning of a truncated frame.
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
    def is_damaged(self) -> bool:
        """Whether frames are missing."""
        return bool(self.lost_bytes or self.num_gaps)


def scan(data: bytes | bytearray | memoryview, seed: int) -> Scan:
    """Scan a journal with arbitrary content; its units are writable if `data` is.

    A frame is valid if its checksum is right and its sequence number is higher than the previous
    one. Any other bytes before a valid frame are damage, as are missing sequence numbers.
    """
    num_units = len(data) // RECORD_BYTES
    view = memoryview(data)
    units: Records = np.frombuffer(view, dtype=RECORD, count=num_units)
    is_record = np.zeros(num_units, dtype=np.bool_)
    position = sequence = end = lost_units = damage_at = num_gaps = 0
    while position < num_units:
        count, found, skipped = _read_frame(view, position, sequence, seed)
        if not count:
            position += 1
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
    """Return a frame's record count, sequence number, and count of skipped sequence numbers.

    All are 0 if there is no valid frame.
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


def live_rows(scanned: Scan, segments: Mapping[int, int]) -> RecordRows:
    """Return the indices of the journal's units whose blocks exist, in journal order.

    The last record of an address is valid.

    Args:
        scanned: The journal.
        segments: Segment -> number of slots; records of other addresses are ignored.
    """
    slots = SlotNumbers(segments)
    index, exists = slots.of(scanned.units["address"][scanned.rows])
    index, rows = index[exists], scanned.rows[exists]
    last = np.empty(slots.total, dtype=np.int64)
    last[index] = rows  # with equal indices, the last assignment wins
    live: RecordRows = rows[(last[index] == rows) & (scanned.units["kind"][rows] == PUT)]
    return live
