"""Packs: objects with several blocks, as a table of contents followed by the blocks.

All integers are little-endian.

| offset | bytes | content |
|---|---|---|
| 0 | 4 | `KVOP` |
| 4 | 2 | version of the format, 1 |
| 6 | 2 | flags: bit 0: the checksums are keyed with an integrity key |
| 8 | 4 | offset of the first block's bytes, a multiple of 64 |
| 12 | 2 | length of a key |
| 14 | 2 | number of blocks, at most 64 |
| 16 | 8 | length of a block |
| 24 | 16 | layout: the digest of the `KVIdentity` |
| 40 | 16 | checksum of header (with zeros here) and table, bound to the first key and the layout |
| 56 | 8 | id of the integrity key, or zeros |
| 64 | | the table: for each block its key, and its checksum as in an envelope |
| | | zero padding to a multiple of 64, then the blocks, each padded with zeros likewise |

The object is named after its first block, so the other blocks are only found via the first.
A reader removes what it cannot decode, so a newer version must use other namespaces.

`Chains` records the order of blocks, and the packs that contain them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final, TypeVar

import numpy as np

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.tiers.files.digests import (
    DIGEST_BYTES,
    KEY_ID_BYTES,
    BlockDigester,
    IntegrityKey,
    create_digester,
)
from kvoffload_async.tiers.remote.client import Bytes, is_newer, namespace_name
from kvoffload_async.types import OffloadKey, block_text

Fact = TypeVar("Fact")

MOST_REMEMBERED: Final = 1 << 17
"""Maximum number of entries per table; 54 MiB in all for keys of 36 bytes. The oldest entries are
dropped first."""


def is_chunk_boundary(key: OffloadKey, mean_blocks: int) -> bool:
    """Return whether packs always begin with this block, as with one in `mean_blocks`.

    So all hosts cut at the same blocks regardless of their jobs, and a reader knows where packs
    begin. A boundary for some `mean_blocks` is one for every smaller value.

    Args:
        key: Key of the block.
        mean_blocks: A power of two.
    """
    return not zlib.crc32(key) & (mean_blocks - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """The contents of an object when it was last read."""

    first: OffloadKey
    num_blocks: int


class Chains:
    """The order of blocks, as seen in probes, and the object of each block.

    The last state seen of an object counts. A missing or outdated entry costs a place in a pack or
    a miss, never wrong bytes.

    Thread: loop.
    """

    def __init__(self) -> None:
        self._previous: dict[OffloadKey, OffloadKey] = {}
        self._objects: dict[OffloadKey, _Object] = {}
        """By the key that the object is named after."""
        self._places: dict[OffloadKey, _Object] = {}
        """By block; entries whose object is no longer in `_objects` are outdated."""

    def saw_chain(self, chain: Sequence[OffloadKey]) -> None:
        """Record the order of a chain, head to tail."""
        _remember(self._previous, zip(chain[1:], chain, strict=False))

    def follows(self, before: OffloadKey, key: OffloadKey) -> bool:
        """Return whether a block is known to directly follow another."""
        return self._previous.get(key) == before

    def saw_object(self, keys: Sequence[OffloadKey]) -> None:
        """Record the blocks of an object, which is named after the first."""
        seen = _Object(keys[0], len(keys))
        _remember(self._objects, [(seen.first, seen)])
        _remember(self._places, zip(keys, repeat(seen)))

    def lost_object(self, name: OffloadKey) -> None:
        """Forget an object that is gone or corrupt."""
        self._objects.pop(name, None)

    def first_of(self, key: OffloadKey) -> OffloadKey | None:
        """Return the key that names the object with this block, if known."""
        found = self._object_of(key)
        return None if found is None else found.first

    def name_of(self, key: OffloadKey) -> OffloadKey:
        """Return the key that names the object with this block; the block's own if unknown."""
        found = self._object_of(key)
        return key if found is None else found.first

    def blocks_beside(self, key: OffloadKey) -> int:
        """Return the number of blocks in the object with this block."""
        found = self._object_of(key)
        return 1 if found is None else found.num_blocks

    def length_at(self, chain: Sequence[OffloadKey], index: int) -> int:
        """Return how many blocks from this index on are in the object named after it."""
        found = self._objects.get(chain[index])
        end = index + 1
        while found is not None and end < len(chain) and self._places.get(chain[end]) is found:
            end += 1
        return end - index

    def __len__(self) -> int:
        return len(self._previous) + len(self._objects) + len(self._places)

    def _object_of(self, key: OffloadKey) -> _Object | None:
        found = self._places.get(key)
        return found if found is not None and self._objects.get(found.first) is found else None


