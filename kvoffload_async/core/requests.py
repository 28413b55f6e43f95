"""State of live requests, blocks retained for them, and their queues for promotion slots.

Blocks retained for a waiting request are pinned; a step's hits stay until the step ends. Requests
that wait for room for promotions form one FIFO queue ("line") per tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.tier_state import Shares
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext


class RequestState:
    """One request, from `on_new_request` until all tiers were notified of its end."""

    __slots__ = (
        "_decided",
        "_deferred_at_s",
        "_deferred_s",
        "_undecided_since_s",
        "asked_at_s",
        "ctx",
        "doubtful",
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
        """Whether the deferral limit has passed: pending counts as missing from now on."""
        self.writing: set[OffloadKey] = set()
        """Keys with granted slots whose write has not ended."""
        self.unflushed_promotions = 0
        """Slots reserved in this step whose job is not submitted yet."""
        self.promoting = 0
        """Slots of the request's promotions under way, without overdue ones."""
        self.refused: dict[int, dict[OffloadKey, None]] = {}
        """Tier -> keys whose promotion from that tier waits for room; see `Lines`."""
        self.is_behind = False
        """Whether it waits behind another request in a line; then no block is retained for it."""
        self.doubtful: dict[int, dict[OffloadKey, None]] = {}
        """Tier -> stored blocks of which the request's end decides whether the tier stores them."""
        self.parked: dict[OffloadKey, None] = {}
        """Keys to cascade to the request-level tiers once another request has written them."""
        self.retained: dict[OffloadKey, bool] = {}
        """Key of a block pinned until the request loads it or proceeds without it -> whether the
        block was promoted for the request."""
        self.waits = False
        """Whether the request waits: it has made a lookup and not proceeded; see `Retention`."""
        self.is_deferred = False
        """Whether a lookup of this step was deferred."""
        self.asked_at_s = 0.0
        """Time of the last lookup, in seconds."""
        self.failed: set[tuple[int, OffloadKey]] = set()
        """(tier, key) of failed promotions, which are not retried for this request."""
        self.lacking: dict[int, set[OffloadKey]] = {}
        """Tier -> keys that the tier lacks; not looked up there again while the request waits."""
        self._deferred_s = 0.0
        self._deferred_at_s: float | None = None
        self._undecided_since_s: float | None = None
        self._decided: set[OffloadKey] = set()

    @property
    def can_end(self) -> bool:
        """Whether the request is finished and can submit no more jobs."""
        return (
            self.is_finished
            and not self.writing
            and not self.unflushed_promotions
            and not self.parked
        )

    def defer(self, now_s: float, limit_s: float) -> bool:
        """Record a deferred lookup; return True if this reaches the limit on deferral.

        The limit applies to the total time between consecutive deferred lookups. A promotion that
        fails in between does not reset the total.
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
        """Record the start of a series of lookups."""
        self.asked_at_s = now_s
        self.waits = not self.is_expired
        if self._undecided_since_s is None:
            self._undecided_since_s = now_s

    def decides(self, keys: Iterable[OffloadKey]) -> int:
        """Record the keys that were answered HIT or MISS; return how many were not before."""
        before = len(self._decided)
        self._decided.update(keys)
        return len(self._decided) - before

    def proceed(self) -> float | None:
        """Record that the request no longer waits for lookups.

        Returns:
            Time, in seconds, at which the wait began: that of the first lookup since the last
            call. None without a lookup.
        """
        since_s, self._undecided_since_s = self._undecided_since_s, None
        self._deferred_at_s = None
        self.lacking.clear()
        return since_s

    def forget_blocks(self) -> None:
        """Clear the state of blocks after a reset of the primary."""
        self.writing.clear()
        self.parked.clear()
        self.doubtful.clear()
        self.retained.clear()
        self.lacking.clear()
        self.promoting = 0
        self.waits = self.is_deferred = False


TURN_S: Final = 1.0
"""Seconds for which the first request in line may leave available slots unused."""


class Lines:
    """FIFO queues ("lines"), one per tier, of requests that wait for promotion slots.

    A request stays in line until there was room for all keys for which it had none, or until it
    stops waiting. Only the first in line gets room. Requests behind it retain no blocks, which
    prevents a deadlock.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        has_new_first: By tier: whether another request has become the first since the last `moved`.
        num_places: Sum of the lengths of all lines.
    """

    def __init__(self, num_tiers: int) -> None:
        """Start with empty lines."""
        self._lines: list[dict[RequestState, None]] = [{} for _ in range(num_tiers)]
        self._moved_s = [0.0] * num_tiers
        """By tier: last time, in seconds, at which the first in line had no room or looked up."""
        self.has_new_first = [False] * num_tiers
        self.num_places = 0

    def first(self, tier: int) -> RequestState | None:
        """Return the first request in a tier's line, None if the line is empty."""
        return next(iter(self._lines[tier]), None)

    def firsts(self) -> list[tuple[int, RequestState]]:
        """Return (tier, first request) for each tier whose line is not empty."""
        return [(tier, next(iter(line))) for tier, line in enumerate(self._lines) if line]

    def join(self, tier: int, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Append a request to a tier's line, or add further keys if it is in line already."""
        line = self._lines[tier]
        if not line:
            self.has_new_first[tier] = True
        self.num_places += request not in line
        line.setdefault(request)
        request.refused.setdefault(tier, {}).update(dict.fromkeys(keys))
        self._look_ahead(request)

    def served(self, tier: int, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Remove keys for which a request no longer waits; without keys, it leaves the line."""
        refused = request.refused.get(tier)
        if refused is not None:
            for key in keys:
                refused.pop(key, None)
            if not refused:
                self._leave(tier, request)

    def leave(self, request: RequestState) -> None:
        """Remove a request from all lines."""
        for tier in list(request.refused):
            self._leave(tier, request)

    def moved(self, tier: int, now_s: float) -> None:
        """Restart the stall timer of the first request in a line."""
        self._moved_s[tier] = now_s
        self.has_new_first[tier] = False

    def has_stalled(self, tier: int, now_s: float) -> bool:
        """Return whether the first in line has left available slots unused for over `TURN_S`."""
        return not self.has_new_first[tier] and now_s - self._moved_s[tier] > TURN_S

    def clear(self) -> None:
        """Remove all requests from all lines."""
        for line in self._lines:
            for request in list(line):
                self.leave(request)

    def waiting(self) -> list[list[RequestState]]:
        """Return each tier's line, in order. For invariants and inspection."""
        return [list(line) for line in self._lines]

    def _leave(self, tier: int, request: RequestState) -> None:
        was_first = self.first(tier) is request
        del self._lines[tier][request], request.refused[tier]
        self.num_places -= 1
        self._look_ahead(request)
        first = self.first(tier)
        if was_first and first is not None:
            self.has_new_first[tier] = True
            self._look_ahead(first)

    def _look_ahead(self, request: RequestState) -> None:
        request.is_behind = any(self.first(tier) is not request for tier in request.refused)


class Retention:
    """Pins blocks for waiting requests, and a step's hits until the step ends.

    A request waits from a lookup until it proceeds: it loads, is computed without loading, ends,
    reaches the deferral limit, or makes no more lookups. Meanwhile its promoted blocks are
    retained, and its hits too while its lookups are deferred. A block retained for many requests
    has one pin and counts once.

    A step's hits stay resident until the step ends, since their requests may load them. They are
    pinned only before an eviction: all of them before one by a promotion, as many as the cap allows
    before one by a store.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        in_flight: Slots of promotions under way.
        found: Keys of the step's hits, in lookup order; the planner's lookups append to it.
    """

    def __init__(
        self, primary: Primary, shares: Shares, lines: Lines, cap_slots: int, patience_s: float
    ) -> None:
        """Retain nothing.

        Args:
            primary: The tier whose blocks are pinned.
            shares: Its total bounds the retained slots together with the tiers' slots.
            lines: The lines for room, which a request leaves when it stops waiting.
            cap_slots: See the property; this is the cap while several requests wait.
            patience_s: Seconds after its last lookup for which a request counts as waiting.
        """
        self.in_flight = 0
        self.found: list[OffloadKey] = []
        self._primary = primary
        self._shares = shares
        self._lines = lines
        self._patience_s = patience_s
        self._cap_slots = cap_slots
        self._several_ask = False
        """Whether a request has made lookups in this step while another one waits or made some."""
        self._holders: dict[OffloadKey, int] = {}
        """Retained key -> how many requests it is retained for."""
        self._waiting: dict[ReqContext, RequestState] = {}
        """Waiting requests, ordered by last lookup, oldest first."""
        self._proceeding: list[RequestState] = []
        self._rounds: list[tuple[RequestState, int]] = []
        """Requests that made lookups in this step, each with the index in `found` of its first hit.
        """
        self._guarded: dict[OffloadKey, None] = {}
        self._stepped_at_s = 0.0
        self._num_examined = 0
        """Length of the prefix of `found` whose blocks are guarded or retained."""

    @property
    def retained_slots(self) -> int:
        """Number of retained blocks."""
        return len(self._holders)

    @property
    def cap_slots(self) -> int:
        """Slots that retained blocks and promotions under way may occupy together.

        A request that waits alone may have all slots that are not reserved: no other is held up.
        """
        if self._several_ask or len(self._waiting) > 1:
            return self._cap_slots
        return max(self._cap_slots, self._shares.total)

    @property
    def spare_slots(self) -> int:
        """Slots left under the cap and the total of `Shares`."""
        under_cap = self.cap_slots - self.in_flight - len(self._holders)
        return max(0, min(under_cap, self._shares.spare_slots))

    @property
    def is_full(self) -> bool:
        """Whether the cap is reached."""
        return self.in_flight + len(self._holders) >= self.cap_slots

    @property
    def guarded(self) -> list[OffloadKey]:
        """Keys pinned until the end of the step. For invariants and inspection."""
        return list(self._guarded)

    def has_reason(self, request: RequestState) -> bool:
        """Return whether blocks may be retained for a request. For invariants and inspection."""
        if request in self._proceeding or any(request is asking for asking, _ in self._rounds):
            return not request.is_finished  # its blocks are retained until the step ends
        is_patient = self._stepped_at_s - request.asked_at_s <= self._patience_s
        return self._waiting.get(request.ctx) is request and request.waits and is_patient

    # -- requests -------------------------------------------------------------------------------

    def begin_round(self, request: RequestState, now_s: float) -> None:
        """Begin a request's lookups: keys appended to `found` from now on are its hits."""
        waiting = len(self._waiting) - (self._waiting.get(request.ctx) is request)
        if waiting or (self._rounds and self._rounds[-1][0] is not request):
            self._several_ask = True
        self._rounds.append((request, len(self.found)))
        request.begin_round(now_s)

    def retain(
        self, request: RequestState, keys: Iterable[OffloadKey], *, promoted: bool = False
    ) -> None:
        """Retain readable blocks for a request: the longest prefix of `keys` that fits the cap.

        Retains none while the request is in line behind others.
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
                # A hit may be gone: at the cap it was not pinned, and a store has evicted it.
                if not spare or found is not LookupResult.HIT:
                    break
                spare -= 1
                new.append(key)
            holders[key] = holders.get(key, 0) + 1
            retained[key] = promoted
        self._primary.pin(new)
        self._shares.retained_slots = len(holders)

    def proceed(self, request: RequestState) -> None:
        """Record that a request no longer waits: release its blocks, remove it from all lines."""
        request.waits = request.is_deferred = False
        self._lines.leave(request)
        self._waiting.pop(request.ctx, None)
        self.give_back(request)

    def give_back(self, request: RequestState) -> None:
        """Release the blocks retained for a request, which continues to wait."""
        self._release(request, list(request.retained))

    def load(self, request: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Record that a request loads blocks, which its load pins: retain them no longer.

        The request may load more blocks in this step, so the others are released at its end.
        """
        self._release(request, [key for key in dict.fromkeys(keys) if key in request.retained])
        request.waits = request.is_deferred = False
        self._lines.leave(request)
        self._proceeding.append(request)

    # -- steps ----------------------------------------------------------------------------------

    def pin_step_hits(self) -> None:
        """Pin all hits of this step until its end; call before a promotion evicts blocks."""
        fresh = self.found[self._num_examined :]
        if not fresh:
            return
        self._num_examined = len(self.found)
        guarded, holders = self._guarded, self._holders
        fresh = [key for key in dict.fromkeys(fresh) if key not in guarded and key not in holders]
        self._primary.pin(fresh)
        guarded.update(dict.fromkeys(fresh))

    def guard_from_store(self) -> None:
        """Pin hits of this step, as many as the cap allows; call before a store evicts blocks."""
        self.pin_step_hits()
        excess = len(self._guarded) - max(0, self.spare_slots)
        self._primary.unpin([self._guarded.popitem()[0] for _ in range(excess)])

    def end_step(self, now_s: float) -> None:
        """Retain the hits of deferred requests; release the blocks that no request waits for."""
        self._stepped_at_s = now_s
        if self._rounds or self._proceeding:
            self._end_rounds()
        while self._waiting:
            request = next(iter(self._waiting.values()))
            if now_s - request.asked_at_s <= self._patience_s:
                break
            self.proceed(request)

    def reset(self) -> None:
        """Release all blocks and empty the lines; call before `Primary.reset`."""
        self.in_flight = 0
        self._holders.clear()
        self._lines.clear()
        self._shares.retained_slots = 0
        self._waiting.clear()
        self._guarded.clear()
        self._forget_step()

    # -- internal -------------------------------------------------------------------------------

    def _end_rounds(self) -> None:
        for request in self._proceeding:
            if not request.waits:  # unless a later lookup has made it wait again
                self.proceed(request)
        for request, found in self._found_by_request():
            if not request.waits or request.is_expired:
                self.proceed(request)
                continue
            if request.is_deferred:
                self.retain(request, found)
            else:
                request.lacking.clear()
                if request.retained:  # blocks behind a miss are useless once all keys are resolved
                    useful = frozenset(found)
                    self._release(request, [key for key in request.retained if key not in useful])
            request.is_deferred = False
            self._waiting.pop(request.ctx, None)
            self._waiting[request.ctx] = request
        self._forget_step()

    def _found_by_request(self) -> Iterable[tuple[RequestState, Sequence[OffloadKey]]]:
        """Return the requests that made lookups in this step, each with the keys of its hits."""
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
        self._several_ask = False

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
        if self._num_examined:  # hits of this step stay pinned until its end
            again = [key for key in last if key in self._guarded]
            self._guarded.update(dict.fromkeys(last))
            last = again
        self._primary.unpin(last)
