"""How many bytes a namespace takes on disk, counted together by all the tiers that are open on it.

A small file, changed under an advisory lock: what is settled (files and folders that are there),
what each writer has set aside for blocks that it is writing, and how much was changed in all. Room
is set aside before a byte is written and given back after, so that the sum never exceeds the
capacity. One locked change before a job and one after it, whatever its size.

What this writer has set aside and has changed is kept here too, so that a change of the file that
fails is made up for by the next one.

Thread: an I/O thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kvoffload_async.tiers.files.locks import LOCK_TIMEOUT_S, LockedFile, locked
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.outcome import DiskChange

FILE_NAME = ".usage"
_MAX_BYTES = 1 << 16


@dataclass(slots=True)
class Usage:
    """The shared count.

    Attributes:
        settled_bytes: Files and folders that are there.
        reserved_bytes: What each writer has set aside; every writer that counts is in it.
        changed_bytes: What was added and removed since the beginning, both taken positive.
    """

    settled_bytes: int = 0
    reserved_bytes: dict[str, int] = field(default_factory=dict)
    changed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What counts against the capacity."""
        return self.settled_bytes + self.all_reserved_bytes

    @property
    def all_reserved_bytes(self) -> int:
        """What is set aside by all writers together."""
        return sum(self.reserved_bytes.values())


