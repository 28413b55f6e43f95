"""The leaf folders of a namespace: made once and remembered, removed when they are empty.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes, sync_folder
from kvoffload_async.tiers.fs.outcome import DiskChange

_UNMEASURED = contextlib.nullcontext()


class LeafFolders:
    """The folders in which blocks lie, each with a parent that holds nothing else."""

    def __init__(
        self, ops: FileOps, bucket_of: Callable[[str], int], *, counts_bytes: bool = True
    ) -> None:
        """Know of none.

        Args:
            ops: The system calls.
            bucket_of: Returns the part of the namespace that a folder's path belongs to.
            counts_bytes: Without it nobody asks by how much they grow.
        """
        self._ops = ops
        self._bucket_of = bucket_of
        self._counts_bytes = counts_bytes
        self._mutex = threading.Lock()
        self._made: set[str] = set()
        self._synced: set[str] = set()
        self._new_bytes = 0
        self._grown: dict[str, int] = {}
        """Folders that have grown here -> disk bytes up to which that is counted."""

    def ensure(self, leaf: str, change: DiskChange) -> None:
        """Make a leaf folder and its parent, unless remembered.

        Others may remove it again while it is empty: who puts something there must be ready for
        that, and call `make_again`.
        """
        if leaf in self._made:
            return
        with contextlib.suppress(FileNotFoundError):  # the parent is removed at this very moment
            for folder in (_parent_of(leaf), leaf):
                if folder not in self._made:
                    self._make(folder, change)

    def make_again(self, leaf: str, change: DiskChange) -> None:
        """Make a remembered folder that somebody removed, because it was empty or for good."""
        parent = _parent_of(leaf)
        self._forget(leaf)
        self._forget(parent)
        self._ops.make_folders(_parent_of(parent))
        self.ensure(leaf, change)

    def forget_all(self) -> None:
        """Know of none again: somebody has removed them all."""
        with self._mutex:
            self._made.clear()
            self._grown.clear()
            self._synced.clear()

    def sync(self, leaf: str) -> None:
        """Wait until the names in a leaf folder are on the device, and that of the folder itself.

        The latter once, so not if another process removes the folder and makes it again meanwhile.

        Raises:
            OSError: They may not be, now or ever.
        """
        sync_folder(self._ops, leaf)
        if leaf not in self._synced:
            parent = _parent_of(leaf)
            sync_folder(self._ops, parent)
            sync_folder(self._ops, _parent_of(parent))
            self._synced.add(leaf)

    def growing(self, folder: str, change: DiskChange) -> contextlib.AbstractContextManager[None]:
        """Count by how much a folder grows meanwhile: none of its entries pays for that.

        What another thread has counted is left out; of another process that cannot be known,
        and the next walk corrects it.
        """
        return self._measured(folder, change) if self._counts_bytes else _UNMEASURED

    @contextlib.contextmanager
    def _measured(self, folder: str, change: DiskChange) -> Iterator[None]:
        before_bytes = self.size_of(folder)
        try:
            yield
        finally:
            self.count_growth(folder, before_bytes, change)

    def count_growth(self, folder: str, before_bytes: int, change: DiskChange) -> None:
        """Count by how much a folder has grown since it had that size; see `growing`."""
        after_bytes = self.size_of(folder)
        with self._mutex:
            counted_bytes = max(before_bytes, self._grown.get(folder, 0))
            if before_bytes and after_bytes > counted_bytes:
                change.add(self._bucket_of(folder), after_bytes - counted_bytes)
                self._grown[folder] = after_bytes

    def remove_empty(self, leaf: str, change: DiskChange) -> None:
        """Delete a leaf folder if it is empty, and then its parent if that is."""
        for folder in (leaf, _parent_of(leaf)):
            try:
                freed_bytes = disk_bytes(self._ops.stat(folder))
                self._ops.rmdir(folder)
            except OSError:
                return  # not empty, or gone already
            self._forget(folder)
            change.remove(self._bucket_of(folder), freed_bytes)

    def _make(self, folder: str, change: DiskChange) -> None:
        with self.growing(_parent_of(folder), change), contextlib.suppress(FileExistsError):
            self._ops.mkdir_own(folder)
            # Also if it was removed and taken off the count at once: then as much as the last.
            self._new_bytes = self.size_of(folder) or self._new_bytes
            change.add(self._bucket_of(folder), self._new_bytes)
        self._made.add(folder)

    def size_of(self, folder: str) -> int:
        """Return a folder's disk bytes; 0 if it is gone, cannot be asked, or nobody counts."""
        with contextlib.suppress(OSError):
            return disk_bytes(self._ops.stat(folder)) if self._counts_bytes else 0
        return 0

    def _forget(self, folder: str) -> None:
        self._made.discard(folder)
        self._synced.discard(folder)
        with self._mutex:
            self._grown.pop(folder, None)


def _parent_of(folder: str) -> str:
    return folder.rpartition("/")[0]
