"""Who waits for what: each is woken when that has happened, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from kvoffload_async.types import OffloadKey


class Waiters:
    """Everybody who waits for the core or for a copy.

    Thread: the loop's.

    Attributes:
        has_given_up: Whether copies that still run were given up: nobody learns of their end.
        wake_ups: How often somebody was woken.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.by_key: dict[OffloadKey, dict[Waiter, None]] = {}
        self.for_room: dict[Waiter, int] = {}
        """Who waits for room, and in which round it has found none."""
        self.for_progress: dict[Waiter, None] = {}
        self.everybody: dict[Waiter, None] = {}  # ordered: who came first is woken first
        self.has_given_up = False
        self.wake_ups = 0
        self._round = 0
        """How often there has been room."""

    def decided(self, keys: Iterable[OffloadKey]) -> None:
        """Wake who waits for one of these: its write has ended, or a probe has answered."""
        if not self.by_key:
            return
        for key in keys:
            for waiter in self.by_key.pop(key, ()):
                waiter.changed[key] = None
                waiter.wake()

    def progressed(self, *, has_room: bool) -> None:
        """Wake who watches the engine and, if there may be room now, the first who waits for it."""
        woken, self.for_progress = self.for_progress, {}
        for waiter in woken:
            waiter.wake()
        if has_room:
            self._round += 1
            self.room_left()

    def room_left(self) -> None:
        """Wake the next who waits for room, unless it has found none since there may be some.

        So each has its turn, first come first served, and those behind who has taken all of it
        are not woken in vain.
        """
        waiter = next(iter(self.for_room), None)
        if waiter is not None and self.for_room[waiter] != self._round:
            del self.for_room[waiter]
            waiter.wake()

    def wait_for_room(self, waiter: Waiter) -> None:
        """Put somebody who has found no room now behind all others who wait for some."""
        self.for_room[waiter] = self._round

    def wake_all(self) -> None:
        """Let everybody look again."""
        for waiter in list(self.everybody):
            waiter.wake()

    def give_up(self) -> None:
        """Tell everybody that copies which still run will not be followed to their end."""
        self.has_given_up = True
        self.wake_all()


class Waiter:
    """One call that waits; a context manager, at whose end it waits for nothing any more.

    Attributes:
        changed: Of the keys that it waited for, those that were decided since the last `wait`.
    """

    def __init__(self, waiters: Waiters) -> None:
        self.changed: dict[OffloadKey, None] = {}
        self._waiters = waiters
        self._keys: dict[OffloadKey, None] = {}
        self._is_woken = False
        self._woken: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._waiters.everybody[self] = None
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        waiters = self._waiters
        for table in (waiters.everybody, waiters.for_room, waiters.for_progress):
            table.pop(self, None)
        for key in self._keys:
            others = waiters.by_key.get(key, {})
            others.pop(self, None)
            if not others:
                waiters.by_key.pop(key, None)

    def expect(self, key: OffloadKey) -> None:
        """Be woken when this key is decided."""
        self._keys[key] = None
        self._waiters.by_key.setdefault(key, {})[self] = None

    def expect_room(self) -> None:
        """Be woken in turn when something has happened and there may be room in the primary."""
        self._waiters.wait_for_room(self)

    def expect_progress(self) -> None:
        """Be woken when anything has happened."""
        self._waiters.for_progress[self] = None

    def wake(self) -> None:
        """Let `wait` return; a wake that comes before it is not lost."""
        self._is_woken = True
        if self._woken is not None and not self._woken.done():
            self._waiters.wake_ups += 1
            self._woken.set_result(None)

    async def wait(self, until_s: float) -> dict[OffloadKey, None]:
        """Wait to be woken, or until the loop's clock says `until_s`; return `changed`."""
        loop = self._waiters.loop
        if not self._is_woken:
            self._woken = loop.create_future()
            timer = loop.call_at(until_s, self.wake)
            try:
                await self._woken
            finally:
                timer.cancel()
                self._woken = None
        self._is_woken = False
        changed, self.changed = self.changed, {}
        return changed
