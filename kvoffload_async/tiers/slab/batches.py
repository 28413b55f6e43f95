"""A job's blocks on their way, cut into extents of a few MiB that several threads can move.

Who moves which extent, and when a batch has ended, is the business of its `TransferQueue`.
Thread: an I/O thread, but for the construction and the outcome.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from kvoffload_async.errors import CorruptBlockError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.anchor import Anchor
from kvoffload_async.tiers.files.digests import BlockDigester
from kvoffload_async.tiers.files.failure import mapped
from kvoffload_async.tiers.slab.journal import Journal, PackedRun
from kvoffload_async.tiers.slab.places import Place, segment_of
from kvoffload_async.tiers.slab.records import put_records
from kvoffload_async.tiers.slab.rows import Rows
from kvoffload_async.tiers.slab.runs import Run, joined
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.tiers.slab.table import RecordTable, split_digests
from kvoffload_async.types import JobMetadata, OffloadKey

logger = logging.getLogger(__name__)

_SHARES: Final = 4
"""How many extents an idle thread gets of a job, about."""

_LEAST_SHARE: Final = 4
"""Which part of the store's own extents these are at least."""


@dataclass(frozen=True, slots=True)
class DataPath:
    """What a batch works with.

    Attributes:
        anchor: Of the store's folder.
        digester: Computes checksums.
        verify: Whether they are computed and compared.
        fdatasync: Whether blocks must be on the device before they are journalled.
        piece_bytes: About what one system call moves, where there is enough to do.
    """

    rows: Rows
    anchor: Anchor
    segments: Segments
    table: RecordTable
    journal: Journal
    digester: BlockDigester
    verify: bool
    fdatasync: bool
    piece_bytes: int

    @property
    def extent_slots(self) -> int:
        """Slots of an extent."""
        return max(1, self.piece_bytes // self.rows.slot_bytes)


class Blocks(NamedTuple):
    """Blocks of one job; the three sequences are parallel.

    Attributes:
        keys: Theirs.
        places: Where they are in the store, or shall be; those of each extent ascend.
        rows: Where they are in the primary, or shall be.
    """

    keys: Sequence[OffloadKey]
    places: Sequence[Place]
    rows: Sequence[int]


def in_order_of_places(
    job: JobMetadata, found: Sequence[Place | None]
) -> tuple[Blocks, Sequence[int]]:
    """Return the blocks of a job that are there, their places ascending, and their indices."""
    rows: list[int] = job.block_ids.tolist()
    places = [place for place in found if place is not None]
    if len(places) == len(found) and sorted(places) == places:
        return Blocks(job.keys, places, rows), range(len(places))
    order = sorted((place, index) for index, place in enumerate(found) if place is not None)
    indices = [index for _, index in order]
    keys = [job.keys[index] for index in indices]
    return Blocks(keys, sorted(places), [rows[index] for index in indices]), indices


class Batch(ABC):
    """Blocks on their way.

    Attributes:
        indices: Of its blocks.
        failures: Index in the batch -> why that block failed.
        error: Why the batch failed as a whole, if it did.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks) -> None:
        """Take blocks on."""
        self._data_path = data_path
        self._keys, self._places, self._rows = blocks
        self.indices = range(len(blocks.keys))
        self.failures: dict[int, TierError] = {}
        self.error: TierError | None = None
        self._digests: list[bytes] = [b""] * len(blocks.keys)
        """The checksum of what was moved; empty where none is wanted."""

    def extents(self, idle_threads: int) -> Sequence[range]:
        """Return the extents, as ranges of indices; smaller ones where threads wait for them.

        None lies in two of the store's own extents, each of which has ascending places.
        """
        size = whole = self._data_path.extent_slots
        if idle_threads:
            share = -(-len(self.indices) // (_SHARES * idle_threads))
            size = max(1, whole // _LEAST_SHARE, min(whole, share))
        return [
            part[start : start + size]
            for part in (self.indices[first : first + whole] for first in self.indices[::whole])
            for start in range(0, len(part), size)
        ]

    def move(self, extent: range) -> None:
        """Move an extent; what goes wrong is in `failures` and `error` afterwards."""
        if self.error is not None:
            return
        try:
            self._begin()
            for run in joined(self._places, extent.start, extent.stop):
                try:
                    self._move(run)
                except OSError as error:
                    self._move_singly(run, error)
        except OSError as error:
            self._fail(extent, mapped(error))
        except BaseException as error:  # noqa: BLE001 - a defect fails its job, and no other
            self.fail(error)

    def file_of(self, extent: range) -> int | None:
        """Return the file that an extent should have to itself; None if it needs none."""
        return None

    def fail(self, error: BaseException) -> None:
        """Fail as a whole; only the first reason counts."""
        if self.error is None:
            self.error = error if isinstance(error, TierError) else _as_defect(error)

    def _fail(self, indices: Sequence[int], error: TierError) -> None:
        self.failures.update(dict.fromkeys(indices, error))

    def _move_singly(self, run: Run, error: OSError) -> None:
        """Move a run that cannot be moved in one call: each of its blocks on its own."""
        if run.length == 1:
            self._fail((run.start,), mapped(error))
            return
        for offset in range(run.length):
            single = Run(run.place + offset, run.start + offset, 1)
            try:
                self._move(single)
            except OSError as own_error:
                self._move_singly(single, own_error)

    def _begin(self) -> None:  # noqa: B027 - a load has nothing to do first
        """Do what must be done before an extent is moved; raises OSError."""

    @abstractmethod
    def _move(self, run: Run) -> None:
        """Move a run in one call; raises OSError."""

    @classmethod
    @abstractmethod
    def finish(cls, data_path: DataPath, batches: Sequence[Self]) -> None:
        """End batches that have no extent left to move; what goes wrong is in them afterwards."""


class StoreBatch(Batch):
    """Blocks to write into claimed places; there as soon as they are journalled, all at once.

    Attributes:
        is_journalled: Whether those that did not fail are.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks) -> None:
        super().__init__(data_path, blocks)
        self.is_journalled = False
        self.sync_failures = data_path.segments.sync_failures
        """How often waiting for the device had failed before the first byte was written."""

    def file_of(self, extent: range) -> int:
        """Return the extent's segment: the kernel lets one write at a time into a file."""
        return segment_of(self._places[extent.start])

    def _begin(self) -> None:
        """Journal the removals of the blocks in whose slots these are written."""
        self._data_path.journal.flush(lambda: self.error is None)

    def _move(self, run: Run) -> None:
        data_path, part = self._data_path, slice(run.start, run.start + run.length)
        rows = data_path.rows.each(self._rows[part])
        if (
            data_path.verify
        ):  # first: that brings the bytes into the cache, from which they are written
            self._digests[part] = data_path.digester.digests(self._keys[part], rows)
        data_path.segments.write(run.place, rows)

    def records(self) -> list[PackedRun]:
        """Return the records of what was written, a run at a time."""
        size = self._data_path.extent_slots
        runs = [
            run
            for start in self.indices[::size]
            for run in joined(self._places, start, min(start + size, len(self.indices)))
        ]
        if self.failures:
            runs = [
                Run(run.place + offset, run.start + offset, 1)
                for run in runs
                for offset in range(run.length)
                if run.start + offset not in self.failures
            ]
        return [(run.place, self._packed(run)) for run in runs]

    def _packed(self, run: Run) -> bytes:
        part = slice(run.start, run.start + run.length)
        is_keyed = self._data_path.digester.is_keyed
        return put_records(
            self._keys[part],
            run.place,
            self._digests[part],
            self._data_path.table.tick,
            is_keyed=is_keyed,
        )

    @classmethod
    def finish(cls, data_path: DataPath, batches: Sequence[Self]) -> None:
        """Journal what was written, all of it in one append."""
        batches = [batch for batch in batches if batch.error is None]
        written = [run for batch in batches for run in batch.records()]
        if not written:
            return
        try:
            numbers = {segment_of(place) for place, _ in written}
            data_path.segments.check(numbers)
            if data_path.fdatasync:
                data_path.segments.sync(numbers, min(batch.sync_failures for batch in batches))
            data_path.journal.commit(written, lambda: any(b.error is None for b in batches))
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
        segments: Those that were read.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks) -> None:
        super().__init__(data_path, blocks)
        self.corrupt: list[int] = []
        self._is_verified = False
        self.segments: set[int] = set()

    def _move(self, run: Run) -> None:
        self.segments.add(segment_of(run.place))
        data_path, part = self._data_path, slice(run.start, run.start + run.length)
        rows = data_path.rows.each(self._rows[part])
        whole = data_path.segments.read(run.place, rows)
        if whole < run.length:
            self._drop(range(run.start + whole, part.stop), "ends early")
            part, rows = slice(run.start, run.start + whole), rows[:whole]
        if data_path.verify or (
            data_path.table.has_suspects and data_path.table.is_suspect(run.place, run.length)
        ):
            self._is_verified = True
            self._digests[part] = data_path.digester.digests(self._keys[part], rows)

    def check(self) -> None:
        """Note that the blocks were used; drop those whose bytes are not those that were stored."""
        table = self._data_path.table
        for run in joined(self._places, 0, len(self._places)):
            table.use(run.place, run.length)
            if self._data_path.verify or self._is_verified:
                self._verify(run, table.digests(run.place, run.length))

    def _verify(self, run: Run, stored: bytes) -> None:
        found = self._digests[run.start : run.start + run.length]
        if b"".join(found) == stored:
            return
        for index, (has, should) in enumerate(
            zip(found, split_digests(stored), strict=True), run.start
        ):
            is_wanted = has or (self._data_path.verify and index not in self.failures)
            if is_wanted and has != should:  # without a checksum it was not verified: not served
                self._drop((index,), "has a wrong checksum")

    def _drop(self, indices: Sequence[int], what: str) -> None:
        for index in indices:
            key = self._keys[index]
            self._fail((index,), CorruptBlockError(f"block {key.hex()} {what}"))
            self._data_path.journal.note_removed((self._places[index],))
            self.corrupt.append(index)

    @classmethod
    def finish(cls, data_path: DataPath, batches: Sequence[Self]) -> None:
        """Verify; journal that bad blocks are gone, or failing that, with the next append."""
        batches = [batch for batch in batches if batch.error is None]
        try:
            data_path.anchor.check()
            data_path.segments.check(set[int]().union(*(batch.segments for batch in batches)))
        except OSError as error:
            for batch in batches:
                batch.failures = dict.fromkeys(batch.indices, mapped(error))
            return
        for batch in batches:
            batch.check()
        if any(batch.corrupt for batch in batches):
            try:
                data_path.journal.flush(is_awaited=lambda: False)  # a load does not wait for that
            except OSError as error:
                logger.warning("a bad block's removal is not journalled yet: %s", str(error))


def _as_defect(error: BaseException) -> TierUnavailableError:
    failure = TierUnavailableError(f"moving blocks raised {error!r}")
    failure.__cause__ = error
    return failure
