"""The transfer queue of one direction: extents of many jobs, moved by a few threads.

A thread moves extents of whatever jobs are waiting. After each quantum of a few MiB it ends the
batches whose last extent was in it, together: with one append to the journal, and one wake-up of
the loop. So the overhead is paid per quantum, not per job; and all threads work on one large job.
The price is that a call which hangs delays what has ended in the same quantum.
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
from kvoffload_async.tiers.slab.batches import Batch, DataPath

BatchT = TypeVar("BatchT", bound=Batch)

_QUANTUM_BYTES: Final = 8 << 20
"""What a thread moves before it reports what has ended."""

_CALL_BYTES: Final = 64 << 20
"""What it moves before it may switch to something more urgent, if the other direction can wait."""

_LOOK_AHEAD: Final = 16
"""How many extents a thread passes over to find one whose file nobody is busy with."""


class _Transfer(Generic[BatchT]):
    """A batch in the queue."""

    __slots__ = ("batch", "future", "has_ended", "num_unfinished")

    def __init__(self, batch: BatchT, num_extents: int, future: asyncio.Future[None]) -> None:
        self.batch = batch
        self.num_unfinished = num_extents
        self.future = future
        self.has_ended = False

    def end(self) -> None:
        """Wake up whoever awaits it. Thread: loop."""
        self.has_ended = True
        if not self.future.done():
            self.future.set_result(None)


class _Extent(NamedTuple, Generic[BatchT]):
    """An extent that waits.

    Attributes:
        indices: Which blocks of its batch.
        file: See `Batch.file_of`.
    """

    transfer: _Transfer[BatchT]
    indices: range
    file: int | None


class TransferQueue(Generic[BatchT]):
    """Moves batches. Thread: loop, but for what says otherwise.

    Attributes:
        other_direction: Its queue, if there is one: a thread returns after one quantum while
            something waits there and no thread serves it.
    """

    def __init__(
        self,
        direction: Direction,
        finish: Callable[[DataPath, Sequence[BatchT]], None],
        data_path: DataPath,
        io: IoRunner,
        threads: int,
        *,
        tend: Callable[[], None] | None = None,
    ) -> None:
        """Create the queue, on the loop that it belongs to.

        Args:
            direction: Which of the pool's threads prefer it.
            finish: Ends batches; see `Batch.finish`.
            data_path: What is moved to and from.
            io: The pool.
            threads: How many threads work here at once.
            tend: What a thread does after it has reported what has ended, so that no batch waits
                for it.
        """
        self.other_direction: TransferQueue[Any] | None = None
        self._direction = direction
        self._name = f"slab:{direction.name.lower()}:quanta"
        self._finish = finish
        self._data_path = data_path
        self._io = io
        self._threads = threads
        self._tend = tend
        self._extents_per_call = max(1, _CALL_BYTES // data_path.piece_bytes)
        self._waiting: deque[_Extent[BatchT]] = deque()
        self._busy: list[int] = []
        """The files of the extents that are moved now."""
        self._num_serving = 0
        """Threads that move quanta now."""
        self._mutex = threading.Lock()
        """Guards who has which extent; never held for longer than that takes."""
        self._loop = asyncio.get_running_loop()
        self._num_calls = 0
        """Calls that will look for something to move once more."""
        self._calls: set[asyncio.Task[None]] = set()

    async def move(self, batch: BatchT) -> None:
        """Move a batch; returns when no byte of it moves any more, also if cancelled.

        Raises:
            TierError: The batch has failed as a whole.
        """
        extents = batch.extents(0 if self._waiting or self._num_serving else self._threads)
        transfer = _Transfer(batch, len(extents), self._loop.create_future())
        self._waiting.extend(
            [_Extent(transfer, extent, batch.file_of(extent)) for extent in extents]
        )
        self._call()
        cancelled: asyncio.CancelledError | None = None
        while not transfer.has_ended:
            try:
                await transfer.future
            except asyncio.CancelledError as error:
                cancelled = error
                if not transfer.has_ended:  # what is under way still touches memory: wait on
                    transfer.future = self._loop.create_future()
                    self._withdraw(transfer)
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del cancelled  # it holds this frame, and what its callers hold
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait until no thread serves the queue; nothing may be waiting."""
        if self._calls:
            await asyncio.wait(self._calls)

    # -- quanta ---------------------------------------------------------------------------------

    def _call(self) -> None:
        """Call one thread per waiting extent; where there is much to do, keep one call in reserve.

        A thread that is serving already may be in a call that hangs, so it does not count.
        """
        waiting = len(self._waiting)
        most = self._threads + (waiting > self._threads * self._extents_per_call)
        for _ in range(min(waiting, most - self._num_calls)):
            self._num_calls += 1
            call = self._loop.create_task(self._serve(), name=self._name)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _serve(self) -> None:
        """Have a thread move quanta as long as anything waits."""
        try:
            while self._waiting:
                await self._io.run(self._direction, self._move_quanta)
        except Exception as error:  # noqa: BLE001 - the pool refuses: so do those who wait for it
            self._refuse(error)
        finally:
            self._num_calls -= 1

    @property
    def is_starved(self) -> bool:
        """Whether something waits, and no thread serves it. Thread: any."""
        return bool(self._waiting) and not self._num_serving

    def _move_quanta(self) -> None:
        """Move quanta until nothing waits, or something more urgent may. Thread: an I/O thread."""
        left_bytes = _CALL_BYTES
        with self._mutex:
            self._num_serving += 1
        try:
            while left_bytes > 0 and (
                moved_bytes := self._move_quantum(min(left_bytes, _QUANTUM_BYTES))
            ):
                left_bytes -= moved_bytes
                if self.other_direction is not None and self.other_direction.is_starved:
                    break
        finally:
            with self._mutex:
                self._num_serving -= 1

    def _move_quantum(self, most_bytes: int) -> int:
        """Move extents, end what is complete; return the bytes. Thread: an I/O thread."""
        ended: list[_Transfer[BatchT]] = []
        moved_bytes = 0
        slot_bytes = self._data_path.rows.slot_bytes
        while moved_bytes < most_bytes:
            with self._mutex:
                if not self._waiting:
                    break
                transfer, indices, file = self._next()
                if file is not None:
                    self._busy.append(file)
            transfer.batch.move(indices)
            moved_bytes += len(indices) * slot_bytes
            with self._mutex:
                if file is not None:
                    self._busy.remove(file)
                transfer.num_unfinished -= 1
                is_last = not transfer.num_unfinished
            if is_last:
                ended.append(transfer)
        if ended:
            batches = [transfer.batch for transfer in ended]
            try:
                self._finish(self._data_path, batches)
            except BaseException as error:  # noqa: BLE001 - a defect fails these jobs, and no other
                for batch in batches:
                    batch.fail(error)
            self._report(ended)
            if self._tend is not None:
                self._tend()
        return moved_bytes

    def _report(self, ended: Sequence[_Transfer[BatchT]]) -> None:
        """Have the loop end transfers. Thread: an I/O thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed while a call hung
            self._loop.call_soon_threadsafe(_end_all, ended)

    def _next(self) -> _Extent[BatchT]:
        """Take the first extent whose file nobody is busy with, or the first. Under the mutex."""
        waiting, busy = self._waiting, self._busy
        if busy:
            for at in range(min(len(waiting), _LOOK_AHEAD)):
                extent = waiting[at]
                if extent.file not in busy:
                    del waiting[at]
                    return extent
        return waiting.popleft()

    def _withdraw(self, transfer: _Transfer[BatchT]) -> None:
        """Take back what nobody has begun; the batch fails."""
        transfer.batch.fail(JobCancelledError("the job was cancelled"))
        with self._mutex:
            mine = [extent for extent in self._waiting if extent.transfer is transfer]
            for extent in mine:
                self._waiting.remove(extent)
            self._forget(mine)

    def _refuse(self, error: Exception) -> None:
        """Fail every batch of which something waits."""
        with self._mutex:
            waiting = list(self._waiting)
            self._waiting.clear()
            for transfer, _, _ in waiting:
                transfer.batch.fail(error)
            self._forget(waiting)

    def _forget(self, extents: Sequence[_Extent[BatchT]]) -> None:
        """Count extents as done that will not be; under the mutex."""
        for transfer, _, _ in extents:
            transfer.num_unfinished -= 1
            if not transfer.num_unfinished:
                transfer.end()


def _end_all(ended: Sequence[_Transfer[BatchT]]) -> None:
    """End transfers. Thread: loop."""
    for transfer in ended:
        transfer.end()
