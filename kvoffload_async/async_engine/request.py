"""A request of the asynchronous surface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvoffload_async.async_engine.waiting import Waiter, Waiters
from kvoffload_async.types import OffloadKey, ReqContext


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
        self.slots: Sequence[int] = ()
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
        self.prefix_blocks, self.slots = 0, ()
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
