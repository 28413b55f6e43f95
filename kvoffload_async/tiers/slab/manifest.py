"""Manifest of a store and header of a segment.

The header detects a segment that was swapped, or belongs to another store, without reading its
blocks. Pure functions on bytes.
"""

from __future__ import annotations

import json
import re
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import xxhash

from kvoffload_async.tiers.files.features import (
    FEATURES_FIELD,
    VERSION_FIELD,
    Features,
    MalformedFormatError,
    check_format,
)
from kvoffload_async.tiers.files.sealing import SEAL_BYTES

PAGE_BYTES: Final = 4096
"""Alignment of slots and of O_DIRECT."""
HEADER_BYTES: Final = 4096
"""Size of a segment's header: one page, so that slots are page-aligned."""

_MAGIC: Final = b"KVSLABS1"
_HEADER = struct.Struct("<8s16sqQ")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Header of a segment file.

    Attributes:
        store_uuid: UUID of the store.
        number: Number of the segment.
        slot_bytes: Bytes of a slot.
    """

    store_uuid: str
    number: int
    slot_bytes: int

    def encode(self) -> bytes:
        """Encode the header."""
        fields = _HEADER.pack(
            _MAGIC, uuid.UUID(self.store_uuid).bytes, self.number, self.slot_bytes
        )
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
        return (fields + check).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Decode the header at the beginning of a segment; None if there is no valid one."""
        if len(content) < HEADER_BYTES:
            return None
        magic, store_uuid, number, slot_bytes = _HEADER.unpack_from(content)
        (check,) = _CHECK.unpack_from(content, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(content[: _HEADER.size]):
            return None
        return cls(str(uuid.UUID(bytes=store_uuid)), number, slot_bytes)


FORMAT = "kvoffload-slab"
VERSION = 3
"""The newest version of the store's format: that of stores with encrypted blocks."""

_PLAIN_VERSION: Final = 2
"""The version of other stores."""

ENCRYPTION: Final = "encryption"
"""Feature: blocks are encrypted; behind each is its seal, whose tag is its checksum."""

INTEGRITY_KEY: Final = "integrity-key"
"""Feature: block checksums are keyed; the manifest has the key's id."""

SEGMENT_HEADERS: Final = "segment-headers"
"""Feature: each segment begins with a header with the store's UUID and the segment number, and the
journal is bound to the UUID."""

KNOWN: Final = Features(incompatible=frozenset({ENCRYPTION, INTEGRITY_KEY, SEGMENT_HEADERS}))
"""The features that this release supports; see docs/formats.md."""

BASE_FEATURES: Final = Features(incompatible=frozenset({SEGMENT_HEADERS}))
"""The features of a store without an integrity key."""

KEYED_FEATURES: Final = Features(incompatible=frozenset({INTEGRITY_KEY, SEGMENT_HEADERS}))
"""The features of a store with an integrity key."""

ENCRYPTED_FEATURES: Final = Features(incompatible=frozenset({ENCRYPTION, SEGMENT_HEADERS}))
"""The features of a store with encrypted blocks."""

_LAYOUT: Final = re.compile(r"[0-9a-f]{12}:[0-9]{1,9}:[1-9][0-9]{0,14}")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY_ID: Final = re.compile(r"[0-9a-f]{16}")

_MAX_NUMBER = 1 << 53


class UnreadableManifestError(Exception):
    """The bytes are not a manifest, or are damaged."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Parameters of a store.

    Attributes:
        block_bytes: Bytes of a block.
        slot_bytes: Bytes of a slot.
        rank: Rank of the worker that owns the blocks.
        layout: Identifier of everything except the key that determines the meaning of a block's
            bytes; part of every checksum.
        fields: The run configuration behind `layout`, for people.
        features: Format features that a release must support.
        store_uuid: UUID of the store; empty before creation.
        key_id: Id of the integrity key for checksums; None: no key.
    """

    block_bytes: int
    slot_bytes: int
    rank: int
    layout: str
    fields: Mapping[str, Any]
    features: Features = BASE_FEATURES
    store_uuid: str = ""
    key_id: str | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether the blocks are encrypted."""
        return ENCRYPTION in self.features.incompatible

    @property
    def journal_seed(self) -> int:
        """Seed of the journal's frame checksums, which binds them to the store."""
        return xxhash.xxh3_64_intdigest(f"{self.layout}\0{self.store_uuid}".encode())

    def slots_in(self, segment_bytes: int) -> int:
        """Return the number of slots in a segment file of this size."""
        return max(0, segment_bytes - HEADER_BYTES) // self.slot_bytes

    def offset_of(self, slot: int) -> int:
        """Return the offset of a slot in its segment."""
        return HEADER_BYTES + slot * self.slot_bytes

    def of_new_store(self) -> Self:
        """Return this manifest with a new UUID, for a new store."""
        return replace(self, store_uuid=str(uuid.uuid4()))

    def encode(self) -> bytes:
        """Encode the manifest as the content of its file."""
        body = {
            "format": FORMAT,
            VERSION_FIELD: _version(self.features),
            "block_bytes": self.block_bytes,
            "slot_bytes": self.slot_bytes,
            "rank": self.rank,
            "layout": self.layout,
            "run_config": dict(self.fields),
            FEATURES_FIELD: self.features.encode(),
            "store_uuid": self.store_uuid,
        }
        if self.key_id is not None:
            body |= {"integrity_key_id": self.key_id}
        return (json.dumps(body | {"xxh3": _check(body)}, indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes, *, for_writing: bool = True) -> Manifest:
        """Decode a manifest file.

        Args:
            content: The file's content.
            for_writing: Whether the store will be changed, not only read.

        Raises:
            NewerFormatError: This release does not support the store, or not for writing.
            UnreadableManifestError: The content is not a manifest, or is damaged.
        """
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UnreadableManifestError(f"it is not JSON ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise UnreadableManifestError("it is not the manifest of a slab store")
        try:
            # First: the checksum of a newer release's manifest may be defined differently.
            features = check_format(body, VERSION, KNOWN, for_writing=for_writing)
        except MalformedFormatError as error:
            raise UnreadableManifestError(str(error)) from error
        if not _is_sound(body, body.pop("xxh3", None)):
            raise UnreadableManifestError("its checksum is wrong")
        if not _is_possible(body, features):
            raise UnreadableManifestError("a value is missing or out of range")
        return cls(
            body["block_bytes"],
            body["slot_bytes"],
            body["rank"],
            body["layout"],
            body["run_config"],
            features,
            body["store_uuid"],
            body.get("integrity_key_id"),
        )


def slot_bytes_of(block_bytes: int, *, is_encrypted: bool = False) -> int:
    """Return the size of a slot: the bytes of a block and its seal, rounded up to whole pages."""
    stored_bytes = block_bytes + SEAL_BYTES if is_encrypted else block_bytes
    return -(-stored_bytes // PAGE_BYTES) * PAGE_BYTES


def _version(features: Features) -> int:
    return VERSION if ENCRYPTION in features.incompatible else _PLAIN_VERSION


def _is_sound(body: Mapping[str, Any], checksum: object) -> bool:
    try:
        return checksum == _check(body)
    except RecursionError:
        return False


def _is_possible(body: Mapping[str, Any], features: Features) -> bool:
    numbers: list[Any] = [body.get(name) for name in ("block_bytes", "slot_bytes", "rank")]
    layout = body.get("layout")
    return (
        all(type(number) is int and number <= _MAX_NUMBER for number in numbers)
        and numbers[0] > 0
        and numbers[1]
        == slot_bytes_of(numbers[0], is_encrypted=ENCRYPTION in features.incompatible)
        and numbers[2] >= 0
        and body[VERSION_FIELD] == _version(features)
        and SEGMENT_HEADERS in features.incompatible
        and isinstance(layout, str)
        and _LAYOUT.fullmatch(layout) is not None
        and isinstance(body.get("run_config"), dict)
        and _matches(_UUID, body.get("store_uuid"), is_there=True)
        and _matches(
            _KEY_ID,
            body.get("integrity_key_id"),
            is_there=INTEGRITY_KEY in features.incompatible,
        )
    )


def _matches(pattern: re.Pattern[str], text: object, *, is_there: bool) -> bool:
    if not is_there:
        return text is None
    return isinstance(text, str) and pattern.fullmatch(text) is not None


def _check(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(canonical.encode())
