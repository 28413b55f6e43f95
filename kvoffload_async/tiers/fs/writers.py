"""Registry of the writers of a namespace, so that only temporary files of dead ones are removed.

Every open tier has a file `<namespace>/.writers/<writer id>`, which contains its host's kernel boot
id. It holds an advisory lock on the file, which the kernel releases when the process ends for any
reason. The writer's id is part of the names of its temporary files.

A writer is dead if its file can be locked and was written during this boot of this kernel: then the
lock is reliable, independent of clocks. The lock of a writer on another host may be invisible (NFS
without locking, Lustre with local locks), so that writer must also have missed its heartbeat for
ten minutes: every tier touches its file once a minute. The same applies to filesystems without
locks and to unreadable files. All times are the filesystem's, so clocks of hosts are not compared.
A file with a time in the future, as after a clock was set back, belongs to a dead writer if it is
unchanged for ten minutes. If the filesystem's clock is set forward, or a host was suspended, a
living writer may be considered dead. Its next heartbeat finds the file missing, and it registers
under a new id.

A temporary file with the id of no known writer is kept; `kvoffload store gc` removes it when it is
old.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat as stat_module
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from kvoffload_async.system_calls import REFUSALS
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.tiers.files.locks import locked
from kvoffload_async.tiers.files.ops import FileOps, NotRegularFileError, disk_bytes, read_file

HEARTBEAT_S = 60.0
DEAD_AFTER_S = 600.0
FOLDER = ".writers"

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
_WRITER_ID = re.compile(r"[0-9]{1,10}-[0-9a-z]{1,64}")
_ENTRY_START = b'{"boot_id": "'
_NO_LOCKS = REFUSALS | {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_MAX_ENTRY_BYTES = 4096


class Writers(NamedTuple):
    """Ids of writers by their state."""

    living: set[str]
    dead: set[str]


_Ahead = tuple[str, float]
"""A writer's id and its file's time, which is in the future; maps to when it was first seen."""


class WriterRegistry:
    """This tier's own entry, and the state of the other writers. Run on I/O threads.

    Attributes:
        writer_id: This tier's id; changed by `renew_id`.
    """

    def __init__(self, ops: FileOps, namespace_folder: str) -> None:
        self._ops = ops
        self._folder = f"{namespace_folder}/{FOLDER}"
        self._boot_id = boot_id()
        self.writer_id = _new_id()
        self._fd: int | None = None
        self._entry = contextlib.ExitStack()
        self._ahead: dict[_Ahead, float] = {}

    def register(self) -> None:
        """Create and lock this tier's entry."""
        with contextlib.suppress(FileExistsError):
            self._ops.mkdir_own(self._folder)
        # Waits for writers that are testing the lock: an unlocked entry would count as dead.
        self._fd = self._lock(self._path(self.writer_id))
        text = json.dumps({"boot_id": self._boot_id, "host": socket.gethostname()})
        self._ops.pwrite(self._fd, memoryview(text.encode()), 0)

    def renew_id(self) -> None:
        """Use a new id, because others may be sweeping the files of the old one.

        The old entry stays, unlocked, so that its files are swept.
        """
        self.die()
        self.writer_id = _new_id()

    def heartbeat(self) -> bool:
        """Touch this tier's entry; return False if the entry was removed or replaced."""
        fd = self._fd
        path = self._path(self.writer_id)
        try:
            if fd is None or not os.path.samestat(self._ops.fstat(fd), self._ops.stat(path)):
                return False
            self._ops.utime(path)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return True

    def entry_bytes(self) -> int:
        """Return the disk bytes of this tier's entry."""
        return disk_bytes(self._own_status())

    def others(self) -> Writers:
        """Return the other writers by their state."""
        return self.classify(self._own_status().st_mtime)

    def classify(self, now_s: float) -> Writers:
        """Return the other writers by their state at a given time; needs no registration."""
        found = Writers(set(), set())
        ahead, self._ahead = self._ahead, {}
        for path, status in self._ops.walk(self._folder):
            writer_id = path.rpartition("/")[2]
            if writer_id == self.writer_id or not _is_entry(path, status, self._folder):
                continue
            is_silent = self._is_silent(writer_id, status.st_mtime, now_s, ahead)
            is_dead = self._is_dead(path, is_silent=is_silent)
            (found.dead if is_dead else found.living).add(writer_id)
        return found

    def living(self) -> set[str]:
        """Return the ids of the other living writers."""
        return self.others().living

    def forget(self, writer_id: str) -> None:
        """Remove a dead writer's entry after its files were swept; ignore missing permissions."""
        with contextlib.suppress(FileNotFoundError, PermissionError, NotRegularFileError):
            remove_entry(self._ops, self._path(writer_id))

    def unregister(self) -> None:
        """Remove this tier's entry; idempotent."""
        if self._fd is not None:
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._ops.unlink(self._path(self.writer_id))
            finally:
                self.die()

    def die(self) -> None:
        """Unlock this tier's entry without removing it, so that other writers sweep its files."""
        self._fd = None
        self._entry.close()

    def _path(self, writer_id: str) -> str:
        return f"{self._folder}/{writer_id}"

    def _own_status(self) -> os.stat_result:
        if self._fd is None:
            raise OSError(f"{self._path(self.writer_id)} is not registered")
        return self._ops.fstat(self._fd)  # works even if the file was deleted

    def _lock(self, path: str) -> int:
        """Create the entry, locked until `die`, or unlocked if locks are unsupported."""
        try:
            return self._entry.enter_context(locked(self._ops, path, _NEW))
        except OSError as error:
            if error.errno in _NO_LOCKS:
                fd = self._ops.open(path, os.O_RDWR)
                self._entry.callback(self._ops.close, fd)
                return fd
            with contextlib.suppress(OSError):  # on an error it is swept when it is old
                self._ops.unlink(path)
            raise

    def _is_silent(
        self, writer_id: str, touched_s: float, now_s: float, ahead: Mapping[_Ahead, float]
    ) -> bool:
        """Return whether an entry was not touched for so long that its writer may be dead."""
        if touched_s <= now_s + DEAD_AFTER_S:
            return now_s - touched_s > DEAD_AFTER_S
        seen_s = time.monotonic()
        since_s = self._ahead[writer_id, touched_s] = ahead.get((writer_id, touched_s), seen_s)
        return seen_s - since_s > DEAD_AFTER_S

    def _is_dead(self, path: str, *, is_silent: bool) -> bool:
        try:
            fd = self._ops.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False  # it has just unregistered
        except OSError:
            return is_silent
        try:
            if not self._ops.lock(fd, wait=False):
                return False
            self._ops.unlock(fd)  # a concurrently forked child would keep the lock
            return self._is_of_this_boot(fd) or is_silent
        except OSError:  # no locks here, or the entry is unreadable
            return is_silent
        finally:
            self._ops.close(fd)

    def _is_of_this_boot(self, fd: int) -> bool:
        """Return whether an entry has this boot's id; False if it is torn."""
        buffer = bytearray(_MAX_ENTRY_BYTES)
        try:
            count = self._ops.pread_into(fd, memoryview(buffer), 0)
            entry = json.loads(bytes(buffer[:count]))
        except (ValueError, RecursionError):
            return False  # it may be half written
        return isinstance(entry, dict) and entry.get("boot_id") == self._boot_id


def _new_id() -> str:
    return f"{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _is_entry(path: str, status: os.stat_result, folder: str) -> bool:
    """Return whether a path in the folder of writers has the name and type of an entry."""
    is_file = stat_module.S_ISREG(status.st_mode)
    return is_file and bool(_WRITER_ID.fullmatch(path.removeprefix(f"{folder}/")))


def remove_entry(ops: FileOps, path: str) -> None:
    """Remove a writer's entry.

    Raises:
        PermissionError: The file is not an entry, not even a torn one, or cannot be read.
        OSError: It cannot be removed.
    """
    start = bytes(read_file(ops, path, len(_ENTRY_START)))
    if not _ENTRY_START.startswith(start.rstrip(b"\0")):  # zeros: left by a power cut
        raise PermissionError(errno.EPERM, "not a writer's entry", path)
    ops.unlink(path)
