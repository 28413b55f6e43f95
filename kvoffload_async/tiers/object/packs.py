"""Several blocks as one object, a *pack*: a table of what is in it, then the blocks.

All integers are little-endian.

| offset | bytes | what |
|---|---|---|
| 0 | 4 | `KVOP` |
| 4 | 2 | version of the format, 1 |
| 6 | 2 | flags: bit 0: the checksums are made with an integrity key |
| 8 | 4 | offset of the first block's bytes, a multiple of 64 |
| 12 | 2 | length of a key |
| 14 | 2 | number of blocks, at most 64 |
| 16 | 8 | length of a block |
| 24 | 16 | layout: the digest of the `KVIdentity` |
| 40 | 16 | checksum of header (with zeros here) and table, bound to the first key and the layout |
| 56 | 8 | the id of the integrity key, or zeros |
| 64 | | the table: of each block its key, and its checksum as in an envelope |
| | | zeros up to a multiple of 64, then the blocks, each padded with zeros to such a multiple |

The object is called after the first block. Its name is all that says where the pack is, so the
first block is the one by which the others are found.

A reader removes what it cannot read, so that a newer version needs namespaces of its own.

Chains say what is known of the order of blocks, and of the packs that they are in.
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
from kvoffload_async.tiers.remote.client import Bytes, namespace_name
from kvoffload_async.types import OffloadKey

Fact = TypeVar("Fact")

MOST_REMEMBERED: Final = 1 << 17
"""Bound on each kind of fact, with which all of them take 54 MiB at most for keys of 36 bytes.

The oldest are forgotten first."""


def is_chunk_boundary(key: OffloadKey, mean_blocks: int) -> bool:
    """Tell whether a pack begins with this block wherever it is packed: one of `mean_blocks` is so.

    Every host cuts at the same blocks then, whatever its jobs are, and a reader knows where to
    look. What leads with a wider mean_blocks does so with every narrower one.

    Args:
        key: Of which block.
        mean_blocks: A power of two.
    """
    return not zlib.crc32(key) & (mean_blocks - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object as it was seen once."""

    first: OffloadKey
    num_blocks: int


class Chains:
    """Which block follows which, as probes have said, and which object each one is in.

    Of an object holds what was seen of it last. What is forgotten costs a block its place in a
    pack, or a miss, and no wrong byte.

    Thread: loop.
    """

    def __init__(self) -> None:
        self._previous: dict[OffloadKey, OffloadKey] = {}
        self._objects: dict[OffloadKey, _Object] = {}
        """By what they are called after."""
        self._places: dict[OffloadKey, _Object] = {}
        """By block; one that is not in `_objects` any more is out of date."""

    def saw_chain(self, chain: Sequence[OffloadKey]) -> None:
        """Note the order of a chain, head to tail."""
        _remember(self._previous, zip(chain[1:], chain, strict=False))

    def follows(self, before: OffloadKey, key: OffloadKey) -> bool:
        """Tell whether a block is known to come right behind another."""
        return self._previous.get(key) == before

    def saw_object(self, keys: Sequence[OffloadKey]) -> None:
        """Note all blocks that an object has, after the first of which it is called."""
        seen = _Object(keys[0], len(keys))
        _remember(self._objects, [(seen.first, seen)])
        _remember(self._places, zip(keys, repeat(seen)))

    def lost_object(self, name: OffloadKey) -> None:
        """Forget an object: it has gone, or is not right."""
        self._objects.pop(name, None)

    def first_of(self, key: OffloadKey) -> OffloadKey | None:
        """Return after which block the object is called that a block is in, if that is known."""
        found = self._object_of(key)
        return None if found is None else found.first

    def name_of(self, key: OffloadKey) -> OffloadKey:
        """Return after which block a block's object is called: itself, unless more is known."""
        found = self._object_of(key)
        return key if found is None else found.first

    def blocks_beside(self, key: OffloadKey) -> int:
        """Return how many blocks the object has that a block is in, itself among them."""
        found = self._object_of(key)
        return 1 if found is None else found.num_blocks

    def length_at(self, chain: Sequence[OffloadKey], index: int) -> int:
        """Return how many blocks of a chain, from this one on, the object called after it has."""
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
"""Of a pack, without its table. A reader believes nobody who has more."""

