"""What one writer has set aside and changed, and what of that the shared count is still to be told.

Thread: an I/O thread.
"""

from __future__ import annotations

import threading

from kvoffload_async.tiers.fs.counts import WRAP, Usage, WriterCount
from kvoffload_async.tiers.fs.outcome import DiskChange


class UnreportedUsage:
    """What this writer is to have in the count after its next change.

    It never waits for a change that is under way: nothing is lost if that hangs.
    """

    def __init__(self, writer_id: str) -> None:
        """Start with nothing."""
        self.reserved_bytes = 0
        self.running: set[int] = set()
        self.told = 0
        self.writer_id = writer_id
        self._next_id = writer_id
        self._former_ids: list[str] = []
        self.telling: DiskChange | None = None
        """What the last change was to tell, if it failed: perhaps it was made all the same."""
        self._begun = 0
        self._untold = DiskChange()
        self._mutex = threading.Lock()

    def begin(self) -> int:
        """Begin an operation on the disk; return its number."""
        with self._mutex:
            number = self._begun
            self._begun += 1
            self.running.add(number)
        return number

    def end(self, operation: int) -> None:
        """End one."""
        with self._mutex:
            self.running.discard(operation)

    def reserve(self, num_bytes: int) -> None:
        """Set room aside, or give it back where negative."""
        with self._mutex:
            self.reserved_bytes = max(0, self.reserved_bytes + num_bytes)

    def add_untold(self, change: DiskChange) -> None:
        """Note what was done to the disk, for the next change."""
        with self._mutex:
            self._untold += change

    def entry(self) -> WriterCount:
        """Return what this writer has in the count after its next change."""
        with self._mutex:
            oldest = min(self.running, default=self._begun)
            return WriterCount(self.reserved_bytes, self._begun, oldest, self.told + 1)

    def rename(self, writer_id: str) -> None:
        """Go on under another id: from the next change on, what the old one has is this one's."""
        self._next_id = writer_id

    def begin_change(self, usage: Usage) -> DiskChange:
        """Find out whether the last change was made, if it failed, and return what is to be told.

        Entries under former ids are dropped: what they had set aside is in this one's.

        Thread: under the lock of the file.
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
        """Note that the change was made. Under the lock of the file."""
        self.told += 1
        self._former_ids.clear()
