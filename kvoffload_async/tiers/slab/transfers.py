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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvoffload_async.abc.tier import Direction, TierEnvironment
from kvoffload_async.block_io.choice import create_block_io
from kvoffload_async.block_io.contract import ENDED_EARLY, NOT_DECRYPTED, OTHER_KEY
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierError,
    TierUnavailableError,
)
from kvoffload_async.tiers.files.digests import DIGEST_BYTES
from kvoffload_async.tiers.files.ops import FileOps, mapped
from kvoffload_async.tiers.slab.addresses import Run, SlotAddress, joined, segment_of
from kvoffload_async.tiers.slab.journal import split_digests
from kvoffload_async.tiers.slab.opening import OpenStore
from kvoffload_async.tiers.slab.records import PackedRun, put_records
from kvoffload_async.types import JobMetadata, OffloadKey, block_text
from kvoffload_async.waiting import Coalescer


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
    """Blocks of one job being copied.

    Thread: loop, except that a commit reads records and fails blocks.

    Attributes:
        blocks: The blocks.
        indices: Their indices.
        runs: Runs of adjacent addresses.
        failures: Index in the batch -> the block's error.
        wants_digests: Whether to compute checksums.
        digests: Concatenated checksums, undefined for failed blocks.
    """

    def __init__(self, store: OpenStore, blocks: Blocks, piece: int) -> None:
        """Create a batch; addresses ascend within each group of `piece` blocks."""
        self._store = store
        self.blocks = blocks
        count = len(blocks.keys)
        self.indices = range(count)
        self.runs: Sequence[Run] = [
            run
            for start in range(0, count, piece)
            for run in joined(blocks.addresses, start, min(start + piece, count))
        ]
        self.failures: dict[int, TierError] = {}
        self.wants_digests = store.settings.verifies
        self.digests = bytearray()

    def fail_with(self, errors: dict[int, int]) -> None:
        """Mark blocks as failed, given a map of index to errno."""
        for index, code in errors.items():
            self.failures[index] = mapped(OSError(code, os.strerror(code)))

    def fail(self, error: BaseException) -> None:
        """Mark every block as failed because of an `OSError`.

        Raises:
            TierError: For another error, which fails the whole batch.
        """
        if isinstance(error, TierError):
            raise error
        if not isinstance(error, OSError):
            raise TierUnavailableError(f"copying blocks raised {error!r}") from error
        self.failures = dict.fromkeys(self.indices, mapped(error))

    def _digests_of(self, run: Run) -> bytes:
        start = run.start * DIGEST_BYTES
        return bytes(self.digests[start : start + run.length * DIGEST_BYTES])


class StoreBatch(Batch):
    """Blocks to write into claimed addresses; journalled together after writing.

    Attributes:
        is_journalled: Whether the blocks that did not fail are journalled.
        sync_failures: Number of failed syncs before the first write.
    """

    def __init__(self, store: OpenStore, blocks: Blocks) -> None:
        super().__init__(store, blocks, store.extent_slots)
        self.is_journalled = False
        self.sync_failures = store.segments.sync_failures

    def records(self) -> list[PackedRun]:
        """Return the packed journal records of the written blocks, by run."""
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
            self._store.table.tick,
            is_keyed=self._store.digester.is_keyed,
        )


_BAD: Final = {
    ENDED_EARLY: "ends early",
    NOT_DECRYPTED: "cannot be decrypted",
    OTHER_KEY: "is encrypted with a key that is not given",
}
"""Instead of an errno -> why the block is dropped."""


