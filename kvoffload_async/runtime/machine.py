"""What this machine has, and what of it a process may use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that the surroundings set.

    Attributes:
        size_bytes: How much there can be at most.
        name: What it is, for messages.
    """

    size_bytes: int
    name: str


def memory_limit(root: Path = Path("/")) -> Limit | None:
    """Return the tightest bound on this process's memory: the machine's, or a control group's.

    Args:
        root: Where `proc` and `sys` lie.

    Returns:
        None if the system does not say.
    """
    return min(_memory_limits(root), key=lambda limit: limit.size_bytes, default=None)


def _memory_limits(root: Path) -> Iterator[Limit]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield Limit(int(value.split()[0]) * 1024, "this machine's memory")
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif number == "0":
            mount, file = root / "sys/fs/cgroup", "memory.max"
        else:
            continue
        # In a container the path may be the host's: then only what is mounted can be asked.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                for limit in _lines(folder / file):
                    if limit.isdecimal():
                        yield Limit(int(limit), "the memory limit of its control group")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not there, or not ours to read
        return []


def filesystem_limit(directory: str) -> Limit | None:
    """Return the size of the filesystem that a directory is on; None if it has none."""
    found = os.statvfs(directory)
    size_bytes = found.f_blocks * found.f_frsize
    return Limit(size_bytes, f"the filesystem of {directory!r}") if size_bytes else None


class _Answer(Generic[T]):
    """What a call came to; empty until then."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.values: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.values.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised on the thread that waits
            self.error = error


def answered(call: Callable[[], T], timeout_s: float) -> T:
    """Return what a system call says, however long it would hang: on a dead mount, for ever.

    Raises:
        TimeoutError: It has not ended in time; it is left to itself.
    """
    answer = _Answer(call)
    thread = threading.Thread(target=answer.run, name="kvoffload-ask", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if answer.error is not None:
        raise answer.error
    if not answer.values:
        raise TimeoutError(f"no answer within {timeout_s} s")
    return answer.values[0]
