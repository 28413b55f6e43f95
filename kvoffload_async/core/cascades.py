"""Cascades: what is stored goes on to the tiers; what finds no room there now goes later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvoffload_async.core.backlog import Backlog
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.own_context import OwnContext
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.shares import Shares
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    StateError,
    TierClosedError,
    TierFullError,
)
from kvoffload_async.statistics import DropReason
from kvoffload_async.types import JobMetadata, JobResult, LookupResult, OffloadKey, ReqContext

Submit = Callable[[int, ReqContext, Sequence[OffloadKey], Sequence[int]], None]
"""Submits a cascade: tier, context, keys, and their slots, which are pinned."""

LATE_BLOCKS_A_STEP: Final = 256
"""How many owed blocks a step submits to a tier, besides as many as were added in the step."""

_FINAL: Final = (
    BlockMissingError,
    CorruptBlockError,
    StateError,
    TierClosedError,
    TierFullError,
)
"""Errors of stores after which another try would end alike."""


class Cascades:
    """Sends readable blocks to the tiers, each as many as it takes, and remembers the rest.

    What a tier does not take now (its bound is reached, its breaker is open, it is under pressure,
    or its store failed for a reason that may pass) it is *owed*, in the order in which it came,
    and gets as soon as there is room. It is lost only if it is evicted first; then it is counted
    as dropped. Owed blocks are not pinned; but as long as their tier is in order, they are evicted
    last, or not at all. A late cascade belongs to no request.

    Thread: owner.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        shares: Shares,
        own: OwnContext,
        submit: Submit,
    ) -> None:
        """Start with nothing owed.

        Args:
            primary: Where the blocks lie.
            tiers: Where they go.
            shares: How many blocks may be in cascade to a tier at once.
            own: The context of late cascades.
            submit: See `Submit`.
        """
        self._primary = primary
        self._tiers = tiers
        self._shares = shares
        self._own = own
        self._submit = submit
        self.backlogs = [
            Backlog(primary.num_slots, primary.protect, primary.unprotect) for _ in tiers
        ]
        """What each tier is owed. To be read only."""
        self.parking: dict[ReqContext, RequestState] = {}
        """The requests with keys that another request is writing."""
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether a step is needed: something is parked, or owed to a tier that may take it."""
        if self.parking:
            return True
        return any(
            backlog.count and not backlog.is_shut and self.room(index)
            for index, backlog in enumerate(self.backlogs)
        )

    @property
    def owes_anything(self) -> bool:
        """Whether some tier is owed something."""
        return any(backlog.count for backlog in self.backlogs)

    def wakes_in_s(self, now_s: float) -> float | None:
        """Return in how many seconds a step can send something that is owed.

        None: nothing is owed, or only what waits for the end of another job. 0: also if the step
        has not looked at all that a tier is owed, which has failed or works again.
        """
        if any(backlog.is_heeding for backlog in self.backlogs):
            return 0.0
        waits = [
            max(0.0, backlog.paused_until_s - now_s)
            for index, backlog in enumerate(self.backlogs)
            if backlog.count and self.room(index)
        ]
        return min(waits, default=None)

    # -- what is stored -------------------------------------------------------------------------

    def send(
        self, index: int, request: RequestState, keys: Sequence[OffloadKey], now_s: float
    ) -> None:
        """Cascade readable keys: as long a head of them as the tier takes now; owe it the rest."""
        backlog = self.backlogs[index]
        taken = keys[:0]
        if not backlog.count:  # else: first come, first served
            room = self.room(index)
            if room and self._takes_store(index, now_s):
                taken = keys[:room]
        if taken:
            slots = self._primary.pin(taken)
            backlog.began(slots)
            self._submit(index, request.ctx, taken, slots)
        rest = keys[len(taken) :]
        if rest:
            backlog.new_blocks += self.owe(index, rest, now_s)

    def send_present(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        new: Collection[OffloadKey],
        now_s: float,
    ) -> None:
        """Send what is readable to the tiers that want whole requests; park what is not yet."""
        readable = []
        for key in dict.fromkeys(keys):
            answer = self._primary.lookup(key)
            if answer is LookupResult.HIT:
                readable.append(key)
            elif answer is LookupResult.HIT_PENDING and key not in new:
                request.parked[key] = None
        if request.parked:
            self.parking[request.ctx] = request
        self._send_to_request_level(request, readable, now_s)

    def owe(self, index: int, keys: Sequence[OffloadKey], now_s: float) -> int:
        """Owe a tier those of the keys that are readable, and not on their way; return how many."""
        if self._is_closed:
            return 0
        added = self.backlogs[index].add(self._primary.readable_slots(keys), now_s)
        self._watch_evictions()
        return added

    def offer_faster(self, index: int, keys: Sequence[OffloadKey], now_s: float) -> None:
        """Offer what a tier has given to those before it that are known to lack it."""
        for faster in range(index):
            lacking = self._tiers[faster].lacks(keys)
            if lacking:
                self.owe(faster, lacking, now_s)

    # -- steps ----------------------------------------------------------------------------------

    def retry_parked(self, now_s: float) -> list[RequestState]:
        """Send what was parked and is readable; return the requests that wait for nothing more."""
        done = []
        for request in list(self.parking.values()):
            readable = []
            for key in list(request.parked):
                answer = self._primary.lookup(key)
                if answer is not LookupResult.HIT_PENDING:
                    del request.parked[key]
                if answer is LookupResult.HIT:
                    readable.append(key)
            self._send_to_request_level(request, readable, now_s)
            if not request.parked:
                del self.parking[request.ctx]
                done.append(request)
        return done

    def send_owed(self, now_s: float) -> None:
        """Send the tiers what they are owed: a bounded number of blocks, however many there are.

        What a tier that has failed is owed is not protected from eviction until it works again.
        """
        for index, backlog in enumerate(self.backlogs):
            backlog.heed(is_wanted=self._tiers[index].wants_blocks)
            most = LATE_BLOCKS_A_STEP + backlog.new_blocks
            backlog.new_blocks = 0
            if backlog.count and now_s >= backlog.paused_until_s:
                self._send_owed_to(index, most, now_s)

    # -- how jobs end ---------------------------------------------------------------------------

    def ended(self, index: int, job: JobMetadata, result: JobResult, now_s: float) -> None:
        """Take in the result of a cascade; the blocks that a passing fault has hit are owed."""
        backlog = self.backlogs[index]
        backlog.is_shut = not self._tiers[index].may_store(now_s)
        if result.success:
            backlog.resume()
        elif not isinstance(result.error, _FINAL):
            backlog.pause(now_s)
        if result.disowned:
            return  # the copy may still end well; see `released`
        self._primary.unpin(job.keys)
        landed = job.keys if result.success else result.successful_keys or ()
        self._settle(index, job, landed, result.error, now_s)

    def released(self, index: int, record: JobRecord, now_s: float) -> None:
        """Learn that the copy of an overdue cascade has ended, well or not."""
        self._primary.unpin(record.job.keys)
        tier, keys = self._tiers[index], record.job.keys
        # A tier that is not known to lack a block may have it: storing it again costs nothing then.
        landed = frozenset(keys).difference(tier.lacks(keys)) if tier.is_exact else frozenset()
        self._settle(index, record.job, landed, None, now_s)

    # -- the end --------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget everything: the primary is about to be emptied. What is owed is lost."""
        for tier in self._tiers:
            late = (record for record in tier.jobs.disowned() if not record.holds_slots)
            # Nobody will know their slots when the copies end.
            tier.counters.failed_store_blocks += sum(len(record.job.keys) for record in late)
        self._drop_all("reset")

    def close(self) -> None:
        """Owe nothing any more: what still is owed is lost."""
        self._is_closed = True
        self._drop_all("closed")

    # -- inside ---------------------------------------------------------------------------------

    def room(self, index: int) -> int:
        """Return how many more blocks may be in cascade to a tier."""
        return self._shares.room_to_store(index)

    def _takes_store(self, index: int, now_s: float) -> bool:
        """Ask a tier whether it takes a job now; one that does not is left alone for a moment."""
        tier, backlog = self._tiers[index], self.backlogs[index]
        if tier.takes_store(now_s):
            backlog.is_shut = False
            return True
        backlog.pause(now_s)
        backlog.is_shut = not tier.may_store(now_s)
        return False

    def _send_to_request_level(
        self, request: RequestState, keys: Sequence[OffloadKey], now_s: float
    ) -> None:
        if keys:
            for index in request.request_level_tiers:
                self.send(index, request, keys, now_s)

    def _send_owed_to(self, index: int, most: int, now_s: float) -> None:
        backlog = self.backlogs[index]
        room = self.room(index)
        if not room or not self._takes_store(index, now_s):
            return
        slots = backlog.oldest(min(room, most))
        keys = self._primary.keys_of(slots)
        self._primary.pin(keys)
        backlog.began(slots)
        tier = self._tiers[index]
        tier.counters.late_blocks += len(keys)
        self._submit(index, self._own.within(tier), keys, slots)
        self._watch_evictions()

    def _settle(
        self,
        index: int,
        job: JobMetadata,
        landed: Collection[OffloadKey],
        error: Exception | None,
        now_s: float,
    ) -> None:
        """Unmark the blocks of a copy that has ended; owe those that it may pay to try again."""
        tier, backlog = self._tiers[index], self.backlogs[index]
        slots = job.block_ids.tolist()
        if len(landed) == len(slots):
            backlog.ended(slots)
            return
        missed = [s for s, key in zip(slots, job.keys, strict=True) if key not in landed]
        if isinstance(error, _FINAL) or self._is_closed:
            backlog.ended(slots)
            tier.counters.failed_store_blocks += len(missed)
            return
        backlog.ended(s for s, key in zip(slots, job.keys, strict=True) if key in landed)
        # While a tier is out of order no block is to blame: the breaker bounds the tries.
        counts = tier.may_store(now_s)
        tier.counters.failed_store_blocks += backlog.failed(missed, now_s, counts=counts)
        self._watch_evictions()

    def _drop_all(self, reason: DropReason) -> None:
        for request in self.parking.values():
            request.parked.clear()
        self.parking.clear()
        for tier, backlog in zip(self._tiers, self.backlogs, strict=True):
            tier.counters.drop(reason, backlog.clear())
        self._watch_evictions()

    def _watch_evictions(self) -> None:
        """Have the primary tell of evictions, as long as something is owed."""
        self._primary.on_evicted = self._evicted if self.owes_anything else None

    def _evicted(self, slots: Sequence[int]) -> None:
        for tier, backlog in zip(self._tiers, self.backlogs, strict=True):
            if backlog.count:
                tier.counters.drop("evicted", backlog.forget(slots))
        self._watch_evictions()
