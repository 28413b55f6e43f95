"""A request of the asynchronous surface, and its waiters: each is woken by what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

from kvoffload_async.types import OffloadKey, ReqContext, as_block_ids

NO_BLOCKS: Final = as_block_ids(())


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


class EngineRequest:
    """One request; made by `OffloadEngine.request`.

    Attributes:
        ctx: Its context.
        keys: The keys of its full blocks, head to tail.
        prefix_blocks: Blocks at the head that are pinned, ready to be loaded.
        slots: Where they lie.
        primary_generation: Of the primary that they lie in: a reset makes them void.
        left_out: Keys that the last `store` found no room for; they are a tail of what it was to
            store.
        is_invalidated: Whether a reset or another generation has taken what the last lookup found.
    """

    def __init__(self, ctx: ReqContext, keys: tuple[OffloadKey, ...], waiters: Waiters) -> None:
        self.ctx = ctx
        self.keys = keys
        self.prefix_blocks = 0
        self.slots = NO_BLOCKS
        self.primary_generation = 0
        self.left_out: Sequence[OffloadKey] = ()
        self.is_invalidated = False
        self._waiters = waiters
        self._calls: dict[Waiter, None] = {}
        self._copies: dict[object, Sequence[int]] = {}

    def __repr__(self) -> str:
        pinned = f"{len(self.keys)} blocks, {self.prefix_blocks} of them pinned"
        return f"<{type(self).__name__} {self.ctx.req_id!r}: {pinned}>"

    @property
    def occupied_blocks(self) -> frozenset[int]:
        """The device blocks that copies of this request read or write now.

        They must not be given to anybody else, also after the call that began a copy was
        cancelled or gave up, and after the request's end.
        """
        return frozenset().union(*self._copies.values())

    async def released(self, timeout_s: float = 30.0) -> bool:
        """Wait until no copy of this request occupies a device block; False at the deadline.

        Also after the request's end. Copies of other requests are not waited for. False as well
        if the engine was closed and has given a copy up: its blocks stay occupied.
        """
        deadline_s = self._waiters.loop.time() + timeout_s
        with self.call() as waiter:
            while self._copies:
                if self._waiters.has_given_up or self._waiters.loop.time() >= deadline_s:
                    return False
                await waiter.wait(deadline_s)
        return True

    def occupy(self, device_blocks: Sequence[int]) -> Callable[[], None]:
        """Note device blocks that a copy is about to use; return what notes its end."""
        copy = object()
        self._copies[copy] = tuple(device_blocks)

        def release() -> None:
            del self._copies[copy]
            if not self._copies:
                self.wake()

        return release

    def invalidate(self) -> None:
        """Learn that what the request has found is gone, and of what it has begun to load."""
        self.prefix_blocks, self.slots = 0, NO_BLOCKS
        self.is_invalidated = True

    @contextmanager
    def call(self) -> Iterator[Waiter]:
        """Return the waiter of a call for this request, which `wake` wakes."""
        with Waiter(self._waiters) as waiter:
            self._calls[waiter] = None
            try:
                yield waiter
            finally:
                del self._calls[waiter]

    def wake(self) -> None:
        """Let the calls that wait for this request look again."""
        for waiter in list(self._calls):
            waiter.wake()
