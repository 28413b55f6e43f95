"""What a request may hold: blocks that are pinned while it waits, and what a step has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload_async.core.lines import Lines
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.shares import Shares
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext


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
        new: list[OffloadKey] = []
        spare = self.spare_slots
        for key in keys:
            if key in retained:
                continue
            if key not in holders:
                # A store may have evicted what the cap did not protect.
                if not spare or self._primary.lookup(key) is not LookupResult.HIT:
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

    def guard_found(self) -> None:
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
        self.guard_found()
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
            elif request.retained:  # it is decided: it cannot use what lies behind a missing block
                useful = frozenset(found)
                self._release(request, [key for key in request.retained if key not in useful])
            request.is_deferred = False
            self._waiting.pop(request.ctx, None)
            self._waiting[request.ctx] = request
        self._forget_step()

    def _found_by_request(self) -> Iterable[tuple[RequestState, Sequence[OffloadKey]]]:
        """Return the requests that asked in this step, each with what it has found."""
        starts = [*(start for _, start in self._rounds), len(self.found)]
        rounds: dict[int, tuple[RequestState, list[OffloadKey]]] = {}
        for (request, start), end in zip(self._rounds, starts[1:], strict=True):
            rounds.setdefault(id(request), (request, []))[1].extend(self.found[start:end])
        return rounds.values()

    def _forget_step(self) -> None:
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
