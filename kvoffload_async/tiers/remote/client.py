"""The encoding of a block as one value, and the interface to a client library.

A value is a header and the block. The header has, little-endian: `KVOB`, version (2 bytes), flags
(2; 1: with a key), its length (4), the key's (4), the block's (8), layout (16); in version 1
checksum (16) and id of the integrity key (8), in version 2 the seal (see `sealing`); the block's
key, and zeros up to a multiple of 64. In version 2 the block is encrypted, for the purpose
`remote 2`, with the fields before the seal as header and the layout in hexadecimal digits.

All calls are idempotent.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierError,
    TierUnavailableError,
)
from kvoffload_async.tiers.files.digests import (
    DIGEST_BYTES,
    KEY_ID_BYTES,
    IntegrityKey,
    create_digester,
)
from kvoffload_async.tiers.files.sealing import SEAL_BYTES, EncryptionKeys, Sealer, wipe
from kvoffload_async.types import OffloadKey, block_text

MAGIC: Final = b"KVOB"
VERSION: Final = 1
"""Version of envelopes with a checksum."""
SEALED_VERSION: Final = 2
"""Version of envelopes that are encrypted."""
NAMESPACE_DIGITS: Final = 32

_ALIGNMENT: Final = 64
_FIXED: Final = struct.Struct("<4sHHIIQ16s")
"""The fields that every block of a layout and a length of key has."""
_PROOF_BYTES: Final = {VERSION: DIGEST_BYTES + KEY_ID_BYTES, SEALED_VERSION: SEAL_BYTES}
"""Bytes behind these fields: checksum and id of the integrity key, or the seal."""
_BEGIN_BYTES: Final = 6
"""Bytes of the first two of them, by which versions are told apart."""
_KEYED: Final = 1
_MAX_KEY_BYTES: Final = 4096

Bytes = npt.NDArray[np.uint8]


Parts = tuple[memoryview, ...]
"""A value in several parts."""


@dataclass(frozen=True, slots=True)
class Header:
    """Decoded header of a value, not yet verified.

    Attributes:
        digest: The checksum, or the seal.
    """

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
        """Decode the header; None if it is invalid or of another version."""
        if len(value) < _FIXED.size:
            return None
        fields = _FIXED.unpack_from(value)
        magic, version, flags, offset, key_bytes, payload_bytes, layout = fields
        if magic != MAGIC or version not in _PROOF_BYTES or key_bytes > _MAX_KEY_BYTES:
            return None
        if offset != _header_bytes(version, key_bytes) or len(value) < offset:
            return None
        key_start = _FIXED.size + _PROOF_BYTES[version]
        key_end = key_start + key_bytes
        proof = bytes(value[_FIXED.size : key_start])
        key = OffloadKey(bytes(value[key_start:key_end]))
        is_keyed = flags == _KEYED
        if flags not in {0, _KEYED} or any(value[key_end:offset]):
            return None
        is_sealed = version == SEALED_VERSION
        key_id = proof[:KEY_ID_BYTES] if is_sealed else proof[DIGEST_BYTES:]
        digest = proof if is_sealed else proof[:DIGEST_BYTES]
        if not is_keyed and (any(key_id) or is_sealed):
            return None
        return cls(version, is_keyed, offset, payload_bytes, layout.hex(), digest, key_id, key)

    @property
    def namespace(self) -> str:
        """The only namespace in which a tier accepts the block."""
        bound_id = self.key_id.hex() if self.is_keyed and self.version == VERSION else ""
        return _namespace_of(self.version, self.layout, bound_id)


def is_newer(value: memoryview) -> bool:
    """Return whether a value is an envelope of a newer release."""
    if len(value) < _FIXED.size:
        return False
    magic, version = _FIXED.unpack_from(value)[:2]
    return bool(magic == MAGIC and version > max(_PROOF_BYTES))


def _namespace_of(version: int, layout: str, key_id: str) -> str:
    """Return the namespace of a version, a layout and the id of an integrity key, or ""."""
    text = f"kvoffload remote {version} {layout} {key_id}"
    return hashlib.sha256(text.encode()).hexdigest()[:NAMESPACE_DIGITS]


class Target:
    """Memory for a value: a header, a block's row, and one byte more, to see that it is longer.

    Attributes:
        capacity: Maximum bytes of a value.
        num_bytes: Length of the value that a client has read here.
        header: Memory of the header.
        row: Memory of the block.
    """

    __slots__ = ("_more", "capacity", "header", "num_bytes", "row")

    def __init__(self, header_bytes: int, row: Bytes) -> None:
        """Refer to a row."""
        self.header = memoryview(bytearray(header_bytes))
        self.row = row.data
        self._more = memoryview(bytearray(1))
        self.capacity = header_bytes + len(self.row) + 1
        self.num_bytes = 0

    def parts(self) -> list[memoryview]:
        """Return the memory of a value with `num_bytes` bytes, in non-empty parts."""
        parts, left = [], self.num_bytes
        for part in (self.header, self.row, self._more):
            if left > 0:
                parts.append(part[:left])
            left -= len(part)
        return parts

    def fill(self, value: memoryview) -> None:
        """Copy a value here, with the GIL released, unless it is too long."""
        self.num_bytes, begin = len(value), 0
        if self.num_bytes <= self.capacity:
            for part in self.parts():
                source = value[begin : begin + len(part)]
                np.copyto(np.asarray(part), np.asarray(source))
                begin += len(part)

    def copy(self) -> memoryview:
        """Return a copy of the value that was read here."""
        return memoryview(b"".join(self.parts()))

    def release(self) -> None:
        """Let go of the row."""
        self.row.release()


class Envelopes:
    """Encodes and decodes blocks of one layout. Thread: any.

    Attributes:
        block_bytes: Bytes of every block.
        namespace: Where their values are: 32 hexadecimal digits. That of encrypted blocks does not
            depend on the key, so that several can be used.
        is_sealed: Whether the blocks are encrypted.
    """

    def __init__(
        self,
        layout: str,
        block_bytes: int,
        integrity_key: IntegrityKey | None = None,
        encryption_keys: EncryptionKeys | None = None,
    ) -> None:
        """Define the layout of the blocks.

        Args:
            layout: 32 hexadecimal digits, the digest of a `KVIdentity`.
            block_bytes: Bytes of every block.
            integrity_key: Key for the checksums; None: checksums are not keyed.
            encryption_keys: Keys to encrypt blocks with, instead of checksums.
        """
        self.block_bytes = block_bytes
        self.is_sealed = encryption_keys is not None
        self._version = SEALED_VERSION if self.is_sealed else VERSION
        self._layout = bytes.fromhex(layout)
        self._digester = create_digester(layout, integrity_key)
        self._key_id = integrity_key.id if integrity_key else bytes(KEY_ID_BYTES)
        self._flags = _KEYED if integrity_key or encryption_keys else 0
        bound_id = integrity_key.id.hex() if integrity_key else ""
        self.namespace = _namespace_of(self._version, layout, bound_id)
        if encryption_keys:
            self._sealer = Sealer(encryption_keys, f"remote {SEALED_VERSION}", layout)

    def header_bytes(self, key: OffloadKey) -> int:
        """Return the length of the header of a block."""
        return _header_bytes(self._version, len(key))

    def value_bytes(self, key: OffloadKey) -> int:
        """Return the length of a block's value."""
        return self.header_bytes(key) + self.block_bytes

    def wrap(self, key: OffloadKey, row: Bytes, into: Bytes | None = None) -> Bytes:
        """Encode a block, in new memory or `into`; copies it once, with the GIL released.

        An encrypted block is copied to `into` at last: others may write there, and would choose
        bytes between their encryption and their authentication.
        """
        if self.is_sealed and into is not None:
            np.copyto(into, self.wrap(key, row))
            return into
        offset = self.header_bytes(key)
        value = np.empty(offset + self.block_bytes, dtype=np.uint8) if into is None else into
        if self.is_sealed:
            proof = self._sealer.seal(key, row.data, value[offset:].data, self._fixed(key))
        else:
            proof = self._digest(key, row.data)
            np.copyto(value[offset:], row)
        value[:offset] = np.frombuffer(self._header(key, proof), dtype=np.uint8)
        return value

    def parts(self, key: OffloadKey, row: Bytes, into: memoryview | None = None) -> Parts:
        """Encode a block without copying it: its header, and its row. Releases the GIL.

        An encrypted block is not in its row, but `into` other memory, which is required.
        """
        if into is None:
            return memoryview(self._header(key, self._digest(key, row.data))), row.data
        proof = self._sealer.seal(key, row.data, into, self._fixed(key))
        return memoryview(self._header(key, proof)), into

    def target(self, key: OffloadKey, row: Bytes) -> Target:
        """Return the memory for a block's value."""
        return Target(self.header_bytes(key), row)

    def unwrap(self, key: OffloadKey, value: memoryview, row: Bytes) -> TierError | None:
        """Copy a value's block into a row, and verify the copy; see `verify`."""
        return self.verify(key, self.target(key, row), value)

    def verify(
        self, key: OffloadKey, target: Target, value: memoryview | None = None
    ) -> TierError | None:
        """Verify the value that a target has, after copying it there unless that is None.

        An encrypted block is decrypted there, and its row wiped if it is not valid.

        Only copies are verified, because others may modify the value. Returns the error instead of
        raising it, because its traceback would keep the row alive.

        Returns:
            A `CorruptBlockError`; a `BlockMissingError` for a block of another key or version.
        """
        if value is not None:
            target.fill(value)
        error = self._open(key, target) if self.is_sealed else self._check(key, target)
        if error is not None and self.is_sealed:
            wipe(target.row)
        return error

    def _check(self, key: OffloadKey, target: Target) -> TierError | None:
        if (error := self._check_length(key, target)) is None and target.header != self._header(
            key, self._digest(key, target.row)
        ):
            return CorruptBlockError(f"{block_text(key)}: wrong header or checksum")
        return error

    def _open(self, key: OffloadKey, target: Target) -> TierError | None:
        fixed = self._fixed(key)
        proof = bytes(target.header[_FIXED.size : _FIXED.size + SEAL_BYTES])
        begin = bytes(target.header[:_BEGIN_BYTES])
        if begin.startswith(MAGIC) and begin != fixed[:_BEGIN_BYTES]:
            return BlockMissingError(f"{block_text(key)} is of another version")
        if (error := self._check_length(key, target)) is not None:
            return error
        if target.header != self._header(key, proof):
            return CorruptBlockError(f"{block_text(key)}: wrong header")
        if not self._sealer.has_key(proof):
            return BlockMissingError(f"{block_text(key)} is encrypted with another key")
        if not self._sealer.open_into(key, proof, target.row, fixed):
            return CorruptBlockError(f"{block_text(key)}: its encryption is not valid")
        return None

    def _check_length(self, key: OffloadKey, target: Target) -> TierError | None:
        if target.num_bytes == (expected := self.value_bytes(key)):
            return None
        return CorruptBlockError(
            f"{block_text(key)}: {target.num_bytes} bytes instead of {expected}"
        )

    def _digest(self, key: OffloadKey, data: memoryview) -> bytes:
        return self._digester.digest(key, data) + self._key_id

    def _fixed(self, key: OffloadKey) -> bytes:
        offset, num_bytes = self.header_bytes(key), self.block_bytes
        start = MAGIC, self._version, self._flags, offset, len(key), num_bytes
        return _FIXED.pack(*start, self._layout)

    def _header(self, key: OffloadKey, proof: bytes) -> bytes:
        return (self._fixed(key) + proof + key).ljust(self.header_bytes(key), b"\0")


