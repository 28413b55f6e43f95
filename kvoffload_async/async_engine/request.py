"""A request of the asynchronous engine, and the waiters of its calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self, TypeVarTuple

from kvoffload_async.errors import StateError
from kvoffload_async.types import OffloadKey, ReqContext
from kvoffload_async.waiting import seconds

logger = logging.getLogger(__name__)

Args = TypeVarTuple("Args")


class Waiters:
    """The engine's calls that wait for the planner or for a copy.

    Not thread-safe; call only from the event loop's thread.

    Attributes:
        has_given_up: Whether running copies were given up; their end is not reported.
        wake_ups: Number of wake-ups.
        round: Number of times that room was reported.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.by_key: dict[OffloadKey, dict[Waiter, None]] = {}
        self.for_room: dict[Waiter, int] = {}
        """Waiter for room in the primary -> the round in which it last found no room."""
        self.for_progress: dict[Waiter, None] = {}
        self.everybody: dict[Waiter, None] = {}  # ordered: woken first come, first served
        self.watched: dict[EngineRequest, None] = {}
        """Requests with a `when_released` callback that has not been called yet."""
        self.has_given_up = False
        self.wake_ups = 0
        self.round = 0

    def decided(self, keys: Iterable[OffloadKey]) -> None:
        """Wake the waiters for keys whose write has ended or whose probe was answered."""
        if not self.by_key:
            return
        for key in keys:
            for waiter in self.by_key.pop(key, ()):
                waiter.changed[key] = None
                waiter.wake()

    def progressed(self, *, has_room: bool) -> None:
        """Wake the waiters for progress and, if `has_room`, the first waiter for room."""
        woken, self.for_progress = self.for_progress, {}
        for waiter in woken:
            waiter.wake()
        if has_room:
            self.round += 1
            self.room_left()

    def room_left(self) -> None:
        """Wake the next waiter for room, unless it has already found no room in this round.

        So waiters are served in FIFO order, and none is woken after the room is used up.
        """
        waiter = next(iter(self.for_room), None)
        if waiter is not None and self.for_room[waiter] != self.round:
            del self.for_room[waiter]
            waiter.wake()

    def wake_all(self) -> None:
        """Wake all waiters."""
        for waiter in list(self.everybody):
            waiter.wake()

    def give_up(self) -> None:
        """Wake all waiters because the end of running copies will not be reported."""
        self.has_given_up = True
        for request in list(self.watched):
            request.report_release()
        self.wake_all()


class Waiter:
    """One waiting call; a context manager that unregisters it on exit.

    Attributes:
        changed: Awaited keys that were decided since the last `wait`.
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

    def __exit__(self, *_exc_info: object) -> None:
        waiters = self._waiters
        for table in (waiters.everybody, waiters.for_room, waiters.for_progress):
            table.pop(self, None)
        for key in self._keys:
            others = waiters.by_key.get(key, {})
            others.pop(self, None)
            if not others:
                waiters.by_key.pop(key, None)

    def expect(self, key: OffloadKey) -> None:
        """Register for a wake-up when the key's write has ended or its probe was answered."""
        self._keys[key] = None
        self._waiters.by_key.setdefault(key, {})[self] = None

    def expect_room(self) -> None:
        """Register for a wake-up, in FIFO order, when there may be room in the primary."""
        self._waiters.for_room[self] = self._waiters.round

    def expect_progress(self) -> None:
        """Register for a wake-up at any progress of a tier or copy."""
        self._waiters.for_progress[self] = None

    def wake(self) -> None:
        """Make the current or next `wait` return."""
        self._is_woken = True
        if self._woken is not None and not self._woken.done():
            self._waiters.wake_ups += 1
            self._woken.set_result(None)

    async def wait(self, until_s: float) -> dict[OffloadKey, None]:
        """Wait for a wake-up, or until `until_s` on the loop's clock; return `changed`."""
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


_Callback = Callable[[], object]


