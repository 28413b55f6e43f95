"""All system calls of the disk tiers, one method each.

A tier enters its root directory; then every path below it is resolved relative to a descriptor of
the root, without following symbolic links, and only regular files are opened. Other paths are
resolved from `/`. `locate` returns the descriptor and name for native code.

A path is opened by one `openat2` call, or component by component if the kernel or a seccomp filter
does not allow `openat2`.

`fs` and `slab` make no other calls of `os`: a test's fault layer replaces this object and can
inject errors, short transfers, hangs and crashes at any call. Maintenance reads manifests through a
file object, which `open` opens.

Thread: any; calls release the GIL.

Source: openat2(2); its number is the same on every architecture but Alpha.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import stat as stat_module
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np

from kvoffload_async.errors import (
    ConfigError,
    TierError,
    TierFullError,
    TierUnavailableError,
    shortage_remedy,
)
from kvoffload_async.system_calls import REFUSALS, REMEDY, RefusedCallError, naming_refusal
from kvoffload_async.tiers.files.modes import NO_MODES, OTHERS_BITS, Modes, give_mode

_MAX_NAME_BYTES = 200


def safe_name(model_name: str) -> str:
    """Convert a model's name to one path component."""
    flat = model_name.replace("/", "_").replace("\0", "_")
    return flat.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")


Opener = Callable[[int, str, int], int]
"""(directory descriptor, relative name, flags without O_CREAT) -> a new descriptor."""

FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OPENAT2: Final = 437
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]

_HOW: Final = struct.Struct("=QQQ")
"""Layout of `struct open_how`: flags, mode, resolve."""


@functools.cache
def _how(flags: int) -> bytes:
    """Return the packed `struct open_how` for these flags."""
    return _HOW.pack(flags, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)


def open_by_kernel(root_fd: int, name: str, flags: int) -> int:
    """Open a name below a directory with `openat2`; a symbolic link raises ELOOP."""
    encoded = os.fsencode(name)
    if b"\0" in encoded:
        raise ValueError("embedded null byte")
    how = _how(flags | os.O_CLOEXEC)
    while True:
        fd: int = _syscall(_OPENAT2, root_fd, encoded, how, _HOW.size)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), name)


def open_by_components(root_fd: int, name: str, flags: int) -> int:
    """Open a name below a directory, component by component.

    Raises:
        OSError: ENOTDIR for a symbolic link on the way, ELOOP for one at the end.
    """
    *folders, last = name.split("/")
    if ".." in {*folders, last} or name.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    folder_fd = root_fd
    try:
        for folder in folders:
            next_fd = os.open(folder, FOLDER_FLAGS, dir_fd=folder_fd)
            if folder_fd != root_fd:
                os.close(folder_fd)
            folder_fd = next_fd
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    finally:
        if folder_fd != root_fd:
            os.close(folder_fd)


def suitable_opener(root_fd: int) -> Opener:
    """Return `open_by_kernel` if `openat2` works here, else `open_by_components`."""
    try:
        os.close(open_by_kernel(root_fd, ".", FOLDER_FLAGS))
    except OSError:
        return open_by_components
    return open_by_kernel


T = TypeVar("T")


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield a descriptor; close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


_KEPT_FOLDERS: Final = 4
"""Folders cached per thread: a rename uses two, an evicting store alternates between two pairs."""