_ALIGNMENT: Final = 64
_FIXED: Final = struct.Struct("<4sHHIHHQ16s16s8s")
_CHECKSUM: Final = slice(40, 56)
_KEYED: Final = 1


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What a pack says of itself; nothing of it is believed before the table verifies."""

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
        """Return what the head of an object says, or None if it is no pack of this version."""
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
        """The only namespace in which a tier takes it for a pack."""
        return namespace_name(self.layout, self.key_id.hex() if self.is_keyed else "")

    @property
    def value_bytes(self) -> int:
        """How long the whole object is."""
        return self.payload_offset + len(self.keys) * _aligned(self.block_bytes)

    def block(self, value: memoryview, number: int) -> memoryview:
        """Return the bytes of a block; empty where the object ends before it."""
        begin = self.payload_offset + number * _aligned(self.block_bytes)
        return value[begin : begin + self.block_bytes]

    def verifies(self, value: memoryview, digester: BlockDigester) -> bool:
        """Tell whether header and table are as they were written."""
        return digester.digest(self.keys[0], _checked(value, self.payload_offset)) == self.checksum


def is_pack(value: memoryview) -> bool:
    """Tell whether a value says that it is a pack."""
    return bytes(value[: len(MAGIC)]) == MAGIC


def is_newer_pack(value: memoryview) -> bool:
    """Tell whether a value is a pack of a newer release."""
    if len(value) < _FIXED.size:
        return False
    magic, version = _FIXED.unpack_from(value)[:2]
    return bool(magic == MAGIC and version > VERSION)


class Packs:
    """Makes packs of the blocks of one layout, and reads them. Thread: any."""

    def __init__(
        self, layout: str, block_bytes: int, integrity_key: IntegrityKey | None = None
    ) -> None:
        """Describe the blocks.

        Args:
            layout: 32 hexadecimal digits, the digest of a `KVIdentity`.
            block_bytes: Bytes of every block.
            integrity_key: What checksums are made with; None: anybody can make them.
        """
        self.block_bytes = block_bytes
        self._layout = layout
        self._key_id = integrity_key.id if integrity_key else bytes(KEY_ID_BYTES)
        self._digester = create_digester(layout, integrity_key)

    def most_blocks(self, payload_bytes: int) -> int:
        """Return how many blocks a pack has whose payload is no longer than this, 1 at least."""
        return min(MOST_BLOCKS, max(1, payload_bytes // _aligned(self.block_bytes)))

    def most_bytes(self, key_bytes: int) -> int:
        """Return how long a pack of such keys is at most."""
        payload_bytes = self.most_blocks(MOST_PAYLOAD_BYTES) * _aligned(self.block_bytes)
        return head_bytes(key_bytes) + payload_bytes

    def wrap(self, keys: Sequence[OffloadKey], rows: Sequence[Bytes]) -> Bytes:
        """Return a pack; copies the blocks once. The keys are of one length, and `MOST_BLOCKS`."""
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
        """Return what is in the pack that is called after a block, or None if it is not right.

        Args:
            first: After which block the object is called.
            head: At least as much of the object as `head_bytes` says, or all of it.
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
        """Copy blocks of a pack into rows, each of which is touched only if its block verifies.

        Args:
            header: What `table` returned for it.
            value: The object.
            rows: Where blocks go, all of which are in the table.
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
                bad[key] = CorruptBlockError(f"block {key.hex()}: wrong checksum in its pack")
        return bad


def head_bytes(key_bytes: int) -> int:
    """Return how long header and table are at most, for keys of this length."""
    return _aligned(_FIXED.size + MOST_BLOCKS * (key_bytes + DIGEST_BYTES))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _checked(head: memoryview, offset: int) -> memoryview:
    """Return header and table as they were when their checksum was computed."""
    checked = bytearray(head[:offset])
    checked[_CHECKSUM] = bytes(DIGEST_BYTES)
    return memoryview(checked)
