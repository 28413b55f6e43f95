"""Promotions: loads of blocks from secondary tiers into the primary, on a lookup's miss there.

Lookups reserve slots; the reservations of a step form one job per (tier, request).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice, repeat
from typing import Final

from kvoffload_async.core.counters import PlannerCounters
from kvoffload_async.core.index import CostGatedIndex
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import Lines, RequestState, Retention
from kvoffload_async.core.tier_state import Shares, TierLookup, TierState
from kvoffload_async.statistics import MissReason, SkipReason
from kvoffload_async.types import Locality, LookupResult, OffloadKey, ReqContext

_Batch = tuple[RequestState, list[OffloadKey], list[int]]


class Promotions:
    """Reserves primary slots for promoted blocks, up to the tiers' shares and the cap.

    A reservation counts against the cap of `Retention` until its block has been loaded or its
    request stops waiting: waiting requests can neither fill the primary nor evict each other's
    blocks. It counts against its tier's share until the block has landed, or, if given up, until
    the copy has ended.

    A request without room for a promotion waits in its tier's line (a FIFO queue), if room will be
    freed without any action of that request.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        lines: One queue per tier of the requests that wait for room.
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
        self.batches: dict[tuple[int, ReqContext], _Batch] = {}
        """(Tier, request) -> slots reserved in this step. Read-only."""
        self._told = [0] * len(tiers)
        """By tier: room in slots when the first in line was last notified, or less."""
        self._in_vain: list[RequestState | None] = [None] * len(tiers)
        """By tier: the first in line if notified that no room will come; None once room may."""
        self._in_vain_s = [0.0] * len(tiers)

    @property
    def outstanding_slots(self) -> int:
        """Slots that count against the cap of `Retention`."""
        return self._retention.in_flight + self._retention.retained_slots

    def unflushed(self) -> Iterator[tuple[int, OffloadKey, int]]:
        """Iterate over (tier, key, slot) for this step's reservations.

        For invariants and inspection.
        """
        for (tier, _), (_, keys, slots) in self.batches.items():
            yield from zip(repeat(tier), keys, slots)

    def reserve(
        self, tier: int, request: RequestState, keys: Sequence[OffloadKey]
    ) -> tuple[int, LookupResult]:
        """Reserve slots for as many absent keys as fit, and queue their promotion.

        Args:
            tier: Index of the tier that has the blocks.
            request: The request that looks up the blocks.
            keys: The keys, without duplicates; the first ones get the slots.

        Returns:
            The number of keys that got a slot, and the answer for the rest: RETRY if they wait in
            line for room, MISS if no room will come.
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
        """Remove this step's reservations; yield them as (tier, request, keys, slots)."""
        batches, self.batches = self.batches, {}
        for (tier, _), (request, keys, slots) in batches.items():
            request.unflushed_promotions -= len(keys)
            yield tier, request, keys, slots

    def land(self, tier: int, keys: Sequence[OffloadKey], request: RequestState | None) -> None:
        """Make the promoted blocks readable; retain them for the request if it still waits."""
        self._end(tier, keys)
        self._primary.complete_write(keys, success=True)
        if request is not None and request.waits:
            self._retention.retain(request, keys, promoted=True)

    def serve(self, now_s: float) -> None:
        """Notify the first request in each line that should repeat its lookup.

        Call at the end of a step. A request is notified when there is more room for it than at
        the last notification, or when no room will come: then its next lookup answers MISS, and
        until then it stays first in line. If it waits for room of another tier by then, it leaves
        this line.
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
        """Free the slots of blocks whose promotion failed; the keys become absent."""
        self._end(tier, keys)
        self._primary.complete_write(keys, success=False)

    def orphan(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Give up promotions whose copy still runs; return the slots of their blocks.

        The slots count against the tier's share until the copy has ended.
        """
        self._retention.in_flight -= len(keys)
        return self._primary.orphan_write(keys)

    def reset(self) -> None:
        """Drop all reservations except slots of orphaned copies; call before `Primary.reset`."""
        for tier, _, keys, _ in self.flush():  # no jobs are submitted for these
            self._end(tier, keys)
        self._retention.reset()

    def _room(self, tier: int) -> int:
        """Return how many slots may be reserved now for blocks of a tier."""
        room = min(self._shares.room_to_load(tier), self._retention.spare_slots)
        return min(room, self._primary.room)

    def _reserve(self, tier: int, request: RequestState, keys: Sequence[OffloadKey]) -> int:
        """Reserve slots for as many keys as fit; return their number."""
        room = min(len(keys), self._shares.room_to_load(tier), self._retention.spare_slots)
        if room > self._primary.pool.unused.count:
            self._retention.pin_step_hits()
        slots = self._primary.reserve(keys[:room]) if room else []
        count = len(slots)
        if not count:
            return 0
        keys = keys[:count]
        _, batched_keys, batched_slots = self.batches.setdefault(
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
        """Return whether room for a request will be freed without any action of that request."""
        if self._retention.is_full:
            return self._others_go_on(tier, request)
        state, shares, primary = self._tiers[tier], self._shares, self._primary
        if not shares.room_to_load(tier):
            if state.counters.loads_in_flight or self.batches:
                return True  # the end of any load makes room in the share, also of its own loads
            if state.promotion_slots >= shares.promotions:
                return False
        elif primary.loading.num_pins or primary.stored_now > len(request.writing):
            return True
        may_store = not primary.drops_pending and primary.protected_blocks > 0
        stores = may_store or any(each.counters.stores_in_flight for each in self._tiers)
        return stores or self._others_go_on(tier, request)

    def _others_go_on(self, tier: int, request: RequestState) -> bool:
        """Return whether other requests hold slots under the cap, and will release them.

        Requests that are first in another line may wait for this one's slots. If only such
        requests hold slots, this one waits for them only if its tier is the lowest of all, which
        prevents a deadlock.
        """
        held = self._retention.in_flight + self._retention.retained_slots
        held -= request.promoting + len(request.retained)
        others = {first: at for at, first in self.lines.firsts() if first is not request}
        if held > sum(first.promoting + len(first.retained) for first in others):
            return True
        return held > 0 and tier < min(others.values(), default=tier)

    def _first_without_room(self, tier: int) -> RequestState | None:
        """Return the first request in a tier's line that still lacks blocks.

        Requests before it leave the line: all their blocks are in the primary by now.
        """
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
"""Result of a search: the tier that has the block, RETRY if it is unknown yet, or why none has."""


class TierSearch:
    """Looks up keys absent from the primary in the tiers, in order; the first hit is promoted.

    A remote tier is queried over the network, so only for keys that all nearer tiers are known to
    lack; keys that a nearer tier has not resolved yet are deferred. While a request waits, a tier
    is not queried again for a key that it lacks.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        sources: The lookup source of each tier: its `TierState`, or an observer that wraps it.
        has_unknown: Whether a cost-gated tier waits for nearer tiers to resolve keys.
    """

    def __init__(
        self, tiers: Sequence[TierState], promotions: Promotions, counters: PlannerCounters
    ) -> None:
        self._tiers = tiers
        self._promotions = promotions
        self._counters = counters
        self.sources: list[TierLookup] = list(tiers)
        self.has_unknown = False
        self._nearer_in_use: list[list[tuple[bool, bool]]] = [[] for _ in tiers]
        """By tier: (is available, loads permitted) of each nearer tier at the last `_settle`."""

    def all_lack(self, key: OffloadKey, request: RequestState, now_s: float) -> bool:
        """Return whether every tier is known to lack a key; if so, count a lookup in each.

        False also if a tier's index is not exact or if a tier is skipped. A tier that this request
        has asked for the key before is not counted again.
        """
        if request.is_expired or request.failed:
            return False
        for index, tier in enumerate(self._tiers):
            if tier.cost_gated is not None or not tier.index.is_exact:
                return False
            if tier.skips_load(request.ctx, now_s) is not None:
                return False
            if tier.index.peek(key) is LookupResult.HIT:
                return False
            lacking = request.lacking.setdefault(index, set())
            if key not in lacking:
                self.sources[index].lookup_many([key], request.ctx, stop_at_miss=True)
                lacking.add(key)
                tier.counters.lookups += 1
                tier.counters.misses += 1
        return True

    def ask(
        self,
        keys: Sequence[OffloadKey],
        request: RequestState,
        now_s: float,
        *,
        is_paused: bool,
        stop_at_miss: bool,
    ) -> dict[OffloadKey, Verdict]:
        """Look keys up in the tiers, nearest tier first; return the verdict on each, in order.

        Args:
            keys: Keys that are absent from the primary.
            request: The request that looks up the keys.
            now_s: Time of the step, in seconds.
            is_paused: Whether promotions are paused.
            stop_at_miss: Whether the verdicts end with the first miss.
        """
        if request.is_expired or is_paused:
            reason: MissReason = "expired" if request.is_expired else "paused"
            return dict.fromkeys(keys[:1] if stop_at_miss else keys, reason)
        verdicts: dict[OffloadKey, Verdict] = dict.fromkeys(keys, "absent")
        last = len(self._tiers) - 1
        for index, tier in enumerate(self._tiers):
            is_remote = tier.locality is Locality.REMOTE
            has_unknown = _RETRY in verdicts.values()
            asked = list(verdicts)
            if index:
                asked = [key for key in verdicts if not isinstance(verdicts[key], int)]
            if has_unknown and is_remote:
                asked = self._leave_unknown(tier, asked, request, verdicts)
            if asked:
                asked = self._leave_skipped(index, asked, request, now_s, verdicts)
            if asked:
                is_final = stop_at_miss and index == last and (is_remote or not has_unknown)
                self._ask_tier(index, asked, request, verdicts, stop_at_miss=is_final)
        if stop_at_miss:
            for reached, verdict in enumerate(verdicts.values(), 1):
                if isinstance(verdict, str):
                    return dict(islice(verdicts.items(), reached))
        return verdicts

    def promote(
        self, verdicts: dict[OffloadKey, Verdict], request: RequestState, *, stop_at_miss: bool
    ) -> dict[OffloadKey, LookupResult | MissReason]:
        """Reserve promotions for the blocks that tiers have; return the answers, in order.

        HIT_PENDING: the block is being promoted. RETRY: a tier has not resolved the key yet, or a
        tier has the block and the request waits for room.
        """
        answers: dict[OffloadKey, LookupResult | MissReason] = {}
        for verdict, run in groupby(verdicts, verdicts.__getitem__):
            keys = list(run)
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
        """Record a deferred lookup; return whether its request may still be deferred."""
        self._counters.deferrals_expired += request.defer(now_s, limit_s)
        if request.is_expired:
            self._promotions.lines.leave(request)
        return not request.is_expired

    def end_step(self, now_s: float) -> None:
        """Pass the nearer tiers' answers of this step to the cost-gated tiers that need them."""
        self.has_unknown = False
        for index, tier in enumerate(self._tiers):
            if tier.cost_gated is not None and tier.cost_gated.unknown:
                self._settle(tier.cost_gated, index, now_s)
                self.has_unknown |= bool(tier.cost_gated.unknown)

    def _settle(self, cost_gated: CostGatedIndex, index: int, now_s: float) -> None:
        nearer = self._tiers[:index]
        for tier in nearer:
            tier.index.watch(cost_gated.resolved)
        in_use = [(tier.is_available, tier.health.loads.permits(now_s)) for tier in nearer]
        has_changed = in_use != self._nearer_in_use[index]
        self._nearer_in_use[index] = in_use
        cost_gated.settle(partial(_ask_nearer, nearer, now_s), all_requests=has_changed)

    def _leave_unknown(
        self,
        tier: TierState,
        keys: Sequence[OffloadKey],
        request: RequestState,
        verdicts: Mapping[OffloadKey, Verdict],
    ) -> list[OffloadKey]:
        """Return the keys that all nearer tiers are known to lack; only these are looked up.

        The other keys are unknown yet, and a cost-gated tier is told to expect them.
        """
        if tier.cost_gated is not None:
            unknown = [key for key in keys if verdicts[key] is _RETRY]
            tier.cost_gated.expect(unknown, request.ctx)
            self.has_unknown = True
        return [key for key in keys if verdicts[key] is not _RETRY]

    def _leave_skipped(
        self,
        index: int,
        keys: list[OffloadKey],
        request: RequestState,
        now_s: float,
        verdicts: dict[OffloadKey, Verdict],
    ) -> list[OffloadKey]:
        """Return the keys to look up in a tier; count the others as skipped."""
        tier = self._tiers[index]
        reason = tier.skips_load(request.ctx, now_s)
        left: list[OffloadKey] = []
        if reason is None:
            if not request.failed:
                return keys
            reason = "failed"
            left = [key for key in keys if (index, key) not in request.failed]
            keys = [key for key in keys if (index, key) in request.failed]
        self._skip(tier, reason, keys, verdicts)
        return left

    def _skip(
        self,
        tier: TierState,
        reason: SkipReason,
        keys: Sequence[OffloadKey],
        verdicts: dict[OffloadKey, Verdict],
    ) -> None:
        """Count the keys that are not looked up in a tier, and enter "skipped" as their verdict."""
        tier.counters.skipped_lookups[reason] += len(keys)
        for key in keys:
            if verdicts[key] == "absent":
                verdicts[key] = "skipped"

    def _ask_tier(
        self,
        index: int,
        keys: Sequence[OffloadKey],
        request: RequestState,
        verdicts: dict[OffloadKey, Verdict],
        *,
        stop_at_miss: bool,
    ) -> None:
        """Look keys up in one tier; enter its hits and unknown answers in `verdicts`."""
        tier, lacking = self._tiers[index], request.lacking.setdefault(index, set())
        if stop_at_miss and not lacking.isdisjoint(keys):
            keys = keys[: [key in lacking for key in keys].index(True)]
        elif lacking:
            keys = [key for key in keys if key not in lacking]
        if not keys:
            return
        answers = self.sources[index].lookup_many(keys, request.ctx, stop_at_miss=stop_at_miss)
        missing: list[OffloadKey] = []
        for key, answer in zip(keys, answers, strict=False):  # fewer answers after a miss
            if answer is LookupResult.MISS:
                missing.append(key)
            else:
                verdicts[key] = index if answer is LookupResult.HIT else _RETRY
        counters, hits = tier.counters, answers.count(LookupResult.HIT)
        counters.lookups += len(answers) - len(missing)
        counters.hits += hits
        counters.undecided += len(answers) - len(missing) - hits
        if missing and tier.cost_gated is not None and tier.cost_gated.declines(request.ctx):
            self._skip(tier, "too_few", missing, verdicts)
        else:
            counters.lookups += len(missing)
            counters.misses += len(missing)
            lacking.update(missing)


def _ask_nearer(
    tiers: Sequence[TierState], now_s: float, key: OffloadKey, ctx: ReqContext
) -> LookupResult:
    """Return HIT if a usable tier has the block, RETRY if one has not resolved it, else MISS."""
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
