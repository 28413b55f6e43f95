"""What the planner remembers of one live request, what the request may hold, and its turn for room.

A request holds blocks that are pinned while it waits, and what a step has found. Requests that wait
for room for promotions form one line per tier, first come, first served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import Shares
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext


class RequestState:
    """One request, from `on_new_request` until every tier was told that it has finished."""

    __slots__ = (
        "_decided",
        "_deferred_at_s",
        "_deferred_s",
        "_undecided_since_s",
        "asked_at_s",
        "ctx",
        "failed",
        "is_behind",
        "is_deferred",
        "is_expired",
        "is_finished",
        "lacking",
        "parked",
        "promoting",
        "refused",
        "request_level_tiers",
        "retained",
        "unflushed_promotions",
        "waits",
        "writing",
    )

    def __init__(self, ctx: ReqContext, request_level_tiers: Collection[int]) -> None:
        self.ctx = ctx
        self.request_level_tiers = tuple(request_level_tiers)
        self.is_finished = False
        self.is_expired = False
        """Whether the request was deferred for too long: pending means missing from now on."""
        self.writing: set[OffloadKey] = set()
        """Keys that were granted slots and whose write has not ended."""
        self.unflushed_promotions = 0
        """Slots reserved in this step whose job is not submitted yet."""
        self.promoting = 0
        """Slots of promotions for it that have not ended, and whose copies are not overdue."""
        self.refused: dict[int, dict[OffloadKey, None]] = {}
        """Tier -> keys that found no room for their promotion from there, and wait; see `Lines`."""
        self.is_behind = False
        """Whether another one is before it in such a line: then nothing is retained for it."""
        self.parked: dict[OffloadKey, None] = {}
        """Keys to cascade to the request-level tiers once another request has written them."""
        self.retained: dict[OffloadKey, bool] = {}
        """Blocks that stay, pinned, until the request loads them or proceeds without them, and
        whether they were promoted for it."""
        self.waits = False
        """Whether it has looked something up and not proceeded since; see `Retention`."""
        self.is_deferred = False
        """Whether a lookup of this step was deferred."""
        self.asked_at_s = 0.0
        """When it last looked something up."""
        self.failed: set[tuple[int, OffloadKey]] = set()
        """Promotions that failed: not tried again for this request."""
        self.lacking: dict[int, set[OffloadKey]] = {}
        """Tier -> keys that it lacks: it is not asked for them again while the request waits."""
        self._deferred_s = 0.0
        self._deferred_at_s: float | None = None
        self._undecided_since_s: float | None = None
        self._decided: set[OffloadKey] = set()

    @property
    def can_end(self) -> bool:
        """Whether the tiers may be told that nothing more will be submitted."""
        return (
            self.is_finished
            and not self.writing
            and not self.unflushed_promotions
            and not self.parked
        )

    def defer(self, now_s: float, limit_s: float) -> bool:
        """Note a deferred lookup; return True if the request has now been deferred for too long.

        Time adds up from one deferred lookup to the next, and a failed round does not reset it.
        """
        self.is_deferred = True
        if self._deferred_at_s is not None:
            self._deferred_s += max(0.0, now_s - self._deferred_at_s)
        self._deferred_at_s = now_s
        if self.is_expired or self._deferred_s < limit_s:
            return False
        self.is_expired = True
        return True

    def begin_round(self, now_s: float) -> None:
        """Note that the request asks."""
        self.asked_at_s = now_s
        self.waits = not self.is_expired
        if self._undecided_since_s is None:
            self._undecided_since_s = now_s

    def decides(self, keys: Iterable[OffloadKey]) -> int:
        """Note that keys were found, or are missing, for certain; return how many are new."""
        before = len(self._decided)
        self._decided.update(keys)
        return len(self._decided) - before

    def proceed(self) -> float | None:
        """Note that the request was scheduled: it is not being deferred any more.

        Returns:
            Since when it has asked; None: it has not, since it last proceeded.
        """
        since_s, self._undecided_since_s = self._undecided_since_s, None
        self._deferred_at_s = None
        self.lacking.clear()
        return since_s

    def forget_blocks(self) -> None:
        """Forget what a reset of the primary has made void."""
        self.writing.clear()
        self.parked.clear()
        self.retained.clear()
        self.lacking.clear()
        self.promoting = 0
        self.waits = self.is_deferred = False


TURN_S: Final = 1.0
"""Seconds that the first in a line may leave room unused that others wait for."""


class Lines:
    """A request is in a tier's line from the first key that found no room until it has its blocks.

    Or until it waits no more. Only the first in a line gets room; who is behind holds nothing that
    the first may need, so nobody waits for somebody who waits for him.

    Thread: owner.

    Attributes:
        has_new_first: By tier: whether another request is the first since `moved` was called.
    """

    def __init__(self, num_tiers: int) -> None:
        """Start with nobody in line."""
        self._lines: list[dict[RequestState, None]] = [{} for _ in range(num_tiers)]
        self._moved_s = [0.0] * num_tiers
        """When the first in each line had no room last, or asked for it."""
        self.has_new_first = [False] * num_tiers

    def first(self, tier: int) -> RequestState | None:
        """Return who is served next, if anybody waits."""
        return next(iter(self._lines[tier]), None)

    def firsts(self) -> list[tuple[int, RequestState]]:
        """Return each tier that has a line, with the first request in the line."""
        return [(tier, next(iter(line))) for tier, line in enumerate(self._lines) if line]

    def join(self, tier: int, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Have a request wait for room for keys, behind the requests that wait already."""
        line = self._lines[tier]
        if not line:
            self.has_new_first[tier] = True
        line.setdefault(request)
        request.refused.setdefault(tier, {}).update(dict.fromkeys(keys))
        self._look_ahead(request)

    def served(self, tier: int, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Learn that keys of a request wait no more: they have room, or never get any."""
        refused = request.refused.get(tier)
        if refused is not None:
            for key in keys:
                refused.pop(key, None)
            if not refused:
                self._leave(tier, request)

    def leave(self, request: RequestState) -> None:
        """Learn that a request waits no more."""
        for tier in list(request.refused):
            self._leave(tier, request)

    def moved(self, tier: int, now_s: float) -> None:
        """Note that it is not the first one's fault if room is left until now."""
        self._moved_s[tier] = now_s
        self.has_new_first[tier] = False

    def has_stalled(self, tier: int, now_s: float) -> bool:
        """Tell whether the first in line has not asked although there was room."""
        return not self.has_new_first[tier] and now_s - self._moved_s[tier] > TURN_S

    def clear(self) -> None:
        """Let nobody wait any more."""
        for line in self._lines:
            for request in list(line):
                self.leave(request)

    def waiting(self) -> list[list[RequestState]]:
        """Return who is in each line, in order. For invariants and inspection."""
        return [list(line) for line in self._lines]

    def _leave(self, tier: int, request: RequestState) -> None:
        was_first = self.first(tier) is request
        del self._lines[tier][request], request.refused[tier]
        self._look_ahead(request)
        first = self.first(tier)
        if was_first and first is not None:
            self.has_new_first[tier] = True
            self._look_ahead(first)

    def _look_ahead(self, request: RequestState) -> None:
        request.is_behind = any(self.first(tier) is not request for tier in request.refused)


class Retention:
    """Pins blocks for requests that wait, and what was found in a step until its end.

    A request waits from a lookup until it proceeds: it loads, is computed without loading, ends, is
    deferred for too long, or stops asking. Retained for it meanwhile are the blocks that were
    promoted for it and, while its lookups are deferred, those that it has found. A block that many
    requests wait for has one pin and counts once.

    What a step has found stays until the step ends, since its finder may load it: whatever
    promotions evict, and up to the cap whatever stores evict. It is pinned only when somebody is
    about to evict.

    Thread: owner.

    Attributes:
        cap_slots: Slots that may be retained, or reserved by promotions under way.
        in_flight: The latter.
        found: What the step has found, in this order; appended to by who looks up.
    """

    def __init__(
        self, primary: Primary, shares: Shares, lines: Lines, cap_slots: int, patience_s: float
    ) -> None:
        """Retain nothing.

        Args:
            primary: Where the blocks are.
            shares: Told how many are retained; what it reserves is not retained either.
            lines: Left by who waits no more.
            cap_slots: See the attribute.
            patience_s: Seconds after its last lookup that a request counts as waiting.
        """
        self.cap_slots = cap_slots
        self.in_flight = 0
        self.found: list[OffloadKey] = []
        self._primary = primary
        self._shares = shares
        self._lines = lines
        self._patience_s = patience_s
        self._holders: dict[OffloadKey, int] = {}
        """Retained key -> how many requests it is retained for."""
        self._waiting: dict[ReqContext, RequestState] = {}
        """Requests that wait, the one that has not asked for the longest time first."""
        self._proceeding: list[RequestState] = []
        self._rounds: list[tuple[RequestState, int]] = []
        """Who asked in this step, and where in `found` its hits begin."""
        self._guarded: dict[OffloadKey, None] = {}
        self._stepped_at_s = 0.0
        self._num_examined = 0
        """How much of `found` is guarded, or retained anyway."""

    @property
    def retained_slots(self) -> int:
        """Blocks that are retained."""
        return len(self._holders)

    @property
    def spare_slots(self) -> int:
        """Slots that are left under the cap."""
        under_cap = self.cap_slots - self.in_flight - len(self._holders)
        return max(0, min(under_cap, self._shares.spare_slots))

    @property
    def is_full(self) -> bool:
        """Whether the cap is reached, whatever else is left."""
        return self.in_flight + len(self._holders) >= self.cap_slots

    @property
    def guarded(self) -> list[OffloadKey]:
        """What is pinned until the end of the step. For invariants and inspection."""
        return list(self._guarded)

    def has_reason(self, request: RequestState) -> bool:
        """Tell whether something may be retained for a request. For invariants and inspection."""
        if request in self._proceeding or any(request is asking for asking, _ in self._rounds):
            return not request.is_finished  # as long as the step lasts
        is_patient = self._stepped_at_s - request.asked_at_s <= self._patience_s
        return self._waiting.get(request.ctx) is request and request.waits and is_patient

    # -- requests -------------------------------------------------------------------------------

    def begin_round(self, request: RequestState, now_s: float) -> None:
        """Note that a request asks: what is appended to `found` from here on is its own."""
        self._rounds.append((request, len(self.found)))
        request.begin_round(now_s)

    def retain(
        self, request: RequestState, keys: Iterable[OffloadKey], *, promoted: bool = False
    ) -> None:
        """Retain readable blocks for a request, from the first on, as many as fit under the cap.

        None while it waits for room behind others.
        """
        if request.is_behind:
            return
        retained, holders = request.retained, self._holders
        wanted = [key for key in dict.fromkeys(keys) if key not in retained]
        if not wanted:
            return
        new: list[OffloadKey] = []
        spare = self.spare_slots
        for key, found in zip(wanted, self._primary.lookup_many(wanted), strict=True):
            if key not in holders:
                # A store may have evicted what the cap did not protect.
                if not spare or found is not LookupResult.HIT:
                    break
                spare -= 1
                new.append(key)
            holders[key] = holders.get(key, 0) + 1
            retained[key] = promoted
        self._primary.pin(new)
        self._shares.retained_slots = len(holders)

    def proceed(self, request: RequestState) -> None:
        """Release what is retained for a request: it waits no more."""
        request.waits = request.is_deferred = False
        self._lines.leave(request)
        self._waiting.pop(request.ctx, None)
        self.give_back(request)

    def give_back(self, request: RequestState) -> None:
        """Release what is retained for a request, which still waits."""
        self._release(request, list(request.retained))

    def load(self, request: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Release what a request loads, which is pinned for that.

        The rest follows at the end of the step: until then it may load more of what it has found.
        """
        self._release(request, [key for key in dict.fromkeys(keys) if key in request.retained])
        request.waits = request.is_deferred = False
        self._lines.leave(request)
        self._proceeding.append(request)

    # -- steps ----------------------------------------------------------------------------------

    def pin_step_hits(self) -> None:
        """Keep what the step has found: a promotion is about to evict."""
        fresh = self.found[self._num_examined :]
        if not fresh:
            return
        self._num_examined = len(self.found)
        guarded, holders = self._guarded, self._holders
        fresh = [key for key in dict.fromkeys(fresh) if key not in guarded and key not in holders]
        self._primary.pin(fresh)
        guarded.update(dict.fromkeys(fresh))

    def guard_from_store(self) -> None:
        """The same, but no more than the cap allows: a store is about to evict."""
        self.pin_step_hits()
        excess = len(self._guarded) - max(0, self.spare_slots)
        self._primary.unpin([self._guarded.popitem()[0] for _ in range(excess)])

    def end_step(self, now_s: float) -> None:
        """Retain what deferred requests have found; release what nobody waits for any more."""
        self._stepped_at_s = now_s
        if self._rounds or self._proceeding:
            self._end_rounds()
        while self._waiting:
            request = next(iter(self._waiting.values()))
            if now_s - request.asked_at_s <= self._patience_s:
                break
            self.proceed(request)

    def reset(self) -> None:
        """Forget everything; the primary is about to be emptied."""
        self.in_flight = 0
        self._holders.clear()
        self._lines.clear()
        self._shares.retained_slots = 0
        self._waiting.clear()
        self._guarded.clear()
        self._forget_step()

    # -- inside ---------------------------------------------------------------------------------

    def _end_rounds(self) -> None:
        for request in self._proceeding:
            if not request.waits:  # else it has asked again
                self.proceed(request)
        for request, found in self._found_by_request():
            if not request.waits or request.is_expired:
                self.proceed(request)
                continue
            if request.is_deferred:
                self.retain(request, found)
            else:
                request.lacking.clear()
                if request.retained:  # a decided request has no use for blocks behind a miss
                    useful = frozenset(found)
                    self._release(request, [key for key in request.retained if key not in useful])
            request.is_deferred = False
            self._waiting.pop(request.ctx, None)
            self._waiting[request.ctx] = request
        self._forget_step()

    def _found_by_request(self) -> Iterable[tuple[RequestState, Sequence[OffloadKey]]]:
        """Return the requests that asked in this step, each with the keys it has found."""
        ends = [start for _, start in self._rounds[1:]] + [len(self.found)]
        rounds: dict[int, tuple[RequestState, list[OffloadKey]]] = {}
        for (request, start), end in zip(self._rounds, ends, strict=False):
            rounds.setdefault(id(request), (request, []))[1].extend(self.found[start:end])
        return rounds.values()

    def _forget_step(self) -> None:
        if self._guarded:
            self._primary.unpin(self._guarded)
            self._guarded.clear()
        self.found.clear()
        self._rounds.clear()
        self._proceeding.clear()
        self._num_examined = 0

    def _release(self, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        holders = self._holders
        last: list[OffloadKey] = []
        for key in keys:
            del request.retained[key]
            holders[key] -= 1
            if not holders[key]:
                del holders[key]
                last.append(key)
        self._shares.retained_slots = len(holders)
        if self._num_examined:  # somebody may have found them in this step
            again = [key for key in last if key in self._guarded]
            self._guarded.update(dict.fromkeys(last))
            last = again
        self._primary.unpin(last)
