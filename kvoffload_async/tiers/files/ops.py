"""Every system call of the tiers on disk, one method each, and the only way to their files.

A tier enters its root; then every path beneath that is resolved from a descriptor of it, following
no symbolic link, and only regular files are opened. Before, and for other paths, the root is `/`.
`locate` is what native code needs in place of a path.

A path is opened in one call by the kernel's `openat2`, or, where that does not exist or is not
allowed, one component after the other.

Nothing else in `fs` and `slab` calls `os`: a test's fault layer replaces this object and can fail,
cut short, hang or kill the process at any of them.

Thread: any; calls release the interpreter's lock.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from kvoffload_async.errors import ConfigError, TierError, TierFullError, TierUnavailableError
from kvoffload_async.tiers.files.modes import OTHERS_BITS, Modes, give_mode

_MAX_NAME_BYTES = 200


def safe_name(model_name: str) -> str:
    """Return a model's name as one path component, whatever characters it has."""
    flat = model_name.replace("/", "_").replace("\0", "_")
    return flat.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")


Opener = Callable[[int, str, int], int]
"""(descriptor of a directory, relative name, flags without O_CREAT) -> a new descriptor."""

FOLDER_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OPENAT2: Final = 437
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
]


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_HOW_BYTES: Final = ctypes.sizeof(_OpenHow)


@functools.cache
def _how(flags: int) -> _OpenHow:
    """Return the kernel's argument for some flags; it is only read, so threads share it."""
    return _OpenHow(flags, 0, _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS)


def open_by_kernel(root_fd: int, name: str, flags: int) -> int:
    """Open a name beneath a directory in one call; OSError with ELOOP if there is a link."""
    encoded = os.fsencode(name)
    if b"\0" in encoded:
        raise ValueError("embedded null byte")
    how = ctypes.byref(_how(flags | os.O_CLOEXEC))
    while True:
        fd: int = _syscall(_OPENAT2, root_fd, encoded, how, _HOW_BYTES)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), name)


def open_by_components(root_fd: int, name: str, flags: int) -> int:
    """Open a name beneath a directory, one folder after the other.

    Raises:
        OSError: With ENOTDIR if there is a link on the way, ELOOP if there is one at its end.
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
    """Return the better of the two that works here: filters of system calls forbid what is new."""
    try:
        os.close(open_by_kernel(root_fd, ".", FOLDER_FLAGS))
    except OSError:
        return open_by_components
    return open_by_kernel


T = TypeVar("T")

_KEPT_FOLDERS: Final = 4
"""A rename is between two, and a store that evicts alternates between as many."""


class NotRegularFileError(OSError):
    """What lies in the place of a file of ours, or on the way there, is none of ours."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENXIO, "a link, folder, pipe or device is in a file's place", path)


