"""Warnings of blocks that were lost before a tier stored them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from kvoffload_async.core.health import BreakerState
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import Trouble, remedy_of

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN: Final = 60.0


class LossWarnings:
    """Logs a warning when blocks were not stored in a tier, at most once a minute per tier.

    Blocks dropped by a reset do not count: the caller asked for it.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self, planner: Planner, now_s: float) -> None:
        """Count the losses from `now_s` on, in seconds."""
        self._planner = planner
        self._reported = [Counter[str]() for _ in planner.tiers]
        self._reported_s = [now_s for _ in planner.tiers]
        self._next_s = [now_s for _ in planner.tiers]

    def check(self, now_s: float, *, is_last: bool = False) -> None:
        """Log the blocks that each tier has lost since its last warning, if a warning is due."""
        for index, tier in enumerate(self._planner.tiers):
            counters, reported = tier.counters, self._reported[index]
            lost = counters.dropped_blocks - counters.dropped["reset"]
            lost += counters.failed_store_blocks
            if lost > reported.total() and (is_last or now_s >= self._next_s[index]):
                self._warn(index, tier, now_s)
                self._reported_s[index], self._next_s[index] = now_s, now_s + _SECONDS_BETWEEN

    def _warn(self, index: int, tier: TierState, now_s: float) -> None:
        """Log the losses by reason, each with its remedy."""
        dropped, reported = tier.counters.dropped, self._reported[index]
        since = {
            reason: count - reported[reason]
            for reason, count in (
                ("evicted", dropped["evicted"]),
                ("failed", tier.counters.failed_store_blocks),
                ("closed", dropped["closed"]),
            )
            if count > reported[reason]
        }
        reported.update(since)
        logger.warning(
            "tier %s: %d blocks have been lost in the last %.0f s: %s; %d more wait for room",
            tier.label,
            sum(since.values()),
            now_s - self._reported_s[index],
            "; ".join(
                f"{count} {_LOSSES[reason]} ({remedy_of(_cause_of(reason, tier), tier.remedies)})"
                for reason, count in since.items()
            ),
            self._planner.cascades.queues[index].count,
        )


_LOSSES: Final = {
    "evicted": "evicted from the primary before the tier had room for them",
    "failed": "given up after failed stores",
    "closed": "not stored before the shutdown",
}
_TROUBLES: Final = {"evicted": Trouble.TOO_SLOW, "closed": Trouble.CLOSED_TOO_SOON}


def _cause_of(reason: str, tier: TierState) -> Trouble:
    """Return why a tier's blocks were lost for a reason."""
    if reason == "failed":
        return Trouble.STORES_FAILED
    if not tier.is_available:
        return Trouble.NOT_OPEN
    if tier.health.stores.state is not BreakerState.CLOSED:
        return Trouble.SUSPENDED
    return Trouble.HANGING if tier.jobs.orphaned_count else _TROUBLES[reason]
