"""The primary tier: maps keys to slots and tracks writes, pins and evictions.

A block's state machine, encoded in one integer per slot:

    absent  --reserve--> writing (-1)
    writing --written--> idle (0)         writing --failed--> absent
    idle    --pin------> pinned (k > 0)   pinned  --unpin (last)--> idle
    idle    --evict----> absent

A writing or pinned block is never evicted. Block state lives in arrays indexed by slot, so the
garbage collector traverses no object per block, and no step rehashes more than a few small parts of
a table. Memory per block at a million blocks under LRU: 164 bytes with a 36-byte key, 95 without;
38 bytes more after churn.

The blocks that a request used are reported to the policy once, in token order, when the request
ends. So the ranking does not depend on the order in which transfers end, and the tail of a prompt
is evicted before its head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.admission import (
    AdmissionFilter,
    in_prompt_order,
    longest_fitting_prefix,
    prefix_test,
    those_before,
)
from kvoffload_async.core.barred import BarredKeys
from kvoffload_async.core.counters import Figures, FigureSet, PrimaryCounters
from kvoffload_async.core.eventlog import Change, EventLog
from kvoffload_async.core.hinted import HintedBlocks
from kvoffload_async.core.index import OnResolved
from kvoffload_async.errors import InvariantError, StateError
from kvoffload_async.statistics import PrimaryStatistics, SlotStatistics, TenantStatistics
from kvoffload_async.tables.arrays import integers, small_integers
from kvoffload_async.tables.keymap import LAST_HASH_BYTE, KeyTable, require_keys, too_short
from kvoffload_async.tables.lists import FreeNumbers, NumberLists
from kvoffload_async.types import (
    NO_HINTS,
    CPULoadStoreSpec,
    Hints,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    Priority,
    ReqContext,
    as_block_ids,
    block_text,
)

_HIT: Final = LookupResult.HIT
_PENDING: Final = LookupResult.HIT_PENDING
_MISS: Final = LookupResult.MISS


class Loads:
    """Pins held by the loads of live and ended requests.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self) -> None:
        self._loads: dict[ReqContext, Counter[OffloadKey]] = {}
        self.num_pins = 0
        """Number of pins held by loads; a block may have several."""

    def begin(self, ctx: ReqContext, keys: Collection[OffloadKey]) -> None:
        """Record that a request loads blocks."""
        if keys:
            self._loads.setdefault(ctx, Counter()).update(keys)
            self.num_pins += len(keys)

    def end(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], *, may_be_unknown: bool
    ) -> Collection[OffloadKey]:
        """End a load; return the keys to unpin: those that `begin` has recorded.

        Raises:
            StateError: A key has no recorded load, and `may_be_unknown` is false; nothing has
                changed.
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
        """Drop all loads."""
        self._loads.clear()
        self.num_pins = 0

    def total(self) -> Counter[OffloadKey]:
        """Return how many loads pin each block. For invariants and inspection."""
        return sum(self._loads.values(), Counter())


Accesses = Iterable[tuple[OffloadKey, bool | None]]
"""Keys that a request used: True for a hit, False for a store, None where a store was declined."""


class RecencyLog:
    """Records the blocks that live requests use, until they are ranked at the request's end."""

    def __init__(self, rank: Callable[[ReqContext, Accesses], None]) -> None:
        """Start without live requests.

        Args:
            rank: Called with a request and its accesses, head to tail.
        """
        self._rank = rank
        self._accesses: dict[ReqContext, dict[OffloadKey, bool | None]] = {}

    def open(self, ctx: ReqContext) -> None:
        """Begin a request.

        Raises:
            StateError: `ctx` is live already; requests may share an id.
        """
        if ctx in self._accesses:
            raise StateError(f"request {ctx.req_id!r} is known already")
        self._accesses[ctx] = {}

    def knows(self, ctx: ReqContext) -> bool:
        """Return whether the request is live."""
        return ctx in self._accesses

    def note(self, ctx: ReqContext, keys: Iterable[OffloadKey], *, reused: bool | None) -> None:
        """Record that a live request used keys; a key's first hit or store determines `reused`.

        Raises:
            StateError: The request is not live.
        """
        accesses = self._accesses.get(ctx)
        if accesses is None:
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        if accesses:
            for key in keys:
                if accesses.get(key) is None:
                    accesses[key] = reused
        else:
            accesses.update(dict.fromkeys(keys, reused))

    def used_by(self, ctx: ReqContext) -> Collection[OffloadKey]:
        """Return the keys that a live request has used so far."""
        return self._accesses[ctx].keys()

    def commit(self, ctx: ReqContext) -> list[OffloadKey]:
        """End a request: rank the keys it used; return the reused ones, head to tail.

        Raises:
            StateError: The request is not live.
        """
        accesses = self._accesses.pop(ctx, None)
        if accesses is None:
            raise StateError(f"request {ctx.req_id!r} is unknown or has finished already")
        positions = ctx.key_positions
        ordered: Accesses = accesses.items()
        if positions:
            last = max(positions.values()) + 1
            ordered = sorted(ordered, key=lambda access: positions.get(access[0], last))
        self._rank(ctx, ordered)
        return [key for key, reused in ordered if reused]


_FREE, _TAKEN, _HELD = range(3)


