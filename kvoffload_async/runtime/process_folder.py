"""A temporary folder for blocks that only this process may use."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.lifetime import guard_forks
from kvoffload_async.tiers.files.ops import FileOps

logger = logging.getLogger(__name__)

_PREFIX: Final = "process-"
_NAME: Final = re.compile(_PREFIX + r"[0-9a-f]{32}")
_LOCK: Final = "in-use"
_TRIES: Final = 10
_ops: Final = FileOps()
"""File operations, with locks that a forked child does not inherit."""


class ProcessFolder:
    """A folder `<root>/process-<random>`, removed by `close` or, after a kill, by another process.

    Creating a folder first removes those of dead processes. A living process holds a lock on the
    file `in-use` in its folder. The system releases the lock when the process dies, so a folder
    whose lock is free can be removed.

    Attributes:
        path: Path of the folder.
    """

    def __init__(self, root_dir: str) -> None:
        """Create the folder.

        Raises:
            ConfigError: The directory is unusable.
        """
        root = Path(root_dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for folder in root.iterdir():
                _remove_if_dead(folder)
            self.path, self._lock_fd = _make(root)
        except OSError as error:
            raise ConfigError(
                f"root_dir: {root_dir!r} cannot be used: {error}; an unknown model needs a "
                'directory with file locks, unless the tier has a "fingerprint"'
            ) from error
        guard_forks(self, _lock_fd=None)

    def close(self) -> None:
        """Remove the folder; idempotent. Errors are logged."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is None:
            return
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.path, error)
        finally:
            _ops.close(fd)


def _make(root: Path) -> tuple[str, int | None]:
    """Return a new folder and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        path = root / f"{_PREFIX}{secrets.token_hex(16)}"
        path.mkdir(mode=0o700)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            fd = os.open(path / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            undo.callback(_ops.close, fd)
            # Another process may have removed the folder before it was locked.
            if _ops.lock(fd, wait=False) and os.fstat(fd).st_nlink:
                undo.pop_all()
                return str(path), fd
    raise OSError(errno.EAGAIN, "other processes removed each folder before it was locked")


def _remove_if_dead(folder: Path) -> None:
    if not _NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # being created, or not a folder of this package
    try:
        # A held lock belongs to a living process. This package locks only regular files.
        if stat.S_ISREG(os.fstat(fd).st_mode) and _ops.lock(fd, wait=False):
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s of a dead process could not be removed: %s", folder, error)
    finally:
        _ops.close(fd)
