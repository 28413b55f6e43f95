"""Prefetch: the blocks of requests that their scheduler has queued are promoted ahead of lookups.

    queued --room for the whole run--> early ticket     see `Room`, which bounds and ends it
    queued --nothing found, first lookup, end--> none

Requests are looked up in the order in which they were queued, each until its answer is known, and
none behind the first that finds no room. That counts neither as a lookup of the request nor as a
deferral. A tier whose prefetch has failed is not asked for a while, nor is one that is suspended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.room import Room
from kvoffload_async.core.search import TierSearch
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.types import LookupResult, OffloadKey

_REQUESTS_A_STEP: Final = 8
_KEYS_A_STEP: Final = 512
"""Keys looked up in a step, after which no further request is: a step is short, whatever waits."""


class Prefetch:
    """The requests that wait for their first lookup, and the blocks promoted for them.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        queued: Request -> the keys of its prompt, first come, first served. Read-only.
    """

    def __init__(
        self, primary: Primary, tiers: Sequence[TierState], search: TierSearch, room: Room
    ) -> None:
        """Start without requests."""
        self.queued: dict[RequestState, Sequence[OffloadKey]] = {}
        self._primary = primary
        self._tiers = tiers
        self._search = search
        self._room = room
        self._blocks: dict[OffloadKey, tuple[int, RequestState]] = {}
        """Promoted block that no request has loaded since -> its tier, and for which request."""
        self._blocked_at: tuple[RequestState, int, int] | None = None
        """The request that found no room, and the blocks left to early tickets and
        `Primary.room_made` then."""

    @property
    def waiting_blocks(self) -> int:
        """Number of promoted blocks that no request has loaded, while theirs has not ended."""
        return len(self._blocks)

    def queue(self, request: RequestState, keys: Sequence[OffloadKey]) -> None:
        """Queue a request that has not been looked up."""
        if keys and not (request.waits or request.ticket):
            self.queued[request] = keys

    def serve(self, now_s: float) -> None:
        """Look queued requests up at a step's end, and give early tickets to those found."""
        num_keys = 0
        for request, keys in list(islice(self.queued.items(), _REQUESTS_A_STEP)):
            left = self._room.left_early
            if left <= 0 or num_keys >= _KEYS_A_STEP:
                return
            state = request, left, self._primary.room_made
            if self._blocked_at == state:
                return
            num_keys += min(left, len(keys))
            run, absent = self._find(request, keys[:left], now_s)
            if run is None:
                continue
            is_cut = len(run) == left < len(keys)
            has_room = not (is_cut and self._room.early)  # only the first gets a part
            if run and not (has_room and self._room.prefetch(request, run, absent, is_cut=is_cut)):
                self._blocked_at = state
                return
            del self.queued[request]

    def landed(self, tier: int, request: RequestState | None, keys: Sequence[OffloadKey]) -> None:
        """Count blocks that were promoted ahead; `request` is None if it has ended."""
        self._tiers[tier].counters.prefetched_blocks += len(keys)
        self._discard(keys)
        if request is None or request.is_finished:
            self._tiers[tier].counters.unused_prefetched_blocks += len(keys)
            return
        request.prefetched += keys
        self._blocks.update((key, (tier, request)) for key in keys)

    def loaded(self, keys: Iterable[OffloadKey]) -> None:
        """Record that a request loads blocks."""
        for key in keys if self._blocks else ():
            self._blocks.pop(key, None)

    def ended(self, request: RequestState) -> None:
        """Count the blocks promoted for a request that has ended, and that nobody has loaded."""
        self.queued.pop(request, None)
        keys, request.prefetched = request.prefetched, []
        self._discard([key for key in keys if self._blocks.get(key, (0, None))[1] is request])

    def reset(self) -> None:
        """Forget all requests; blocks that were promoted for them and not loaded are lost."""
        self.queued.clear()
        self._discard(list(self._blocks))
        self._blocked_at = None

    # -- internal -------------------------------------------------------------------------------

    def _find(
        self, request: RequestState, keys: Sequence[OffloadKey], now_s: float
    ) -> tuple[list[OffloadKey] | None, dict[OffloadKey, int]]:
        """Return a request's leading run, and from which tier its absent blocks may come.

        The run is None while a tier's answer to one of its blocks is outstanding.
        """
        states = self._primary.lookup_many(keys)
        missing = [key for key, has in zip(keys, states, strict=True) if has is LookupResult.MISS]
        self._search.begin_round(request, now_s, is_early=True)
        verdicts = self._search.ask(missing, request, is_paused=False, stop_at_miss=True)
        request.lacking.clear()
        tiers = self._search.find(missing, request, now_s, is_early=True)
        absent: dict[OffloadKey, int] = {}
        for key, tier in zip(missing, tiers, strict=True):
            verdict = verdicts.get(key)
            if verdict is LookupResult.RETRY:
                return None, {}
            if verdict is not LookupResult.HIT_PENDING or tier is None:
                return list(keys[: keys.index(key)]), absent
            absent[key] = tier
        return list(keys), absent

    def _discard(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            tier, _ = self._blocks.pop(key, (None, None))
            if tier is not None:
                self._tiers[tier].counters.unused_prefetched_blocks += 1
