"""Memory and disk limits of this machine and process."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvoffload_async.errors import InputError
from kvoffload_async.system_calls import REFUSALS

T = TypeVar("T")


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
        # In a container the path may be the host's: then only mounted groups are readable.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount):
                for limit in _lines(folder / file):
                    if limit.isdecimal():
                        yield Limit(int(limit), "the memory limit of its control group")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # missing or not readable
        return []


def filesystem_limit(directory: str) -> Limit | None:
    """Return the size of a directory's filesystem; None if it reports none."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return None
    size_bytes = found.f_blocks * found.f_frsize
    return Limit(size_bytes, f"the filesystem of {directory!r}") if size_bytes else None


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


def answered(call: Callable[[], T], timeout_s: float) -> T:
    """Return the result of a system call that may hang forever, for example on a dead mount.

    Raises:
        TimeoutError: It did not end in time; it continues on its thread.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            answer.set_exception(error)

    threading.Thread(target=run, name="kvoffload-ask", daemon=True).start()
    if not wait([answer], timeout_s).done:
        raise TimeoutError(f"no response within {timeout_s} s")
    return answer.result()
