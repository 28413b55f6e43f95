"""Memory and disk limits of this machine and process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvoffload_async.errors import InputError
from kvoffload_async.limits import group_limits, lines
from kvoffload_async.system_calls import REFUSALS


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory or disk limit of this machine or container.

    Attributes:
        size_bytes: The limit.
        name: Its name, for messages.
    """

    size_bytes: int
    name: str


def memory_limit(root: Path = Path("/")) -> Limit | None:
    """Return the lowest limit on this process's memory: the machine's or a control group's.

    Args:
        root: Directory that contains `proc` and `sys`.

    Returns:
        None if unknown.
    """
    return min(_memory_limits(root), key=lambda limit: limit.size_bytes, default=None)


def _memory_limits(root: Path) -> Iterator[Limit]:
    for line in lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield Limit(int(value.split()[0]) * 1024, "this machine's memory")
    files = {1: "memory.limit_in_bytes", 2: "memory.max"}
    for _file, limit in group_limits("memory", files, root):
        yield Limit(limit, "the memory limit of its control group")


def filesystem_limit(directory: str) -> Limit | None:
    """Return the size of a directory's filesystem; None if it reports no size."""
    if (space := space_of(directory)) is None:
        return None
    return Limit(space.f_blocks * space.f_frsize, f"the filesystem of {directory!r}")


def space_of(directory: str | Path) -> os.statvfs_result | None:
    """Return the `statvfs` of a directory's filesystem; None if it has no or an unknown size."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return None
    return found if found.f_blocks else None


def temporary_directory() -> str:
    """Return the directory for temporary files.

    Raises:
        InputError: There is none that this process can write.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise InputError(
            f"{error.strerror}; set TMPDIR to a directory that this process can write"
        ) from error
