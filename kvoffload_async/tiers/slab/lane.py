"""One direction's way between primary and segments: pieces of many jobs, moved by a few threads.

A thread moves pieces of whatever jobs are waiting. After each turn of a few MiB it ends the batches
whose last piece it was, together: with one append to the journal, and one wake-up of the loop. So
the cost of handing over is that of a turn, not of a job; and all threads work on one large job.
The price is that a call which hangs holds back what has ended in the same turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.errors import JobCancelledError
from kvoffload_async.tiers.slab.batches import Batch, Shelf

BatchT = TypeVar("BatchT", bound=Batch)

_TURN_BYTES: Final = 8 << 20
"""What a thread moves before it tells what has ended with it."""

_STAY_BYTES: Final = 64 << 20
"""What it moves before it may turn to something more urgent, unless the rival needs it."""


_LOOK_AHEAD: Final = 16
"""How many pieces a thread passes over to find one whose file nobody is busy with."""


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


class _Piece(NamedTuple, Generic[BatchT]):
    """A piece that waits.

    Attributes:
        indices: Which blocks of its batch.
        file: See `Batch.file_of`.
    """

    passage: _Passage[BatchT]
    indices: range
    file: int | None


class Lane(Generic[BatchT]):
    """Moves batches. Thread: loop, but for what says otherwise.

    Attributes:
        rival: The other direction's lane, if there is one: a thread does not stay long here while
            something waits there and nobody is there.
    """

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
        self.rival: Lane[Any] | None = None
        self._direction = direction
        self._name = f"slab:{direction.name.lower()}:turns"
        self._finish = finish
        self._shelf = shelf
        self._io = io
        self._threads = threads
        self._pieces_per_stay = max(1, _STAY_BYTES // shelf.piece_bytes)
        self._waiting: deque[_Piece[BatchT]] = deque()
        self._busy: list[int] = []
        """The files of the pieces that are moved now."""
        self._num_here = 0
        """Threads that take turns now."""
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
        pieces = batch.pieces(0 if self._waiting or self._num_here else self._threads)
        passage = _Passage(batch, len(pieces), self._loop.create_future())
        self._waiting.extend([_Piece(passage, piece, batch.file_of(piece)) for piece in pieces])
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
        """Call a thread a piece that waits; where there is much to do, keep a call ready behind.

        A thread that is here already may be in a call that hangs, so it does not count.
        """
        waiting = len(self._waiting)
        most = self._threads + (waiting > self._threads * self._pieces_per_stay)
        for _ in range(min(waiting, most - self._num_calls)):
            self._num_calls += 1
            call = self._loop.create_task(self._take_turns(), name=self._name)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _take_turns(self) -> None:
        """Have a thread take turns as long as anything waits."""
        try:
            while self._waiting:
                await self._io.run(self._direction, self._stay)
        except Exception as error:  # noqa: BLE001 - the pool refuses: so do those who wait for it
            self._refuse(error)
        finally:
            self._num_calls -= 1

    @property
    def is_deserted(self) -> bool:
        """Whether something waits, and no thread is here. Thread: any."""
        return bool(self._waiting) and not self._num_here

    def _stay(self) -> None:
        """Take turns until nothing waits, or something more urgent may. Thread: an I/O thread."""
        left_bytes = _STAY_BYTES
        with self._mutex:
            self._num_here += 1
        try:
            while left_bytes > 0 and (moved_bytes := self._turn(min(left_bytes, _TURN_BYTES))):
                left_bytes -= moved_bytes
                if self.rival is not None and self.rival.is_deserted:
                    break
        finally:
            with self._mutex:
                self._num_here -= 1

    def _turn(self, most_bytes: int) -> int:
        """Move pieces, tell what has ended with them; return the bytes. Thread: an I/O thread."""
        ended: list[_Passage[BatchT]] = []
        moved_bytes = 0
        slot_bytes = self._shelf.rows.slot_bytes
        while moved_bytes < most_bytes:
            with self._mutex:
                if not self._waiting:
                    break
                passage, indices, file = self._next()
                if file is not None:
                    self._busy.append(file)
            passage.batch.move(indices)
            moved_bytes += len(indices) * slot_bytes
            with self._mutex:
                if file is not None:
                    self._busy.remove(file)
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
            self._tell(ended)
        return moved_bytes

    def _tell(self, ended: Sequence[_Passage[BatchT]]) -> None:
        """Have the loop end passages. Thread: an I/O thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed while a call hung
            self._loop.call_soon_threadsafe(_end_all, ended)

    def _next(self) -> _Piece[BatchT]:
        """Take the first piece whose file nobody is busy with, or the first. Under the mutex."""
        waiting, busy = self._waiting, self._busy
        if busy:
            for at in range(min(len(waiting), _LOOK_AHEAD)):
                piece = waiting[at]
                if piece.file not in busy:
                    del waiting[at]
                    return piece
        return waiting.popleft()

    def _withdraw(self, passage: _Passage[BatchT]) -> None:
        """Take back what nobody has begun; the batch fails."""
        passage.batch.fail(JobCancelledError("the job was cancelled"))
        with self._mutex:
            mine = [piece for piece in self._waiting if piece.passage is passage]
            for piece in mine:
                self._waiting.remove(piece)
            self._forget(mine)

    def _refuse(self, error: Exception) -> None:
        """Fail every batch of which something waits."""
        with self._mutex:
            waiting = list(self._waiting)
            self._waiting.clear()
            for passage, _, _ in waiting:
                passage.batch.fail(error)
            self._forget(waiting)

    def _forget(self, pieces: Sequence[_Piece[BatchT]]) -> None:
        """Count pieces as done that will not be; under the mutex."""
        for passage, _, _ in pieces:
            passage.num_unfinished -= 1
            if not passage.num_unfinished:
                passage.end()


def _end_all(ended: Sequence[_Passage[BatchT]]) -> None:
    """End passages. Thread: loop."""
    for passage in ended:
        passage.end()
