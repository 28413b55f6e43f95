"""A job's way: which calls move its blocks, which check and journal it, and who else shares these.

Payload goes through `BlockIo`, which wakes the loop when a batch has ended. What else may block is
made by an I/O thread, one call for all jobs that wait for it: the look after the files of what is
loaded, beside the loading; the removals of the blocks whose slots are written to, before the
writing; the records of what was written, after it.

Thread: loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvoffload_async.abc.tier import Direction, IoRunner, TierEnvironment
from kvoffload_async.block_io import ENDED_EARLY, BlockIo, Moved, create_block_io
from kvoffload_async.tiers.files.grouping import GroupedCall
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.slab.batches import Batch, DataPath, LoadBatch, StoreBatch
from kvoffload_async.tiers.slab.runs import Run

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
        probe, store = partial(io.run, Direction.NONE), partial(io.run, Direction.STORE)
        self._checks = GroupedCall("slab:check", self._check, probe)
        self._flushes = GroupedCall("slab:flush", self._flush, store)
        self._notes = GroupedCall("slab:note", self._note, store)
        self._commits = GroupedCall("slab:commit", self._commit, store)
        self._tends = GroupedCall("slab:tend", self._tend, store)

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
                if self._data_path.journal.is_to_be_tended:
                    self._tends.begin(None)
        if error is not None:
            batch.fail(error)
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait until no thread is at work; no job may run any more."""
        for call in (self._checks, self._flushes, self._notes, self._commits, self._tends):
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
        self._data_path.anchor.check()
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

    def _tend(self, _waiting: Sequence[None], _is_awaited: Callable[[], bool]) -> None:
        """Go on with the next journal, which nobody waits for. Thread: an I/O thread."""
        self._data_path.journal.tend()


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
