"""The primary tier: which key lies in which slot, and who may touch it.

A block's state machine, encoded in one counter so that a batch costs one integer a key:

    absent  --reserve--> writing (-1)
    writing --written--> idle (0)         writing --failed--> absent
    idle    --pin------> pinned (k > 0)   pinned  --unpin (last)--> idle
    idle    --evict----> absent

Never evicted: a block that is writing or pinned. What is known of a block lies in arrays by slot: a
million blocks cost no object each that the garbage collector walks, and no step moves more than a
few small parts of a table. Bytes a block at a million, under LRU: 164 with its key of 36, 95
without; 38 more once blocks have come and gone.

Which blocks a request used is committed to the policy once, when the request ends, in token order.
So the ranking does not depend on the order in which transfers end, and the tail of a prompt is
evicted before its head.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.counters import PrimaryCounters
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import OnResolved, longest_fitting_prefix, prefix_test, those_before
from kvoffload_async.errors import InvariantError, StateError
from kvoffload_async.tables.arrays import integers, small_integers
from kvoffload_async.tables.free import FreeNumbers
from kvoffload_async.tables.keymap import LAST_HASH_BYTE, require_keys, too_short
from kvoffload_async.tables.keytable import KeyTable
from kvoffload_async.tables.lists import NumberLists
from kvoffload_async.types import (
    CPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    as_block_ids,
)


class AdmissionFilter:
    """Admits a key at its `threshold`-th offer; remembers at most `tracked_keys` keys."""

    def __init__(self, threshold: int, tracked_keys: int = 64_000) -> None:
        self.threshold = threshold
        self.tracked_keys = tracked_keys
        self.clear()

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the offered keys that have had enough offers, this one included."""
        counts = self._counts_with(keys)
        return [key for key, count in zip(keys, counts, strict=True) if count >= self.threshold]

    def offered(self, keys: Sequence[OffloadKey]) -> None:
        """Count one offer of each key; the keys that were offered the longest ago are forgotten."""
        for key, count in zip(keys, self._counts_with(keys), strict=True):
            number = self._table.get(key)
            if number is not None:
                self._oldest_first.remove([number])
            else:
                if not self._free.count:
                    oldest = [next(self._oldest_first.walk())]
                    self._oldest_first.remove(oldest)
                    self._table.remove(oldest)
                    self._free.give_back(oldest)
                (number,) = self._free.take(1)
                self._table.add([key], [number])
            self._oldest_first.append([number])
            self._counts[number] = count

    def clear(self) -> None:
        """Forget every offer."""
        self._table = KeyTable(self.tracked_keys)
        self._free = FreeNumbers(self.tracked_keys)
        self._oldest_first = NumberLists(self.tracked_keys)
        self._counts = integers(self.tracked_keys)

    def _counts_with(self, keys: Sequence[OffloadKey]) -> list[int]:
        counts = self._counts
        return [1 if n is None else counts[n] + 1 for n in self._table.find(keys)]


class Loads:
    """The loads of live and ended requests.

    Thread: owner.
    """

    def __init__(self) -> None:
        self._loads: dict[ReqContext, Counter[OffloadKey]] = {}
        self.num_pins = 0
        """How many pins they hold; a block may have several."""

    def begin(self, ctx: ReqContext, keys: Collection[OffloadKey]) -> None:
        """Note that a request loads blocks."""
        if keys:
            self._loads.setdefault(ctx, Counter()).update(keys)
            self.num_pins += len(keys)

    def end(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], *, may_be_unknown: bool
    ) -> Collection[OffloadKey]:
        """Note that a load has ended; return the blocks that were indeed loaded, to be unpinned.

        Raises:
            StateError: One was not, and it must not be unknown; nothing has changed.
        """
        loads = self._loads.get(ctx, Counter())
        known = asked = Counter(keys)
        if [key for key, count in asked.items() if count > loads.get(key, 0)]:
            if not may_be_unknown:
                raise StateError(f"request {ctx.req_id!r} completes a load that it did not prepare")
            known = asked & loads
        for key, count in known.items():
            loads[key] -= count
            if not loads[key]:
                del loads[key]
        if not loads:
            self._loads.pop(ctx, None)
        ended = tuple(known.elements())
        self.num_pins -= len(ended)
        return ended

    def clear(self) -> None:
        """Forget them all."""
        self._loads.clear()
        self.num_pins = 0

    def total(self) -> Counter[OffloadKey]:
        """Return how many loads pin each block."""
        return sum(self._loads.values(), Counter())