class NotRegularFileError(OSError):
    """A path is not a regular file, or leads through a symbolic link."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENXIO, "not a regular file", path)


class Root:
    """A directory below which paths are resolved.

    Attributes:
        path: Path of the directory.
        prefix: Prefix of the paths below it.
        fd: Its descriptor, closed only when this object is no longer referenced, so that a
            concurrent call cannot use a reused number.
        modes: Permissions of files and folders created in it.
        open: Opens a relative name below it.
    """

    __slots__ = ("fd", "modes", "open", "path", "prefix")

    def __init__(self, path: str, modes: Modes, opener: Opener | None) -> None:
        """Open the directory, following links.

        Raises:
            OSError: It cannot be opened.
        """
        self.fd = -1
        self.path = path
        self.prefix = path.rstrip("/") + "/"
        self.modes = modes
        self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.open = opener or suitable_opener(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def make_root(path: str, mode: int, sync_entry: Callable[[str], None] | None = None) -> None:
    """Create a directory and its parents.

    Args:
        path: Absolute path of the directory.
        mode: Permissions of new directories.
        sync_entry: Called for each new directory, and for the last one that exists, which a killed
            process may have created and not synced.

    Raises:
        OSError: It cannot be created, or its entry cannot be synced.
    """
    parent = path.rpartition("/")[0] or "/"
    try:
        is_new = _make_directory(path, mode)
    except FileNotFoundError:
        make_root(parent, mode, sync_entry)
        is_new = _make_directory(path, mode)
    if sync_entry is not None:
        with contextlib.suppress(PermissionError):  # then others have created it
            sync_entry(parent if is_new else path)
        if is_new:
            sync_entry(path)


def _make_directory(path: str, mode: int) -> bool:
    """Create a directory; return False if it exists."""
    try:
        os.mkdir(path, mode & 0o777)
    except FileExistsError:
        return False
    if mode & OTHERS_BITS:  # the umask may have removed these bits
        try:
            os.chmod(path, mode)
        except OSError as error:
            if error.errno not in NO_MODES:
                raise
    return True


class FolderDescriptors(threading.local):
    """Per-thread folder descriptors: opened for one call, or cached during a batch."""

    _kept: dict[str, int] | None = None
    _stale: Sequence[int] = ()

    def at(self, path: str, call: Callable[[int, str], T], open_folder: Callable[[str], int]) -> T:
        """Call `call` with a descriptor of a path's folder and the path's last component.

        A cached folder may have been deleted and recreated: after FileNotFoundError the call is
        retried in the current folder. The old descriptor stays open until the end of the batch,
        because an enclosing call may be using it.
        """
        folder, _, name = path.rpartition("/")
        folder = folder or "/"
        if name in {"", ".", ".."}:
            raise OSError(errno.EINVAL, "not a file name", path)
        kept = self._kept
        if kept is None:
            fd = open_folder(folder)
            try:
                return call(fd, name)
            finally:
                os.close(fd)
        if folder in kept:
            fd = kept[folder] = kept.pop(folder)  # move to the end: most recently used
            try:
                return call(fd, name)
            except FileNotFoundError:
                if kept.get(folder) == fd:  # else a nested call has replaced it already
                    self._stale = (*self._stale, kept.pop(folder))
        if folder not in kept:
            fd = open_folder(folder)
            if len(kept) == _KEPT_FOLDERS:
                os.close(kept.pop(next(iter(kept))))
            kept[folder] = fd
        return call(kept[folder], name)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Cache descriptors of the last few folders used by this thread."""
        kept = self._kept = {}
        try:
            yield
        finally:
            stale, self._stale, self._kept = self._stale, (), None
            for fd in (*kept.values(), *stale):
                os.close(fd)


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that show a shortage of this process or machine, not a fault of the directory."""


def mapped(error: OSError) -> TierError:
    """Convert an OSError to a tier error."""
    kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
    tier_error = kind(str(error))
    tier_error.__cause__ = error.with_traceback(None)  # its frames hold the primary's memory
    error.__context__ = None
    return tier_error


def unusable(root_dir: str, error: OSError) -> ConfigError | TierUnavailableError:
    """Return the error for a tier directory that is unusable, or cannot be opened now."""
    kind: type[ConfigError | TierUnavailableError] = ConfigError
    remedy = "give a directory that this process can write"
    if isinstance(error, (NotRegularFileError, NotADirectoryError)):
        remedy = "remove it, or give another directory"
    elif isinstance(error, RefusedCallError):
        remedy = REMEDY
    elif error.errno in _NO_SPACE:
        remedy = "free space there, or give another directory"
    elif error.errno in _SHORTAGES:
        kind, remedy = TierUnavailableError, shortage_remedy(error)
    failure = kind(f"root_dir: {root_dir!r} cannot be used ({error}); {remedy}")
    failure.__cause__ = error
    return failure


logger = logging.getLogger(__name__)


class DirectIo:
    """The `O_DIRECT` flag, which any thread may turn off while others are in a call.

    Attributes:
        flag: `O_DIRECT`, or 0. Read it once per operation, and pass that value to `refused`.
    """

    def __init__(self, *, wanted: bool, where: str) -> None:
        """Turn the flag on if `wanted`; the warning names `where`."""
        self.flag = os.O_DIRECT if wanted else 0
        self._where = where

    def refused(self, flag: int, error: OSError) -> bool:
        """Return whether an error means that `flag` is unsupported here; then turn it off.

        The error can occur at open and at every transfer, because alignment rules depend on the
        filesystem.
        """
        if not flag or error.errno != errno.EINVAL:
            return False
        if self.flag:
            self.flag = 0
            logger.warning(
                "%s: direct I/O does not work here (%s); using the page cache",
                self._where,
                str(error),  # formatted now, so that a retained log record does not keep the frames
            )
        return True


Entry = tuple[str, os.stat_result]
"""A path and its status, from lstat."""

_NO_FILE: Final = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""Errors of opening a link, a socket or pipe, a folder, a device."""

