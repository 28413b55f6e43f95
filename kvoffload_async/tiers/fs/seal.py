"""The checksum of a block's file, in an extended attribute.

There, so that the file itself holds the block's bytes and nothing else. The attribute's value is a
version byte and the digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload_async.tiers.sealing import BlockDigester
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    import xxhash

ATTRIBUTE = "user.kvoffload.xxh3"
_VERSION = b"\x01"


class Sealer(BlockDigester):
    """Computes the seal of blocks of one layout. Thread: any; hashing releases the GIL."""

    def seal(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the attribute's value for a block's bytes."""
        return _VERSION + self.digest(key, data)


def sealed(running: xxhash.xxh3_128) -> bytes:
    """Return the attribute's value for the bytes that a hash from `Sealer.begin` has taken in."""
    return _VERSION + running.digest()
