"""Says when a tier is left alone, and when it is used again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvoffload_async.core.tier_state import TierState

logger = logging.getLogger(__name__)


class BreakerLog:
    """Logs each opening and closing of a tier's breakers once; a try that fails is none.

    Thread: owner.
    """

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._suspended: set[tuple[int, str]] = set()

    def update(self, now_s: float) -> None:
        """Look at every breaker."""
        for index, tier in enumerate(self._tiers):
            health = tier.health
            for direction, breaker in (("loads", health.loads), ("stores", health.stores)):
                is_known = (index, direction) in self._suspended
                if breaker.is_closed is not is_known:
                    continue
                if is_known:
                    self._suspended.remove((index, direction))
                    open_s = now_s - breaker.opened_at_s
                    logger.warning("tier %s: %s resumed after %.1f s", tier.name, direction, open_s)
                    continue
                self._suspended.add((index, direction))
                logger.warning(
                    "tier %s: %s are suspended, and tried again after %s s: %s; the engine does "
                    "without them until then: mend what the error names",
                    tier.name,
                    direction,
                    breaker.settings.retry_after_s,
                    breaker.reason,
                )
