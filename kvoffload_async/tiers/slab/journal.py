"""The journal: which block lies where, on disk.

Written by the threads that store, one append a job, under a lock. Removals are noted first and
written later, at the latest before the slots that they free are written to again: whoever is about
to do that calls `flush`. When the log behind the checkpoint is full, the whole journal is written
anew, beside the old one, and renamed over it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvoffload_async.tiers.files.anchor import Anchor
from kvoffload_async.tiers.files.ops import FileOps, write_all
from kvoffload_async.tiers.slab.layout import JOURNAL, TEMP_SUFFIX
from kvoffload_async.tiers.slab.places import Place
from kvoffload_async.tiers.slab.records import (
    RECORD,
    RECORD_BYTES,
    Records,
    checkpoint,
    checkpoint_units,
    frame,
    removals_of,
)
from kvoffload_async.tiers.slab.table import RecordTable

logger = logging.getLogger(__name__)

_WRITE_BYTES = 1 << 20

PackedRun = tuple[Place, bytes]
"""The first place of a run of blocks, and their packed records."""


class Journal:
    """The open journal of one store. Thread: any; `note_removed` never waits."""

    def __init__(
        self,
        ops: FileOps,
        folder: str,
        anchor: Anchor,
        table: RecordTable,
        seed: int,
        *,
        log_units: int,
        fdatasync: bool,
    ) -> None:
        """Describe it; `open` comes first.

        Args:
            ops: The system calls.
            folder: The store's.
            anchor: Of that folder; nothing is written once it is another.
            table: What it says; kept up to date here.
            seed: Binds it to the layout.
            log_units: See `Budget`.
            fdatasync: Wait for the device at the end of every append.
        """
        self._ops = ops
        self._path = f"{folder}/{JOURNAL}"
        self._anchor = anchor
        self._table = table
        self._seed = seed
        self._max_log_units = log_units
        self._fdatasync = fdatasync
        self._mutex = threading.Lock()
        self._removed: deque[bytes] = deque()
        self._fd: int | None = None
        self._end_bytes = 0
        self._log_units = 0
        self._sequence = 0
        self._changes_written = 0

    def open(self, end_bytes: int, sequence: int, *, anew: bool) -> None:
        """Open the file behind what was found in it; what is torn there is cut off.

        Args:
            end_bytes: Where the good part ends.
            sequence: The highest number in it.
            anew: Write everything anew, so that nobody sees the damage in it any more.

        Raises:
            OSError: The file cannot be had, or not be cut.
        """
        self._sequence = sequence
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            self._ops.unlink(self._path + TEMP_SUFFIX)
        self._fd = self._ops.open_own(self._path, os.O_RDWR)
        self._end_bytes = end_bytes
        if self._ops.fstat(self._fd).st_size != end_bytes:
            self._ops.truncate(self._fd, end_bytes)
        live_units = checkpoint_units(self._table.num_live())
        self._log_units = max(0, end_bytes // RECORD_BYTES - live_units)
        if anew or self._log_units > self._max_log_units:
            try:
                self._rewrite()
            except OSError as error:
                logger.warning("the journal cannot be written anew yet: %s", str(error))
        self._changes_written = self._table.changes

    def note_removed(self, places: Sequence[Place]) -> None:
        """Note that blocks are gone; they are so on disk after the next `commit` or `flush`."""
        # Taken out of the table first: who writes it anew must not find there what is noted.
        self._removed.extend(self._table.remove(places))

    def note_gone(self, records: Records) -> None:
        """Note the same of blocks that are not in the table, given their records."""
        if len(records):
            self._removed.append(removals_of(records.tobytes()))

    def flush(self) -> None:
        """Write the removals noted so far; raises OSError, and then they are still noted."""
        if self._removed:
            self.commit(())

    def commit(self, puts: Sequence[PackedRun]) -> None:
        """Write the removals noted so far and these puts, in one append.

        Raises:
            OSError: Nothing was written; the removals are still noted.
        """
        with self._mutex:
            noted = len(self._removed)
            body = b"".join(
                [*itertools.islice(self._removed, noted), *(packed for _, packed in puts)]
            )
            if not body:
                return
            try:
                if self._log_units + 1 + len(body) // RECORD_BYTES <= self._max_log_units:
                    self._append(body)
                    self._put(puts)
                else:
                    self._put(puts)
                    self._rewrite()
            except OSError:
                self._disown(puts)
                raise
            for _ in range(noted):
                self._removed.popleft()

    def close(self) -> None:
        """Write what is noted, in the order of recency, and close; idempotent.

        Raises:
            OSError: It could not be written; it is closed all the same, and as good as after a
                crash.
        """
        if self._fd is None:
            return
        try:
            if self._removed or self._table.changes != self._changes_written:
                with self._mutex:
                    self._rewrite()
        finally:
            fd, self._fd = self._fd, None
            self._ops.close(fd)

    # -- inside, under the lock -----------------------------------------------------------------

    def _put(self, puts: Sequence[PackedRun]) -> None:
        for place, packed in puts:
            self._table.put(place, packed)

    def _disown(self, puts: Sequence[PackedRun]) -> None:
        """Take back puts that may or may not be on disk after a failure.

        Their removals are written before their slots are written to again, like any others.
        """
        with contextlib.suppress(OSError):
            self._ops.truncate(self._opened(), self._end_bytes)
        for first, packed in puts:
            records = np.frombuffer(packed, dtype=RECORD)
            self._table.forget(range(first, first + len(records)))
            self.note_gone(records)

    def _append(self, body: bytes) -> None:
        fd = self._opened()
        self._check()
        framed = frame(self._sequence + 1, body, self._seed)
        try:
            write_all(self._ops, fd, framed, self._end_bytes)
            if self._fdatasync:
                self._ops.fdatasync(fd)
        except OSError:
            self._sequence += 1  # whatever is left of the frame will be an older one
            raise
        self._sequence += 1
        self._end_bytes += len(framed)
        self._log_units += len(framed) // RECORD_BYTES

    def _rewrite(self) -> None:
        """Write the whole table into a new file, and put that in the old one's place."""
        self._check()  # else it could be put in the place of another store's
        records = self._table.live()
        temp = self._path + TEMP_SUFFIX
        fd = self._ops.create_anew(temp)
        try:
            end_bytes = 0
            pending = bytearray()
            for framed in checkpoint(self._sequence + 1, records, self._seed):
                self._sequence += 1
                pending += framed
                if len(pending) >= _WRITE_BYTES:
                    end_bytes += write_all(self._ops, fd, pending, end_bytes)
                    pending = bytearray()
            end_bytes += write_all(self._ops, fd, pending, end_bytes)
            if self._fdatasync:
                self._ops.fdatasync(fd)
            self._ops.rename(temp, self._path)
        except OSError:
            self._ops.close(fd)
            with contextlib.suppress(OSError):
                self._ops.unlink(temp)
            raise
        old, self._fd = self._fd, fd
        self._end_bytes, self._log_units = end_bytes, 0
        if old is not None:
            self._ops.close(old)
        if self._fdatasync:
            self._sync_folder()

    def _sync_folder(self) -> None:
        fd = self._ops.open(self._path.rpartition("/")[0], os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._ops.fdatasync(fd)
        finally:
            self._ops.close(fd)

    def _check(self) -> None:
        """Raise an OSError if what is written would not be found again."""
        self._anchor.check()
        self._anchor.check_file(self._opened(), JOURNAL)

    def _opened(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the journal is closed")
        return self._fd
