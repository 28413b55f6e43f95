"""Paths of blocks: the folder of their run configuration, and the path below it.

    <root>/<model>_<12 hex digits of the run configuration's digest>/config.json
    <same>_r<rank>/<hash[0:2]>/<hash>_g<group>.bin

The digest is over the configuration and the version of this layout, as JSON with sorted keys and no
blanks; everything that changes the layout of a block's bytes must be part of it.

A directory that is shared with vLLM's `fs` tier has its layout, and a digest over the configuration
alone:

    <same>_r<rank>/<hash[0:3]>/<hash[3:5]>_g<group>/<hash>.bin

Source: file_mapper.py of vLLM 0.33.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat as stat_module
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvoffload_async.tiers.files.ops import disk_bytes, safe_name
from kvoffload_async.types import OffloadKey, make_offload_key

_DIGEST_DIGITS = 12
BLOCK_SUFFIX = ".bin"
TEMP_SUFFIX = ".tmp"

REST: Final = 256
"""Bucket of everything outside block folders; block folders have the buckets 0 to 255."""

VERSION: Final = 2
"""Version of the layout, part of the digest; directories in vLLM's layout have none."""

FOLDERS: Final = tuple(f"{number:02x}" for number in range(REST))
"""Names of the folders of blocks."""

_FOLDER_BYTES: Final = 4096

_TOP_FOLDER: Final = re.compile(r"[0-9a-f]{2,3}")
_VLLMS_FOLDER: Final = re.compile(r"[0-9a-f]{2,3}(/[0-9a-f]{0,2}_g[0-9]+)?")


class Namespace:
    """The folder with the blocks of one run configuration and rank.

    Attributes:
        digest: Identifies the layout of the blocks' bytes.
        base_path: Path that the folders of all ranks begin with.
        config_path: Path of the run configuration's file, for information only.
        folder: Folder of the blocks.
        rank: Rank of the blocks.
        fields: The run configuration.
        is_vllms: Whether the layout is that of vLLM's tier.
    """

    def __init__(
        self, root_dir: str, fields: Mapping[str, Any], rank: int = 0, *, is_vllms: bool = False
    ) -> None:
        self.fields = dict(fields)
        self.rank = rank
        self.is_vllms = is_vllms
        named = self.fields if is_vllms else {**self.fields, "fs_layout": VERSION}
        canonical = json.dumps(named, sort_keys=True, separators=(",", ":"))
        self.digest = hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_DIGITS]
        self.base_path = f"{root_dir}/{safe_name(str(self.fields['model_name']))}_{self.digest}"
        self.config_path = f"{self.base_path}/config.json"
        self.folder = f"{self.base_path}_r{rank}"

    def get_file_name(self, key: OffloadKey) -> str:
        """Return the path of the file of a block, given its key."""
        return self.names_of([key], 0)[0]

    def names_of(self, keys: Iterable[OffloadKey | None], start: int) -> list[str]:
        """Return the paths of blocks without the first `start` characters of the folder's path.

        None has an empty path.
        """
        folder = self.folder[start:]
        names = []
        for key in keys:
            if key is None:
                names.append("")
                continue
            text = key.hex()  # of the hash, and of the group in eight digits
            digits, group = text[:-8], int(text[-8:], 16)
            if self.is_vllms:
                names.append(f"{folder}/{digits[:3]}/{digits[3:5]}_g{group}/{digits}{BLOCK_SUFFIX}")
            else:
                names.append(f"{folder}/{digits[:2]}/{digits}_g{group}{BLOCK_SUFFIX}")
        return names

    def key_of(self, path: str) -> OffloadKey | None:
        """Return the key of the block stored at a path, or None if it is not a block's path."""
        folder, _, name = path.rpartition("/")
        digits, _, group = name.removesuffix(BLOCK_SUFFIX).partition("_g")
        if self.is_vllms:
            group = folder.rpartition("_g")[2]
        try:
            key = make_offload_key(bytes.fromhex(digits), int(group))
        except (ValueError, OverflowError):
            return None
        return key if self.get_file_name(key) == path else None

    def is_block_folder(self, path: str) -> bool:
        """Return whether a path is that of a folder of blocks."""
        name = path[len(self.folder) + 1 :]
        return bool(_VLLMS_FOLDER.fullmatch(name)) if self.is_vllms else name in FOLDERS

    def layout_of(self, block_bytes: int) -> str:
        """Return the identifier of the layout of blocks with `block_bytes` bytes."""
        return f"{self.digest}:{self.rank}:{block_bytes}"


def bucket_of(key: OffloadKey) -> int:
    """Return a block's bucket: the first byte of its hash."""
    return key[0]


def counted_bytes(status: os.stat_result) -> int:
    """Return the bytes to count: the disk bytes of a file, or the growth of a folder.

    Folders as they are made, of up to 4 KiB each, are not counted.
    """
    is_folder = stat_module.S_ISDIR(status.st_mode)
    return max(0, disk_bytes(status) - (_FOLDER_BYTES if is_folder else 0))


def has_vllms_layout(names: Iterable[str]) -> bool:
    """Return whether the names of a namespace's entries are those of vLLM's layout."""
    folders = list(filter(_TOP_FOLDER.fullmatch, names))
    return bool(folders) and not set(FOLDERS).intersection(folders)


def top_folder_bucket(name: str) -> int | None:
    """Return the bucket of a top folder by its name; None if it is not a block folder."""
    return int(name[:2], 16) if _TOP_FOLDER.fullmatch(name) else None