class LoadBatch(Batch):
    """Blocks to read from pinned, ascending addresses, and to verify.

    Attributes:
        dropped: Batch indices of blocks that are corrupt, or that no key opens; their records are
            removed.
    """

    def __init__(self, store: OpenStore, blocks: Blocks) -> None:
        super().__init__(store, blocks, max(1, len(blocks.keys)))
        self.dropped: list[int] = []
        self._verified = self.runs
        table = store.table
        if not store.settings.verifies:
            self._verified = [
                run
                for run in self.runs
                if table.has_unverified and table.needs_verify(run.address, run.length)
            ]
            self.wants_digests = bool(self._verified)

    def fail_with(self, errors: dict[int, int]) -> None:
        super().fail_with({i: code for i, code in errors.items() if code not in _BAD})
        for index in sorted(errors):
            if (code := errors[index]) in _BAD:
                is_missing = code == OTHER_KEY and self._has_its_tag(index)
                self._drop(index, _BAD[code], is_missing=is_missing)

    def check(self) -> None:
        """Record the uses of the blocks, and verify checksums; drop corrupt blocks."""
        table = self._store.table
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

    def _has_its_tag(self, index: int) -> bool:
        """Return whether a block has the checksum that its record names."""
        address = self.blocks.addresses[index]
        return self._digests_of(Run(address, index, 1)) == self._store.table.digests(address, 1)

    def _drop(self, index: int, what: str, *, is_missing: bool = False) -> None:
        error = BlockMissingError if is_missing else CorruptBlockError
        self.failures[index] = error(f"{block_text(self.blocks.keys[index])} {what}")
        self._store.journal.note_removed((self.blocks.addresses[index],))
        self.dropped.append(index)


logger = logging.getLogger(__name__)

_CHECK_S: Final = 0.1
"""How long, in seconds, a load relies on an earlier check of a segment file. Stores always
check."""


