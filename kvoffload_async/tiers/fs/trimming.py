"""Blocks are removed in the background while the count is above its watermark. Thread: loop.

Not before all blocks have been seen once: until then only those make room that are stored. What
was more than the capacity by then goes by age, the oldest first; what becomes more later, as the
policy says.
"""

from __future__ import annotations

import asyncio
import logging

from kvoffload_async.tiers.fs.counts import Usage
from kvoffload_async.tiers.fs.space import RunIo, Space
from kvoffload_async.tiers.fs.usage import UsageFile
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_SLICE_S = 5.0
"""How long trimming goes on before the caller has its turn: it shows that the tier lives."""
_PORTION = 1024


class Trimming:
    """Trims one namespace."""

    def __init__(
        self, usage: UsageFile, space: Space, run: RunIo, folder: str, capacity_bytes: int
    ) -> None:
        """Describe what: the count, the blocks, and what is said of them in the log."""
        self._usage = usage
        self._space = space
        self._run = run
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._has_warned = False
        self._is_sorted = False
        self._before_bytes = 0
        self._num_removed = 0

    async def trim(self) -> None:
        """Remove blocks until there are few enough, or for a while: the next call goes on.

        Raises:
            OSError: The count cannot be used.
        """
        if self._space.blocks.is_first_cycle:
            self._warn_of_waiting()
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _SLICE_S
        now = await self._run(self._usage.read)
        if not self._num_removed:
            self._before_bytes = now.total_bytes
        while victims := await self._victims(now):
            await self._space.remove(victims, self._run)
            self._num_removed += len(victims)
            now = await self._run(self._usage.read)
            if loop.time() >= until_s:
                return
        await self._end(now)

    # -- inside ---------------------------------------------------------------------------------

    def _warn_of_waiting(self) -> None:
        """Say once, of a capacity that became smaller, what happens until a cycle has ended."""
        total_bytes = self._usage.total_bytes
        if self._has_warned or not self._usage.is_complete or total_bytes <= self._capacity_bytes:
            return
        self._has_warned = True
        logger.warning(
            "%s: %d bytes are there, and capacity_bytes is %d: blocks are served, and no new ones "
            "stored until a walk over all of them has found the oldest, which are removed",
            self._folder,
            total_bytes,
            self._capacity_bytes,
        )

    async def _victims(self, now: Usage) -> list[OffloadKey]:
        space, ages = self._space, self._space.blocks.ages
        count = space.num_excess(now, trimming=self._num_removed > 0)
        if not count:
            return []
        if ages is not None:
            if not self._is_sorted:
                await self._run(ages.sorting())
                self._is_sorted = True
            if victims := space.blocks.take_oldest(count):
                return victims
        return space.evict_idle(count)

    async def _end(self, now: Usage) -> None:
        """Learn what could not be ranked before; say what was removed if the capacity was less."""
        blocks = self._space.blocks
        if blocks.ages is not None:
            rest, blocks.ages = blocks.ages.rest(), None
            for first in range(0, len(rest), _PORTION):
                surplus = blocks.learn(rest[first : first + _PORTION])
                await asyncio.sleep(0)
                await self._space.remove(surplus, self._run)
        num_removed, self._num_removed = self._num_removed, 0
        if num_removed and self._before_bytes > self._capacity_bytes:
            logger.warning(
                "%s: %d bytes were there, and capacity_bytes is %d: %d blocks were removed, the "
                "least valuable first, and %d bytes are there now",
                self._folder,
                self._before_bytes,
                self._capacity_bytes,
                num_removed,
                now.total_bytes,
            )
