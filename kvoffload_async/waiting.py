"""A limiter, and waits that outlast a cancellation, as a call may still touch its memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LastingFuture(asyncio.Future[T]):
    """A future that a cancellation of its awaiter does not end.

    The awaiting task is cancelled when the future is done: `Task.cancel` asks the future that the
    task awaits to cancel itself, and where that refuses, delivers the cancellation at its end. What
    the future has ended with counts as retrieved then.

    Thread: the loop's.
    """

    def __init__(self, withdraw: Callable[[], object] | None = None) -> None:
        """Create a future of the running loop.

        Args:
            withdraw: Called at a cancellation before the end; where it returns true, nothing is
                under way any more, and the future is cancelled at once.
        """
        super().__init__(loop=asyncio.get_running_loop())
        self._withdraw = withdraw
        """Dropped at the end, as it may refer to what has this future."""

    def cancel(self, msg: Any = None) -> bool:  # noqa: ANN401 - as in the base class
        """Cancel the future if `withdraw` says so; return whether it did."""
        if self._withdraw is None or not self._withdraw():
            return False
        self._withdraw = None
        return super().cancel(msg)

    def set_result(self, result: T) -> None:
        """End with a result."""
        self._withdraw = None
        super().set_result(result)

    def set_exception(self, error: type[BaseException] | BaseException) -> None:
        """End with an error."""
        self._withdraw = None
        super().set_exception(error)


async def all_done(*futures: asyncio.Future[Any]) -> None:
    """Await the end of all futures; a cancellation is delivered then. Thread: the loop's."""
    pending = {future for future in futures if not future.done()}
    if pending:
        ended: LastingFuture[None] = LastingFuture()

        def end(future: asyncio.Future[Any]) -> None:
            pending.discard(future)
            if not pending:
                ended.set_result(None)

        for future in tuple(pending):
            future.add_done_callback(end)
        await ended


async def until_done(future: asyncio.Future[T]) -> T:
    """Await a future to its end, and return its result; a cancellation is delivered then.

    Thread: the loop's.
    """
    try:
        await all_done(future)
        return future.result()
    except asyncio.CancelledError:
        if not future.cancelled():
            future.exception()  # retrieved: nobody asks for it any more
        raise
    finally:
        del future  # the exception holds this frame, which must not hold it


class Permit:
    """Admission by a `Limiter`; a context manager that gives it back at the end, unless kept."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if not self._is_kept:
            self._release()

    def keep(self) -> Callable[[], None]:
        """Keep the permit beyond its context; return the function that gives it back."""
        self._is_kept = True
        return self._release


class Limiter:
    """Admits a number of callers at once, with a number of bytes in all: first come, first served.

    A caller with more bytes than the bound waits for all of them, and so is admitted alone.
    Neither `asyncio.Semaphore` nor `anyio.CapacityLimiter` counts bytes beside callers.

    Thread: the loop's.
    """

    def __init__(self, permits: int, num_bytes: int = 0) -> None:
        """Admit `permits` callers, at least 1, with `num_bytes`."""
        self._max_bytes = num_bytes
        self._free_permits = permits
        self._free_bytes = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def bytes_in_flight(self) -> int:
        """The bytes of the callers that are admitted."""
        return self._max_bytes - self._free_bytes

    @property
    def is_busy(self) -> bool:
        """Whether the next caller without bytes has to wait."""
        return bool(self._waiting) or not self._free_permits

    async def acquire(self, num_bytes: int = 0) -> Permit:
        """Wait for admission; a cancelled wait changes nothing."""
        wanted = min(num_bytes, self._max_bytes)
        if not self._waiting and self._fits(wanted):
            self._take(wanted)
        else:
            admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, admitted))
            try:
                await admitted
            except asyncio.CancelledError:
                if admitted.cancelled():
                    self._admit()  # a caller behind it may fit
                else:
                    self._give_back(wanted)
                raise
        return Permit(partial(self._give_back, wanted))

    def open(self) -> None:
        """Add a permit for each caller that waits."""
        self._free_permits += len(self._waiting)
        self._admit()

    def _fits(self, wanted: int) -> bool:
        return self._free_permits > 0 and self._free_bytes >= wanted

    def _take(self, wanted: int) -> None:
        self._free_permits -= 1
        self._free_bytes -= wanted

    def _give_back(self, wanted: int) -> None:
        self._free_permits += 1
        self._free_bytes += wanted
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            wanted, admitted = self._waiting[0]
            if not admitted.done():  # else the wait was cancelled
                if not self._fits(wanted):
                    return
                self._take(wanted)
                admitted.set_result(None)
            self._waiting.popleft()