class Transfers:
    """Copies batches between the primary and the segments of one store."""

    def __init__(self, env: TierEnvironment, ops: FileOps, store: OpenStore) -> None:
        """Start the store's I/O threads.

        Raises:
            ConfigError: Native code is required but unavailable.
            OSError: Threads cannot be started.
        """
        self._store = store
        self._block_io = create_block_io(
            env,
            ops,
            store.digester,
            slot_bytes=store.budget.slot_bytes,
            threads=store.settings.io_threads,
            piece_bytes=store.settings.piece_bytes,
            is_direct=bool(store.segments.direct_flag),
            is_system=type(ops) is FileOps,
        )
        self._loop = asyncio.get_running_loop()
        self._checked_s: dict[int, float] = {}
        """Segment -> start of its last successful file check; cleared after a failed one."""
        journal = store.journal
        look, write = partial(env.io.run, Direction.METADATA), partial(env.io.run, Direction.STORE)
        self._checks = Coalescer("slab:check", self._check, look)
        self._commits = Coalescer("slab:commit", self._commit, write)
        self._flushes = Coalescer[None](
            "slab:flush", lambda _, is_awaited: journal.flush(is_awaited), write
        )
        self._notes = Coalescer[None](  # loads do not wait for space in the journal
            "slab:note", lambda *_: journal.flush(is_awaited=lambda: False), write
        )
        self._compactions = Coalescer[None](
            "slab:compact_step", lambda *_: journal.compact_step(), write
        )

    async def load(self, batch: LoadBatch) -> None:
        """Load the blocks of a batch; return only after all copying has ended, even if cancelled.

        Raises:
            TierError: The whole batch failed.
        """
        # The check may run during the load, because the checksums of the blocks verify the bytes.
        now_s = self._loop.time()
        since_s, checked_s = now_s - _CHECK_S, self._checked_s
        numbers = {segment_of(run.address) for run in batch.runs}
        unchecked = {n for n in numbers if checked_s.get(n, -math.inf) <= since_s}
        checking = self._checks.begin(unchecked) if unchecked else None
        await self._copy(Direction.LOAD, batch)
        error = await checking if checking is not None else None
        if error is not None:
            self._checked_s.clear()
            batch.fail(error)
        else:
            self._checked_s.update(dict.fromkeys(unchecked, now_s))
            batch.check()
        if batch.dropped and (error := await self._notes.add(None)) is not None:
            logger.warning("the removal of a dropped block is not journalled yet: %s", str(error))

    async def store(self, batch: StoreBatch) -> None:
        """Store the blocks of a batch; return only after all copying has ended, even if cancelled.

        Raises:
            TierError: The whole batch failed; it may still be journalled.
        """
        error: BaseException | None = None
        if self._store.journal.has_removals:
            error = await self._flushes.add(None)  # before the slots are overwritten
        if error is None:
            await self._copy(Direction.STORE, batch)
            if len(batch.failures) < len(batch.indices):
                error = await self._commits.add(batch)
                if self._store.journal.needs_compaction:
                    self._compactions.begin(None)
        if error is not None:
            batch.fail(error)

    async def flush(self) -> None:
        """Write buffered removals to the journal, also those that an earlier call could not.

        Raises:
            TierError: They could not be written.
        """
        if self._store.journal.has_removals:
            error = await self._flushes.add(None)
            if error is not None:
                raise mapped(error) if isinstance(error, OSError) else error

    async def close(self) -> None:
        """Wait until no thread is working; no job may be running."""
        for call in (self._checks, self._flushes, self._notes, self._commits, self._compactions):
            await call.close()
        await self._block_io.close()

    # -- payload --------------------------------------------------------------------------------

    async def _copy(self, direction: Direction, batch: Batch) -> None:
        """Copy a batch; after an error in a run, retry the run's blocks one by one."""
        errors = await self._move(direction, batch, batch.runs)
        for run in batch.runs if errors else ():
            for offset in range(run.length if run.length > 1 else 0):
                index = run.start + offset
                if errors.get(index, ENDED_EARLY) not in _BAD:
                    del errors[index]
                    single = Run(run.address + offset, index, 1)
                    errors |= await self._move(direction, batch, [single])
        batch.fail_with(errors)

    async def _move(
        self, direction: Direction, batch: Batch, runs: Sequence[Run]
    ) -> dict[int, int]:
        """Copy runs of successive blocks of a batch, with O_DIRECT unless that is refused.

        Returns:
            Index of each failed block in the batch -> its errno, or a key of `_BAD`.
        """
        segments = self._store.segments
        start, stop = runs[0].start, runs[-1].start + runs[-1].length
        wanted = batch.blocks.keys[start:stop] if batch.wants_digests else None
        move = partial(self._block_io.extents, direction, batch.blocks.rows[start:stop])
        direct = segments.direct_flag
        extents = segments.extents(runs, is_direct=bool(direct))
        moved = await move(extents, wanted, is_direct=bool(direct))
        if direct and segments.refuse(direct, moved.errors.values()):
            extents = segments.extents(runs, is_direct=False)
            moved = await move(extents, wanted)
        batch.digests[start * DIGEST_BYTES : stop * DIGEST_BYTES] = moved.digests
        return {start + index: code for index, code in moved.errors.items()}

    # -- coalesced calls ---------------------------------------------------------------------------

    def _check(self, segments: Sequence[set[int]], _is_awaited: Callable[[], bool]) -> None:
        """Check that folder and segment files still exist. Thread: an I/O thread."""
        self._store.directory_identity.check()
        self._store.segments.check(set[int]().union(*segments))

    def _commit(self, batches: Sequence[StoreBatch], is_awaited: Callable[[], bool]) -> None:
        """Journal the written blocks of all batches in one append; see `Journal.commit`.

        Thread: an I/O thread.
        """
        store = self._store
        written = [run for batch in batches for run in batch.records()]
        try:
            numbers = {segment_of(address) for address, _ in written}
            store.segments.check(numbers)
            if store.settings.fsync:
                store.segments.sync(numbers, min(batch.sync_failures for batch in batches))
            store.journal.commit(written, is_awaited)
        except OSError as error:
            for batch in batches:
                batch.fail(error)
        else:
            for batch in batches:
                batch.is_journalled = True
