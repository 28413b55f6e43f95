"""Permissions of files and folders: private, unless configured or implied by the directory.

In an existing directory, new entries are accessible to the group as far as the directory is, and to
everyone only if everyone may write to the directory, since otherwise it cannot be shared with them.
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
"""Permission bits that a umask may remove, and which are therefore set explicitly."""

_READ_BITS: Final = 0o444
NO_MODES: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Modes:
    """Permissions of new files and folders; by default derived from the parent directory.

    Attributes:
        file_mode: Mode of new files; whoever may read them may search new folders.
    """

    file_mode: int | None = None

    def of_file(self, folder: os.stat_result) -> int:
        """Return the mode of a new file in a folder."""
        if self.file_mode is not None:
            return self.file_mode
        return stat_module.S_IRUSR | stat_module.S_IWUSR | _shared_bits(folder) & 0o066

    def of_folder(self, folder: os.stat_result | None = None) -> int:
        """Return the mode of a new folder, derived from its parent `folder` if given."""
        if self.file_mode is not None:
            return self.file_mode | (self.file_mode & _READ_BITS) >> 2
        return stat_module.S_IRWXU | (_shared_bits(folder) if folder else 0)


def _shared_bits(folder: os.stat_result) -> int:
    mode = folder.st_mode
    is_everybodys = mode & stat_module.S_IWOTH and not mode & stat_module.S_ISVTX
    return mode & (OTHERS_BITS if is_everybodys else stat_module.S_IRWXG)


def give_mode(fd: int, mode: int, folder: os.stat_result, *, is_given: bool) -> None:
    """Set the mode of a new file or folder in `folder`, regardless of the umask.

    A derived mode is meant for the parent's group: an entry with another group is changed to that
    group or, if not permitted, loses its group permissions.
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
        if error.errno not in NO_MODES:  # e.g. on vfat, where all files have one mode
            raise


def warn_of_others(path: str, folder: os.stat_result) -> None:
    """Warn if other users may write to a directory: they can remove or replace blocks."""
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
