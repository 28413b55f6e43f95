"""Where a store lies, what its files are called, and what its blocks mean."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from kvoffload_async.tiers.files.naming import safe_name
from kvoffload_async.tiers.slab.budget import slot_bytes_of
from kvoffload_async.tiers.slab.manifest import Manifest

MANIFEST = "manifest.json"
LOCK = "lock"
JOURNAL = "journal"
NEXT_JOURNAL = "journal.new"
BAD_JOURNAL = "journal.bad"
SESSION = "session"
TEMP_SUFFIX = ".tmp"

_DIGEST_DIGITS = 12
_SEGMENT = re.compile(r"segment-(\d{6,10})\.slab")


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{number:06}.slab"


def segment_number(name: str) -> int | None:
    """Return the segment whose file has this name, or None."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match and segment_name(int(match[1])) == name else None


class StoreLayout:
    """The folders that a run configuration and rank may have, and its identity.

    Attributes:
        folder: Where its store is.
        own_folder: Where it is if another layout has `folder`.
        manifest: What the store must be.
    """

    def __init__(
        self,
        root_dir: str,
        fields: Mapping[str, Any],
        rank: int,
        block_bytes: int,
        key_id: str | None = None,
    ) -> None:
        """Describe a store; `key_id` is that of the integrity key, where there is one."""
        canonical = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_DIGITS]
        name = safe_name(str(fields["model_name"]))
        if "namespace" in fields:
            name += (
                f"_{hashlib.sha256(str(fields['namespace']).encode()).hexdigest()[:_DIGEST_DIGITS]}"
            )
        self.folder = f"{root_dir}/{name}_r{rank}"
        self.own_folder = f"{self.folder}_{digest}_{block_bytes}"
        if key_id is not None:
            self.own_folder += f"_k{key_id}"
        self.manifest = Manifest(
            block_bytes=block_bytes,
            slot_bytes=slot_bytes_of(block_bytes),
            rank=rank,
            layout=f"{digest}:{rank}:{block_bytes}",
            fields=dict(fields),
        ).with_key(key_id)

    def may_replace(self, found: Manifest) -> bool:
        """Tell whether a store is of the same model and namespace, and not only of their name."""
        return found.rank == self.manifest.rank and all(
            found.fields.get(key) == self.manifest.fields.get(key)
            for key in ("model_name", "namespace")
        )

    def difference(self, found: Manifest) -> str:
        """Return in what a store differs from this layout, or an empty text if in nothing."""
        if found.layout == self.manifest.layout:
            return "" if found.key_id == self.manifest.key_id else _key_difference(found)
        if found.block_bytes != self.manifest.block_bytes:
            return f"blocks of {found.block_bytes} bytes instead of {self.manifest.block_bytes}"
        if found.rank != self.manifest.rank:
            return f"rank {found.rank} instead of {self.manifest.rank}"
        wanted = self.manifest.fields
        keys = sorted(
            key
            for key in wanted.keys() | found.fields.keys()
            if wanted.get(key) != found.fields.get(key)
        )
        return "another " + ", ".join(keys)


def _key_difference(found: Manifest) -> str:
    if found.key_id is None:
        return "checksums without an integrity key"
    return f"checksums by the integrity key with the id {found.key_id}"
