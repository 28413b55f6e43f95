"""Cascades: copies of stored blocks to the secondary tiers, and reports of block reuse.

A block without room in the copies to a tier is *pending* for the tier; it is queued by its slot.

    unmarked --add--> pending --began--> under way --succeeded, or given up--> unmarked
    pending --forget (evicted)--> unmarked         under way --failed--> pending, at the tail

Once per step, each tier is notified of the blocks that requests have reused. Otherwise it would
evict the blocks that the primary serves most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from math import inf
from typing import Final

from kvoffload_async.core.admission import Admission
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    StateError,
    TierClosedError,
    TierFullError,
)
from kvoffload_async.statistics import DropReason
from kvoffload_async.tables.arrays import small_integers
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.tables.lists import NumberLists
from kvoffload_async.types import (
    ENGINE_REQ_ID,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    ReqContext,
)


class EngineContext:
    """The engine's internal request, to which late cascades belong; its id is reserved.

    It lives as long as the planner. `close` notifies only the tiers that have used it.
    """

    def __init__(self) -> None:
        self.ctx = ReqContext(ENGINE_REQ_ID)
        self._users: list[TierState] = []

    def within(self, tier: TierState) -> ReqContext:
        """Return the engine's request for a tier's job or touch; record that the tier uses it."""
        if tier not in self._users:
            self._users.append(tier)
        return self.ctx

    def close(self) -> None:
        """End the engine's request in all tiers that used it; idempotent."""
        users, self._users = self._users, []
        for tier in users:
            tier.finish_request(self.ctx)


_PENDING: Final = 1
_UNDER_WAY: Final = 2
_A_TRY: Final = 4
"""A block's mark is one byte: its state flags, plus `_A_TRY` for each failed store of it."""
_PROTECTED: Final = 128

_MOST_TRIES: Final = 8
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0
_SLOTS_A_STEP: Final = 4096
"""Maximum number of slots that `update_protection` scans per step."""

Protect = Callable[[Sequence[int]], object]
"""Protects the blocks in the given slots from eviction, or ends the protection."""


