"""Optional admission: a block is stored only when it has been offered often enough."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_async.tables.arrays import integers
from kvoffload_async.tables.free import FreeNumbers
from kvoffload_async.tables.keytable import KeyTable
from kvoffload_async.tables.lists import NumberLists
from kvoffload_async.types import OffloadKey


class AdmissionFilter:
    """Admits a key at its `threshold`-th offer; remembers at most `tracked_keys` keys."""

    def __init__(self, threshold: int, tracked_keys: int = 64_000) -> None:
        self.threshold = threshold
        self.tracked_keys = tracked_keys
        self.clear()

    def admitted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the offered keys that have had enough offers, this one included."""
        counts = self._counts_with(keys)
        return [key for key, count in zip(keys, counts, strict=True) if count >= self.threshold]

    def offered(self, keys: Sequence[OffloadKey]) -> None:
        """Count one offer of each key; the keys that were offered the longest ago are forgotten."""
        for key, count in zip(keys, self._counts_with(keys), strict=True):
            number = self._table.get(key)
            if number is not None:
                self._oldest_first.remove([number])
            else:
                if not self._free.count:
                    oldest = [next(self._oldest_first.walk())]
                    self._oldest_first.remove(oldest)
                    self._table.remove(oldest)
                    self._free.give_back(oldest)
                (number,) = self._free.take(1)
                self._table.add([key], [number])
            self._oldest_first.append([number])
            self._counts[number] = count

    def clear(self) -> None:
        """Forget every offer."""
        self._table = KeyTable(self.tracked_keys)
        self._free = FreeNumbers(self.tracked_keys)
        self._oldest_first = NumberLists(self.tracked_keys)
        self._counts = integers(self.tracked_keys)

    def _counts_with(self, keys: Sequence[OffloadKey]) -> list[int]:
        counts = self._counts
        return [1 if n is None else counts[n] + 1 for n in self._table.find(keys)]
