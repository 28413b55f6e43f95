"""Copies between device and host that are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvoffload_async.abc.transport import Transfer, TransferOutcome

Ended = Callable[[bool], None]
"""Called once, with whether the copy succeeded, when its bytes have stopped moving."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One copy.

    Attributes:
        transfer: What moves.
        ended: Told of the end.
        landed: Awaited by the caller, while it cares.
        task: Follows the transfer.
    """

    transfer: Transfer
    ended: Ended
    landed: asyncio.Future[TransferOutcome]
    task: asyncio.Task[TransferOutcome] = field(init=False)


class Flights:
    """Follows every copy to its end, whoever still waits for it.

    A copy in flight is never cancelled: a caller that goes away changes nothing here, and a
    cancelled task is followed by another one.

    Thread: the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._flights: dict[_Flight, None] = {}  # ordered: who came first is told first

    def start(self, transfer: Transfer, ended: Ended) -> asyncio.Future[TransferOutcome]:
        """Follow a transfer; the future never fails, and cancelling it ends nothing."""
        flight = _Flight(transfer, ended, self._loop.create_future())
        self._flights[flight] = None
        self._follow(flight)
        return flight.landed

    async def quiesce(self, timeout_s: float) -> bool:
        """Wait until no copy is under way; False at the deadline."""
        deadline_s = self._loop.time() + timeout_s
        while self._flights:
            left_s = deadline_s - self._loop.time()
            if left_s <= 0:
                return False
            await asyncio.wait([f.landed for f in self._flights], timeout=left_s)
        return True

    def abandon(self, error: Exception) -> None:
        """Stop following: who waits is told `error`, and `ended` is never called."""
        abandoned, self._flights = self._flights, {}
        for flight in abandoned:
            flight.landed.set_result(TransferOutcome(0, error=error))
            flight.task.cancel()

    def _follow(self, flight: _Flight) -> None:
        flight.task = self._loop.create_task(flight.transfer.outcome(), name="kvoffload:copy")
        flight.task.add_done_callback(partial(self._followed, flight))

    def _followed(self, flight: _Flight, task: asyncio.Task[TransferOutcome]) -> None:
        error = None if task.cancelled() else task.exception()
        if flight not in self._flights:  # abandoned
            return
        if task.cancelled():
            self._follow(flight)
            return
        outcome = task.result() if error is None else TransferOutcome(0, error=_as_error(error))
        del self._flights[flight]
        try:
            flight.ended(outcome.error is None)
        finally:
            flight.landed.set_result(outcome)


def _as_error(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
