"""What a lookup comes to where the primary does not have the block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvoffload_async.core.counters import PlannerCounters
from kvoffload_async.core.promotions import Promotions
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierLookup, TierState
from kvoffload_async.types import Locality, LookupResult, OffloadKey, ReqContext


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
        """Return HIT_PENDING if the block is promoted now, else RETRY or MISS; count a MISS.

        RETRY: a tier does not know yet, or has the block and there will be room for it.
        """
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
            self._promotions.lines.leave(request)
            counters.misses["expired"] += 1
            return LookupResult.MISS
        if answer is LookupResult.RETRY:
            counters.retries += 1
        else:
            counters.pending_hits += 1
        return answer

    def end_step(self, now_s: float) -> None:
        """Tell tiers that wait for nearer ones what these have found out in this step."""
        for index, tier in enumerate(self._tiers):
            if tier.selective is not None:
                nearer = self._tiers[:index]
                tier.selective.settle(partial(_ask_nearer, nearer, now_s))

    def _ask(self, key: OffloadKey, request: RequestState, now_s: float) -> LookupResult:
        unknown = skipped = False
        for index, tier in enumerate(self._tiers):
            if unknown and tier.locality is Locality.REMOTE:
                if tier.selective is not None:
                    tier.selective.expect(key, request.ctx)
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
            if answer is LookupResult.MISS:
                if tier.selective is not None and tier.selective.declines(request.ctx):
                    counters.skipped_lookups["too_few"] += 1
                    skipped = True
                else:
                    counters.lookups += 1
                    counters.misses += 1
                continue
            counters.lookups += 1
            if answer is LookupResult.HIT:
                counters.hits += 1
                return self._promote(index, request, key)
            counters.undecided += (
                1  # a tier has no pending hits; one that says so does not know yet
            )
            unknown = True
        if unknown:
            return LookupResult.RETRY
        self._counters.misses["skipped" if skipped else "absent"] += 1
        return LookupResult.MISS

    def _promote(self, tier: int, request: RequestState, key: OffloadKey) -> LookupResult:
        answer = self._promotions.reserve(tier, request, key)
        if answer is LookupResult.MISS:
            self._counters.promotions_refused += 1
            self._counters.misses["no_room"] += 1
        return answer


def _ask_nearer(
    tiers: Sequence[TierState], now_s: float, key: OffloadKey, ctx: ReqContext
) -> LookupResult:
    """Return what tiers know of a block; RETRY: one does not know yet, and the others lack it.

    One of which nothing is known here counts as having it.
    """
    answer = LookupResult.MISS
    for tier in tiers:
        if tier.skips_load(ctx, now_s) is not None:
            continue
        known = LookupResult.HIT if tier.knowledge is None else tier.knowledge.peek(key)
        if known is LookupResult.HIT:
            return known
        if known is LookupResult.RETRY:
            answer = known
    return answer
