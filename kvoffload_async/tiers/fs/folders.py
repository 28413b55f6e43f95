"""The leaf folders of a namespace: created once and cached, removed when empty.

Run on I/O threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from kvoffload_async.tiers.files.ops import FileOps, disk_bytes, sync_folder
from kvoffload_async.tiers.fs.outcome import DiskChange

_UNMEASURED = contextlib.nullcontext()


class LeafFolders:
    """The folders that contain blocks, each with a parent that contains nothing else."""

    def __init__(
        self, ops: FileOps, bucket_of: Callable[[str], int], *, counts_bytes: bool = True
    ) -> None:
        """Start with an empty cache.

        Args:
            ops: The system calls.
            bucket_of: Returns the bucket of a folder's path.
            counts_bytes: Whether the growth of folders is measured.
        """
        self._ops = ops
        self._bucket_of = bucket_of
        self._counts_bytes = counts_bytes
        self._mutex = threading.Lock()
        self._made: set[str] = set()
        self._synced: set[str] = set()
        self._new_bytes = 0
        self._grown: dict[str, int] = {}
        """Folders that grew here -> disk bytes already counted."""

    def ensure(self, leaf: str, change: DiskChange) -> None:
        """Create a leaf folder and its parent, unless cached.

        Other processes may remove it while it is empty. A caller whose file creation fails for that
        reason must call `make_again`.
        """
        if leaf in self._made:
            return
        with contextlib.suppress(FileNotFoundError):  # the parent was removed concurrently
            for folder in (_parent_of(leaf), leaf):
                if folder not in self._made:
                    self._make(folder, change)

    def make_again(self, leaf: str, change: DiskChange) -> None:
        """Create a cached folder again after another process has removed it."""
        parent = _parent_of(leaf)
        self._forget(leaf)
        self._forget(parent)
        self._ops.make_folders(_parent_of(parent))
        self.ensure(leaf, change)

    def forget_all(self) -> None:
        """Clear the cache after all folders were removed."""
        with self._mutex:
            self._made.clear()
            self._grown.clear()
            self._synced.clear()

    def sync(self, leaf: str) -> None:
        """Wait until a leaf folder and the names in it are on the device.

        The folder's own name is synced only once, so not again if another process removes and
        creates the folder meanwhile.

        Raises:
            OSError: The names may not be durable, now or ever.
        """
        sync_folder(self._ops, leaf)
        if leaf not in self._synced:
            parent = _parent_of(leaf)
            sync_folder(self._ops, parent)
            sync_folder(self._ops, _parent_of(parent))
            self._synced.add(leaf)

    def growing(self, folder: str, change: DiskChange) -> contextlib.AbstractContextManager[None]:
        """Return a context that adds the growth of the folder's own disk size to `change`.

        Growth already counted by another thread is excluded. Growth by another process cannot be
        distinguished; the next walk corrects it.
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
        """Count a folder's growth beyond `before_bytes`; see `growing`."""
        after_bytes = self.size_of(folder)
        with self._mutex:
            counted_bytes = max(before_bytes, self._grown.get(folder, 0))
            if before_bytes and after_bytes > counted_bytes:
                change.add(self._bucket_of(folder), after_bytes - counted_bytes)
                self._grown[folder] = after_bytes

    def remove_empty(self, leaf: str, change: DiskChange) -> None:
        """Delete a leaf folder if it is empty, and then its parent likewise."""
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
            # If it was already removed and uncounted, assume the size of the last new folder.
            self._new_bytes = self.size_of(folder) or self._new_bytes
            change.add(self._bucket_of(folder), self._new_bytes)
        self._made.add(folder)

    def size_of(self, folder: str) -> int:
        """Return a folder's disk bytes; 0 if it is missing, unreadable, or not counted."""
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
