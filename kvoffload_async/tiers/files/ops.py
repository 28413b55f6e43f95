"""Every system call of the tiers on disk, one method each, and the only way to their files.

A tier enters its root; then every path beneath that is resolved from a descriptor of it, following
no symbolic link, and only regular files are opened. Before, and for other paths, the root is `/`.
`locate` is what native code needs in place of a path.

Nothing else in `fs` and `slab` calls `os`: a test's fault layer replaces this object and can fail,
cut short, hang or kill the process at any of them. Thread: any.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat as stat_module
from collections.abc import Iterator, Sequence
from typing import Final

from kvoffload_async.tiers.files.beneath import Opener
from kvoffload_async.tiers.files.modes import Modes
from kvoffload_async.tiers.files.roots import NotRegularFileError, Root
from kvoffload_async.tiers.files.tree import Tree

_RENAME_NOREPLACE: Final = 1
_KEEP_SIZE: Final = 1
_NO_FALLOCATE: Final = {errno.ENOSYS, errno.EOPNOTSUPP}
_NO_RENAMEAT2: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

_libc = ctypes.CDLL(None, use_errno=True)


class FileOps:
    """The operating system's calls, with their errors as `OSError`."""

    def __init__(self, opener: Opener | None = None) -> None:
        """Start at `/`; `opener` is used in place of the best that works."""
        self._renameat2 = getattr(_libc, "renameat2", None)
        self._tree = Tree(opener)

    # -- the root -------------------------------------------------------------------------------

    def enter(self, root: str, modes: Modes | None = None, *, make: bool = True) -> None:
        """Resolve paths beneath a directory from a descriptor of it, until `leave`.

        Args:
            root: The directory, which may be a symbolic link: it is followed here, and once.
            modes: Of what is made in it.
            make: Make it, and what is above it, if it is not there.

        Raises:
            OSError: It cannot be made or opened.
        """
        self._tree.enter(root, modes or Modes(), make=make)

    def leave(self, root: str) -> None:
        """Undo one `enter`."""
        self._tree.leave(root)

    def locate(self, path: str) -> tuple[Root, str]:
        """Return the root of an absolute path, to be kept during the call, and its name there."""
        return self._tree.locate(path)

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """Keep descriptors of the last few folders during several calls of this thread."""
        return self._tree.batch()

    def leads_to(self, path: str) -> os.stat_result:
        """Return what a directory's path leads to, links followed: only to be compared."""
        return os.stat(f"{path}/.")

    # -- files ----------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        """Return a new descriptor of a regular file or, with O_DIRECTORY, of a folder.

        With O_CREAT, and without O_EXCL, a file that is there is opened, else one is made.

        Raises:
            NotRegularFileError: Something else lies there.
        """
        return self._tree.open(path, flags)

    def open_own(self, path: str, flags: int) -> int:
        """Open or make a file; a link, pipe, socket or device in its place is removed before.

        Raises:
            NotRegularFileError: There is a folder in its place, or a link on the way.
        """
        try:
            return self.open(path, flags | os.O_CREAT)
        except NotRegularFileError:
            self.clear(path)
            return self.open(path, flags | os.O_CREAT)

    def create_anew(self, path: str) -> int:
        """Make a file to write; what is in its place, but for a folder, is removed before."""
        with contextlib.suppress(FileNotFoundError):
            self.unlink(path)
        return self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def clear(self, path: str) -> None:
        """Remove a link, pipe, socket or device, which is in the place of something of ours.

        Raises:
            NotRegularFileError: It is a folder, or a file.
        """
        kind = stat_module.S_IFMT(self.stat(path).st_mode)
        if kind in {stat_module.S_IFDIR, stat_module.S_IFREG}:
            raise NotRegularFileError(path)
        with contextlib.suppress(FileNotFoundError):
            self.unlink(path)

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
        return self._tree.stat(path)

    def exists(self, path: str) -> bool:
        """Tell whether a path is there; errors but "not there" go on."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def has_file(self, path: str) -> bool:
        """Tell whether a path is a regular file; errors but "not there" go on."""
        try:
            return stat_module.S_ISREG(self.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Set a file's size."""
        os.ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Wait until a file's bytes are on the device."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Wait until a file's bytes and attributes, or the names in a folder, are on the device."""
        os.fsync(fd)

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
        self._tree.move(source, target, _rename)

    def publish(self, source: str, target: str) -> None:
        """Rename, not replacing the target: FileExistsError if it is there.

        Where the filesystem cannot promise that, it is checked first, which leaves a window.
        """
        if self._renameat2 is not None:
            try:
                self._tree.move(source, target, self._rename_noreplace)
            except OSError as error:
                if error.errno not in _NO_RENAMEAT2:
                    raise
                self._renameat2 = None
            else:
                return
        if self.exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self.rename(source, target)

    @property
    def can_refuse_to_replace(self) -> bool:
        """Whether `publish` needs one call, as far as is known."""
        return self._renameat2 is not None

    def unlink(self, path: str) -> None:
        """Remove a file."""
        self._tree.at(path, lambda folder_fd, name: os.unlink(name, dir_fd=folder_fd))

    def utime(self, path: str) -> None:
        """Set a file's times to now, by the filesystem's own clock."""
        self._tree.at(
            path, lambda folder_fd, name: os.utime(name, dir_fd=folder_fd, follow_symlinks=False)
        )

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

    def is_locked(self, fd: int) -> bool:
        """Tell whether another has the lock; until the descriptor is closed, it is shared."""
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    # -- folders --------------------------------------------------------------------------------

    def mkdir(self, path: str) -> None:
        """Make one folder."""
        self._tree.make_folder(path)

    def mkdir_own(self, path: str) -> None:
        """Make one folder; a link, pipe, socket or device in its place is removed before.

        Raises:
            FileExistsError: There is a folder, or a file.
        """
        try:
            self.mkdir(path)
        except FileExistsError:
            try:
                self.clear(path)
            except NotRegularFileError:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            self.mkdir(path)

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it; those that are there already are fine.

        Raises:
            NotADirectoryError: Something else, or a link, is in the place of one of them.
        """
        self._tree.make_folders(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self._tree.at(path, lambda folder_fd, name: os.rmdir(name, dir_fd=folder_fd))

    def entries(self, folder: str) -> list[tuple[str, os.stat_result]]:
        """Return what is directly in a folder, by paths; what vanishes meanwhile is left out."""
        return self._tree.entries(folder)

    def walk(self, root: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every folder and file below a folder; what vanishes meanwhile is left out.

        Links are yielded and not followed; what lies deeper than any tier's files is left out.
        """
        return self._tree.walk(root)

    # -- inside ---------------------------------------------------------------------------------

    def _rename_noreplace(self, source_fd: int, old: str, target_fd: int, new: str) -> None:
        if self._renameat2 is None:  # another thread has just found that out
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        names = os.fsencode(old), os.fsencode(new)
        if self._renameat2(source_fd, names[0], target_fd, names[1], _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), old, None, new)


def _rename(source_fd: int, old: str, target_fd: int, new: str) -> None:
    os.rename(old, new, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def write_all(ops: FileOps, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
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


def sync_folder(ops: FileOps, folder: str) -> None:
    """Wait until the names in a folder are on the device; raises OSError."""
    fd = ops.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ops.fsync(fd)
    finally:
        ops.close(fd)


def disk_bytes(status: os.stat_result) -> int:
    """Return the bytes that a file or folder takes on disk, as allocated."""
    return status.st_blocks * 512


def names_in(ops: FileOps, folder: str) -> list[str]:
    """Return the names directly in a folder, for less than `entries` costs; raises OSError."""
    fd = ops.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(fd)
    finally:
        ops.close(fd)