class Root:
    """A directory beneath which paths are resolved.

    Attributes:
        path: What it is called.
        prefix: How paths beneath it begin.
        fd: Its descriptor, closed with the last user of this object: whoever is in a call then
            must not find another file under that number.
        modes: Of what is made in it.
        open: Opens a relative name beneath it.
    """

    __slots__ = ("fd", "modes", "open", "path", "prefix")

    def __init__(self, path: str, modes: Modes, opener: Opener | None) -> None:
        """Open it, links followed; raises OSError."""
        self.fd = -1
        self.path = path
        self.prefix = path.rstrip("/") + "/"
        self.modes = modes
        self.fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.open = opener or suitable_opener(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def make_root(path: str, mode: int) -> None:
    """Make a directory and those above it; raises OSError."""
    try:
        os.mkdir(path, mode & 0o777)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_root(path.rpartition("/")[0] or "/", mode)
        make_root(path, mode)
        return
    if mode & OTHERS_BITS:  # which the process's umask may have taken away
        os.chmod(path, mode)


class FolderDescriptors(threading.local):
    """The folders in which a call works: each opened for one call, or kept during a batch."""

    _kept: dict[str, int] | None = None
    _stale: Sequence[int] = ()

    def at(self, path: str, call: Callable[[int, str], T], open_folder: Callable[[str], int]) -> T:
        """Return what a call returns that is given the folder of a path, and the name in it.

        A folder that was kept may have been removed meanwhile, and made again: if the call does
        not find what it needs, it is made once more in the folder that is there now. What was
        removed stays open until the end of the batch: a call around this one may be using it.
        """
        folder, _, name = path.rpartition("/")
        folder = folder or "/"
        if name in {"", ".", ".."}:
            raise OSError(errno.EINVAL, "no name of a file", path)
        kept = self._kept
        if kept is None:
            fd = open_folder(folder)
            try:
                return call(fd, name)
            finally:
                os.close(fd)
        if folder in kept:
            fd = kept[folder] = kept.pop(folder)  # the last used at the end
            try:
                return call(fd, name)
            except FileNotFoundError:
                if kept.get(folder) == fd:  # else a call within this one has found it gone
                    self._stale = (*self._stale, kept.pop(folder))
        if folder not in kept:
            fd = open_folder(folder)
            if len(kept) == _KEPT_FOLDERS:
                os.close(kept.pop(next(iter(kept))))
            kept[folder] = fd
        return call(kept[folder], name)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Keep the last few folders that this thread uses meanwhile."""
        kept = self._kept = {}
        try:
            yield
        finally:
            stale, self._stale, self._kept = self._stale, (), None
            for fd in (*kept.values(), *stale):
                os.close(fd)


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def mapped(error: OSError) -> TierError:
    """Return the error as a tier reports it."""
    kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
    tier_error = kind(str(error))
    tier_error.__cause__ = error.with_traceback(None)  # its frames hold the primary's memory
    error.__context__ = None
    return tier_error


def unusable(root_dir: str, error: OSError) -> ConfigError:
    """Return the error of a tier whose directory cannot be used."""
    remedy = "give a directory that this process may write"
    if isinstance(error, (NotRegularFileError, NotADirectoryError)):
        remedy = "remove that, or give another directory"
    failure = ConfigError(f"root_dir: {root_dir!r} cannot be used ({error}); {remedy}")
    failure.__cause__ = error
    return failure


logger = logging.getLogger(__name__)


class DirectIo:
    """The flag for `open`. One of several threads may give up while others are in a call.

    Attributes:
        flag: `O_DIRECT`, or 0. Read it once an operation: `refused` is about that value.
    """

    def __init__(self, *, wanted: bool, where: str) -> None:
        """Start with what is wanted; `where` is for the warning."""
        self.flag = os.O_DIRECT if wanted else 0
        self._where = where

    def refused(self, flag: int, error: OSError) -> bool:
        """Tell whether an error means that `flag` does not work here; then it is given up.

        It can at the opening and at every transfer: alignment of memory and length is each
        filesystem's own.
        """
        if not flag or error.errno != errno.EINVAL:
            return False
        if self.flag:
            self.flag = 0
            logger.warning(
                "%s: direct I/O does not work here (%s); using the page cache",
                self._where,
                str(error),  # who keeps the log must not keep the frames
            )
        return True


Entry = tuple[str, os.stat_result]
"""A path, and what it is; a link is not followed."""

_NO_FILE: Final = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""What opening says of a link, a socket or pipe, a folder, a device."""

_ALWAYS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LIST_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH: Final = 16
"""No tier makes folders so deep; each that is walked takes a descriptor."""

_TRIES: Final = 8
"""How often a file may come and go while it is opened."""


class Tree:
    """What lies beneath the roots that were entered; elsewhere, and before, the root is `/`."""

    def __init__(self, opener: Opener | None = None) -> None:
        """Start at `/`; `opener` is used in place of the best that works."""
        self._folders = FolderDescriptors()
        self._opener = opener
        self._mutex = threading.Lock()
        self._roots: tuple[Root, ...] = ()

    def enter(self, path: str, modes: Modes, *, make: bool) -> None:
        """See `FileOps.enter`."""
        path = path.rstrip("/") or "/"
        if make:
            make_root(path, modes.of_folder())
        entered = Root(path, modes, self._opener)
        with self._mutex:  # the longest first, and of several with one name the newest
            roots = (entered, *self._roots)
            self._roots = tuple(sorted(roots, key=lambda root: len(root.path), reverse=True))

    def leave(self, path: str) -> None:
        """See `FileOps.leave`."""
        path = path.rstrip("/") or "/"
        with self._mutex:
            left = next((root for root in self._roots if root.path == path), None)
            self._roots = tuple(root for root in self._roots if root is not left)

    def locate(self, path: str) -> tuple[Root, str]:
        """See `FileOps.locate`."""
        for root in self._roots:
            if path.startswith(root.prefix):
                return root, path[len(root.prefix) :].lstrip("/") or "."
            if path == root.path:
                return root, "."
        if not path.startswith("/"):
            raise OSError(errno.EINVAL, "no absolute path", path)
        return Root("/", Modes(), self._opener), path.lstrip("/") or "."

    def at(self, path: str, call: Callable[[int, str], T]) -> T:
        """Return what a call returns that is given the folder of a path, and the name in it."""
        return self._folders.at(path, call, self.open_folder)

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """See `FileOps.batch`."""
        return self._folders.batch()

    # -- files ----------------------------------------------------------------------------------

    def open(self, path: str, flags: int) -> int:
        """See `FileOps.open`."""
        if not flags & os.O_CREAT:
            return self._open_there(path, flags)
        if flags & os.O_EXCL:
            return self._create(path, flags)
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._open_there(path, flags & ~os.O_CREAT)
            with contextlib.suppress(FileExistsError):
                return self._create(path, flags | os.O_EXCL)
        raise OSError(errno.EAGAIN, "the file comes and goes", path)

    def stat(self, path: str) -> os.stat_result:
        """Return what a path is, not following a link."""
        root, name = self.locate(path)
        if name == ".":
            return os.fstat(root.fd)
        return self.at(path, _stat)

    def move(self, source: str, target: str, call: Callable[[int, str, int, str], None]) -> None:
        """Make a call about a name in one folder and a name in another."""
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

    def make_folder(self, path: str) -> None:
        """See `FileOps.mkdir`."""
        modes = self.locate(path)[0].modes

        def make(folder_fd: int, name: str) -> None:
            folder = os.fstat(folder_fd)
            mode = modes.of_folder(folder)
            os.mkdir(name, mode & 0o777, dir_fd=folder_fd)
            if not mode & ~stat_module.S_IRWXU:
                return
            with contextlib.suppress(FileNotFoundError):  # others sweep empty folders
                fd = os.open(name, _LIST_FLAGS, dir_fd=folder_fd)
                try:
                    give_mode(fd, mode, folder, is_given=modes.dir_mode is not None)
                finally:
                    os.close(fd)

        self.at(path, make)

    def make_folders(self, path: str) -> None:
        """See `FileOps.make_folders`."""
        with contextlib.suppress(FileNotFoundError):
            os.close(self.open_folder(path))
            return
        self.make_folders(path.rpartition("/")[0] or "/")
        with contextlib.suppress(FileExistsError):
            self.make_folder(path)
        os.close(self.open_folder(path))

    def open_folder(self, path: str, flags: int = FOLDER_FLAGS) -> int:
        """Return a descriptor of a folder; NotADirectoryError if there is a link."""
        root, name = self.locate(path)
        try:
            return root.open(root.fd, name, flags)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                raise NotADirectoryError(
                    errno.ENOTDIR, "a link or file is in a folder's place", path
                ) from error
            error.filename = path
            raise

    def entries(self, folder: str) -> list[Entry]:
        """See `FileOps.entries`."""
        fd = self.open_folder(folder, _LIST_FLAGS)
        try:
            return list(_entries(fd, folder))
        finally:
            os.close(fd)

    def walk(self, folder: str) -> Iterator[Entry]:
        """See `FileOps.walk`."""
        try:
            fd = self.open_folder(folder, _LIST_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            yield from _walk(fd, folder, _MAX_DEPTH)
        finally:
            os.close(fd)


def _stat(folder_fd: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)


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
            try:
                yield from _walk(inner_fd, path, depth - 1)
            finally:
                os.close(inner_fd)


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