class RecencyLog:
    """Logical accesses of the live requests."""

    def __init__(self, rank: Callable[[Iterable[tuple[OffloadKey, bool]]], None]) -> None:
        """Start empty.

        Args:
            rank: Takes what a request used, head to tail, and whether it found a key or stored it.
        """
        self._rank = rank
        self._accesses: dict[ReqContext, dict[OffloadKey, bool]] = {}

    def open(self, ctx: ReqContext) -> None:
        """Begin a request.

        Raises:
            StateError: This very request is live; another one may have its id.
        """
        if ctx in self._accesses:
            raise StateError(f"request {ctx.req_id!r} is known already")
        self._accesses[ctx] = {}

    def knows(self, ctx: ReqContext) -> bool:
        """Tell whether the request is live."""
        return ctx in self._accesses

    def note(self, ctx: ReqContext, keys: Iterable[OffloadKey], *, reused: bool) -> None:
        """Record that a live request used keys; the first use of a key decides how it counts.

        Raises:
            StateError: The request is not live.
        """
        accesses = self._accesses.get(ctx)
        if accesses is None:
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        if accesses:
            for key in keys:
                accesses.setdefault(key, reused)
        else:
            accesses.update(dict.fromkeys(keys, reused))

    def used_by(self, ctx: ReqContext) -> Collection[OffloadKey]:
        """Return what a live request has used so far."""
        return self._accesses[ctx].keys()

    def commit(self, ctx: ReqContext) -> list[OffloadKey]:
        """End a request: rank what it used; return what it found, head to tail.

        Raises:
            StateError: The request is not live.
        """
        accesses = self._accesses.pop(ctx, None)
        if accesses is None:
            raise StateError(f"request {ctx.req_id!r} is unknown or has finished already")
        positions = ctx.key_positions
        ordered: Iterable[tuple[OffloadKey, bool]] = accesses.items()
        if positions:
            last = max(positions.values()) + 1
            ordered = sorted(ordered, key=lambda access: positions.get(access[0], last))
        self._rank(ordered)
        return [key for key, reused in ordered if reused]

    def live_requests(self) -> set[ReqContext]:
        """Return the live requests."""
        return set(self._accesses)


_FREE, _TAKEN, _HELD = range(3)


class SlotPool:
    """Hands out `num_slots` slots.

    A slot is free, taken, or *held*: no longer anybody's, but an orphaned copy may still touch
    it, so that it must not be handed out before the copy has ended.

    Never-used slots are handed out first, in increasing order, so that a fresh pool gives
    neighbouring rows, which tiers can join into one call.

    Attributes:
        unused: The free slots. To be read only.
        holds: Held slot -> how many copies may touch it. To be read only.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._states = bytearray(num_slots)
        self.unused = FreeNumbers(num_slots)
        self.holds: dict[int, int] = {}

    @property
    def free_count(self) -> int:
        """Slots that `allocate` can hand out."""
        return self.unused.count

    @property
    def retained_count(self) -> int:
        """Slots that wait for an orphaned copy."""
        return len(self.holds)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots.

        Raises:
            InvariantError: Fewer are free.
        """
        if count > self.unused.count:
            raise InvariantError(f"{count} slots asked for, {self.unused.count} free")
        slots = self.unused.take(count)
        states = self._states
        for slot in slots:
            states[slot] = _TAKEN
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give taken slots back."""
        states = self._states
        for slot in slots:
            if states[slot] != _TAKEN:  # asked here: a call a slot takes longer than the rest
                self._expect(slot, _TAKEN)
            states[slot] = _FREE
        self.unused.give_back(slots)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep taken slots from everybody until `release`."""
        for slot in slots:
            self._expect(slot, _TAKEN)
            self._states[slot] = _HELD
            self.holds[slot] = 1

    def release(self, slots: Iterable[int]) -> None:
        """Undo one hold of each slot; after the last one the slot is free."""
        for slot in slots:
            self._expect(slot, _HELD)
            self.holds[slot] -= 1
            if not self.holds[slot]:
                del self.holds[slot]
                self._states[slot] = _FREE
                self.unused.give_back([slot])

    def reset(self, still_touched: Iterable[int]) -> None:
        """Free every slot but the held ones and `still_touched`, each entry one more hold."""
        for slot in still_touched:
            self.holds[slot] = self.holds.get(slot, 0) + 1
        self._states = bytearray(self.num_slots)
        for slot in self.holds:
            self._states[slot] = _HELD
        every = reversed(range(self.num_slots))
        self.unused.reset(slot for slot in every if slot not in self.holds)

    def free_slots(self) -> list[int]:
        """Return the free slots. For invariants and inspection."""
        return list(self.unused)

    def retained_slots(self) -> list[int]:
        """Return the held slots. For invariants and inspection."""
        return list(self.holds)

    def _expect(self, slot: int, state: int) -> None:
        if self._states[slot] != state:
            raise InvariantError(f"slot {slot} is in state {self._states[slot]}, not {state}")


