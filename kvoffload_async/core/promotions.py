"""Promotions: what a lookup comes to where the primary does not have the block.

Slots are reserved by lookups, and batched into one job a (tier, request) and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat

from kvoffload_async.core.counters import PlannerCounters
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import Lines, RequestState, Retention
from kvoffload_async.core.tier_state import Shares, TierLookup, TierState
from kvoffload_async.types import Locality, LookupResult, OffloadKey, ReqContext

_Batch = tuple[RequestState, list[OffloadKey], list[int]]


class Promotions:
    """Reserves primary slots for blocks that come back, up to the tiers' shares and the cap.

    A reservation counts against the cap that `Retention` keeps until its block has been loaded, or
    its request waits no more: waiting requests can neither fill the primary nor evict what each
    other waits for. It counts against its tier's share until the block has landed; one that was
    given up while its copy runs, until the copy has ended.

    A promotion that finds no room waits in its tier's line, if somebody else's use of the room ends
    by itself.

    Thread: owner.

    Attributes:
        lines: Who waits for room.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        shares: Shares,
        retention: Retention,
        lines: Lines,
    ) -> None:
        self.lines = lines
        self._primary = primary
        self._tiers = tiers
        self._shares = shares
        self._retention = retention
        self._batches: dict[tuple[int, ReqContext], _Batch] = {}
        self._told = [0] * len(tiers)
        """How much room there was when the first in each line was told of it last, or less."""
        self._in_vain: list[RequestState | None] = [None] * len(tiers)
        """Who was told last, as the first in each line, that no room comes; until room may come."""
        self._in_vain_s = [0.0] * len(tiers)

    @property
    def has_unflushed(self) -> bool:
        """Whether slots were reserved in this step."""
        return bool(self._batches)

    @property
    def outstanding_slots(self) -> int:
        """Slots that count against the cap."""
        return self._retention.in_flight + self._retention.retained_slots

    def unflushed(self) -> Iterator[tuple[int, OffloadKey, int]]:
        """Iterate over (tier, key, slot) of this step's reservations.

        For invariants and inspection.
        """
        for (tier, _), (_, keys, slots) in self._batches.items():
            yield from zip(repeat(tier), keys, slots)

    def reserve(self, tier: int, request: RequestState, key: OffloadKey) -> LookupResult:
        """Reserve a slot for an absent key and queue it.

        Returns:
            HIT_PENDING; or RETRY: the request is in line for the room; or MISS: there will be none.
        """
        lines = self.lines
        first = lines.first(tier)
        if first is not None and first is not request and self._room(tier):
            if not lines.has_stalled(tier, request.asked_at_s):
                return self._wait(tier, request, key)
            lines.leave(first)
            first = lines.first(tier)
        if first is None or first is request:
            slot = self._reserve(tier, key)
            if slot is not None:
                self._take(tier, request, key, slot)
                return LookupResult.HIT_PENDING
            if not self._room_may_come(tier, request):
                lines.served(tier, request, key)
                return LookupResult.MISS
        return self._wait(tier, request, key)

    def flush(self) -> Iterator[tuple[int, RequestState, Sequence[OffloadKey], Sequence[int]]]:
        """Detach the step's batches: (tier, request, keys, slots)."""
        batches, self._batches = self._batches, {}
        for (tier, _), (request, keys, slots) in batches.items():
            request.unflushed_promotions -= len(keys)
            yield tier, request, keys, slots

    def land(self, tier: int, keys: Sequence[OffloadKey], request: RequestState | None) -> None:
        """Make promoted blocks readable, and keep them for the request if it still waits."""
        self._end(tier, keys)
        self._primary.complete_write(keys, success=True)
        if request is not None and request.waits:
            self._retention.retain(request, keys, promoted=True)

    def serve(self, now_s: float) -> None:
        """At the end of a step: have the first in line ask again if it gets another answer now.

        Only the first one, and once for the same room: who has asked in vain is not told again. It
        stays first until it has asked, so that it hears that there is no room, and leaves the line
        if it has asked another tier meanwhile, and waits there.
        """
        lines = self.lines
        for tier, _ in lines.firsts():
            first = self._first_without_room(tier)
            if first is None:
                continue
            room = self._room(tier)
            told = 0 if lines.has_new_first[tier] else self._told[tier]
            if not (room and told) or first.asked_at_s == now_s:
                lines.moved(tier, now_s)
            is_in_vain = not (room or self._room_may_come(tier, first))
            if is_in_vain and self._in_vain[tier] is first:
                if first.asked_at_s > self._in_vain_s[tier]:
                    for key in list(first.refused[tier]):
                        lines.served(tier, first, key)
                continue
            self._in_vain[tier], self._in_vain_s[tier] = (first if is_in_vain else None), now_s
            if (is_in_vain or room > told) and self._primary.decided is not None:
                self._primary.decided(list(first.refused[tier]))
            self._told[tier] = room

    def fail(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        """Free the slots of blocks that did not come; the keys become absent."""
        self._end(tier, keys)
        self._primary.complete_write(keys, success=False)

    def orphan(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Give up blocks whose copy still runs; return their slots, which their tier occupies."""
        self._retention.in_flight -= len(keys)
        return self._primary.orphan_write(keys)

    def reset(self) -> None:
        """Forget all but what copies still occupy; the primary is about to be emptied."""
        for _ in self.flush():
            pass  # flushing detaches the batches; the jobs are never made
        self._retention.reset()
        for tier in self._tiers:
            late = (record.job for record in tier.jobs.orphaned())
            tier.promotion_slots = sum(len(job.keys) for job in late if job.is_promotion)

    def _room(self, tier: int) -> int:
        """Return how many blocks of a tier may be reserved now."""
        room = min(self._shares.room_to_load(tier), self._retention.spare_slots)
        return min(room, self._primary.room)

    def _reserve(self, tier: int, key: OffloadKey) -> int | None:
        if not self._shares.room_to_load(tier) or not self._retention.spare_slots:
            return None
        if not self._primary.pool.free_count:
            self._retention.pin_step_hits()
        return self._primary.reserve(key)

    def _take(self, tier: int, request: RequestState, key: OffloadKey, slot: int) -> None:
        batch = self._batches.setdefault((tier, request.ctx), (request, [], []))
        batch[1].append(key)
        batch[2].append(slot)
        request.unflushed_promotions += 1
        request.promoting += 1
        self._retention.in_flight += 1
        self._tiers[tier].reserve_slot()
        self.lines.served(tier, request, key)

    def _wait(self, tier: int, request: RequestState, key: OffloadKey) -> LookupResult:
        self.lines.join(tier, request, key)
        if request.is_behind:
            self._retention.give_back(request)
        return LookupResult.RETRY

    def _room_may_come(self, tier: int, request: RequestState) -> bool:
        """Tell whether room for a request's promotion, which there is not, comes without it."""
        if self._retention.is_full:
            return self._others_go_on(tier, request)
        state, shares, primary = self._tiers[tier], self._shares, self._primary
        if not shares.room_to_load(tier):
            if state.counters.loads_in_flight or self._batches:
                return True  # its own loads too leave the share when they have landed
            if state.promotion_slots >= shares.promotions:
                return False
        elif primary.loading.num_pins or primary.stored_now > len(request.writing):
            return True
        may_store = not primary.drops_pending and primary.protected_blocks > 0
        stores = may_store or any(each.counters.stores_in_flight for each in self._tiers)
        return stores or self._others_go_on(tier, request)

    def _others_go_on(self, tier: int, request: RequestState) -> bool:
        """Tell whether others hold some of the room who do not wait for more of it themselves.

        If only the first in the lines hold any, that of the first tier waits for the others.
        """
        held = self._retention.in_flight + self._retention.retained_slots
        held -= request.promoting + len(request.retained)
        others = {first: at for at, first in self.lines.firsts() if first is not request}
        if held > sum(first.promoting + len(first.retained) for first in others):
            return True
        return held > 0 and tier < min(others.values(), default=tier)

    def _first_without_room(self, tier: int) -> RequestState | None:
        """Return the first in line whose blocks nobody else has brought; those before it leave."""
        while (first := self.lines.first(tier)) is not None:
            for key in list(first.refused[tier]):
                if self._primary.lookup(key) is not LookupResult.MISS:
                    self.lines.served(tier, first, key)
            if self.lines.first(tier) is first:
                break
        return first

    def _end(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        self._retention.in_flight -= len(keys)
        self._tiers[tier].promotion_slots -= len(keys)


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
            if tier.cost_gated is not None:
                nearer = self._tiers[:index]
                tier.cost_gated.settle(partial(_ask_nearer, nearer, now_s))

    def _ask(self, key: OffloadKey, request: RequestState, now_s: float) -> LookupResult:
        unknown = skipped = False
        for index, tier in enumerate(self._tiers):
            if unknown and tier.locality is Locality.REMOTE:
                if tier.cost_gated is not None:
                    tier.cost_gated.expect(key, request.ctx)
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
                if tier.cost_gated is not None and tier.cost_gated.declines(request.ctx):
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

    A tier whose contents are not known here counts as having it.
    """
    answer = LookupResult.MISS
    for tier in tiers:
        if tier.skips_load(ctx, now_s) is not None:
            continue
        known = tier.index.peek(key)
        if known is LookupResult.HIT:
            return known
        if known is LookupResult.RETRY:
            answer = known
    return answer
