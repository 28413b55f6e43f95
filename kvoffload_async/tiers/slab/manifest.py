"""The manifest, written once, says what a store is; the header of a segment, whose segment it is.

A segment that was swapped with another one, or comes from another store, is refused by its header,
and not only found out by the checksums of its blocks. Pure: bytes in, values out.
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

HEADER_BYTES: Final = 4096
"""A page, so that slots stay aligned to pages."""

_MAGIC: Final = b"KVSLABS1"
_HEADER = struct.Struct("<8s16sqQ")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself.

    Attributes:
        store_uuid: The store's.
        number: The segment's.
        slot_bytes: Bytes of a slot.
    """

    store_uuid: str
    number: int
    slot_bytes: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        fields = _HEADER.pack(
            _MAGIC, uuid.UUID(self.store_uuid).bytes, self.number, self.slot_bytes
        )
        check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
        return (fields + check).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Return the header that a segment begins with, or None if it begins with none."""
        if len(content) < HEADER_BYTES:
            return None
        magic, store_uuid, number, slot_bytes = _HEADER.unpack_from(content)
        (check,) = _CHECK.unpack_from(content, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(content[: _HEADER.size]):
            return None
        return cls(str(uuid.UUID(bytes=store_uuid)), number, slot_bytes)


FORMAT = "kvoffload-slab"
VERSION = 2
"""The version of the format."""

INTEGRITY_KEY: Final = "integrity-key"
"""Feature: checksums of blocks are made with a key, whose id is in the manifest."""

SEGMENT_HEADERS: Final = "segment-headers"
"""Feature: a segment begins with a header that names the store and the segment's number, and the
journal is bound to the store."""

KNOWN: Final = Features(incompatible=frozenset({INTEGRITY_KEY, SEGMENT_HEADERS}))
"""The features that this release knows; docs/formats.md says what each means."""

OF_EVERY_STORE: Final = Features(incompatible=frozenset({SEGMENT_HEADERS}))
"""The features that every store has."""

_LAYOUT: Final = re.compile(r"[0-9a-f]{12}:[0-9]{1,9}:[1-9][0-9]{0,14}")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY_ID: Final = re.compile(r"[0-9a-f]{16}")

_MAX_NUMBER = 1 << 53


class UnreadableManifestError(Exception):
    """The bytes are no manifest, or no longer what was written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store is.

    Attributes:
        block_bytes: Bytes of a block.
        slot_bytes: Bytes of a slot.
        rank: Which worker's blocks these are.
        layout: Names everything but its key that decides what a block's bytes mean; bound into
            every checksum.
        fields: The run configuration that `layout` is made from, for people.
        features: What a release must know of the format.
        store_uuid: Tells this store from every other; empty for one that is not made yet.
        key_id: Which integrity key its checksums are made with; None: none.
    """

    block_bytes: int
    slot_bytes: int
    rank: int
    layout: str
    fields: Mapping[str, Any]
    features: Features = OF_EVERY_STORE
    store_uuid: str = ""
    key_id: str | None = None

    @property
    def journal_seed(self) -> int:
        """What binds the frames of the journal to the store."""
        return xxhash.xxh3_64_intdigest(f"{self.layout}\0{self.store_uuid}".encode())

    def slots_in(self, segment_bytes: int) -> int:
        """Return how many slots a segment of so many bytes has."""
        return max(0, segment_bytes - HEADER_BYTES) // self.slot_bytes

    def offset_of(self, slot: int) -> int:
        """Return where in its segment a slot begins."""
        return HEADER_BYTES + slot * self.slot_bytes

    def of_new_store(self) -> Self:
        """Return the manifest of a new store like this: with a UUID of its own."""
        return replace(self, store_uuid=str(uuid.uuid4()))

    def with_key(self, key_id: str | None) -> Self:
        """Return the same with an integrity key, or without one."""
        incompatible = self.features.incompatible - {INTEGRITY_KEY}
        if key_id is not None:
            incompatible |= {INTEGRITY_KEY}
        return replace(
            self, features=replace(self.features, incompatible=incompatible), key_id=key_id
        )

    def encode(self) -> bytes:
        """Return the file's content."""
        body = {
            "format": FORMAT,
            VERSION_FIELD: VERSION,
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
        """Return the manifest that a file's content is.

        Args:
            content: The file's.
            for_writing: Whether the store may be changed, and not only be read.

        Raises:
            NewerFormatError: The store is not for this release, at least not for this purpose.
            UnreadableManifestError: It is none, or is damaged.
        """
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UnreadableManifestError(f"it is no JSON ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise UnreadableManifestError("it is no manifest of a slab store")
        try:
            # First: of a newer release's manifest nobody here knows how its checksum is made.
            version, features = check_format(body, VERSION, KNOWN, for_writing=for_writing)
        except MalformedFormatError as error:
            raise UnreadableManifestError(str(error)) from error
        if not _is_sound(body, body.pop("xxh3", None)):
            raise UnreadableManifestError("its checksum is wrong")
        if version < VERSION or SEGMENT_HEADERS not in features.incompatible:
            raise UnreadableManifestError("its format is from before the first release")
        if not _is_possible(body, features):
            raise UnreadableManifestError("a value in it is missing or impossible")
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
        and 0 < numbers[0] <= numbers[1]
        and numbers[2] >= 0
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
