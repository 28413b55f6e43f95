"""The transfers of a job: which calls move, verify and journal its blocks, shared with which jobs.

Payload goes through `BlockIo`, which wakes the loop when a batch has ended. What else may block is
made by an I/O thread, one call for all jobs that wait for it: the check of the files of what is
loaded, beside the loading; the removals of the blocks whose slots are written to, before the
writing; the records of what was written, after it.

Thread: the loop's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Self

from kvoffload_async.abc.tier import Direction, IoRunner, TierEnvironment
from kvoffload_async.block_io.choice import create_block_io
from kvoffload_async.block_io.contract import ENDED_EARLY, BlockIo, Moved
from kvoffload_async.errors import CorruptBlockError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.coalescing import Coalescer
from kvoffload_async.tiers.files.digests import DIGEST_BYTES, BlockDigester
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.ops import FileOps, mapped
from kvoffload_async.tiers.slab.journal import Journal, RecordTable, split_digests
from kvoffload_async.tiers.slab.places import Run, SlotAddress, joined, segment_of
from kvoffload_async.tiers.slab.records import PackedRun, put_records
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.types import JobMetadata, OffloadKey


@dataclass(frozen=True, slots=True)
class DataPath:
    """What a batch works with.

    Attributes:
        directory_identity: Of the store's folder.
        digester: Computes checksums.
        slot_bytes: Bytes of a slot.
        verify: Whether checksums are computed and compared.
        fdatasync: Whether blocks must be on the device before they are journalled.
        piece_bytes: About what one Python thread moves at a time, where there is enough to do.
    """

    directory_identity: DirectoryIdentity
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
    places: Sequence[SlotAddress]
    rows: Sequence[int]


def in_order_of_places(
    job: JobMetadata, found: Sequence[SlotAddress | None]
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
                if table.has_unverified and table.needs_verify(run.place, run.length)
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


logger = logging.getLogger(__name__)

_CHECK_S: Final = 0.1
"""For how long loads rely on a look after a segment's file, which stores never do.

