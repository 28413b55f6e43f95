"""Discovery of the namespaces in a directory, and their manifests."""

from __future__ import annotations

import json
import os
import re
import stat as stat_module
from collections.abc import Mapping
from typing import Any, Final

from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.layout import Namespace

_FOLDER: Final = re.compile(
    r"(?P<base>.+_(?P<digest>[0-9a-f]{12}))_r(?P<rank>[0-9]{1,9})", re.DOTALL
)
_OWN_ENGINE: Final = "kvoffload_async"
_MAX_MANIFEST_BYTES: Final = 1 << 20
_MAX_DEPTH = 64


class FoundNamespace(Namespace):
    """A namespace found on disk, identified by its folder and not by its manifest.

    Attributes:
        name: Name of the folder.
        has_manifest: Whether its `config.json` is a JSON object, then available as `fields`.
    """

    def __init__(
        self, root_dir: str, match: re.Match[str], fields: Mapping[str, Any] | None
    ) -> None:
        self.name = match[0]
        self.has_manifest = fields is not None
        self.fields = dict(fields or {})
        self.rank = int(match["rank"])
        self.digest = match["digest"]
        self.config_path = _manifest_path(root_dir, match)
        self.folder = f"{root_dir}/{self.name}"

    @property
    def block_bytes(self) -> int | None:
        """Length of each block, if the manifest is this package's and contains it."""
        length = self.fields.get("block_bytes")
        is_own = self.fields.get("inference_engine") == _OWN_ENGINE
        return length if is_own and type(length) is int and length > 0 else None


def find_namespaces(ops: FileOps, directory: str) -> list[FoundNamespace]:
    """Return the namespaces below an absolute directory, ordered by name.

    Raises:
        InputError: The directory cannot be read.

    May be called from any thread. Blocks on file I/O.
    """
    try:
        ops.enter(directory, make=False)
        found = [
            path.rpartition("/")[2]
            for path, status in ops.entries(directory)
            if stat_module.S_ISDIR(status.st_mode)
        ]
    except OSError as error:
        raise InputError(f"{directory}: cannot be read: {error.strerror or error}") from error
    matches = [match for name in sorted(found) if (match := _FOLDER.fullmatch(name))]
    return [
        FoundNamespace(directory, match, read_manifest(ops, _manifest_path(directory, match)))
        for match in matches
    ]


def read_manifest(ops: FileOps, path: str) -> Mapping[str, Any] | None:
    """Return a run configuration, or None if it is missing or unreadable."""
    try:
        fd = ops.open(path, os.O_RDONLY)
        try:
            buffer = bytearray(_MAX_MANIFEST_BYTES)
            count = ops.pread_into(fd, memoryview(buffer), 0)
        finally:
            ops.close(fd)
        fields = json.loads(bytes(buffer[:count]))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and _is_shallow(fields) else None


def _is_shallow(fields: Mapping[str, Any]) -> bool:
    """Return whether values can be compared and printed without deep recursion."""
    level: list[Any] = [fields]
    for _ in range(_MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return True
    return False


def _manifest_path(root_dir: str, match: re.Match[str]) -> str:
    return f"{root_dir}/{match['base']}/config.json"
