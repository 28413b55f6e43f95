"""The checksum of a block, bound to its key and layout.

The right bytes under a wrong name, or of another layout, do not verify. Without an integrity key
that is against accidents, since everybody can compute a checksum. With one it is a MAC, and against
neighbours who can write as well.

Source: XXH3, 128 bits (xxhash.com), seeded with the 64 bits of XXH3 over layout, a zero byte, key.
With a key BLAKE2b (RFC 7693) of 16 bytes, keyed and with the person `kvoffload-block`, over the
layout and the block's key, each behind its length as 8 bytes, little-endian, and then the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import xxhash

from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.types import OffloadKey

DIGEST_BYTES = 16

_FOR_BLOCKS: Final = b"kvoffload-block"


class BlockDigester:
    """Computes the checksums of blocks of one layout. Thread: any; hashing releases the GIL.

    Attributes:
        prefix: What the seed is computed of, before the block's key.
    """

    is_keyed: ClassVar[bool] = False
    """Whether the checksums are made with an integrity key."""

    def __init__(self, layout: str) -> None:
        self.prefix = layout.encode() + b"\0"

    def digest(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the checksum of a block's bytes, `DIGEST_BYTES` long."""
        return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(self.prefix + key))

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bytes]:
        """Return the checksums of several blocks."""
        seed, digest, prefix = xxhash.xxh3_64_intdigest, xxhash.xxh3_128_digest, self.prefix
        return [digest(data, seed(prefix + key)) for key, data in zip(keys, blocks, strict=True)]


class KeyedDigester(BlockDigester):
    """Computes checksums that nobody can without the integrity key."""

    is_keyed = True

    def __init__(self, layout: str, integrity_key: IntegrityKey) -> None:
        super().__init__(layout)
        self._begun = integrity_key.mac(_FOR_BLOCKS, DIGEST_BYTES)
        self._begun.update(_framed(layout.encode()))

    def digest(self, key: OffloadKey, data: memoryview) -> bytes:
        mac = self._begun.copy()
        mac.update(_framed(key))
        mac.update(data)
        return mac.digest()

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bytes]:
        return list(map(self.digest, keys, blocks))


def create_digester(layout: str, integrity_key: IntegrityKey | None) -> BlockDigester:
    """Return what computes the checksums of blocks of a layout, with or without a key."""
    return BlockDigester(layout) if integrity_key is None else KeyedDigester(layout, integrity_key)


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
