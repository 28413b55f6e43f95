"""A job's blocks, moved by a few threads: each takes a piece of about 1 MiB after the other.

A batch is handed to the pool as one call a thread, not as one a piece. A call ends when no piece
is left, or when it has moved so much that loads should have their turn; whoever ends the last
piece finishes the batch. Thread: an I/O thread, but for the construction and the outcome.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvoffload_async.errors import CorruptBlockError, TierError
from kvoffload_async.tiers.fs.outcome import mapped
from kvoffload_async.tiers.sealing import BlockDigester
from kvoffload_async.tiers.slab.journal import Journal, PackedRun
from kvoffload_async.tiers.slab.places import Place, segment_of
from kvoffload_async.tiers.slab.records import put_records
from kvoffload_async.tiers.slab.rows import Rows
from kvoffload_async.tiers.slab.runs import Run, joined
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.tiers.slab.table import RecordTable, split_digests
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_TURN_BYTES = 8 << 20
"""What one call moves before the thread may turn to something more urgent."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What a batch works with.

    Attributes:
        digester: Computes checksums.
        verify: Whether they are computed and compared.
        fdatasync: Whether blocks must be on the device before they are journalled.
        piece_bytes: About what one system call moves.
    """

    rows: Rows
    segments: Segments
    table: RecordTable
    journal: Journal
    digester: BlockDigester
    verify: bool
    fdatasync: bool
    piece_bytes: int


class Batch(ABC):
    """Blocks of one job, in the order of their places.

    Attributes:
        failures: Index in the batch -> why that block failed.
    """

    def __init__(
        self,
        shelf: Shelf,
        keys: Sequence[OffloadKey],
        places: Sequence[Place],
        rows: Sequence[int],
    ) -> None:
        """Cut blocks into pieces; the three sequences are parallel, the places ascend."""
        self._shelf = shelf
        self._keys = keys
        self._places = places
        self._rows = rows
        self.failures: dict[int, TierError] = {}
        size = max(1, shelf.piece_bytes // shelf.rows.slot_bytes)
        self._pieces = deque(range(0, len(keys), size))
        self._piece_blocks = size
        self._unfinished = len(self._pieces)
        self._mutex = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """How many pieces nobody has begun."""
        return len(self._pieces)

    def work(self) -> None:
        """Move pieces until none is left, or it is somebody else's turn."""
        piece_bytes = self._piece_blocks * self._shelf.rows.slot_bytes
        for _ in range(max(1, _TURN_BYTES // piece_bytes)):
            try:
                start = self._pieces.popleft()
            except IndexError:
                return
            stop = min(start + self._piece_blocks, len(self._keys))
            try:
                self._begin()
                for run in joined(self._places, start, stop):
                    self._move(run)
            except OSError as error:
                self._fail(range(start, stop), mapped(error))
            with self._mutex:
                self._unfinished -= 1
                is_last = not self._unfinished
            if is_last:
                self._finish()

    def _fail(self, indices: Sequence[int], error: TierError) -> None:
        self.failures.update(dict.fromkeys(indices, error))

    def _move(self, run: Run) -> None:
        """Move a run in one call; if that fails, each of its blocks on its own."""
        try:
            self._move_joined(run)
        except OSError as error:
            if run.count == 1:
                self._fail((run.start,), mapped(error))
                return
            for index in range(run.count):
                self._move(replace(run, place=run.place + index, start=run.start + index, count=1))

    def _begin(self) -> None:  # noqa: B027 - a load has nothing to do first
        """Do what must be done before a piece is moved; raises OSError."""

    @abstractmethod
    def _move_joined(self, run: Run) -> None:
        """Move a run in one call; raises OSError."""

    @abstractmethod
    def _finish(self) -> None:
        """End the batch; nothing moves any more."""


class StoreBatch(Batch):
    """Blocks to write into claimed places; there as soon as they are journalled, all at once.

    Attributes:
        is_journalled: Whether those that did not fail are.
    """

    def __init__(
        self,
        shelf: Shelf,
        keys: Sequence[OffloadKey],
        places: Sequence[Place],
        rows: Sequence[int],
    ) -> None:
        super().__init__(shelf, keys, places, rows)
        self._written: list[PackedRun] = []
        self.is_journalled = False

    def _begin(self) -> None:
        """Journal the removals of the blocks in whose slots these are written."""
        self._shelf.journal.flush()

    def _move_joined(self, run: Run) -> None:
        # The checksums first: they bring the bytes into the cache, from which they are written.
        packed = self._packed(run)
        self._shelf.segments.write(run, self._rows)
        self._written.append((run.place, packed))

    def _packed(self, run: Run) -> bytes:
        """Return the records of a run."""
        shelf = self._shelf
        keys = self._keys[run.start : run.start + run.count]
        digests = None
        if shelf.verify:
            rows = self._rows[run.start : run.start + run.count]
            digest, row = shelf.digester.digest, shelf.rows.row
            digests = [digest(key, row(number)) for key, number in zip(keys, rows, strict=True)]
        return put_records(keys, run.place, digests)

    def _finish(self) -> None:
        shelf = self._shelf
        if not self._written:
            return
        try:
            if shelf.fdatasync:
                shelf.segments.sync({segment_of(place) for place, _ in self._written})
            shelf.journal.commit(self._written)
            self.is_journalled = True
        except OSError as error:
            self._fail(range(len(self._keys)), mapped(error))


class LoadBatch(Batch):
    """Blocks to read from pinned places, each verified before it counts.

    Attributes:
        corrupt: Index in the batch of each block whose bytes are wrong; their records are gone.
    """

    def __init__(
        self,
        shelf: Shelf,
        keys: Sequence[OffloadKey],
        places: Sequence[Place],
        rows: Sequence[int],
    ) -> None:
        super().__init__(shelf, keys, places, rows)
        self.corrupt: list[int] = []

    def _move_joined(self, run: Run) -> None:
        shelf = self._shelf
        shelf.table.use(run.place, run.count)
        is_verified = shelf.verify or (
            shelf.table.has_suspects and shelf.table.is_suspect(run.place, run.count)
        )
        if is_verified and run.count == 1 and shelf.rows.row_bytes > shelf.piece_bytes:
            self._move_large(run)
            return
        whole = shelf.segments.read(run, self._rows)
        for offset in range(whole, run.count):
            self._drop(run, offset, "ends early")
        if is_verified:
            digest, row = shelf.digester.digest, shelf.rows.row
            digests = split_digests(shelf.table.digests(run.place, run.count))
            for offset in range(whole):
                index = run.start + offset
                if digest(self._keys[index], row(self._rows[index])) != digests[offset]:
                    self._drop(run, offset, "has a wrong checksum")

    def _move_large(self, run: Run) -> None:
        """Read and verify a block piece by piece, each while it is still in the cache."""
        shelf = self._shelf
        hasher = shelf.digester.begin(self._keys[run.start])
        left = shelf.rows.row_bytes
        for piece in shelf.segments.read_pieces(run, self._rows, shelf.piece_bytes):
            hasher.update(piece)
            left -= len(piece)
        if left:
            self._drop(run, 0, "ends early")
        elif hasher.digest() != shelf.table.digests(run.place, 1):
            self._drop(run, 0, "has a wrong checksum")

    def _drop(self, run: Run, offset: int, what: str) -> None:
        index = run.start + offset
        key = self._keys[index]
        self._fail((index,), CorruptBlockError(f"block {key.hex()} {what}"))
        self._shelf.journal.note_removed((run.place + offset,))
        self.corrupt.append(index)

    def _finish(self) -> None:
        """Journal that the bad blocks are gone; failing that, it is done with the next append."""
        if self.corrupt:
            try:
                self._shelf.journal.flush()
            except OSError as error:
                logger.warning("a bad block's removal is not journalled yet: %s", str(error))
