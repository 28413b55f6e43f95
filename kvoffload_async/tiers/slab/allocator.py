"""Allocation of slots: growth up to the capacity, then eviction.

If the disk is full below the capacity, the store stops growing, and tries again later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from functools import partial

from kvoffload_async.abc.tier import Direction, TierEnvironment
from kvoffload_async.tiers.files.identity import LostDirectoryError
from kvoffload_async.tiers.files.ops import mapped
from kvoffload_async.tiers.slab.addresses import SlotAddress
from kvoffload_async.tiers.slab.opening import OpenStore
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

_REGROW_S = 60.0
"""Seconds without growth after the disk was full."""

_LEAST_SHARE = 16
"""A segment has at least a full one's slots divided by this, unless it is the only one."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Allocator:
    """Allocates the slots of one open store. Thread: loop."""

    def __init__(self, store: OpenStore, env: TierEnvironment) -> None:
        self._store = store
        self._budget = store.budget
        self._env = env
        self._growing = asyncio.Lock()
        self._limit_slots: int | None = None
        self._limited_until_s = 0.0
        self._is_grown = False
        """Whether the capacity has no space for another segment."""
        self.why_limited = ""
        """Why the last segment was not created; empty if it was."""

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

    async def _grow(self, wanted: int) -> bool:
        """Add segments; False if no more can be added now."""
        async with self._growing:
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
                self.why_limited = ""
                self._store.table.add_segment(number, slots)
                self._store.catalog.add_segment(number, slots)
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
        self._limit_slots = sum(present.values()) + slots
        self._limited_until_s = asyncio.get_running_loop().time() + _REGROW_S
        self.why_limited = str(error)
        return slots
