"""Where tiers and floors write: new directories in one of this bench's own, removed at the end.

ext4 searches long for an inode where many were freed in the last minutes, which would slow down
those tiers that make one file per block, each round more than the one before. So what is in a
directory is emptied when it has been used, and removed only when everything is measured; and the
directories are spread over the disk, away from what others have removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvoffload_async.errors import InputError

WARM_UP: Final = 2
EXTENT_BYTES: Final = 1 << 20
"""What plain writes and reads move in a call: large enough, and a tier can join as much."""
_SPARE_BYTES: Final = 64 << 20

# Linux's FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL, as on x86 and ARM.
_LONG_BYTES: Final = struct.calcsize("l")
_GET_FLAGS: Final = 2 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 1
_SET_FLAGS: Final = 1 << 30 | _LONG_BYTES << 16 | ord("f") << 8 | 2
_TOP_DIRECTORY: Final = 0x20000


class Place:
    """A directory that is measured in; a context manager that leaves it as it was."""

    def __init__(self, directory: str | None, key: str) -> None:
        """Name it; nothing is made yet.

        Args:
            directory: Where to write; None for the system's temporary directory.
            key: What the directory is called where the user gives it.
        """
        self.path = Path(directory or tempfile.gettempdir()).absolute()
        self._key = key
        self._stack = ExitStack()
        self._own: Path  # made by `__enter__`

    def __enter__(self) -> Self:
        """Make a directory in it, and before that what is missing of itself.

        Raises:
            InputError: That is not possible.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        for path in reversed(missing):
            self._stack.callback(_remove_if_empty, path)
        with ExitStack() as undo, self._as_unusable("cannot write to"):
            undo.push(self._stack)
            self.path.mkdir(parents=True, exist_ok=True)
            own = tempfile.TemporaryDirectory(
                prefix="kvoffload-bench-", dir=self.path, ignore_cleanup_errors=True
            )
            self._own = Path(self._stack.enter_context(own))
            _spread(self._own)
            undo.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def device(self) -> int:
        """Which filesystem it is on."""
        return self.path.stat().st_dev

    def check_room(self, needed_bytes: int) -> None:
        """Find out now rather than in the middle of a round.

        Raises:
            InputError: There is too little free space.
        """
        needed_bytes += _SPARE_BYTES
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < needed_bytes:
            raise InputError(
                f"{self._key}: {str(self.path)!r} has {free_bytes} bytes free and a round needs "
                f"{needed_bytes}; make room, name another directory, or use fewer --total-bytes"
            )

    def warm_up(self, content: memoryview, num_bytes: int) -> None:
        """Write and remove more than is about to be stored: `WARM_UP` times `num_bytes`.

        A virtual machine may have given its free memory back, and then needs ten times as long for
        a page of the cache that it touches first. So that nobody pays for whose turn it is, the
        pages are touched before every turn; the kernel does not hand out exactly the last ones.

        Raises:
            InputError: It cannot be written.
        """
        with (
            self.new_directory() as directory,
            self._as_unusable("cannot write to"),
            Path(directory, "warm-up").open("wb", buffering=0) as file,
        ):
            for start in range(0, WARM_UP * num_bytes, EXTENT_BYTES):
                offset = start % content.nbytes
                file.write(content[offset : offset + EXTENT_BYTES])

    @contextmanager
    def new_directory(self) -> Iterator[str]:
        """Make an empty directory for one use; what is in it is emptied afterwards.

        Raises:
            InputError: It cannot be made.
        """
        with self._as_unusable("cannot write to"):
            directory = tempfile.mkdtemp(dir=self._own)
        try:
            yield directory
        finally:
            for folder, _, names in os.walk(directory):
                for name in names:
                    os.truncate(Path(folder, name), 0)

    @contextmanager
    def _as_unusable(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._key}: {what} {str(self.path)!r} ({error.strerror}); name another"
            ) from error


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # never made, or somebody else has put something there meanwhile
        path.rmdir()


def _spread(path: Path) -> None:
    """Have ext4 treat the directories in this one as unrelated, as it does those in its root."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # other filesystems know no such flag
            flags = struct.unpack("l", fcntl.ioctl(folder, _GET_FLAGS, bytes(_LONG_BYTES)))[0]
            fcntl.ioctl(folder, _SET_FLAGS, struct.pack("l", flags | _TOP_DIRECTORY))
    finally:
        os.close(folder)