class UsageFile:
    """The shared count's file."""

    def __init__(
        self,
        ops: FileOps,
        namespace_folder: str,
        writer_id: str,
        count_disk: Callable[[], int],
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        """Describe where; `count_disk` counts anew if the file is unreadable."""
        self._ops = ops
        self._path = f"{namespace_folder}/{FILE_NAME}"
        self._writer_id = writer_id
        self._count_disk = count_disk
        self._file = LockedFile(ops, self._path, timeout_s=lock_timeout_s)
        self._is_open = False
        self._entry_bytes = 0
        self._reserved_bytes = 0
        self._untold = DiskChange()
        self._ended: deque[tuple[int, DiskChange]] = deque()
        """What jobs have given back and done: noted at once, also where the lock cannot be had."""

    def open(self) -> None:
        """Make the file if it is not there: it takes its place on disk before that is counted."""
        with self._file.locked() as fd:
            if not self._ops.fstat(fd).st_size:
                self._write(fd, Usage(), 0)
        self._is_open = True

    def start(
        self, living: Callable[[], Collection[str]], disk_bytes: int, entry_bytes: int = 0
    ) -> Usage:
        """Join the count.

        The first tier to count sets it to what is on disk; beside others their count goes on, and
        only what dead writers had set aside is given back.

        Args:
            living: Returns the other writers that live. Asked under the lock: who is in the count
                by then has registered before.
            disk_bytes: What was on disk a moment ago.
            entry_bytes: What of that is this writer's own, and goes with it.
        """
        with self._changed() as usage:
            self._drop_dead(usage, living)
            if len(usage.reserved_bytes) == 1:
                usage.settled_bytes = disk_bytes
            else:
                usage.settled_bytes += entry_bytes
        self._entry_bytes = entry_bytes
        return usage

    def close(self) -> None:
        """Give back what this writer had set aside, and close; idempotent."""
        if not self._is_open:
            return
        try:
            with self._changed() as usage:
                del usage.reserved_bytes[self._writer_id]
                usage.settled_bytes = max(0, usage.settled_bytes - self._entry_bytes)
        finally:
            self._is_open = False
            self._file.close()

    def rename_writer(self, writer_id: str) -> None:
        """Go on under another id; what the old one had set aside is the new one's."""
        self._writer_id = writer_id

    def reserve(self, unit_bytes: int, count: int, capacity_bytes: int) -> int:
        """Set room aside for up to `count` units; return for how many there was room."""
        with self._changed() as usage:
            room = max(0, capacity_bytes - usage.total_bytes) // unit_bytes
            granted = min(count, room)
            usage.reserved_bytes[self._writer_id] += granted * unit_bytes
        return granted

    def settle(self, released_bytes: int, change: DiskChange) -> Usage:
        """Give back room that was set aside, and count what became of it; return the count.

        Raises:
            OSError: The file could not be changed; the next change will tell.
        """
        self._ended.append((released_bytes, change))
        return self.read()

    def correct(
        self, before: Usage, disk_bytes: int, living: Callable[[], Collection[str]]
    ) -> Usage:
        """Set the count to what a walk has found, if more is amiss than can have moved meanwhile.

        Args:
            before: The count before the walk.
            disk_bytes: What the walk has found.
            living: As for `start`.
        """
        with self._changed() as usage:
            self._drop_dead(usage, living)
            unsure = usage.changed_bytes - before.changed_bytes + usage.all_reserved_bytes
            unsure += sum(before.reserved_bytes.get(writer, 0) for writer in usage.reserved_bytes)
            drift = disk_bytes - usage.settled_bytes
            if abs(drift) > unsure:
                usage.settled_bytes = disk_bytes
                usage.changed_bytes += abs(drift)
        return usage

    def read(self) -> Usage:
        """Return the count."""
        with self._changed() as usage:
            pass
        return usage

    def _drop_dead(self, usage: Usage, living: Callable[[], Collection[str]]) -> None:
        alive = {*living(), self._writer_id}
        usage.reserved_bytes = {
            writer: size for writer, size in usage.reserved_bytes.items() if writer in alive
        }

    @contextlib.contextmanager
    def _changed(self) -> Iterator[Usage]:
        if not self._is_open:
            raise OSError(f"{self._path} is closed")
        with self._file.locked() as fd:
            self._take_ended()
            buffer = bytearray(_MAX_BYTES)
            count = self._ops.pread_into(fd, memoryview(buffer), 0)
            usage = _parsed(bytes(buffer[:count]))
            if usage is None:
                usage = Usage(self._count_disk())
            else:
                self._tell(usage)
            usage.reserved_bytes[self._writer_id] = self._reserved_bytes
            yield usage
            self._write(fd, usage, count)
            self._untold = DiskChange()
            self._reserved_bytes = usage.reserved_bytes.get(self._writer_id, 0)

    def _take_ended(self) -> None:
        while self._ended:
            released_bytes, change = self._ended.popleft()
            self._reserved_bytes = max(0, self._reserved_bytes - released_bytes)
            self._untold += change

    def _tell(self, usage: Usage) -> None:
        added, removed = self._untold.added_bytes, self._untold.removed_bytes
        usage.settled_bytes = max(0, usage.settled_bytes + added - removed)
        usage.changed_bytes += added + removed

    def _write(self, fd: int, usage: Usage, old_length: int) -> None:
        content = [usage.settled_bytes, usage.reserved_bytes, usage.changed_bytes]
        text = memoryview(json.dumps(content).encode())
        try:
            done = 0
            while done < len(text):
                written = self._ops.pwrite(fd, text[done:], done)
                done += written
                if not written:
                    break
            if done < old_length:
                # A crash before this line leaves a tail that does not parse: counted anew.
                self._ops.truncate(fd, done)
        except OSError:
            with contextlib.suppress(OSError):
                self._ops.truncate(fd, 0)  # half of it might parse: better counted anew
            raise


def read_usage(ops: FileOps, namespace_folder: str) -> Usage | None:
    """Return a namespace's count without joining it; None if it is unreadable.

    Raises:
        OSError: There is none, or it cannot be read.
    """
    path = f"{namespace_folder}/{FILE_NAME}"
    buffer = bytearray(_MAX_BYTES)
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(locked(ops, path, os.O_RDONLY))
        except OSError:  # no locks here: half a change does not parse
            fd = ops.open(path, os.O_RDONLY)
            stack.callback(ops.close, fd)
        count = ops.pread_into(fd, memoryview(buffer), 0)
    return _parsed(bytes(buffer[:count]))


def _parsed(text: bytes) -> Usage | None:
    try:
        settled, reserved, changed = json.loads(text)
        return Usage(int(settled), {str(k): int(v) for k, v in reserved.items()}, int(changed))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
