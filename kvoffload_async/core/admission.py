"""Optional admission: a block is stored only when it has been offered often enough."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload_async.types import OffloadKey


class AdmissionFilter:
    """Admits a key at its `threshold`-th offer; remembers at most `tracked_keys` keys."""

    def __init__(self, threshold: int, tracked_keys: int = 64_000) -> None:
        self.threshold = threshold
        self.tracked_keys = tracked_keys
        self._offers: OrderedDict[OffloadKey, int] = OrderedDict()

    def admit(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Count one offer of each key and return those that have had enough."""
        admitted = []
        for key in keys:
            offers = self._offers.pop(key, 0) + 1
            self._offers[key] = offers
            if offers >= self.threshold:
                admitted.append(key)
        while len(self._offers) > self.tracked_keys:
            self._offers.popitem(last=False)
        return admitted

    def clear(self) -> None:
        """Forget every offer."""
        self._offers.clear()
