"""Contents of a part of a namespace: blocks, folders, temporary files. Run on I/O threads."""

from __future__ import annotations

import logging
import os
import stat as stat_module
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_TEMP_PARTS = 5


class StoppedError(Exception):
    """A walk was stopped by its caller."""


def _never() -> bool:
    return False


@dataclass(slots=True)
class Inventory:
    """Result of a walk.

    Attributes:
        blocks: Key -> modification time in s.
        total_bytes: Disk bytes of everything, folders and unknown files included.
        temps: Paths of temporary files -> disk bytes.
        unknown_files: Paths of files that are not blocks.
        folders: Paths of block folders -> disk bytes, parents before children.
        num_entries: Path of a folder -> number of its entries.
    """

    blocks: dict[OffloadKey, float] = field(default_factory=dict)
    total_bytes: int = 0
    temps: dict[str, int] = field(default_factory=dict)
    unknown_files: list[str] = field(default_factory=list)
    folders: dict[str, int] = field(default_factory=dict)
    num_entries: Counter[str] = field(default_factory=Counter)

    def settled_bytes(self, living: Collection[str]) -> int:
        """Return the total without temporary files of living writers, which are reserved bytes."""
        in_flight = sum(size for path, size in self.temps.items() if writer_of(path) in living)
        return self.total_bytes - in_flight


def take_inventory(
    ops: FileOps,
    namespace: Namespace,
    roots: Iterable[str],
    should_stop: Callable[[], bool] = _never,
) -> Inventory:
    """Walk over folders and files of a namespace; entries removed meanwhile are skipped.

    Args:
        ops: The system calls.
        namespace: The namespace.
        roots: Paths of entries of the namespace's folder.
        should_stop: Called before each root.

    Raises:
        StoppedError: `should_stop` returned true.
        OSError: A folder or file cannot be read.
    """
    found = Inventory()
    for root in roots:
        if should_stop():
            raise StoppedError
        try:
            status = ops.stat(root)
        except FileNotFoundError:
            continue
        _take_in(found, namespace, root, status)
        if stat_module.S_ISDIR(status.st_mode):
            for path, status in ops.walk(root):
                _take_in(found, namespace, path, status)
    return found


def _take_in(found: Inventory, namespace: Namespace, path: str, status: os.stat_result) -> None:
    size_bytes = disk_bytes(status)
    found.total_bytes += size_bytes
    found.num_entries[path.rpartition("/")[0]] += 1
    if path[len(namespace.folder) + 1] == ".":
        return
    if stat_module.S_ISDIR(status.st_mode):
        if namespace.is_block_folder(path):
            found.folders[path] = size_bytes
        return
    key = namespace.key_of(path)
    if not stat_module.S_ISREG(status.st_mode):
        found.unknown_files.append(path)
    elif key is not None:
        found.blocks[key] = status.st_mtime
    elif path.endswith(TEMP_SUFFIX):
        found.temps[path] = size_bytes
    else:
        found.unknown_files.append(path)


def writer_of(temp: str) -> str | None:
    """Return the writer id in a temporary file's path: `<hash>.bin.<writer id>.<serial>.tmp`."""
    parts = temp.rpartition("/")[2].split(".")
    return parts[-3] if len(parts) >= _TEMP_PARTS else None


def sweep_temps(ops: FileOps, inventory: Inventory, dead: Collection[str]) -> bool:
    """Remove the temporary files of dead writers from disk and from the inventory.

    Returns:
        Whether all of them were removed.
    """
    is_swept = True
    for path in [path for path in inventory.temps if writer_of(path) in dead]:
        try:
            ops.unlink(path)
        except FileNotFoundError:
            pass  # another process has swept it
        except OSError as error:
            is_swept = False
            logger.warning("a dead writer's file was not removed: %s", str(error))
            continue
        inventory.total_bytes -= inventory.temps.pop(path)
        inventory.num_entries[path.rpartition("/")[0]] -= 1
    return is_swept


def sweep_folders(ops: FileOps, inventory: Inventory) -> int:
    """Remove empty folders, left by crashes, from disk and from the inventory.

    Returns:
        Disk bytes of the removed folders.
    """
    swept_bytes = 0
    for folder in reversed(list(inventory.folders)):
        if not inventory.num_entries[folder]:
            try:
                ops.rmdir(folder)
            except FileNotFoundError:
                pass  # another process has swept it
            except OSError:
                continue  # it is in use again
            swept_bytes += inventory.folders.pop(folder)
            inventory.num_entries[folder.rpartition("/")[0]] -= 1
    inventory.total_bytes -= swept_bytes
    return swept_bytes
