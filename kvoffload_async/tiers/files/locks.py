"""Exclusive advisory locks (flock) that end with the call that took them, taken with a deadline.

A lock is released by unlocking, which also ends it for a child process that was forked meanwhile
and has inherited the descriptor. Where that fails, the descriptor is closed, which ends it for
certain, and the next use opens the file anew.

A filesystem without locks says so at the first attempt (ENOLCK, EOPNOTSUPP, ENOSYS): that goes on
to the caller, who knows whether it can do without. On NFS, locks are the server's; a mount with
`local_lock=flock` parts the processes of one host only.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvoffload_async.tiers.files.ops import FileOps

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S: Final = 10.0
"""Long beside the few system calls for which a lock is held: who holds it longer is stuck."""

_FIRST_PAUSE_S: Final = 50e-6
_LONGEST_PAUSE_S: Final = 0.02
_MAKE: Final = os.O_RDWR | os.O_CREAT


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


@contextlib.contextmanager
def acquired(mutex: threading.Lock, path: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the mutex that parts this process's threads over a file.

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
    """A file that threads, processes and hosts use one at a time.

    Its descriptor is kept between two uses, as opening it for each would take twice as long as the
    rest. It is closed and opened anew when anything fails, and when the file was deleted: a lock
    on that would part nobody.
    """

    def __init__(
        self,
        ops: FileOps,
        path: str,
        flags: int = _MAKE,
        *,
        timeout_s: float = LOCK_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = _pause,
    ) -> None:
        """Describe it; it is opened by its first use.

        Args:
            ops: The system calls.
            path: The file.
            flags: To open it with; with `O_CREAT` it is made if it is not there.
            timeout_s: Seconds for taking the lock.
            clock: Monotonic time in seconds.
            pause: Waits between two attempts.
        """
        self._ops = ops
        self._path = path
        self._flags = flags
        self._timeout_s = timeout_s
        self._clock = clock
        self._pause = pause
        self._fd: int | None = None
        # The file's lock is the descriptor's, and so does not part the threads that share it.
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock; yield the descriptor.

        Raises:
            TimeoutError: Another did not release it in time (ETIMEDOUT).
            OSError: The file cannot be opened or locked.
        """
        deadline_s = self._clock() + self._timeout_s
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
        """Close the descriptor; idempotent. The next use opens it again.

        Raises:
            TimeoutError: A use has not ended in time (ETIMEDOUT).
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
            except OSError as error:
                self._drop()
                if is_new:
                    why = error.strerror or str(error)
                    raise OSError(error.errno, f"cannot be locked: {why}", self._path) from error
                continue  # a kept descriptor may have gone stale
            if self._clock() >= deadline_s:
                raise _overdue(self._path, self._timeout_s)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _opened(self) -> tuple[int, bool]:
        """Return the descriptor, and whether it was opened just now."""
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
            # It is closed all the same, and what was done under the lock was done.
            logger.warning("%s: closing it reported %s", self._path, str(error))


@contextlib.contextmanager
def locked(
    ops: FileOps, path: str, flags: int = os.O_RDWR, *, timeout_s: float = LOCK_TIMEOUT_S
) -> Iterator[int]:
    """Open a file, hold its lock, and close it again; raises what `LockedFile.locked` raises."""
    file = LockedFile(ops, path, flags, timeout_s=timeout_s)
    try:
        with file.locked() as fd:
            yield fd
    finally:
        file.close()


def _overdue(path: str, timeout_s: float) -> OSError:
    return OSError(errno.ETIMEDOUT, f"its lock was held by another for {timeout_s:g} s", path)
