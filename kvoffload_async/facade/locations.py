"""Checks of the directories that tiers keep blocks in, before anything is created there.

Nothing here changes the disk. Directories are compared by device and inode, so that two names of
one directory are recognised through symbolic links and bind mounts.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvoffload_async.abc.tier import TierLocation
from kvoffload_async.config import shown
from kvoffload_async.errors import ConfigError, TierTimeoutError, TierUnavailableError
from kvoffload_async.runtime.helper_thread import answered
from kvoffload_async.runtime.machine import filesystem_limit, memory_limit

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Timeout in seconds for a filesystem to respond."""

_MAX_NAME_BYTES: Final = 255
_MAX_PATH_BYTES: Final = 3072
"""Maximum bytes of a directory's path; Linux allows 4095, the rest is for paths below it."""

_NO_STORAGE: Final = frozenset(
    {"bpf", "cgroup", "cgroup2", "debugfs", "devpts", "proc", "securityfs", "sysfs", "tracefs"}
)
"""Virtual filesystems of the kernel, which store no files even if they are writable."""

_MEMORY: Final = frozenset({"ramfs", "tmpfs"})
"""Filesystems whose files count as memory of the control group that writes them."""

_GONE_AWAY: Final = frozenset({errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ESTALE})
"""Errors of a filesystem that is unreachable now; the configuration may be valid."""

Identity = tuple[int, int, tuple[str, ...]]
"""Device and inode of an existing directory, and the names below it that do not exist yet."""


@dataclass(frozen=True, slots=True)
class Ground:
    """The location of a tier's directory, which may not exist yet.

    Attributes:
        path: The tier's directory or its nearest existing parent, without symbolic links.
        status: Status of `path`.
        size_bytes: Size of its filesystem; None if the filesystem reports no size.
        is_memory: Whether its files are in memory.
        above: Identities of the tier's directory and of all its parents.
    """

    path: str
    status: os.stat_result
    size_bytes: int | None
    is_memory: bool
    above: tuple[Identity, ...]


def examine(location: TierLocation) -> Ground:
    """Examine the filesystem of a tier's directory; waits at most `ANSWER_S` seconds.

    Raises:
        ConfigError: The directory cannot be created or is not writable.
        TierUnavailableError: Its filesystem cannot be reached.
        TierTimeoutError: Its filesystem does not answer.
    """
    what = f"{location.key}: {shown(location.path)}"
    _check_name(location.path, what)
    try:
        return answered(lambda: _examine(location.path, what), ANSWER_S)
    except TimeoutError as error:
        raise TierTimeoutError(f"{what}: its filesystem does not answer ({error})") from error
    except OSError as error:
        if error.errno in _GONE_AWAY:
            raise TierUnavailableError(f"{what} cannot be reached ({error.strerror})") from error
        raise ConfigError(
            f"{what} cannot be used ({error.strerror}); give a directory that this process may "
            "write"
        ) from error


def check_locations(locations: Sequence[tuple[str, TierLocation]], memory_bytes: int = 0) -> None:
    """Check that each directory can be used, and that no two tiers share one.

    Warns if the memory that the engine will take is more than it may.

    Args:
        locations: The locations, each with the tier's prefix in messages; empty for a single tier.
        memory_bytes: Memory of the primary.

    Raises:
        ConfigError: A directory cannot be used, is too small, or overlaps with another tier's.
        TierUnavailableError: A filesystem does not answer.
    """
    examined: list[tuple[str, TierLocation, Ground | None]] = []
    for owner, location in locations:
        try:
            ground = examine(location) if Path(location.path).is_absolute() else None
        except (ConfigError, TierUnavailableError) as error:
            raise type(error)(f"{owner}{error}") from (error.__cause__ or error)
        for other_owner, other, other_ground in examined:
            if other_owner != owner and _collide(location, ground, other, other_ground):
                raise ConfigError(
                    f"{owner}{location.key}: {location.path!r} is where "
                    f"{other_owner.rstrip(': ')} keeps its blocks ({other.path!r}), or lies above "
                    "or below that; give each tier a directory of its own"
                )
        examined.append((owner, location, ground))
    _check_capacities(examined)
    _warn_of_memory(memory_bytes, examined)


# -- internal -----------------------------------------------------------------------------------


