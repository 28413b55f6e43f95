"""Bounds on what is in flight: bytes and calls, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Limits:
    """So many calls at once, with so many bytes. Thread: loop.

    Who asks for more bytes than there are waits for all of them, so that a block larger than the
    bound passes alone.
    """

    def __init__(self, calls: int, num_bytes: int) -> None:
        """Allow this much; `calls` and `num_bytes` are at least 1."""
        self._most_bytes = num_bytes
        self._free_calls = calls
        self._free_bytes = num_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def bytes_in_flight(self) -> int:
        """What is taken now."""
        return self._most_bytes - self._free_bytes

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Take one call and its bytes for the duration of the block; waits for its turn."""
        wanted = min(num_bytes, self._most_bytes)
        await self._acquire(wanted)
        try:
            yield
        finally:
            self._give_back(wanted)

    async def _acquire(self, wanted: int) -> None:
        if not self._waiting and self._fits(wanted):
            self._take(wanted)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted just now
                self._give_back(wanted)
            else:
                self._grant()  # who waits behind it may fit
            raise

    def _fits(self, wanted: int) -> bool:
        return self._free_calls > 0 and self._free_bytes >= wanted

    def _take(self, wanted: int) -> None:
        self._free_calls -= 1
        self._free_bytes -= wanted

    def _give_back(self, wanted: int) -> None:
        self._free_calls += 1
        self._free_bytes += wanted
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            wanted, future = self._waiting[0]
            if not future.done():  # else it was cancelled
                if not self._fits(wanted):
                    return
                self._take(wanted)
                future.set_result(None)
            self._waiting.popleft()
