"""Which boot of which kernel this is, and whether a tier's directory is still the one it opened.

What was written in another boot may have been lost. A path that leads elsewhere after an unmount
takes files without an error, and so does an open file that was deleted: nobody would find them
again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.tiers.files.ops import FileOps


def boot_id() -> str:
    """Return what is unique to this boot of this kernel; the host's name where there is nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


class LostDirectoryError(OSError):
    """The directory of a tier, or a file in it, is not there any more; names the remedy."""


class DirectoryIdentity:
    """Remembers which directory was opened. Thread: an I/O thread."""

    def __init__(self, ops: FileOps, path: str) -> None:
        """Remember the directory at a path, which is the root or beneath it; raises OSError."""
        self._ops = ops
        self._path = path
        opened = ops.stat(path)
        self._identity = opened.st_dev, opened.st_ino
        self._watched: list[tuple[int, str]] = []

    def watch(self, fd: int, name: str) -> None:
        """Have `check` look after an open file of the directory as well."""
        self._watched.append((fd, name))

    def check(self) -> None:
        """Check that the path leads there still, and that no watched file was deleted.

        Raises:
            LostDirectoryError: It does not.
            OSError: That cannot be told now.
        """
        try:
            found = self._find()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._lost("it is gone") from error
        if found != self._identity:
            raise self._lost("another directory or filesystem is in its place")
        for fd, name in self._watched:
            self.check_file(fd, name)

    def check_file(self, fd: int, name: str) -> None:
        """Check that an open file of the directory was not deleted; raises as `check` does."""
        if not self._ops.fstat(fd).st_nlink:
            raise self._lost(f"{name} was deleted")

    def once(self) -> Callable[[], None]:
        """Return a check for one job: made by the first call, again only if that failed.

        It raises TierUnavailableError, of whatever number the error is: a fault, no want of room.
        """
        unchecked = [self]

        def check() -> None:
            if unchecked:
                try:
                    self.check()
                except OSError as error:
                    raise TierUnavailableError(str(error)) from error
                unchecked.clear()

        return check

    def _find(self) -> tuple[int, int]:
        status = self._ops.leads_to(self._path)
        return status.st_dev, status.st_ino

    def _lost(self, why: str) -> LostDirectoryError:
        return LostDirectoryError(
            f"root_dir: {self._path!r} is not what was opened any more ({why}): "
            "mount it again, or restart the engine to begin with what is there"
        )
