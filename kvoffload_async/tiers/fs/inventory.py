"""What is in a namespace: blocks, folders, temporary files. Thread: an I/O thread."""

from __future__ import annotations

import contextlib
import stat as stat_module
from collections.abc import Collection
from dataclasses import dataclass, field

from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.ops import FileOps, disk_bytes
from kvoffload_async.types import OffloadKey


@dataclass(slots=True)
class Inventory:
    """One walk over a namespace.

    Attributes:
        blocks: Key -> (time of last change in s, disk bytes).
        total_bytes: Disk bytes of everything, folders and strangers included.
        temps: Paths of temporary files.
        temp_bytes: Disk bytes of those.
        strangers: Paths of files that are no blocks.
    """

    blocks: dict[OffloadKey, tuple[float, int]] = field(default_factory=dict)
    total_bytes: int = 0
    temps: list[str] = field(default_factory=list)
    temp_bytes: int = 0
    strangers: list[str] = field(default_factory=list)

    @property
    def oldest_first(self) -> list[OffloadKey]:
        """The blocks, the one that was changed first at the front."""
        return sorted(self.blocks, key=lambda key: self.blocks[key][0])


def take_inventory(ops: FileOps, namespace: Namespace) -> Inventory:
    """Walk over a namespace; what vanishes meanwhile is left out."""
    found = Inventory()
    with contextlib.suppress(FileNotFoundError):
        found.total_bytes += disk_bytes(ops.stat(namespace.folder))
    for path, status in ops.walk(namespace.folder):
        found.total_bytes += disk_bytes(status)
        name = path.removeprefix(namespace.folder + "/")
        if stat_module.S_ISDIR(status.st_mode) or name.startswith("."):
            continue
        key = namespace.key_of(path)
        if key is not None:
            found.blocks[key] = (status.st_mtime, disk_bytes(status))
        elif path.endswith(TEMP_SUFFIX):
            found.temps.append(path)
            found.temp_bytes += disk_bytes(status)
        else:
            found.strangers.append(path)
    return found


def sweep_temps(ops: FileOps, temps: Collection[str], dead: Collection[str]) -> list[str]:
    """Remove the temporary files of dead writers; return them."""
    removed = []
    for path in temps:
        # <hash>.bin.<writer id>.<serial>.tmp
        parts = path.rpartition("/")[2].split(".")
        if len(parts) < 5 or parts[-3] not in dead:  # noqa: PLR2004 - the parts of the name
            continue
        with contextlib.suppress(FileNotFoundError):
            ops.unlink(path)
            removed.append(path)
    return removed
