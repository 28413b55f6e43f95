"""Renews the age of blocks in use, in batches: else what is used most would expire first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.types import OffloadKey

BATCH_BLOCKS: Final = 1024
_MOST_WAITING: Final = 1 << 16
_MOST_REMEMBERED: Final = 1 << 18
_LONGEST_PAUSE_S: Final = 10.0


class Renewal:
    """Collects uses, and renews each block that is used once a quarter of its lifetime.

    Thread: loop.

    Attributes:
        renewed: Blocks that were renewed.
        dropped: Uses that were forgotten, since too many waited or their batch failed.
    """

    def __init__(
        self, ttl_s: float, renew: Callable[[Sequence[OffloadKey]], Awaitable[bool]]
    ) -> None:
        """Renew nothing yet.

        Args:
            ttl_s: Seconds that a block lives without being renewed.
            renew: Renews some blocks, and returns whether that worked; raises nothing.
        """
        self._ttl_s = ttl_s
        self._renew = renew
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
        while self._waiting:
            batch = tuple(islice(self._waiting, BATCH_BLOCKS))
            for key in batch:
                del self._waiting[key]
            if await self._renew(batch):
                self.renewed += len(batch)
                self.written(batch)
            else:
                self.dropped += len(batch)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.result()  # a defect is the loop's to report