class SlotPool:
    """Allocator of `num_slots` slots.

    A slot is free, taken, or *held*: it belongs to no block, but an orphaned copy may still access
    it, so it must not be allocated before the copy has ended.

    Never-used slots are allocated first, in increasing order: a fresh pool returns adjacent slots,
    which tiers can coalesce into one I/O call.

    Attributes:
        unused: The free slots. Read-only.
        holds: Held slot -> number of copies that may access it. Read-only.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._states = bytearray(num_slots)
        self.unused = FreeNumbers(num_slots)
        self.holds: dict[int, int] = {}

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` slots.

        Raises:
            InvariantError: Fewer than `count` slots are free.
        """
        if count > self.unused.count:
            raise InvariantError(f"{count} slots asked for, {self.unused.count} free")
        slots = self.unused.take(count)
        states = self._states
        for slot in slots:
            states[slot] = _TAKEN
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Free taken slots."""
        states = self._states
        for slot in slots:
            if states[slot] != _TAKEN:  # tested inline: a call per slot costs more than the rest
                self._expect(slot, _TAKEN)
            states[slot] = _FREE
        self.unused.give_back(slots)

    def hold(self, slots: Iterable[int]) -> None:
        """Hold taken slots: they are not allocated again until `release`."""
        for slot in slots:
            self._expect(slot, _TAKEN)
            self._states[slot] = _HELD
            self.holds[slot] = 1

    def release(self, slots: Iterable[int]) -> None:
        """Undo one hold of each slot; a slot without holds becomes free."""
        for slot in slots:
            self._expect(slot, _HELD)
            self.holds[slot] -= 1
            if not self.holds[slot]:
                del self.holds[slot]
                self._states[slot] = _FREE
                self.unused.give_back([slot])

    def reset(self, still_touched: Iterable[int]) -> None:
        """Free all slots except held ones; hold each slot once per entry in `still_touched`."""
        for slot in still_touched:
            self.holds[slot] = self.holds.get(slot, 0) + 1
        self._states = bytearray(self.num_slots)
        for slot in self.holds:
            self._states[slot] = _HELD
        every = reversed(range(self.num_slots))
        self.unused.reset(slot for slot in every if slot not in self.holds)

    def _expect(self, slot: int, state: int) -> None:
        if self._states[slot] != state:
            raise InvariantError(f"slot {slot} is in state {self._states[slot]}, not {state}")


class ProtectedSlots:
    """The protected slots that the policy has proposed for eviction, in the order proposed.

    Their blocks are pending for a tier, so they are evicted only when no others are left. The
    policy proposes in rank order, and does not propose a slot again until it is released: this
    list saves a scan of the protected slots. Memory: 9 bytes per slot, once used.
    """

    def __init__(self, num_slots: int) -> None:
        """Create an empty list for a primary of `num_slots` slots."""
        self._num_slots = num_slots
        self._in_order: NumberLists | None = None
        self._is_member = small_integers(0)

    def note(self, slot: int) -> None:
        """Append a slot; a member moves to the end."""
        if self._in_order is None:
            self._in_order = NumberLists(self._num_slots)
            self._is_member = small_integers(self._num_slots)
        if self._is_member[slot]:
            self._in_order.remove([slot])
        self._is_member[slot] = 1
        self._in_order.append([slot])

    def discard(self, slots: Sequence[int]) -> list[int]:
        """Remove the slots that are members; return them."""
        if self._in_order is None:
            return []
        is_member = self._is_member
        members = [slot for slot in slots if is_member[slot]]
        for slot in members:
            is_member[slot] = 0
        self._in_order.remove(members)
        return members

    def first(self, count: int) -> list[int]:
        """Return up to `count` members, the oldest first."""
        return [] if self._in_order is None else list(islice(self._in_order.walk(), count))

    def clear(self) -> None:
        """Remove all members."""
        self._in_order = None


class Share:
    """The slots that one tenant may occupy, and the counts of its blocks.

    Without tenants, one share has all slots.

    Attributes:
        most: Maximum number of slots.
        free: Slots that the tenant may still take, which are free in the pool.
        held: Slots that belong to no block, but that an orphaned copy may still access.
        kept: Number of blocks that users pin; set by `Pins`.
        idle: Number of readable blocks that are neither pinned nor protected.
        stored_blocks: Blocks of this tenant that requests have stored. Counter, as the next two.
        loaded_blocks: Blocks that requests have loaded.
        evicted_blocks: Blocks that were evicted.
        protected: Number of blocks that are protected and not pinned.
        protected_slots: Those of them that the policy has proposed for eviction.
        hinted: The blocks that hints put at an end of the order of eviction; None: no request has
            had such hints.
    """

    __slots__ = (
        "_num_slots",
        "evicted_blocks",
        "free",
        "held",
        "hinted",
        "idle",
        "kept",
        "loaded_blocks",
        "most",
        "protected",
        "protected_slots",
        "stored_blocks",
    )

    def __init__(self, most: int, num_slots: int) -> None:
        """Start without blocks, in a primary of `num_slots` slots."""
        self.most = most
        self.kept = self.stored_blocks = self.loaded_blocks = self.evicted_blocks = 0
        self._num_slots = num_slots
        self.protected_slots = ProtectedSlots(num_slots)
        self.reset()

    def reset(self) -> None:
        """Forget all blocks; every slot is free."""
        self.free = self.most
        self.held = self.idle = self.protected = 0
        self.hinted: HintedBlocks | None = None
        self.protected_slots.clear()

    def marks(self) -> HintedBlocks:
        """Return `hinted`, created if it is None."""
        if self.hinted is None:
            self.hinted = HintedBlocks(self._num_slots, self.most)
        return self.hinted

    def note_evicted(self, count: int) -> None:
        """Record that idle blocks have left."""
        self.idle -= count
        self.free += count


@dataclass(frozen=True)
class Tenancy:
    """How the slots are divided among tenants.

    Attributes:
        quotas: Slots of each tenant, at least 1; together at most those of the primary.
        tenant_of: Returns the index of a key's tenant.
        names: The tenants' names, for statistics.
    """

    quotas: Sequence[int]
    tenant_of: Callable[[OffloadKey], int]
    names: Sequence[str]


WRITING: Final = -1
A_DEBT: Final = 1 << 24
PINS: Final = A_DEBT - 1
"""Bit mask of the pin count in a block's counter; nonzero too while the counter is `WRITING`."""


