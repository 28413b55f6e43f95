"""What a lookup comes to where the primary does not have the block."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_async.core.counters import PlannerCounters
from kvoffload_async.core.promotions import Promotions
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierLookup, TierState
from kvoffload_async.types import Locality, LookupResult, OffloadKey


class TierSearch:
    """Asks the tiers in order; the first that has the block promotes it.

    A remote tier, whose answer costs a request of its own, is asked only for what all tiers before
    it are known to lack: while one of them does not know yet, it has to wait.

    Thread: owner.

    Attributes:
        sources: Who answers in each tier: its state, or an observer around that.
    """

    def __init__(
        self, tiers: Sequence[TierState], promotions: Promotions, counters: PlannerCounters
    ) -> None:
        self._tiers = tiers
        self._promotions = promotions
        self._counters = counters
        self.sources: list[TierLookup] = list(tiers)

    def look(
        self, key: OffloadKey, request: RequestState, now_s: float, *, is_paused: bool
    ) -> LookupResult:
        """Return HIT_PENDING if the block is promoted now, else RETRY or MISS; count a MISS."""
        if request.is_expired or is_paused:
            self._counters.misses["expired" if request.is_expired else "paused"] += 1
            return LookupResult.MISS
        return self._ask(key, request, now_s)

    def defer(
        self, answer: LookupResult, request: RequestState, now_s: float, limit_s: float
    ) -> LookupResult:
        """Return the answer to a lookup that defers its request, if it still may; count it."""
        counters = self._counters
        counters.deferrals_expired += request.defer(now_s, limit_s)
        if request.is_expired:
            counters.misses["expired"] += 1
            return LookupResult.MISS
        if answer is LookupResult.RETRY:
            counters.retries += 1
        else:
            counters.pending_hits += 1
        return answer

    def _ask(self, key: OffloadKey, request: RequestState, now_s: float) -> LookupResult:
        unknown = skipped = False
        for index, tier in enumerate(self._tiers):
            if unknown and tier.locality is Locality.REMOTE:
                continue
            counters = tier.counters
            reason = tier.skips_load(request.ctx, now_s)
            if reason is None and (index, key) in request.failed:
                reason = "failed"
            if reason is not None:
                counters.skipped_lookups[reason] += 1
                skipped = True
                continue
            answer = self.sources[index].lookup(key, request.ctx)
            counters.lookups += 1
            if answer is LookupResult.HIT:
                counters.hits += 1
                if self._promotions.reserve(index, request, key):
                    return LookupResult.HIT_PENDING
                self._counters.promotions_refused += 1
                self._counters.misses["no_room"] += 1
                return LookupResult.MISS
            if answer is LookupResult.MISS:
                counters.misses += 1
            else:  # a tier has no pending hits; one that says so does not know yet
                counters.undecided += 1
                unknown = True
        if unknown:
            return LookupResult.RETRY
        self._counters.misses["skipped" if skipped else "absent"] += 1
        return LookupResult.MISS
