"""Waits that outlast a cancellation, as memory must that a call still touches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class LastingFuture(asyncio.Future[T]):
    """A future that a cancellation of its awaiter does not end.

    The awaiting task is cancelled when the future is done: `Task.cancel` asks the future that the
    task awaits to cancel itself, and where that refuses, delivers the cancellation at its end. What
    the future has ended with counts as retrieved then.

    Thread: the loop's.
    """

    def __init__(self, withdraw: Callable[[], object] = lambda: False) -> None:
        """Create a future of the running loop.

        Args:
            withdraw: Called at a cancellation before the end; where it returns true, nothing is
                under way any more, and the future is cancelled at once.
        """
        super().__init__(loop=asyncio.get_running_loop())
        self._withdraw: Callable[[], object] | None = withdraw
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
        del future  # what is raised holds this frame, which must not hold it
