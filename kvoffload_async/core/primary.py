"""The primary tier: which key lies in which slot, and who may touch it.

A block's state machine, encoded in one counter so that a batch costs one integer a key:

    absent  --reserve--> writing (-1)
    writing --written--> idle (0)         writing --failed--> absent
    idle    --pin------> pinned (k > 0)   pinned  --unpin (last)--> idle
    idle    --evict----> absent

Never evicted: a block that is writing or pinned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.core.admission import AdmissionFilter
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.recency import RecencyLog
from kvoffload_async.core.slots import SlotPool
from kvoffload_async.errors import StateError
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

_WRITING = -1


class BlockState(enum.Enum):
    """Where a key stands in the primary tier."""

    ABSENT = enum.auto()
    WRITING = enum.auto()
    IDLE = enum.auto()
    PINNED = enum.auto()


class _Block:
    """One resident key."""

    __slots__ = ("refs", "slot", "writer")

    def __init__(self, slot: int, writer: str | None) -> None:
        self.slot = slot
        self.refs = _WRITING
        self.writer = writer


class Primary:
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
        self._pool = SlotPool(num_slots)
        self._policy = policy
        self._blocks: dict[OffloadKey, _Block] = {}
        self._recency = RecencyLog(policy)
        self._accept_prefix = accept_prefix
        self._admission = admission
        self._events = EventLog(Medium.CPU, enabled=enable_events, announces_removals=True)
        self._loads: dict[str, Counter[OffloadKey]] = {}
        self._idle = 0
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
        """Note a use. Counts at the request's end, or at once if the request is unknown."""
        if self._recency.knows(ctx):
            self._recency.note(ctx, keys, reused=True)
        else:
            self._policy.access(list(dict.fromkeys(keys)), lambda _key: True)

    # -- reading --------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS."""
        block = self._blocks.get(key)
        if block is None:
            return LookupResult.MISS
        return LookupResult.HIT if block.refs >= 0 else LookupResult.HIT_PENDING

    def prepare_load(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin readable keys for a request and note the use; return their slots, in key order.

        Raises:
            StateError: A key is not readable, or the request is not live; nothing has changed.
        """
        if not self._recency.knows(ctx):
            raise StateError(f"request {ctx.req_id!r} is unknown: call on_new_request first")
        slots = self.pin(keys)
        self._loads.setdefault(ctx.req_id, Counter()).update(keys)
        self._recency.note(ctx, keys, reused=True)
        return slots

    def complete_load(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Undo the request's `prepare_load`. After a reset, what it forgot is ignored.

        Raises:
            StateError: The request did not load a key, and no reset has happened.
        """
        loads = self._loads.get(ctx.req_id, Counter())
        asked = Counter(keys)
        known = asked & loads
        if known != asked and not self._epoch:
            raise StateError(f"request {ctx.req_id!r} completes a load that it did not prepare")
        loads -= known
        self.unpin(known.elements())
        if not loads:
            self._loads.pop(ctx.req_id, None)

    def pin(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Keep readable keys in place; return their slots, in key order.

        Raises:
            StateError: A key is not readable; nothing has changed.
        """
        blocks = self._blocks
        slots = []
        for key in keys:
            block = blocks.get(key)
            if block is None or block.refs < 0:
                raise StateError(f"block {key.hex()} is not readable; look it up in this step")
            slots.append(block.slot)
        for key in keys:
            block = blocks[key]
            if block.refs == 0:
                self._idle -= 1
            block.refs += 1
        return slots

    def unpin(self, keys: Iterable[OffloadKey]) -> None:
        """Undo one `pin`."""
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.refs < 1:
                raise StateError(f"block {key.hex()} is not pinned")
            block.refs -= 1
            if block.refs == 0:
                self._idle += 1

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
        offered = dict.fromkeys(keys)
        missing: list[OffloadKey] = []
        readable: list[OffloadKey] = []
        protected_idle = 0
        for key in offered:
            block = self._blocks.get(key)
            if block is None:
                missing.append(key)
            elif block.refs >= 0:
                readable.append(key)
                protected_idle += block.refs == 0
        wanted = missing if self._admission is None else self._admission.admitted(missing)
        room = self._pool.free_count + self._idle - protected_idle
        if len(wanted) > room:
            if not self._accept_prefix or not room:
                return None
            wanted = wanted[:room]
        evicted = self._reserve(wanted, offered.__contains__, ctx.req_id)
        if evicted is None:
            return None
        if self._admission is not None:
            self._admission.offered(missing)
        self._recency.note(ctx, readable, reused=True)
        self._recency.note(ctx, wanted, reused=False)
        slots = as_block_ids([self._blocks[key].slot for key in wanted])
        return PrepareStoreOutput(wanted, CPULoadStoreSpec(slots), evicted)

    def reserve(self, key: OffloadKey, protected: Collection[OffloadKey]) -> int | None:
        """Reserve a slot for one absent key, evicting at most one other that is not protected.

        Returns:
            The slot, or None if there is no room: then nothing has changed.

        Raises:
            StateError: The key is present.
        """
        if key in self._blocks:
            raise StateError(f"block {key.hex()} is present already")
        if self._reserve([key], protected.__contains__, None) is None:
            return None
        return self._blocks[key].slot

    def complete_store(
        self, ctx: ReqContext, keys: Sequence[OffloadKey], *, success: bool
    ) -> list[OffloadKey]:
        """End the request's write of `keys`; return those that were its to end.

        Keys that are ready, unknown, or being written by another are ignored.
        """
        mine = [
            key
            for key in dict.fromkeys(keys)
            if (block := self._blocks.get(key)) is not None
            and block.refs < 0
            and block.writer == ctx.req_id
        ]
        self.complete_write(mine, success=success)
        return mine

    def complete_write(self, keys: Sequence[OffloadKey], *, success: bool) -> None:
        """End writes: the keys become readable, or absent and their slots free."""
        if success:
            for block in [self._writing_block(key) for key in keys]:
                block.refs = 0
            self._writing -= len(keys)
            self._idle += len(keys)
            self._events.add(keys, removed=False)
        else:
            self._pool.free(self._forget(keys))

    def disown_write(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Fail writes whose copy still runs: the keys become absent, their slots stay held.

        Returns:
            The slots, for `release_slots` once nothing touches them any more.
        """
        slots = self._forget(keys)
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
        removed = [key for key, block in self._blocks.items() if block.refs >= 0]
        self._events.add(removed, removed=True)
        self._blocks.clear()
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
    def num_slots(self) -> int:
        """Capacity in blocks."""
        return self._pool.num_slots

    @property
    def counts(self) -> dict[str, int]:
        """Slots by use: free, writing, idle, pinned and held; they add up to `num_slots`."""
        return {
            "free": self._pool.free_count,
            "writing": self._writing,
            "idle": self._idle,
            "pinned": len(self._blocks) - self._idle - self._writing,
            "held": self._pool.held_count,
        }

    @property
    def pool(self) -> SlotPool:
        """The slots. For laws and inspection."""
        return self._pool

    @property
    def policy(self) -> CachePolicy:
        """The ranking. For laws and inspection."""
        return self._policy

    def state_of(self, key: OffloadKey) -> BlockState:
        """Return where a key stands."""
        block = self._blocks.get(key)
        if block is None:
            return BlockState.ABSENT
        if block.refs < 0:
            return BlockState.WRITING
        return BlockState.PINNED if block.refs else BlockState.IDLE

    def slot_of(self, key: OffloadKey) -> int:
        """Return a resident key's slot; raises StateError if it is absent."""
        block = self._blocks.get(key)
        if block is None:
            raise StateError(f"block {key.hex()} is absent")
        return block.slot

    def resident(self) -> Iterator[tuple[OffloadKey, int, int]]:
        """Iterate over (key, slot, reference count), -1 for writing. For laws and inspection."""
        return ((key, block.slot, block.refs) for key, block in self._blocks.items())

    def loads(self) -> Counter[OffloadKey]:
        """Return how many loads pin each key. For laws and inspection."""
        return sum(self._loads.values(), Counter())

    # -- inside ---------------------------------------------------------------------------------

    def _reserve(
        self,
        missing: Sequence[OffloadKey],
        is_protected: Callable[[OffloadKey], bool],
        writer: str | None,
    ) -> list[OffloadKey] | None:
        if not missing:
            return []
        deficit = max(0, len(missing) - self._pool.free_count)
        if deficit > self._idle:
            return None
        blocks = self._blocks
        victims = self._policy.make_room(
            missing, deficit, lambda key: blocks[key].refs == 0 and not is_protected(key)
        )
        if victims is None:
            return None
        self._pool.free([blocks.pop(key).slot for key in victims])
        self._idle -= len(victims)
        self._events.add(victims, removed=True)
        for key, slot in zip(missing, self._pool.allocate(len(missing)), strict=True):
            blocks[key] = _Block(slot, writer)
        self._writing += len(missing)
        self._policy.admit(missing)
        return victims

    def _writing_block(self, key: OffloadKey) -> _Block:
        block = self._blocks.get(key)
        if block is None or block.refs != _WRITING:
            raise StateError(f"block {key.hex()} is not being written")
        return block

    def _forget(self, keys: Sequence[OffloadKey]) -> list[int]:
        slots = [self._writing_block(key).slot for key in keys]
        for key in keys:
            del self._blocks[key]
        self._writing -= len(keys)
        self._policy.discard(keys)
        self._events.add(keys, removed=True, metadata_only=True)
        return slots
