"""A small thread pool for large blocking calls that release the GIL, fair to loads and stores.

Some threads take a load first and a store if there is none, others the reverse, and a few take only
calls without payload, so that a probe never waits behind a transfer. An idle thread helps with a
running call. Finished calls are handed to the loop in batches, with one wake-up per batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import (
    BusyError,
    TierClosedError,
    TierTimeoutError,
    TierUnavailableError,
    text_of,
)
from kvoffload_async.waiting import LastingFuture

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Bell = queue.SimpleQueue[None]
"""Signalled once per call and per requested helper thread; a thread takes one signal per turn."""


MOST_QUEUED: Final = 4096
"""Maximum number of queued calls per direction; one more raises BusyError."""

_STOP_S = 1.0
"""Seconds for idle threads to end."""


@dataclass(slots=True, eq=False)
class _Call:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    is_shared: bool
    """Whether several threads may run the call together."""
    helpers: int
    """Number of further threads that may join the call."""
    threads: int = 0
    """Number of threads running the call, if it is shared."""
    result: Any = None
    error: BaseException | None = None


class IoPool:
    """Threads that run blocking calls for the coroutines of one loop; an `IoRunner`.

    The threads are daemons, so that one hanging in a system call cannot keep the process alive.
    """

    def __init__(
        self, load_preferring_threads: int, store_preferring_threads: int, payload_free_threads: int
    ) -> None:
        """Start the threads.

        Args:
            load_preferring_threads: Threads that take loads first.
            store_preferring_threads: Threads that take stores first.
            payload_free_threads: Threads that take only calls without payload.
        """
        self._queues: dict[Direction, deque[_Call]] = {d: deque() for d in Direction}
        self._wanting: dict[_Call, None] = {}
        """Running calls that another thread may join."""
        self._mutex = threading.Lock()
        """Guards the queues and the counts of threads in calls; held only briefly."""
        transfers: _Bell = queue.SimpleQueue()
        self._bells: dict[Direction, _Bell] = {
            Direction.LOAD: transfers,
            Direction.STORE: transfers,
            Direction.METADATA: queue.SimpleQueue(),
        }
        self._awaited: dict[_Call, None] = {}
        """Calls awaited by a coroutine. Thread: loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Loop of the callers; cached, because `get_running_loop` makes a system call."""
        self._stopping = False
        self._done: deque[_Call] = deque()
        self._wake_pending = False
        orders: list[tuple[Direction, ...]]
        orders = [(Direction.LOAD, Direction.STORE)] * load_preferring_threads
        orders += [(Direction.STORE, Direction.LOAD)] * store_preferring_threads
        orders += [(Direction.METADATA,)] * payload_free_threads
        self._threads: list[threading.Thread] = []
        try:
            for number, order in enumerate(orders):
                thread = threading.Thread(
                    target=self._work, args=(order,), name=f"kvoffload-io-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close(_STOP_S)
            raise

    async def run(
        self,
        direction: Direction,
        call: Callable[[], T],
        *,
        helpers: int = 0,
        withdraw: Callable[[], object] | None = None,
    ) -> T:
        """Await `call()` on one of the threads; see `IoRunner.run`.

        Raises:
            BusyError: Too many calls are queued.
            TierClosedError: The pool is closed, or closes before the call begins.

        Thread: loop.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        work = _Call(call, LastingFuture(withdraw), helpers > 0, helpers)
        with self._mutex:
            if self._stopping:
                raise TierClosedError("the I/O pool is closed")
            if len(self._queues[direction]) >= MOST_QUEUED:
                raise BusyError(f"{MOST_QUEUED} calls are queued")
            self._queues[direction].append(work)
        for _ in range(1 + helpers):
            self._bells[direction].put(None)
        self._awaited[work] = None
        try:
            return await work.future  # type: ignore[no-any-return]  # the call's own type
        finally:
            self._awaited.pop(work, None)
            # Break the reference cycle of exception and frame: it would keep the call's frames and
            # buffers alive until garbage collection.
            del work, call

    def close(self, timeout_s: float) -> int:
        """Fail queued calls, wait for running ones, join the threads.

        Returns:
            Number of threads still in a call after `timeout_s`; they are abandoned.

        Thread: any but the pool's own.
        """
        with self._mutex:
            self._stopping = True
            queued = [work for calls in self._queues.values() for work in calls]
            for calls in self._queues.values():
                calls.clear()
        for bell in set(self._bells.values()):
            for _ in self._threads:
                bell.put(None)
        for work in queued:
            work.error = TierClosedError("the I/O pool was closed before the call had begun")
            self._finish(work)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Fail the coroutines that await a call; the call keeps its thread until it returns.

        Use it after `close`, only for a tier that could not be opened: otherwise memory still used
        by a call could be reported as free.

        Thread: any but the pool's own.
        """
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: there are no waiters
                self._loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        for work in self._awaited:
            if not work.future.done():
                error = TierTimeoutError("the system call hangs and was abandoned")
                work.future.set_exception(error)

    def _work(self, order: tuple[Direction, ...]) -> None:
        bell = self._bells[order[0]]
        while True:
            bell.get()
            with self._mutex:
                if self._stopping:
                    return
                work = self._next(order)
            if work is None:
                continue  # other threads have taken the work
            try:
                work.result = work.call()
            except BaseException as error:  # noqa: BLE001 - passed to the awaiting coroutine
                work.error = _as_failure(error)
            if not work.is_shared or self._is_last_in(work):
                # A waiter may release what the call captured once it knows that the call has ended.
                work.call = _spent
                self._finish(work)
            del work

    def _next(self, order: tuple[Direction, ...]) -> _Call | None:
        """Take a queued call, or join a running one if none is queued. Call with the mutex held."""
        for direction in order:
            if self._queues[direction]:
                work = self._queues[direction].popleft()
                if work.is_shared:
                    work.threads = 1
                    self._wanting[work] = None
                return work
        if Direction.METADATA in order or not self._wanting:
            return None
        work = next(iter(self._wanting))
        work.threads += 1
        work.helpers -= 1
        if not work.helpers:
            del self._wanting[work]
        return work

    def _is_last_in(self, work: _Call) -> bool:
        """Leave a shared call; return whether this was its last thread."""
        with self._mutex:
            self._wanting.pop(work, None)  # it has no more work to share
            work.threads -= 1
            return not work.threads

    def _finish(self, work: _Call) -> None:
        self._done.append(work)
        # Append before reading the flag, and the loop clears the flag before reading the queue: so
        # no call is missed.
        if self._wake_pending:
            return
        self._wake_pending = True
        try:
            work.future.get_loop().call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The call ended after its loop was closed: nobody awaits it.
            self._wake_pending = False
            logger.debug("a late I/O call ended after its loop")

    def _deliver(self) -> None:
        self._wake_pending = False
        while self._done:
            work = self._done.popleft()
            if work.future.done():
                continue  # abandoned or withdrawn
            if work.error is not None:
                work.future.set_exception(work.error)
            else:
                work.future.set_result(work.result)


def _spent() -> None:
    """Take the place of a completed call, whose captured objects can then be freed."""


def _as_failure(error: BaseException) -> BaseException:
    """Convert exceptions that a future cannot hold or that would end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = TierUnavailableError(f"an I/O call raised {text_of(error)}")
    failure.__cause__ = error
    return failure
