"""The context of what is done for no request: late cascades, and news of what was used."""

from __future__ import annotations

from kvoffload_async.core.tier_state import TierState
from kvoffload_async.types import ENGINE_REQ_ID, ReqContext


class OwnContext:
    """A request that never ends before the planner does, and that nobody else may begin.

    A tier hears of its begin before the first thing that is done in it, and of its end after the
    last one, and of neither if nothing is.
    """

    def __init__(self) -> None:
        self.ctx = ReqContext(ENGINE_REQ_ID)
        self._told: list[TierState] = []

    def within(self, tier: TierState) -> ReqContext:
        """Return the context, which the tier knows from now on."""
        if tier not in self._told:
            self._told.append(tier)
            tier.begin_request(self.ctx)
        return self.ctx

    def close(self) -> None:
        """Tell the tiers that nothing follows; idempotent."""
        told, self._told = self._told, []
        for tier in told:
            tier.finish_request(self.ctx)
