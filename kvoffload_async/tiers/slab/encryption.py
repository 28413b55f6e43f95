"""Encrypted blocks in slots: each is followed by its seal, whose tag is the record's checksum."""

from __future__ import annotations

from typing import Self

from kvoffload_async.tiers.files.digests import BlockDigester, IntegrityKey, create_digester
from kvoffload_async.tiers.files.sealing import (
    SEAL_BYTES,
    TAG_BYTES,
    BlockKey,
    EncryptionKeys,
    Sealer,
)
from kvoffload_async.types import OffloadKey


class BlockCipher(BlockDigester):
    """Encrypts and decrypts the blocks of one layout. Thread: any; the work releases the GIL."""

    is_keyed = True
    tail_bytes = SEAL_BYTES

    def __init__(self, layout: str, keys: EncryptionKeys) -> None:
        super().__init__(layout)
        self.seals = Sealer(keys, "slab 3", layout)

    @property
    def cipher(self) -> Self:
        return self

    def encrypt(self, key: OffloadKey, row: memoryview, slot: memoryview) -> bytes:
        end = len(row)
        seal = self.seals.seal(key, row, slot[:end])
        slot[end : end + SEAL_BYTES] = seal
        return seal[-TAG_BYTES:]

    def decrypt(self, key: OffloadKey, slot: memoryview, row: memoryview) -> bytes | None:
        end = len(row)
        seal = bytes(slot[end : end + SEAL_BYTES])
        is_valid = self.seals.open_into(key, seal, row, source=slot[:end])
        return seal[-TAG_BYTES:] if is_valid else None

    def has_key(self, slot: memoryview) -> bool:
        """Return whether the key of a slot's block is given here."""
        return self.seals.has_key(bytes(slot[-SEAL_BYTES:]))


def create_block_digester(layout: str, key: BlockKey) -> BlockDigester:
    """Create what computes the checksums of a layout, with or without a key."""
    if key is None or isinstance(key, IntegrityKey):
        return create_digester(layout, key)
    return BlockCipher(layout, key)
