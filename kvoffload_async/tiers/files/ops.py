"""Every system call of the tiers on disk, one method each.

Nothing else in `fs` and `slab` calls `os`: a test's fault layer replaces this object and can fail,
cut short, hang or kill the process at any of them. Thread: any.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat as stat_module
from collections.abc import Iterator, Sequence

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_KEEP_SIZE = 1
_NO_FALLOCATE = {errno.ENOSYS, errno.EOPNOTSUPP}
_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

_libc = ctypes.CDLL(None, use_errno=True)


class FileOps:
    """The operating system's calls, with their errors as `OSError`."""

    def __init__(self) -> None:
        self._renameat2 = getattr(_libc, "renameat2", None)

    def open(self, path: str, flags: int, mode: int = 0o644) -> int:
        """Return a new file descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write; return how many bytes were, which may be fewer."""
        return os.pwrite(fd, data, offset)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into the buffer; return how many bytes were, which may be fewer."""
        return os.preadv(fd, [buffer], offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write several buffers behind each other; return how many bytes were written."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into several buffers, one after the other; return how many bytes were read."""
        return os.preadv(fd, buffers, offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Make a file at least this long, with every byte of it allocated on disk."""
        os.posix_fallocate(fd, 0, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Allocate a file's first bytes on disk, and leave its length as it is.

        Where the filesystem cannot do that, nothing is done.
        """
        if _libc.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_FALLOCATE:
            raise OSError(code, os.strerror(code))

    def fstat(self, fd: int) -> os.stat_result:
        """Return what an open file is."""
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        """Return what a path is, not following a symbolic link."""
        return os.stat(path, follow_symlinks=False)

    def exists(self, path: str) -> bool:
        """Tell whether a path is there; errors but "not there" go on."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Set a file's size."""
        os.ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Wait until a file's bytes are on the device."""
        os.fdatasync(fd)

    def set_xattr(self, fd: int, name: str, value: bytes) -> None:
        """Set an extended attribute."""
        os.setxattr(fd, name, value)

    def get_xattr(self, fd: int, name: str) -> bytes | None:
        """Return an extended attribute; None where it, or the feature, does not exist."""
        try:
            return os.getxattr(fd, name)
        except OSError as error:
            if error.errno in {errno.ENODATA, errno.EOPNOTSUPP}:
                return None
            raise

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing the target."""
        os.rename(source, target)

    def publish(self, source: str, target: str) -> None:
        """Rename, not replacing the target: FileExistsError if it is there.

        Where the filesystem cannot promise that, it is checked first, which leaves a window.
        """
        if self._renameat2 is not None:
            result = self._renameat2(
                _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
            )
            if result == 0:
                return
            code = ctypes.get_errno()
            if code not in _NO_RENAMEAT2:
                raise OSError(code, os.strerror(code), source, None, target)
            self._renameat2 = None
        if self.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make one folder."""
        os.mkdir(path)

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it; those that are there already are fine."""
        os.makedirs(path, exist_ok=True)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def lock(self, fd: int, *, wait: bool) -> bool:
        """Take an exclusive advisory lock; False if another holds it and `wait` is false."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Release the lock."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def utime(self, path: str) -> None:
        """Set a file's times to now, by the filesystem's own clock."""
        os.utime(path)

    def walk(self, root: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every folder and file below a folder; what vanishes meanwhile is left out."""
        try:
            entries = os.scandir(root)
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield entry.path, status
                if stat_module.S_ISDIR(status.st_mode):
                    yield from self.walk(entry.path)


def write_all(ops: FileOps, fd: int, data: bytes | bytearray, offset: int) -> int:
    """Write all of `data`, in as many calls as it takes; return how many bytes that is.

    Raises:
        OSError: It could not be written, or a call wrote nothing.
    """
    view = memoryview(data)
    done = 0
    while done < len(view):
        written = ops.pwrite(fd, view[done:], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += written
    return done


def disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file or folder takes on disk, as allocated."""
    return status.st_blocks * 512
