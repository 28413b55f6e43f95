"""Ages of the blocks found by the first cycle of walks, so that the oldest are evicted first.

A policy learns a namespace bucket by bucket, and ranks no more blocks than fit the capacity. If
there are more, as after the capacity was reduced, the order of discovery must not decide which are
removed. That is decided by age once all blocks have been seen. Uses eight bytes per block, plus a
key for each block that cannot be ranked, until it is decided.

Call from the event loop's thread unless documented otherwise.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload_async.types import OffloadKey


class Ages:
    """Modification times of blocks that were not used since they were found.

    Attributes:
        held: Blocks that could not be ranked -> modification time in s.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.held: dict[OffloadKey, float] = {}
        self._changed_s = array("d")
        """Slot -> modification time in s; NaN: used since, or no block."""
        self._seen_s: npt.NDArray[np.float64] = np.empty(0)
        self._held: list[OffloadKey] = []
        self._order: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._taken = 0

    def note(
        self, keys: Iterable[OffloadKey], slots: Iterable[int], ages: Mapping[OffloadKey, float]
    ) -> None:
        """Record the times of blocks by slot; a key without a time was used."""
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
        """Take the next oldest: the slots of ranked blocks, and the keys of others.

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

    def rest(self) -> Sequence[OffloadKey]:
        """Return the remaining blocks that could not be ranked, oldest first."""
        return sorted(self.held, key=self.held.__getitem__)
