"""The checksum of a block's file, in an extended attribute.

There, so that the file itself holds the block's bytes and nothing else. The attribute's value is a
version byte and the checksum; with an integrity key, the key's id is between the two.
"""

from __future__ import annotations

import enum
from typing import Final

from kvoffload_async.tiers.files.digests import (
    DIGEST_BYTES,
    KEY_ID_BYTES,
    IntegrityKey,
    create_digester,
)
from kvoffload_async.types import OffloadKey

ATTRIBUTE = "user.kvoffload.xxh3"

_PLAIN: Final = 1
_KEYED: Final = 2
_LENGTHS: Final = {_PLAIN: 1 + DIGEST_BYTES, _KEYED: 1 + KEY_ID_BYTES + DIGEST_BYTES}


class Origin(enum.Enum):
    """Who can tell whether a checksum is right, and has made it."""

    OWN = enum.auto()
    """Whoever has the same configuration as this tier."""
    OTHER_KEY = enum.auto()
    """Whoever has another integrity key, or none where this tier has one, or the other way."""
    NEWER = enum.auto()
    """A newer release."""
    NOBODY = enum.auto()
    """It is damaged."""


class AttributeDigester:
    """Computes the attributes of blocks of one layout. Thread: any; hashing releases the GIL."""

    def __init__(self, layout: str, integrity_key: IntegrityKey | None = None) -> None:
        self.digester = create_digester(layout, integrity_key)
        """Computes the checksums."""
        self.is_keyed = self.digester.is_keyed
        """Whether they are made with an integrity key."""
        self.prefix = (
            bytes([_PLAIN]) if integrity_key is None else bytes([_KEYED]) + integrity_key.id
        )
        """What is before the checksum."""

    def attribute_value(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the attribute's value for a block's bytes."""
        return self.prefix + self.digester.digest(key, data)

    def origin_of(self, value: bytes) -> Origin:
        """Tell whose an attribute's value is; only one of `OWN` can be compared."""
        version = value[0] if value else 0
        if version > _KEYED:
            return Origin.NEWER
        if _LENGTHS.get(version) != len(value):
            return Origin.NOBODY
        return Origin.OWN if value.startswith(self.prefix) else Origin.OTHER_KEY


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
