"""Block transfers of jobs: copying, verification and journalling, coalesced across jobs.

`BlockIo` copies payload, and wakes the loop when a batch has ended. Other blocking work runs on an
I/O thread, one call for all waiting jobs: the check of the segment files during a load; the removal
records of overwritten slots before a write; the records of written blocks after it.

Not thread-safe; call only from the event loop's thread, unless stated otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Self

from kvoffload_async.abc.tier import Direction, IoRunner, TierEnvironment
from kvoffload_async.block_io.choice import create_block_io
from kvoffload_async.block_io.contract import ENDED_EARLY, BlockIo, Moved
from kvoffload_async.errors import CorruptBlockError, TierError, TierUnavailableError
from kvoffload_async.tiers.files.digests import DIGEST_BYTES, BlockDigester
from kvoffload_async.tiers.files.identity import DirectoryIdentity
from kvoffload_async.tiers.files.ops import FileOps, mapped
from kvoffload_async.tiers.slab.addresses import Run, SlotAddress, joined, segment_of
from kvoffload_async.tiers.slab.journal import Journal, RecordTable, split_digests
from kvoffload_async.tiers.slab.records import PackedRun, put_records
from kvoffload_async.tiers.slab.segments import Segments
from kvoffload_async.types import JobMetadata, OffloadKey, block_text
from kvoffload_async.waiting import Coalescer


@dataclass(frozen=True, slots=True)
class DataPath:
    """Shared parts of a store that transfers use.

    Attributes:
        directory_identity: Identity of the store's folder.
        digester: Computes checksums.
        slot_bytes: Bytes of a slot.
        verify: Whether checksums are computed and compared.
        fdatasync: Whether blocks are synced before they are journalled.
        piece_bytes: Approximate bytes that one Python thread copies at a time.
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
        """Number of slots of an extent, the unit of adjacent allocation."""
        return max(1, self.piece_bytes // self.slot_bytes)


class Blocks(NamedTuple):
    """Blocks of one job; the three sequences are parallel.

    Attributes:
        keys: Keys of the blocks.
        addresses: Addresses in the store; those of each extent ascend.
        rows: Rows in the primary.
    """

    keys: Sequence[OffloadKey]
    addresses: Sequence[SlotAddress]
    rows: Sequence[int]


def in_order_of_addresses(
    job: JobMetadata, found: Sequence[SlotAddress | None]
) -> tuple[Blocks, Sequence[int]]:
    """Return a job's found blocks in ascending order of addresses, and their job indices."""
    rows: list[int] = job.block_ids.tolist()
    addresses = [address for address in found if address is not None]
    if len(addresses) == len(found) and sorted(addresses) == addresses:
        return Blocks(job.keys, addresses, rows), range(len(addresses))
    order = sorted((address, index) for index, address in enumerate(found) if address is not None)
    indices = [index for _, index in order]
    keys = [job.keys[index] for index in indices]
    return Blocks(keys, sorted(addresses), [rows[index] for index in indices]), indices


class Batch:
    """Blocks being copied. Thread: loop, except for `StoreBatch.finish`.

    Attributes:
        blocks: The blocks.
        indices: Their indices.
        runs: Runs of adjacent addresses.
        failures: Index in the batch -> the block's error.
        error: Set if the whole batch failed.
        wants_digests: Whether to compute checksums.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks, piece: int) -> None:
        """Create a batch; addresses ascend within each group of `piece` blocks."""
        self._data_path = data_path
        self.blocks = blocks
        count = len(blocks.keys)
        self.indices = range(count)
        self.runs: Sequence[Run] = [
            run
            for start in range(0, count, piece)
            for run in joined(blocks.addresses, start, min(start + piece, count))
        ]
        self.failures: dict[int, TierError] = {}
        self.error: TierError | None = None
        self.wants_digests = data_path.verify
        self._digests: bytes | bytearray = b""

    @property
    def segments(self) -> set[int]:
        """The segments that contain its addresses."""
        return {segment_of(run.address) for run in self.runs}

    def take(self, moved: Moved) -> None:
        """Take over the digests of all blocks."""
        self._digests = moved.digests

    def take_some(self, runs: Sequence[Run], moved: Moved) -> None:
        """Take over the digests of some blocks that were copied again."""
        if moved.digests:
            digests, taken = bytearray(self._digests), 0
            for run in runs:
                start, size = run.start * DIGEST_BYTES, run.length * DIGEST_BYTES
                digests[start : start + size] = moved.digests[taken : taken + size]
                taken += size
            self._digests = digests

    def fail_with(self, errors: dict[int, int]) -> None:
        """Fail blocks, given by index and errno."""
        for index, code in errors.items():
            self.failures[index] = mapped(OSError(code, os.strerror(code)))

    def fail(self, error: BaseException) -> None:
        """Fail every block for an `OSError`, or the whole batch for another error."""
        if isinstance(error, OSError):
            self.failures = dict.fromkeys(self.indices, mapped(error))
        elif self.error is None:
            self.error = error if isinstance(error, TierError) else _as_defect(error)

    def _digests_of(self, run: Run) -> bytes:
        start = run.start * DIGEST_BYTES
        return bytes(self._digests[start : start + run.length * DIGEST_BYTES])


class StoreBatch(Batch):
    """Blocks to write into claimed addresses; journalled together after writing.

    Attributes:
        is_journalled: Whether the blocks that did not fail are journalled.
        sync_failures: Number of failed syncs before the first write.
    """

    def __init__(self, data_path: DataPath, blocks: Blocks) -> None:
        super().__init__(data_path, blocks, data_path.extent_slots)
        self.is_journalled = False
        self.sync_failures = data_path.segments.sync_failures

    def records(self) -> list[PackedRun]:
        """Return the packed records of the written blocks, by run."""
        runs = self.runs
        if self.failures:
            runs = [
                Run(run.address + offset, run.start + offset, 1)
                for run in runs
                for offset in range(run.length)
                if run.start + offset not in self.failures
            ]
        return [(run.address, self._packed(run)) for run in runs]

    def _packed(self, run: Run) -> bytes:
        digests = [b""] * run.length
        if self.wants_digests:
            digests = split_digests(self._digests_of(run))
        return put_records(
            self.blocks.keys[run.start : run.start + run.length],
            run.address,
            digests,
            self._data_path.table.tick,
            is_keyed=self._data_path.digester.is_keyed,
        )

    @classmethod
    def finish(
        cls, data_path: DataPath, batches: Sequence[Self], is_awaited: Callable[[], bool]
    ) -> None:
        """Journal the written blocks of all batches in one append; see `Journal.commit`.

        Thread: an I/O thread.
        """
        written = [run for batch in batches for run in batch.records()]
        try:
            numbers = {segment_of(address) for address, _ in written}
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
    """Blocks to read from pinned, ascending addresses, and to verify.

    Attributes:
        corrupt: Batch indices of corrupt blocks; their records are removed.
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
                if table.has_unverified and table.needs_verify(run.address, run.length)
            ]
            self.wants_digests = bool(self._verified)

    def fail_with(self, errors: dict[int, int]) -> None:
        super().fail_with({i: code for i, code in errors.items() if code != ENDED_EARLY})
        for index in sorted(errors):
            if errors[index] == ENDED_EARLY:
                self._drop(index, "ends early")

    def check(self) -> None:
        """Record the uses of the blocks, and verify checksums; drop corrupt blocks."""
        table = self._data_path.table
        for run in self.runs:
            table.use(run.address, run.length)
        for run in self._verified:
            stored = table.digests(run.address, run.length)
            if self._digests_of(run) != stored:
                self._compare(run, split_digests(stored))

    def _compare(self, run: Run, stored: Sequence[bytes]) -> None:
        for index, digest in enumerate(stored, run.start):
            found = self._digests_of(Run(run.address, index, 1))
            if index not in self.failures and found != digest:
                self._drop(index, "has a wrong checksum")

    def _drop(self, index: int, what: str) -> None:
        key = self.blocks.keys[index]
        self.failures[index] = CorruptBlockError(f"{block_text(key)} {what}")
        self._data_path.journal.note_removed((self.blocks.addresses[index],))
        self.corrupt.append(index)