class LastToGo:
    """Slots that the policy would have had go, were their blocks not pending for a tier.

    In the order in which it asked for them, which is that of its ranking. It asks for each once
    until that is released, so nobody goes through what must stay. Bytes a slot: 9, once used.
    """

    def __init__(self, num_slots: int) -> None:
        """Start empty, over the slots of the primary."""
        self._num_slots = num_slots
        self._in_order: NumberLists | None = None
        self._is_member = small_integers(0)

    def note(self, slot: int) -> None:
        """Put a slot at the end."""
        if self._in_order is None:
            self._in_order = NumberLists(self._num_slots)
            self._is_member = small_integers(self._num_slots)
        if self._is_member[slot]:
            self._in_order.remove([slot])
        self._is_member[slot] = 1
        self._in_order.append([slot])

    def discard(self, slots: Sequence[int]) -> list[int]:
        """Take out those of the slots that are members; return these."""
        if self._in_order is None:
            return []
        is_member = self._is_member
        members = [slot for slot in slots if is_member[slot]]
        for slot in members:
            is_member[slot] = 0
        self._in_order.remove(members)
        return members

    def first(self, count: int) -> list[int]:
        """Return the first members."""
        return [] if self._in_order is None else list(islice(self._in_order.walk(), count))

    def clear(self) -> None:
        """Take everything out."""
        self._in_order = None


WRITING: Final = -1
A_DEBT: Final = 1 << 24
PINS: Final = A_DEBT - 1
"""What of a counter is pins, unless it is `WRITING`."""


