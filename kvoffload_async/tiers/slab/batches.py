"""The blocks of one job on their way: what is asked of `BlockIo`, and what its answer means."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from kvoffload_async.block_io import ENDED_EARLY, Moved
from kvoffload_async.errors import CorruptBlockError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.anchor import Anchor
from kvoffload_async.tiers.files.digests import DIGEST_BYTES, BlockDigester
from kvoffload_async.tiers.files.failure import mapped
from kvoffload_async.tiers.slab.journal import Journal
from kvoffload_async.tiers.slab.places import Place, segment_of
from kvoffload_async.tiers.slab.records import PackedRun, put_records
from kvoffload_async.tiers.slab.runs import Run, joined
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.tiers.slab.table import RecordTable, split_digests
from kvoffload_async.types import JobMetadata, OffloadKey


@dataclass(frozen=True, slots=True)
class DataPath:
    """What a batch works with.

    Attributes:
        anchor: Of the store's folder.
        digester: Computes checksums.
        slot_bytes: Bytes of a slot.
        verify: Whether checksums are computed and compared.
        fdatasync: Whether blocks must be on the device before they are journalled.
        piece_bytes: About what one Python thread moves at a time, where there is enough to do.
    """

    anchor: Anchor
    segments: Segments
    table: RecordTable
    journal: Journal
    digester: BlockDigester
    slot_bytes: int
    verify: bool
    fdatasync: bool
    piece_bytes: int

    @property
    def extent_slots(self) -> int:
        """Slots of an extent: how many neighbours are worth having."""
        return max(1, self.piece_bytes // self.slot_bytes)


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


class Batch:
    """Blocks on their way. Thread: loop, but for `StoreBatch.finish`.

    Attributes:
        blocks: They.
        indices: Theirs.
        runs: Which of them lie beside each other.
        failures: Index in the batch -> why that block failed.
        error: Why the batch failed as a whole, if it did.
        wants_digests: Whether checksums are to be computed.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks, piece: int) -> None:
        """Take blocks on; `piece` is how many have ascending places."""
        self._data_path = data_path
        self.blocks = blocks
        count = len(blocks.keys)
        self.indices = range(count)
        self.runs: Sequence[Run] = [
            run
            for start in range(0, count, piece)
            for run in joined(blocks.places, start, min(start + piece, count))
        ]
        self.failures: dict[int, TierError] = {}
        self.error: TierError | None = None
        self.wants_digests = data_path.verify
        self._digests: bytes | bytearray = b""

    @property
    def segments(self) -> set[int]:
        """The segments with its places."""
        return {segment_of(run.place) for run in self.runs}

    def take(self, moved: Moved) -> None:
        """Note what became of all blocks."""
        self._digests = moved.digests

    def take_some(self, runs: Sequence[Run], moved: Moved) -> None:
        """Note what became of some blocks, which were moved once more."""
        if moved.digests:
            digests, taken = bytearray(self._digests), 0
            for run in runs:
                start, size = run.start * DIGEST_BYTES, run.length * DIGEST_BYTES
                digests[start : start + size] = moved.digests[taken : taken + size]
                taken += size
            self._digests = digests

    def fail_with(self, errors: dict[int, int]) -> None:
        """Fail blocks, given the numbers of the errors."""
        for index, code in errors.items():
            self.failures[index] = mapped(OSError(code, os.strerror(code)))

    def fail(self, error: BaseException) -> None:
        """Fail: every block, for want of the system, or the batch as a whole, for a defect."""
        if isinstance(error, OSError):
            self.failures = dict.fromkeys(self.indices, mapped(error))
        elif self.error is None:
            self.error = error if isinstance(error, TierError) else _as_defect(error)

    def _digests_of(self, run: Run) -> bytes:
        start = run.start * DIGEST_BYTES
        return bytes(self._digests[start : start + run.length * DIGEST_BYTES])


class StoreBatch(Batch):
    """Blocks to write into claimed places; there as soon as they are journalled, all at once.

    Attributes:
        is_journalled: Whether those that did not fail are.
        sync_failures: How often waiting for the device had failed before the first byte was
            written.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks) -> None:
        super().__init__(data_path, blocks, data_path.extent_slots)
        self.is_journalled = False
        self.sync_failures = data_path.segments.sync_failures

    def records(self) -> list[PackedRun]:
        """Return the records of what was written, a run at a time."""
        runs = self.runs
        if self.failures:
            runs = [
                Run(run.place + offset, run.start + offset, 1)
                for run in runs
                for offset in range(run.length)
                if run.start + offset not in self.failures
            ]
        return [(run.place, self._packed(run)) for run in runs]

    def _packed(self, run: Run) -> bytes:
        digests = [b""] * run.length
        if self.wants_digests:
            digests = split_digests(self._digests_of(run))
        return put_records(
            self.blocks.keys[run.start : run.start + run.length],
            run.place,
            digests,
            self._data_path.table.tick,
            is_keyed=self._data_path.digester.is_keyed,
        )

    @classmethod
    def finish(
        cls, data_path: DataPath, batches: Sequence[Self], is_awaited: Callable[[], bool]
    ) -> None:
        """Journal what was written, all of it in one append; see `Journal.commit`.

        Thread: an I/O thread.
        """
        written = [run for batch in batches for run in batch.records()]
        try:
            numbers = {segment_of(place) for place, _ in written}
            data_path.segments.check(numbers)
            if data_path.fdatasync:
                data_path.segments.sync(numbers, min(batch.sync_failures for batch in batches))
            data_path.journal.commit(written, is_awaited)
        except OSError as error:
            for batch in batches:
                batch.fail(error)
        else:
            for batch in batches:
                batch.is_journalled = True


class LoadBatch(Batch):
    """Blocks to read from pinned places, which ascend; each is verified before it counts.

    Attributes:
        corrupt: Index in the batch of each block whose bytes are wrong; their records are gone.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks) -> None:
        super().__init__(data_path, blocks, max(1, len(blocks.keys)))
        self.corrupt: list[int] = []
        self._verified = self.runs
        table = data_path.table
        if not data_path.verify:
            self._verified = [
                run
                for run in self.runs
                if table.has_suspects and table.is_suspect(run.place, run.length)
            ]
            self.wants_digests = bool(self._verified)

    def fail_with(self, errors: dict[int, int]) -> None:
        super().fail_with({i: code for i, code in errors.items() if code != ENDED_EARLY})
        for index in sorted(errors):
            if errors[index] == ENDED_EARLY:
                self._drop(index, "ends early")

    def check(self) -> None:
        """Note that the blocks were used; drop those whose bytes are not those that were stored."""
        table = self._data_path.table
        for run in self.runs:
            table.use(run.place, run.length)
        for run in self._verified:
            stored = table.digests(run.place, run.length)
            if self._digests_of(run) != stored:
                self._compare(run, split_digests(stored))

    def _compare(self, run: Run, stored: Sequence[bytes]) -> None:
        for index, digest in enumerate(stored, run.start):
            found = self._digests_of(Run(run.place, index, 1))
            if index not in self.failures and found != digest:
                self._drop(index, "has a wrong checksum")

    def _drop(self, index: int, what: str) -> None:
        key = self.blocks.keys[index]
        self.failures[index] = CorruptBlockError(f"block {key.hex()} {what}")
        self._data_path.journal.note_removed((self.blocks.places[index],))
        self.corrupt.append(index)


def _as_defect(error: BaseException) -> TierUnavailableError:
    failure = TierUnavailableError(f"moving blocks raised {error!r}")
    failure.__cause__ = error
    return failure