_ALWAYS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LIST_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH: Final = 16
"""Maximum depth of a walk, to limit its descriptors; no tier nests folders this deep."""

_TRIES: Final = 8
"""Attempts to open or create a file that others create and delete."""


class Tree:
    """Path resolution below the entered roots; other paths are resolved from `/`."""

    def __init__(self, opener: Opener | None = None) -> None:
        """Start without roots; `opener` overrides the choice of `suitable_opener`."""
        self._folders = FolderDescriptors()
        self._opener = opener
        self._entering = threading.Lock()
        self._roots: tuple[Root, ...] = ()

    def enter(
        self, root: str, modes: Modes | None = None, *, make: bool = True, sync: bool = False
    ) -> None:
        """Resolve paths below a directory from its descriptor, until `leave`.

        Args:
            root: The directory; a symbolic link is followed once, here.
            modes: Permissions of files and folders created in it.
            make: Create the directory and its parents if needed.
            sync: With `make`, sync the entries of these directories in their parents.

        Raises:
            OSError: It cannot be created, synced or opened.
        """
        path, modes = root.rstrip("/") or "/", modes or Modes()
        if make:
            make_root(path, modes.of_folder(), self.sync_entry if sync else None)
        entered = Root(path, modes, self._opener)
        with self._entering:  # longest path first; for equal paths, newest first
            roots = (entered, *self._roots)
            self._roots = tuple(sorted(roots, key=lambda root: len(root.path), reverse=True))

    def sync_entry(self, path: str) -> None:
        """Sync the entry of a directory in its parent to the device, unless it is a mount point."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with closing(os.open(path.rpartition("/")[0] or "/", flags)) as fd:
            if os.fstat(fd).st_dev == os.stat(path).st_dev:
                with naming_refusal("fsync"):
                    os.fsync(fd)

    def leave(self, root: str) -> None:
        """Undo one call of `enter`."""
        path = root.rstrip("/") or "/"
        with self._entering:
            left = next((one for one in self._roots if one.path == path), None)
            self._roots = tuple(one for one in self._roots if one is not left)

    def locate(self, path: str) -> tuple[Root, str]:
        """Return the root of an absolute path, to be kept alive during use, and the name in it."""
        for root in self._roots:
            if path.startswith(root.prefix):
                return root, path[len(root.prefix) :].lstrip("/") or "."
            if path == root.path:
                return root, "."
        if not path.startswith("/"):
            raise OSError(errno.EINVAL, "not an absolute path", path)
        return Root("/", Modes(), self._opener), path.lstrip("/") or "."

    def at(self, path: str, call: Callable[[int, str], T]) -> T:
        """Call `call` with a descriptor of a path's folder and the path's last component."""
        return self._folders.at(path, call, self.open_folder)

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """Cache descriptors of the last few folders during several calls of this thread."""
        return self._folders.batch()

    # -- files ----------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        """Return a new descriptor of a regular file or, with O_DIRECTORY, of a folder.

        O_CREAT without O_EXCL opens an existing file or creates one.

        Raises:
            NotRegularFileError: The path is something else.
        """
        if not flags & os.O_CREAT:
            return self._open_there(path, flags)
        if flags & os.O_EXCL:
            return self._create(path, flags)
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._open_there(path, flags & ~os.O_CREAT)
            with contextlib.suppress(FileExistsError):
                return self._create(path, flags | os.O_EXCL)
        raise OSError(errno.EAGAIN, "the file is repeatedly created and deleted", path)

    def stat(self, path: str) -> os.stat_result:
        """Return a path's status, not following symbolic links."""
        root, name = self.locate(path)
        if name == ".":
            return os.fstat(root.fd)
        return self.at(path, _stat)

    def move(self, source: str, target: str, call: Callable[[int, str, int, str], None]) -> None:
        """Call `call` with descriptors of two paths' folders and the paths' last components."""
        self.at(
            source,
            lambda source_fd, old: self.at(
                target, lambda target_fd, new: call(source_fd, old, target_fd, new)
            ),
        )

    def _open_there(self, path: str, flags: int) -> int:
        root, name = self.locate(path)
        kind = stat_module.S_IFDIR if flags & os.O_DIRECTORY else stat_module.S_IFREG
        try:
            fd = root.open(root.fd, name, flags & ~os.O_TRUNC | _ALWAYS)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise NotRegularFileError(path) from error
            error.filename = path
            raise
        try:
            is_wanted = stat_module.S_IFMT(os.fstat(fd).st_mode) == kind
            if is_wanted and flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
        if not is_wanted:
            os.close(fd)
            raise NotRegularFileError(path)
        return fd

    def _create(self, path: str, flags: int) -> int:
        modes = self.locate(path)[0].modes

        def create(folder_fd: int, name: str) -> int:
            folder = os.fstat(folder_fd)
            mode = modes.of_file(folder)
            fd = os.open(name, flags | _ALWAYS, mode, dir_fd=folder_fd)
            try:
                if mode & OTHERS_BITS:
                    give_mode(fd, mode, folder, is_given=modes.file_mode is not None)
            except BaseException:
                os.close(fd)
                raise
            return fd

        return self.at(path, create)

    # -- folders --------------------------------------------------------------------------------

    def _make_folder(self, path: str) -> None:
        """Create one folder; see `FileOps.mkdir`."""
        modes = self.locate(path)[0].modes

        def make(folder_fd: int, name: str) -> None:
            folder = os.fstat(folder_fd)
            mode = modes.of_folder(folder)
            os.mkdir(name, mode & 0o777, dir_fd=folder_fd)
            if not mode & ~stat_module.S_IRWXU:
                return
            with (
                contextlib.suppress(FileNotFoundError),  # others sweep empty folders
                closing(os.open(name, _LIST_FLAGS, dir_fd=folder_fd)) as fd,
            ):
                give_mode(fd, mode, folder, is_given=modes.file_mode is not None)

        self.at(path, make)

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, if needed.

        Raises:
            NotADirectoryError: One of them is a link or not a folder.
        """
        missing: list[str] = []
        while True:
            try:
                os.close(self.open_folder(path))
                break
            except FileNotFoundError:
                missing.append(path)
                path = path.rpartition("/")[0] or "/"
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._make_folder(folder)
            os.close(self.open_folder(folder))

    def open_folder(self, path: str, flags: int = FOLDER_FLAGS) -> int:
        """Return a descriptor of a folder; raises NotADirectoryError for a link."""
        root, name = self.locate(path)
        try:
            return root.open(root.fd, name, flags)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path) from error
            error.filename = path
            raise

    def entries(self, folder: str) -> list[Entry]:
        """Return paths and status of a folder's entries; skips those deleted meanwhile."""
        with closing(self.open_folder(folder, _LIST_FLAGS)) as fd:
            return list(_entries(fd, folder))

    def walk(self, folder: str) -> Iterator[Entry]:
        """Yield every folder and file below a folder; skips those deleted meanwhile.

        Links are yielded but not followed; folders nested deeper than any tier's are skipped.
        """
        try:
            fd = self.open_folder(folder, _LIST_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return
        with closing(fd):
            yield from _walk(fd, folder, _MAX_DEPTH)


def _stat(folder_fd: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)


def _utime(folder_fd: int, name: str) -> None:
    os.utime(name, dir_fd=folder_fd, follow_symlinks=False)


def _entries(fd: int, folder: str) -> Iterator[Entry]:
    with os.scandir(fd) as found:
        for entry in found:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield f"{folder}/{entry.name}", status


def _walk(fd: int, folder: str, depth: int) -> Iterator[Entry]:
    for path, status in _entries(fd, folder):
        yield path, status
        if depth and stat_module.S_ISDIR(status.st_mode):
            try:
                inner_fd = os.open(path.rpartition("/")[2], _LIST_FLAGS, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with closing(inner_fd):
                yield from _walk(inner_fd, path, depth - 1)


_RENAME_NOREPLACE: Final = 1
_KEEP_SIZE: Final = 1
_NO_FALLOCATE: Final = REFUSALS | {errno.EOPNOTSUPP}
_NO_RENAMEAT2: Final = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_XATTR: Final = REFUSALS | {errno.ENODATA, errno.EOPNOTSUPP}
_ZEROS: Final = bytes(1 << 20)

_libc = ctypes.CDLL(None, use_errno=True)


_lockable: Final[set[int]] = set()
"""Descriptors that may have a lock: those on which one was attempted, until they are closed."""


def _leave_locks_to_parent() -> None:
    """Close the inherited descriptors of locks in a forked child, which may outlive its parent.

    /dev/null takes their numbers, because objects that the child inherited may still close these.
    """
    for fd in _lockable:
        with contextlib.suppress(OSError):  # no /dev/null: the number is free
            os.close(fd)
            null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            if null_fd != fd:
                os.dup2(null_fd, fd, inheritable=False)
                os.close(null_fd)
    _lockable.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)


class FileOps(Tree):
    """The operating system's calls; errors are raised as `OSError`."""

    def __init__(self, opener: Opener | None = None) -> None:
        """Start without roots; `opener` overrides the choice of `suitable_opener`."""
        super().__init__(opener)
        self._renameat2 = getattr(_libc, "renameat2", None)
        # Of its errors, EPERM may also mean the file; here there is none.
        has_failed = self._renameat2 and self._renameat2(-1, b"", -1, b"", _RENAME_NOREPLACE)
        if has_failed and ctypes.get_errno() in REFUSALS:
            self._renameat2 = None

    # -- the root -------------------------------------------------------------------------------

    def leads_to(self, path: str) -> os.stat_result:
        """Return the status of a directory, following links; use only for comparison."""
        return os.stat(f"{path}/.")

    # -- files ----------------------------------------------------------------------------------

    def open_own(self, path: str, flags: int) -> int:
        """Open or create a file; a link, pipe, socket or device in its place is removed first.

        Raises:
            NotRegularFileError: The path is a folder, or leads through a link.
        """
        try:
            return self.open(path, flags | os.O_CREAT)
        except NotRegularFileError:
            self.clear(path)
            return self.open(path, flags | os.O_CREAT)

    def create_anew(self, path: str) -> int:
        """Create a file for writing; anything in its place except a folder is removed first."""
        with contextlib.suppress(FileNotFoundError):
            self.unlink(path)
        return self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def clear(self, path: str) -> None:
        """Remove a link, pipe, socket or device that blocks a path of the tier.

        Raises:
            NotRegularFileError: The path is a folder or a regular file.
        """
        kind = stat_module.S_IFMT(self.stat(path).st_mode)
        if kind in {stat_module.S_IFDIR, stat_module.S_IFREG}:
            raise NotRegularFileError(path)
        with contextlib.suppress(FileNotFoundError):
            self.unlink(path)

    @contextlib.contextmanager
    def opened(self, path: str, flags: int) -> Iterator[int]:
        """Yield a new descriptor of a path, see `open`; close it at the end."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor; releases its lock also for a concurrently forked child."""
        if fd in _lockable:
            with contextlib.suppress(OSError):  # closing releases it, unless a child was forked
                fcntl.flock(fd, fcntl.LOCK_UN)
            _lockable.discard(fd)
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write data at an offset; return the number of bytes written, possibly fewer."""
        return os.pwrite(fd, data, offset)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read from an offset into a buffer; return the number of bytes read, possibly fewer."""
        return os.preadv(fd, [buffer], offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write several buffers consecutively; return the number of bytes written."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into several buffers consecutively; return the number of bytes read."""
        return os.preadv(fd, buffers, offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        """Extend a file to at least this size, fully allocated on disk."""
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            for start in range(os.fstat(fd).st_size, size_bytes, len(_ZEROS)):
                write_all(self, fd, memoryview(_ZEROS)[: size_bytes - start], start)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Allocate disk space for a file's first bytes without changing its size.

        Does nothing if the filesystem does not support it.
        """
        if _libc.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_FALLOCATE:
            raise OSError(code, os.strerror(code))

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def free_bytes(self, folder: str) -> int | None:
        """Return the space that this process may use on a folder's filesystem; None: unknown."""
        with closing(self.open_folder(folder)) as fd:
            try:
                found = os.fstatvfs(fd)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def exists(self, path: str) -> bool:
        """Return whether a path exists; errors except "not found" are raised."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def has_file(self, path: str) -> bool:
        """Return whether a path is a regular file; errors except "not found" are raised."""
        try:
            return stat_module.S_ISREG(self.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Set a file's size."""
        os.ftruncate(fd, size_bytes)

    def fdatasync(self, fd: int) -> None:
        """Sync a file's data to the device."""
        with naming_refusal("fdatasync"):
            os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Sync a file's data and attributes, or a folder's entries, to the device."""
        with naming_refusal("fsync"):
            os.fsync(fd)

    def set_xattr(self, fd: int, name: str, value: bytes) -> None:
        """Set an extended attribute."""
        os.setxattr(fd, name, value)

    def get_xattr(self, fd: int, name: str) -> bytes | None:
        """Return an extended attribute; None if it does not exist or is not supported."""
        try:
            return os.getxattr(fd, name)
        except OSError as error:
            if error.errno in _NO_XATTR:
                return None
            raise

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing the target."""
        self.move(source, target, _rename)

    def publish(self, source: str, target: str) -> None:
        """Rename a file; raises FileExistsError instead of replacing the target.

        Without support by the filesystem, it checks first, which leaves a race window.
        """
        if self._renameat2 is not None:
            try:
                self.move(source, target, self._rename_noreplace)
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
        """Whether the system can rename without replacing the target, as far as known."""
        return self._renameat2 is not None

    def unlink(self, path: str) -> None:
        """Remove a file."""
        self.at(path, lambda folder_fd, name: os.unlink(name, dir_fd=folder_fd))

    def utime(self, path: str) -> None:
        """Set a file's times to now, by the filesystem's clock; the file must not be empty."""
        try:
            self.at(path, _utime)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            with self.opened(path, os.O_RDWR) as fd:
                os.pwrite(fd, os.pread(fd, 1, 0), 0)

    def lock(self, fd: int, *, wait: bool) -> bool:
        """Take an exclusive advisory lock; return False if another has it and `wait` is false.

        A child that is forked later neither shares the lock nor can release it.
        """
        _lockable.add(fd)
        try:
            with naming_refusal("flock"):
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Release the lock of an open file."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def is_locked(self, fd: int) -> bool:
        """Return whether another has locked a file; if not, hold a shared lock until `close`."""
        _lockable.add(fd)
        try:
            with naming_refusal("flock"):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    # -- folders --------------------------------------------------------------------------------

    def mkdir(self, path: str) -> None:
        """Create one folder."""
        self._make_folder(path)

    def mkdir_own(self, path: str) -> None:
        """Create one folder; a link, pipe, socket or device in its place is removed first.

        Raises:
            FileExistsError: There is a folder or file.
        """
        try:
            self.mkdir(path)
        except FileExistsError:
            try:
                self.clear(path)
            except NotRegularFileError:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            self.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self.at(path, lambda folder_fd, name: os.rmdir(name, dir_fd=folder_fd))

    # -- internal -------------------------------------------------------------------------------

    def _rename_noreplace(self, source_fd: int, old: str, target_fd: int, new: str) -> None:
        if self._renameat2 is None:  # another thread has just found it unsupported
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        names = os.fsencode(old), os.fsencode(new)
        if self._renameat2(source_fd, names[0], target_fd, names[1], _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), old, None, new)


def _rename(source_fd: int, old: str, target_fd: int, new: str) -> None:
    os.rename(old, new, src_dir_fd=source_fd, dst_dir_fd=target_fd)


_READ_BYTES: Final = 1 << 24
"""Maximum bytes per call of `read_all`."""


def write_all(ops: FileOps, fd: int, data: bytes | bytearray | memoryview, offset: int) -> int:
    """Write all of `data`, in several calls if needed; return its length.

    Raises:
        OSError: A write failed, or wrote nothing.
    """
    view = memoryview(data)
    done = 0
    while done < len(view):
        written = ops.pwrite(fd, view[done:], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += written
    return done


def read_all(ops: FileOps, fd: int, buffer: memoryview, offset: int = 0) -> int:
    """Read until the buffer is full or the file ends; return the number of bytes read."""
    done = 0
    while done < len(buffer):
        count = ops.pread_into(fd, buffer[done : done + _READ_BYTES], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_file(ops: FileOps, path: str, max_bytes: int | None = None) -> memoryview:
    """Return a file's content, or its first `max_bytes`.

    Raises:
        OSError: It cannot be read, or is too large for memory.
    """
    with ops.opened(path, os.O_RDONLY) as fd:
        size_bytes = ops.fstat(fd).st_size
        if max_bytes is not None:
            size_bytes = min(size_bytes, max_bytes)
        try:
            buffer = np.empty(size_bytes, dtype=np.uint8).data  # zero-filling would hold the GIL
        except MemoryError as error:  # a sparse file can have any size
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path) from error
        return buffer[: read_all(ops, fd, buffer)]


def read_given(
    path: str, max_bytes: int, check: Callable[[os.stat_result], None] = lambda _status: None
) -> bytes:
    """Return up to `max_bytes` from the start of a regular file named in the configuration.

    A pipe or a device is not waited for. Symbolic links are followed: the path is the operator's.

    Args:
        path: The path.
        max_bytes: Maximum number of bytes.
        check: Called with the file's status before it is read.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with closing(fd):
        found = os.fstat(fd)
        if not stat_module.S_ISREG(found.st_mode):
            raise NotRegularFileError(path)
        check(found)
        with os.fdopen(fd, "rb", closefd=False) as file:  # a network filesystem may read less
            return file.read(max_bytes)


def sync_folder(ops: FileOps, folder: str) -> None:
    """Sync a folder's entries to the device.

    Raises:
        OSError: Syncing failed.
    """
    with ops.opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        ops.fsync(fd)


def disk_bytes(status: os.stat_result) -> int:
    """Return the disk space allocated for a file or folder, in bytes."""
    return status.st_blocks * 512


def warn_of_capacity(ops: FileOps, root_dir: str, capacity_bytes: int, used_bytes: int) -> None:
    """Warn if the filesystem of a tier's directory has less space than the tier may allocate.

    Args:
        ops: System calls.
        root_dir: The directory.
        capacity_bytes: Capacity of the tier in bytes.
        used_bytes: Bytes that the tier has allocated already.

    Raises:
        OSError: The filesystem cannot be asked.
    """
    free_bytes = ops.free_bytes(root_dir)
    if free_bytes is not None and capacity_bytes > free_bytes + used_bytes:
        logger.warning(
            "capacity_bytes: %d is more than the filesystem of %r has: %d bytes are free and %d "
            "used by the tier; reduce it, or the disk will be full before the tier is",
            capacity_bytes,
            root_dir,
            free_bytes,
            used_bytes,
        )


def names_in(ops: FileOps, folder: str) -> list[str]:
    """Return the names in a folder; cheaper than `entries`.

    Raises:
        OSError: The folder cannot be read.
    """
    with ops.opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        return os.listdir(fd)
