"""The directory that a tier works in, as a descriptor, and those of folders beneath it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from kvoffload_async.tiers.files.beneath import Opener, suitable_opener
from kvoffload_async.tiers.files.modes import OTHERS_BITS, Modes

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
