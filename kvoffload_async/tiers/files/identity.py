"""Identity of the current boot, and of a tier's directory.

Writes of an earlier boot may have been lost. Writes below a path that was unmounted, or into a file
that was deleted, succeed without an error but are not found again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.tiers.files.ops import FileOps


def boot_id() -> str:
    """Return the kernel's boot id; the host name if unavailable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


class LostDirectoryError(OSError):
    """A tier's directory, or a file in it, was deleted or replaced; the text names the remedy."""


class DirectoryIdentity:
    """Identity of an opened directory, to detect its replacement. Thread: an I/O thread."""

    def __init__(self, ops: FileOps, path: str) -> None:
        """Record the identity of the directory at a path, which is in an entered root.

        Raises:
            OSError: Its status cannot be read.
        """
        self._ops = ops
        self._path = path
        opened = ops.stat(path)
        self._identity = opened.st_dev, opened.st_ino
        self._watched: list[tuple[int, str]] = []

    def watch(self, fd: int, name: str) -> None:
        """Have `check` also check that this open file was not deleted."""
        self._watched.append((fd, name))

    def check(self) -> None:
        """Check that the path still leads to the same directory, and no watched file was deleted.

        Raises:
            LostDirectoryError: The directory or a file was lost.
            OSError: The status cannot be read.
        """
        try:
            found = self._ops.leads_to(self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._lost("it was deleted") from error
        if (found.st_dev, found.st_ino) != self._identity:
            raise self._lost("it is another directory or filesystem now")
        for fd, name in self._watched:
            self.check_file(fd, name)

    def check_file(self, fd: int, name: str) -> None:
        """Check that an open file of the directory was not deleted; raises like `check`."""
        if not self._ops.fstat(fd).st_nlink:
            raise self._lost(f"{name} was deleted")

    def once(self) -> Callable[[], None]:
        """Return a check for one job, made at the first call and repeated only after failures.

        It raises TierUnavailableError for every errno: a lost directory is not a full disk.
        """

        @cache
        def check() -> None:
            try:
                self.check()
            except OSError as error:
                raise TierUnavailableError(str(error)) from error

        return check

    def _lost(self, why: str) -> LostDirectoryError:
        return LostDirectoryError(
            f"root_dir: {self._path!r} is not the opened directory any more ({why}): "
            "mount it again, or restart the engine to use what is there"
        )
