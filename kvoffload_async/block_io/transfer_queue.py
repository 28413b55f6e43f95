"""The transfer queue of one direction: parts of many batches, moved by a few Python threads.

A thread moves parts of whatever batches are waiting. After each quantum of a few MiB it ends the
batches whose last part was in it, with one wake-up of the loop. So the overhead is paid per
quantum, not per batch; and all threads work on one large batch. The price is that a call which
hangs delays what has ended in the same quantum.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from kvoffload_async.abc.tier import Direction, IoRunner
from kvoffload_async.block_io.contract import Run
from kvoffload_async.errors import JobCancelledError, drop_tracebacks
from kvoffload_async.waiting import LastingFuture

_QUANTUM_BYTES: Final = 8 << 20
"""What a thread moves before it reports what has ended."""

_CALL_BYTES: Final = 64 << 20
"""What it moves before it may switch to something more urgent, if the other direction can wait."""

_LOOK_AHEAD: Final = 16
"""How many parts a thread passes over to find one whose file nobody is busy with."""


class Part(NamedTuple):
    """A part of a batch.

    Attributes:
        start: Index of its first block.
        runs: Where its blocks are.
        file: The file that it should have to itself, if any: the kernel lets one write at a time
            into a file.
        size_bytes: What it moves.
    """

    start: int
    runs: Sequence[Run]
    file: int | None
    size_bytes: int


class Batch(Protocol):
    """What the queue moves.

    Attributes:
        error: Why it failed as a whole, if it did.
    """

    error: BaseException | None

    def parts(self, idle_threads: int) -> Sequence[Part]:
        """Return the parts; smaller ones where threads wait for them. Thread: loop."""
        ...

    def move(self, part: Part) -> None:
        """Move a part; what goes wrong is noted. Thread: an I/O thread."""
        ...

    def fail(self, error: BaseException) -> None:
        """Fail as a whole; only the first reason counts. Thread: any."""
        ...


class _Transfer:
    """A batch in the queue."""

    __slots__ = ("batch", "future", "num_unfinished")
    future: asyncio.Future[None]

    def __init__(self, batch: Batch, num_parts: int) -> None:
        self.batch = batch
        self.num_unfinished = num_parts


_Waiting = tuple[_Transfer, Part]


class TransferQueue:
    """Moves batches. Thread: loop, but for what says otherwise.

    Attributes:
        other_direction: Its queue, if there is one: a thread returns after one quantum while
            something waits there and no thread serves it.
    """

    def __init__(
        self,
        direction: Direction,
        io: IoRunner,
        threads: int,
        piece_bytes: int,
    ) -> None:
        """Create the queue, on the loop that it belongs to.

        Args:
            direction: Which of the pool's threads prefer it.
            io: The pool.
            threads: How many threads work here at once.
            piece_bytes: What a part has, about.
        """
        self.other_direction: TransferQueue | None = None
        self._direction = direction
        self._name = f"block-io:{direction.name.lower()}:quanta"
        self._io = io
        self._threads = threads
        self._parts_per_call = max(1, _CALL_BYTES // piece_bytes)
        self._waiting: deque[_Waiting] = deque()
        self._busy: list[int] = []
        """The files of the parts that are moved now."""
        self._num_serving = 0
        """Threads that move quanta now."""
        self._mutex = threading.Lock()
        """Guards who has which part; never held for longer than that takes."""
        self._loop = asyncio.get_running_loop()
        self._num_calls = 0
        """Calls that will look for something to move once more."""
        self._calls: set[asyncio.Task[None]] = set()

    async def move(self, batch: Batch) -> None:
        """Move a batch; returns when no byte of it moves any more, also if cancelled.

        Raises:
            TierError: The batch has failed as a whole.
        """
        parts = batch.parts(0 if self._waiting or self._num_serving else self._threads)
        transfer = _Transfer(batch, len(parts))
        transfer.future = LastingFuture(partial(self._withdraw, transfer))
        self._waiting.extend([(transfer, part) for part in parts])
        self._call()
        try:
            await transfer.future
        except asyncio.CancelledError:
            drop_tracebacks(batch.error)  # nobody is told of it, and its frames hold the batch
            raise
        if batch.error is not None:
            raise batch.error

    async def close(self) -> None:
        """Wait until no thread serves the queue; nothing may be waiting."""
        if self._calls:
            await asyncio.wait(self._calls)

    # -- quanta ---------------------------------------------------------------------------------

    def _call(self) -> None:
        """Call one thread per waiting part; where there is much to do, keep one call in reserve.

        A thread that is serving already may be in a call that hangs, so it does not count.
        """
        waiting = len(self._waiting)
        most = self._threads + (waiting > self._threads * self._parts_per_call)
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
        """Move parts, end what is complete; return the bytes. Thread: an I/O thread."""
        ended: list[_Transfer] = []
        moved_bytes = 0
        while moved_bytes < most_bytes:
            with self._mutex:
                if not self._waiting:
                    break
                transfer, part = self._next()
                if part.file is not None:
                    self._busy.append(part.file)
            transfer.batch.move(part)
            moved_bytes += part.size_bytes
            with self._mutex:
                if part.file is not None:
                    self._busy.remove(part.file)
                transfer.num_unfinished -= 1
                is_last = not transfer.num_unfinished
            if is_last:
                ended.append(transfer)
        if ended:
            self._report(ended)
        return moved_bytes

    def _report(self, ended: Sequence[_Transfer]) -> None:
        """Have the loop end transfers. Thread: an I/O thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed while a call hung
            self._loop.call_soon_threadsafe(_end_all, ended)

    def _next(self) -> _Waiting:
        """Take the first part whose file nobody is busy with, or the first. Under the mutex."""
        waiting, busy = self._waiting, self._busy
        if busy:
            for at in range(min(len(waiting), _LOOK_AHEAD)):
                if waiting[at][1].file not in busy:
                    found = waiting[at]
                    del waiting[at]
                    return found
        return waiting.popleft()

    def _withdraw(self, transfer: _Transfer) -> None:
        """Take back what nobody has begun; the batch fails."""
        transfer.batch.fail(JobCancelledError("the job was cancelled"))
        with self._mutex:
            mine = [waiting for waiting in self._waiting if waiting[0] is transfer]
            for waiting in mine:
                self._waiting.remove(waiting)
            self._forget(mine)

    def _refuse(self, error: Exception) -> None:
        """Fail every batch of which something waits."""
        with self._mutex:
            waiting = list(self._waiting)
            self._waiting.clear()
            for transfer, _ in waiting:
                transfer.batch.fail(error)
            self._forget(waiting)

    def _forget(self, parts: Sequence[_Waiting]) -> None:
        """Count parts as done that will not be; under the mutex."""
        for transfer, _ in parts:
            transfer.num_unfinished -= 1
            if not transfer.num_unfinished:
                transfer.future.set_result(None)


def _end_all(ended: Sequence[_Transfer]) -> None:
    """End transfers. Thread: loop."""
    for transfer in ended:
        transfer.future.set_result(None)