class ResidentBlocks:
    """The blocks of a cache with `num_slots` slots: what `Primary` looks up, pins and ranks.

    Thread: owner.

    Attributes:
        decided: Told of keys whose writes have ended, well or not, other than by a reset.
        on_write_ended: The same, for the planner; set while it waits for such writes.
        room_made: How many times a slot has become free or evictable so far. A store that found no
            room can place at most as many blocks as this has grown since.
        counters: What it has done so far.
    """

    decided: OnResolved | None = None
    on_write_ended: OnResolved | None = None

    def __init__(self, num_slots: int, policy: CachePolicy) -> None:
        """Start empty; the policy is owned from now on."""
        self.room_made = 0
        self._policy = policy
        self._blocks = KeyTable(num_slots)
        self._parts = self._blocks.map.parts
        self._refs = integers(num_slots)
        """Slot -> the counter of the block in it; of a free slot, whatever the last one left."""
        self._idle = 0
        """Blocks that are neither pinned nor protected."""
        self._protected = 0
        """Blocks that are protected, and not pinned."""
        self._last_to_go = LastToGo(num_slots)
        self.on_evicted: Callable[[Sequence[int]], None] | None = None
        """Told which slots are about to lose their blocks, while somebody needs to know."""
        self.counters = PrimaryCounters()

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS."""
        try:
            slot = self._parts[key[0] + key[LAST_HASH_BYTE]].get(key)
        except IndexError:
            raise too_short([key]) from None
        if slot is None:
            return LookupResult.MISS
        return LookupResult.HIT if self._refs[slot] >= 0 else LookupResult.HIT_PENDING

    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return HIT, HIT_PENDING or MISS for each key."""
        refs, hit = self._refs, LookupResult.HIT
        pending, miss = LookupResult.HIT_PENDING, LookupResult.MISS
        slots = self._blocks.find(keys)
        return [miss if s is None else hit if refs[s] >= 0 else pending for s in slots]

    def pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Keep readable keys in place; return their slots, in key order.

        Raises:
            StateError: A key is not readable; nothing has changed.
        """
        refs = self._refs
        slots: list[int] = []
        for slot in self._blocks.find(keys):
            if slot is None or refs[slot] < 0:
                key = keys[len(slots)]
                raise StateError(f"block {key.hex()} is not readable; look it up in this step")
            slots.append(slot)
        self._hold(slots)
        return slots

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Undo one `pin`."""
        keys = tuple(keys)
        refs = self._refs
        slots: list[int] = []
        try:
            for key, slot in zip(keys, self._blocks.find(keys), strict=True):
                if slot is None or refs[slot] < 1 or not refs[slot] & PINS:
                    raise StateError(f"block {key.hex()} is not pinned")
                slots.append(slot)
        finally:
            self._unhold(slots)

    def protect(self, slots: Iterable[int]) -> None:
        """Have the readable blocks in these slots go last: they are pending for one more tier."""
        refs = self._refs
        num_idle = 0
        for slot in slots:
            count = refs[slot]
            if not count:
                num_idle += 1
            refs[slot] = count + A_DEBT
        self._idle -= num_idle
        self._protected += num_idle

    def unprotect(self, slots: Iterable[int]) -> None:
        """Undo one `protect`."""
        refs = self._refs
        released: list[int] = []
        for slot in slots:
            count = refs[slot] - A_DEBT
            refs[slot] = count
            if not count:
                released.append(slot)
        self._idle += len(released)
        self._protected -= len(released)
        self.room_made += len(released)
        self._last_to_go.discard(released)
        self._policy.released(released)

    def readable_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the slots of those of the keys that are readable, in their order."""
        refs = self._refs
        return [s for s in self._blocks.find(keys) if s is not None and refs[s] >= 0]

    def keys_of(self, slots: Sequence[int]) -> list[OffloadKey]:
        """Return the keys of the blocks in slots that are taken."""
        return self._blocks.keys_of(slots)

    def slot_of(self, key: OffloadKey) -> int:
        """Return a resident key's slot; raises StateError if it is absent."""
        slot = self._blocks.get(key)
        if slot is None:
            raise StateError(f"block {key.hex()} is absent")
        return slot

    def key_of(self, slot: int) -> OffloadKey:
        """Return the key of the block in a slot. For invariants and inspection."""
        return self._blocks.key_of(slot)

    @property
    def policy(self) -> CachePolicy:
        """The ranking. For invariants and inspection."""
        return self._policy

    def ranked(self) -> list[OffloadKey]:
        """Return the keys that the policy ranks, the best victim first.

        For invariants and inspection.
        """
        return self._blocks.keys_of(tuple(self._policy.resident()))

    def forgotten(self) -> list[OffloadKey]:
        """Return keys that may go, but that the policy skips: there must be none.

        For invariants and inspection.
        """
        return self._blocks.keys_of([s for s in self._policy.skipped() if not self._refs[s]])

    def resident(self) -> Iterator[tuple[OffloadKey, int, int]]:
        """Iterate over (key, slot, number of pins), -1 for writing.

        For invariants and inspection.
        """
        refs = self._refs
        return (
            (key, slot, WRITING if refs[slot] < 0 else refs[slot] & PINS)
            for key, slot in self._blocks.items()
        )

    def debts(self) -> dict[int, int]:
        """Return the slots of protected blocks, and for how many tiers each is pending.

        For invariants and inspection.
        """
        debts = {slot: self._refs[slot] // A_DEBT for _, slot, refs in self.resident() if refs >= 0}
        return {slot: count for slot, count in debts.items() if count}

    def _sorted_out(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey], set[int]]:
        """Return the absent ones of the keys, the readable ones, and the slots of unpinned ones."""
        refs = self._refs
        missing: list[OffloadKey] = []
        readable: list[OffloadKey] = []
        unpinned: set[int] = set()
        unique = list(dict.fromkeys(keys))
        for key, slot in zip(unique, self._blocks.find(unique), strict=True):
            if slot is None:
                missing.append(key)
            elif refs[slot] >= 0:
                readable.append(key)
                if not refs[slot] & PINS:
                    unpinned.add(slot)
        return missing, readable, unpinned

    def _hold(self, slots: Iterable[int]) -> None:
        """Pin the readable blocks in these slots, once each time that one is named."""
        refs = self._refs
        num_idle = 0
        protected: list[int] = []
        for slot in slots:
            count = refs[slot]
            if not count:
                num_idle += 1
            elif not count & PINS:
                protected.append(slot)
            refs[slot] = count + 1
        self._idle -= num_idle
        if protected:
            self._protected -= len(protected)
            self._last_to_go.discard(protected)

    def _unhold(self, slots: Iterable[int]) -> None:
        """Undo one `_hold`."""
        refs = self._refs
        num_idle = 0
        released: list[int] = []
        for slot in slots:
            count = refs[slot] - 1
            refs[slot] = count
            if not count & PINS:
                num_idle += not count
                released.append(slot)
        self._idle += num_idle
        self._protected += len(released) - num_idle
        self.room_made += len(released)
        self._policy.released(released)

    def _writing_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots = []
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is None or self._refs[slot] != WRITING:
                raise StateError(f"block {key.hex()} is not being written")
            slots.append(slot)
        return slots

    def _rank(self, accesses: Iterable[tuple[OffloadKey, bool]]) -> None:
        """Tell the policy what a request used, head to tail; absent keys are left out."""
        parts = self._parts
        slots: list[int] = []
        reused: list[bool] = []
        for key, again in accesses:
            slot = parts[key[0] + key[LAST_HASH_BYTE]].get(key)
            if slot is not None:
                slots.append(slot)
                reused.append(again)
        if self._protected:  # their turn is not what it was
            self._policy.released(self._last_to_go.discard(slots))
        self._policy.access(slots, reused)


