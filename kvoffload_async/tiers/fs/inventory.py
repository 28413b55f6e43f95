"""What is in a namespace: blocks, folders, temporary files. Thread: an I/O thread."""

from __future__ import annotations

import contextlib
import stat as stat_module
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.layout import BLOCK_FOLDER, TEMP_SUFFIX, Namespace
from kvoffload_async.types import OffloadKey

_TEMP_PARTS = 5


@dataclass(slots=True)
class Inventory:
    """One walk over a namespace.

    Attributes:
        blocks: Key -> (time of last change in s, disk bytes).
        total_bytes: Disk bytes of everything, folders and unknown files included.
        temps: Paths of temporary files -> disk bytes.
        unknown_files: Paths of files that are no blocks.
        folders: Paths of the folders for blocks -> disk bytes, each before those inside it.
        num_entries: Path of a folder -> what is in it.
    """

    blocks: dict[OffloadKey, tuple[float, int]] = field(default_factory=dict)
    total_bytes: int = 0
    temps: dict[str, int] = field(default_factory=dict)
    unknown_files: list[str] = field(default_factory=list)
    folders: dict[str, int] = field(default_factory=dict)
    num_entries: Counter[str] = field(default_factory=Counter)

    @property
    def oldest_first(self) -> list[OffloadKey]:
        """The blocks, the one that was changed first at the front."""
        return sorted(self.blocks, key=lambda key: self.blocks[key][0])

    def settled_bytes(self, living: Collection[str]) -> int:
        """Return the total without what living writers are writing: they have set that aside."""
        in_flight = sum(size for path, size in self.temps.items() if writer_of(path) in living)
        return self.total_bytes - in_flight


def take_inventory(ops: FileOps, namespace: Namespace) -> Inventory:
    """Walk over a namespace; what vanishes meanwhile is left out."""
    found = Inventory()
    with contextlib.suppress(FileNotFoundError):
        found.total_bytes += disk_bytes(ops.stat(namespace.folder))
    for path, status in ops.walk(namespace.folder):
        found.total_bytes += disk_bytes(status)
        name = path.removeprefix(namespace.folder + "/")
        found.num_entries[path.rpartition("/")[0]] += 1
        if name.startswith("."):
            continue
        if stat_module.S_ISDIR(status.st_mode):
            if BLOCK_FOLDER.fullmatch(name):
                found.folders[path] = disk_bytes(status)
            continue
        key = namespace.key_of(path)
        if not stat_module.S_ISREG(status.st_mode):
            found.unknown_files.append(path)
        elif key is not None:
            found.blocks[key] = (status.st_mtime, disk_bytes(status))
        elif path.endswith(TEMP_SUFFIX):
            found.temps[path] = disk_bytes(status)
        else:
            found.unknown_files.append(path)
    return found


def writer_of(temp: str) -> str | None:
    """Return whose temporary file a path names: `<hash>.bin.<writer id>.<serial>.tmp`."""
    parts = temp.rpartition("/")[2].split(".")
    return parts[-3] if len(parts) >= _TEMP_PARTS else None


def sweep_temps(ops: FileOps, temps: Collection[str], dead: Collection[str]) -> list[str]:
    """Remove the temporary files of dead writers; return them."""
    removed = []
    for path in temps:
        if writer_of(path) in dead:
            with contextlib.suppress(FileNotFoundError):
                ops.unlink(path)
                removed.append(path)
    return removed


def sweep_folders(ops: FileOps, inventory: Inventory, gone: Collection[str]) -> None:
    """Remove empty folders, which crashes leave, and take them off the inventory's total.

    Args:
        ops: The system calls.
        inventory: What was found.
        gone: Paths of files that were removed since.
    """
    for path in gone:
        inventory.num_entries[path.rpartition("/")[0]] -= 1
    for folder in reversed(list(inventory.folders)):
        if not inventory.num_entries[folder]:
            try:
                ops.rmdir(folder)
            except FileNotFoundError:
                pass  # another process has swept it
            except OSError:
                continue  # it is in use again
            inventory.total_bytes -= inventory.folders.pop(folder)
            inventory.num_entries[folder.rpartition("/")[0]] -= 1
