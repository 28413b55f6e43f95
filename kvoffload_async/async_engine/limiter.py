"""Limiters: many callers, few at once, a bounded queue, and none that waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from kvoffload_async.errors import BusyError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBounds:
    """How much an engine takes on at once.

    Attributes:
        concurrent_loads: Loads to the device under way; more wait for a permit.
        concurrent_stores: Stores from the device under way, with a limiter of their own.
        waiting_calls: Loads that wait for a permit, and as many stores that wait for a permit or
            for room; one more raises BusyError.
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


class Permit:
    """Permission to run; given back by who holds it last."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.is_kept = False

    def keep(self) -> Callable[[], None]:
        """Keep the permit beyond the limiter's context; return what gives it back."""
        self.is_kept = True
        return self._release


class Limiter:
    """A bounded number of permits, with a bounded queue for them."""

    def __init__(self, name: str, permits: int, waiting: int) -> None:
        self.name = name
        self._permits = asyncio.Semaphore(permits)
        self._room = waiting
        self.waiting = 0
        """Callers that wait, for a permit or, without one, for room."""

    @property
    def is_busy(self) -> bool:
        """Whether the next caller has to wait."""
        return self._permits.locked()

    @asynccontextmanager
    async def permit(self, deadline_s: float) -> AsyncIterator[Permit]:
        """Hold a permit; BusyError if the queue is full, TimeoutError at the deadline."""
        if not self._permits.locked():
            await self._permits.acquire()  # at once
        else:
            with self.counted():
                async with asyncio.timeout_at(deadline_s):
                    await self._permits.acquire()
        permit = Permit(self._permits.release)
        try:
            yield permit
        finally:
            if not permit.is_kept:
                self._permits.release()

    def open(self) -> None:
        """Let everybody in who waits."""
        for _ in range(self.waiting):
            self._permits.release()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a caller that waits, for a permit or without one; BusyError if too many do."""
        if self.waiting >= self._room:
            raise BusyError(f"too many {self.name} are waiting")
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
