"""Prefetch: the blocks of requests that their scheduler has queued are promoted ahead of lookups.

    queued --room for the whole run--> early ticket     see `Room`, which bounds and ends it
    queued --nothing found, first lookup, end--> none

Requests are looked up in the order in which they were queued, each until its answer is known, and
none behind the first that finds no room. That counts neither as a lookup of the request nor as a
deferral. A tier whose prefetch has failed is not asked for a while, nor is one that is suspended.

Requests of the engine's own, whose blocks are no prompt, come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.room import Room
from kvoffload_async.core.search import TierSearch
from kvoffload_async.core.tier_state import TURN_S, TierState
from kvoffload_async.types import LookupResult, OffloadKey, SlidingWindow

_REQUESTS_A_STEP: Final = 8
_KEYS_A_STEP: Final = 128
"""Keys looked up in a step, after which no further request is: a step is short, whatever waits."""


class Prompt(NamedTuple):
    """The blocks of a prompt.

    Attributes:
        keys: The keys of the group with full attention, head to tail.
        windows: The other groups; their blocks have as many tokens.
        is_chain: Whether a block is of use only with all before it; otherwise the keys are any
            blocks, promoted as far as they are found, and these requests come last.
    """

    keys: Sequence[OffloadKey]
    windows: Sequence[SlidingWindow] = ()
    is_chain: bool = True

    @property
    def num_window_blocks(self) -> int:
        """Number of blocks that all windows need."""
        return sum(window.num_blocks for window in self.windows)


class Prefetch:
    """The requests that wait for their first lookup, and the blocks promoted for them.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        queued: Request -> its prompt, first come, first served. Read-only.
    """

    def __init__(
        self, primary: Primary, tiers: Sequence[TierState], search: TierSearch, room: Room
    ) -> None:
        """Start without requests."""
        self.queued: dict[RequestState, Prompt] = {}
        self._primary = primary
        self._tiers = tiers
        self._search = search
        self._room = room
        self._blocks: dict[OffloadKey, tuple[int, RequestState]] = {}
        """Promoted block that no request has loaded since -> its tier, and for which request."""
        self._last: dict[RequestState, None] = {}
        """The queued requests whose blocks are no chain."""
        self._is_due = False
        """Whether the last step has served a request, so that the next one may serve more."""
        self._blocked_at: tuple[RequestState, int, int] | None = None
        """The request that found no room, and the blocks left to early tickets and
        `Primary.room_made` then."""

    @property
    def waiting_blocks(self) -> int:
        """Number of promoted blocks that no request has loaded, while theirs has not ended."""
        return len(self._blocks)

    def queue(self, request: RequestState, prompt: Prompt) -> None:
        """Queue a request that has not been looked up, unless its windows exceed the share."""
        is_new = not (request.waits or request.ticket)
        if is_new and prompt.keys and prompt.num_window_blocks < self._room.most_early:
            self.queued[request] = prompt
            if not prompt.is_chain:
                self._last[request] = None
            for last in self._last:
                self.queued[last] = self.queued.pop(last)

    def forget(self, request: RequestState) -> None:
        """Remove a request from the queue: it was looked up, has begun to run, or has ended."""
        if self.queued.pop(request, None) is not None:
            self._last.pop(request, None)
            request.lacking.clear()

    def forget_all(self) -> None:
        """Empty the queue; blocks promoted already stay."""
        for request in list(self.queued):
            self.forget(request)

    def serve(self, now_s: float) -> None:
        """Look queued requests up at a step's end, and give early tickets to those found."""
        self._is_due = False
        if not any(tier.takes_prefetch(now_s) for tier in self._tiers):
            return
        num_keys = 0
        for request, prompt in list(islice(self.queued.items(), _REQUESTS_A_STEP)):
            left = self._room.left_early
            state = request, left, self._primary.room_made
            if left <= 0 or num_keys >= _KEYS_A_STEP or self._blocked_at == state:
                return
            most = left - prompt.num_window_blocks
            num_keys += min(left, len(prompt.keys))
            self._search.begin_round(request, now_s, is_early=True)
            if prompt.is_chain:
                num_found = self._look_up(request, prompt.keys[: max(0, most)])
                run = None if num_found is None else self._with_windows(request, prompt, num_found)
                is_cut = num_found == most < len(prompt.keys)
            else:
                run, is_cut = self._present(request, prompt.keys), False
            if run is None:
                continue
            # Only the first request gets a part of its prompt.
            has_room = most > 0 and len(run) <= left and not (is_cut and self._room.early)
            if not (has_room and self._grant(request, run, now_s, is_cut=is_cut)):
                self._blocked_at = state
                return
            self.forget(request)
            self._is_due = True

    def is_under_way(self, request: RequestState) -> bool:
        """Return whether a request is queued, or blocks of its early ticket are being promoted."""
        return request in self.queued or bool(request.awaits)

    def wakes_in_s(self) -> float:
        """Return the seconds until a step is due for the queued requests, if there are some."""
        return 0.0 if self._is_due else TURN_S / 2

    def landed(self, tier: int, request: RequestState | None, keys: Sequence[OffloadKey]) -> None:
        """Count blocks that were promoted ahead; `request` is None if it has ended."""
        self._tiers[tier].counters.prefetched_blocks += len(keys)
        if request is None or request.is_finished:
            self._tiers[tier].counters.unused_prefetched_blocks += len(keys)
            return
        request.prefetched += keys
        self._blocks.update((key, (tier, request)) for key in keys)

    def replaced(self, keys: Sequence[OffloadKey]) -> None:
        """Count blocks that were promoted again: they had been evicted before anybody used them."""
        if self._blocks:
            self._discard(keys)

    def loaded(self, keys: Iterable[OffloadKey]) -> None:
        """Record that a request loads blocks."""
        for key in keys if self._blocks else ():
            self._blocks.pop(key, None)

    def ended(self, request: RequestState) -> None:
        """Count the blocks promoted for a request that has ended, and that nobody has loaded."""
        self.forget(request)
        keys, request.prefetched = request.prefetched, []
        self._discard([key for key in keys if self._blocks.get(key, (0, None))[1] is request])

    def reset(self) -> None:
        """Forget all requests; blocks that were promoted for them and not loaded are lost."""
        self.forget_all()
        self._discard(list(self._blocks))
        self._blocked_at = None

    # -- internal -------------------------------------------------------------------------------

    def _present(
        self, request: RequestState, keys: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Return those of the blocks that are found; None while an answer is outstanding."""
        missing = self._missing(keys)
        verdicts = self._search.ask(missing, request, is_paused=False, stop_at_miss=False)
        if LookupResult.RETRY in verdicts.values():
            return None
        pending = LookupResult.HIT_PENDING
        return [key for key in keys if verdicts.get(key, pending) is pending]

    def _missing(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        states = self._primary.lookup_many(keys)
        return [key for key, has in zip(keys, states, strict=True) if has is LookupResult.MISS]

    def _with_windows(
        self, request: RequestState, prompt: Prompt, num_found: int
    ) -> list[OffloadKey] | None:
        """Return the blocks of a prompt's prefix that its groups load, each once; None: unknown."""
        end = shortest = num_found
        while prompt.windows and end:
            for window in prompt.windows:
                window_end = self._window_end(request, window, shortest)
                if window_end is None:
                    return None
                shortest = window_end
            if shortest == end:
                break
            end = shortest
        parts = [window.keys[max(0, end - window.num_blocks) : end] for window in prompt.windows]
        return list(dict.fromkeys(chain(prompt.keys[:num_found] if end else (), *parts)))

    def _window_end(self, request: RequestState, window: SlidingWindow, end: int) -> int | None:
        """Return where the last window before `end` ends that is found; None: unknown yet."""
        while end:
            keys = window.keys[max(0, end - window.num_blocks) : end]
            found = self._look_up(request, keys[::-1])
            if found is None or found == len(keys):
                return None if found is None else end
            end -= found + 1
        return 0

    def _look_up(self, request: RequestState, keys: Sequence[OffloadKey]) -> int | None:
        """Return how many leading blocks are found; None while a tier's answer is outstanding."""
        missing = self._missing(keys)
        verdicts = self._search.ask(missing, request, is_paused=False, stop_at_miss=True)
        for key, verdict in verdicts.items():
            if verdict is LookupResult.RETRY:
                return None
            if verdict is not LookupResult.HIT_PENDING:
                return keys.index(key)
        return len(keys)

    def _grant(
        self, request: RequestState, run: Sequence[OffloadKey], now_s: float, *, is_cut: bool
    ) -> bool:
        """Give a request an early ticket for blocks that are found; return False without room."""
        missing = self._missing(run)
        tiers = self._search.find(missing, request, now_s, is_early=True)
        absent = {key: tier for key, tier in zip(missing, tiers, strict=True) if tier is not None}
        if not run or len(absent) < len(missing):
            return True  # nothing to promote, or no longer
        return self._room.prefetch(request, run, absent, is_cut=is_cut)

    def _discard(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            tier, _ = self._blocks.pop(key, (None, None))
            if tier is not None:
                self._tiers[tier].counters.unused_prefetched_blocks += 1