class EngineRequest:
    """One request; created by `OffloadEngine.request`.

    Attributes:
        ctx: The request's context.
        keys: The keys of its full blocks, head to tail; none unless `is_cached`.
        is_cached: False: the request's tenant is unknown, and `unknown_tenant` is "no_store", so
            that its lookups find nothing, and its stores store nothing.
        prefix_blocks: Number of blocks of the prefix that the last lookup has pinned; see `lookup`.
        left_out: Keys of the last `store` that found no room, a suffix of its keys.
        is_invalidated: Whether a reset or `invalidate` has dropped the last lookup's prefix.
    """

    def __init__(
        self,
        ctx: ReqContext,
        keys: tuple[OffloadKey, ...],
        waiters: Waiters,
        *,
        is_cached: bool = True,
    ) -> None:
        self.ctx = ctx
        self.is_cached = is_cached
        self.keys = keys
        self.prefix_blocks = 0
        self.left_out: Sequence[OffloadKey] = ()
        self.is_invalidated = False
        self._waiters = waiters
        self._has_ended = False
        self._calls: dict[Waiter, None] = {}
        self._copies: dict[object, Sequence[int]] = {}
        self._when_released: list[tuple[_Callback, _Callback | None]] = []

    def __repr__(self) -> str:
        pinned = f"{len(self.keys)} blocks, {self.prefix_blocks} of them pinned"
        return f"<{type(self).__name__} {self.ctx.req_id!r}: {pinned}>"

    @property
    def occupied_blocks(self) -> frozenset[int]:
        """The device blocks that copies of this request read or write now.

        They must not be reused, even after the copy's call was cancelled or timed out, or after
        the request's end.
        """
        return frozenset().union(*self._copies.values())

    async def released(self, timeout_s: float = 30.0) -> bool:
        """Wait until no copy of this request occupies a device block; False at the deadline.

        False means that a copy may still read and write `occupied_blocks`: do not reuse them. It
        also comes if the closed engine has given up a copy; then the blocks stay occupied. May be
        called after the request's end. To reuse the blocks after it, prefer `when_released`: an
        await in a `finally` block may be cancelled.
        """
        deadline_s = self._waiters.loop.time() + seconds(timeout_s)
        with self.call() as waiter:
            while self._copies:
                if self._waiters.has_given_up or self._waiters.loop.time() >= deadline_s:
                    return False
                await waiter.wait(deadline_s)
        return True

    def when_released(
        self,
        callback: Callable[[*Args], object],
        *args: *Args,
        if_given_up: Callable[[*Args], object] | None = None,
    ) -> None:
        """Call `callback(*args)` once this request has ended and no copy uses its device blocks.

        Call it as soon as the request gets its device blocks: `when_released(free.append, blocks)`
        makes them free again however the request ends, also if its task is cancelled repeatedly.

        Args:
            callback: A function, called from the event loop exactly once, unless `if_given_up` is
                called instead; soon, if the request has already ended. Its error is logged.
            args: Its arguments.
            if_given_up: Called instead if closing the engine gives up a copy of this request,
                which may still access the device blocks: they stay occupied, and must not be
                reused or deallocated.

        Raises:
            StateError: A callback is a coroutine function.
        """
        for each in (callback, if_given_up):
            if inspect.iscoroutinefunction(each):
                raise StateError(f"when_released: {each} is a coroutine function; give a plain one")
        given_up = None if if_given_up is None else partial(if_given_up, *args)
        self._when_released.append((partial(callback, *args), given_up))
        self._waiters.watched[self] = None
        self.report_release()

    def report_release(self) -> None:
        """Schedule the callbacks of `when_released` if the request is released or given up."""
        waiters = self._waiters
        if not (waiters.has_given_up if self._copies else self._has_ended):
            return
        waiters.watched.pop(self, None)
        callbacks, self._when_released = self._when_released, []
        if self._copies and callbacks:
            logger.warning(
                "request %s: its device blocks stay occupied: the engine was closed during a copy",
                self.ctx.req_id,
            )
        for released, given_up in callbacks:
            callback = given_up if self._copies else released
            if callback is not None:
                waiters.loop.call_soon(self._call_back, callback)

    def end(self) -> None:
        """Record that the request has ended, so that no copy of it begins; wake its calls."""
        self._has_ended = True
        self.wake()
        self.report_release()

    def occupy(self, device_blocks: Sequence[int]) -> Callable[[], None]:
        """Mark device blocks as used by a copy; return a function to call at the copy's end."""
        copy = object()
        self._copies[copy] = tuple(device_blocks)

        def release() -> None:
            del self._copies[copy]
            if not self._copies:
                if self._calls:
                    self.wake()
                self.report_release()

        return release

    def invalidate(self) -> None:
        """Drop the pinned prefix; a later `load` raises InvalidatedError until the next lookup."""
        self.prefix_blocks = 0
        self.is_invalidated = True

    @contextmanager
    def call(self) -> Iterator[Waiter]:
        """Register a waiter for a call of this request; `wake` wakes it."""
        with Waiter(self._waiters) as waiter:
            self._calls[waiter] = None
            try:
                yield waiter
            finally:
                del self._calls[waiter]

    def wake(self) -> None:
        """Wake all waiting calls of this request."""
        for waiter in list(self._calls):
            waiter.wake()

    def _call_back(self, callback: _Callback) -> None:
        try:
            callback()
        except Exception:
            logger.exception(
                "request %s: a callback of when_released has failed; fix it", self.ctx.req_id
            )
