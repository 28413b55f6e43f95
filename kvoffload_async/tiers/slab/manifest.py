"""The manifest: what a store is, written once. Pure: bytes in, values out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

FORMAT = "kvoffload-slab"
VERSION = 1

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
        version: Of the format.
    """

    block_bytes: int
    slot_bytes: int
    rank: int
    layout: str
    fields: Mapping[str, Any]
    version: int = VERSION

    def encode(self) -> bytes:
        """Return the file's content."""
        body = {
            "format": FORMAT,
            "version": self.version,
            "block_bytes": self.block_bytes,
            "slot_bytes": self.slot_bytes,
            "rank": self.rank,
            "layout": self.layout,
            "run_config": dict(self.fields),
        }
        return (json.dumps(body | {"xxh3": _check(body)}, indent=2, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Return the manifest that a file's content is.

        Raises:
            UnreadableManifestError: It is none, is damaged, or of another version.
        """
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UnreadableManifestError(f"it is no JSON ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise UnreadableManifestError("it is no manifest of a slab store")
        if not _is_sound(body, body.pop("xxh3", None)):
            raise UnreadableManifestError("its checksum is wrong")
        if body.get("version") != VERSION:
            raise UnreadableManifestError(
                f"it has version {body.get('version')!r}, and this release reads {VERSION}"
            )
        return _manifest_of(body)


def _is_sound(body: Mapping[str, Any], checksum: object) -> bool:
    try:
        return checksum == _check(body)
    except RecursionError:
        return False


def _manifest_of(body: Mapping[str, Any]) -> Manifest:
    """Return the manifest that fields are, whoever has computed their checksum."""
    numbers: list[Any] = [body.get(key) for key in ("block_bytes", "slot_bytes", "rank")]
    layout: Any = body.get("layout")
    fields: Any = body.get("run_config")
    if all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers):
        block_bytes, slot_bytes, rank = numbers
        is_possible = 0 < block_bytes <= slot_bytes and isinstance(fields, dict)
        if is_possible and isinstance(layout, str) and layout.endswith(f":{rank}:{block_bytes}"):
            return Manifest(block_bytes, slot_bytes, rank, layout, fields)
    raise UnreadableManifestError("its fields are missing, or contradict each other")


def _check(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(canonical.encode())
