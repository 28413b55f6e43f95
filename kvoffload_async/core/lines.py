"""Who waits for room for promotions: one line a tier, first come, first served."""

from __future__ import annotations

from typing import Final

from kvoffload_async.core.requests import RequestState
from kvoffload_async.types import OffloadKey

TURN_S: Final = 1.0
"""Seconds that the first in a line may leave room unused that others wait for."""


class Lines:
    """A request is in a tier's line from the first key that found no room until it has its blocks.

    Or until it waits no more. Only the first in a line gets room; who is behind holds nothing that
    the first may need, so nobody waits for somebody who waits for him.

    Thread: owner.

    Attributes:
        has_new_first: By tier: whether another request is the first since `moved` was called.
    """

    def __init__(self, num_tiers: int) -> None:
        """Start with nobody in line."""
        self._lines: list[dict[RequestState, None]] = [{} for _ in range(num_tiers)]
        self._moved_s = [0.0] * num_tiers
        """When the first in each line had no room last, or asked for it."""
        self.has_new_first = [False] * num_tiers

    def first(self, tier: int) -> RequestState | None:
        """Return who is served next, if anybody waits."""
        return next(iter(self._lines[tier]), None)

    def firsts(self) -> list[tuple[int, RequestState]]:
        """Return each tier that somebody waits for, with the first in its line."""
        return [(tier, next(iter(line))) for tier, line in enumerate(self._lines) if line]

    def join(self, tier: int, request: RequestState, key: OffloadKey) -> None:
        """Have a request wait for room for a key, behind who waits already."""
        line = self._lines[tier]
        if not line:
            self.has_new_first[tier] = True
        line.setdefault(request)
        request.refused.setdefault(tier, {})[key] = None
        self._look_ahead(request)

    def served(self, tier: int, request: RequestState, key: OffloadKey) -> None:
        """Learn that a key of a request waits no more: it has room, or never gets any."""
        refused = request.refused.get(tier)
        if refused is not None:
            refused.pop(key, None)
            if not refused:
                self._leave(tier, request)

    def leave(self, request: RequestState) -> None:
        """Learn that a request waits no more."""
        for tier in list(request.refused):
            self._leave(tier, request)

    def moved(self, tier: int, now_s: float) -> None:
        """Note that it is not the first one's fault if room is left until now."""
        self._moved_s[tier] = now_s
        self.has_new_first[tier] = False

    def has_stalled(self, tier: int, now_s: float) -> bool:
        """Tell whether the first in line has not asked although there was room."""
        return not self.has_new_first[tier] and now_s - self._moved_s[tier] > TURN_S

    def clear(self) -> None:
        """Let nobody wait any more."""
        for line in self._lines:
            for request in list(line):
                self.leave(request)

    def waiting(self) -> list[list[RequestState]]:
        """Return who is in each line, in order. For invariants and inspection."""
        return [list(line) for line in self._lines]

    def _leave(self, tier: int, request: RequestState) -> None:
        was_first = self.first(tier) is request
        del self._lines[tier][request], request.refused[tier]
        self._look_ahead(request)
        first = self.first(tier)
        if was_first and first is not None:
            self.has_new_first[tier] = True
            self._look_ahead(first)

    def _look_ahead(self, request: RequestState) -> None:
        request.is_behind = any(self.first(tier) is not request for tier in request.refused)
