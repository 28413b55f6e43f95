"""The blocks of a namespace that a tier knows, marked by the walks that have seen them.

Every known block has the mark of the last cycle of walks that has seen it, one byte per block. A
block with an older mark at the end of a cycle has vanished. A block being evicted is not learned
again, although a walk may have seen it before its removal.

Call only from the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from kvoffload_async.abc.ranking import KeyRanking
from kvoffload_async.tables.arrays import small_integers
from kvoffload_async.tiers.fs.ages import Ages
from kvoffload_async.types import OffloadKey

_SLOTS_AT_ONCE: Final = 8192
_MARKS: Final = 255
_NO_AGES: Final[Mapping[OffloadKey, float]] = {}


class KnownBlocks:
    """The blocks ranked by a policy, with the marks of walks.

    Attributes:
        is_first_cycle: Whether the first cycle of walks has not ended.
        ages: Ages of the blocks found by the first cycle; None when no longer needed.
    """

    def __init__(self, policy: KeyRanking, busy: Container[OffloadKey]) -> None:
        """Start empty; `busy` are the blocks being read or written."""
        self.is_first_cycle = True
        self.ages: Ages | None = Ages()
        self._policy = policy
        self._busy = busy
        self._marks = small_integers(policy.capacity_blocks)
        """Slot -> mark of the last cycle that saw its block; 0: no block."""
        self._end = 0
        self._mark = 1
        self._leaving: set[OffloadKey] = set()
        self._left: set[OffloadKey] | None = None

    def begin_cycle(self) -> None:
        """Begin a cycle: use a new mark from now on."""
        self._mark = self._mark % _MARKS + 1

    def end_cycle(self) -> None:
        """End a cycle: all blocks that existed at its beginning are known."""
        self.is_first_cycle = False

    def begin_walk(self) -> None:
        """Begin to record evicted blocks, which a walk may have seen before; see `end_walk`."""
        self._left = set()

    def end_walk(self) -> None:
        """Stop recording evicted blocks: the walk's results were learned."""
        self._left = None

    def learn(
        self, keys: Sequence[OffloadKey], ages: Mapping[OffloadKey, float] = _NO_AGES
    ) -> list[OffloadKey]:
        """Add blocks that were seen, and mark known ones.

        Args:
            keys: The blocks.
            ages: Modification times in s; empty if the blocks were seen through a use.

        Returns:
            The first of the new blocks if there are more than can be ranked; none while `ages`
            decide that later.
        """
        news: list[OffloadKey] = []
        left = self._left or ()
        held = () if self.ages is None else self.ages.held
        for key, slot in zip(keys, self._policy.find(keys), strict=True):
            if slot is not None:
                self._marks[slot] = self._mark
                if self.ages is not None and not ages:
                    self.ages.note([key], [slot], ages)
            elif key not in self._leaving and key not in left and not (ages and key in held):
                news.append(key)
        room = max(0, self._policy.capacity_blocks - len(self._policy))
        surplus = max(0, len(news) - room)
        self.admit(news[surplus:], ages)
        if self.ages is not None and ages:
            self.ages.held.update((key, ages[key]) for key in news[:surplus])
            return []
        return news[:surplus]

    def take_oldest(self, count: int) -> list[OffloadKey]:
        """Remove the next oldest idle blocks among those found by the first cycle.

        Returns:
            At most `count` blocks; empty if none are left.
        """
        victims: list[OffloadKey] = []
        while self.ages is not None and not victims:
            slots, held = self.ages.take(count)
            if not slots and not held:
                break
            keys = self._policy.keys_of(slots)
            found = self._policy.find(keys + held)
            idle = [key for key in keys + held if key not in self._busy]
            places = dict(zip(keys + held, found, strict=True))
            wanted: dict[OffloadKey, int | None] = dict(zip(keys, slots, strict=True))
            gone = self._leaving | (self._left or set())
            victims = [key for key in idle if places[key] == wanted.get(key) and key not in gone]
        self._policy.discard(victims)
        self.leave(victims)
        return victims

    def admit(
        self, keys: Sequence[OffloadKey], ages: Mapping[OffloadKey, float] = _NO_AGES
    ) -> None:
        """Add blocks that exist or are about to be written, up to the policy's capacity."""
        found = self._policy.find(keys)
        news = [key for key, slot in zip(keys, found, strict=True) if slot is None]
        del news[max(0, self._policy.capacity_blocks - len(self._policy)) :]
        known = [key for key, slot in zip(keys, found, strict=True) if slot is not None]
        slots = [slot for slot in found if slot is not None] + self._policy.admit(news)
        for slot in slots:
            self._marks[slot] = self._mark
        if self.ages is not None:
            self.ages.note([*known, *news], slots, ages)
        self._end = max(self._end, max(slots, default=-1) + 1)

    def leave(self, keys: Iterable[OffloadKey]) -> None:
        """Record blocks whose eviction begins."""
        self._leaving.update(keys)

    def left(self, keys: Sequence[OffloadKey]) -> None:
        """Record that the eviction of blocks has ended, removed or not."""
        self._leaving.difference_update(keys)
        if self._left is not None:
            self._left.update(keys)

    def vanished(self, first: int, unwalked: Container[int]) -> tuple[list[OffloadKey], int | None]:
        """Return some blocks that this cycle did not see, and the slot to continue at or None."""
        end = min(first + _SLOTS_AT_ONCE, self._end)
        marks = np.asarray(self._marks[first:end])
        slots = (np.flatnonzero((marks != 0) & (marks != self._mark)) + first).tolist()
        keys = self._policy.keys_of(slots)
        vanished = []
        for key, slot, found in zip(keys, slots, self._policy.find(keys), strict=True):
            if found != slot:
                self._marks[slot] = 0  # it was freed
            elif key not in self._busy and key[0] not in unwalked:
                vanished.append(key)
        return vanished, end if end < self._end else None
