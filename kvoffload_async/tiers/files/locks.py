"""Exclusive advisory file locks (flock), acquired with a timeout.

A lock belongs to an open file, which forked children inherit: `FileOps` closes it in a child of
Python's `os.fork`, and unlocks before it closes. A child forked by other code shares the lock until
it ends or executes a program. If unlocking fails, the descriptor is closed, and the next use
reopens the file.

A filesystem without locks fails the first attempt (ENOLCK, EOPNOTSUPP, ENOSYS); the error is passed
to the caller, who may continue without locks. On NFS, locks are the server's; with the mount option
`local_lock=flock` they only work between processes of one host.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvoffload_async.system_calls import RefusedCallError
from kvoffload_async.tiers.files.ops import FileOps

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S: Final = 10.0
"""Seconds to wait for a lock; a lock is held for few system calls, unless its holder is stuck."""

_PID_BYTES: Final = 32
_FIRST_PAUSE_S: Final = 50e-6
_LONGEST_PAUSE_S: Final = 0.02
_MAKE: Final = os.O_RDWR | os.O_CREAT


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)  # a new one: a child may be forked while another has its lock


@contextlib.contextmanager
def acquired(mutex: threading.Lock, path: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold a mutex, so that one thread of this process at a time uses a file.

    Raises:
        TimeoutError: Another thread did not release it in time (ETIMEDOUT).
    """
    if not mutex.acquire(timeout=timeout_s):
        raise _overdue(path, timeout_s)
    try:
        yield
    finally:
        mutex.release()


class LockedFile:
    """A file used by one thread, process and host at a time.

    The descriptor is kept open between uses, because opening it takes twice as long as the rest. It
    is reopened after any error, and after the file was deleted, since a lock on a deleted file
    excludes nobody.
    """

    def __init__(
        self, ops: FileOps, path: str, flags: int = _MAKE, *, timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        """Configure the file; its first use opens it.

        Args:
            ops: System calls.
            path: Path of the file.
            flags: Open flags; with `O_CREAT` the file is created if needed.
            timeout_s: Timeout of acquiring the lock, in seconds.
        """
        self._ops = ops
        self._path = path
        self._flags = flags
        self._timeout_s = timeout_s
        self._fd: int | None = None
        # An flock belongs to the descriptor, so it does not exclude threads that share it.
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the file's lock; yield the descriptor.

        Raises:
            TimeoutError: Another holder did not release it in time (ETIMEDOUT).
            OSError: The file cannot be opened or locked.
        """
        deadline_s = time.monotonic() + self._timeout_s
        with acquired(self._mutex, self._path, self._timeout_s):
            fd = self._lock(deadline_s)
            try:
                yield fd
            except OSError:
                self._drop()
                raise
            finally:
                self._unlock()

    def close(self) -> None:
        """Close the descriptor; idempotent. The next use reopens it.

        Raises:
            TimeoutError: A use did not end in time (ETIMEDOUT).
        """
        with acquired(self._mutex, self._path, self._timeout_s):
            self._drop()

    def _lock(self, deadline_s: float) -> int:
        pause_s = _FIRST_PAUSE_S
        while True:
            fd, is_new = self._opened()
            try:
                if self._ops.lock(fd, wait=False):
                    if self._ops.fstat(fd).st_nlink:
                        return fd
                    self._drop()
            except RefusedCallError:
                self._drop()
                raise
            except OSError as error:
                self._drop()
                if is_new:
                    why = error.strerror or str(error)
                    raise OSError(error.errno, f"cannot be locked: {why}", self._path) from error
                continue  # the kept descriptor may be stale
            if time.monotonic() >= deadline_s:
                raise _overdue(self._path, self._timeout_s)
            _pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _opened(self) -> tuple[int, bool]:
        """Return the file's descriptor, and whether it was just opened."""
        if self._fd is not None:
            return self._fd, False
        makes = self._flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT
        opens = self._ops.open_own if makes else self._ops.open
        self._fd = opens(self._path, self._flags)
        return self._fd, True

    def _unlock(self) -> None:
        if self._fd is None:
            return
        try:
            self._ops.unlock(self._fd)
        except OSError:
            self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        try:
            self._ops.close(fd)
        except OSError as error:
            # The descriptor is closed anyway, and the work under the lock is done.
            logger.warning("%s: closing failed: %s", self._path, str(error))


@contextlib.contextmanager
def locked(
    ops: FileOps, path: str, flags: int = os.O_RDWR, *, timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[int]:
    """Open a file, hold its lock, and close it; raises like `LockedFile.locked`."""
    file = LockedFile(ops, path, flags, timeout_s=timeout_s)
    try:
        with file.locked() as fd:
            yield fd
    finally:
        file.close()


class InUseError(Exception):
    """A lock file is locked by another user; the text names the process, or is "unknown"."""


def lock_for_process(ops: FileOps, path: str) -> int:
    """Lock a file and write this process's id to it; return the descriptor that holds the lock.

    Raises:
        InUseError: It is locked.
        OSError: The file cannot be opened, locked or written.
    """
    with contextlib.ExitStack() as closing:
        fd = ops.open(path, os.O_RDWR | os.O_CREAT)
        closing.callback(ops.close, fd)
        if not ops.lock(fd, wait=False):
            raise InUseError(_holder(ops, fd))
        pid = f"{os.getpid()}\n".encode()
        ops.pwrite(fd, memoryview(pid), 0)  # before the truncation, so a full disk has room for it
        ops.truncate(fd, len(pid))
        closing.pop_all()
    return fd


def holder_of(ops: FileOps, path: str) -> str | None:
    """Return the id of the process that has locked a file, or "unknown"; None if it is not locked.

    Raises:
        OSError: The file cannot be opened or read.
    """
    with ops.opened(path, os.O_RDONLY) as fd:
        return _holder(ops, fd) if ops.is_locked(fd) else None


def _holder(ops: FileOps, fd: int) -> str:
    """Return the id of the process that holds a lock; the recorded id if the kernel shows none.

    The process that took the lock may have ended, and one that inherited it may hold it. Those on
    other hosts, in other containers and of other users are not shown.
    """
    status = ops.fstat(fd)
    inode = f":{status.st_ino} "
    for found in glob.iglob("/proc/[0-9]*/fdinfo/[0-9]*"):  # noqa: PTH207 - that stops at errors
        shown = Path(found)
        with contextlib.suppress(OSError):  # its process may end meanwhile
            is_lock = any(" FLOCK " in it and inode in it for it in shown.read_text().splitlines())
            if is_lock and os.path.samestat(status, (shown.parents[1] / "fd" / shown.name).stat()):
                return shown.parts[2]
    buffer = memoryview(bytearray(_PID_BYTES))
    recorded = bytes(buffer[: ops.pread_into(fd, buffer, 0)]).partition(b"\n")[0]
    return recorded.decode(errors="replace").strip() or "unknown"


def _overdue(path: str, timeout_s: float) -> OSError:
    return OSError(errno.ETIMEDOUT, f"its lock was not released for {timeout_s:g} s", path)