class ResidentBlocks:
    """The resident blocks of a cache with `num_slots` slots: look-up, pins and ranking.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        decided: Called with the keys whose writes have succeeded or failed, except by a reset.
        on_write_ended: Called with the same keys, while `Cascades` waits for a write to end.
        policy: The eviction policy. Read-only.
        shares: The slots of each tenant; one without tenants. Read-only.
        is_shared: Whether there are tenants. Read-only.
        num_kept: Number of blocks that users pin, of all tenants; set by `Pins`.
        now_s: Time of the current step, in seconds.
        room_made: Number of times that a slot became free or evictable, or was no longer withheld
            from stores. After a store that found no room, its increase is the maximum number of
            blocks for which there may be room now.
        counters: Counts of loads, stores, evictions and lookups.
        barred: Keys that are being deleted: they are absent for every lookup.
    """

    decided: OnResolved | None = None
    on_write_ended: OnResolved | None = None

    def __init__(self, num_slots: int, policy: CachePolicy, tenancy: Tenancy | None = None) -> None:
        """Start without blocks; takes ownership of the policy."""
        self.room_made = 0
        self.barred = BarredKeys()
        self.policy = policy
        self._tenancy = tenancy
        self.is_shared = tenancy is not None
        quotas = [num_slots] if tenancy is None else tenancy.quotas
        self._names = () if tenancy is None else tenancy.names
        self.num_kept = 0
        self.shares = [Share(most, num_slots) for most in quotas]
        self._only = self.shares[0]
        self._share_of = small_integers(0 if tenancy is None else num_slots)
        """Slot -> index of the share whose block it has, or had last."""
        self.now_s = 0.0
        self._blocks = KeyTable(num_slots)
        self._parts = self._blocks.map.parts
        self._refs = integers(num_slots)
        """Slot -> counter of the pins and protections of its block; undefined for a free slot."""
        self.on_evicted: Callable[[Sequence[int]], None] | None = None
        """Called with slots just before their blocks are evicted; None while not needed."""
        self.on_request_ended: Callable[[ReqContext, Sequence[OffloadKey]], None] | None = None
        """Called with each request that ends, and the blocks that it used; None: not needed."""
        self.counters = PrimaryCounters()

    def begin_step(self, now_s: float) -> None:
        """Set the time of the current step; end the retentions whose time has come."""
        self.now_s = now_s
        for share in self.shares:
            if share.hinted is not None and share.hinted.retained:
                self.policy.released(share.hinted.expire(now_s))

    @property
    def hinted_blocks(self) -> int:
        """Number of blocks that hints retain."""
        return sum(each.hinted.retained for each in self.shares if each.hinted is not None)

    def keys_by_share(
        self, keys: Sequence[OffloadKey]
    ) -> Iterable[tuple[Share, Sequence[OffloadKey]]]:
        """Group keys by their tenant's share, in order."""
        if self._tenancy is None:
            return ((self.shares[0], keys),)
        groups: dict[int, list[OffloadKey]] = {}
        for key in keys:
            groups.setdefault(self._tenancy.tenant_of(key), []).append(key)
        return [(self.shares[index], group) for index, group in groups.items()]

    def share_of(self, keys: Iterable[OffloadKey]) -> Share:
        """Return the share of keys' tenant; raises StateError if they are of several."""
        if self._tenancy is None:
            return self.shares[0]
        indices = set(map(self._tenancy.tenant_of, keys)) or {0}
        if len(indices) > 1:
            raise StateError("the blocks are of several tenants: use one request for each")
        return self.shares[indices.pop()]

    def by_share(self, slots: Iterable[int]) -> Iterable[tuple[Share, Iterable[int]]]:
        """Group slots by the share that they are in, in order."""
        if self._tenancy is None:
            return ((self._only, slots),)
        groups: dict[int, list[int]] = {}
        for slot in slots:
            groups.setdefault(self._share_of[slot], []).append(slot)
        return [(self.shares[index], group) for index, group in groups.items()]

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS."""
        try:
            slot = self._parts[key[0] + key[LAST_HASH_BYTE]].get(key)
        except IndexError:
            raise too_short([key]) from None
        if slot is None or (self.barred.sets and key in self.barred):
            return _MISS
        return _HIT if self._refs[slot] >= 0 else _PENDING

    def lookup_many(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """Return HIT, HIT_PENDING or MISS for each key."""
        refs = self._refs
        answers: list[LookupResult] = []
        for slot in self._blocks.find(keys):
            if slot is None:
                answers.append(_MISS)
            else:
                answers.append(_HIT if refs[slot] >= 0 else _PENDING)
        if self.barred.sets and (barred := self.barred.among(keys)):
            answers = [
                _MISS if key in barred else answer
                for key, answer in zip(keys, answers, strict=True)
            ]
        return answers

    def pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin readable blocks against eviction; return their slots, in key order.

        Raises:
            StateError: A key is not readable; nothing has changed.
        """
        refs = self._refs
        slots: list[int] = []
        for slot in self._blocks.find(keys):
            if slot is None or refs[slot] < 0:
                key = keys[len(slots)]
                raise StateError(f"{block_text(key)} is not readable; look it up in this step")
            slots.append(slot)
        self._hold(slots)
        return slots

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Undo one `pin` of each key; raises StateError at the first key that is not pinned."""
        keys = tuple(keys)
        refs = self._refs
        slots: list[int] = []
        try:
            for key, slot in zip(keys, self._blocks.find(keys), strict=True):
                if slot is None or refs[slot] < 1 or not refs[slot] & PINS:
                    raise StateError(f"{block_text(key)} is not pinned")
                slots.append(slot)
        finally:
            self._unhold(slots)

    def protect(self, slots: Iterable[int]) -> None:
        """Protect readable blocks, so that they are evicted last: they are pending for a tier.

        A block that is pending for several tiers is protected once for each of them.
        """
        refs = self._refs
        for share, own in self.by_share(slots):
            num_idle = 0
            for slot in own:
                count = refs[slot]
                if not count:
                    num_idle += 1
                refs[slot] = count + A_DEBT
            share.idle -= num_idle
            share.protected += num_idle

    def unprotect(self, slots: Iterable[int]) -> None:
        """Undo one `protect` of each slot; the last one makes its block evictable again."""
        refs = self._refs
        for share, own in self.by_share(slots):
            released: list[int] = []
            for slot in own:
                count = refs[slot] - A_DEBT
                refs[slot] = count
                if not count:
                    released.append(slot)
            share.idle += len(released)
            share.protected -= len(released)
            self.room_made += len(released)
            share.protected_slots.discard(released)
            self.policy.released(released)

    def readable_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the slots of the readable keys, in key order."""
        refs = self._refs
        return [s for s in self._blocks.find(keys) if s is not None and refs[s] >= 0]

    def following(self, key: OffloadKey | None, count: int) -> list[OffloadKey]:
        """Return the next keys of readable blocks; at most `count`, fewer only at the end."""
        found: list[OffloadKey] = []
        while len(found) < count and (keys := self._blocks.map.following(key, count)):
            answers = zip(keys, self.lookup_many(keys), strict=True)
            found += [one for one, answer in answers if answer is _HIT]
            key = keys[-1]
        return found[:count]

    def resident_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the slots of the resident keys, barred ones included, in key order."""
        return [slot for slot in self._blocks.find(keys) if slot is not None]

    def keys_of(self, slots: Sequence[int]) -> list[OffloadKey]:
        """Return the keys of the blocks in occupied slots."""
        return self._blocks.keys_of(slots)

    def slot_of(self, key: OffloadKey) -> int:
        """Return a resident key's slot; raises StateError if it is absent."""
        slot = self._blocks.get(key)
        if slot is None:
            raise StateError(f"{block_text(key)} is absent")
        return slot

    def key_of(self, slot: int) -> OffloadKey:
        """Return the key of the block in a slot. For invariants and inspection."""
        return self._blocks.key_of(slot)

    def forgotten(self) -> list[OffloadKey]:
        """Return evictable keys that the policy would never propose for eviction.

        Empty unless an invariant is broken. For invariants and inspection.
        """
        marks = [share.hinted for share in self.shares if share.hinted is not None]
        skipped = [slot for slot in self.policy.skipped() if not self._refs[slot]]
        skipped = [slot for slot in skipped if not any(each.is_retained(slot) for each in marks)]
        return self._blocks.keys_of(skipped)

    def resident(self) -> Iterator[tuple[OffloadKey, int, int]]:
        """Iterate over (key, slot, number of pins) of the resident blocks; -1: being written.

        For invariants and inspection.
        """
        refs = self._refs
        return (
            (key, slot, WRITING if refs[slot] < 0 else refs[slot] & PINS)
            for key, slot in self._blocks.items()
        )

    def readable(self) -> list[OffloadKey]:
        """Return the keys of all readable blocks."""
        refs = self._refs
        return [key for key, slot in self._blocks.map.items() if refs[slot] >= 0]

    def debts(self) -> dict[int, int]:
        """Return protected slot -> number of tiers for which its block is pending.

        For invariants and inspection.
        """
        debts = {slot: self._refs[slot] // A_DEBT for _, slot, refs in self.resident() if refs >= 0}
        return {slot: count for slot, count in debts.items() if count}

    def _classify(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey], set[int]]:
        """Classify keys: (absent keys, readable keys, slots of readable keys without pins)."""
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
        """Add one pin to the readable block in each slot, per occurrence of the slot."""
        refs = self._refs
        for share, own in self.by_share(slots):
            num_idle = 0
            protected: list[int] = []
            for slot in own:
                count = refs[slot]
                if not count:
                    num_idle += 1
                elif not count & PINS:
                    protected.append(slot)
                refs[slot] = count + 1
            share.idle -= num_idle
            if protected:
                share.protected -= len(protected)
                share.protected_slots.discard(protected)

    def _unhold(self, slots: Iterable[int]) -> None:
        """Remove one pin per occurrence of a slot."""
        refs = self._refs
        for share, own in self.by_share(slots):
            num_idle = 0
            released: list[int] = []
            for slot in own:
                count = refs[slot] - 1
                refs[slot] = count
                if not count & PINS:
                    num_idle += not count
                    released.append(slot)
            share.idle += num_idle
            share.protected += len(released) - num_idle
            self.room_made += len(released)
            self.policy.released(released)

    def _writing_slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots = []
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is None or self._refs[slot] != WRITING:
                raise StateError(f"{block_text(key)} is not being written")
            slots.append(slot)
        return slots

    def _rank(self, ctx: ReqContext, accesses: Accesses) -> None:
        """Report a request's accesses to the policy, head to tail; skips absent keys."""
        has_low = False
        for share in self.shares:
            if share.hinted is not None and share.hinted.num_low:
                has_low = True
        if has_low or ctx.hints is not NO_HINTS:
            accesses = tuple(accesses)
            self._apply_hints(ctx.hints, [key for key, _ in accesses])
        if self.policy.follows_requests:
            self._rank_request(ctx, dict(accesses))
            return
        parts = self._parts
        slots: list[int] = []
        reused: list[bool] = []
        for key, again in accesses:
            slot = parts[key[0] + key[LAST_HASH_BYTE]].get(key)
            if slot is not None:
                slots.append(slot)
                reused.append(bool(again))
        self._propose_again(slots)
        self.policy.access(slots, reused)

    def _rank_request(self, ctx: ReqContext, accesses: Mapping[OffloadKey, bool | None]) -> None:
        """Like `_rank`, for a policy that is notified of absent keys too."""
        keys = tuple(accesses)
        if not keys:
            return
        slots = self._blocks.find(keys)
        self._propose_again([slot for slot in slots if slot is not None])
        self.policy.request_ended(ctx, keys, slots, [bool(again) for again in accesses.values()])

    def _propose_again(self, slots: Sequence[int]) -> None:
        """Release protected blocks whose rank an access changes: the policy proposes them again."""
        for share, own in self.by_share(slots):
            if share.protected:
                self.policy.released(share.protected_slots.discard(list(own)))

    @property
    def protected_blocks(self) -> int:
        """Number of unpinned blocks that are protected because they are pending for tiers."""
        return sum([share.protected for share in self.shares])

    def _apply_hints(self, hints: Hints, keys: Sequence[OffloadKey]) -> None:
        """Mark the blocks that a request has used, head to tail, as its hints say."""
        present = [slot for slot in self._blocks.find(keys[::-1]) if slot is not None]
        for share, own in self.by_share(present):
            slots = list(own)
            if share.hinted is not None:
                share.hinted.use(slots, is_low=hints.priority is Priority.LOW)
            if hints.retention_s:
                is_high = hints.priority is Priority.HIGH
                ended = share.marks().retain(slots, self.now_s, hints.retention_s, is_high=is_high)
                self.policy.released(ended)


