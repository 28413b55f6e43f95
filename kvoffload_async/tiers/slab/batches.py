"""A job's blocks on their way, cut into pieces of about 1 MiB that several threads can move.

Who moves which piece, and when a batch has ended, is the business of its `Lane`. Thread: an I/O
thread, but for the construction and the outcome.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from kvoffload_async.errors import CorruptBlockError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.failure import mapped
from kvoffload_async.tiers.files.sealing import BlockDigester
from kvoffload_async.tiers.slab.journal import Journal, PackedRun
from kvoffload_async.tiers.slab.places import Place, segment_of
from kvoffload_async.tiers.slab.records import put_records
from kvoffload_async.tiers.slab.rows import Rows
from kvoffload_async.tiers.slab.runs import Run, joined
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.tiers.slab.table import RecordTable, split_digests
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)


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


class Blocks(NamedTuple):
    """Blocks of one job; the three sequences are parallel.

    Attributes:
        keys: Theirs.
        places: Where they are in the store, or shall be; ascending.
        rows: Where they are in the primary, or shall be.
    """

    keys: Sequence[OffloadKey]
    places: Sequence[Place]
    rows: Sequence[int]


class Batch(ABC):
    """Blocks on their way.

    Attributes:
        indices: Of its blocks.
        failures: Index in the batch -> why that block failed.
        error: Why the batch failed as a whole, if it did.
    """

    def __init__(self, shelf: Shelf, blocks: Blocks) -> None:
        """Take blocks on."""
        self._shelf = shelf
        self._keys, self._places, self._rows = blocks
        self.indices = range(len(blocks.keys))
        self.failures: dict[int, TierError] = {}
        self.error: TierError | None = None

    def pieces(self) -> Sequence[range]:
        """Return the pieces, as ranges of indices in the batch."""
        size = max(1, self._shelf.piece_bytes // self._shelf.rows.slot_bytes)
        return [self.indices[start : start + size] for start in self.indices[::size]]

    def move(self, piece: range) -> None:
        """Move a piece; what goes wrong is in `failures` and `error` afterwards."""
        if self.error is not None:
            return
        try:
            self._begin()
            for run in joined(self._places, piece.start, piece.stop):
                self._move(run)
        except OSError as error:
            self._fail(piece, mapped(error))
        except BaseException as error:  # noqa: BLE001 - a defect fails its job, and no other
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail as a whole; only the first reason counts."""
        if self.error is None:
            self.error = error if isinstance(error, TierError) else _as_defect(error)

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

    @classmethod
    @abstractmethod
    def finish(cls, shelf: Shelf, batches: Sequence[Self]) -> None:
        """End batches that have no piece left to move; what goes wrong is in them afterwards."""


class StoreBatch(Batch):
    """Blocks to write into claimed places; there as soon as they are journalled, all at once.

    Attributes:
        written: What was written so far, with its records.
        is_journalled: Whether those that did not fail are.
    """

    def __init__(self, shelf: Shelf, blocks: Blocks) -> None:
        super().__init__(shelf, blocks)
        self.written: list[PackedRun] = []
        self.is_journalled = False

    def _begin(self) -> None:
        """Journal the removals of the blocks in whose slots these are written."""
        self._shelf.journal.flush()

    def _move_joined(self, run: Run) -> None:
        # The checksums first: they bring the bytes into the cache, from which they are written.
        packed = self._packed(run)
        self._shelf.segments.write(run, self._rows)
        self.written.append((run.place, packed))

    def _packed(self, run: Run) -> bytes:
        """Return the records of a run."""
        shelf = self._shelf
        keys = self._keys[run.start : run.start + run.count]
        digests = None
        if shelf.verify:
            rows = self._rows[run.start : run.start + run.count]
            digests = shelf.digester.digests(keys, shelf.rows.each(rows))
        return put_records(keys, run.place, digests)

    @classmethod
    def finish(cls, shelf: Shelf, batches: Sequence[Self]) -> None:
        """Journal what was written, all of it in one append."""
        batches = [batch for batch in batches if batch.error is None]
        written = [run for batch in batches for run in batch.written]
        if not written:
            return
        try:
            if shelf.fdatasync:
                shelf.segments.sync({segment_of(place) for place, _ in written})
            shelf.journal.commit(written)
        except OSError as error:
            for batch in batches:
                batch.failures = dict.fromkeys(batch.indices, mapped(error))
        else:
            for batch in batches:
                batch.is_journalled = True


class LoadBatch(Batch):
    """Blocks to read from pinned places, each verified before it counts.

    Attributes:
        corrupt: Index in the batch of each block whose bytes are wrong; their records are gone.
    """

    def __init__(self, shelf: Shelf, blocks: Blocks) -> None:
        super().__init__(shelf, blocks)
        self.corrupt: list[int] = []

    def _move_joined(self, run: Run) -> None:
        shelf = self._shelf
        shelf.table.use(run.place, run.count)
        is_verified = shelf.verify or (
            shelf.table.has_suspects and shelf.table.is_suspect(run.place, run.count)
        )
        whole = shelf.segments.read(run, self._rows)
        for offset in range(whole, run.count):
            self._drop(run, offset, "ends early")
        if is_verified and whole:
            self._verify(run, whole)

    def _verify(self, run: Run, count: int) -> None:
        """Drop those of a run's first blocks whose bytes are not those that were stored."""
        shelf, part = self._shelf, slice(run.start, run.start + count)
        found = shelf.digester.digests(self._keys[part], shelf.rows.each(self._rows[part]))
        packed = shelf.table.digests(run.place, count)
        if b"".join(found) != packed:
            for offset, stored in enumerate(split_digests(packed)):
                if found[offset] != stored:
                    self._drop(run, offset, "has a wrong checksum")

    def _drop(self, run: Run, offset: int, what: str) -> None:
        index = run.start + offset
        key = self._keys[index]
        self._fail((index,), CorruptBlockError(f"block {key.hex()} {what}"))
        self._shelf.journal.note_removed((run.place + offset,))
        self.corrupt.append(index)

    @classmethod
    def finish(cls, shelf: Shelf, batches: Sequence[Self]) -> None:
        """Journal that bad blocks are gone; failing that, it is done with the next append."""
        if any(batch.corrupt for batch in batches):
            try:
                shelf.journal.flush()
            except OSError as error:
                logger.warning("a bad block's removal is not journalled yet: %s", str(error))


def _as_defect(error: BaseException) -> TierUnavailableError:
    failure = TierUnavailableError(f"moving blocks raised {error!r}")
    failure.__cause__ = error
    return failure
