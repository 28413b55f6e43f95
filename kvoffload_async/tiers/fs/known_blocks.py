"""The blocks of a namespace that a tier knows, marked by the walks that have seen them.

Every known block has the mark of the last cycle of walks that has seen it, one byte per block. A
block with an older mark at the end of a cycle has vanished. A block being evicted is not learned
again, although a walk may have seen it before its removal.

A policy learns a namespace bucket by bucket, and ranks no more blocks than fit the capacity. If
there are more, as after the capacity was reduced, the order of discovery must not decide which are
removed. That is decided by age once all blocks have been seen.

Call from the event loop's thread unless documented otherwise.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.tables.arrays import small_integers
from kvoffload_async.tiers.files.ranking import KeyRanking
from kvoffload_async.types import OffloadKey


class Ages:
    """Modification times of blocks that were not used since they were found.

    Attributes:
        held: Blocks that could not be ranked -> modification time in s.
    """

    def __init__(self) -> None:
        """Start without recorded times."""
        self.held: dict[OffloadKey, float] = {}
        self._changed_s = array("d")
        """Slot -> modification time of its block in s; NaN if it was used, or there is none."""
        self._seen_s: npt.NDArray[np.float64] = np.empty(0)
        self._held: list[OffloadKey] = []
        self._order: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._taken = 0

    def note(
        self, keys: Iterable[OffloadKey], slots: Iterable[int], ages: Mapping[OffloadKey, float]
    ) -> None:
        """Record the modification times of blocks by slot; a key without a time was used."""
        changed_s = self._changed_s
        for key, slot in zip(keys, slots, strict=True):
            if slot >= len(changed_s):
                changed_s.extend([math.nan] * (slot + 1 - len(changed_s)))
            changed_s[slot] = ages.get(key, math.nan)

    def sorting(self) -> Callable[[], None]:
        """Return a function that sorts the recorded times; it may run on any thread."""
        self._held = list(self.held)
        self._seen_s = np.array(self._changed_s)
        held_s = np.fromiter(self.held.values(), np.float64, len(self._held))

        def sort() -> None:
            order = np.argsort(np.concatenate((self._seen_s, held_s)), kind="stable")
            self._order = order[: len(order) - int(np.isnan(self._seen_s).sum())]  # NaNs sort last

        return sort

    def take(self, count: int) -> tuple[list[int], list[OffloadKey]]:
        """Take the next oldest blocks: the slots of ranked blocks, and the keys of others.

        Blocks used meanwhile are skipped. Both lists are empty only when none are left.
        """
        slots: list[int] = []
        keys: list[OffloadKey] = []
        while self._taken < len(self._order) and not (slots or keys):
            portion = self._order[self._taken : self._taken + count].tolist()
            self._taken += len(portion)
            for number in portion:
                if number >= len(self._seen_s):
                    key = self._held[number - len(self._seen_s)]
                    del self.held[key]
                    keys.append(key)
                elif self._changed_s[number] == self._seen_s[number]:
                    slots.append(number)
        return slots, keys


_SLOTS_AT_ONCE: Final = 8192
_MARKS: Final = 255
_NO_AGES: Final[Mapping[OffloadKey, float]] = {}


class KnownBlocks:
    """The blocks ranked by an eviction policy, marked by the walks that have seen them.

    Attributes:
        is_first_cycle: Whether the first cycle of walks has not ended.
        ages: Ages of the blocks found by the first cycle; None when no longer needed.
    """

    def __init__(
        self,
        policy: KeyRanking,
        busy: Container[OffloadKey],
        announce: Callable[[Sequence[OffloadKey]], object],
    ) -> None:
        """Start without known blocks.

        Args:
            policy: Ranks the blocks.
            busy: The blocks being read or written.
            announce: Called with the blocks that were found and are known from now on.
        """
        self.is_first_cycle = True
        self.ages: Ages | None = Ages()
        self._policy = policy
        self._busy = busy
        self._announce = announce
        self._marks = small_integers(policy.capacity_blocks)
        """Slot -> mark of the last cycle that saw its block; 0: no block."""
        self._end = 0
        self._mark = 1
        self._leaving: set[OffloadKey] = set()
        self._left: set[OffloadKey] | None = None

    def begin_cycle(self) -> None:
        """Begin a cycle of walks: use a new mark from now on."""
        self._mark = self._mark % _MARKS + 1

    def begin_walk(self) -> None:
        """Record evicted blocks until `end_walk`, because a walk may have seen them before."""
        self._left = set()

    def end_walk(self) -> None:
        """Stop recording evicted blocks, after `learn` has processed the walk's results."""
        self._left = None

    def learn(
        self, keys: Sequence[OffloadKey], ages: Mapping[OffloadKey, float] = _NO_AGES
    ) -> list[OffloadKey]:
        """Add blocks that a walk has seen or a request has used, and mark known ones.

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
        if surplus < len(news):
            self.admit(news[surplus:], ages)
            self._announce(news[surplus:])
        if self.ages is not None and ages:
            self.ages.held.update((key, ages[key]) for key in news[:surplus])
            return []
        return news[:surplus]

    def seen(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Add and mark blocks that were just used; return the slots of ranked ones."""
        slots = self._policy.find(keys)
        if self.ages is not None or None in slots:
            self.learn(keys)
            slots = self._policy.find(keys)
        ranked = [slot for slot in dict.fromkeys(slots) if slot is not None]
        for slot in ranked:
            self._marks[slot] = self._mark
        return ranked

    def take_oldest(self, count: int) -> list[OffloadKey]:
        """Remove the next oldest idle blocks among those found by the first cycle of walks.

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
            slots_of = dict(zip(keys + held, found, strict=True))
            wanted: dict[OffloadKey, int | None] = dict(zip(keys, slots, strict=True))
            gone = self._leaving | (self._left or set())
            victims = [key for key in idle if slots_of[key] == wanted.get(key) and key not in gone]
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
        """Record that the eviction of blocks begins."""
        self._leaving.update(keys)

    def left(self, keys: Sequence[OffloadKey]) -> None:
        """Record that the eviction of blocks has ended, whether their files were removed or not."""
        self._leaving.difference_update(keys)
        if self._left is not None:
            self._left.update(keys)

    def vanished(self, first: int, unwalked: Container[int]) -> tuple[list[OffloadKey], int | None]:
        """Return some blocks that this cycle has not seen, and the slot to continue at, or None."""
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
