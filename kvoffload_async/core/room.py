"""The law of room: which request gets primary slots for promotions, and when.

Requests, stores and copies to tiers compete for the slots of the primary.

Constants. Of N slots, R = max(1, N / 10) are left to stores; B = N - R is the most that tickets and
promotions in flight name together, a block that several name counting once. At most C = max(1, N /
(2 x tiers)) blocks are in copies to one tier. T = 1 s (`TURN_S`) is the only time constant.

A slot is in one state: *free*; *being written*, by a promotion or by a store; *resident*; or
*gone*: it belongs to no block, but a copy that was given up may still touch it, and it is free when
that copy ends. B is less by the slots that are gone, and by the blocks that users pin, at most a
quarter of the slots. Each copy that reads a resident block pins it
(a load to the device, a copy to a tier), and all tickets that name it pin it once. A pinned block
is never evicted. A block that is *pending* for a tier that works is not evicted with `write_back:
"wait"`, and with `"drop"` only when no others are left.

A *ticket* is a request's right to its leading run: the first blocks, at most B, in the order of
`key_positions` or else of asking, that are resident, being written or in a tier, up to the first
that nobody has or whose copy failed for this request. The ticket pins them, and is granted whole or
not at all: all missing blocks get slots at once, in one job a tier. So nobody holds room while it
waits for room.

1. Look-up. All blocks resident: `HIT`, without a ticket; this holds until the step's end. Is a tier
   still being probed for a block: `RETRY`, and nothing is held. Else the request joins the one
   queue at the step's end, and is told `HIT_PENDING`. With a ticket: pending while a block of it is
   in flight, then `HIT` for its run and `MISS` behind it.
2. Service. The queue is served oldest first, when the ends of copies have been collected, before
   any look-up, and at the step's end. If the head's run fits beside what is pinned, it gets its
   ticket, and the next is looked at; otherwise nobody passes it. It waits for the end of a copy,
   for a pending block of a tier that works, or for the turn of a ticket. If no slot is left to B,
   what the head lacks is a miss, also what is being written.
3. Stores. While a request waits, a store gets no slot that the queue's head needs, unless stores
   have fewer than R blocks: being written, pending, or in copies to a tier. What stores were
   refused for the head's sake counts as new room when a request leaves the queue, so schedulers
   offer it again. A store may come between a step's look-ups and its loads; it does not evict their
   hits, up to B.
4. Turns. They count while the head of the queue asks, or a store is refused. At the end of a step,
   a ticket that has been complete and unused for T gives way: its blocks stay resident, without its
   pins. A head that has not asked for T loses its place. A head that has asked for T since it found
   no ticket and no promotion left takes the leading part that fits; if none does, what it lacks is
   a miss.
5. Silence. If somebody waits for room, and a tier with copies in flight has ended none for T, plus
   twice the time that its measured rate gives for its blocks, it is silent: its promotions are
   given up, tickets keep what lies before the first missing block, and the tier gets no slots until
   a copy of it ends. An overdue copy has the same effect.
6. Ends. A ticket ends when its blocks are loaded, or when its request is computed, finished or
   aborted; its promotions go on. A failed copy fails for every ticket that names the block: it is
   cut before the block, or ends as a whole if another tier has the block. A reset ends all tickets
   and the queue. The prefix that `OffloadEngine.lookup` finds is a ticket too: after its turn,
   `load` loads what is still resident of it.
7. Prefetch. A request that its scheduler has queued, but not looked up yet, may get an *early*
   ticket at a step's end: while nobody waits in the queue, and for at most a quarter of the slots
   together with other early tickets. It gives way at once: the newest one ends when the head of the
   queue, or a store, finds no room. At its request's first look-up an early ticket becomes an
   ordinary one, or ends if it names only a part of the prompt; it ends too after `EARLY_S`. The
   failure of an early ticket's promotion fails for nobody: requests that share it ask again.

What follows. Tickets name at most B slots, so that stores always have an end to wait for. Tickets
are granted whole from one queue, so there is no hold-and-wait, over any number of tiers. A hung
tier holds at most the slots of its promotions and C blocks, and costs requests that wait for other
tiers at most about T.

`tests/core/law` drives the planner through every state that small primaries can reach, with
requests that stop asking, stores, failures, resets, and tiers that never answer. In each it checks
the invariants; over all of them, that no request and no store waits for ever although whatever is
under way ends. Planners with a wrong law are found.

    none --lookup finds blocks in a tier--> queued --room for the whole run--> ticket
    none --prefetched while nobody waits--> early ticket
    queued --asks no more for TURN_S, or no part fits after TURN_S--> none
    ticket --used, ended, or unused for TURN_S while others wait--> none
    early ticket --first look-up--> ticket
    early ticket --no room for others, EARLY_S, or only a part at the first look-up--> none
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from kvoffload_async.core.admission import in_prompt_order
from kvoffload_async.core.ledger import JobAbandoned, JobState
from kvoffload_async.core.primary import Primary, Share
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TURN_S, TierState
from kvoffload_async.errors import TierTimeoutError
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext

_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS

Find = Callable[[Sequence[OffloadKey], RequestState], Sequence[int | None]]
"""Returns for each block the nearest tier that may load it for a request; None if none does."""

Submit = Callable[[int, ReqContext, Sequence[OffloadKey], Sequence[int], bool], object]
"""Submits a promotion: tier index, request, keys, their slots, and whether it is a prefetch."""

EARLY_S: Final = 60.0
"""See `Room.early_s`: longer than requests are queued, but not for ever."""


class Room:
    """Grants tickets, and bounds the slots of promotions, stores and copies to tiers.

    Tickets and promotions in flight together name at most `budget` slots, a block that several
    name counting once; the rest, `reserved`, is left to stores. Copies to one tier read at most
    `copies_each` blocks.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        reserved: Slots that tickets and promotions never occupy.
        copies_each: Blocks that may be in copies to one tier.
        most_early: Blocks that early tickets may name together.
        early_s: Seconds after which an early ticket ends, although its request was not scheduled.
        found: Keys that this step's lookups did not miss, in lookup order; the planner appends to
            it.
        queue: Requests that wait for their ticket, oldest first. Read-only.
        in_flight: Keys of the promotions in flight, without those given up. Read-only.
        guarded: Hits of this step, pinned until its end. Read-only.
    """

    def __init__(
        self, primary: Primary, tiers: Sequence[TierState], find: Find, submit: Submit
    ) -> None:
        """Start without tickets."""
        slots = primary.num_slots
        self.reserved = min(slots - 1, max(1, slots // 10))
        self.copies_each = max(1, slots // (2 * max(1, len(tiers))))
        self.most_early = slots // 4
        self.early_s = EARLY_S
        self.found: list[OffloadKey] = []
        self._primary = primary
        self._tiers = tiers
        self._find = find
        self._submit = submit
        self.queue: dict[RequestState, Share] = {}
        self._waiting: dict[Share, dict[RequestState, None]] = {}
        """Tenants of the queue -> their requests in it, oldest first."""
        self._holders: dict[OffloadKey, int] = {}
        """Key -> number of tickets that name it. It has one pin, once it is readable."""
        self._awaited: dict[OffloadKey, list[RequestState]] = {}
        """Key that is being written -> requests whose tickets name it."""
        self.in_flight: set[OffloadKey] = set()
        self._named_in = dict.fromkeys(primary.shares, 0)
        """Share -> number of its slots that tickets and promotions in flight name."""
        self._landed: dict[RequestState, float] = {}
        """Request whose ticket's blocks have all landed -> `_contended_s` at that time."""
        self.early: dict[RequestState, tuple[float, int]] = {}
        """Request with an early ticket -> when it was granted, and how many blocks of it no other
        ticket named then; oldest first. Read-only."""
        self._contended_s = 0.0
        """Total time during which a request or a store waited for room."""
        self._is_contended = False
        """Whether, in the last step, a request waited in the queue or a store was refused."""
        self._is_store_refused = False
        """Whether a store of this step has found too little room."""
        self._stepped_at_s = 0.0
        self._rounds: list[tuple[RequestState, int]] = []
        """Requests that made lookups in this step, with the index in `found` of the first key."""
        self._used: list[RequestState] = []
        """Requests that load blocks of their tickets in this step."""
        self.guarded: list[OffloadKey] = []
        self._num_examined = 0
        """Length of the prefix of `found` that is guarded."""
        self._version = 0
        """Number of changes to tickets; with `room_made`, shows if the queue's head may fit now."""
        self._blocked_at: dict[Share, tuple[RequestState, int, int]] = {}
        """A tenant's first request that did not fit, with `_version` and `room_made` then."""
        self._searched_s = dict.fromkeys(primary.shares, 0.0)
        """When the tiers were last searched for the run of a tenant's first request."""
        self._head_needs: dict[Share, int] = {}
        """Slots to be left to a tenant's first request, in addition to its readable blocks."""
        self._num_withheld = 0
        """Slots that were refused to stores since a request last left the queue."""

    # -- inspection -----------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Slots that tickets and promotions in flight may name together."""
        return sum(map(self.budget_in, self._primary.shares))

    def budget_in(self, share: Share) -> int:
        """Slots of a tenant that tickets and promotions in flight may name together."""
        return max(0, share.most - self.reserved_in(share) - share.held - share.kept)

    def has_budget(self, request: RequestState) -> bool:
        """Return whether promotions for a request may get any slot."""
        return self.budget_in(self._share(request)) > 0

    def left_in(self, share: Share) -> int:
        """Return how many more of a tenant's slots may be named; may be negative."""
        return self.budget_in(share) - self._named_in[share]

    def reserved_in(self, share: Share) -> int:
        """Return the slots of a tenant that tickets and promotions never occupy."""
        part = -(-self.reserved * share.most // self._primary.num_slots)
        return min(share.most - 1, part)

    def named_in(self, share: Share) -> int:
        """Return the number of a tenant's slots that tickets and promotions in flight name."""
        return self._named_in[share]

    @property
    def named(self) -> int:
        """Slots that tickets and promotions in flight name."""
        return sum(self._named_in.values())

    @property
    def named_blocks(self) -> int:
        """Number of blocks that tickets name."""
        return len(self._holders)

    def is_head(self, request: RequestState) -> bool:
        """Return whether a request is its tenant's first in the queue."""
        return self._head(self._share(request)) is request

    def is_used(self, request: RequestState) -> bool:
        """Return whether a request loads blocks of its ticket in this step. For invariants."""
        return request in self._used

    def wakes_in_s(self) -> float:
        """Return the seconds until a wait for room may time out; inf if no request waits."""
        return TURN_S / 2 if self.queue else math.inf

    # -- requests -------------------------------------------------------------------------------

    def begin_round(self, request: RequestState, now_s: float) -> None:
        """Begin a request's lookups: keys appended to `found` from now on are its own."""
        self._rounds.append((request, len(self.found)))
        request.begin_round(now_s)
        if request.is_expired:
            self.leave(request)
        if self.early.pop(request, None) is None:
            return
        if request.is_cut:
            self._release(request, list(request.ticket))
        elif self._landed.pop(request, None) is not None:
            self._note_landed(request)  # its turn begins

    def hold(self, request: RequestState, keys: Sequence[OffloadKey]) -> int | None:
        """Give a request a ticket for readable blocks, without promoting any.

        Args:
            request: The request.
            keys: The keys, in prompt order.

        Returns:
            The number of blocks; the ticket names the first ones, as far as the budget goes. None
            if the request must wait for its ticket in the queue.
        """
        if request.ticket:
            named = frozenset(keys)
            self._release(request, [key for key in request.ticket if key not in named])
            return len(keys)
        if request.is_queued and list(request.wants) == list(keys):
            return None
        self.leave(request)
        request.wants = dict.fromkeys(keys)
        self._join(request)
        if self.is_head(request):
            self._serve(self._stepped_at_s)
        if request.is_queued:
            return None
        return len(keys) if request.ticket else 0

    def use(self, request: RequestState) -> None:
        """Record that a request loads blocks of its ticket, which ends with the step.

        The request may load more blocks in this step.
        """
        self._dequeue(request)
        if request.ticket:
            self._used.append(request)

    def leave(self, request: RequestState) -> None:
        """End a request's ticket, and its position in the queue; promotions in flight go on."""
        self._dequeue(request)
        if request.ticket:
            self._release(request, list(request.ticket))

    # -- prefetch -------------------------------------------------------------------------------

    @property
    def left_early(self) -> int:
        """How many more blocks early tickets may name; 0 while a request waits for room."""
        return 0 if self.queue else self.most_early - sum(new for _, new in self.early.values())

    def prefetch(
        self,
        request: RequestState,
        run: Sequence[OffloadKey],
        absent: dict[OffloadKey, int],
        *,
        is_cut: bool,
    ) -> bool:
        """Give a request that has not been looked up an early ticket; False without room.

        Args:
            request: The request; without a ticket, and not in the queue.
            run: The first blocks of its prompt, at most `left_early`.
            absent: Those of them that the primary lacks, and the tier to promote each from.
            is_cut: Whether the prompt is longer, and its next blocks were not looked up.
        """
        new = sum(key not in self._holders for key in run)
        request.wants = dict.fromkeys(run)
        if not (
            self._fits(request, run, absent) and self._grant(request, run, absent, is_early=True)
        ):
            return False
        self.early[request] = self._stepped_at_s, new
        request.is_cut = is_cut
        return True

    def give_way(self, count: int, share: Share) -> None:
        """End a tenant's early tickets, newest first, until `count` slots are free or evictable."""
        while self._primary.room_in(share) < count and self._end_newest(share):
            pass

    def _end_newest(self, share: Share) -> bool:
        """End a tenant's newest early ticket; return False if there is none."""
        own = (each for each in reversed(self.early) if self._share(each) is share)
        newest = next(own, None)
        if newest is not None:
            self._release(newest, list(newest.ticket))
        return newest is not None

    # -- stores ---------------------------------------------------------------------------------

    def room_for_store(self, count: int, share: Share, *, is_whole: bool, num_stored: int) -> int:
        """Return how many of `count` slots a store may take while a request waits.

        Stores get no slot that their tenant's first request in the queue needs, unless they have
        fewer than `reserved`.

        Args:
            count: Slots that the store asks for.
            share: The slots of its tenant.
            is_whole: Whether it takes all or none.
            num_stored: Blocks of stores: being written, pending for a tier, or in copies to one.
        """
        needed = 0 if self._head(share) is None else self._head_needs.get(share, 0)
        reserved = self.reserved_in(share)
        most = max(reserved - num_stored, self._primary.room_in(share) - needed, 0)
        granted = count if is_whole and most >= reserved else min(count, most)
        self._num_withheld += count - granted
        return granted

    def store_refused(self) -> None:
        """Record that a store has found too little room, so that unused tickets give way."""
        self._is_store_refused = True

    def guard_hits(self) -> None:
        """Pin the hits of this step until its end, as far as the budget goes.

        Call before a store evicts blocks.
        """
        fresh = dict.fromkeys(self.found[self._num_examined :])
        self._num_examined = len(self.found)
        guarded = {share: len(keys) for share, keys in self._primary.keys_by_share(self.guarded)}
        known = set(self.guarded)
        fresh_keys = [key for key in fresh if key not in self._holders and key not in known]
        for share, keys in self._primary.keys_by_share(fresh_keys):
            spare = max(0, self.left_in(share) - guarded.get(share, 0))
            answers = zip(keys, self._primary.lookup_many(keys), strict=True)
            hits = list(islice((key for key, answer in answers if answer is _HIT), spare))
            self._primary.pin(hits)
            self.guarded += hits

    def room_to_store(self, tier: int) -> int:
        """Return how many more blocks may be copied to a tier now."""
        state = self._tiers[tier]
        return max(0, self.copies_each - state.cascading_blocks) if state.takes_slots else 0

    # -- ends of writes -------------------------------------------------------------------------

    def land(self, keys: Sequence[OffloadKey]) -> None:
        """Make promoted blocks readable, and pin those that tickets name."""
        self._end_flight(keys)
        self._primary.complete_write(keys, success=True)
        self.written(keys)

    def fail(
        self, tier: int, keys: Sequence[OffloadKey], *, orphaned: bool, is_early: bool
    ) -> None:
        """End failed promotions: their keys become absent, for every ticket that names them.

        Args:
            tier: The tier that did not deliver the blocks.
            keys: Their keys.
            orphaned: Whether the copy still runs; then the slots are held until its end.
            is_early: Whether the promotion was a prefetch: requests may try the tier again.
        """
        self._end_flight(keys)
        if orphaned:
            self._primary.orphan_write(keys)
        else:
            self._primary.complete_write(keys, success=False)
        self.unwritten(keys, tier, may_retry=is_early)

    def written(self, keys: Sequence[OffloadKey]) -> None:
        """Pin newly readable blocks that tickets name; a ticket that awaits no more has landed."""
        if not self._awaited:
            return
        named = [key for key in keys if key in self._awaited]
        self._primary.pin(named)
        for key in named:
            for request in self._awaited.pop(key):
                request.awaits -= 1
                if not request.awaits:
                    self._note_landed(request)

    def unwritten(
        self, keys: Sequence[OffloadKey], tier: int | None = None, *, may_retry: bool = False
    ) -> None:
        """Shorten the tickets that name blocks whose write has failed.

        A ticket ends before the first of them. If another tier has one, the whole ticket ends,
        and the request asks again.

        Args:
            keys: The keys, which are absent now.
            tier: The tier whose copy failed; None for a store.
            may_retry: Whether requests may be promoted from this tier again.
        """
        absent = frozenset(keys)
        waiting = [request for key in keys for request in self._awaited.get(key, ())]
        for request in dict.fromkeys(waiting):
            named = list(request.ticket)
            first = next(index for index, key in enumerate(named) if key in absent)
            if tier is not None and not may_retry:
                request.failed.update((tier, key) for key in named if key in absent)
            (elsewhere,) = self._find([named[first]], request)
            self._release(request, named[first:] if elsewhere is None else named)
            if request.ticket and not request.awaits:
                self._note_landed(request)
            self._notify(request)

    def cut(self, holders: Iterable[RequestState], keys: AbstractSet[OffloadKey]) -> None:
        """End tickets before the first of blocks that are being deleted."""
        cut = self._holders.keys() & keys
        for request in holders if cut else ():
            if request.ticket.keys().isdisjoint(cut):
                continue
            named = list(request.ticket)
            first = next(index for index, key in enumerate(named) if key in cut)
            self._release(request, named[first:])
            if request.ticket and not request.awaits:
                self._note_landed(request)
            self._notify(request)

    # -- steps ----------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Count the time since the last step, if a request or a store waited for room in it."""
        if self._is_contended:
            self._contended_s += max(0.0, now_s - self._stepped_at_s)
        self._stepped_at_s = now_s

    def serve_first(self) -> None:
        """Serve the queue at a step's start, after ended jobs are applied, before any lookup."""
        self._serve(self._stepped_at_s)

    def end_step(self) -> bool:
        """Queue the requests that were deferred in this step, and serve the queue.

        Returns:
            Whether promotions may have been given up for it: their results are to be collected.
        """
        now_s = self._stepped_at_s
        if self.guarded:
            self._primary.unpin(self.guarded)
            self.guarded.clear()
        for request in self._used:
            if not request.waits:  # unless a later lookup has made it wait again
                self.leave(request)
        self._used.clear()
        if self._rounds:
            self._end_rounds()
        oldest = next(iter(self.early.items()), None)
        if oldest is not None and now_s - oldest[1][0] > self.early_s:
            self.leave(oldest[0])
        asking = len(self._waiting)
        if asking:
            heads = [next(iter(waiting)) for waiting in self._waiting.values()]
            silent = [head for head in heads if now_s - head.asked_at_s > TURN_S]
            for head in silent:
                self._dequeue(head)
            asking -= len(silent)
        self._is_contended = self._is_store_refused or asking > 0
        self._is_store_refused = False
        if self._is_contended:
            self._give_up_silent(now_s)
        if self._is_contended or self.queue:
            self._serve(now_s, counts=True)
        return self._is_contended

    def reset(self) -> None:
        """Drop all tickets and the queue; call before `Primary.reset`."""
        requests = {request for waiting in self._awaited.values() for request in waiting}
        for request in requests.union(self.queue, self._landed):
            request.wants, request.ticket = {}, {}
            request.awaits, request.is_queued, request.blocked_since_s = 0, False, None
        for table in (
            self.queue,
            self._waiting,
            self._holders,
            self._awaited,
            self._landed,
            self.early,
        ):
            table.clear()
        self.in_flight.clear()
        for step in (self._rounds, self._used, self.guarded, self.found):
            step.clear()
        self._named_in = dict.fromkeys(self._named_in, 0)
        self._num_examined = 0
        self._version += 1

    # -- internal -------------------------------------------------------------------------------

    def _end_rounds(self) -> None:
        """Queue the requests whose lookups were deferred, with all keys that they looked up."""
        ends = [start for _, start in self._rounds[1:]] + [len(self.found)]
        asked: dict[RequestState, list[OffloadKey]] = {}
        for (request, start), end in zip(self._rounds, ends, strict=True):
            asked.setdefault(request, []).extend(self.found[start:end])
        for request, keys in asked.items():
            if request.is_expired:
                self.leave(request)
            elif request.waits and request.is_deferred and all(request.searched.values()):
                self._want(request, keys)
            asks_again = request.waits and request.is_deferred and not request.is_queued
            request.again, request.searched = (request.searched if asks_again else ()), {}
            if not request.is_deferred:
                request.end_deferral()
            request.is_deferred = request.is_refused = False
        self._rounds.clear()
        self.found.clear()
        self._num_examined = 0

    def _want(self, request: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Queue a request for room, unless it has a ticket and none of these keys is new."""
        positions = request.ctx.key_positions
        if not (request.ticket or request.is_queued):
            request.wants = dict.fromkeys(in_prompt_order(keys, positions))
        elif any(key not in request.wants for key in keys):
            self._release(request, list(request.ticket))
            wants = in_prompt_order([*request.wants, *keys], positions)
            request.wants = dict.fromkeys(wants)
        elif request.ticket:
            return
        self._join(request)

    def _join(self, request: RequestState) -> None:
        share = self.queue.setdefault(request, self._share(request))
        self._waiting.setdefault(share, {})[request] = None
        request.is_queued = True
        self._version += 1

    def _dequeue(self, request: RequestState) -> None:
        if request.is_queued:
            share = self.queue.pop(request)
            del self._waiting[share][request]
            if not self._waiting[share]:
                del self._waiting[share]
            request.is_queued, request.blocked_since_s = False, None
            self._primary.allow_anew(self._num_withheld)  # what the head needs has changed
            self._num_withheld = 0

    def _refuse(self, request: RequestState) -> None:
        self._dequeue(request)
        request.is_refused = True
        self._notify(request)

    def _serve(self, now_s: float, *, counts: bool = False) -> None:
        """Grant tickets from the head of the queue, while they fit.

        Args:
            now_s: Time of the step, in seconds.
            counts: Whether turns end, and the head's wait counts: at the end of a step.
        """
        while counts and self._landed:  # at a step's start, the holder has not had its chance yet
            holder, since_s = next(iter(self._landed.items()))
            if self._contended_s - since_s <= TURN_S:
                break
            self._release(holder, list(holder.ticket))
            self._notify(holder)
        for share in tuple(self._waiting):
            while (head := self._head(share)) is not None:
                is_starved = counts and self._is_starved(head, now_s)
                state = head, self._version, self._primary.room_made
                if self._blocked_at.get(share) == state and not is_starved:
                    break
                is_due = is_starved or now_s - self._searched_s[share] >= TURN_S
                run, absent = self._run_of(head, now_s, is_due=is_due)
                if not run:
                    self._refuse(head)
                elif self._fits(head, run, absent) and self._grant(head, run, absent):
                    self._blocked_at.pop(share, None)
                elif self._end_newest(share):
                    continue
                elif is_starved:
                    self._grant_part(head, run, absent)
                else:
                    self._blocked_at[share] = head, self._version, self._primary.room_made
                    readable = [key for key in run if key not in absent]
                    own = self._primary.room_in(share)
                    own -= self._primary.room_excluding(share, readable)
                    self._head_needs[share] = len(absent) + own
                    break

    def _share(self, request: RequestState) -> Share:
        return request.share or self._primary.shares[0]

    def _head(self, share: Share) -> RequestState | None:
        """Return a tenant's first request in the queue."""
        return next(iter(self._waiting.get(share, ())), None)

    def _run_of(
        self, request: RequestState, now_s: float, *, is_due: bool
    ) -> tuple[list[OffloadKey], dict[OffloadKey, int]]:
        """Return the leading run of keys for a request's ticket, and its absent keys with tiers.

        A search in the tiers costs time per block, so a run that does not fit is searched only when
        `is_due`; otherwise all that the request wants counts as found.
        """
        share = self._share(request)
        keys = list(islice(request.wants, self.budget_in(share)))
        answers = zip(keys, self._primary.lookup_many(keys), strict=True)
        missing = [key for key, answer in answers if answer is _MISS]
        absent = dict.fromkeys(missing, 0)
        if not is_due and not self._fits(request, keys, absent):
            return keys, absent
        self._searched_s[share] = now_s
        for key, tier in zip(missing, self._find(missing, request), strict=True):
            if tier is None:
                run = keys[: keys.index(key)]
                return run, {key: absent[key] for key in run if key in absent}
            absent[key] = tier
        return keys, absent

    def _fits(
        self, request: RequestState, run: Sequence[OffloadKey], absent: Collection[OffloadKey]
    ) -> bool:
        """Return whether a run fits next to the tickets, and its absent blocks into the primary."""
        holders, in_flight, share = self._holders, self.in_flight, self._share(request)
        new = [key for key in run if key not in holders and key not in in_flight]
        if len(new) > self.left_in(share):
            return False
        return len(absent) <= self._primary.room_excluding(
            share, [key for key in run if key not in absent]
        )

    def _is_starved(self, head: RequestState, now_s: float) -> bool:
        """Return whether the head has waited `TURN_S` seconds with no ticket or promotion left."""
        if self._named_in[self._share(head)]:
            return False
        if head.blocked_since_s is None:
            head.blocked_since_s = now_s
        return now_s - head.blocked_since_s >= TURN_S

    def _grant_part(
        self, head: RequestState, run: Sequence[OffloadKey], absent: dict[OffloadKey, int]
    ) -> None:
        """Grant the longest leading part of a run that fits; if none does, end the wait."""
        fitting, too_long = 0, len(run)
        while too_long - fitting > 1:
            middle = (fitting + too_long) // 2
            part = run[:middle]
            if self._fits(head, part, [key for key in part if key in absent]):
                fitting = middle
            else:
                too_long = middle
        part = run[:fitting]
        needed = {key: absent[key] for key in part if key in absent}
        if not part or not self._grant(head, part, needed):
            self._refuse(head)

    def _grant(
        self,
        request: RequestState,
        run: Sequence[OffloadKey],
        absent: dict[OffloadKey, int],
        *,
        is_early: bool = False,
    ) -> bool:
        """Pin a run and promote its absent blocks, one job per tier; False if slots are short."""
        holders, in_flight = self._holders, self.in_flight
        states = zip(run, self._primary.lookup_many(run), strict=True)
        being_written = {key for key, state in states if state is not _HIT}
        new = [key for key in run if key not in holders]
        pinned = [key for key in new if key not in being_written]
        self._primary.pin(pinned)
        slots = self._primary.reserve(list(absent))
        if len(slots) < len(absent):  # the policy has found too few victims
            self._primary.unpin(pinned)
            return False
        self._dequeue(request)
        self._named_in[self._share(request)] += len(new) - len(in_flight.intersection(new))
        for key in run:
            holders[key] = holders.get(key, 0) + 1
        for key in run if being_written else ():
            if key in being_written:
                self._awaited.setdefault(key, []).append(request)
        request.ticket = {key: key in absent for key in run}
        request.awaits = len(being_written)
        request.blocked_since_s = None
        in_flight.update(absent)
        jobs: dict[int, tuple[list[OffloadKey], list[int]]] = {}
        for (key, tier), slot in zip(absent.items(), slots, strict=True):
            keys, job_slots = jobs.setdefault(tier, ([], []))
            keys.append(key)
            job_slots.append(slot)
        for tier, (keys, job_slots) in jobs.items():
            self._submit(tier, request.ctx, keys, job_slots, is_early)
        if not being_written:
            self._note_landed(request)
        if not being_written or len(run) < len(request.wants):
            self._notify(request)
        self._version += 1
        return True

    def _release(self, request: RequestState, keys: Iterable[OffloadKey]) -> None:
        """Remove keys from a request's ticket; a ticket without keys has ended."""
        holders, awaited, share = self._holders, self._awaited, self._share(request)
        last: list[OffloadKey] = []
        for key in keys:
            del request.ticket[key]
            waiting = awaited.get(key)
            if waiting is not None:
                waiting.remove(request)
                request.awaits -= 1
            holders[key] -= 1
            if holders[key]:
                continue
            del holders[key]
            self._named_in[share] -= key not in self.in_flight
            if waiting is None:
                last.append(key)
            else:
                del awaited[key]
        self._primary.unpin(last)
        if not request.ticket:
            self._landed.pop(request, None)
            self.early.pop(request, None)
        self._version += 1

    def _end_flight(self, keys: Sequence[OffloadKey]) -> None:
        self.in_flight.difference_update(keys)
        for share, own in self._primary.keys_by_share(keys):
            self._named_in[share] -= len(own) - sum(map(self._holders.__contains__, own))
        self._version += 1

    def _note_landed(self, request: RequestState) -> None:
        self._landed[request] = self._contended_s

    def _notify(self, request: RequestState) -> None:
        """Notify the listeners of a request's keys that it should repeat its lookups."""
        if self._primary.decided is not None:
            self._primary.decided(list(request.wants))

    def _give_up_silent(self, now_s: float) -> None:
        """Give up the promotions of silent tiers, because others wait for their slots."""
        for tier in self._tiers:
            if not tier.falls_silent(now_s):
                continue
            tier.is_silent = True
            error = TierTimeoutError(f"no copy of tier {tier.name} has ended; others wait for room")
            for job_id in tier.jobs.ids_in(JobState.FLYING):
                if tier.jobs.job_of(job_id).is_promotion:
                    tier.jobs.handle(JobAbandoned(job_id, error))


class RoomWatch:
    """Limits how many blocks of a partly granted store are offered again in a step.

    Otherwise each step would pay for an offer of all blocks that have found no room.
    """

    def __init__(self) -> None:
        """Start with no blocks left out."""
        self._seen: int | None = None

    def most_blocks(self, room_made: int) -> int | None:
        """Return the number of blocks that may fit now; None: no blocks were left out.

        Args:
            room_made: See `OffloadingManager.room_made`.
        """
        return None if self._seen is None else room_made - self._seen

    def blocks_left_out(self, room_made: int) -> None:
        """Record that an offer was granted in part; `room_made` is its value after the offer."""
        self._seen = room_made

    def blocks_placed(self, count: int, room_made: int) -> None:
        """Record that `count` blocks of a repeated offer were granted.

        They may be more than `room_made` has grown: there may have been room before that was too
        small for the blocks of one token.
        """
        if self._seen is not None:
            self._seen = min(self._seen + count, room_made)

    def clear(self) -> None:
        """Record that no blocks wait for room any more."""
        self._seen = None