Allowed = Callable[[int, bool], int]
"""Returns how many of a number of slots a store may take while requests wait for room.

The flag says whether it takes all or none."""


class Primary(ResidentBlocks):
    """The primary tier's `num_slots` slots: requests, stores, loads and evictions, but no data.

    Operations validate their arguments before they change state.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        may_decline: Whether the policy may decline blocks of a store; not while a tier, which is
            fed through the primary, stores everything.
        drops_pending: Whether protected blocks are evicted when no others are left; set by the
            engine's configuration.
    """

    def __init__(
        self,
        num_slots: int,
        policy: CachePolicy,
        *,
        accept_prefix: bool = False,
        admission: AdmissionFilter | None = None,
        enable_events: bool = False,
        tenancy: Tenancy | None = None,
    ) -> None:
        """Create an empty primary.

        Args:
            num_slots: Capacity in blocks.
            policy: Eviction policy; this object takes ownership.
            accept_prefix: Whether `prepare_store` accepts the longest prefix of a batch that fits
                without evicting blocks its request has used, instead of all or nothing.
            admission: Admission filter of `prepare_store`.
            enable_events: Whether to record events for `take_events`.
            tenancy: The tenants, each with a policy of its own; see `TenantPolicies`. None: one
                share has all slots.
        """
        super().__init__(num_slots, policy, tenancy)
        self.pool = SlotPool(num_slots)
        """Allocator of the slots. Read-only."""
        self._writers: dict[int, ReqContext] = {}
        """Slot that a request is writing -> the request."""
        self._recency = RecencyLog(self._rank)
        self._accept_prefix = accept_prefix
        self._admission = admission
        self.loading = Loads()
        """Blocks that requests are loading. Read-only."""
        refs = self._refs
        self._is_evictable: Callable[[int], bool] = lambda slot: not refs[slot]
        self.drops_pending = True
        self.may_decline = True
        self._writing = 0
        self.event_log = EventLog(
            Medium.CPU, Locality.LOCAL, enabled=enable_events, announces_removals=True
        )
        """Events for `take_events`, and the count of dropped ones."""
        self.generation = 0
        """Number of resets; a grant of an earlier generation is stale."""

    # -- requests -------------------------------------------------------------------------------

    def open_request(self, ctx: ReqContext) -> None:
        """Begin a request; raises StateError if `ctx` is live already."""
        self._recency.open(ctx)

    def used_by(self, ctx: ReqContext) -> Collection[OffloadKey]:
        """Return the keys that a live request has used so far."""
        return self._recency.used_by(ctx)

    def close_request(self, ctx: ReqContext) -> list[OffloadKey]:
        """End a request: rank the keys it used; return the reused ones, head to tail."""
        if self._recency.knows(ctx):
            used = self._recency.used_by(ctx)
            self.counters.used_blocks += len(used)
            if self.on_request_ended is not None:
                self.on_request_ended(ctx, tuple(used))
        found = self._recency.commit(ctx)
        self.counters.found_blocks += len(found)
        return found

    def touch(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> bool:
        """Record a use of keys; ranked at the request's end, or now if the request is not live.

        Returns:
            Whether the keys were ranked now.

        Raises:
            StateError: A key has the wrong length.
        """
        require_keys(keys)
        if self._recency.knows(ctx):
            self._recency.note(ctx, keys, reused=True)
            return False
        self._rank(ctx, dict.fromkeys(keys, True).items())
        return True

    # -- reading --------------------------------------------------------------------------------

    def prepare_load(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin readable keys for a request and record their use; return their slots, in key order.

        Raises:
            StateError: A key is not readable, or the request is not live; nothing has changed.
        """
        if not self._recency.knows(ctx):
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        slots = self.pin(keys)
        self.counters.loaded_blocks += len(keys)
        for share, own in self.keys_by_share(keys):
            share.loaded_blocks += len(own)
        self.loading.begin(ctx, keys)
        self._recency.note(ctx, keys, reused=True)
        return slots

    def complete_load(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], generation: int | None = None
    ) -> None:
        """Undo the request's `prepare_load`, which a reset may have done already.

        Args:
            ctx: The request.
            keys: The keys it has loaded.
            generation: Generation of the grant; None if the caller drops grants made before a
                reset.

        Raises:
            StateError: The request did not load a key, and no reset has happened.
        """
        if generation in {None, self.generation}:
            may_be_unknown = self.generation > 0
            self.unpin(self.loading.end(ctx, keys, may_be_unknown=may_be_unknown))

    # -- writing --------------------------------------------------------------------------------

    def prepare_store(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], allowed: Allowed | None = None
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the absent ones of `keys`, evicting other blocks if needed.

        Duplicate keys count once. Keys that are readable count as used by the request.

        Args:
            ctx: The request.
            keys: Keys of the blocks to store.
            allowed: A further bound on the slots of the store; see `Allowed`.

        Returns:
            The granted keys and slots; None if there is no room, and then nothing has changed.

        Raises:
            StateError: The request is not live, a key has the wrong length, or the keys are of
                several tenants.
        """
        if not self._recency.knows(ctx):
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        require_keys(keys)
        share = self.share_of(keys)
        absent, readable, unpinned = self._classify(keys)
        missing = absent if ctx.hints is NO_HINTS else ctx.storable(absent)
        wanted, declined = self._admitted(ctx, keys, missing, unpinned, share)
        left_out: Sequence[OffloadKey] = ()
        is_own_prefix: Callable[[OffloadKey], bool] | None = None
        if wanted and allowed is not None:
            wanted, left_out = self._cut(wanted, ctx, allowed(len(wanted), not self._accept_prefix))
        if self._accept_prefix and len(wanted) > share.free:
            used = self._recency.used_by(ctx)
            is_own_prefix = prefix_test(wanted, used, ctx.key_positions)
            idle = share.free + share.idle - len(unpinned)
            if len(wanted) > idle - len(used):  # too few may be left without its own prefix
                unpinned |= self._classify([key for key in used if is_own_prefix(key)])[2]
                is_own_prefix = None
                wanted, cut = self._cut(wanted, ctx, self._room_excluding(share, unpinned))
                left_out = [*cut, *left_out]
        if left_out and not wanted:
            self.counters.refused_stores += 1
            return None
        granted = self._reserve(wanted, share, ctx, is_own_prefix, unpinned)
        if granted is None:
            self.counters.refused_stores += 1
            return None
        slots, evicted = granted
        if self._admission is not None:
            self._admission.offered(those_before(left_out, missing, ctx.key_positions))
        self.counters.withheld_blocks += len(absent) - len(missing)
        if readable:
            self._recency.note(ctx, readable, reused=True)
        self._note_stored(ctx, wanted, slots)
        if declined:
            self._recency.note(ctx, declined, reused=None)
            self.counters.declined_blocks += len(declined)
        spec = CPULoadStoreSpec(as_block_ids(slots), self.generation)
        return PrepareStoreOutput(wanted, spec, evicted, left_out)

    def _note_stored(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        self._recency.note(ctx, keys, reused=False)
        if ctx.hints.priority is Priority.LOW:
            self.share_of(keys).marks().note_low(slots)

    def allow_anew(self, count: int) -> None:
        """Record that stores may now take up to `count` slots that were withheld from them."""
        self.room_made += min(count, self.room)

    def _cut(
        self, wanted: Sequence[OffloadKey], ctx: ReqContext, room: int
    ) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
        """Split a store's `wanted` keys into those that get one of `room` slots, and the rest."""
        if self._accept_prefix:
            return longest_fitting_prefix(wanted, ctx.key_positions, room)
        return (wanted, ()) if len(wanted) <= room else ((), wanted)

    def _admitted(
        self,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        missing: Sequence[OffloadKey],
        unpinned: Collection[int],
        share: Share,
    ) -> tuple[Sequence[OffloadKey], Collection[OffloadKey]]:
        """Return the missing keys that filter and policy admit, and those that the policy declines.

        The policy chooses as if the `unpinned` slots were pinned, like the store that follows.
        """
        wanted = missing if self._admission is None else self._admission.admitted(missing)
        if not wanted or not self.policy.follows_requests:
            return wanted, ()
        positions = ctx.key_positions
        keys, offered = in_prompt_order(keys, positions), in_prompt_order(wanted, positions)
        is_own_prefix = prefix_test(wanted, self._recency.used_by(ctx), positions)
        may_evict, skipped = self._eviction_test(share, is_own_prefix, unpinned)
        free = share.free if self.may_decline else None
        declined = self.policy.declines(ctx, keys, offered, free, may_evict)
        self.policy.released(skipped)
        if declined:
            wanted = [key for key in wanted if key not in declined]
        return wanted, declined

    @property
    def room(self) -> int:
        """Number of slots that can be reserved now, free or by eviction, by all tenants."""
        return sum(map(self.room_in, self.shares))

    def room_in(self, share: Share) -> int:
        """Return the number of slots that a tenant can reserve now, free or by eviction."""
        return share.free + share.idle + self.drops_pending * share.protected

    def room_excluding(self, share: Share, keys: Sequence[OffloadKey]) -> int:
        """Return how many slots a tenant can reserve without evicting these readable blocks."""
        refs = self._refs
        slots = {slot for slot in self._blocks.find(keys) if slot is not None}
        return self._room_excluding(share, {slot for slot in slots if not refs[slot] & PINS})

    def _room_excluding(self, share: Share, unpinned: Collection[int]) -> int:
        """Return how many slots can be reserved without evicting the blocks in `unpinned`."""
        own = [slot for each, own in self.by_share(unpinned) if each is share for slot in own]
        if self.drops_pending:
            return self.room_in(share) - len(own)
        return self.room_in(share) - [self._refs[slot] for slot in own].count(0)

    def reserve(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Reserve slots for as many absent keys as fit, evicting other blocks if needed.

        Args:
            keys: The keys, without duplicates; the first ones get the slots.

        Returns:
            The slots, one per key that got one, in key order.

        Raises:
            StateError: A key is present, or they are of several tenants; nothing has changed.
        """
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is not None:
                raise StateError(f"{block_text(key)} is present already")
        share = self.share_of(keys)
        granted = self._reserve(keys[: self.room_in(share)], share, None)
        return [] if granted is None else granted[0]

    def complete_store(
        self,
        ctx: ReqContext,
        keys: Sequence[OffloadKey],
        *,
        success: bool,
        generation: int | None = None,
    ) -> list[OffloadKey]:
        """End the request's write of `keys`; return the keys that the request was writing.

        Keys that are readable, absent, or written by another request are ignored. After a reset,
        so is a whole grant of an earlier generation; see `complete_load`.
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
        for share, own in self.keys_by_share(mine):
            share.stored_blocks += success * len(own)
        return mine

    def complete_write(self, keys: Sequence[OffloadKey], *, success: bool) -> None:
        """End writes: the keys become readable, or absent and their slots free."""
        self._end_write(keys, self._writing_slots(keys), success=success)

    def orphan_write(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Fail writes whose copy still runs: the keys become absent, their slots stay held.

        Returns:
            The slots; pass them to `release_slots` once the copy has ended.
        """
        slots = self._writing_slots(keys)
        self._forget(keys, slots)
        self.pool.hold(slots)
        for share, own in self.by_share(slots):
            share.held += len(list(own))
        return slots

    def delete(self, keys: Sequence[OffloadKey]) -> tuple[int, list[OffloadKey]]:
        """Remove blocks that are neither pinned nor protected nor being written.

        Returns:
            The number of removed blocks, and the keys of the resident ones that stay.
        """
        refs = self._refs
        slots: list[int] = []
        in_use: list[OffloadKey] = []
        for key, slot in zip(keys, self._blocks.find(keys), strict=True):
            if slot is not None and refs[slot]:
                in_use.append(key)
            elif slot is not None:
                slots.append(slot)
        if slots:
            self.policy.discard(slots)
            self._note_evicted(slots)
            gone = self._blocks.remove(slots)
            self.pool.free(slots)
            self.room_made += len(slots)
            self.counters.deleted_blocks += len(slots)
            self.event_log.add(gone, Change.REMOVED)
        return len(slots), in_use

    def release_slots(self, slots: Sequence[int]) -> None:
        """Undo one hold of each slot, when a copy has ended; without holds, a slot is free."""
        self.pool.release(slots)
        for share, own in self.by_share(slots):
            freed = sum(slot not in self.pool.holds for slot in set(own))
            share.held -= freed
            share.free += freed
        self.room_made += len(slots)

    def reset(self, still_touched: Iterable[int] = ()) -> None:
        """Drop all keys, pins and writes; live requests stay live.

        Args:
            still_touched: Slots that orphaned copies may access, once per copy; they are held
                until `release_slots`.
        """
        self.generation += 1
        self.event_log.add(self.readable(), Change.REMOVED)
        self._blocks.clear()
        self._writers.clear()
        self.loading.clear()
        self.policy.clear()
        if self._admission is not None:
            self._admission.clear()
        self.pool.reset(still_touched)
        self._writing = 0
        for share in self.shares:
            share.reset()
        for share, held in self.by_share(self.pool.holds):
            share.held = len(list(held))
            share.free -= share.held
        self.room_made += self.num_slots

    # -- inspection -----------------------------------------------------------------------------

    def take_events(self, max_keys: int | None = None) -> Iterator[OffloadingEvent]:
        """Detach and return events since the last call; see `EventLog.take`."""
        return self.event_log.take(self._blocks.__contains__, max_keys)

    @property
    def num_slots(self) -> int:
        """Capacity in blocks."""
        return self.pool.num_slots

    @property
    def counts(self) -> dict[str, int]:
        """Slots by use: free, writing, idle, pinned and held; they add up to `num_slots`."""
        pool, idle = self.pool, sum(share.idle + share.protected for share in self.shares)
        free, held = pool.unused.count, len(pool.holds)
        return {
            "free": free,
            "writing": self._writing,
            "idle": idle,
            "pinned": pool.num_slots - free - held - idle - self._writing,
            "held": held,
        }

    @property
    def tenants(self) -> Mapping[str, tuple[int, ...]]:
        """The values of each tenant's `TenantStatistics`, by name; empty without tenants."""
        return {
            name: (
                share.most,
                share.most - share.free,
                share.stored_blocks,
                share.loaded_blocks,
                share.evicted_blocks,
            )
            for name, share in zip(self._names, self.shares, strict=False)
        }

    def num_in_use(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many of these blocks are pinned or being written."""
        refs = self._refs
        slots = self._blocks.find(keys)
        return sum(slot is not None and refs[slot] & PINS > 0 for slot in slots)

    @property
    def stored_now(self) -> int:
        """Number of blocks that requests are writing."""
        return len(self._writers)

    # -- internal -------------------------------------------------------------------------------

    def _reserve(
        self,
        missing: Sequence[OffloadKey],
        share: Share,
        writer: ReqContext | None,
        is_own_prefix: Callable[[OffloadKey], bool] | None = None,
        unpinned: Collection[int] = (),
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Reserve slots; return them and the evicted keys, or None if there is no room.

        Keys for which `is_own_prefix` is true are not evicted, nor blocks in the slots `unpinned`.
        """
        if not missing:
            return [], []
        if unpinned:
            room_made = self.room_made
            self._hold(unpinned)
            try:
                return self._reserve(missing, share, writer, is_own_prefix)
            finally:
                self._unhold(unpinned)
                self.room_made = room_made  # no room was made: the blocks had been evictable
        if len(missing) > self.room_in(share):
            return None
        deficit = max(0, len(missing) - share.free)
        victims = self._make_room(missing, deficit, share, is_own_prefix)
        if victims is None:
            return None
        evicted = self._evict(victims) if victims else []
        share.evicted_blocks += len(evicted)
        if len(victims) == len(missing):
            slots = victims[::-1]  # the order in which the pool would allocate them
        else:
            if victims:
                self.pool.free(victims)
            slots = self.pool.allocate(len(missing))
        self._blocks.add(missing, slots)
        self._note_taken(share, slots)
        refs = self._refs
        for slot in slots:
            refs[slot] = WRITING
        if writer is not None:
            self._writers.update(dict.fromkeys(slots, writer))
        self._writing += len(missing)
        self.policy.admit(missing, slots)
        return slots, evicted

    def _note_taken(self, share: Share, slots: Sequence[int]) -> None:
        share.free -= len(slots)
        index, share_of = self.shares.index(share), self._share_of
        for slot in slots if self.is_shared else ():
            share_of[slot] = index

    def _evict(self, victims: Sequence[int]) -> list[OffloadKey]:
        """Remove the blocks in slots that the policy chose as victims; return their keys."""
        if self.on_evicted is not None:
            self.on_evicted(victims)
        self._note_evicted(victims)
        evicted = self._blocks.remove(victims)
        self.counters.evicted_blocks += len(victims)
        self.event_log.add(evicted, Change.REMOVED)
        return evicted

    def _note_evicted(self, slots: Iterable[int]) -> None:
        """Record in the shares that idle blocks leave."""
        for share, group in self.by_share(slots):
            own = list(group)
            share.note_evicted(len(own))
            if share.hinted is not None:
                share.hinted.forget(own)

    def _make_room(
        self,
        missing: Sequence[OffloadKey],
        deficit: int,
        share: Share,
        is_own_prefix: Callable[[OffloadKey], bool] | None,
    ) -> list[int] | None:
        """Choose `deficit` slots to evict, protected ones only if no others are left.

        Blocks that hints put first are chosen without the policy. None if it finds too few others.
        """
        first: list[int] = []
        if deficit and share.hinted is not None and share.hinted.has_first:
            may_evict = self._first_test(share)
            if is_own_prefix is not None:
                may_evict, _ = self._eviction_test(share, is_own_prefix)
            first = share.hinted.first(deficit, may_evict)
        if not first:
            return self._choose(missing, deficit, share, is_own_prefix)
        room_made = self.room_made
        self._hold(first)
        others = self._choose(missing, deficit - len(first), share, is_own_prefix)
        self._unhold(first)
        self.room_made = room_made  # no room was made: the blocks had been evictable
        if others is None:
            return None
        self.policy.discard(first)
        return [*first, *others]

    def _choose(
        self,
        missing: Sequence[OffloadKey],
        deficit: int,
        share: Share,
        is_own_prefix: Callable[[OffloadKey], bool] | None,
    ) -> list[int] | None:
        """Let the policy choose: retained blocks if no others are left, protected ones after them.

        None if it finds too few.
        """
        while True:
            is_evictable = self._first_test(share)
            skipped: list[int] = []
            if is_own_prefix is not None:
                is_evictable, skipped = self._eviction_test(share, is_own_prefix)
            victims = self.policy.make_room(missing, deficit, is_evictable)
            if skipped:
                self.policy.released(skipped)
            hinted = share.hinted
            if victims is not None or not deficit or hinted is None or not hinted.retained:
                break
            self.policy.released(hinted.give_up(deficit, self._is_evictable))
        if is_own_prefix is not None:
            return victims
        if victims is None and deficit > share.idle and self.on_evicted is not None:
            # The policy has proposed every slot, so `protected_slots` is complete.
            self.on_evicted(share.protected_slots.first(deficit - share.idle))
            victims = self.policy.make_room(missing, deficit, is_evictable)
        return victims

    def _eviction_test(
        self,
        share: Share,
        is_own_prefix: Callable[[OffloadKey], bool],
        unpinned: Collection[int] = (),
    ) -> tuple[Callable[[int], bool], list[int]]:
        """Return a test that excludes blocks whose keys satisfy `is_own_prefix`.

        Args:
            share: The share whose blocks are tested.
            is_own_prefix: Whether a block is not to be evicted.
            unpinned: Slots of further such blocks.

        Returns:
            The test, and a list of the evictable slots that it excludes; release them afterwards.
        """
        is_evictable = self._first_test(share)
        key_of, skipped = self._blocks.key_of, list(unpinned)

        def may_evict(slot: int) -> bool:
            if not is_evictable(slot) or slot in unpinned:
                return False
            if not is_own_prefix(key_of(slot)):
                return True
            skipped.append(slot)
            return False

        return may_evict, skipped

    def _first_test(self, share: Share) -> Callable[[int], bool]:
        """Return the test for a tenant's blocks to evict before protected and retained ones."""
        if share.hinted is None and not share.protected:
            return self._is_evictable
        refs, hinted, note = self._refs, share.hinted, share.protected_slots.note

        def is_evictable_first(slot: int) -> bool:
            count = refs[slot]
            if count > 0 and not count & PINS:
                note(slot)
            return not count and not (hinted is not None and hinted.is_retained(slot))

        return is_evictable_first

    def _end_write(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], *, success: bool
    ) -> None:
        if not success:
            self._forget(keys, slots)
            self.pool.free(slots)
            for share, freed in self.by_share(slots):
                share.free += len(list(freed))
            self.room_made += len(slots)
            return
        refs, writers = self._refs, self._writers
        for slot in slots:
            refs[slot] = 0
            writers.pop(slot, None)
        self._writing -= len(slots)
        for share, own in self.by_share(slots):
            share.idle += len(list(own))
        self.room_made += len(slots)
        self.policy.released(slots)
        self.event_log.add(keys, Change.STORED)
        self._tell_ended(keys)

    def _forget(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for slot in slots:
            self._writers.pop(slot, None)
        self.policy.discard(slots)
        for share, own in self.by_share(slots):
            if share.hinted is not None:
                share.hinted.forget(list(own))
        self._blocks.remove(slots)
        self._writing -= len(slots)
        self.event_log.add(keys, Change.RELEASED)
        self._tell_ended(keys)

    def _tell_ended(self, keys: Sequence[OffloadKey]) -> None:
        if self.on_write_ended is not None:
            self.on_write_ended(keys)
        if self.decided is not None:
            self.decided(keys)


PRIMARY_FIGURES: Final = FigureSet(
    PrimaryCounters,
    {
        "slots": "counts",
        "hinted_blocks": "hinted_blocks",
        "load_pins": "loading.num_pins",
        "tenants": "tenants",
    },
)
"""Copies the figures of a `Primary`."""


def read_primary(taken: Figures, row_bytes: int) -> PrimaryStatistics:
    """Return the statistics of a primary from its figures; `row_bytes` is 0 without memory."""
    figures = PRIMARY_FIGURES.named(taken)
    slots = SlotStatistics(**figures.pop("slots"))
    tenants = {name: TenantStatistics(*each) for name, each in figures.pop("tenants").items()}
    return PrimaryStatistics(**figures, slots=slots, tenants=tenants, row_bytes=row_bytes)
