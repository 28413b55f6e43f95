"""The journal: which block lies where, on disk.

Written by the threads that store, one append a job, under a lock. Removals are noted, and written
before the slots that they free are written to again: whoever is about to do that calls `flush`.

When half of the log is full, the next journal is begun beside it; see `checkpoint`. Every append
then writes a part of that as well, in proportion to itself: so much that it is complete before the
log is full. `tend`, which no store waits for, has it on the device and renames it over the other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvoffload_async.tiers.files.anchor import Anchor
from kvoffload_async.tiers.files.ops import FileOps, sync_folder, write_all
from kvoffload_async.tiers.slab.budget import journal_units, log_units
from kvoffload_async.tiers.slab.checkpoint import NextJournal
from kvoffload_async.tiers.slab.layout import JOURNAL, NEXT_JOURNAL
from kvoffload_async.tiers.slab.places import Place
from kvoffload_async.tiers.slab.records import (
    RECORD_BYTES,
    PackedRun,
    Records,
    checkpoint_units,
    frame,
    places_of,
    removal_records,
)
from kvoffload_async.tiers.slab.table import RecordTable

logger = logging.getLogger(__name__)

_LEAST_SHARE = 32
"""A journal is written anew at the opening where less room than this part of it is left."""

_POLL_S = 0.02
"""How often an append without room looks whether anybody still waits for it."""


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
        fdatasync: bool,
    ) -> None:
        """Describe it; `open` comes first.

        Args:
            ops: The system calls.
            folder: The store's.
            anchor: Of that folder; nothing is written once it is another.
            table: What it says; kept up to date here.
            seed: Binds it to the store.
            fdatasync: Wait for the device at the end of every append.
        """
        self._ops = ops
        self._path = f"{folder}/{JOURNAL}"
        self._next_path = f"{folder}/{NEXT_JOURNAL}"
        self._anchor = anchor
        self._table = table
        self._seed = seed
        self._fdatasync = fdatasync
        self._mutex = threading.Condition()
        self._removed: deque[bytes] = deque()
        self._fd: int | None = None
        self._end_units = 0
        self._max_units = self._window_units = 0
        """How long it may become, and how much of that is left when the next one is begun."""
        self._begin_units = 0
        """How long it may become before the next one is begun."""
        self._next: NextJournal | None = None
        self._next_from_units = 0  # how long this one was when that was begun
        self._replaced: list[int] = []
        """Files that are not in use any more; closing them frees their space, which takes time."""
        self._is_folder_synced = False
        self._skipped = 0  # appends that have failed since the last one that did not
        self.sequence = 0
        """The highest number that a frame has or had."""

    def open(self, end_bytes: int, sequence: int, *, anew: bool) -> bool:
        """Open the file behind what was found in it; what is torn there is cut off.

        Args:
            end_bytes: Where the good part ends.
            sequence: The highest number in it.
            anew: Write everything anew, so that nobody sees the damage in it any more.

        Returns:
            Whether nothing of the damage is left, if there was any.

        Raises:
            OSError: The file cannot be had, or not be cut.
        """
        self.sequence = sequence
        self._fd = self._ops.open_own(self._path, os.O_RDWR)
        self._end_units = end_bytes // RECORD_BYTES
        if self._ops.fstat(self._fd).st_size != end_bytes:
            self._ops.truncate(self._fd, end_bytes)
        self._limit(sum(self._table.slots().values()))
        left_units = self._max_units - self._end_units
        is_full = left_units < checkpoint_units(self._table.num_live()) // _LEAST_SHARE
        with self._mutex:
            try:
                self._ops.reserve(self._fd, self._max_units * RECORD_BYTES)
                self._prepare()
                if anew or is_full:
                    self._rewrite()
            except OSError as error:
                logger.warning("the journal cannot be written anew yet: %s", str(error))
                return not anew
        return True

    def reserve(self, slots: int) -> None:
        """Allocate what a store with so many slots needs; raises OSError."""
        units = journal_units(slots)
        with self._mutex:
            if units <= self._max_units:
                return
            self._check()
            self._ops.reserve(self._opened(), units * RECORD_BYTES)
            if self._next is not None:
                self._next.grow(units)
            self._limit(slots)

    def note_new_file(self) -> None:
        """Note that the folder has a new file, of which later appends speak."""
        self._is_folder_synced = False

    def note_removed(self, places: Sequence[Place]) -> None:
        """Note that blocks are gone; they are so on disk after the next `commit` or `flush`."""
        # Taken out of the table first: who writes it anew must not find there what is noted.
        if places:
            self._removed.append(self._table.remove(places))

    def note_gone(self, records: Records) -> None:
        """Note the same of blocks that are not in the table, given their records."""
        if len(records):
            self._removed.append(removal_records(places_of(records)))

    def flush(self, is_awaited: Callable[[], bool]) -> None:
        """Write the removals noted so far; see `commit`."""
        if self._removed:
            self.commit((), is_awaited)

    def commit(self, puts: Sequence[PackedRun], is_awaited: Callable[[], bool]) -> None:
        """Write the removals noted so far and these puts, in one append.

        Where there is no room before the next journal is on the device, it waits for that as long
        as a job still waits for this: so the job's deadline is that of the wait as well.

        Raises:
            OSError: Nothing was written; the removals are still noted.
        """
        with self._mutex:
            while True:
                noted = len(self._removed)
                removed = itertools.islice(self._removed, noted)
                body = b"".join([*removed, *(packed for _, packed in puts)])
                if not body:
                    return
                has_room = self._end_units + len(body) // RECORD_BYTES < self._max_units
                if has_room or self._next is None or not self._next.is_syncing:
                    break
                if not is_awaited():
                    raise OSError(errno.ETIMEDOUT, "the next journal does not reach the device")
                self._mutex.wait(_POLL_S)
            try:
                if has_room:
                    self._append(body)
                    self._put(puts)
                    self._advance(body)
                else:
                    self._put(puts)
                    self._rewrite(body)
            except OSError:
                self._disown(puts)
                raise
            for _ in range(noted):
                self._removed.popleft()

    @property
    def has_removals(self) -> bool:
        """Whether removals are noted that are not written yet."""
        return bool(self._removed)

    @property
    def is_to_be_tended(self) -> bool:
        """Whether there is something for `tend` to do; about, while another thread appends."""
        return self._next is not None and self._next.is_due

    def tend(self) -> None:
        """Put the next journal in use once it is on the device: to be called when nobody waits."""
        with self._mutex:
            following = self._next
            if following is None or not following.is_due:
                return
            following.is_syncing = True
        failure: OSError | None = None
        try:
            following.sync()
        except OSError as error:
            failure = error
        with self._mutex:
            following.is_syncing = False
            self._mutex.notify_all()
            if following.is_abandoned:
                self._close_unused(following.fd)
            elif failure is not None:
                self._abandon(failure)
            elif following.is_complete:
                self._try_to_switch()
            replaced, self._replaced = self._replaced, []
        for fd in replaced:
            self._close_unused(fd)

    def sync(self) -> None:
        """Wait until all that was appended is on the device; raises OSError."""
        self._ops.fdatasync(self._opened())

    def close(self) -> None:
        """Close the files; idempotent. What is noted and not written comes back at the opening."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        following = self._next
        self._drop_next()
        self._close_replaced()
        self._ops.close(fd)
        if following is not None:
            with contextlib.suppress(OSError):
                self._anchor.check()  # else it would be another store's
                self._ops.unlink(self._next_path)

    # -- inside, under the lock -----------------------------------------------------------------

    def _put(self, puts: Sequence[PackedRun]) -> None:
        for place, packed in puts:
            self._table.put(place, packed)

    def _disown(self, puts: Sequence[PackedRun]) -> None:
        """Take back puts that may or may not be on disk; their removals are written as any are."""
        for first, packed in puts:
            count = len(packed) // RECORD_BYTES
            self._removed.append(self._table.remove(range(first, first + count)))

    def _append(self, body: bytes) -> None:
        fd = self._opened()
        self._check()
        framed = frame(self.sequence + 1, body, self._seed, self._skipped)
        end_bytes = self._end_units * RECORD_BYTES
        self.sequence += 1
        try:
            self._sync_names()
            write_all(self._ops, fd, framed, end_bytes)
            if self._fdatasync:
                self._ops.fdatasync(fd)
        except OSError:
            # What is left of the frame, if it is whole, must not count: it is overwritten by one
            # with a higher number, and made no frame until then.
            self._skipped += 1
            with contextlib.suppress(OSError):
                self._ops.pwrite(fd, memoryview(bytes(RECORD_BYTES)), end_bytes)
            raise
        self._skipped = 0
        self._end_units += len(framed) // RECORD_BYTES

    def _advance(self, body: bytes) -> None:
        """Go on with the next journal after an append; a failure is that of the next one alone."""
        if self._end_units < self._begin_units:
            return
        try:
            following = self._prepare()
            if not following.has_begun:
                following.begin(self.sequence)
                self._next_from_units = self._end_units
                body = b""  # its blocks are among those that are there
            room = max(1, self._max_units - self._next_from_units)
            used = self._end_units - self._next_from_units  # of it; half, and it is complete
            following.advance(body, -(-2 * used * following.num_slots // room))
        except OSError as error:
            self._abandon(error)

    def _rewrite(self, body: bytes = b"") -> None:
        """Complete the next journal and put it in use now, with a last append."""
        self._check()  # else it could be put in the place of another store's
        if not self._prepare().fits(1 + len(body) // RECORD_BYTES):
            self._drop_next()
        while True:
            following = self._prepare()
            if is_new := not following.has_begun:
                following.begin(self.sequence)
                body = b""
            try:
                following.advance(body, following.num_slots)
                following.sync()
                self._switch(following)
            except OSError as error:
                self._abandon(error)  # what was lost may only be what was written before
                if is_new:
                    raise
            else:
                break
        self._close_replaced()
        self._sync_names()
        with contextlib.suppress(OSError):  # it is tried again when it is needed
            self._prepare()

    def _sync_names(self) -> None:
        """See to it that what is appended is found again, if that matters; raises OSError."""
        if self._fdatasync and not self._is_folder_synced:
            sync_folder(self._ops, self._path.rpartition("/")[0])
            self._is_folder_synced = True

    def _try_to_switch(self) -> None:
        """Put the next journal, which is on the device, in use; its failure is nobody's."""
        following = self._next
        if following is None:
            return
        try:
            self._check()
            if self._fdatasync and following.unsynced_bytes:
                following.sync()  # what was appended since has been reported as stored
            self._switch(following)
            self._prepare()
        except OSError as error:
            self._abandon(error)

    def _switch(self, following: NextJournal) -> None:
        self._ops.rename(self._next_path, self._path)
        self._next = None
        self._replaced.append(self._opened())
        self._fd = following.fd
        self.sequence = following.sequence
        self._skipped = 0
        self._end_units = following.size_bytes // RECORD_BYTES
        self._begin_units = self._max_units - self._window_units
        self._is_folder_synced = False

    def _limit(self, slots: int) -> None:
        self._max_units, self._window_units = journal_units(slots), log_units(slots) // 2
        self._begin_units = self._max_units - self._window_units

    def _prepare(self) -> NextJournal:
        """Return the next journal; a new one has all its space allocated. Raises OSError."""
        if self._next is None:
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(self._next_path)
            self._next = NextJournal(
                self._ops, self._next_path, self._table, self._seed, self._max_units
            )
        return self._next

    def _abandon(self, error: OSError) -> None:
        logger.warning("the journal cannot be written anew yet: %s", str(error))
        self._drop_next()
        self._begin_units = (self._end_units + self._max_units) // 2

    def _drop_next(self) -> None:
        """Give the next journal up: its bytes, once one was lost, prove nothing any more."""
        following, self._next = self._next, None
        if following is not None and following.is_syncing:
            following.is_abandoned = True
        elif following is not None:
            self._close_unused(following.fd)

    def _close_replaced(self) -> None:
        while self._replaced:
            self._close_unused(self._replaced.pop())

    def _close_unused(self, fd: int) -> None:
        """Close a journal that no block depends on: that it fails is no job's failure."""
        try:
            self._ops.close(fd)
        except OSError as error:
            logger.warning("closing a journal that is not in use failed: %s", str(error))

    def _check(self) -> None:
        """Raise an OSError if what is written would not be found again."""
        self._anchor.check()
        self._anchor.check_file(self._opened(), JOURNAL)

    def _opened(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the journal is closed")
        return self._fd