def _as_defect(error: BaseException) -> TierUnavailableError:
    failure = TierUnavailableError(f"copying blocks raised {error!r}")
    failure.__cause__ = error
    return failure


logger = logging.getLogger(__name__)

_CHECK_S: Final = 0.1
"""How long, in seconds, a load relies on an earlier check of a segment file. Stores always
check."""


class Transfers:
    """Copies batches between the primary and the segments of one store."""

    def __init__(self, data_path: DataPath, block_io: BlockIo, io: IoRunner) -> None:
        """Start without batches, and take ownership of `block_io`."""
        self._data_path = data_path
        self._block_io = block_io
        self._loop = asyncio.get_running_loop()
        self._checked_s: dict[int, float] = {}
        """Segment -> start of its last successful file check; cleared after a failed one."""
        probe, store = partial(io.run, Direction.METADATA), partial(io.run, Direction.STORE)
        self._checks = Coalescer("slab:check", self._check, probe)
        self._flushes = Coalescer("slab:flush", self._flush, store)
        self._notes = Coalescer("slab:note", self._note, store)
        self._commits = Coalescer("slab:commit", self._commit, store)
        self._compactions = Coalescer("slab:compact_step", self._compact_step, store)

    async def load(self, batch: LoadBatch) -> None:
        """Load a batch; returns when no byte of it moves any more, even if cancelled.

        Raises:
            TierError: The whole batch failed.
        """
        # The check may run during the load, because the checksums of the blocks verify the bytes.
        now_s = self._loop.time()
        unchecked = self._unchecked(batch.segments, now_s)
        checking = self._checks.begin(unchecked) if unchecked else None
        moved = await self._move(Direction.LOAD, batch, batch.runs)
        batch.take(moved)
        if moved.errors:
            await self._retry(Direction.LOAD, batch, moved.errors)
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
            logger.warning("the removal of a corrupt block is not journalled yet: %s", str(error))
        if batch.error is not None:
            raise batch.error

    async def store(self, batch: StoreBatch) -> None:
        """Store a batch; returns when no byte of it moves any more, even if cancelled.

        Raises:
            TierError: The whole batch failed; it may still be journalled.
        """
        error: BaseException | None = None
        if self._data_path.journal.has_removals:
            error = await self._flushes.add(None)  # before the slots are overwritten
        if error is None:
            moved = await self._move(Direction.STORE, batch, batch.runs)
            batch.take(moved)
            if moved.errors:
                await self._retry(Direction.STORE, batch, moved.errors)
            if len(batch.failures) < len(batch.indices):
                error = await self._commits.add(batch)
                if self._data_path.journal.needs_compaction:
                    self._compactions.begin(None)
        if error is not None:
            batch.fail(error)
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait until no thread is working; no job may be running."""
        for call in (self._checks, self._flushes, self._notes, self._commits, self._compactions):
            await call.close()
        await self._block_io.close()

    def _unchecked(self, segments: set[int], now_s: float) -> set[int]:
        """Return the segments whose files were not checked recently."""
        since_s, checked_s = now_s - _CHECK_S, self._checked_s
        return {number for number in segments if checked_s.get(number, -math.inf) <= since_s}

    # -- payload --------------------------------------------------------------------------------

    async def _move(self, direction: Direction, batch: Batch, runs: Sequence[Run]) -> Moved:
        """Copy runs of a batch, with O_DIRECT unless that is refused.

        Returns:
            The result, with indices into the runs' blocks.
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

    async def _retry(self, direction: Direction, batch: Batch, failed: Mapping[int, int]) -> None:
        """Copy the blocks of runs with an error one by one, and record the errors that are left.

        Args:
            direction: LOAD or STORE.
            batch: The batch.
            failed: The errors of the runs, by index of the block.
        """
        errors = dict(failed)
        for run in batch.runs:
            for offset in range(run.length if run.length > 1 else 0):
                index = run.start + offset
                if errors.get(index, ENDED_EARLY) != ENDED_EARLY:
                    single = (Run(run.address + offset, index, 1),)
                    moved = await self._move(direction, batch, single)
                    batch.take_some(single, moved)
                    del errors[index]
                    if moved.errors:
                        errors[index] = moved.errors[0]
        batch.fail_with(errors)

    # -- coalesced calls ---------------------------------------------------------------------------

    def _check(self, segments: Sequence[set[int]], _is_awaited: Callable[[], bool]) -> None:
        """Check that folder and segment files still exist. Thread: an I/O thread."""
        self._data_path.directory_identity.check()
        self._data_path.segments.check(set[int]().union(*segments))

    def _flush(self, _waiting: Sequence[None], is_awaited: Callable[[], bool]) -> None:
        """Journal the buffered removals. Thread: an I/O thread."""
        self._data_path.journal.flush(is_awaited)

    def _note(self, _waiting: Sequence[None], _is_awaited: Callable[[], bool]) -> None:
        """Journal removals of corrupt blocks, if there is space: loads do not wait for it.

        Thread: an I/O thread.
        """
        self._data_path.journal.flush(lambda: False)

    def _commit(self, batches: Sequence[StoreBatch], is_awaited: Callable[[], bool]) -> None:
        """Journal written blocks. Thread: an I/O thread."""
        StoreBatch.finish(self._data_path, batches, is_awaited)

    def _compact_step(self, _waiting: Sequence[None], _is_awaited: Callable[[], bool]) -> None:
        """Advance the journal's compaction in the background. Thread: an I/O thread."""
        self._data_path.journal.compact_step()


def create_transfers(
    env: TierEnvironment, ops: FileOps, data_path: DataPath, threads: int
) -> Transfers:
    """Create the transfers of a store; `threads` threads copy bytes.

    Raises:
        ConfigError: Native code is required but unavailable.
        OSError: Threads cannot be started.
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
