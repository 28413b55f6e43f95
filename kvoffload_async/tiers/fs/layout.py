"""Paths of blocks: the folder of their run configuration, and the path below it.

    <root>/<model>_<12 hex digits of the run configuration's digest>/config.json
    <same>_r<rank>/<hash[0:3]>/<hash[3:5]>_g<group>/<hash>.bin

Source: the layout of vLLM's `fs` tier (file_mapper.py, 0.33), so that the two can share a folder.
The digest is over the configuration as JSON with sorted keys and no blanks; everything that
changes the layout of a block's bytes must be part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvoffload_async.tiers.files.ops import safe_name
from kvoffload_async.types import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

_DIGEST_DIGITS = 12
BLOCK_SUFFIX = ".bin"
TEMP_SUFFIX = ".tmp"

REST: Final = 256
"""Bucket of everything outside block folders; block folders have the buckets 0 to 255."""

_TOP_FOLDER: Final = re.compile(r"[0-9a-f]{2,3}")
_BLOCK_FOLDER: Final = re.compile(r"[0-9a-f]{2,3}(/[0-9a-f]{0,2}_g[0-9]+)?")


class Namespace:
    """The folder of one run configuration and rank.

    Attributes:
        digest: Identifies the layout of the blocks' bytes.
        config_path: Path of the run configuration's file, for information only.
        folder: Folder of the blocks.
        rank: Rank of the blocks.
        fields: The run configuration.
    """

    def __init__(self, root_dir: str, fields: Mapping[str, Any], rank: int = 0) -> None:
        self.fields = dict(fields)
        self.rank = rank
        canonical = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        self.digest = hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_DIGITS]
        base = f"{root_dir}/{safe_name(str(self.fields['model_name']))}_{self.digest}"
        self.config_path = f"{base}/config.json"
        self.folder = f"{base}_r{rank}"

    def get_file_name(self, key: OffloadKey) -> str:
        """Return the path of a key's block."""
        digits = get_offload_block_hash(key).hex()
        leaf = f"{self.folder}/{digits[:3]}/{digits[3:5]}_g{get_offload_group_idx(key)}"
        return f"{leaf}/{digits}{BLOCK_SUFFIX}"

    def names_of(self, keys: Iterable[OffloadKey], start: int) -> list[str]:
        """Return the paths of blocks without the first `start` characters of the folder's path."""
        folder = self.folder[start:]
        names = []
        for key in keys:
            digits, group = get_offload_block_hash(key).hex(), get_offload_group_idx(key)
            names.append(f"{folder}/{digits[:3]}/{digits[3:5]}_g{group}/{digits}{BLOCK_SUFFIX}")
        return names

    def leaf_of(self, key: OffloadKey) -> str:
        """Return the leaf folder of a key's block."""
        digits = get_offload_block_hash(key).hex()
        return f"{self.folder}/{digits[:3]}/{digits[3:5]}_g{get_offload_group_idx(key)}"

    def key_of(self, path: str) -> OffloadKey | None:
        """Return the key of a block's path, or None if the path is not a block's."""
        leaf, _, name = path.rpartition("/")
        _, _, group = leaf.rpartition("_g")
        try:
            key = make_offload_key(bytes.fromhex(name.removesuffix(BLOCK_SUFFIX)), int(group))
        except (ValueError, OverflowError):
            return None
        return key if self.get_file_name(key) == path else None

    def bucket_of_folder(self, path: str) -> int:
        """Return the bucket of the namespace's folder or of a block folder."""
        digits = path[len(self.folder) + 1 :][:2]
        return int(digits, 16) if digits else REST

    def is_block_folder(self, path: str) -> bool:
        """Return whether a path is that of a block folder."""
        return _BLOCK_FOLDER.fullmatch(path, len(self.folder) + 1) is not None

    def layout_of(self, block_bytes: int) -> str:
        """Return the name of the layout of a block's bytes."""
        return f"{self.digest}:{self.rank}:{block_bytes}"


def bucket_of(key: OffloadKey) -> int:
    """Return a block's bucket: the first byte of its hash."""
    return key[0]


def top_folder_bucket(name: str) -> int | None:
    """Return the bucket of a top folder by its name; None if it is not a block folder."""
    return int(name[:2], 16) if _TOP_FOLDER.fullmatch(name) else None
