"""The checksum of a block: xxh3 over its bytes, bound to its key and layout.

Bound by the seed: the right bytes under a wrong name, or of another layout, do not verify.

Source: XXH3, 128 bits (xxhash.com), seeded with the 64 bits of XXH3 over layout, a zero byte, key.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvoffload_async.types import OffloadKey

DIGEST_BYTES = 16


class BlockDigester:
    """Computes the checksums of blocks of one layout. Thread: any; hashing releases the GIL."""

    def __init__(self, layout: str) -> None:
        self._prefix = layout.encode() + b"\0"

    def digest(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the checksum of a block's bytes, `DIGEST_BYTES` long."""
        return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(self._prefix + key))

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bytes]:
        """Return the checksums of several blocks."""
        seed, digest, prefix = xxhash.xxh3_64_intdigest, xxhash.xxh3_128_digest, self._prefix
        return [digest(data, seed(prefix + key)) for key, data in zip(keys, blocks, strict=True)]
