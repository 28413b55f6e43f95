"""The planner's steps on an event loop, and store calls, which may take several steps.

A store first copies the longest prefix that fits, then the rest as room becomes available.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvoffload_async.abc.tier import Direction
from kvoffload_async.async_engine.request import EngineRequest, Waiter, Waiters
from kvoffload_async.async_engine.transfers import Transfers
from kvoffload_async.core.counters import Histogram
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.room import RoomWatch
from kvoffload_async.errors import BusyError, ClosedError, OffloadError, StateError
from kvoffload_async.facade.driver import PlannerDriver
from kvoffload_async.runtime.loop import clock_of
from kvoffload_async.types import LookupResult, OffloadingEvent, OffloadKey, PrepareStoreOutput

_CALLS_PER_STEP: Final = 32


@dataclass(slots=True, eq=False)
class _Reader:
    """An iteration over the events.

    Attributes:
        unread: Events to yield next, unless `has_missed`.
        has_missed: Whether the contents are to be yielded first, as at the start.
    """

    unread: deque[OffloadingEvent] = field(default_factory=deque)
    has_missed: bool = True


class Steps:
    """Ends a planner step after each iteration of the event loop that called the planner.

    Calls that never wait give the loop no turn, so a step also ends after `_CALLS_PER_STEP` calls.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(self, unread_events: int) -> None:
        """Buffer at most `unread_events` events per reader."""
        self._loop = asyncio.get_running_loop()
        self.waiters = Waiters()
        self._news: asyncio.Future[None] = self._loop.create_future()
        """Done when there are new events for the readers, or no more will come."""
        self._unread_events = unread_events
        self._readers: list[_Reader] = []
        self.resetting: asyncio.Future[None] | None = None
        """Done when the running reset ends; None if no reset is running."""
        self.missed_events = 0
        """Number of events dropped for slow readers, summed over readers."""
        self._driver: PlannerDriver | None = None
        self.lag = Histogram()
        """Seconds from scheduling a step's end until the loop runs it."""
        self.clock = clock_of(self._loop)
        """Returns the time of the planner's steps, in seconds."""
        self._is_due = False
        self._num_calls = 0
        """Number of calls in this step."""
        self._has_progress = False
        self._has_ended = False
        self._later: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None

    def begin(self, driver: PlannerDriver) -> None:
        """Accept calls from now on."""
        self._driver = driver
        driver.planner.primary.decided = self.waiters.decided
        for tier in driver.planner.tiers:
            tier.index.watch(self.waiters.decided)
        driver.on_schedule_end()  # from now on, this thread is the owner's

    def stop(self) -> None:
        """Reject further calls; waiting calls raise ClosedError."""
        self._driver = None
        self._schedule_later(math.inf)
        self.waiters.wake_all()

    def end(self, driver: PlannerDriver) -> None:
        """End the last step, and every reader's iteration over the events."""
        try:
            self._finish(driver)
        finally:
            self._has_ended = True
            self._tell_readers()

    async def ready(self, deadline_s: float) -> None:
        """Wait until no reset is under way; TimeoutError at the deadline, ClosedError if closed."""
        while self.resetting is not None:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.shield(self.resetting)
        self.ensure_open()

    def ensure_open(self) -> None:
        """Raise ClosedError before `begin` and after `stop`, StateError after an internal error."""
        if self._driver is None:
            raise ClosedError("the engine is not open")
        if self._fault is not None:
            raise StateError(f"the engine has failed: {self._fault}") from self._fault

    # -- steps ----------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Count the start of a call; end the step first if it has had too many calls.

        A step keeps what its calls have looked up.
        """
        if self._driver is not None and self._num_calls >= _CALLS_PER_STEP:
            self._finish(self._driver)
            self.schedule()  # for what is due later
        self._num_calls += 1

    def note_progress(self) -> None:
        """Record progress that calls may wait for, and schedule a step."""
        self._has_progress = True
        self.schedule()

    def note_report(self) -> None:
        """Record that a tier has posted a report, possibly during a call of the planner.

        The end of the step takes it in, also if the step has polled the tiers before.
        """
        if self._driver is not None:
            self._driver.interrupt_step()
        self.note_progress()

    def schedule(self) -> None:
        """End the step after this iteration of the loop; repeated calls have no effect."""
        if not self._is_due and self._driver is not None:
            self._is_due = True
            self._loop.call_soon(self._end_step, self.clock())

    async def next_progress(self, deadline_s: float) -> None:
        """Wait for any progress of a tier or copy, or until the deadline.

        Raises:
            ClosedError: The engine is closed.
        """
        with Waiter(self.waiters) as waiter:
            waiter.expect_progress()
            await waiter.wait(deadline_s)
        self.ensure_open()

    async def events(self) -> AsyncIterator[OffloadingEvent]:
        """Iterate over the contents, then over the block events, until the engine is closed."""
        self.ensure_open()
        reader = _Reader()
        self._readers.append(reader)
        try:
            while True:
                while reader.has_missed and self._driver is not None:
                    self._deliver(self._driver)  # the contents include what is unread now
                    reader.has_missed = False
                    for event in self._shown(self._driver, self._driver.contents()):
                        yield event
                while reader.unread:
                    yield reader.unread.popleft()
                if self._has_ended:
                    return
                if not reader.has_missed or self._driver is None:
                    await asyncio.wait({self._news})
        finally:
            self._readers.remove(reader)

    # -- internal -------------------------------------------------------------------------------

    def _end_step(self, scheduled_s: float) -> None:
        self._is_due = False
        self.lag.observe(self.clock() - scheduled_s)
        if self._driver is not None:
            self._finish(self._driver)
            wakes_in_s = self._driver.wakes_in_s()
            if self._later is not None or wakes_in_s < math.inf:
                self._schedule_later(wakes_in_s)

    def _finish(self, driver: PlannerDriver) -> None:
        """Hand the step's effects to the tiers; wake waiters only after progress.

        A retry of a waiter for room starts a new step: woken by every step, it would spin.
        """
        counters = driver.planner.counters
        results_before = counters.job_results
        # Progress that is reported from now on is that of the next step, which takes it in.
        has_progress, self._has_progress = self._has_progress, False
        self._num_calls = 0
        try:
            driver.on_schedule_end()
            has_events = self._deliver(driver)
        except OffloadError as error:  # an internal error: waiting calls must not hang
            self._fault = error
            self.waiters.wake_all()
            self._tell_readers()
            raise
        has_ended = any(operation.is_done for operation in driver.cache.running)
        if has_progress or has_events or has_ended or counters.job_results != results_before:
            is_wanted = bool(self.waiters.for_room)
            self.waiters.progressed(has_room=is_wanted and driver.planner.primary.room > 0)

    def _deliver(self, driver: PlannerDriver) -> bool:
        """Pass the new events to the readers; return whether there are any."""
        events = self._shown(driver, driver.take_events())
        for reader in self._readers:
            if not reader.has_missed:
                reader.unread.extend(events)
            if len(reader.unread) > self._unread_events:
                self.missed_events += len(reader.unread)
                reader.unread.clear()
                reader.has_missed = True
        if events:
            self._tell_readers()
        return bool(events)

    def _shown(
        self, driver: PlannerDriver, events: Iterable[OffloadingEvent]
    ) -> Sequence[OffloadingEvent]:
        """Return events as readers get them: by tenant, if there are tenants."""
        if driver.tenants is None:
            return list(events)
        return [part for event in events for part in driver.tenants.untag(event)]

    def _schedule_later(self, delay_s: float) -> None:
        """Replace the timer of the next step: due in `delay_s` seconds, never if infinite."""
        if self._later is not None:
            self._later.cancel()
        is_due = delay_s < math.inf
        self._later = self._loop.call_later(delay_s, self.note_progress) if is_due else None

    def _tell_readers(self) -> None:
        """Wake the readers of events."""
        news, self._news = self._news, self._loop.create_future()
        news.set_result(None)


class _KeysLeft:
    """The keys of a store call that are not stored yet, head to tail.

    The first offer contains all blocks, later offers the prefix that may fit into new room.

    Attributes:
        offered: Keys of the current offer.
    """

    def __init__(self, keys: Sequence[OffloadKey]) -> None:
        self.offered = keys
        self._rest: deque[OffloadKey] = deque()
        self._watch = RoomWatch()

    def __len__(self) -> int:
        return len(self.offered) + len(self._rest)

    def all_keys(self) -> Sequence[OffloadKey]:
        """Return all remaining keys."""
        return (*self.offered, *self._rest)

    def begin_offer(self, room_made: int) -> Sequence[OffloadKey]:
        """Return the keys to offer now; empty if no room was made since the last offer."""
        most = self._watch.most_blocks(room_made)
        if most is not None:
            self.end_offer(self.offered)
            self.offered = [self._rest.popleft() for _ in range(min(most, len(self._rest)))]
        return self.offered

    def note_answer(self, granted: PrepareStoreOutput | None, room_made: int) -> None:
        """Record the granted part of the offer, and the value of `room_made` right afterwards."""
        if granted is None or granted.keys_left_out:
            self._watch.blocks_left_out(room_made)
        else:
            self._watch.blocks_placed(len(granted.keys_to_store), room_made)

    def end_offer(self, left_out: Sequence[OffloadKey]) -> None:
        """End the offer: all its blocks are stored except `left_out`."""
        self._rest.extendleft(reversed(left_out))
        self.offered = ()


class Stores:
    """Stores blocks: reserves slots and copies from the device.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(
        self,
        driver: PlannerDriver,
        steps: Steps,
        transfers: Transfers,
    ) -> None:
        """Create the object without reserving slots."""
        self._driver = driver
        self._planner = driver.planner
        self._primary = driver.planner.primary
        self._steps = steps
        self._transfers = transfers

    async def store(
        self,
        request: EngineRequest,
        keys: Sequence[OffloadKey],
        device_blocks: Sequence[int],
        deadline_s: float,
    ) -> int:
        """Store the blocks that fit now, then the rest as room becomes available.

        Args:
            request: The storing request; sets its `left_out`.
            keys: Keys of the blocks to store, head to tail.
            device_blocks: The blocks' device blocks, the same number per key.
            deadline_s: When to stop waiting, on the loop's clock.

        Returns:
            The number of blocks copied.

        Raises:
            BusyError: No block found room before the deadline, or too many stores wait.
            TimeoutError: The deadline passed; a running copy continues.
            TransportError: A copy failed; those before it stay stored.
        """
        request.left_out = keys
        left = _KeysLeft(keys)
        stored = 0
        per_key = len(device_blocks) // max(1, len(keys))
        blocks = {
            key: device_blocks[i * per_key : i * per_key + per_key] for i, key in enumerate(keys)
        }
        try:
            while left:
                granted = await self._store_head(request, left, blocks, deadline_s)
                if granted is not None:
                    left.end_offer(granted.keys_left_out)
                    stored += len(granted.keys_to_store)
                elif stored and not _may_have_room(self._primary, request):
                    break  # there will be no room for the rest
                elif not await self._wait_for_room(request, deadline_s):
                    if stored:
                        break
                    raise BusyError(_no_room(self._primary, len(left)))
        finally:
            request.left_out = left.all_keys()
            self._pass_room_on()
        return stored

    async def _store_head(
        self,
        request: EngineRequest,
        left: _KeysLeft,
        blocks_of: Mapping[OffloadKey, Sequence[int]],
        deadline_s: float,
    ) -> PrepareStoreOutput | None:
        """Store the blocks that fit now; return the grant, None if there is no room."""
        if self._steps.resetting is not None:
            await self._steps.ready(deadline_s)
        keys = left.begin_offer(self._primary.room_made)
        if not keys:
            self._pass_room_on()
            return None
        if self._has_all(keys):  # no copy, so no permit is needed
            return self._prepare(request, left)
        with await self._transfers.permit(Direction.STORE, deadline_s, request.ctx) as permit:
            await self._steps.ready(deadline_s)
            granted = self._prepare(request, left)
            if granted is not None and granted.keys_to_store:
                blocks = [block for key in granted.keys_to_store for block in blocks_of[key]]
                await self._transfers.run(
                    Direction.STORE,
                    blocks,
                    granted.store_spec,
                    ctx=request.ctx,
                    permit=permit,
                    ended=partial(self._ended, granted, request, request.occupy(blocks)),
                    deadline_s=deadline_s,
                )
            return granted

    def _has_all(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether all current-generation keys are in the primary or being written there."""
        current = self._driver.generation.current(keys)
        if LookupResult.MISS in self._primary.lookup_many(current):
            return False
        self._driver.begin_step()  # a pending write may have failed by now
        if LookupResult.MISS not in self._primary.lookup_many(current):
            return True
        self._driver.interrupt_step()  # the store may wait for a permit
        return False

    def _prepare(self, request: EngineRequest, left: _KeysLeft) -> PrepareStoreOutput | None:
        """Reserve slots for the offered blocks; the caller must use them before it awaits."""
        self._planner.begin_step(self._steps.clock())  # each report of a tier is taken in by itself
        current = self._driver.generation.current(left.offered)
        granted = self._planner.prepare_store(current, request.ctx)
        left.note_answer(granted, self._primary.room_made)
        has_news = granted is None or granted.evicted_keys or not granted.keys_to_store
        if has_news or self._steps.waiters.everybody:  # else the step ends with the copy
            self._steps.schedule()
        self._pass_room_on()
        return granted

    def _pass_room_on(self) -> None:
        """Wake the next store that waits for room, if there is room left."""
        waiters = self._steps.waiters
        if waiters.for_room and self._primary.room:
            waiters.room_left()

    async def _wait_for_room(self, request: EngineRequest, deadline_s: float) -> bool:
        """Wait, without a permit, until there may be room; return False at the deadline."""
        with self._transfers.waiting(Direction.STORE), request.call() as waiter:
            waiter.expect_room()
            await waiter.wait(deadline_s)
        self._steps.ensure_open()
        return asyncio.get_running_loop().time() < deadline_s

    def _ended(
        self,
        granted: PrepareStoreOutput,
        request: EngineRequest,
        release: Callable[[], None],
        success: bool,
    ) -> None:
        release()
        generation = granted.store_spec.generation
        self._planner.complete_store(
            granted.keys_to_store, request.ctx, success=success, generation=generation
        )
        self._steps.note_progress()


def _may_have_room(primary: Primary, request: EngineRequest) -> bool:
    """Return whether room may be freed: blocks await write-back or are in use by other requests."""
    if primary.protected_blocks:
        return True
    counts = primary.counts
    in_use = counts["pinned"] + counts["writing"]
    if not in_use or in_use > len(request.keys):
        return in_use > 0
    return in_use > primary.num_in_use(request.keys)


def _no_room(primary: Primary, wanted: int) -> str:
    counts = primary.counts
    return (
        f"no room for {wanted} blocks in the primary's {primary.num_slots} slots: "
        f"{counts['pinned']} are pinned, {counts['writing']} being written, {counts['held']} held "
        f"by overdue copies, {counts['free']} free, and {counts['idle']} idle, which are too few "
        f"or a part of this request, or which tiers have still to store: {primary.protected_blocks}"
        "; raise cpu_bytes_to_use, or store less at once"
    )
