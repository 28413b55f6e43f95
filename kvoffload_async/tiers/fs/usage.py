"""How many bytes a namespace takes on disk, counted together by all the tiers that are open on it.

A small file, changed under an advisory lock: what is settled (files and folders that are there)
and what each writer has set aside for blocks that it is writing. Room is set aside before a byte
is written and given back after, so that the sum never exceeds the capacity. One locked change
before a job and one after it, whatever its size.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvoffload_async.tiers.fs.ops import FileOps

FILE_NAME = ".usage"
_MAX_BYTES = 1 << 16


@dataclass(slots=True)
class Usage:
    """The shared count.

    Attributes:
        settled_bytes: Files and folders that are there.
        reserved_bytes: What each writer has set aside.
    """

    settled_bytes: int = 0
    reserved_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """What counts against the capacity."""
        return self.settled_bytes + sum(self.reserved_bytes.values())


class UsageFile:
    """The shared count's file."""

    def __init__(
        self, ops: FileOps, namespace_folder: str, writer_id: str, count_disk: Callable[[], int]
    ) -> None:
        """Describe where; `count_disk` counts anew if the file is unreadable."""
        self._ops = ops
        self._path = f"{namespace_folder}/{FILE_NAME}"
        self._writer_id = writer_id
        self._count_disk = count_disk
        self._fd: int | None = None

    def open(self) -> None:
        """Open or make the file."""
        self._fd = self._ops.open(self._path, os.O_RDWR | os.O_CREAT)

    def close(self) -> None:
        """Give back what this writer had set aside, and close; idempotent."""
        if self._fd is None:
            return
        try:
            with self._changed() as usage:
                usage.reserved_bytes.pop(self._writer_id, None)
        finally:
            fd, self._fd = self._fd, None
            self._ops.close(fd)

    def reserve(self, block_bytes: int, count: int, capacity_bytes: int) -> int:
        """Set room aside for up to `count` blocks; return for how many there was room."""
        with self._changed() as usage:
            room = max(0, capacity_bytes - usage.total_bytes) // block_bytes
            granted = min(count, room)
            mine = usage.reserved_bytes.get(self._writer_id, 0)
            usage.reserved_bytes[self._writer_id] = mine + granted * block_bytes
        return granted

    def settle(self, released_bytes: int, settled_bytes: int) -> Usage:
        """Give back room that was set aside, and count what became of it; return the count."""
        with self._changed() as usage:
            mine = usage.reserved_bytes.get(self._writer_id, 0) - released_bytes
            usage.reserved_bytes[self._writer_id] = max(0, mine)
            usage.settled_bytes = max(0, usage.settled_bytes + settled_bytes)
        return usage

    def start(self, disk_bytes: int, living: Iterable[str]) -> Usage:
        """Take over the count at the start of a tier.

        A sole tier sets it to what is on disk; beside living writers their count goes on, and
        only what dead ones had set aside is given back.
        """
        others = set(living)
        with self._changed() as usage:
            usage.reserved_bytes = {
                writer: size for writer, size in usage.reserved_bytes.items() if writer in others
            }
            if not others:
                usage.settled_bytes = disk_bytes
        return usage

    def read(self) -> Usage:
        """Return the count."""
        with self._changed() as usage:
            pass
        return usage

    @contextlib.contextmanager
    def _changed(self) -> Iterator[Usage]:
        if self._fd is None:
            raise OSError(f"{self._path} is closed")
        self._ops.lock(self._fd, wait=True)
        try:
            buffer = bytearray(_MAX_BYTES)
            count = self._ops.pread_into(self._fd, memoryview(buffer), 0)
            usage = _parsed(bytes(buffer[:count])) or Usage(self._count_disk())
            yield usage
            text = json.dumps([usage.settled_bytes, usage.reserved_bytes]).encode()
            self._ops.pwrite(self._fd, memoryview(text), 0)
            if len(text) < count:
                # A crash before this line leaves a tail that does not parse: counted anew.
                self._ops.truncate(self._fd, len(text))
        finally:
            self._ops.unlock(self._fd)


def _parsed(text: bytes) -> Usage | None:
    try:
        settled, reserved = json.loads(text)
        return Usage(int(settled), {str(k): int(v) for k, v in reserved.items()})
    except (ValueError, TypeError, AttributeError):
        return None
