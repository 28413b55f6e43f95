"""The checksum of a block's file: xxh3 over its bytes, bound to its key and layout.

It lies in an extended attribute, so that the file itself holds the block's bytes and nothing
else. Bound by the seed: the right bytes under a wrong name, or of another layout, do not verify.

Source: XXH3, 128 bits (xxhash.com); the attribute's value is a version byte and the digest.
"""

from __future__ import annotations

import xxhash

from kvoffload_async.types import OffloadKey

ATTRIBUTE = "user.kvoffload.xxh3"
_VERSION = b"\x01"


class Sealer:
    """Computes the seal of blocks of one layout. Thread: any; hashing releases the GIL."""

    def __init__(self, layout: str) -> None:
        self._layout = layout.encode()

    def seal(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the attribute's value for a block's bytes."""
        seed = xxhash.xxh3_64_intdigest(self._layout + b"\0" + key)
        return _VERSION + xxhash.xxh3_128_digest(data, seed)
