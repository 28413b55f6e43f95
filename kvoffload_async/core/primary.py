"""The primary tier: which key lies in which slot, and who may touch it.

Never evicted: a block that is writing or pinned; see `resident` for the states.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.admission import AdmissionFilter
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.recency import RecencyLog
from kvoffload_async.core.resident import WRITING, ResidentBlocks
from kvoffload_async.core.slots import SlotPool
from kvoffload_async.errors import StateError
from kvoffload_async.tables.keymap import PART_AT, too_short
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
            accept_prefix: Whether `prepare_store` takes the longest head of a batch that fits,
                instead of all or nothing.
            admission: Filters what `prepare_store` takes.
            enable_events: Whether `take_events` has anything to tell.
        """
        super().__init__(num_slots)
        self._pool = SlotPool(num_slots)
        self._policy = policy
        self._writers: dict[int, str] = {}
        """Slot that a request writes -> that request."""
        self._recency = RecencyLog(self._rank)
        self._accept_prefix = accept_prefix
        self._admission = admission
        self._events = EventLog(Medium.CPU, enabled=enable_events, announces_removals=True)
        self._loads: dict[str, Counter[OffloadKey]] = {}
        self._writing = 0
        self._epoch = 0

    # -- requests -------------------------------------------------------------------------------

    def open_request(self, ctx: ReqContext) -> None:
        """Begin a request; raises StateError if it is live already."""
        self._recency.open(ctx)

    def close_request(self, ctx: ReqContext) -> None:
        """Commit what the request used to the policy; raises StateError if it is not live."""
        self._recency.commit(ctx)

    def touch(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Note a use. Counts at the request's end, or at once if the request is unknown.

        Raises:
            StateError: Something is too short to be a key.
        """
        if keys and min(map(len, keys)) < -PART_AT:
            raise too_short(keys)
        if self._recency.knows(ctx):
            self._recency.note(ctx, keys, reused=True)
        else:
            self._rank(dict.fromkeys(keys, True).items())

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
        if keys:
            self._loads.setdefault(ctx.req_id, Counter()).update(keys)
        self._recency.note(ctx, keys, reused=True)
        return slots

    def complete_load(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Undo the request's `prepare_load`. After a reset, what it forgot is ignored.

        Raises:
            StateError: The request did not load a key, and no reset has happened.
        """
        loads = self._loads.get(ctx.req_id, Counter())
        known = asked = Counter(keys)
        if any(count > loads.get(key, 0) for key, count in asked.items()):
            if not self._epoch:
                raise StateError(f"request {ctx.req_id!r} completes a load that it did not prepare")
            known = asked & loads
        for key, count in known.items():
            loads[key] -= count
            if not loads[key]:
                del loads[key]
        self.unpin(known.elements())
        if not loads:
            self._loads.pop(ctx.req_id, None)

    # -- writing --------------------------------------------------------------------------------

    def prepare_store(
        self, ctx: ReqContext, keys: Sequence[OffloadKey]
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the missing ones of `keys`, evicting others if need be.

        Duplicate keys count once. Keys that are readable count as used by the request.

        Returns:
            What was granted, or None if there is no room: then nothing has changed.

        Raises:
            StateError: The request is not live.
        """
        if not self._recency.knows(ctx):
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        refs = self._refs
        missing, readable, protected = self._sorted_out(keys)
        wanted = missing if self._admission is None else self._admission.admitted(missing)
        room = self._pool.free_count + self._idle - len(protected)
        if len(wanted) > room:
            if not self._accept_prefix or not room:
                self.counters.refused_stores += 1
                return None
            wanted = wanted[:room]
        may_go: Callable[[int], bool] = lambda slot: not refs[slot]  # noqa: E731 - one of two
        if protected:
            may_go = lambda slot: not refs[slot] and slot not in protected  # noqa: E731
        granted = self._reserve(wanted, may_go, ctx.req_id)
        if granted is None:
            self.counters.refused_stores += 1
            return None
        slots, evicted = granted
        if self._admission is not None:
            self._admission.offered(missing)
        if readable:
            self._recency.note(ctx, readable, reused=True)
        self._recency.note(ctx, wanted, reused=False)
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(as_block_ids(slots)), evicted)

    def _sorted_out(
        self, keys: Sequence[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey], set[int]]:
        """Return the absent ones of the keys, the readable ones, and the slots of idle ones."""
        refs = self._refs
        missing: list[OffloadKey] = []
        readable: list[OffloadKey] = []
        idle: set[int] = set()
        unique = list(dict.fromkeys(keys))
        for key, slot in zip(unique, self._blocks.find(unique), strict=True):
            if slot is None:
                missing.append(key)
            elif refs[slot] >= 0:
                readable.append(key)
                if not refs[slot]:
                    idle.add(slot)
        return missing, readable, idle

    def reserve(self, key: OffloadKey, protected: Collection[OffloadKey]) -> int | None:
        """Reserve a slot for one absent key, evicting at most one other that is not protected.

        Returns:
            The slot, or None if there is no room: then nothing has changed.

        Raises:
            StateError: The key is present.
        """
        if key in self._blocks:
            raise StateError(f"block {key.hex()} is present already")
        refs, key_of = self._refs, self._blocks.key_of
        granted = self._reserve(
            [key], lambda slot: not refs[slot] and key_of(slot) not in protected, None
        )
        if granted is None:
            return None
        (slot,), _ = granted
        return slot

    def complete_store(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], *, success: bool
    ) -> list[OffloadKey]:
        """End the request's write of `keys`; return those that were its to end.

        Keys that are ready, unknown, or being written by another are ignored.
        """
        parts, writers, req_id = self._parts, self._writers, ctx.req_id
        mine: list[OffloadKey] = []
        slots: list[int] = []
        for key in dict.fromkeys(keys):
            slot = parts[key[PART_AT]].get(key)
            if slot is not None and writers.get(slot) == req_id:
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
        self._epoch += 1
        removed = [key for key, _, refs in self.resident() if refs >= 0]
        self._events.add(removed, removed=True)
        self._blocks.clear()
        self._writers.clear()
        self._loads.clear()
        self._policy.clear()
        if self._admission is not None:
            self._admission.clear()
        self._pool.reset(still_touched)
        self._idle = self._writing = 0

    # -- looking --------------------------------------------------------------------------------

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Detach and return the events since the last call."""
        return self._events.take(self._blocks.__contains__)

    @property
    def events_dropped(self) -> int:
        """Events that nobody has read in time."""
        return self._events.dropped

    @property
    def num_slots(self) -> int:
        """Capacity in blocks."""
        return self._pool.num_slots

    @property
    def counts(self) -> dict[str, int]:
        """Slots by use: free, writing, idle, pinned and held; they add up to `num_slots`."""
        free, held = self._pool.free_count, self._pool.retained_count
        return {
            "free": free,
            "writing": self._writing,
            "idle": self._idle,
            "pinned": self.num_slots - free - held - self._idle - self._writing,
            "held": held,
        }

    @property
    def pool(self) -> SlotPool:
        """The slots. For invariants and inspection."""
        return self._pool

    @property
    def policy(self) -> CachePolicy:
        """The ranking. For invariants and inspection."""
        return self._policy

    def state_of(self, key: OffloadKey) -> BlockState:
        """Return where a key stands."""
        slot = self._blocks.get(key)
        if slot is None:
            return BlockState.ABSENT
        if self._refs[slot] < 0:
            return BlockState.WRITING
        return BlockState.PINNED if self._refs[slot] else BlockState.IDLE

    def ranked(self) -> list[OffloadKey]:
        """Return the keys that the policy ranks, best victim first. For invariants, inspection."""
        return self._blocks.keys_of(tuple(self._policy.resident()))

    def loads(self) -> Counter[OffloadKey]:
        """Return how many loads pin each key. For invariants and inspection."""
        return sum(self._loads.values(), Counter())

    # -- inside ---------------------------------------------------------------------------------

    def _reserve(
        self,
        missing: Sequence[OffloadKey],
        is_evictable: Callable[[int], bool],
        writer: str | None,
    ) -> tuple[list[int], list[OffloadKey]] | None:
        """Return the slots of absent keys, and the keys that had to go for them."""
        if not missing:
            return [], []
        deficit = max(0, len(missing) - self._pool.free_count)
        if deficit > self._idle:
            return None
        victims = self._policy.make_room(missing, deficit, is_evictable)
        if victims is None:
            return None
        evicted = self._blocks.remove(victims)
        self._idle -= len(victims)
        self.counters.evicted_blocks += len(victims)
        self._events.add(evicted, removed=True)
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
        self._events.add(keys, removed=False)

    def _forget(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for slot in slots:
            self._writers.pop(slot, None)
        self._policy.discard(slots)
        self._blocks.remove(slots)
        self._writing -= len(slots)
        self._events.add(keys, removed=True, metadata_only=True)

    def _rank(self, accesses: Iterable[tuple[OffloadKey, bool]]) -> None:
        """Tell the policy what a request used, head to tail; absent keys are left out."""
        parts = self._parts
        slots: list[int] = []
        reused: list[bool] = []
        for key, again in accesses:
            slot = parts[key[PART_AT]].get(key)
            if slot is not None:
                slots.append(slot)
                reused.append(again)
        self._policy.access(slots, reused)
