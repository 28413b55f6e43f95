"""A block as one value of a remote store; see the package for the format."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.errors import CorruptBlockError
from kvoffload_async.tiers.files.digests import BlockDigester, create_digester
from kvoffload_async.tiers.files.integrity import KEY_ID_BYTES, IntegrityKey
from kvoffload_async.types import OffloadKey

MAGIC: Final = b"KVOB"
VERSION: Final = 1
NAMESPACE_DIGITS: Final = 32

_ALIGNMENT: Final = 64
_FIXED: Final = struct.Struct("<4sHHIIQ16s16s8s")
_KEYED: Final = 1
_MAX_KEY_BYTES: Final = 4096

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Header:
    """What a value says of itself, before anything of it is believed."""

    version: int
    is_keyed: bool
    payload_offset: int
    payload_bytes: int
    layout: str
    digest: bytes
    key_id: bytes
    key: OffloadKey

    @classmethod
    def parse(cls, value: memoryview) -> Header | None:
        """Return what the header says, or None if there is none of a version that is known."""
        if len(value) < _FIXED.size:
            return None
        fields = _FIXED.unpack_from(value)
        magic, version, flags, offset, key_bytes, payload_bytes, layout, digest, key_id = fields
        if magic != MAGIC or version != VERSION or key_bytes > _MAX_KEY_BYTES:
            return None
        if offset != _payload_offset(key_bytes) or len(value) < offset:
            return None
        key_end = _FIXED.size + key_bytes
        key = OffloadKey(bytes(value[_FIXED.size : key_end]))
        is_keyed = flags == _KEYED
        if flags not in {0, _KEYED} or any(value[key_end:offset]):
            return None
        if not is_keyed and any(key_id):
            return None
        return cls(version, is_keyed, offset, payload_bytes, layout.hex(), digest, key_id, key)

    @property
    def namespace(self) -> str:
        """The only namespace in which a tier takes it for a block."""
        return namespace_name(self.layout, self.key_id.hex() if self.is_keyed else "")


def is_newer(value: memoryview) -> bool:
    """Tell whether a value is an envelope of a newer release."""
    if len(value) < _FIXED.size:
        return False
    magic, version = _FIXED.unpack_from(value)[:2]
    return bool(magic == MAGIC and version > VERSION)


def namespace_of(layout: str, integrity_key: IntegrityKey | None) -> str:
    """Return 32 hexadecimal digits, others for every other format, layout or integrity key."""
    return namespace_name(layout, integrity_key.id.hex() if integrity_key else "")


def namespace_name(layout: str, key_id: str) -> str:
    """Return the name of the namespace of a layout and the id of an integrity key, if any."""
    text = f"kvoffload remote {VERSION} {layout} {key_id}"
    return hashlib.sha256(text.encode()).hexdigest()[:NAMESPACE_DIGITS]


class Envelopes:
    """Wraps and unwraps the blocks of one layout. Thread: any."""

    def __init__(
        self, layout: str, block_bytes: int, integrity_key: IntegrityKey | None = None
    ) -> None:
        """Describe the blocks.

        Args:
            layout: 32 hexadecimal digits, the digest of a `KVIdentity`.
            block_bytes: Bytes of every block.
            integrity_key: What checksums are made with; None: anybody can make them.
        """
        self.block_bytes = block_bytes
        self._layout = bytes.fromhex(layout)
        self._digester: BlockDigester = create_digester(layout, integrity_key)
        self._flags = _KEYED if integrity_key else 0
        self._key_id = integrity_key.id if integrity_key else bytes(KEY_ID_BYTES)

    def value_bytes(self, key: OffloadKey) -> int:
        """Return how long a block's value is."""
        return _payload_offset(len(key)) + self.block_bytes

    def wrap(self, key: OffloadKey, row: Bytes) -> Bytes:
        """Return a block's value; copies its bytes once, without the interpreter's lock."""
        offset = _payload_offset(len(key))
        value = np.empty(offset + self.block_bytes, dtype=np.uint8)
        digest = self._digester.digest(key, row.data)
        value[:offset] = np.frombuffer(self._header(key, digest), dtype=np.uint8)
        np.copyto(value[offset:], row)
        return value

    def unwrap(self, key: OffloadKey, value: memoryview, row: Bytes) -> CorruptBlockError | None:
        """Copy a value's block into a row, which is touched only if the block verifies.

        Returns the error rather than raising it: with a traceback it would hold the row.
        """
        offset = _payload_offset(len(key))
        if len(value) != offset + self.block_bytes:
            return CorruptBlockError(
                f"block {key.hex()}: {len(value)} bytes instead of {offset + self.block_bytes}"
            )
        payload = value[offset:]
        if value[:offset] != self._header(key, self._digester.digest(key, payload)):
            return CorruptBlockError(f"block {key.hex()}: wrong header or checksum")
        np.copyto(row, np.frombuffer(payload, dtype=np.uint8))
        return None

    @staticmethod
    def header_bytes(key: OffloadKey) -> int:
        """Return how long the header before a block's payload is."""
        return _payload_offset(len(key))

    def header(self, key: OffloadKey, row: Bytes) -> Bytes:
        """Return a block's header alone, for a value that is put together elsewhere."""
        return np.frombuffer(
            self._header(key, self._digester.digest(key, row.data)), dtype=np.uint8
        )

    def verify(self, key: OffloadKey, header: Bytes, row: Bytes) -> CorruptBlockError | None:
        """Check a block that is in its row already; returns the error, as `unwrap` does."""
        if np.array_equal(header, self.header(key, row)):
            return None
        return CorruptBlockError(f"block {key.hex()}: wrong header or checksum")

    def _header(self, key: OffloadKey, digest: bytes) -> bytes:
        offset = _payload_offset(len(key))
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            self._flags,
            offset,
            len(key),
            self.block_bytes,
            self._layout,
            digest,
            self._key_id,
        )
        return (fixed + key).ljust(offset, b"\0")


def _payload_offset(key_bytes: int) -> int:
    return -(-(_FIXED.size + key_bytes) // _ALIGNMENT) * _ALIGNMENT
