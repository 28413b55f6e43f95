"""Background eviction while the count is above its high watermark. Loop thread only.

It starts after the first cycle of walks; until then, only stores evict. Blocks beyond the capacity
at that time are evicted by age, oldest first; later ones in the order of the policy.
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
"""Maximum time per call, so that the caller can send heartbeats."""
_PORTION = 1024


class Trimming:
    """Trims one namespace to its capacity."""

    def __init__(
        self, usage: UsageFile, space: Space, run: RunIo, folder: str, capacity_bytes: int
    ) -> None:
        """Create the object; `folder` and `capacity_bytes` appear in log messages."""
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
        """Evict blocks down to the low watermark, or for a limited time; call again to continue.

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
        """Warn once that a reduced capacity takes effect only after a cycle of walks."""
        total_bytes = self._usage.total_bytes
        if self._has_warned or not self._usage.is_complete or total_bytes <= self._capacity_bytes:
            return
        self._has_warned = True
        logger.warning(
            "%s: %d bytes are stored, and capacity_bytes is %d: blocks are served, and no new ones "
            "stored until a walk over all of them has found the oldest to remove",
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
        """Learn blocks that could not be ranked before; log removals after a reduced capacity."""
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
                "%s: %d bytes were stored, and capacity_bytes is %d: %d blocks were removed, the "
                "least valuable first, and %d bytes are stored now",
                self._folder,
                self._before_bytes,
                self._capacity_bytes,
                num_removed,
                now.total_bytes,
            )
