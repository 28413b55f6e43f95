"""Promotions: what a lookup comes to where the primary does not have the block.

Slots are reserved by lookups, and batched into one job a (tier, request) and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final

from kvoffload_async.core.counters import PlannerCounters
from kvoffload_async.core.index import CostGatedIndex
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import Lines, RequestState, Retention
from kvoffload_async.core.tier_state import Shares, TierLookup, TierState
from kvoffload_async.statistics import MissReason
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

    def reserve(
        self, tier: int, request: RequestState, keys: Sequence[OffloadKey]
    ) -> tuple[int, LookupResult]:
        """Reserve slots for as many absent keys as fit, and queue their promotion.

        Args:
            tier: Where the blocks are.
            request: Who asked for them.
            keys: The keys, without duplicates; the first ones get the slots.

        Returns:
            How many keys have a slot, and the answer for the others: RETRY: they wait in line for
            room; MISS: there will be none.
        """
        lines = self.lines
        first = lines.first(tier)
        if first is not None and first is not request and self._room(tier):
            if not lines.has_stalled(tier, request.asked_at_s):
                return 0, self._wait(tier, request, keys)
            lines.leave(first)
            first = lines.first(tier)
        count = 0
        if first is None or first is request:
            count = self._reserve(tier, request, keys)
            if count < len(keys) and not self._room_may_come(tier, request):
                lines.served(tier, request, keys[count:])
                return count, LookupResult.MISS
        if count == len(keys):
            return count, LookupResult.HIT_PENDING
        return count, self._wait(tier, request, keys[count:])

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
                    lines.served(tier, first, tuple(first.refused[tier]))
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

    def _reserve(self, tier: int, request: RequestState, keys: Sequence[OffloadKey]) -> int:
        """Reserve slots for as many keys as fit; return for how many."""
        room = min(len(keys), self._shares.room_to_load(tier), self._retention.spare_slots)
        if room > self._primary.pool.free_count:
            self._retention.pin_step_hits()
        slots = self._primary.reserve(keys[:room]) if room else []
        count = len(slots)
        if not count:
            return 0
        keys = keys[:count]
        _, batched_keys, batched_slots = self._batches.setdefault(
            (tier, request.ctx), (request, [], [])
        )
        batched_keys.extend(keys)
        batched_slots.extend(slots)
        request.unflushed_promotions += count
        request.promoting += count
        self._retention.in_flight += count
        self._tiers[tier].reserve_slots(count)
        self.lines.served(tier, request, keys)
        return count

    def _wait(self, tier: int, request: RequestState, keys: Sequence[OffloadKey]) -> LookupResult:
        self.lines.join(tier, request, keys)
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
            keys = tuple(first.refused[tier])
            answers = zip(keys, self._primary.lookup_many(keys), strict=True)
            present = [key for key, answer in answers if answer is not LookupResult.MISS]
            self.lines.served(tier, first, present)
            if self.lines.first(tier) is first:
                break
        return first

    def _end(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        self._retention.in_flight -= len(keys)
        self._tiers[tier].promotion_slots -= len(keys)


_RETRY: Final = LookupResult.RETRY

Verdict = int | LookupResult | MissReason
"""Where a block is: the tier that has it, or RETRY; or why the lookup is a miss."""


class TierSearch:
    """Asks the tiers in order for what the primary lacks; the first that has a block promotes it.

    A remote tier is asked over the network. So it is asked only for keys that all tiers before it
    are known to lack, and waits while one of them does not know yet. While a request waits, no tier
    is asked again for a key that it lacks.

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
        self._nearer_in_use: list[list[tuple[bool, bool]]] = [[] for _ in tiers]
        """By tier: which of the tiers before it were in use when `settle` was called last."""

    def ask(
        self,
        keys: Sequence[OffloadKey],
        request: RequestState,
        now_s: float,
        *,
        is_paused: bool,
        stop_at_miss: bool,
    ) -> dict[OffloadKey, Verdict]:
        """Return the verdict on each key, in order.

        Args:
            keys: Keys that are absent from the primary, without duplicates.
            request: Who asks.
            now_s: When.
            is_paused: Whether nothing may be promoted now.
            stop_at_miss: Whether the verdicts end with the first miss.
        """
        if request.is_expired or is_paused:
            reason: MissReason = "expired" if request.is_expired else "paused"
            return dict.fromkeys(keys[:1] if stop_at_miss else keys, reason)
        known, skipped = self._ask_tiers(keys, request, now_s, stop_at_miss=stop_at_miss)
        verdicts: dict[OffloadKey, Verdict] = {}
        for key in keys:
            verdict = known.get(key)
            if verdict is None:
                verdict = "skipped" if key in skipped else "absent"
            verdicts[key] = verdict
            if stop_at_miss and isinstance(verdict, str):
                break
        return verdicts

    def promote(
        self, verdicts: dict[OffloadKey, Verdict], request: RequestState, *, stop_at_miss: bool
    ) -> dict[OffloadKey, LookupResult | MissReason]:
        """Promote the blocks that tiers have; return the answers, in order.

        HIT_PENDING: the block is promoted. RETRY: a tier does not know yet, or has the block and
        there will be room for it.
        """
        answers: dict[OffloadKey, LookupResult | MissReason] = {}
        for verdict, run in groupby(verdicts.items(), itemgetter(1)):
            keys = [key for key, _ in run]
            if not isinstance(verdict, int):
                answers.update(dict.fromkeys(keys, verdict))
                continue
            count, answer = self._promotions.reserve(verdict, request, keys)
            answers.update(dict.fromkeys(keys[:count], LookupResult.HIT_PENDING))
            refused = keys[count:]
            if answer is not LookupResult.MISS:
                answers.update(dict.fromkeys(refused, answer))
                continue
            if stop_at_miss:
                refused = refused[:1]
            self._counters.promotions_refused += len(refused)
            answers.update(dict.fromkeys(refused, "no_room"))
            if stop_at_miss:
                break
        return answers

    def defer(self, request: RequestState, now_s: float, limit_s: float) -> bool:
        """Note a deferred lookup; return whether its request may still be deferred."""
        self._counters.deferrals_expired += request.defer(now_s, limit_s)
        if request.is_expired:
            self._promotions.lines.leave(request)
        return not request.is_expired

    def end_step(self, now_s: float) -> None:
        """Tell tiers that wait for nearer ones what these have found out in this step."""
        for index, tier in enumerate(self._tiers):
            if tier.cost_gated is not None and tier.cost_gated.unknown:
                self._settle(tier.cost_gated, index, now_s)

    def _settle(self, cost_gated: CostGatedIndex, index: int, now_s: float) -> None:
        nearer = self._tiers[:index]
        for tier in nearer:
            tier.index.watch(cost_gated.resolved)
        in_use = [(tier.is_available, tier.health.loads.permits(now_s)) for tier in nearer]
        has_changed = in_use != self._nearer_in_use[index]
        self._nearer_in_use[index] = in_use
        cost_gated.settle(partial(_ask_nearer, nearer, now_s), all_requests=has_changed)

    def _ask_tiers(
        self,
        keys: Sequence[OffloadKey],
        request: RequestState,
        now_s: float,
        *,
        stop_at_miss: bool,
    ) -> tuple[dict[OffloadKey, Verdict], set[OffloadKey]]:
        """Return the verdicts but for misses, in any order, and the keys that a tier skipped."""
        verdicts: dict[OffloadKey, Verdict] = {}
        skipped: set[OffloadKey] = set()
        unknown: set[OffloadKey] = set()
        last = len(self._tiers) - 1
        for index, tier in enumerate(self._tiers):
            asked = [key for key in keys if verdicts.get(key, _RETRY) is _RETRY]
            is_remote = tier.locality is Locality.REMOTE
            if unknown and is_remote:
                if tier.cost_gated is not None:
                    tier.cost_gated.expect([key for key in asked if key in unknown], request.ctx)
                asked = [key for key in asked if key not in unknown]
            if not asked or self._skips(index, asked, request, now_s, skipped):
                continue
            is_final = stop_at_miss and index == last and (is_remote or not unknown)
            found = self._ask_tier(index, asked, request, skipped, stop_at_miss=is_final)
            verdicts.update(found)
            unknown.update([key for key, verdict in found.items() if verdict is _RETRY])
        return verdicts, skipped

    def _skips(
        self,
        index: int,
        asked: list[OffloadKey],
        request: RequestState,
        now_s: float,
        skipped: set[OffloadKey],
    ) -> bool:
        """Tell whether a tier is not asked at all; move keys that it skips to `skipped`."""
        tier = self._tiers[index]
        reason = tier.skips_load(request.ctx, now_s)
        left_out = asked
        if reason is None:
            if not request.failed:
                return False
            reason = "failed"
            left_out = [key for key in asked if (index, key) in request.failed]
            asked[:] = [key for key in asked if (index, key) not in request.failed]
        tier.counters.skipped_lookups[reason] += len(left_out)
        skipped.update(left_out)
        return left_out is asked or not asked

    def _ask_tier(
        self,
        index: int,
        keys: Sequence[OffloadKey],
        request: RequestState,
        skipped: set[OffloadKey],
        *,
        stop_at_miss: bool,
    ) -> dict[OffloadKey, Verdict]:
        """Return one tier's verdicts but for misses; add keys that it declines to `skipped`."""
        tier, lacking = self._tiers[index], request.lacking.setdefault(index, set())
        if stop_at_miss and not lacking.isdisjoint(keys):
            keys = keys[: [key in lacking for key in keys].index(True)]
        elif lacking:
            keys = [key for key in keys if key not in lacking]
        if not keys:
            return {}
        answers = self.sources[index].lookup_many(keys, request.ctx, stop_at_miss=stop_at_miss)
        verdicts: dict[OffloadKey, Verdict] = {}
        missing: list[OffloadKey] = []
        for key, answer in zip(keys, answers, strict=False):  # the answers may end with a miss
            if answer is LookupResult.MISS:
                missing.append(key)
            else:
                verdicts[key] = index if answer is LookupResult.HIT else _RETRY
        counters, hits = tier.counters, answers.count(LookupResult.HIT)
        counters.lookups += len(verdicts)
        counters.hits += hits
        counters.undecided += len(verdicts) - hits
        if missing and tier.cost_gated is not None and tier.cost_gated.declines(request.ctx):
            counters.skipped_lookups["too_few"] += len(missing)
            skipped.update(missing)
        else:
            counters.lookups += len(missing)
            counters.misses += len(missing)
            lacking.update(missing)
        return verdicts


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