def _remember(facts: dict[OffloadKey, Fact], new: Iterable[tuple[OffloadKey, Fact]]) -> None:
    for key, fact in new:
        facts.pop(key, None)
        facts[key] = fact
    for key in list(islice(facts, max(0, len(facts) - MOST_REMEMBERED))):
        del facts[key]


MAGIC: Final = b"KVOP"
VERSION: Final = 1
MOST_BLOCKS: Final = 64
MOST_PAYLOAD_BYTES: Final = 16 << 20
"""Maximum payload of a pack, without its table. Readers reject larger packs."""

_ALIGNMENT: Final = 64
_FIXED: Final = struct.Struct("<4sHHIHHQ16s16s8s")
_CHECKSUM: Final = slice(40, 56)
_KEYED: Final = 1


@dataclass(frozen=True, slots=True)
class PackHeader:
    """Decoded header and table of a pack; not trustworthy before they are verified."""

    is_keyed: bool
    payload_offset: int
    block_bytes: int
    layout: str
    checksum: bytes
    key_id: bytes
    keys: tuple[OffloadKey, ...]
    digests: tuple[bytes, ...]

    @classmethod
    def parse(cls, value: memoryview) -> PackHeader | None:
        """Decode the head of an object; None if it is not a pack of this version."""
        if len(value) < _FIXED.size:
            return None
        fields = _FIXED.unpack_from(value)
        magic, version, flags, offset, key_bytes, count, block_bytes, layout, check, key_id = fields
        if (magic, version) != (MAGIC, VERSION) or flags not in {0, _KEYED}:
            return None
        table_end = _FIXED.size + count * (key_bytes + DIGEST_BYTES)
        if not 0 < count <= MOST_BLOCKS or offset != _aligned(table_end) or len(value) < offset:
            return None
        if count * _aligned(block_bytes) > MOST_PAYLOAD_BYTES or any(value[table_end:offset]):
            return None
        step = key_bytes + DIGEST_BYTES
        rows = [bytes(value[at : at + step]) for at in range(_FIXED.size, table_end, step)]
        keys = tuple(OffloadKey(row[:key_bytes]) for row in rows)
        if len(set(keys)) < count or (not flags and any(key_id)):
            return None
        return cls(
            flags == _KEYED,
            offset,
            block_bytes,
            layout.hex(),
            check,
            key_id,
            keys,
            tuple(row[key_bytes:] for row in rows),
        )

    @property
    def namespace(self) -> str:
        """The only namespace in which a tier accepts the pack."""
        return namespace_name(self.layout, self.key_id.hex() if self.is_keyed else "")

    @property
    def value_bytes(self) -> int:
        """Total length of the object."""
        return self.payload_offset + len(self.keys) * _aligned(self.block_bytes)

    def block(self, value: memoryview, number: int) -> memoryview:
        """Return the bytes of a block; empty if the object is too short."""
        begin = self.payload_offset + number * _aligned(self.block_bytes)
        return value[begin : begin + self.block_bytes]

    def verifies(self, value: memoryview, digester: BlockDigester) -> bool:
        """Return whether the checksum of header and table is right."""
        return digester.digest(self.keys[0], _checked(value, self.payload_offset)) == self.checksum


def is_pack(value: memoryview) -> bool:
    """Return whether a value begins with the magic number of a pack."""
    return bytes(value[: len(MAGIC)]) == MAGIC


def is_newer_pack(value: memoryview) -> bool:
    """Return whether a value is a pack of a newer release."""
    return is_newer(value, MAGIC)


