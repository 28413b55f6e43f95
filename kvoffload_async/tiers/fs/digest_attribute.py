"""The checksum or seal of a block's file, in an extended attribute.

An attribute keeps the file's length that of the block. Its value is a version byte and the
checksum; with an integrity key, the key's id is in between. With encryption keys, it is a version
byte and the seal, and the file has the encrypted bytes.
"""

from __future__ import annotations

import enum
import mmap
import threading
from typing import Final

from kvoffload_async.tiers.files.digests import (
    DIGEST_BYTES,
    KEY_ID_BYTES,
    IntegrityKey,
    create_digester,
)
from kvoffload_async.tiers.files.sealing import SEAL_BYTES, BlockKey, EncryptionKeys, Sealer
from kvoffload_async.types import OffloadKey

ATTRIBUTE = "user.kvoffload.xxh3"

_PLAIN: Final = 1
_KEYED: Final = 2
_SEALED: Final = 3
_LENGTHS: Final = {
    _PLAIN: 1 + DIGEST_BYTES,
    _KEYED: 1 + KEY_ID_BYTES + DIGEST_BYTES,
    _SEALED: 1 + SEAL_BYTES,
}


class Origin(enum.Enum):
    """Origin of a block's checksum, which determines whether this tier can compare it."""

    OWN = enum.auto()
    """Computed in the same way as this tier's checksums."""
    OTHER_KEY = enum.auto()
    """Made with another key, or with a key where this tier has none, or vice versa."""
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
        self.seals: Sealer | None = None
        """Encrypts the blocks, if they are encrypted."""

    def attribute_value(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the attribute's value for a block's bytes."""
        return self.prefix + self.digester.digest(key, data)

    def encoded(self, key: OffloadKey, data: memoryview) -> tuple[bytes, memoryview]:
        """Return the attribute's value, and the file's bytes, until the thread's next call."""
        return self.attribute_value(key, data), data

    def matches(self, key: OffloadKey, value: bytes, data: memoryview) -> bool:
        """Return whether a file's bytes are the block's; decode them in place if encrypted."""
        return self.attribute_value(key, data) == value

    def origin_of(self, value: bytes) -> Origin:
        """Return the origin of an attribute's value; only those of origin `OWN` can be compared."""
        version = value[0] if value else 0
        if version > _SEALED:
            return Origin.NEWER
        if _LENGTHS.get(version) != len(value):
            return Origin.UNKNOWN
        return Origin.OWN if value.startswith(self.prefix) else Origin.OTHER_KEY


class SealedAttributes(AttributeDigester):
    """Encrypts blocks of one layout, with the seal as attribute. Thread-safe; releases the GIL.

    Each thread that encrypts keeps memory for one block.
    """

    def __init__(self, layout: str, keys: EncryptionKeys) -> None:
        super().__init__(layout)
        self.prefix = bytes([_SEALED])
        self.seals: Sealer = Sealer(keys, "fs 2", layout)
        self._staging = threading.local()

    def encoded(self, key: OffloadKey, data: memoryview) -> tuple[bytes, memoryview]:
        into: memoryview | None = getattr(self._staging, "block", None)
        if into is None:  # aligned, for direct I/O
            into = self._staging.block = memoryview(mmap.mmap(-1, len(data)))
        return self.prefix + self.seals.seal(key, data, into), into

    def matches(self, key: OffloadKey, value: bytes, data: memoryview) -> bool:
        return self.seals.open_into(key, value.removeprefix(self.prefix), data)

    def origin_of(self, value: bytes) -> Origin:
        origin = super().origin_of(value)
        if origin is Origin.OWN and not self.seals.has_key(value[len(self.prefix) :]):
            return Origin.OTHER_KEY
        return origin


def create_attributes(layout: str, key: BlockKey) -> AttributeDigester:
    """Create what computes the attributes of a layout, with or without a key."""
    if key is None or isinstance(key, IntegrityKey):
        return AttributeDigester(layout, key)
    return SealedAttributes(layout, key)


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
