"""Files and folders beneath a tier's root, by their paths: opened, made, moved, removed.

A path is absolute, and is resolved from a descriptor of the root that it begins with: no symbolic
link is followed, and nothing but a regular file is opened as one. Thread: any.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_module
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from kvoffload_async.tiers.files.beneath import FOLDER_FLAGS, Opener
from kvoffload_async.tiers.files.modes import OTHERS_BITS, Modes, give_mode
from kvoffload_async.tiers.files.roots import (
    FolderDescriptors,
    NotRegularFileError,
    Root,
    make_root,
)

T = TypeVar("T")

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
