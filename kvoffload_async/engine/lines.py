"""Bounded lines: many callers, few at once, and none that waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvoffload_async.errors import BusyError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """How much an engine takes on at once.

    Attributes:
        concurrent_loads: Loads to the device under way; more wait in line.
        concurrent_stores: Stores from the device under way; more wait in a line of their own.
        waiting_calls: Calls that wait in each line; one more raises BusyError.
        unread_events: Events kept for a slow reader; then the oldest are dropped.
    """

    concurrent_loads: int = 4
    concurrent_stores: int = 4
    waiting_calls: int = 1024
    unread_events: int = 4096

    def __post_init__(self) -> None:
        """Raise ConfigError for a bound under which nothing could happen."""
        for name in ("concurrent_loads", "concurrent_stores", "unread_events"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not valid; at least 1")
        if self.waiting_calls < 0:
            raise ConfigError(f"waiting_calls: {self.waiting_calls} is not valid; at least 0")


class Place:
    """A place at the head of a line; given back by who holds it last."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.is_kept = False

    def keep(self) -> Callable[[], None]:
        """Keep the place beyond the line's context; return what gives it back."""
        self.is_kept = True
        return self._release


class Line:
    """A bounded line in front of a bounded number of places."""

    def __init__(self, name: str, places: int, waiting: int) -> None:
        self._name = name
        self._places = asyncio.Semaphore(places)
        self._room = waiting
        self._waiting = 0

    @asynccontextmanager
    async def place(self, deadline_s: float) -> AsyncIterator[Place]:
        """Hold a place; BusyError if the line is full, TimeoutError at the deadline."""
        if not self._places.locked():
            await self._places.acquire()  # at once
        elif self._waiting < self._room:
            await self._wait(deadline_s)
        else:
            raise BusyError(f"too many {self._name} are waiting")
        place = Place(self._places.release)
        try:
            yield place
        finally:
            if not place.is_kept:
                self._places.release()

    def open(self) -> None:
        """Let everybody in who waits."""
        for _ in range(self._waiting):
            self._places.release()

    async def _wait(self, deadline_s: float) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._places.acquire()
        finally:
            self._waiting -= 1