class Packs:
    """Encodes and decodes packs of one layout. Thread: any."""

    def __init__(
        self, layout: str, block_bytes: int, integrity_key: IntegrityKey | None = None
    ) -> None:
        """Define the layout.

        Args:
            layout: 32 hexadecimal digits, the digest of a `KVIdentity`.
            block_bytes: Bytes of every block.
            integrity_key: Key for the checksums; None: checksums are not keyed.
        """
        self.block_bytes = block_bytes
        self._layout = layout
        self._key_id = integrity_key.id if integrity_key else bytes(KEY_ID_BYTES)
        self._digester = create_digester(layout, integrity_key)

    def most_blocks(self, payload_bytes: int) -> int:
        """Return how many blocks fit into this payload, at least 1 and at most `MOST_BLOCKS`."""
        return min(MOST_BLOCKS, max(1, payload_bytes // _aligned(self.block_bytes)))

    def most_bytes(self, key_bytes: int) -> int:
        """Return the maximum length of a pack with keys of this length."""
        payload_bytes = self.most_blocks(MOST_PAYLOAD_BYTES) * _aligned(self.block_bytes)
        return head_bytes(key_bytes) + payload_bytes

    def wrap(self, keys: Sequence[OffloadKey], rows: Sequence[Bytes]) -> Bytes:
        """Encode a pack, copying blocks once. At most `MOST_BLOCKS` keys, of equal length."""
        table_end = _FIXED.size + len(keys) * (len(keys[0]) + DIGEST_BYTES)
        offset, stride = _aligned(table_end), _aligned(self.block_bytes)
        value = np.zeros(offset + len(keys) * stride, dtype=np.uint8)
        head = bytearray(offset)
        _FIXED.pack_into(
            head,
            0,
            MAGIC,
            VERSION,
            _KEYED if self._digester.is_keyed else 0,
            offset,
            len(keys[0]),
            len(keys),
            self.block_bytes,
            bytes.fromhex(self._layout),
            bytes(DIGEST_BYTES),
            self._key_id,
        )
        digests = self._digester.digests(keys, [row.data for row in rows])
        table = b"".join(part for pair in zip(keys, digests, strict=True) for part in pair)
        head[_FIXED.size : table_end] = table
        head[_CHECKSUM] = self._digester.digest(keys[0], memoryview(head))
        value[:offset] = np.frombuffer(head, dtype=np.uint8)
        for number, row in enumerate(rows):
            begin = offset + number * stride
            np.copyto(value[begin : begin + self.block_bytes], row)
        return value

    def table(self, first: OffloadKey, head: memoryview) -> PackHeader | None:
        """Decode and verify the table of the pack named after a block; None if invalid.

        Args:
            first: Key that the object is named after.
            head: At least the first `head_bytes` of the object, or all of it.
        """
        header = PackHeader.parse(head)
        if (
            header is None
            or header.keys[0] != first
            or header.block_bytes != self.block_bytes
            or (header.layout, header.key_id) != (self._layout, self._key_id)
            or header.is_keyed != self._digester.is_keyed
            or not header.verifies(head, self._digester)
        ):
            return None
        return header

    def unwrap(
        self, header: PackHeader, value: memoryview, rows: Mapping[OffloadKey, Bytes]
    ) -> dict[OffloadKey, CorruptBlockError]:
        """Copy blocks of a pack into rows; a row is written only if its block verifies.

        Args:
            header: The result of `table`.
            value: The object.
            rows: Destination rows by key; all keys must be in the table.
        """
        bad: dict[OffloadKey, CorruptBlockError] = {}
        for number, key in enumerate(header.keys):
            if (row := rows.get(key)) is None:
                continue
            block = header.block(value, number)
            if (
                len(value) == header.value_bytes
                and self._digester.digest(key, block) == header.digests[number]
            ):
                np.copyto(row, np.frombuffer(block, dtype=np.uint8))
            else:
                bad[key] = CorruptBlockError(f"{block_text(key)}: wrong checksum in its pack")
        return bad


def head_bytes(key_bytes: int) -> int:
    """Return the maximum length of header and table for keys of this length."""
    return _aligned(_FIXED.size + MOST_BLOCKS * (key_bytes + DIGEST_BYTES))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _checked(head: memoryview, offset: int) -> memoryview:
    """Return header and table with the checksum field zeroed."""
    checked = bytearray(head[:offset])
    checked[_CHECKSUM] = bytes(DIGEST_BYTES)
    return memoryview(checked)
