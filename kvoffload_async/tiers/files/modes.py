"""Who may read and write what a tier makes: nobody else, unless told so, or by the directory.

A directory that exists keeps its way: what is made in it is for its group as far as the directory
itself is, and for everybody only where everybody may write to it, as no other directory can be
shared with them.
"""

from __future__ import annotations

import errno
import logging
import os
import stat as stat_module
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

OTHERS_BITS: Final = 0o077
"""What the process's umask may take away, and is given by name therefore."""

_NO_MODES: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Modes:
    """The permissions of what is made; what is not given follows from the directory above.

    Attributes:
        file_mode: Of new files.
        dir_mode: Of new directories.
    """

    file_mode: int | None = None
    dir_mode: int | None = None

    def of_file(self, folder: os.stat_result) -> int:
        """Return the permissions of a new file in a folder."""
        if self.file_mode is not None:
            return self.file_mode
        return stat_module.S_IRUSR | stat_module.S_IWUSR | _shared_bits(folder) & 0o066

    def of_folder(self, folder: os.stat_result | None = None) -> int:
        """Return the permissions of a new directory in one that keeps its way, or in any other."""
        if self.dir_mode is not None:
            return self.dir_mode
        return stat_module.S_IRWXU | (_shared_bits(folder) if folder else 0)


def _shared_bits(folder: os.stat_result) -> int:
    mode = folder.st_mode
    is_everybodys = mode & stat_module.S_IWOTH and not mode & stat_module.S_ISVTX
    return mode & (OTHERS_BITS if is_everybodys else stat_module.S_IRWXG)


def give_mode(fd: int, mode: int, folder: os.stat_result, *, is_given: bool) -> None:
    """Set the permissions of what was just made in a folder, whatever the process's umask is.

    Where they follow from the folder they are meant for the folder's group: what has another one
    gets that, or else nothing for its own.
    """
    made = os.fstat(fd)
    if mode & stat_module.S_IRWXG and made.st_gid != folder.st_gid and not is_given:
        try:
            os.fchown(fd, -1, folder.st_gid)
        except OSError:
            mode &= ~stat_module.S_IRWXG
    try:
        os.fchmod(fd, mode | made.st_mode & stat_module.S_ISGID)
    except OSError as error:
        if error.errno not in _NO_MODES:  # such as vfat, where all files have one mode
            raise


def warn_of_others(path: str, folder: os.stat_result) -> None:
    """Warn if others may write to a directory: they can take blocks away, or put others there."""
    reasons = []
    if folder.st_uid not in {0, os.geteuid()}:
        reasons.append(f"it belongs to user {folder.st_uid}")
    if folder.st_mode & (stat_module.S_IWGRP | stat_module.S_IWOTH):
        reasons.append(f"its mode is {stat_module.S_IMODE(folder.st_mode):04o}")
    if reasons:
        logger.warning(
            "root_dir: others may write to %r (%s): they can remove or replace blocks",
            path,
            " and ".join(reasons),
        )
