"""The leaf folders of a namespace: made once and remembered, removed when they are empty.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import threading

from kvoffload_async.tiers.fs.ops import FileOps, disk_bytes
from kvoffload_async.tiers.fs.outcome import DiskChange


class LeafFolders:
    """The folders in which blocks lie, each with a parent that holds nothing else."""

    def __init__(self, ops: FileOps) -> None:
        self._ops = ops
        self._mutex = threading.Lock()
        self._sizes: dict[str, int] = {}
        """Folders that are remembered -> disk bytes, as counted."""
        self._new_bytes = 0

    def ensure(self, leaf: str, change: DiskChange) -> None:
        """Make a leaf folder and its parent, unless remembered.

        Others may remove it again while it is empty: who puts something there must be ready for
        that, and call `make_again`.
        """
        if leaf in self._sizes:
            return
        with contextlib.suppress(FileNotFoundError):  # the parent is removed at this very moment
            for folder in (_parent_of(leaf), leaf):
                if folder not in self._sizes:
                    self._make(folder, change)

    def make_again(self, leaf: str, change: DiskChange) -> None:
        """Make a remembered folder that somebody removed, because it was empty or for good."""
        parent = _parent_of(leaf)
        self._forget(leaf)
        self._forget(parent)
        self._ops.make_folders(_parent_of(parent))
        self.ensure(leaf, change)

    def note_growth(self, folder: str, change: DiskChange) -> None:
        """Count by how much a folder has grown: none of its entries pays for that.

        Where another process has filled it, that counts the same, until the next walk.
        """
        with contextlib.suppress(OSError):  # gone, or not to be asked: the next walk counts it
            size_bytes = disk_bytes(self._ops.stat(folder))
            with self._mutex:
                change.added_bytes += max(0, size_bytes - self._sizes.get(folder, size_bytes))
                self._sizes[folder] = size_bytes

    def remove_empty(self, leaf: str, change: DiskChange) -> None:
        """Delete a leaf folder if it is empty, and then its parent if that is."""
        for folder in (leaf, _parent_of(leaf)):
            try:
                freed_bytes = disk_bytes(self._ops.stat(folder))
                self._ops.rmdir(folder)
            except OSError:
                return  # not empty, or gone already
            self._forget(folder)
            change.removed_bytes += freed_bytes

    def _make(self, folder: str, change: DiskChange) -> None:
        above = _parent_of(folder)
        if above not in self._sizes:
            self.note_growth(above, DiskChange())
        try:
            self._ops.mkdir(folder)
        except FileExistsError:
            self.note_growth(folder, DiskChange())
            return
        size_bytes = self._new_bytes
        with contextlib.suppress(FileNotFoundError):  # it was removed, and taken off the count
            size_bytes = self._new_bytes = disk_bytes(self._ops.stat(folder))
        change.added_bytes += size_bytes
        with self._mutex:
            self._sizes[folder] = size_bytes
        self.note_growth(above, change)

    def _forget(self, folder: str) -> None:
        with self._mutex:
            self._sizes.pop(folder, None)


def _parent_of(folder: str) -> str:
    return folder.rpartition("/")[0]
