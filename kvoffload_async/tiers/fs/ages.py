"""How old the blocks are that a first cycle of walks finds, so that the oldest can go first.

A policy learns a namespace bucket by bucket, and ranks no more blocks than the capacity holds. If
that holds fewer than there are, as when it became smaller, neither says which are to go: that is
decided by all blocks' ages, once all have been seen. Eight bytes a block, and a key for each of
those that cannot be ranked; dropped when it is decided.

Thread: loop, where not said.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload_async.types import OffloadKey


class Ages:
    """When blocks were changed last, of those that nobody has used since they were found.

    Attributes:
        held: Blocks that could not be ranked -> time of last change in s.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.held: dict[OffloadKey, float] = {}
        self._changed_s = array("d")
        """Slot -> time of last change in s; NaN: used since, or none."""
        self._seen_s: npt.NDArray[np.float64] = np.empty(0)
        self._held: list[OffloadKey] = []
        self._order: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._taken = 0

    def note(
        self, keys: Iterable[OffloadKey], slots: Iterable[int], ages: Mapping[OffloadKey, float]
    ) -> None:
        """Note the times of blocks that have these slots now; a key without one was used."""
        changed_s = self._changed_s
        for key, slot in zip(keys, slots, strict=True):
            if slot >= len(changed_s):
                changed_s.extend([math.nan] * (slot + 1 - len(changed_s)))
            changed_s[slot] = ages.get(key, math.nan)

    def sorting(self) -> Callable[[], None]:
        """Return a call that sorts what was noted, for any thread."""
        self._held = list(self.held)
        self._seen_s = np.array(self._changed_s)
        held_s = np.fromiter(self.held.values(), np.float64, len(self._held))

        def sort() -> None:
            order = np.argsort(np.concatenate((self._seen_s, held_s)), kind="stable")
            self._order = order[: len(order) - int(np.isnan(self._seen_s).sum())]  # they are last

        return sort

    def take(self, count: int) -> tuple[list[int], list[OffloadKey]]:
        """Take the next ones, the oldest first: the slots of some, and the keys of others.

        Nothing is taken only if none are left; those that were used since are left out.
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

    def rest(self) -> Sequence[OffloadKey]:
        """Return the blocks that could not be ranked and were not taken, the oldest first."""
        return sorted(self.held, key=self.held.__getitem__)
