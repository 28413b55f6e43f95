"""Who is writing into a namespace, so that only the temporary files of the dead are removed.

Every open tier has a file `<namespace>/.writers/<writer id>`, which names its host by the kernel's
boot id, and keeps an advisory lock on it, which the kernel releases when the process ends,
however it ends. The writer's id is part of the name of each of its temporary files.

A writer is dead if its file can be locked and was written on this very boot of this very kernel:
there the lock is certain. For a writer on another host the lock may not be visible (NFS without
locking, Lustre with local locks), so there it must also have missed its heartbeat for ten
minutes: every tier touches its file once a minute. The same goes for a filesystem without locks.
Both times are the filesystem's, so clocks of hosts are not compared. A temporary file that names
no known writer is left alone here; `kvoffload store gc` removes it when it is old.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import uuid

from kvoffload_async.tiers.files.boot import boot_id
from kvoffload_async.tiers.files.ops import FileOps, disk_bytes

HEARTBEAT_S = 60.0
DEAD_AFTER_S = 600.0
FOLDER = ".writers"

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class WriterRegistry:
    """This tier's own entry, and the judgement over the others'. Thread: an I/O thread."""

    def __init__(self, ops: FileOps, namespace_folder: str) -> None:
        self._ops = ops
        self._folder = f"{namespace_folder}/{FOLDER}"
        self._boot_id = boot_id()
        self.writer_id = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._fd: int | None = None

    def register(self) -> None:
        """Make and lock this tier's entry."""
        with contextlib.suppress(FileExistsError):
            self._ops.mkdir(self._folder)
        path = self._path(self.writer_id)
        self._fd = self._ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # Waits for those who look whether it is locked: unlocked it would be taken for dead.
            self._ops.lock(self._fd, wait=True)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        entry = json.dumps({"boot_id": self._boot_id, "host": socket.gethostname()})
        self._ops.pwrite(self._fd, memoryview(entry.encode()), 0)

    def heartbeat(self) -> None:
        """Show that this tier lives."""
        self._ops.utime(self._path(self.writer_id))

    def entry_bytes(self) -> int:
        """Return the disk bytes of this tier's entry."""
        return disk_bytes(self._ops.stat(self._path(self.writer_id)))

    def others(self) -> tuple[set[str], set[str]]:
        """Return the ids of the other writers: the living, and the dead."""
        return self.judged(self._ops.stat(self._path(self.writer_id)).st_mtime)

    def judged(self, now_s: float) -> tuple[set[str], set[str]]:
        """Return the same as of a given time, also for one who has not registered."""
        living: set[str] = set()
        dead: set[str] = set()
        for path, status in self._ops.walk(self._folder):
            writer_id = path.rpartition("/")[2]
            if writer_id == self.writer_id:
                continue
            silent_s = now_s - status.st_mtime
            (dead if self._is_dead(path, silent_s) else living).add(writer_id)
        return living, dead

    def living(self) -> set[str]:
        """Return the ids of the other writers that live."""
        return self.others()[0]

    def forget(self, writer_id: str) -> None:
        """Remove a dead writer's entry, once nothing of it is left."""
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(self._path(writer_id))

    def unregister(self) -> None:
        """Remove this tier's entry; idempotent."""
        if self._fd is not None:
            try:
                self.forget(self.writer_id)
            finally:
                self.die()

    def die(self) -> None:
        """Leave this tier's entry behind, unlocked: something is left for others to sweep."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._ops.close(fd)

    def _path(self, writer_id: str) -> str:
        return f"{self._folder}/{writer_id}"

    def _is_dead(self, path: str, silent_s: float) -> bool:
        try:
            fd = self._ops.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False  # it has just said goodbye
        except OSError:
            return silent_s > DEAD_AFTER_S
        try:
            is_locked, is_certain = self._look_at_lock(fd)
            if is_locked:
                return False
            return (is_certain and self._is_of_this_boot(fd)) or silent_s > DEAD_AFTER_S
        finally:
            self._ops.close(fd)

    def _look_at_lock(self, fd: int) -> tuple[bool, bool]:
        """Return whether somebody has the lock, and whether locks tell anything here."""
        try:
            return not self._ops.lock(fd, wait=False), True
        except OSError:
            return False, False

    def _is_of_this_boot(self, fd: int) -> bool:
        buffer = bytearray(4096)
        count = self._ops.pread_into(fd, memoryview(buffer), 0)
        try:
            entry = json.loads(bytes(buffer[:count]))
        except ValueError:
            return False  # it is just being written
        return isinstance(entry, dict) and entry.get("boot_id") == self._boot_id
