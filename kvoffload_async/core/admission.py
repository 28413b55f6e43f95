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

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the offered keys that have had enough offers, this one included."""
        return [key for key in keys if self._offers.get(key, 0) + 1 >= self.threshold]

    def offered(self, keys: Sequence[OffloadKey]) -> None:
        """Count one offer of each key."""
        for key in keys:
            self._offers[key] = self._offers.pop(key, 0) + 1
        while len(self._offers) > self.tracked_keys:
            self._offers.popitem(last=False)

    def clear(self) -> None:
        """Forget every offer."""
        self._offers.clear()
