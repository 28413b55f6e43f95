"""A block as one value of a remote store, and the few calls that a client library must offer.

The package has the format of the value. Every call is safe to repeat.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.errors import CorruptBlockError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.digests import (
    KEY_ID_BYTES,
    BlockDigester,
    IntegrityKey,
    create_digester,
)
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


Server = Hashable
"""Which of a store's servers, as its client calls it; None: the only one, or none is known."""


class RefusedError(TierUnavailableError):
    """The server refuses this client: a wrong password, a missing right. No retry helps."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a store has for a key.

    Attributes:
        data: Its bytes; none where it is too long to be a block, and was not read.
        version: What the store calls this version, where it does.
    """

    data: memoryview
    version: str | None = None

    def sha1(self) -> str:
        """Return the SHA-1 of the bytes: for stores that know versions by nothing else."""
        return hashlib.sha1(self.data, usedforsecurity=False).hexdigest()


class RemoteClient(ABC):
    """A client of one store. Errors of its library come out as they are, and `mapped` names them.

    Every call may be repeated, and may be cancelled: afterwards it touches no memory of the
    caller's, and its connection is not used again with an answer outstanding.

    Thread: loop.
    """

    place: ClassVar[str]
    """What kind of store it is, for messages."""
    answers_many: ClassVar[bool]
    """Whether one call answers for many keys; otherwise each costs a request."""
    renews_age: ClassVar[bool] = True
    """Whether `renew` keeps values from expiring."""

    @abstractmethod
    async def connect(self) -> None:
        """Find out whether the store can be used, and note what it holds; may be repeated."""

    @abstractmethod
    async def check(self) -> None:
        """Ask the server whether it is there: about no value."""

    @abstractmethod
    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have a value."""

    @abstractmethod
    async def get(
        self, keys: Sequence[OffloadKey], most_bytes: int
    ) -> Sequence[Value | TierError | None]:
        """Return the value of each key, why it could not be read, or None where there is none.

        Args:
            keys: Of which blocks.
            most_bytes: A longer value need not be read.
        """

    @abstractmethod
    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Bytes]
    ) -> Sequence[TierError | None]:
        """Store values where there are none yet; return for each why it could not be stored."""

    @abstractmethod
    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove a value if it still is this one, which has this SHA-1; return whether it was."""

    @abstractmethod
    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        """Have values that are there expire as late as if they had been written now."""

    @abstractmethod
    def mapped(self, error: Exception) -> TierError:
        """Return what an error of the library means; its text may still have secrets in it."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection; may be repeated."""

    def server_of(self, key: OffloadKey) -> Server:
        """Return which server has a key: one that is down costs the keys of the others nothing."""
        del key
        return None

    def by_server(self, keys: Iterable[OffloadKey]) -> dict[Server, list[int]]:
        """Return the indices of the keys that each server has; a call takes those of one."""
        servers: dict[Server, list[int]] = {}
        for i, key in enumerate(keys):
            servers.setdefault(self.server_of(key), []).append(i)
        return servers

    async def check_server(self, server: Server) -> None:
        """Ask one of several servers whether it is there."""
        del server
        await self.check()

    def portion_blocks(self, value_bytes: int) -> int:
        """Return how many values of this length one call takes at most."""
        del value_bytes
        return 1