class WriteBackQueue:
    """FIFO queue of the resident blocks that are pending for one tier.

    Memory: 9 bytes per slot of the primary, without objects for the garbage collector.

    Attributes:
        count: Number of pending blocks.
        new_blocks: Number of blocks added by the current step's stores.
        is_shut: Whether the tier was closed or suspended at the last check.
        is_wanted: Whether the tier accepts pending blocks; if so, they are protected.
        paused_until_s: Earliest time, in seconds, of the next store, after the tier has refused
            or failed one.
        protecting_from: Slot at which `update_protection` continues; None if its scan is complete.
    """

    def __init__(self, num_slots: int, protect: Protect, unprotect: Protect) -> None:
        """Create an empty queue for a primary of `num_slots` slots."""
        self._protect = protect
        self._unprotect = unprotect
        self._oldest_first = NumberLists(num_slots)
        self._marks = small_integers(num_slots)
        self._pause_s = _FIRST_PAUSE_S
        self.count = 0
        self.new_blocks = 0
        self.is_shut = False
        self.is_wanted = True
        self.protecting_from: int | None = None
        self.paused_until_s = 0.0

    # -- blocks ---------------------------------------------------------------------------------

    def add(self, slots: Iterable[int]) -> int:
        """Queue the blocks in `slots` that are not queued or under way; return the number added."""
        marks = self._marks
        new = [slot for slot in slots if not marks[slot] & (_PENDING | _UNDER_WAY)]
        for slot in new:
            marks[slot] |= _PENDING
        self._append(new)
        return len(new)

    def has_any(self, slots: Iterable[int]) -> bool:
        """Return whether the block in some of these slots is queued or under way."""
        marks = self._marks
        return any(marks[slot] & (_PENDING | _UNDER_WAY) for slot in slots)

    def oldest(self, count: int) -> list[int]:
        """Return the slots of the `count` oldest pending blocks, or of all if fewer."""
        return list(islice(self._oldest_first.walk(), count))

    def began(self, slots: Sequence[int]) -> None:
        """Mark the blocks in `slots` as under way to the tier, and remove them from the queue."""
        marks = self._marks
        if self.count:
            pending = [slot for slot in slots if marks[slot] & _PENDING]
            self._remove(pending)
            for slot in pending:
                marks[slot] -= _PENDING
        for slot in slots:
            marks[slot] |= _UNDER_WAY

    def ended(self, slots: Iterable[int]) -> None:
        """Clear the marks of blocks whose copy has ended and is not retried."""
        marks = self._marks
        if not self.count:
            for slot in slots:
                marks[slot] = 0
            return
        for slot in slots:
            # The block may have become pending again while this copy ran.
            marks[slot] &= _PENDING | _PROTECTED

    def failed(self, slots: Sequence[int], *, counts: bool) -> int:
        """Queue blocks again after a failed copy; return the number of blocks that are given up.

        Args:
            slots: Slots of the blocks.
            counts: Whether the failure counts toward the `_MOST_TRIES` tries of each block.
        """
        marks = self._marks
        again: list[int] = []
        given_up = 0
        for slot in slots:
            mark = marks[slot] & ~_UNDER_WAY
            if mark & _PENDING:
                pass
            elif mark + _A_TRY * counts < _MOST_TRIES * _A_TRY:
                mark += _A_TRY * counts + _PENDING
                again.append(slot)
            else:
                mark = 0
                given_up += 1
            marks[slot] = mark
        self._append(again)
        return given_up

    def forget(self, slots: Iterable[int]) -> int:
        """Remove evicted blocks from the queue; return how many were pending."""
        marks = self._marks
        lost = [slot for slot in slots if marks[slot]]
        self._remove(lost)
        for slot in lost:
            marks[slot] = 0
        return len(lost)

    def drop(self, slots: Iterable[int]) -> int:
        """Remove blocks to be deleted from the queue; return how many. Copies under way go on."""
        marks = self._marks
        dropped = [slot for slot in slots if marks[slot] & _PENDING]
        self._remove(dropped)
        for slot in dropped:
            marks[slot] &= _UNDER_WAY
        return len(dropped)

    def clear(self) -> int:
        """Empty the queue and clear all marks; return how many blocks were pending."""
        lost = self.count
        self._stop_protecting(list(self._oldest_first.walk()))
        self._oldest_first.clear()
        self._marks = small_integers(len(self._marks))
        self.count = self.new_blocks = 0
        self.is_shut = False
        self.resume()
        return lost

    # -- protection -----------------------------------------------------------------------------

    def update_protection(self, *, is_wanted: bool) -> None:
        """Protect the pending blocks if the tier accepts them; otherwise end their protection.

        Each call scans a bounded range of slots and continues where the last one stopped.
        """
        if is_wanted != self.is_wanted:
            self.is_wanted = is_wanted
            self.protecting_from = 0
        marks, first = self._marks, self.protecting_from or 0
        slots = range(first, min(first + _SLOTS_A_STEP, len(marks)))
        self.protecting_from = slots.stop if slots.stop < len(marks) else None
        pending = [slot for slot in slots if marks[slot] & _PENDING]
        if not is_wanted:
            self._stop_protecting(pending)
            return
        pending = [slot for slot in pending if not marks[slot] & _PROTECTED]
        for slot in pending:
            marks[slot] |= _PROTECTED
        self._protect(pending)

    # -- pauses ---------------------------------------------------------------------------------

    def pause(self, now_s: float) -> None:
        """Pause stores to the tier, with exponential back-off."""
        if now_s >= self.paused_until_s:
            self.paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def resume(self) -> None:
        """Resume stores to the tier and reset the back-off, after a successful store."""
        self.paused_until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    # -- inspection -----------------------------------------------------------------------------

    def slots(self) -> Iterator[int]:
        """Iterate over the slots of pending blocks, oldest first. For invariants."""
        return self._oldest_first.walk()

    def protected(self) -> Iterator[int]:
        """Iterate over the slots of protected blocks. For invariants."""
        return (slot for slot, mark in enumerate(self._marks) if mark & _PROTECTED)

    def violations(self, under_way: set[int]) -> Iterator[str]:
        """Iterate over descriptions of the queue's violated invariants. For inspection.

        Args:
            under_way: The slots whose copies to the tier may still run.
        """
        pending = set(self._oldest_first.walk())
        if len(pending) != self.count:
            yield f"{self.count} blocks are counted as pending, but {len(pending)} are"
        for slot, mark in enumerate(self._marks):
            if bool(mark & _PENDING) != (slot in pending):
                yield f"slot {slot} has mark {mark}, but is pending: {slot in pending}"
            if mark & _UNDER_WAY and slot not in under_way:
                yield f"slot {slot} is marked as under way, but no copy reads it"
            if mark and not mark & (_PENDING | _UNDER_WAY):
                yield f"slot {slot} has mark {mark}, but is neither pending nor under way"
            if mark & _PROTECTED and slot not in pending:
                yield f"slot {slot} is protected, but not pending"
            if (
                slot in pending
                and self.protecting_from is None
                and self.is_wanted != bool(mark & _PROTECTED)
            ):
                yield f"slot {slot} has mark {mark}, but is_wanted is {self.is_wanted}"

    # -- internal -------------------------------------------------------------------------------

    def _append(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        self._oldest_first.append(slots)
        self.count += len(slots)
        if self.is_wanted:
            for slot in slots:
                self._marks[slot] |= _PROTECTED
            self._protect(slots)

    def _remove(self, slots: Sequence[int]) -> None:
        self._oldest_first.remove(slots)
        self.count -= len(slots)
        self._stop_protecting(slots)

    def _stop_protecting(self, slots: Sequence[int]) -> None:
        marks = self._marks
        protected = [slot for slot in slots if marks[slot] & _PROTECTED]
        for slot in protected:
            marks[slot] -= _PROTECTED
        self._unprotect(protected)


Submit = Callable[[int, ReqContext, Sequence[OffloadKey], Sequence[int]], None]
"""Submits a cascade: tier index, context, keys, and their slots, which must be pinned."""

LATE_BLOCKS_A_STEP: Final = 256
"""Maximum number of pending blocks that a step submits to a tier, beyond the number it queued."""

_NO_REQUEST: Final = ReqContext("")

_FINAL: Final = (
    BlockMissingError,
    CorruptBlockError,
    StateError,
    TierClosedError,
    TierFullError,
)
"""Errors of stores that a retry would not fix."""


class Cascades:
    """Sends readable blocks to the tiers, up to each tier's limit, and queues the rest.

    A block that a tier cannot take now is *pending*: the limit is reached, the breaker is open,
    back-pressure applies, or its store failed with a transient error. Pending blocks are sent in
    FIFO order once there is room. A pending block that is evicted first is counted as dropped.
    Pending blocks are not pinned, but while their tier works they are evicted last or never. A
    cascade of pending blocks is *late*: it belongs to no request of the scheduler.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[TierState],
        room_to_store: Callable[[int], int],
        own: EngineContext,
        submit: Submit,
    ) -> None:
        """Start with no pending blocks.

        Args:
            primary: The primary tier.
            tiers: The secondary tiers.
            room_to_store: Returns how many more blocks may be copied to a tier now.
            own: The request of late cascades.
            submit: See `Submit`.
        """
        self._primary = primary
        self._tiers = tiers
        self._room_to_store = room_to_store
        self._own = own
        self._submit = submit
        self.queues = [
            WriteBackQueue(primary.num_slots, primary.protect, primary.unprotect) for _ in tiers
        ]
        """The pending blocks of each tier. Read-only."""
        self.parking: dict[ReqContext, RequestState] = {}
        """The requests with parked keys, that is, keys that other requests are writing."""
        self._parked_for: dict[OffloadKey, list[RequestState]] = {}
        """Parked key -> requests that wait for its write to end."""
        self._written: list[OffloadKey] = []
        """Parked keys whose writes have ended in this step."""
        self.admission: Admission | None = None
        """Decides which blocks the tiers store; None: all blocks. Set before the first request."""
        self.on_declined: Callable[[ReqContext, int, int], None] | None = None
        """Called with a request, a tier and how many of the request's blocks the tier declines."""
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether a step is needed: a key is parked, or pending for a tier that may accept it."""
        if self.parking:
            return True
        return any(
            queue.count and not queue.is_shut and self._room_to_store(index)
            for index, queue in enumerate(self.queues)
        )

    @property
    def has_pending(self) -> bool:
        """Whether blocks are pending for some tier."""
        return any(queue.count for queue in self.queues)

    def wakes_in_s(self, now_s: float) -> float:
        """Return the seconds until a step can send a pending block.

        Infinity if no block is pending or all of them wait for a job to end. 0 also while a scan
        of `WriteBackQueue.update_protection` is incomplete.
        """
        soonest_s = inf
        for index, queue in enumerate(self.queues):
            if queue.protecting_from is not None:
                return 0.0
            if queue.count and self._room_to_store(index):
                soonest_s = min(soonest_s, max(0.0, queue.paused_until_s - now_s))
        return soonest_s

    # -- stored blocks --------------------------------------------------------------------------

    def end_request(self, request: RequestState) -> None:
        """Queue or decline a request's undecided blocks; call before `Primary.close_request`."""
        if self.admission is None:
            return
        for index, waiting in request.undecided_blocks.items():
            keys = tuple(waiting)
            stored, _ = self.admission.split(index, request.ctx, keys, is_final=True)
            added = self.defer(index, stored)
            self._decline(index, request.ctx, len(keys) - added)
        request.undecided_blocks.clear()
        self.admission.end_request(request.ctx, self._primary.used_by(request.ctx))

    def defer_reused(self, index: int, keys: Sequence[OffloadKey]) -> None:
        """Queue reused blocks for a tier that lacks them, as far as its admission accepts them."""
        if self.admission is not None:
            keys, _ = self.admission.split(index, _NO_REQUEST, keys, is_final=True)
        self.defer(index, keys)

    def send(
        self,
        index: int,
        request: RequestState,
        keys: Sequence[OffloadKey],
        now_s: float,
        *,
        admits_all: bool = False,
    ) -> None:
        """Cascade the longest prefix of readable keys that a tier takes now; queue the rest.

        Args:
            index: The tier.
            request: The request.
            keys: The keys.
            now_s: Time of the step, in seconds.
            admits_all: Whether to store all blocks; otherwise only those that the tier admits,
                and `end_request` decides about the undecided ones.
        """
        if self.admission is not None and not admits_all:
            offered = len(keys)
            is_final = request.is_finished
            keys, undecided = self.admission.split(index, request.ctx, keys, is_final=is_final)
            request.undecided_blocks.setdefault(index, {}).update(dict.fromkeys(undecided))
            self._decline(index, request.ctx, offered - len(keys) - len(undecided))
            if not keys:
                return
        queue, barred = self.queues[index], self._tiers[index].barred
        if barred.sets:
            keys = barred.without(keys)
        taken = keys[:0]
        if not queue.count:  # new blocks must not overtake the pending ones
            room = self._room_to_store(index)
            if room and self._takes_store(index, now_s):
                taken = keys[:room]
        if taken:
            slots = self._primary.pin(taken)
            queue.began(slots)
            self._submit(index, request.ctx, taken, slots)
        rest = keys[len(taken) :]
        if rest:
            queue.new_blocks += self.defer(index, rest)

    def send_present(
        self,
        request: RequestState,
        keys: Sequence[OffloadKey],
        new: Collection[OffloadKey],
        now_s: float,
    ) -> None:
        """Send readable keys to the request-level tiers.

        Keys that other requests are writing are *parked*: sent once the write has ended.
        """
        readable = []
        for key in dict.fromkeys(keys):
            answer = self._primary.lookup(key)
            if answer is LookupResult.HIT:
                readable.append(key)
            elif answer is LookupResult.HIT_PENDING and key not in new:
                if key not in request.parked:
                    self._parked_for.setdefault(key, []).append(request)
                request.parked[key] = None
        if request.parked:
            self.parking[request.ctx] = request
            self._primary.on_write_ended = self._note_written
        self._send_to_request_level(request, readable, now_s)

    def defer(self, index: int, keys: Sequence[OffloadKey]) -> int:
        """Queue readable keys for a tier, unless queued or under way; return the number added."""
        if self._is_closed:
            return 0
        if self._primary.barred.sets or self._tiers[index].barred.sets:
            keys = self._primary.barred.without(self._tiers[index].barred.without(keys))
        added = self.queues[index].add(self._primary.readable_slots(keys))
        self._watch_evictions()
        return added

    def is_storing(self, index: int, keys: Sequence[OffloadKey]) -> bool:
        """Return whether some of these blocks are pending for a tier, or in a copy to it."""
        return self.queues[index].has_any(self._primary.resident_slots(keys))

    def drop_deleted(self, indices: Iterable[int], slots: Sequence[int]) -> None:
        """Drop the pending blocks in `slots`, which are being deleted from tiers."""
        for index in indices:
            if self.queues[index].count:
                self._tiers[index].counters.drop("deleted", self.queues[index].drop(slots))
        self._watch_evictions()

    def offer_faster(self, index: int, keys: Sequence[OffloadKey]) -> None:
        """Queue blocks promoted from a tier for the faster tiers that are known to lack them."""
        for faster in range(index):
            lacking = self._tiers[faster].index.lacks(keys)
            if lacking:
                self.defer(faster, lacking)

    # -- steps ----------------------------------------------------------------------------------

    def retry_parked(self, now_s: float) -> list[RequestState]:
        """Send the parked blocks whose writes have ended since the last call.

        Returns:
            The requests whose last parked block was sent or dropped.
        """
        written, self._written = self._written, []
        readable: dict[RequestState, list[OffloadKey]] = {}
        for key in dict.fromkeys(written):
            answer = self._primary.lookup(key)
            if answer is LookupResult.HIT_PENDING:
                continue  # the write has failed, and another write of the key has begun
            for request in self._parked_for.pop(key):
                keys = readable.setdefault(request, [])
                del request.parked[key]
                if answer is LookupResult.HIT:
                    keys.append(key)
        for request, keys in readable.items():
            self._send_to_request_level(request, keys, now_s)
        done = [request for request in readable if not request.parked]
        for request in done:
            del self.parking[request.ctx]
        if not self.parking:
            self._primary.on_write_ended = None
        return done

    def send_pending(self, now_s: float) -> None:
        """Send pending blocks to the tiers, a bounded number per step.

        Also update the eviction protection of pending blocks: a failed tier's have none.
        """
        for index, queue in enumerate(self.queues):
            is_wanted = self._tiers[index].wants_blocks
            if is_wanted is not queue.is_wanted or queue.protecting_from is not None:
                queue.update_protection(is_wanted=is_wanted)
            most = LATE_BLOCKS_A_STEP + queue.new_blocks
            queue.new_blocks = 0
            if queue.count and now_s >= queue.paused_until_s:
                self._send_pending_to(index, most, now_s)

    # -- results --------------------------------------------------------------------------------

    def ended(self, index: int, job: JobMetadata, result: JobResult, now_s: float) -> None:
        """Handle the result of a cascade; after a transient error, blocks become pending again."""
        queue = self.queues[index]
        queue.is_shut = not self._tiers[index].may_store(now_s)
        if result.success:
            queue.resume()
        elif not isinstance(result.error, _FINAL):
            queue.pause(now_s)
        if result.orphaned:
            return  # the copy may still succeed; see `released`
        self._primary.unpin(job.keys)
        landed = job.keys if result.success else result.successful_keys or ()
        if self.admission is not None:
            self.admission.note_stored(index, len(landed))
        self._finish(index, job, landed, result.error, now_s)

    def released(self, index: int, record: JobRecord, now_s: float) -> None:
        """Handle the end of the copy of an overdue cascade, whether it succeeded or failed."""
        self._primary.unpin(record.job.keys)
        tier, keys = self._tiers[index], record.job.keys
        # Only an exact index can confirm that a block has landed.
        lacking = tier.index.lacks(keys) if tier.index.is_exact else keys
        landed = frozenset(keys).difference(lacking)
        self._finish(index, record.job, landed, None, now_s)

    # -- reset and shutdown ---------------------------------------------------------------------

    def forget(self) -> None:
        """Drop all pending and parked blocks; call before `Primary.reset`."""
        for tier in self._tiers:
            late = (record for record in tier.jobs.orphaned() if not record.holds_slots)
            # After the reset, their slots no longer identify the blocks: count these as failed.
            tier.counters.failed_store_blocks += sum(len(record.job.keys) for record in late)
        self._drop_all("reset")

    def close(self) -> None:
        """Drop all pending and parked blocks, and accept no more."""
        self._is_closed = True
        self._drop_all("closed")

    # -- internal -------------------------------------------------------------------------------

    def _decline(self, index: int, ctx: ReqContext, count: int) -> None:
        if count:
            self._tiers[index].counters.declined_blocks += count
            if self.on_declined is not None:
                self.on_declined(ctx, index, count)

    def _takes_store(self, index: int, now_s: float) -> bool:
        """Return whether a tier takes a job now; pause its queue if not."""
        tier, queue = self._tiers[index], self.queues[index]
        if tier.takes_store(now_s):
            queue.is_shut = False
            return True
        queue.pause(now_s)
        queue.is_shut = not tier.may_store(now_s)
        return False

    def _send_to_request_level(
        self, request: RequestState, keys: Sequence[OffloadKey], now_s: float
    ) -> None:
        if keys:
            for index in request.request_level_tiers:
                self.send(index, request, keys, now_s, admits_all=True)

    def _send_pending_to(self, index: int, most: int, now_s: float) -> None:
        queue = self.queues[index]
        room = self._room_to_store(index)
        if not room or not self._takes_store(index, now_s):
            return
        slots = queue.oldest(min(room, most))
        keys = self._primary.keys_of(slots)
        self._primary.pin(keys)
        queue.began(slots)
        tier = self._tiers[index]
        tier.counters.late_blocks += len(keys)
        self._submit(index, self._own.within(tier), keys, slots)
        self._watch_evictions()

    def _finish(
        self,
        index: int,
        job: JobMetadata,
        landed: Collection[OffloadKey],
        error: Exception | None,
        now_s: float,
    ) -> None:
        """Update the marks of a copy's blocks: stored, given up, or pending for a retry."""
        tier, queue = self._tiers[index], self.queues[index]
        slots = job.block_ids.tolist()
        if len(landed) == len(slots):
            queue.ended(slots)
            return
        if tier.barred.sets:
            landed = {*landed, *tier.barred.among(job.keys)}
        missed = [s for s, key in zip(slots, job.keys, strict=True) if key not in landed]
        if isinstance(error, _FINAL) or self._is_closed:
            queue.ended(slots)
            tier.counters.failed_store_blocks += len(missed)
            return
        queue.ended(s for s, key in zip(slots, job.keys, strict=True) if key in landed)
        # A failure during a suspension of the tier is not the block's fault: do not count it.
        counts = tier.may_store(now_s)
        tier.counters.failed_store_blocks += queue.failed(missed, counts=counts)
        self._watch_evictions()

    def _drop_all(self, reason: DropReason) -> None:
        for request in self.parking.values():
            request.parked.clear()
        self.parking.clear()
        self._parked_for.clear()
        self._written.clear()
        self._primary.on_write_ended = None
        for tier, queue in zip(self._tiers, self.queues, strict=True):
            tier.counters.drop(reason, queue.clear())
        self._watch_evictions()

    def _note_written(self, keys: Sequence[OffloadKey]) -> None:
        self._written += [key for key in keys if key in self._parked_for]

    def _watch_evictions(self) -> None:
        """Subscribe to the primary's evictions exactly while a block is pending."""
        self._primary.on_evicted = self._evicted if self.has_pending else None

    def _evicted(self, slots: Sequence[int]) -> None:
        for tier, queue in zip(self._tiers, self.queues, strict=True):
            if queue.count:
                tier.counters.drop("evicted", queue.forget(slots))
        self._watch_evictions()


_AGAIN_AFTER_S: Final = 60.0
_MOST_KEYS: Final = 32_768


class RecentKeys:
    """Rate limiter per key: an admitted key is not admitted again for `again_after_s` seconds.

    The interval is up to twice as long, because two tables rotate: new keys are added to the
    current table, and both are searched. When the current table is full, no key is admitted until
    the next rotation.
    """

    def __init__(self, again_after_s: float = _AGAIN_AFTER_S, most_keys: int = _MOST_KEYS) -> None:
        self._again_after_s = again_after_s
        self._most_keys = most_keys
        self._new, self._old = KeyMap(most_keys), KeyMap(most_keys)
        self._turned_s: float | None = None

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def admitted(self, keys: Sequence[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Return those of the keys that are admitted, and record them; keys must be distinct."""
        if self._turned_s is None:
            self._turned_s = now_s
        elif now_s - self._turned_s >= self._again_after_s:
            is_stale = now_s - self._turned_s >= 2 * self._again_after_s
            self._old = KeyMap(self._most_keys) if is_stale else self._new
            self._new = KeyMap(self._most_keys)
            self._turned_s = now_s
        seen = zip(keys, self._new.find(keys), self._old.find(keys), strict=True)
        fresh = [key for key, new, old in seen if new is None and old is None]
        fresh = fresh[: self._most_keys - len(self._new)]
        self._new.update(fresh, repeat(0))
        return fresh


class Touches:
    """Collects the keys used in a step, and reports them to the tiers at its end.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self, tiers: Sequence[TierState], cascades: Cascades, own: EngineContext) -> None:
        self._tiers = tiers
        self._cascades = cascades
        self._own = own
        self.used: list[Sequence[OffloadKey]] = []
        """The keys that requests have used in this step."""
        self._recent = [RecentKeys() for _ in tiers]

    def note(self, keys: Sequence[OffloadKey]) -> None:
        """Record keys that one request has used, head to tail."""
        if keys and self._tiers:
            self.used.append(keys)

    def flush(self, now_s: float) -> None:
        """Touch the used blocks in the tiers that have them; queue them for tiers that lack them.

        A tier with an exact index gets each used key it has. Other tiers get a key at most once
        per interval of `RecentKeys`, because a touch may cost a system call or a message.
        """
        # Tiers rank the first key as the most recently used: the latest request comes first.
        keys = list(dict.fromkeys(chain.from_iterable(reversed(self.used))))
        self.used.clear()
        for index, tier in enumerate(self._tiers):
            if tier.index.is_exact:
                lacking = tier.index.lacks(keys)
                if lacking:
                    self._cascades.defer_reused(index, lacking)
                    absent = frozenset(lacking)
                    present = [key for key in keys if key not in absent]
                else:
                    present = keys
            else:
                present = self._recent[index].admitted(keys, now_s)
            if present:
                tier.touch(present, self._own.within(tier))