def _check_name(path: str, what: str) -> None:
    try:
        size_bytes = len(os.fsencode(path))
    except UnicodeEncodeError:
        size_bytes = 0
    if not size_bytes or "\0" in path:
        raise ConfigError(f"{what} is no path that the system can take; give another")
    if size_bytes > _MAX_PATH_BYTES:
        raise ConfigError(f"{what} is too long; give a path of {_MAX_PATH_BYTES} bytes at most")


def _examine(path: str, what: str) -> Ground:
    resolved = Path(os.path.realpath(path))
    base, missing = resolved, list[str]()
    while True:
        try:
            status = base.stat()
            break
        except (FileNotFoundError, NotADirectoryError):
            missing.insert(0, base.name)
            base = base.parent
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{what} cannot be made: {str(base)!r} is no directory; give another"
        ) from NotADirectoryError(errno.ENOTDIR, "not a directory")
    for name in missing:
        if len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise ConfigError(
                f"{what} cannot be made: a name has at most {_MAX_NAME_BYTES} bytes; give another"
            )
    kind = _kind_of(status.st_dev)
    if kind in _NO_STORAGE:
        raise ConfigError(f"{what} is on a filesystem that keeps no files ({kind}); give another")
    if not os.access(base, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{what} cannot be used: {str(base)!r} is not writable for this process; give a "
            "directory that is"
        ) from PermissionError(errno.EACCES, "not writable")
    limit = filesystem_limit(str(base))
    depths = range(len(missing), -1, -1)
    above = [(status.st_dev, status.st_ino, tuple(missing[:depth])) for depth in depths]
    for parent in base.parents:
        found = parent.stat()
        above.append((found.st_dev, found.st_ino, ()))
    size_bytes = limit.size_bytes if limit else None
    return Ground(str(base), status, size_bytes, kind in _MEMORY, tuple(above))


def _kind_of(device: int) -> str:
    """Return the type of a mounted filesystem; empty if it is unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for mount in _mounts():
        fields = mount.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""


def _mounts() -> Iterator[str]:
    try:
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            yield from mounts
    except OSError:  # a system without /proc
        return


def _collide(
    location: TierLocation, ground: Ground | None, other: TierLocation, other_ground: Ground | None
) -> bool:
    if not (location.is_exclusive or other.is_exclusive):
        return False
    if ground is None or other_ground is None:
        return location.path == other.path
    return ground.above[0] in other_ground.above or other_ground.above[0] in ground.above


def _check_capacities(examined: Sequence[tuple[str, TierLocation, Ground | None]]) -> None:
    """Check that the capacities of all tiers on a filesystem do not exceed its size in total."""
    sums: dict[int, int] = {}
    for owner, location, ground in examined:
        if ground is None or ground.size_bytes is None or location.capacity_bytes is None:
            continue
        others_bytes = sums.get(ground.status.st_dev, 0)
        total_bytes = sums[ground.status.st_dev] = others_bytes + location.capacity_bytes
        if total_bytes > ground.size_bytes:
            others = f" and the {others_bytes} bytes of the tiers before it" if others_bytes else ""
            raise ConfigError(
                f"{owner}capacity_bytes: {location.capacity_bytes}{others} do not fit on the "
                f"filesystem of {ground.path!r}, which has {ground.size_bytes} bytes; give less"
            )


def _warn_of_memory(
    memory_bytes: int, examined: Sequence[tuple[str, TierLocation, Ground | None]]
) -> None:
    """Warn if the primary and in-memory tiers together exceed this process's memory limit."""
    parts = [("cpu_bytes_to_use", memory_bytes)] if memory_bytes else []
    parts += [
        (f"{owner}{location.path}", location.capacity_bytes)
        for owner, location, ground in examined
        if location.capacity_bytes and (location.is_memory or (ground and ground.is_memory))
    ]
    limit = memory_limit()
    if limit is not None and sum(size_bytes for _, size_bytes in parts) > limit.size_bytes:
        logger.warning(
            "%s are together more than %s, which is %d bytes; use less of them, or the system will "
            "kill this process when they are full",
            " and ".join(f"{size_bytes} bytes of memory for {name}" for name, size_bytes in parts),
            limit.name,
            limit.size_bytes,
        )
