"""One writer's reservations and disk changes, including those not yet in the shared count.

Run on I/O threads.
"""

from __future__ import annotations

import threading

from kvoffload_async.tiers.fs.counts import WRAP, Usage, WriterCount
from kvoffload_async.tiers.fs.outcome import DiskChange


class UnreportedUsage:
    """This writer's reservations and disk changes, to be merged into the shared count.

    Methods for jobs do not wait for a change of the file, so nothing is lost if one hangs.
    """

    def __init__(self, writer_id: str) -> None:
        """Start without reservations or operations."""
        self.reserved_bytes = 0
        self.running: set[int] = set()
        self.told = 0
        self.writer_id = writer_id
        self._next_id = writer_id
        self._former_ids: list[str] = []
        self.telling: DiskChange | None = None
        """The last change if it failed; it may have been made nevertheless."""
        self._begun = 0
        self._untold = DiskChange()
        self._mutex = threading.Lock()

    def begin(self) -> int:
        """Begin a disk operation; return its number."""
        with self._mutex:
            number = self._begun
            self._begun += 1
            self.running.add(number)
        return number

    def end(self, operation: int) -> None:
        """End a disk operation."""
        with self._mutex:
            self.running.discard(operation)

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes, or release them if negative."""
        with self._mutex:
            self.reserved_bytes = max(0, self.reserved_bytes + num_bytes)

    def add_untold(self, change: DiskChange) -> None:
        """Record a disk change, to be counted with the next change of the file."""
        with self._mutex:
            self._untold += change

    def entry(self) -> WriterCount:
        """Return this writer's entry as of its next change."""
        with self._mutex:
            oldest = min(self.running, default=self._begun)
            return WriterCount(self.reserved_bytes, self._begun, oldest, self.told + 1)

    def rename(self, writer_id: str) -> None:
        """Use another id from the next change on; reservations are kept."""
        self._next_id = writer_id

    def begin_change(self, usage: Usage) -> DiskChange:
        """Determine whether a failed last change was made; return the changes to count.

        Entries under former ids are dropped; their reservations are in the current entry.

        Call with the file's lock held.
        """
        next_id = self._next_id
        if next_id != self.writer_id:
            self._former_ids.append(self.writer_id)
            self.writer_id = next_id
        ids = [self.writer_id, *self._former_ids]
        entry = next((usage.writers[name] for name in ids if name in usage.writers), None)
        if self.telling is not None:
            if entry is not None and entry.told == (self.told + 1) % WRAP:
                self.told += 1
            else:
                self.add_untold(self.telling)
            self.telling = None
        for name in ids[1:]:
            usage.writers.pop(name, None)
        with self._mutex:
            untold, self._untold = self._untold, DiskChange()
        return untold

    def end_change(self) -> None:
        """Record that the change was made. Call with the file's lock held."""
        self.told += 1
        self._former_ids.clear()
