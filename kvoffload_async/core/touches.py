"""What requests have found, told to the tiers: each hears of it once a step.

A tier that never hears of a use evicts what the primary serves all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Final

from kvoffload_async.core.cascades import Cascades
from kvoffload_async.core.own_context import OwnContext
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.tables.keymap import KeyMap
from kvoffload_async.types import OffloadKey

_AGAIN_AFTER_S: Final = 60.0
_MOST_KEYS: Final = 32_768


class RecentKeys:
    """Lets a key through once in a while: at most once in `again_after_s`, at least in twice that.

    Two tables take turns: one is filled, the other is looked at and then thrown away. Once the
    first is full, no further keys are let through until the next turn.
    """

    def __init__(self, again_after_s: float = _AGAIN_AFTER_S, most_keys: int = _MOST_KEYS) -> None:
        self._again_after_s = again_after_s
        self._most_keys = most_keys
        self._new, self._old = KeyMap(most_keys), KeyMap(most_keys)
        self._turned_s: float | None = None

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def admitted(self, keys: Sequence[OffloadKey], now_s: float) -> list[OffloadKey]:
        """Return the keys, which are distinct, that may pass now, in their order."""
        if self._turned_s is None:
            self._turned_s = now_s
        elif now_s - self._turned_s >= self._again_after_s:
            is_stale = now_s - self._turned_s >= 2 * self._again_after_s
            self._old = KeyMap(self._most_keys) if is_stale else self._new
            self._new = KeyMap(self._most_keys)
            self._turned_s = now_s
        seen = zip(keys, self._new.find(keys), self._old.find(keys), strict=True)
        fresh = [key for key, new, old in seen if new is None and old is None]
        fresh = fresh[: self._most_keys - len(self._new)]
        self._new.update(fresh, repeat(0))
        return fresh


class Touches:
    """Gathers what was used in a step, and passes it on at its end.

    Thread: owner.
    """

    def __init__(self, tiers: Sequence[TierState], cascades: Cascades, own: OwnContext) -> None:
        self._tiers = tiers
        self._cascades = cascades
        self._own = own
        self._used: list[Sequence[OffloadKey]] = []
        self._recent = [RecentKeys() for _ in tiers]

    def note(self, keys: Sequence[OffloadKey]) -> None:
        """Note keys that one request has used, head to tail."""
        if keys and self._tiers:
            self._used.append(keys)

    def flush(self, now_s: float) -> None:
        """Touch the blocks in every tier that has them, and offer the others to those without.

        A tier whose contents are not known here is told of all, but seldom: for it, a touch may be
        a system call or a message.
        """
        if not self._used:
            return
        # A tier takes the first as the most recent: the latest request goes first.
        keys = list(dict.fromkeys(chain.from_iterable(reversed(self._used))))
        self._used.clear()
        for index, tier in enumerate(self._tiers):
            if tier.is_exact:
                lacking = tier.lacks(keys)
                if lacking:
                    self._cascades.owe(index, lacking, now_s)
                    absent = frozenset(lacking)
                    present = [key for key in keys if key not in absent]
                else:
                    present = keys
            else:
                present = self._recent[index].admitted(keys, now_s)
            if present:
                tier.touch(present, self._own.within(tier))