class BlockState(enum.Enum):
    """Where a key stands in the primary tier."""

    ABSENT = enum.auto()
    WRITING = enum.auto()
    IDLE = enum.auto()
    PINNED = enum.auto()


class Primary(ResidentBlocks):
    """Accounts for `num_slots` slots; moves no bytes.

    Every operation checks everything before it changes anything.

    Thread: owner.

    Attributes:
        drops_pending: Whether protected blocks are evicted where no others are left; written by who
            composes.
    """

    def __init__(
        self,
        num_slots: int,
        policy: CachePolicy,
        *,
        accept_prefix: bool = False,
        admission: AdmissionFilter | None = None,
        enable_events: bool = False,
    ) -> None:
        """Start empty.

        Args:
            num_slots: Capacity in blocks.
            policy: Ranks resident keys; owned by this object from now on.
            accept_prefix: Whether `prepare_store` takes the longest head of a batch that fits
                beside what its request has used, instead of all or nothing.
            admission: Filters what `prepare_store` takes.
            enable_events: Whether `take_events` has anything to tell.
        """
        super().__init__(num_slots, policy)
        self._pool = SlotPool(num_slots)
        self._writers: dict[int, ReqContext] = {}
        """Slot that a request writes -> that request."""
        self._recency = RecencyLog(self._rank)
        self._accept_prefix = accept_prefix
        self._admission = admission
        self.loading = Loads()
        """Which request loads which blocks. To be read only."""
        refs = self._refs
        self._may_go: Callable[[int], bool] = lambda slot: not refs[slot]
        self.drops_pending = True
        self._writing = 0
        self.event_log = EventLog(Medium.CPU, enabled=enable_events, announces_removals=True)
        """What `take_events` tells, and what of it was dropped."""
        self.generation = 0
        """How often this was reset: a grant of an earlier generation is worth nothing any more."""

    # -- requests -------------------------------------------------------------------------------

    def open_request(self, ctx: ReqContext) -> None:
        """Begin a request; raises StateError if this very context is live already."""
        self._recency.open(ctx)

    def close_request(self, ctx: ReqContext) -> list[OffloadKey]:
        """Commit what the request used; return what it found, head to tail."""
        return self._recency.commit(ctx)

    def touch(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> bool:
        """Note a use. Counts at the request's end, or at once if the request is unknown.

        Returns:
            Whether it counts already.

        Raises:
            StateError: Something has not the length of a key.
        """
        require_keys(keys)
        if self._recency.knows(ctx):
            self._recency.note(ctx, keys, reused=True)
            return False
        self._rank(dict.fromkeys(keys, True).items())
        return True

    # -- reading --------------------------------------------------------------------------------

    def prepare_load(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin readable keys for a request and note the use; return their slots, in key order.

        Raises:
            StateError: A key is not readable, or the request is not live; nothing has changed.
        """
        if not self._recency.knows(ctx):
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        slots = self.pin(keys)
        self.counters.loaded_blocks += len(keys)
        self.loading.begin(ctx, keys)
        self._recency.note(ctx, keys, reused=True)
        return slots

    def complete_load(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], generation: int | None = None
    ) -> None:
        """Undo the request's `prepare_load`, which a reset may have done already.

        Args:
            ctx: The request.
            keys: What it has loaded.
            generation: That of the grant. None: whoever calls drops what is from before a reset.

        Raises:
            StateError: The request did not load a key, and no reset has happened.
        """
        if generation in {None, self.generation}:
            may_be_unknown = self.generation > 0
            self.unpin(self.loading.end(ctx, keys, may_be_unknown=may_be_unknown))

    # -- writing --------------------------------------------------------------------------------

    def prepare_store(
        self, ctx: ReqContext, keys: Sequence[OffloadKey]
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the missing ones of `keys`, evicting others if need be.

        Duplicate keys count once. Keys that are readable count as used by the request.

        Returns:
            What was granted, or None if there is no room: then nothing has changed.

        Raises:
            StateError: The request is not live, or something has not the length of a key.
        """
        if not self._recency.knows(ctx):
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        require_keys(keys)
        missing, readable, unpinned = self._sorted_out(keys)
        wanted: Sequence[OffloadKey] = missing
        if self._admission is not None:
            wanted = self._admission.admitted(missing)
        left_out: Sequence[OffloadKey] = ()
        is_own_prefix: Callable[[OffloadKey], bool] | None = None
        if self._accept_prefix and len(wanted) > self._pool.free_count:
            used = self._recency.used_by(ctx)
            is_own_prefix = prefix_test(wanted, used, ctx.key_positions)
            idle = self._pool.free_count + self._idle - len(unpinned)
            if len(wanted) > idle - len(used):  # the policy may find too few other blocks
                unpinned |= self._sorted_out([key for key in used if is_own_prefix(key)])[2]
                is_own_prefix = None
                room = self._room_beside(unpinned)
                wanted, left_out = longest_fitting_prefix(wanted, ctx.key_positions, room)
                if not wanted:
                    self.counters.refused_stores += 1
                    return None
        granted = self._reserve_beside(unpinned, wanted, ctx, is_own_prefix)
        if granted is None:
            self.counters.refused_stores += 1
            return None
        slots, evicted = granted
        if self._admission is not None:
            self._admission.offered(those_before(left_out, missing, ctx.key_positions))
        if readable:
            self._recency.note(ctx, readable, reused=True)
        self._recency.note(ctx, wanted, reused=False)
        spec = CPULoadStoreSpec(as_block_ids(slots), self.generation)
        return PrepareStoreOutput(wanted, spec, evicted, left_out)

    @property
    def room(self) -> int:
        """How many blocks can be reserved now."""
        return self._pool.unused.count + self._idle + self.drops_pending * self._protected

    @property
    def protected_blocks(self) -> int:
        """Blocks that would be idle if they were not pending for tiers."""
        return self._protected

    def _room_beside(self, unpinned: Collection[int]) -> int:
        """Return how many blocks fit if those in some slots stay."""
        if self.drops_pending:
            return self.room - len(unpinned)
        return self.room - sum(not self._refs[slot] for slot in unpinned)

    def reserve(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Reserve slots for as many absent keys as fit, evicting other blocks if need be.

        Args:
            keys: The keys, without duplicates; the first ones get the slots.

        Returns:
            The slots, one per key that got one, in key order.

        Raises:
            StateError: A key is present; nothing has changed.
        """
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is not None:
                raise StateError(f"block {key.hex()} is present already")
        granted = self._reserve(keys[: self.room], None)
        return [] if granted is None else granted[0]

    def complete_store(
        self,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        *,
        success: bool,
        generation: int | None = None,
    ) -> list[OffloadKey]:
        """End the request's write of `keys`; return those that were its to end.

        Keys that are ready, unknown, or being written by another are ignored; and so are all if
        they were granted before a reset: see `complete_load` for the generation.
        """
        writers = self._writers
        mine: list[OffloadKey] = []
        slots: list[int] = []
        if generation not in {None, self.generation}:
            return mine
        unique = list(dict.fromkeys(keys))
        for key, slot in zip(unique, self._blocks.find(unique), strict=True):
            if slot is not None and writers.get(slot) is ctx:
                mine.append(key)
                slots.append(slot)
        self._end_write(mine, slots, success=success)
        self.counters.stored_blocks += success * len(mine)
        return mine

    def complete_write(self, keys: Sequence[OffloadKey], *, success: bool) -> None:
        """End writes: the keys become readable, or absent and their slots free."""
        self._end_write(keys, self._writing_slots(keys), success=success)

    def orphan_write(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Fail writes whose copy still runs: the keys become absent, their slots stay held.

        Returns:
            The slots, for `release_slots` once nothing touches them any more.
        """
        slots = self._writing_slots(keys)
        self._forget(keys, slots)
        self._pool.hold(slots)
        return slots

    def release_slots(self, slots: Sequence[int]) -> None:
        """Free held slots."""
        self._pool.release(slots)
        self.room_made += len(slots)

    def reset(self, still_touched: Iterable[int] = ()) -> None:
        """Forget every key, pin and write; live requests stay known.

        Args:
            still_touched: Slots that orphaned copies still touch, once a copy; they become held.
        """
        self.generation += 1
        removed = [key for key, _, refs in self.resident() if refs >= 0]
        self.event_log.add(removed, removed=True)
        self._blocks.clear()
        self._writers.clear()
        self.loading.clear()
        self._policy.clear()
        if self._admission is not None:
            self._admission.clear()
        self._pool.reset(still_touched)
        self._last_to_go.clear()
        self._idle = self._protected = self._writing = 0
        self.room_made += self.num_slots

    # -- looking --------------------------------------------------------------------------------

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Detach and return the events since the last call."""
        return self.event_log.take(self._blocks.__contains__)

    @property
    def num_slots(self) -> int:
        """Capacity in blocks."""
        return self._pool.num_slots

    @property
    def counts(self) -> dict[str, int]:
        """Slots by use: free, writing, idle, pinned and held; they add up to `num_slots`."""
        pool, idle = self._pool, self._idle + self._protected
        free, held = pool.unused.count, len(pool.holds)
        return {
            "free": free,
            "writing": self._writing,
            "idle": idle,
            "pinned": pool.num_slots - free - held - idle - self._writing,
            "held": held,
        }

    @property
    def pool(self) -> SlotPool:
        """The slots. For invariants and inspection."""
        return self._pool

    def state_of(self, key: OffloadKey) -> BlockState:
        """Return where a key stands."""
        slot = self._blocks.get(key)
        if slot is None:
            return BlockState.ABSENT
        if self._refs[slot] < 0:
            return BlockState.WRITING
        return BlockState.PINNED if self._refs[slot] & PINS else BlockState.IDLE

    @property
    def stored_now(self) -> int:
        """How many blocks requests are writing."""
        return len(self._writers)

    def loads(self) -> Counter[OffloadKey]:
        """Return how many loads pin each key. For invariants and inspection."""
        return self.loading.total()

    # -- inside ---------------------------------------------------------------------------------

    def _reserve_beside(
        self,
        unpinned: Collection[int],
        missing: Sequence[OffloadKey],
        writer: ReqContext,
        is_own_prefix: Callable[[OffloadKey], bool] | None,
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Do what `_reserve` does, but do not evict the unpinned blocks in some slots."""
        if not unpinned:
            return self._reserve(missing, writer, is_own_prefix)
        room_made = self.room_made
        self._hold(unpinned)
        try:
            return self._reserve(missing, writer, is_own_prefix)
        finally:
            self._unhold(unpinned)
            self.room_made = room_made  # they were evictable before

    def _reserve(
        self,
        missing: Sequence[OffloadKey],
        writer: ReqContext | None,
        is_own_prefix: Callable[[OffloadKey], bool] | None = None,
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Return the slots of absent keys, and the evicted keys; the prefix stays."""
        if not missing:
            return [], []
        if len(missing) > self.room:
            return None
        deficit = max(0, len(missing) - self._pool.free_count)
        victims = self._make_room(missing, deficit, is_own_prefix)
        if victims is None:
            return None
        evicted = self._evict(victims) if victims else []
        if len(victims) == len(missing):
            slots = victims[::-1]  # what freeing and allocating them would give
        else:
            if victims:
                self._pool.free(victims)
            slots = self._pool.allocate(len(missing))
        self._blocks.add(missing, slots)
        refs = self._refs
        for slot in slots:
            refs[slot] = WRITING
        if writer is not None:
            self._writers.update(dict.fromkeys(slots, writer))
        self._writing += len(missing)
        self._policy.admit(missing, slots)
        return slots, evicted

    def _evict(self, victims: Sequence[int]) -> list[OffloadKey]:
        """Forget the blocks in slots that the policy has given up; return their keys."""
        if self.on_evicted is not None:
            self.on_evicted(victims)
        evicted = self._blocks.remove(victims)
        self._idle -= len(victims)
        self.counters.evicted_blocks += len(victims)
        self.event_log.add(evicted, removed=True)
        return evicted

    def _make_room(
        self,
        missing: Sequence[OffloadKey],
        deficit: int,
        is_own_prefix: Callable[[OffloadKey], bool] | None,
    ) -> list[int] | None:
        """Return the slots that were given up; protected ones only where no others are left."""
        is_evictable = self._may_go_first if self._protected else self._may_go
        if is_own_prefix is not None:
            return self._make_room_beside(missing, deficit, is_evictable, is_own_prefix)
        victims = self._policy.make_room(missing, deficit, is_evictable)
        if victims is None and deficit > self._idle and self.on_evicted is not None:
            # It has asked for all that it may ask for: the order of the protected ones is known.
            self.on_evicted(self._last_to_go.first(deficit - self._idle))
            victims = self._policy.make_room(missing, deficit, is_evictable)
        return victims

    def _make_room_beside(
        self,
        missing: Sequence[OffloadKey],
        deficit: int,
        is_evictable: Callable[[int], bool],
        is_own_prefix: Callable[[OffloadKey], bool],
    ) -> list[int] | None:
        """Return the slots that were given up; there must be enough blocks that may go."""
        skipped: list[int] = []
        key_of = self._blocks.key_of

        def may_go(slot: int) -> bool:
            if not is_evictable(slot):
                return False
            if not is_own_prefix(key_of(slot)):
                return True
            skipped.append(slot)
            return False

        victims = self._policy.make_room(missing, deficit, may_go)
        self._policy.released(skipped)
        return victims

    def _may_go_first(self, slot: int) -> bool:
        """Tell whether the block in a slot may go; note that it is next if it is protected."""
        count = self._refs[slot]
        if count > 0 and not count & PINS:
            self._last_to_go.note(slot)
        return not count

    def _end_write(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], *, success: bool
    ) -> None:
        if not success:
            self._forget(keys, slots)
            self._pool.free(slots)
            self.room_made += len(slots)
            return
        refs, writers = self._refs, self._writers
        for slot in slots:
            refs[slot] = 0
            writers.pop(slot, None)
        self._writing -= len(slots)
        self._idle += len(slots)
        self.room_made += len(slots)
        self._policy.released(slots)
        self.event_log.add(keys, removed=False)
        self._tell_ended(keys)

    def _forget(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for slot in slots:
            self._writers.pop(slot, None)
        self._policy.discard(slots)
        self._blocks.remove(slots)
        self._writing -= len(slots)
        self.event_log.add(keys, removed=True, metadata_only=True)
        self._tell_ended(keys)

    def _tell_ended(self, keys: Sequence[OffloadKey]) -> None:
        if self.on_write_ended is not None:
            self.on_write_ended(keys)
        if self.decided is not None:
            self.decided(keys)
