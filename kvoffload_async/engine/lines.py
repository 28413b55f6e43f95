"""Bounded lines: many callers, few at once, and none that waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvoffload_async.errors import BusyError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """How much an engine takes on at once.

    Attributes:
        concurrent_loads: Loads to the device under way; more wait in line.
        concurrent_stores: Stores from the device under way; more wait in a line of their own.
        waiting_calls: Calls in each line; one more raises BusyError.
        unread_events: Events kept for a slow reader; then the oldest are dropped.
    """

    concurrent_loads: int = 4
    concurrent_stores: int = 4
    waiting_calls: int = 1024
    unread_events: int = 4096


class Line:
    """A bounded line in front of a bounded number of places."""

    def __init__(self, name: str, places: int, waiting: int) -> None:
        self._name = name
        self._places = asyncio.Semaphore(places)
        self._free = waiting

    @asynccontextmanager
    async def place(self, deadline_s: float) -> AsyncIterator[None]:
        """Hold a place; BusyError if the line is full, TimeoutError at the deadline."""
        if not self._free:
            raise BusyError(f"too many {self._name} are waiting")
        self._free -= 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._places.acquire()
        finally:
            self._free += 1
        try:
            yield
        finally:
            self._places.release()
