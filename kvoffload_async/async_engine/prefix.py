"""The search for a request's longest prefix: what is known of each block, and what it waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.waiting import Waiter
from kvoffload_async.core.foreign_tier import ForeignTierState
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.types import LookupResult, OffloadKey


class PrefixSearch:
    """Asks for every block once, and again only for one of which something has happened.

    What was readable in an earlier turn is asked for once more at the end: until it is pinned, it
    may have been evicted.
    """

    def __init__(
        self, manager: TieringOffloadingManager, request: EngineRequest, waiter: Waiter
    ) -> None:
        """Ask for all blocks up to the first that is missing; so all promotions start at once."""
        self._manager = manager
        self._keys = request.keys
        self._ctx = request.ctx
        self._waiter = waiter
        # The manager of a foreign tier tells nobody when it has found out about a key.
        self._is_told = not any(isinstance(t, ForeignTierState) for t in manager.planner.tiers)
        self._end = len(self._keys)
        self._undecided: dict[OffloadKey, None] = {}
        self._current: set[OffloadKey] = set()
        """The keys that were asked for in this turn of the loop."""
        self._ask(self._keys)

    def look_again(self, changed: Collection[OffloadKey]) -> None:
        """Ask for undecided blocks: for those that were decided, or for all if none is named."""
        positions = self._ctx.key_positions
        self._current.clear()
        named = (
            self._undecided.keys() & set(changed) if changed and self._is_told else self._undecided
        )
        self._ask(sorted(named, key=positions.__getitem__))
        rest = next((key for key in self._undecided if key not in self._current), None)
        if rest is not None:
            self._ask([rest])  # what it has found is retained as long as it is deferred

    def settled(self) -> int | None:
        """Return the blocks of the prefix, all readable now; None while some are undecided."""
        if not self._undecided:
            stale = [key for key in self._keys[: self._end] if key not in self._current]
            self._ask(stale)
        return None if self._undecided else self._end

    def readable(self) -> int:
        """Return how many blocks at the head are readable now."""
        for count, key in enumerate(self._keys):
            if self._manager.lookup(key, self._ctx) is not LookupResult.HIT:
                return count
        return len(self._keys)

    def _ask(self, keys: Iterable[OffloadKey]) -> None:
        """Ask for keys, head to tail; those behind a miss are of no use."""
        lookup, ctx = self._manager.lookup, self._ctx
        current, undecided = self._current, self._undecided
        for key in keys:
            answer = lookup(key, ctx)
            current.add(key)
            if answer is LookupResult.HIT:
                undecided.pop(key, None)
            elif answer is LookupResult.MISS:
                self._end_before(key)
                return
            else:
                undecided[key] = None
                self._waiter.expect(key)
                if answer is LookupResult.RETRY and not self._is_told:
                    self._waiter.expect_progress()

    def _end_before(self, key: OffloadKey) -> None:
        positions = self._ctx.key_positions
        self._end = end = self._keys.index(key)
        self._undecided = {key: None for key in self._undecided if positions[key] <= end}
