"""Renews the age of blocks in use, some in each call: else what is used most would expire first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.tiers.remote.together import run_together
from kvoffload_async.types import OffloadKey

_BLOCKS_A_CALL: Final = 1024
_CALLS_AT_ONCE: Final = 8
"""Where each call is for one block."""
_MOST_WAITING: Final = 1 << 16
_MOST_REMEMBERED: Final = 1 << 18
_LONGEST_PAUSE_S: Final = 10.0


class Renewal:
    """Collects uses, and renews each block that is used once a quarter of its lifetime.

    Thread: loop.

    Attributes:
        renewed: Blocks that were renewed.
        dropped: Uses that were forgotten: too many waited, their call failed, or the server did.
    """

    def __init__(
        self,
        ttl_s: float,
        renew: Callable[[Sequence[OffloadKey]], Awaitable[bool]],
        *,
        renews_many: bool,
    ) -> None:
        """Renew nothing yet.

        Args:
            ttl_s: Seconds that a block lives without being renewed.
            renew: Renews some blocks by one call, and returns whether that worked; raises nothing.
            renews_many: Whether one call is for many blocks; otherwise each is for one.
        """
        self._ttl_s = ttl_s
        self._renew = renew
        self._blocks_a_call = _BLOCKS_A_CALL if renews_many else 1
        self._calls_at_once = 1 if renews_many else _CALLS_AT_ONCE
        self._failed_in_a_row = 0
        self._pause_s = min(ttl_s / 16, _LONGEST_PAUSE_S)
        self._fresh_until: dict[OffloadKey, float] = {}
        self._waiting: dict[OffloadKey, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.renewed = self.dropped = 0

    def written(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks whose age begins now."""
        expiry_s = asyncio.get_running_loop().time() + self._ttl_s / 4
        for key in keys:
            self._fresh_until.pop(key, None)
            self._fresh_until[key] = expiry_s
        surplus = len(self._fresh_until) - _MOST_REMEMBERED
        for key in list(islice(self._fresh_until, max(0, surplus))):
            del self._fresh_until[key]

    def used(self, keys: Iterable[OffloadKey]) -> None:
        """Note a use of blocks; the old ones among them are renewed soon."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key in keys:
            if self._fresh_until.get(key, now_s) > now_s or key in self._waiting:
                continue
            if len(self._waiting) >= _MOST_WAITING:
                self.dropped += 1
            else:
                self._waiting[key] = None
        if self._waiting and self._timer is None and self._task is None:
            self._timer = loop.call_later(self._pause_s, self._start)

    async def close(self) -> None:
        """Stop; what waits is not renewed any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.dropped += len(self._waiting)
        self._waiting.clear()

    def _start(self) -> None:
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="remote:renewal")
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        self._failed_in_a_row = 0
        await run_together((self._work() for _ in range(self._calls_at_once)), "remote:renewal")

    async def _work(self) -> None:
        """Renew what waits, one call after the other; give up where the server fails them all."""
        while self._waiting:
            keys = tuple(islice(self._waiting, self._blocks_a_call))
            for key in keys:
                del self._waiting[key]
            if await self._renew(keys):
                self._failed_in_a_row = 0
                self.renewed += len(keys)
                self.written(keys)
                continue
            self._failed_in_a_row += 1
            self.dropped += len(keys)
            if self._failed_in_a_row >= self._calls_at_once:
                self.dropped += len(self._waiting)
                self._waiting.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.result()  # a defect is the loop's to report
