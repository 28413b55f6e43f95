"""The turns of the core, and what they bring to those who wait."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator

from kvoffload_async.async_engine.waiting import Waiter, Waiters
from kvoffload_async.core.index import KeysDecided
from kvoffload_async.core.planner import Planner
from kvoffload_async.errors import ClosedError, OffloadError, StateError
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.types import OffloadingEvent


class Steps:
    """Ends a step of the core at the end of each turn of the loop in which it was asked something.

    Thread: the loop's.
    """

    def __init__(self, unread_events: int) -> None:
        """Keep at most so many events for each reader."""
        self._loop = asyncio.get_running_loop()
        self.waiters = Waiters()
        self._news: asyncio.Future[None] = self._loop.create_future()
        """Ends when there are events for the readers, or none any more."""
        self._unread_events = unread_events
        self._readers: dict[int, deque[OffloadingEvent]] = {}
        self.missed_events = 0
        """Events that readers have missed, as they were slower; once for each reader."""
        self._manager: TieringOffloadingManager | None = None
        self._is_due = False
        self._has_progress = False
        self._has_ended = False
        self._later: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None

    def begin(self, manager: TieringOffloadingManager) -> None:
        """Take calls from now on."""
        self._manager = manager
        watch_keys(manager.planner, self.waiters.decided)

    def stop(self) -> None:
        """Take no calls any more; who waits gets a ClosedError."""
        self._manager = None
        self._schedule_later(math.inf)
        self.waiters.wake_all()

    def end(self, manager: TieringOffloadingManager) -> None:
        """End the last step, and with it the readers' events."""
        try:
            self._finish(manager)
        finally:
            self._has_ended = True
            self._tell_readers()

    def ensure_open(self) -> None:
        """Raise ClosedError before the begin and after the stop, StateError after a defect."""
        if self._manager is None:
            raise ClosedError("the engine is not open")
        if self._fault is not None:
            raise StateError(f"the engine has failed: {self._fault}") from self._fault

    # -- steps ----------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Something happened that somebody may wait for."""
        self._has_progress = True
        self.schedule()

    def schedule(self) -> None:
        """End the step at the end of this turn of the loop; once, however often asked."""
        if not self._is_due and self._manager is not None:
            self._is_due = True
            self._loop.call_soon(self._end_step)

    async def next_progress(self, deadline_s: float) -> None:
        """Wait until something has happened, or until the deadline.

        Raises:
            ClosedError: The engine is closed.
        """
        with Waiter(self.waiters) as waiter:
            waiter.expect_progress()
            await waiter.wait(deadline_s)
        self.ensure_open()

    async def events(self) -> AsyncIterator[OffloadingEvent]:
        """Iterate over the events from the first iteration on, until the end."""
        self.ensure_open()
        unread: deque[OffloadingEvent] = deque(maxlen=self._unread_events)
        self._readers[id(unread)] = unread
        try:
            while True:
                while unread:
                    yield unread.popleft()
                if self._has_ended:
                    return
                await asyncio.wait({self._news})
        finally:
            del self._readers[id(unread)]

    # -- inside ---------------------------------------------------------------------------------

    def _end_step(self) -> None:
        self._is_due = False
        if self._manager is not None:
            self._finish(self._manager)
            self._schedule_later(self._manager.wakes_in_s())

    def _finish(self, manager: TieringOffloadingManager) -> None:
        """Hand over what the step has decided; tell who waits for that, but only if there is news.

        Who waits for room begins a new step by trying again: woken by steps alone, it would spin.
        """
        counters = manager.planner.counters
        results_before = counters.job_results
        try:
            manager.on_schedule_end()
            events = list(manager.take_events())
        except OffloadError as error:  # a defect: nobody may wait for what will not come
            self._fault = error
            self.waiters.wake_all()
            self._tell_readers()
            raise
        for unread in self._readers.values():
            self.missed_events += max(0, len(unread) + len(events) - self._unread_events)
            unread.extend(events)
        if events:
            self._tell_readers()
        if self._has_progress or events or counters.job_results != results_before:
            self._has_progress = False
            self.waiters.progressed(has_room=manager.planner.primary.room > 0)

    def _schedule_later(self, delay_s: float) -> None:
        """Have a step after so many seconds, whatever happens until then; infinity: have none."""
        if self._later is not None:
            self._later.cancel()
        is_due = delay_s < math.inf
        self._later = self._loop.call_later(delay_s, self.note_progress) if is_due else None

    def _tell_readers(self) -> None:
        """Let the readers look for events."""
        news, self._news = self._news, self._loop.create_future()
        news.set_result(None)


def watch_keys(planner: Planner, decided: KeysDecided) -> None:
    """Have `decided` called with keys whose writes have ended, or that a probe has answered."""
    planner.primary.decided = decided
    for tier in planner.tiers:
        tier.index.decided = decided
