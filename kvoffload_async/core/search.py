"""Searches of the secondary tiers for blocks that the primary lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from kvoffload_async.core.barred import BarredKeys
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.statistics import MissReason, SkipReason
from kvoffload_async.types import Locality, LookupResult, OffloadKey, ReqContext

_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_RETRY: Final = LookupResult.RETRY
_FOUND: Final = LookupResult.HIT_PENDING

Verdict = LookupResult | MissReason
"""Result of a search: HIT_PENDING if a tier has the block, RETRY if unknown, or a miss's reason."""

OnAnswers = Callable[[int, ReqContext, Sequence[OffloadKey], Sequence[OffloadKey]], object]


class TierSearch:
    """Looks up keys absent from the primary in the tiers, in order.

    A remote tier is queried over the network, so only for keys that all nearer tiers are known to
    lack; keys that a nearer tier has not resolved yet are deferred. While a request waits, a tier
    is not queried again for a key that it lacks.

    Keys that are being deleted, from the tier or from the primary, are not found.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        has_unknown: Whether a cost-gated tier waits for nearer tiers to resolve keys.
        on_answers: Called with the index of a tier that was queried, the request, and the keys that
            were hits and misses.
    """

    def __init__(self, tiers: Sequence[TierState], barred: BarredKeys) -> None:
        """Create a search of `tiers`; `barred` are the keys being deleted from the primary."""
        self._tiers = tiers
        self._barred = barred
        self.has_unknown = False
        self.on_answers: OnAnswers | None = None
        self._skipped: list[SkipReason | None] = []
        """By tier: why the request of the current round cannot load from it; None if it can."""

    def begin_round(self, request: RequestState, now_s: float, *, is_early: bool = False) -> None:
        """Begin a request's series of lookups: find out from which tiers it may load now.

        Args:
            request: The request.
            now_s: Time of the step, in seconds.
            is_early: Whether the lookups are for a prefetch.
        """
        self._skipped = [
            _skips(tier, request.ctx, now_s, is_early=is_early) for tier in self._tiers
        ]

    def ask(
        self,
        keys: Sequence[OffloadKey],
        request: RequestState,
        *,
        is_paused: bool,
        stop_at_miss: bool,
    ) -> dict[OffloadKey, Verdict]:
        """Look keys up in the tiers, nearest tier first; return the verdict on each, in order.

        Args:
            keys: Keys that are absent from the primary.
            request: The request that looks up the keys; its round has begun.
            is_paused: Whether promotions are paused.
            stop_at_miss: Whether the verdicts end with the first miss.
        """
        if request.is_expired or is_paused:
            reason: MissReason = "expired" if request.is_expired else "paused"
            return dict.fromkeys(keys[:1] if stop_at_miss else keys, reason)
        verdicts: dict[OffloadKey, Verdict] = dict.fromkeys(keys, "absent")
        last = len(self._tiers) - 1
        for index, tier in enumerate(self._tiers):
            asked = self._unfound(tier, request, verdicts) if index else list(verdicts)
            if self._barred.sets or tier.barred.sets:
                asked = self._barred.without(tier.barred.without(asked))
            if asked and (self._skipped[index] is not None or request.failed):
                asked = self._leave_skipped(index, asked, request, verdicts)
            if asked:
                is_final = stop_at_miss and index == last
                if is_final and tier.locality is not Locality.REMOTE:
                    is_final = _RETRY not in verdicts.values()
                self._ask_tier(index, asked, request, verdicts, stop_at_miss=is_final)
        if stop_at_miss:
            for reached, verdict in enumerate(verdicts.values(), 1):
                if isinstance(verdict, str):
                    return dict(islice(verdicts.items(), reached))
        return verdicts

    def find(
        self,
        keys: Sequence[OffloadKey],
        request: RequestState,
        now_s: float,
        *,
        is_early: bool = False,
    ) -> list[int | None]:
        """Return for each key the nearest tier from which a request may load the block, or None."""
        found: dict[OffloadKey, int | None] = dict.fromkeys(keys)
        for index, tier in enumerate(self._tiers):
            if _skips(tier, request.ctx, now_s, is_early=is_early) is not None:
                continue
            rest = [key for key in keys if found[key] is None]
            if self._barred.sets or tier.barred.sets:
                rest = self._barred.without(tier.barred.without(rest))
            for key, answer in zip(rest, tier.index.peek(rest), strict=True):
                if answer is _HIT and (index, key) not in request.failed:
                    found[key] = index
        return list(found.values())

    def end_step(self, now_s: float) -> None:
        """Pass the nearer tiers' answers of this step to the cost-gated tiers that need them."""
        self.has_unknown = False
        for index, tier in enumerate(self._tiers):
            if tier.cost_gated is not None and tier.cost_gated.unknown:
                tier.cost_gated.resolve(partial(_ask_nearer, self._tiers[:index], now_s))
                self.has_unknown |= bool(tier.cost_gated.unknown)

    def _unfound(
        self, tier: TierState, request: RequestState, verdicts: Mapping[OffloadKey, Verdict]
    ) -> list[OffloadKey]:
        """Return the keys to look up in a tier: those that no nearer tier is known to have.

        For a remote tier, only those that all nearer tiers are known to lack. The other keys are
        unknown yet, and a cost-gated tier is warned to expect them.
        """
        asked: list[OffloadKey] = []
        unknown: list[OffloadKey] = []
        for key, verdict in verdicts.items():
            if verdict is _RETRY and tier.locality is Locality.REMOTE:
                unknown.append(key)
            elif verdict is not _FOUND:
                asked.append(key)
        if unknown and tier.cost_gated is not None:
            tier.cost_gated.expect(unknown, request.ctx)
            self.has_unknown = True
        return asked

    def _leave_skipped(
        self,
        index: int,
        keys: list[OffloadKey],
        request: RequestState,
        verdicts: dict[OffloadKey, Verdict],
    ) -> list[OffloadKey]:
        """Return the keys to look up in a tier; count the others as skipped."""
        tier, reason = self._tiers[index], self._skipped[index]
        left: list[OffloadKey] = []
        if reason is None:
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
        answers = tier.lookup_many(keys, request.ctx, stop_at_miss=stop_at_miss)
        missing: list[OffloadKey] = []
        for number, answer in enumerate(answers):  # fewer than keys after a miss
            if answer is _MISS:
                missing.append(keys[number])
            else:
                verdicts[keys[number]] = _FOUND if answer is _HIT else _RETRY
        counters = tier.counters
        if len(missing) < len(answers):
            hits = answers.count(_HIT)
            counters.lookups += len(answers) - len(missing)
            counters.hits += hits
            counters.undecided += len(answers) - len(missing) - hits
        if missing and tier.cost_gated is not None and tier.cost_gated.declines(request.ctx):
            self._skip(tier, "too_few", missing, verdicts)
            missing = []
        counters.lookups += len(missing)
        counters.misses += len(missing)
        lacking.update(missing)
        if self.on_answers is not None:
            found = [key for key, answer in zip(keys, answers, strict=False) if answer is _HIT]
            self.on_answers(index, request.ctx, found, missing)


def _ask_nearer(
    tiers: Sequence[TierState], now_s: float, keys: Sequence[OffloadKey], ctx: ReqContext
) -> list[LookupResult]:
    """Return for each key HIT if a usable tier has it, RETRY if one may have it, or MISS."""
    answers = [_MISS] * len(keys)
    for tier in tiers:
        if _skips(tier, ctx, now_s) is not None:
            continue
        barred = tier.barred
        for number, known in enumerate(tier.index.peek(keys)):
            if known is not _MISS and answers[number] is not _HIT and keys[number] not in barred:
                answers[number] = known
    return answers


def _skips(
    tier: TierState, ctx: ReqContext, now_s: float, *, is_early: bool = False
) -> SkipReason | None:
    """Return why a request cannot be promoted from a tier now; None if it can."""
    if not tier.takes_slots or (is_early and not tier.takes_prefetch(now_s)):
        return "suspended"
    return tier.skips_load(ctx, now_s)
