"""One direction's way between primary and segments: pieces of many jobs, moved by a few threads.

A thread moves pieces of whatever jobs are waiting, for one turn of a few MiB, and ends the batches
whose last piece it was together: with one append to the journal, and one wake-up of the loop. So
the cost of handing over is that of a turn, not of a job; and all threads work on one large job.
The price is that a call which hangs holds back what has ended in the same turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.errors import JobCancelledError
from kvoffload_async.tiers.slab.batches import Batch, Shelf

BatchT = TypeVar("BatchT", bound=Batch)

_TURN_BYTES: Final = 4 << 20
"""What a thread moves before it tells what has ended with it."""

_LONGEST_TURN_BYTES: Final = 16 << 20
"""What it moves at most if nothing has, before it may turn to something more urgent."""


class _Passage(Generic[BatchT]):
    """A batch in the lane."""

    __slots__ = ("batch", "future", "has_ended", "num_unfinished")

    def __init__(self, batch: BatchT, num_pieces: int, future: asyncio.Future[None]) -> None:
        self.batch = batch
        self.num_unfinished = num_pieces
        self.future = future
        self.has_ended = False

    def end(self) -> None:
        """Tell whoever awaits it. Thread: loop."""
        self.has_ended = True
        if not self.future.done():
            self.future.set_result(None)


class Lane(Generic[BatchT]):
    """Moves batches. Thread: loop, but for the turns."""

    def __init__(
        self,
        direction: Direction,
        finish: Callable[[Shelf, Sequence[BatchT]], None],
        shelf: Shelf,
        io: IoRunner,
        threads: int,
    ) -> None:
        """Open the lane, on the loop that it belongs to.

        Args:
            direction: Which of the pool's threads prefer it.
            finish: Ends batches; see `Batch.finish`.
            shelf: What is moved to and from.
            io: The pool.
            threads: How many threads work here at once.
        """
        self._direction = direction
        self._finish = finish
        self._shelf = shelf
        self._io = io
        self._threads = threads
        self._pieces_per_turn = max(1, _TURN_BYTES // shelf.piece_bytes)
        self._waiting: deque[tuple[_Passage[BatchT], range]] = deque()
        self._mutex = threading.Lock()
        """Guards who has which piece; never held for longer than that takes."""
        self._loop = asyncio.get_running_loop()
        self._num_calls = 0
        """Calls that will look for something to move once more."""
        self._calls: set[asyncio.Task[None]] = set()

    async def move(self, batch: BatchT) -> None:
        """Move a batch; returns when no byte of it moves any more, also if cancelled.

        Raises:
            TierError: The batch has failed as a whole.
        """
        pieces = batch.pieces()
        passage = _Passage(batch, len(pieces), self._loop.create_future())
        self._waiting.extend([(passage, piece) for piece in pieces])
        self._call()
        cancelled: asyncio.CancelledError | None = None
        while not passage.has_ended:
            try:
                await passage.future
            except asyncio.CancelledError as error:
                cancelled = error
                if not passage.has_ended:  # what is under way still touches memory: wait on
                    passage.future = self._loop.create_future()
                    self._withdraw(passage)
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del cancelled  # it holds this frame, and what its callers hold
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait until no thread is in here; nothing may be waiting."""
        if self._calls:
            await asyncio.wait(self._calls)

    # -- turns ----------------------------------------------------------------------------------

    def _call(self) -> None:
        """Call a thread a piece that waits; where there is much to do, keep a turn ready behind.

        A thread that is here already may be in a call that hangs, so it does not count.
        """
        waiting = len(self._waiting)
        most = self._threads + (waiting > self._threads * self._pieces_per_turn)
        for _ in range(min(waiting, most - self._num_calls)):
            self._num_calls += 1
            call = self._loop.create_task(self._take_turns())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _take_turns(self) -> None:
        """Take turns as long as anything waits."""
        try:
            while self._waiting:
                for passage in await self._io.run(self._direction, self._turn):
                    passage.end()
        except Exception as error:  # noqa: BLE001 - the pool refuses: so do those who wait for it
            self._refuse(error)
        finally:
            self._num_calls -= 1

    def _turn(self) -> list[_Passage[BatchT]]:
        """Move pieces; return what has ended with them. Thread: an I/O thread."""
        ended: list[_Passage[BatchT]] = []
        moved_bytes = 0
        slot_bytes = self._shelf.rows.slot_bytes
        while moved_bytes < (_TURN_BYTES if ended else _LONGEST_TURN_BYTES):
            with self._mutex:
                if not self._waiting:
                    break
                passage, piece = self._waiting.popleft()
            passage.batch.move(piece)
            moved_bytes += len(piece) * slot_bytes
            with self._mutex:
                passage.num_unfinished -= 1
                is_last = not passage.num_unfinished
            if is_last:
                ended.append(passage)
        if ended:
            batches = [passage.batch for passage in ended]
            try:
                self._finish(self._shelf, batches)
            except BaseException as error:  # noqa: BLE001 - a defect fails these jobs, and no other
                for batch in batches:
                    batch.fail(error)
        return ended

    def _withdraw(self, passage: _Passage[BatchT]) -> None:
        """Take back what nobody has begun; the batch fails."""
        passage.batch.fail(JobCancelledError("the job was cancelled"))
        with self._mutex:
            mine = [entry for entry in self._waiting if entry[0] is passage]
            for entry in mine:
                self._waiting.remove(entry)
            self._forget(mine)

    def _refuse(self, error: Exception) -> None:
        """Fail every batch of which something waits."""
        with self._mutex:
            waiting = list(self._waiting)
            self._waiting.clear()
            for passage, _ in waiting:
                passage.batch.fail(error)
            self._forget(waiting)

    def _forget(self, entries: Sequence[tuple[_Passage[BatchT], range]]) -> None:
        """Count pieces as done that will not be; under the mutex."""
        for passage, _ in entries:
            passage.num_unfinished -= 1
            if not passage.num_unfinished:
                passage.end()
