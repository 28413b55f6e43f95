"""What a store has answered lately, so that the same question is not asked at once again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from kvoffload_async.types import OffloadKey

MOST_ANSWERS: Final = 1 << 18
"""Bound on the answers of each kind: the oldest are forgotten first."""


class _Answers:
    """Keys in the order of their expiry, which is that of their entry: all live equally long."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._expiry: dict[OffloadKey, float] = {}

    def add(self, keys: Iterable[OffloadKey], now_s: float) -> None:
        if not self._lifetime_s:
            return
        expiry_s = now_s + self._lifetime_s
        for key in keys:
            self._expiry.pop(key, None)
            self._expiry[key] = expiry_s
        outdated = 0
        for expired_s in self._expiry.values():
            if expired_s > now_s:
                break
            outdated += 1
        surplus = max(outdated, len(self._expiry) - MOST_ANSWERS)
        for key in list(islice(self._expiry, max(0, surplus))):
            del self._expiry[key]

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._expiry.pop(key, None)

    def clear(self) -> None:
        self._expiry.clear()

    def has(self, key: OffloadKey, now_s: float) -> bool:
        return self._expiry.get(key, now_s) > now_s

    def __len__(self) -> int:
        return len(self._expiry)


class AnswerMemory:
    """Which blocks were there, and which not, for as long as that is to be believed.

    What other hosts store is seen once a negative answer has expired.

    Thread: loop.
    """

    def __init__(self, present_s: float, absent_s: float, clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
            present_s: Seconds that a positive answer is believed; 0: never.
            absent_s: Seconds that a negative answer is believed; 0: never.
            clock: Returns monotonic seconds.
        """
        self._present = _Answers(present_s)
        self._absent = _Answers(absent_s)
        self._clock = clock

    def get(self, key: OffloadKey) -> bool | None:
        """Return whether a block was there, or None if nobody knows."""
        now_s = self._clock()
        if self._present.has(key, now_s):
            return True
        return False if self._absent.has(key, now_s) else None

    def appeared(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks that are there."""
        keys = tuple(keys)
        self._absent.discard(keys)
        self._present.add(keys, self._clock())

    def vanished(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks that are not there."""
        keys = tuple(keys)
        self._present.discard(keys)
        self._absent.add(keys, self._clock())

    def emptied(self) -> None:
        """Forget every positive answer: the store has lost its contents."""
        self._present.clear()

    def __len__(self) -> int:
        return len(self._present) + len(self._absent)
