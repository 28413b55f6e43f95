"""A folder for blocks that nobody but this process may ever be served."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import Final

from kvoffload_async.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIX: Final = "process-"
_NAME: Final = re.compile(_PREFIX + r"[0-9a-f]{32}")
_LOCK: Final = "in-use"
_TRIES: Final = 10


class ProcessFolder:
    """`<root>/process-<random>`, removed when it is closed, or later if the process was killed.

    Whoever makes one removes those of dead processes first. A living process holds a lock on the
    file `in-use` in its folder, which the system releases when the process dies, so a lock that can
    be taken belongs to nobody any more.

    Attributes:
        path: The folder.
    """

    def __init__(self, root_dir: str) -> None:
        """Make the folder.

        Raises:
            ConfigError: The directory cannot be used.
        """
        root = Path(root_dir)
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_dead(root)
            self.path, self._lock_fd = _make(root)
        except OSError as error:
            raise ConfigError(
                f"root_dir: {root_dir!r} cannot be used: {error}; blocks for one process need a "
                'directory with file locks, and a tier with a "fingerprint" does not need any'
            ) from error

    def close(self) -> None:
        """Remove the folder; idempotent. What cannot be removed is warned of."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is None:
            return
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.path, error)
        finally:
            os.close(fd)


def _make(root: Path) -> tuple[str, int | None]:
    """Return a new folder, and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        path = root / f"{_PREFIX}{secrets.token_hex(16)}"
        path.mkdir(mode=0o700)
        fd = None
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            fd = os.open(path / _LOCK, flags, 0o600)
            # Somebody may have come in between, and taken the folder for a dead process's.
            if _try_lock(fd) and os.fstat(fd).st_nlink:
                return str(path), fd
        except OSError:
            if fd is not None:
                os.close(fd)
            shutil.rmtree(path, ignore_errors=True)
            raise
        os.close(fd)
    raise OSError(errno.EAGAIN, "others remove each folder before it is locked")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_dead(root: Path) -> None:
    for folder in root.iterdir():
        if _NAME.fullmatch(folder.name) and not folder.is_symlink() and folder.is_dir():
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # being made at this moment, or not one of ours
    try:
        # A lock that is held belongs to a living process; what is no file, to nobody of ours.
        if stat.S_ISREG(os.fstat(fd).st_mode) and _try_lock(fd):
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s of a dead process could not be removed: %s", folder, error)
    finally:
        os.close(fd)
