"""Blocks that a user keeps in the primary for a time, a bounded share of its slots.

    readable --pin--> pinned     pinned --its time, unpin, deletion, reset--> readable, or gone

A pinned block is never evicted. Pins never take what tickets, promotions or stores have a right to:
see `Room.budget`, of which they are a part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

from kvoffload_async.core.primary import Primary
from kvoffload_async.core.room import Room
from kvoffload_async.types import LookupResult, OffloadKey

MOST_PIN_S: Final = 3600.0
"""Maximum time of a pin, in seconds."""
_SHARE: Final = 4
"""Pins take at most one of so many slots."""
_ENDS_A_STEP: Final = 512
_MOST_OUTDATED: Final = 4096


class Pins:
    """The pinned blocks, each with the time at which its pin ends.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self, primary: Primary, room: Room) -> None:
        """Start without pins."""
        self.most = sum(share.most // _SHARE for share in primary.shares)
        """Maximum number of pinned blocks, a quarter of each tenant's slots. Read-only."""
        self._primary = primary
        self._room = room
        self._until_s: dict[OffloadKey, float] = {}
        self._ends: list[tuple[float, int, Sequence[OffloadKey]]] = []
        """Heap of the ends of pins, in portions; an entry is outdated where a key ends later."""
        self._num_ends = 0
        """Number of keys in `_ends`."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: object) -> bool:
        return key in self._until_s

    def pin(self, keys: Sequence[OffloadKey], until_s: float) -> int:
        """Keep readable blocks until a time; return how many of them are pinned now.

        A block that is pinned already is kept until the later time. Further ones are pinned while
        their number and the room allow it, the first ones first.
        """
        unique = list(dict.fromkeys(keys))
        answers = zip(unique, self._primary.lookup_many(unique), strict=True)
        readable = [key for key, answer in answers if answer is LookupResult.HIT]
        fresh = [key for key in readable if key not in self._until_s]
        new: list[OffloadKey] = []
        for share, own in self._primary.keys_by_share(fresh):
            room = min(self._room.left_in(share), share.most // _SHARE - share.kept)
            fitting = own[: max(0, room)]
            share.kept += len(fitting)
            new += fitting
        self._primary.pin(new)
        self._until_s.update(dict.fromkeys(new, until_s))
        self._primary.num_kept = len(self)
        kept = [key for key in readable if key in self._until_s]
        for key in kept:
            self._until_s[key] = max(until_s, self._until_s[key])
        self._note_end(until_s, kept)
        if self._num_ends > _MOST_OUTDATED + 2 * len(self):
            self._ends, self._num_ends = [], 0
            by_end: dict[float, list[OffloadKey]] = {}
            for key, end_s in self._until_s.items():
                by_end.setdefault(end_s, []).append(key)
            for end_s, those in by_end.items():
                self._note_end(end_s, those)
        return len(kept)

    def unpin(self, keys: Iterable[OffloadKey]) -> int:
        """End the pins of blocks; return how many there were."""
        gone = [key for key in keys if self._until_s.pop(key, None) is not None]
        for share, those in self._primary.keys_by_share(gone):
            share.kept -= len(those)
        self._primary.num_kept = len(self)
        self._primary.unpin(gone)
        if not self._until_s:
            self.reset()
        return len(gone)

    def end_step(self, now_s: float) -> None:
        """End pins whose time has come, a portion per step."""
        if self._ends and self._ends[0][0] <= now_s:
            _, _, keys = heapq.heappop(self._ends)
            self._num_ends -= len(keys)
            self.unpin([key for key in keys if self._until_s.get(key, now_s + 1) <= now_s])

    def wakes_in_s(self, now_s: float) -> float:
        """Return the seconds until the next pin ends; inf without pins."""
        return max(0.0, self._ends[0][0] - now_s) if self._ends else math.inf

    def reset(self) -> None:
        """Forget all pins; call before `Primary.reset`, which removes them."""
        self._until_s.clear()
        self._ends.clear()
        self._num_ends = self._primary.num_kept = 0
        for share in self._primary.shares:
            share.kept = 0

    def _note_end(self, end_s: float, keys: Sequence[OffloadKey]) -> None:
        for first in range(0, len(keys), _ENDS_A_STEP):
            portion = keys[first : first + _ENDS_A_STEP]
            heapq.heappush(self._ends, (end_s, next(self._numbers), portion))
        self._num_ends += len(keys)
