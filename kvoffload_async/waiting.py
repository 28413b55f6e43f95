"""Waits that continue through a cancellation, for calls that still access shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LastingFuture(asyncio.Future[T]):
    """A future that is not ended by a cancellation of its awaiter.

    `Task.cancel` first asks the awaited future to cancel itself. This future refuses, so the task
    receives the cancellation only when the future is done. The future's exception then counts as
    retrieved.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(self, withdraw: Callable[[], object] = lambda: False) -> None:
        """Create a future on the running loop.

        Args:
            withdraw: Called on a cancellation before the end. If it returns true, the operation is
                no longer in flight, and the future is cancelled at once.
        """
        super().__init__(loop=asyncio.get_running_loop())
        self._withdraw: Callable[[], object] | None = withdraw
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