def _header_bytes(version: int, key_bytes: int) -> int:
    """Return the length of the header of a block whose key has `key_bytes` bytes."""
    return -(-(_FIXED.size + _PROOF_BYTES[version] + key_bytes) // _ALIGNMENT) * _ALIGNMENT


_on_answer: ContextVar[Callable[[], object]] = ContextVar("on_answer", default=lambda: None)


@contextmanager
def hearing(on_answer: Callable[[], object]) -> Iterator[None]:
    """Call `on_answer` whenever this task, or one that it starts, calls `heard`."""
    token = _on_answer.set(on_answer)
    try:
        yield
    finally:
        _on_answer.reset(token)


def heard() -> None:
    """Report that the present call's server has sent data, so it does not hang."""
    _on_answer.get()()


def present_listener() -> Callable[[], object]:
    """Return what `heard` calls in this task, for use in other contexts."""
    return _on_answer.get()


Server = Hashable
"""Identifies one of a store's servers; None: the only server, or an unknown one."""


class RefusedError(TierUnavailableError):
    """The server rejects this client (wrong password, missing permission); retries do not help."""


class ValueExistsError(TierError):
    """Another host has stored the value first; this host's value may not have been sent."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value read from a store.

    Attributes:
        data: The bytes; empty if the value is too long to be a block, and was not read. None: they
            are in the target.
        version: Version identifier assigned by the store, if any.
    """

    data: memoryview | None
    version: str | None = None

    def sha1(self) -> str:
        """Return the SHA-1 of the bytes, for stores without version identifiers."""
        return hashlib.sha1(self.data or b"", usedforsecurity=False).hexdigest()


class RemoteClient(ABC):
    """A client of one store. Raises its library's errors; `mapped` converts them.

    Every call may be repeated or cancelled: a cancelled call no longer accesses the caller's
    memory, and its connection is not reused while a reply is outstanding.

    Thread: loop.
    """

    location: ClassVar[str]
    """Kind of store, for messages."""
    answers_many: ClassVar[bool]
    """Whether one call can look up many keys; otherwise each needs a request."""
    is_in_place: ClassVar[bool] = False
    """Whether values are read into their targets, and stored from their rows."""

    @abstractmethod
    async def connect(self) -> None:
        """Check that the store is usable, and read its state; may be repeated."""

    @abstractmethod
    async def check(self, server: Server) -> None:
        """Check that a server responds, without accessing values."""

    @abstractmethod
    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a value."""

    @abstractmethod
    async def get(
        self, keys: Sequence[OffloadKey], targets: Sequence[Target]
    ) -> Sequence[Value | TierError | None]:
        """Return for each key its value, the read error, or None if absent.

        Args:
            keys: Keys of the blocks.
            targets: Memory for their values. Longer values need not be read.
        """

    @abstractmethod
    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Parts]
    ) -> Sequence[TierError | None]:
        """Store values that do not exist yet; return for each value its error or None.

        Each value has one part, or a header and a block if `is_in_place`.

        A value that exists is a `ValueExistsError` if the server may have refused it unread.
        """

    @abstractmethod
    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove a value if it still has this version and SHA-1; return whether it did."""

    @abstractmethod
    async def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the values of keys on one server, present or not."""

    @abstractmethod
    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        """Restart the lifetime of existing values."""

    @abstractmethod
    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """List values; see `AsyncTier.list_keys`."""

    @abstractmethod
    def mapped(self, error: Exception) -> TierError:
        """Convert an error of the library; the text may still contain secrets."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections; may be repeated."""

    def server_of(self, key: OffloadKey) -> Server:
        """Return the server of a key; a failed server does not affect keys on other servers."""
        del key
        return None

    def portions(self, keys: Sequence[OffloadKey], most: int) -> list[list[int]]:
        """Divide the keys' indices into portions of at most `most`, each of keys on one server."""
        servers: dict[Server, list[int]] = {}
        for i, key in enumerate(keys):
            servers.setdefault(self.server_of(key), []).append(i)
        return [
            indices[first : first + most]
            for indices in servers.values()
            for first in range(0, len(indices), most)
        ]

    def portion_blocks(self, value_bytes: int) -> int:
        """Return the maximum number of values of this length per call."""
        del value_bytes
        return 1
