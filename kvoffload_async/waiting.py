"""A limiter, timeouts, and waits that continue through a cancellation."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self, TypeVar

from kvoffload_async.errors import StateError

T = TypeVar("T")

_MOST_S: Final = 1e9
"""30 years; the system calls that wait refuse ten times as much."""


def seconds(timeout: float, name: str = "timeout_s") -> float:
    """Return a timeout that a caller gave, or 30 years if it is longer.

    Raises:
        StateError: It is negative or not finite.
    """
    try:
        is_valid = 0 <= timeout < math.inf
    except TypeError:
        is_valid = False
    if not is_valid:
        raise StateError(f"{name}: {timeout!r} is not valid; give seconds, at least 0 and finite")
    return min(timeout, _MOST_S)


class LastingFuture(asyncio.Future[T]):
    """A future that is not ended by a cancellation of its awaiter.

    `Task.cancel` first asks the awaited future to cancel itself. This future refuses, so the task
    receives the cancellation only when the future is done. The future's exception then counts as
    retrieved.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(self, withdraw: Callable[[], object] | None = None) -> None:
        """Create a future of the running loop.

        Args:
            withdraw: Called on a cancellation before the end. If it returns true, the operation is
                no longer in flight, and the future is cancelled at once.
        """
        super().__init__(loop=asyncio.get_running_loop())
        self._withdraw = withdraw
        """Cleared at the end to break a reference cycle with the callback."""

    def cancel(self, msg: Any = None) -> bool:  # noqa: ANN401 - as in the base class
        """Cancel the future if `withdraw` allows it; return whether it was cancelled."""
        if self._withdraw is None or not self._withdraw():
            return False
        self._withdraw = None
        return super().cancel(msg)

    def set_result(self, result: T) -> None:
        """Mark the future done with a result."""
        self._withdraw = None
        super().set_result(result)

    def set_exception(self, error: type[BaseException] | BaseException) -> None:
        """Mark the future done with an exception."""
        self._withdraw = None
        super().set_exception(error)


async def all_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until all futures are done, delaying a cancellation until then. Loop thread only."""
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
    """Wait for a future and return its result, delaying a cancellation until it is done.

    Loop thread only.
    """
    try:
        await all_done(future)
        return future.result()
    except asyncio.CancelledError:
        if not future.cancelled():
            future.exception()  # mark as retrieved, or asyncio logs it
        raise
    finally:
        del future  # break the cycle: exception, traceback, frame, future


class Permit:
    """Admission by a `Limiter`; a context manager that releases it on exit, unless kept."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if not self._is_kept:
            self._release()

    def keep(self) -> Callable[[], None]:
        """Keep the permit beyond its context; return the function that releases it."""
        self._is_kept = True
        return self._release


class Limiter:
    """Limits the number of concurrent callers and their total bytes; FIFO.

    A caller with more bytes than the limit is admitted when no other holds bytes. Neither
    `asyncio.Semaphore` nor `anyio.CapacityLimiter` counts bytes in addition to callers.

    Not thread-safe; call only from the event loop's thread.

    Attributes:
        max_bytes: The current limit of bytes.
        bytes_in_flight: Total bytes of the admitted callers.
    """

    def __init__(self, permits: int, num_bytes: int = 0) -> None:
        """Admit `permits` callers, at least 1, with `num_bytes`."""
        self.max_bytes = num_bytes
        self.bytes_in_flight = 0
        self._free_permits = permits
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_acquire(self, num_bytes: int = 0) -> Permit | None:
        """Return a permit, or None if the caller has to wait."""
        if self._waiting or not self._fits(num_bytes):
            return None
        self._take(num_bytes)
        return Permit(partial(self._give_back, num_bytes))

    async def acquire(self, num_bytes: int = 0) -> Permit:
        """Wait for admission; a cancelled wait takes no permit."""
        if (permit := self.try_acquire(num_bytes)) is not None:
            return permit
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._admit()  # a later caller may fit
            else:
                self._give_back(num_bytes)
            raise
        return Permit(partial(self._give_back, num_bytes))

    def open(self) -> None:
        """Add one permit per waiting caller."""
        self._free_permits += len(self._waiting)
        self._admit()

    def resize(self, num_bytes: int) -> None:
        """Change the limit of bytes; it holds for callers admitted from now on."""
        self.max_bytes = num_bytes
        self._admit()

    def _fits(self, num_bytes: int) -> bool:
        in_flight = self.bytes_in_flight
        return self._free_permits > 0 and (in_flight + num_bytes <= self.max_bytes or not in_flight)

    def _take(self, num_bytes: int) -> None:
        self._free_permits -= 1
        self.bytes_in_flight += num_bytes

    def _give_back(self, num_bytes: int) -> None:
        self._free_permits += 1
        self.bytes_in_flight -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, admitted = self._waiting[0]
            if not admitted.done():  # otherwise the wait was cancelled
                if not self._fits(num_bytes):
                    return
                self._take(num_bytes)
                admitted.set_result(None)
            self._waiting.popleft()
