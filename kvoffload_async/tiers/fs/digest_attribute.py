"""The checksum of a block's file, in an extended attribute.

An attribute keeps the file identical to the block's bytes. Its value is a version byte and the
checksum; with an integrity key, the key's id is in between.
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
    """Origin of a block's checksum, which determines whether this tier can compare it."""

    OWN = enum.auto()
    """Computed in the same way as this tier's checksums."""
    OTHER_KEY = enum.auto()
    """Computed with another integrity key, or keyed where this tier has no key, or vice versa."""
    NEWER = enum.auto()
    """Written by a newer release."""
    UNKNOWN = enum.auto()
    """The attribute is damaged."""


class AttributeDigester:
    """Computes checksum attributes of blocks of one layout. Thread-safe; releases the GIL."""

    def __init__(self, layout: str, integrity_key: IntegrityKey | None = None) -> None:
        self.digester = create_digester(layout, integrity_key)
        """Computes the checksums."""
        self.prefix = (
            bytes([_PLAIN]) if integrity_key is None else bytes([_KEYED]) + integrity_key.id
        )
        """The attribute's bytes before the checksum."""

    def attribute_value(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the attribute's value for a block's bytes."""
        return self.prefix + self.digester.digest(key, data)

    def origin_of(self, value: bytes) -> Origin:
        """Return the origin of an attribute's value; only those of origin `OWN` can be compared."""
        version = value[0] if value else 0
        if version > _KEYED:
            return Origin.NEWER
        if _LENGTHS.get(version) != len(value):
            return Origin.UNKNOWN
        return Origin.OWN if value.startswith(self.prefix) else Origin.OTHER_KEY


class DigestCache:
    """Cache of the digests of recently written or verified blocks, to save reading attributes.

    Thread-safe without a lock: every step is atomic in the interpreter. Instead of an order it has
    two generations. In a race, an entry may be dropped too early.
    """

    def __init__(self, num_blocks: int = 1 << 16) -> None:
        """Cache the digests of at least the last `num_blocks` blocks, at most twice as many."""
        self._num_blocks = num_blocks
        self._young: dict[OffloadKey, bytes] = {}
        self._old: dict[OffloadKey, bytes] = {}

    def recall(self, key: OffloadKey) -> bytes | None:
        """Return the cached digest of a block, or None."""
        return self._young.get(key) or self._old.get(key)

    def remember(self, key: OffloadKey, digest: bytes) -> None:
        """Cache the digest of a block that was written or verified."""
        if len(self._young) >= self._num_blocks:
            self._young, self._old = {}, self._young
        self._young[key] = digest