A load that comes too soon to notice that the file is gone has the right bytes all the same: it
reads from the file that is open, and compares. A look takes a thread that needs the interpreter's
lock several times, which a scheduler that computes gives up only every 5 ms.
"""


class Transfers:
    """Moves batches between the primary and the segments of one store."""

    def __init__(self, data_path: DataPath, block_io: BlockIo, io: IoRunner) -> None:
        """Begin with none; `block_io` is owned from now on."""
        self._data_path = data_path
        self._block_io = block_io
        self._loop = asyncio.get_running_loop()
        self._checked_s: dict[int, float] = {}
        """Segment -> when the last look began that found its file; empty after one that did not."""
        probe, store = partial(io.run, Direction.METADATA), partial(io.run, Direction.STORE)
        self._checks = Coalescer("slab:check", self._check, probe)
        self._flushes = Coalescer("slab:flush", self._flush, store)
        self._notes = Coalescer("slab:note", self._note, store)
        self._commits = Coalescer("slab:commit", self._commit, store)
        self._compactions = Coalescer("slab:compact_step", self._compact_step, store)

    async def load(self, batch: LoadBatch) -> None:
        """Load a batch; returns when no byte of it moves any more, also if cancelled.

        Raises:
            TierError: The batch has failed as a whole.
        """
        # Beside the loading: the bytes are compared, whatever became of the names of the files.
        now_s = self._loop.time()
        unchecked = self._unchecked(batch.segments, now_s)
        checking = self._checks.begin(unchecked) if unchecked else None
        await self._move(Direction.LOAD, batch)
        error: BaseException | None = None
        if checking is not None:
            if not checking.done():
                await checking
            error = checking.result()
        if error is not None:
            self._checked_s.clear()
            batch.fail(error)
        else:
            self._checked_s.update(dict.fromkeys(unchecked, now_s))
            batch.check()
        if batch.corrupt and (error := await self._notes.add(None)) is not None:
            logger.warning("a bad block's removal is not journalled yet: %s", str(error))
        if batch.error is not None:
            raise batch.error

    async def store(self, batch: StoreBatch) -> None:
        """Store a batch; returns when no byte of it moves any more, also if cancelled.

        Raises:
            TierError: The batch has failed as a whole; it may be journalled all the same.
        """
        error: BaseException | None = None
        if self._data_path.journal.has_removals:
            error = await self._flushes.add(None)  # before the slots are written to
        if error is None:
            await self._move(Direction.STORE, batch)
            if len(batch.failures) < len(batch.indices):
                error = await self._commits.add(batch)
                if self._data_path.journal.needs_compaction:
                    self._compactions.begin(None)
        if error is not None:
            batch.fail(error)
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait until no thread is at work; no job may run any more."""
        for call in (self._checks, self._flushes, self._notes, self._commits, self._compactions):
            await call.close()
        await self._block_io.close()

    def _unchecked(self, segments: set[int], now_s: float) -> set[int]:
        """Return the segments whose files nobody has looked after of late."""
        since_s, checked_s = now_s - _CHECK_S, self._checked_s
        return {number for number in segments if checked_s.get(number, -math.inf) <= since_s}

    # -- payload --------------------------------------------------------------------------------

    async def _move(self, direction: Direction, batch: Batch) -> None:
        """Move all blocks; those of a run that fails, one by one once more."""
        moved = await self._move_runs(direction, batch, batch.runs)
        batch.take(moved)
        if not moved.errors:
            return
        errors = dict(moved.errors)
        for run in batch.runs:
            for offset in range(run.length if run.length > 1 else 0):
                index = run.start + offset
                if errors.get(index, ENDED_EARLY) != ENDED_EARLY:
                    single = (Run(run.place + offset, index, 1),)
                    moved = await self._move_runs(direction, batch, single)
                    batch.take_some(single, moved)
                    del errors[index]
                    if moved.errors:
                        errors[index] = moved.errors[0]
        batch.fail_with(errors)

    async def _move_runs(self, direction: Direction, batch: Batch, runs: Sequence[Run]) -> Moved:
        """Move runs of a batch; past the page cache, unless that is refused.

        Returns:
            What became of them, by their order.
        """
        segments = self._data_path.segments
        keys, _, rows = batch.blocks
        if runs is not batch.runs:
            indices = [run.start + offset for run in runs for offset in range(run.length)]
            keys, rows = [keys[index] for index in indices], [rows[index] for index in indices]
        wanted = keys if batch.wants_digests else None
        direct = segments.direct_flag
        extents = segments.extents(runs, is_direct=bool(direct))
        move = partial(self._block_io.extents, direction, rows)
        moved = await move(extents, wanted, is_direct=bool(direct))
        if direct and segments.refuse(direct, moved.errors.values()):
            extents = segments.extents(runs, is_direct=False)
            moved = await move(extents, wanted)
        return moved

    # -- calls that are shared ------------------------------------------------------------------

    def _check(self, segments: Sequence[set[int]], _is_awaited: Callable[[], bool]) -> None:
        """Look whether folder and files are there still. Thread: an I/O thread."""
        self._data_path.directory_identity.check()
        self._data_path.segments.check(set[int]().union(*segments))

    def _flush(self, _waiting: Sequence[None], is_awaited: Callable[[], bool]) -> None:
        """Journal the removals noted so far. Thread: an I/O thread."""
        self._data_path.journal.flush(is_awaited)

    def _note(self, _waiting: Sequence[None], _is_awaited: Callable[[], bool]) -> None:
        """Journal that blocks are bad, if there is room: a load does not wait for it.

        Thread: an I/O thread.
        """
        self._data_path.journal.flush(lambda: False)

    def _commit(self, batches: Sequence[StoreBatch], is_awaited: Callable[[], bool]) -> None:
        """Journal what was written. Thread: an I/O thread."""
        StoreBatch.finish(self._data_path, batches, is_awaited)

    def _compact_step(self, _waiting: Sequence[None], _is_awaited: Callable[[], bool]) -> None:
        """Go on with the next journal, which nobody waits for. Thread: an I/O thread."""
        self._data_path.journal.compact_step()


def create_transfers(
    env: TierEnvironment, ops: FileOps, data_path: DataPath, threads: int
) -> Transfers:
    """Return what moves a store's blocks; `threads` of them move bytes.

    Raises:
        ConfigError: Native code is required and cannot be used.
        OSError: There are no more threads.
    """
    block_io = create_block_io(
        env,
        ops,
        data_path.digester,
        slot_bytes=data_path.slot_bytes,
        threads=threads,
        piece_bytes=data_path.piece_bytes,
        is_direct=bool(data_path.segments.direct_flag),
        is_system=type(ops) is FileOps,
    )
    return Transfers(data_path, block_io, env.io)
