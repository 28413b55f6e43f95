"""The checksum of a block's file, in an extended attribute.

There, so that the file itself holds the block's bytes and nothing else. The attribute's value is a
version byte and the digest.
"""

from __future__ import annotations

from kvoffload_async.tiers.files.digests import BlockDigester
from kvoffload_async.types import OffloadKey

ATTRIBUTE = "user.kvoffload.xxh3"
_VERSION = b"\x01"


class AttributeDigester(BlockDigester):
    """Computes the digest of blocks of one layout. Thread: any; hashing releases the GIL."""

    def attribute_value(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the attribute's value for a block's bytes."""
        return _VERSION + self.digest(key, data)


class DigestCache:
    """The digests of blocks that were written or verified here lately, so that few files are asked.

    Thread: any. Two generations take the place of a lock and of an order: each step is one that
    the interpreter does not divide, and if two threads meet, something is forgotten too early.
    """

    def __init__(self, num_blocks: int = 1 << 16) -> None:
        """Remember the last `num_blocks` blocks at least, and twice as many at most."""
        self._num_blocks = num_blocks
        self._young: dict[OffloadKey, bytes] = {}
        self._old: dict[OffloadKey, bytes] = {}

    def __len__(self) -> int:
        """How many are remembered; one that is in both generations counts twice."""
        return len(self._young) + len(self._old)

    def recall(self, key: OffloadKey) -> bytes | None:
        """Return the digest of bytes that were right for a key, if it is remembered."""
        return self._young.get(key) or self._old.get(key)

    def remember(self, key: OffloadKey, digest: bytes) -> None:
        """Note the digest of bytes that are right for a key."""
        if len(self._young) >= self._num_blocks:
            self._young, self._old = {}, self._young
        self._young[key] = digest
