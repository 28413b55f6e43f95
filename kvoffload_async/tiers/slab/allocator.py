"""Allocation of slots: growth up to the capacity, then eviction; and shrinking.

If the disk is full below the capacity, the store stops growing or shrinks, and tries to grow again
later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from functools import partial

from kvoffload_async.abc.tier import Direction, TierEnvironment
from kvoffload_async.errors import TierError, TierFullError
from kvoffload_async.tiers.files.identity import LostDirectoryError
from kvoffload_async.tiers.files.ops import mapped
from kvoffload_async.tiers.slab.addresses import SlotAddress
from kvoffload_async.tiers.slab.layout import Budget
from kvoffload_async.tiers.slab.opening import OpenStore
from kvoffload_async.tiers.slab.records import keys_of
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_REGROW_S = 60.0
"""Seconds without growth after the disk was full."""

_LEAST_SHARE = 16
"""A segment has at least a full one's slots divided by this, unless it is the only one."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_disk_full(error: TierError | None) -> bool:
    """Return whether a block failed because the disk is full, not for lack of evictable blocks."""
    return isinstance(error, TierFullError) and error.__cause__ is not None


class Allocator:
    """Allocates the slots of one open store. Thread: loop."""

    def __init__(self, store: OpenStore, budget: Budget, env: TierEnvironment) -> None:
        self._store = store
        self._budget = budget
        self._env = env
        self._resizing = asyncio.Lock()
        self._limit_slots: int | None = None
        self._limited_until_s = 0.0
        self._is_grown = False
        """Whether the capacity has no space for another segment."""
        self.why_limited = ""
        """Why the last segment was not created; empty if it was."""
        self.num_shrinks = 0
        """Number of segments released because the disk was full."""
        self._is_futile = False
        """Whether the last released segment did not help."""

    async def claim(self, keys: Sequence[OffloadKey]) -> list[SlotAddress]:
        """Return ascending addresses for absent keys; if too few are free, only for the first keys.

        Announces evicted blocks, and buffers their removals until the next append to the journal.
        """
        store, catalog = self._store, self._store.catalog
        while catalog.num_free < len(keys) and not self._is_grown and await self._grow(len(keys)):
            pass
        ahead = self._budget.slots_ahead if self._is_grown else 0
        addresses, victims, freed = catalog.claim(keys, ahead)
        if victims:
            store.journal.note_removed(freed)
            self._env.blocks_evicted(victims)
        return addresses

    async def shrink(self, seen: int) -> bool:
        """Release a segment on a full disk; False if none is idle or the last one did not help.

        After a release that did not help, nothing more is released until a store succeeds: a disk
        or quota that still refuses must not empty the store.

        Args:
            seen: `num_shrinks` before the disk was full; a release since then suffices.
        """
        async with self._resizing:
            if self._is_futile or self.num_shrinks != seen:
                return not self._is_futile
            store, catalog = self._store, self._store.catalog
            idle = catalog.idle_segments()
            if not idle:
                return False
            number, slots = idle[0], catalog.segments[idle[0]]
            lost = store.table.records_in(number)
            keys = keys_of(lost)
            catalog.drop_segment(number, keys)
            store.table.drop_segment(number)
            self._env.blocks_evicted(keys)
            try:
                await self._env.io.run(Direction.STORE, partial(store.segments.remove, number))
            except OSError as error:
                logger.warning(
                    "%s: a segment could not be removed: %s", self._store.folder, str(error)
                )
                self._add(number, slots)
                store.journal.note_gone(lost)
                return False
            self._is_grown = False
            self.num_shrinks += 1
            self._limit(sum(catalog.segments.values()) + slots // 2)
            logger.warning(
                "%s: the disk is full below the capacity; %d blocks were dropped",
                self._store.folder,
                len(keys),
            )
            return True

    def note_shrunk(self, *, has_helped: bool) -> None:
        """Record whether any block could be stored since the last shrink."""
        self._is_futile = not has_helped

    async def _grow(self, wanted: int) -> bool:
        """Add segments; False if no more can be added now."""
        async with self._resizing:
            if self._store.catalog.num_free >= wanted:
                return True  # another task has grown it meanwhile
            for _ in range(self._budget.stripes):
                if not await self._add_segment():
                    return False
            return True

    async def _add_segment(self) -> bool:
        """Add a segment; False if none can be added now."""
        slots = self._next_slots()
        while slots:
            try:
                create = partial(self._create, slots)
                number = await self._env.io.run(Direction.STORE, create)
            except LostDirectoryError as error:
                raise mapped(error) from error  # a fault, not a full disk
            except OSError as error:
                slots = self._smaller(slots, error)
            else:
                self._add(number, slots)
                return True
        return False

    def _create(self, slots: int) -> int:
        """Create a segment, after reserving journal space for it; return its number.

        Thread: an I/O thread.
        """
        store = self._store
        store.journal.reserve(slots + sum(store.table.slots().values()))
        number = store.segments.create(slots)
        store.journal.note_new_file()
        return number

    def _next_slots(self) -> int:
        present = self._store.catalog.segments.values()
        allowed = None
        if asyncio.get_running_loop().time() < self._limited_until_s:
            allowed = max(0, (self._limit_slots or 0) - sum(present))
        slots = self._budget.next_segment(present, allowed)
        self._is_grown = not slots and allowed is None
        return slots

    def _smaller(self, slots: int, error: OSError) -> int:
        """Return the slots to retry with after a segment could not be created; 0: stop growing."""
        present = self._store.catalog.segments
        is_full = error.errno in _NO_SPACE
        if self._limit_slots is None or not is_full:
            logger.warning(
                "%s: growth stopped below the capacity: %s", self._store.folder, str(error)
            )
        least = self._budget.segment_slots // _LEAST_SHARE if present else 0
        slots = slots // 2 if is_full and slots // 2 > least else 0
        self._limit(sum(present.values()) + slots)
        self.why_limited = str(error)
        return slots

    def _limit(self, slots: int) -> None:
        self._limit_slots = slots
        self._limited_until_s = asyncio.get_running_loop().time() + _REGROW_S

    def _add(self, number: int, slots: int) -> None:
        self.why_limited = ""
        self._store.table.add_segment(number, slots)
        self._store.catalog.add_segment(number, slots)
