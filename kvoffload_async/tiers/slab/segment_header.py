"""The header of a segment: which store's it is, and which of its segments. Pure.

So a segment that was swapped with another one, or comes from another store, is refused, and not
only found out by the checksums of its blocks.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from typing import Final, Self

import xxhash

HEADER_BYTES: Final = 4096
"""A page, so that slots stay aligned to pages."""

_MAGIC: Final = b"KVSLABS1"
_HEADER = struct.Struct("<8s16sqQ")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself.

    Attributes:
        store_uuid: The store's.
        number: The segment's.
        slot_bytes: Bytes of a slot.
    """

    store_uuid: str
    number: int
    slot_bytes: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        fields = _HEADER.pack(
            _MAGIC, uuid.UUID(self.store_uuid).bytes, self.number, self.slot_bytes
        )
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
        return (fields + check).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Return the header that a segment begins with, or None if it begins with none."""
        if len(content) < HEADER_BYTES:
            return None
        magic, store_uuid, number, slot_bytes = _HEADER.unpack_from(content)
        (check,) = _CHECK.unpack_from(content, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(content[: _HEADER.size]):
            return None
        return cls(str(uuid.UUID(bytes=store_uuid)), number, slot_bytes)
