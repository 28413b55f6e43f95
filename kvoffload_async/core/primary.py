"""The primary tier: which key lies in which slot, and who may touch it.

Never evicted: a block that is writing or pinned; see `resident` for the states. Evicted last, or
never, as `drops_owed` says: a block that a tier in order is owed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.admission import AdmissionFilter
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.heads import split_where_it_fits, those_before, used_before
from kvoffload_async.core.loads import Loads
from kvoffload_async.core.recency import RecencyLog
from kvoffload_async.core.resident import PINS, WRITING, ResidentBlocks
from kvoffload_async.core.slots import SlotPool
from kvoffload_async.errors import StateError
from kvoffload_async.tables.keymap import require_keys
from kvoffload_async.types import (
    CPULoadStoreSpec,
    Medium,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    as_block_ids,
)


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
        drops_owed: Whether protected blocks are evicted where no others are left; written by who
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
        self.drops_owed = True
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
        if self._accept_prefix and len(wanted) > self._pool.free_count:
            used = self._recency.used_by(ctx)
            if len(wanted) > self._room_beside(unpinned) - len(used):
                head = used_before(wanted, used, ctx.key_positions)
                unpinned |= self._sorted_out(head)[2]
            room = self._room_beside(unpinned)
            wanted, left_out = split_where_it_fits(wanted, ctx.key_positions, room)
            if not wanted:
                self.counters.refused_stores += 1
                return None
        self._hold(unpinned)
        try:
            granted = self._reserve(wanted, ctx)
        finally:
            self._unhold(unpinned)
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
        return self._pool.free_count + self._idle + self.drops_owed * self._protected

    @property
    def protected_blocks(self) -> int:
        """Blocks that would be idle if tiers were not owed them."""
        return self._protected

    def _room_beside(self, unpinned: Collection[int]) -> int:
        """Return how many blocks fit if those in some slots stay."""
        if self.drops_owed:
            return self.room - len(unpinned)
        return self.room - sum(not self._refs[slot] for slot in unpinned)

    def reserve(self, key: OffloadKey) -> int | None:
        """Reserve a slot for one absent key, evicting at most one other.

        Returns:
            The slot, or None if there is no room: then nothing has changed.

        Raises:
            StateError: The key is present.
        """
        if key in self._blocks:
            raise StateError(f"block {key.hex()} is present already")
        granted = self._reserve([key], None)
        if granted is None:
            return None
        (slot,), _ = granted
        return slot

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
        for key in dict.fromkeys(keys):
            slot = self._blocks.get(key)
            if slot is not None and writers.get(slot) is ctx:
                mine.append(key)
                slots.append(slot)
        self._end_write(mine, slots, success=success)
        self.counters.stored_blocks += success * len(mine)
        return mine

    def complete_write(self, keys: Sequence[OffloadKey], *, success: bool) -> None:
        """End writes: the keys become readable, or absent and their slots free."""
        self._end_write(keys, self._writing_slots(keys), success=success)

    def disown_write(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Fail writes whose copy still runs: the keys become absent, their slots stay held.

        Returns:
            The slots, for `release_slots` once nothing touches them any more.
        """
        slots = self._writing_slots(keys)
        self._forget(keys, slots)
        self._pool.hold(slots)
        return slots

    def release_slots(self, slots: Iterable[int]) -> None:
        """Free held slots."""
        self._pool.release(slots)

    def reset(self, still_touched: Iterable[int] = ()) -> None:
        """Forget every key, pin and write; live requests stay known.

        Args:
            still_touched: Slots that disowned copies still touch, once a copy; they become held.
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
        free, held = self._pool.free_count, self._pool.retained_count
        idle = self._idle + self._protected
        return {
            "free": free,
            "writing": self._writing,
            "idle": idle,
            "pinned": self.num_slots - free - held - idle - self._writing,
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

    def _reserve(
        self, missing: Sequence[OffloadKey], writer: ReqContext | None
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Return the slots of absent keys, and the keys that had to go for them."""
        if not missing:
            return [], []
        if len(missing) > self.room:
            return None
        victims = self._make_room(missing, max(0, len(missing) - self._pool.free_count))
        if victims is None:
            return None
        if self.on_evicted is not None and victims:
            self.on_evicted(victims)
        evicted = self._blocks.remove(victims)
        self._idle -= len(victims)
        self.counters.evicted_blocks += len(victims)
        self.event_log.add(evicted, removed=True)
        if len(victims) == len(missing):
            slots = victims[::-1]  # what freeing and allocating them would give
        else:
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

    def _make_room(self, missing: Sequence[OffloadKey], deficit: int) -> list[int] | None:
        """Return the slots that were given up; protected ones only where no others are left."""
        is_evictable = self._may_go_first if self._protected else self._may_go
        victims = self._policy.make_room(missing, deficit, is_evictable)
        if victims is None and deficit > self._idle and self.on_evicted is not None:
            # It has asked for all that it may ask for: the order of the protected ones is known.
            self.on_evicted(self._last_to_go.first(deficit - self._idle))
            victims = self._policy.make_room(missing, deficit, is_evictable)
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
            return
        refs, writers = self._refs, self._writers
        for slot in slots:
            refs[slot] = 0
            writers.pop(slot, None)
        self._writing -= len(slots)
        self._idle += len(slots)
        self._policy.released(slots)
        self.event_log.add(keys, removed=False)
        if self.decided is not None:
            self.decided(keys)

    def _forget(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for slot in slots:
            self._writers.pop(slot, None)
        self._policy.discard(slots)
        self._blocks.remove(slots)
        self._writing -= len(slots)
        self.event_log.add(keys, removed=True, metadata_only=True)
        if self.decided is not None:
            self.decided(keys)
