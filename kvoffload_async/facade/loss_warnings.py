"""Warnings of blocks that a tier did not get: not one a block, and not one a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvoffload_async.core.counters import TierCounters
from kvoffload_async.core.planner import Planner

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN: Final = 60.0


class LossWarnings:
    """Warns of a tier's losses at once, and then at most once a minute.

    Thread: owner.
    """

    def __init__(self, planner: Planner, now_s: float) -> None:
        """Count from now on."""
        self._planner = planner
        self._counters: Sequence[TierCounters] = [tier.counters for tier in planner.tiers]
        self._told = [0 for _ in planner.tiers]
        self._told_s = [now_s for _ in planner.tiers]
        self._next_s = [now_s for _ in planner.tiers]

    def check(self, now_s: float, *, is_last: bool = False) -> None:
        """Warn of what has been lost since the last warning, if it is time for one."""
        for index, counters in enumerate(self._counters):
            lost = counters.dropped_blocks + counters.failed_store_blocks
            if lost > self._told[index] and (is_last or now_s >= self._next_s[index]):
                self._warn(index, lost - self._told[index], now_s)
                self._told[index], self._told_s[index] = lost, now_s
                self._next_s[index] = now_s + _SECONDS_BETWEEN

    def _warn(self, index: int, lost: int, now_s: float) -> None:
        planner, counters = self._planner, self._counters[index]
        logger.warning(
            "tier %s: %d blocks have been lost in the last %.0f s: evicted before the tier had room"
            " for them, or not stored when it did (%d and %d so far; %d more wait for room). If the"
            " tier is in order, it is too slow for what is stored: raise cpu_bytes_to_use, use a"
            " faster disk, give the tier more n_write_threads, or set write_back to wait",
            planner.tiers[index].name,
            lost,
            now_s - self._told_s[index],
            counters.dropped_blocks,
            counters.failed_store_blocks,
            planner.cascades.backlogs[index].count,
        )
