"""A bidirectional table of keys and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from kvoffload_async.tables.arrays import PART_BITS, PART_MASK, Objects
from kvoffload_async.tables.keymap import LAST_HASH_BYTE, KeyMap
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class KeyTable:
    """Keys with distinct numbers below `capacity`, chosen by the caller.

    Bytes per key: those of `KeyMap`; in addition 8 per number, in parts of 4,096 numbers of which
    one was taken.

    Attributes:
        map: Key -> number; read-only.
        get: Returns a key's number, None if absent.
        find: Returns the numbers of several keys.
        key_of: Returns the current or last key of a number.
        keys_of: Returns the current or last keys of numbers.
        keys_in: Returns the keys of consecutive numbers; several times faster than `keys_of`.
    """

    __slots__ = ("_keys", "find", "get", "key_of", "keys_in", "keys_of", "map")

    def __init__(self, capacity: int) -> None:
        self._keys = Objects()
        self.map = KeyMap(capacity)
        self.get: Callable[[OffloadKey], int | None] = self.map.get
        self.find: Callable[[Sequence[OffloadKey]], list[int | None]] = self.map.find
        self.key_of: Callable[[int], OffloadKey] = self._keys.get
        self.keys_of: Callable[[Sequence[int]], list[OffloadKey]] = self._keys.find
        self.keys_in: Callable[[range], list[OffloadKey]] = self._keys.find_range

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.map

    def add(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Assign free numbers to absent keys."""
        parts, key_parts = self.map.parts, self._keys.parts
        for key, number in zip(keys, numbers, strict=True):
            parts[key[0] + key[LAST_HASH_BYTE]][key] = number
            key_parts[number >> PART_BITS][number & PART_MASK] = key

    def fill(self, keys: Sequence[OffloadKey], numbers: npt.NDArray[np.int64]) -> None:
        """Like `add` for many keys: fast if keys of the same part are adjacent."""
        in_order = numbers.tolist()
        self.map.fill(keys, in_order)
        self._keys.update(in_order, keys)

    def remove(self, numbers: Sequence[int]) -> list[OffloadKey]:
        """Free taken numbers; return and remove their keys."""
        parts = self.map.parts
        keys = self.keys_of(numbers)
        for key in keys:
            del parts[key[0] + key[LAST_HASH_BYTE]][key]
        return keys

    def items(self) -> list[tuple[OffloadKey, int]]:
        """Return every key with its number, sorted by number."""
        return sorted(self.map.items(), key=itemgetter(1))

    def clear(self) -> None:
        """Free all numbers."""
        self.map.clear()
        self._keys.clear()
