"""A bidirectional table of keys and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from kvoffload_async.tables.arrays import objects
from kvoffload_async.tables.keymap import LAST_HASH_BYTE, KeyMap
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class KeyTable:
    """Keys with distinct numbers below `capacity`, chosen by the caller.

    Bytes per key: those of `KeyMap`; in addition 8 per number, taken or not.

    Attributes:
        map: Key -> number; read-only.
        get: Returns a key's number, None if absent.
        find: Returns the numbers of several keys.
    """

    __slots__ = ("_capacity", "_keys", "find", "get", "map")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.map = KeyMap(capacity)
        self.get: Callable[[OffloadKey], int | None] = self.map.get
        self.find: Callable[[Sequence[OffloadKey]], list[int | None]] = self.map.find
        self.clear()

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.map

    def key_of(self, number: int) -> OffloadKey:
        """Return the current or last key of a number."""
        key: OffloadKey = self._keys[number]
        return key

    def keys_of(self, numbers: Sequence[int]) -> list[OffloadKey]:
        """Return the current or last keys of numbers."""
        keys = self._keys
        return [keys[number] for number in numbers]

    def keys_in(self, numbers: range) -> list[OffloadKey]:
        """Return the keys of consecutive numbers; several times faster than `keys_of`."""
        keys: list[OffloadKey] = self._keys[numbers.start : numbers.stop].tolist()
        return keys

    def add(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Assign free numbers to absent keys."""
        parts, of = self.map.parts, self._keys
        for key, number in zip(keys, numbers, strict=True):
            parts[key[0] + key[LAST_HASH_BYTE]][key] = number
            of[number] = key

    def fill(self, keys: Sequence[OffloadKey], numbers: npt.NDArray[np.int64]) -> None:
        """Like `add` for many keys: fast if keys of the same part are adjacent."""
        self.map.fill(keys, numbers.tolist())
        self._keys[numbers] = keys

    def remove(self, numbers: Sequence[int]) -> list[OffloadKey]:
        """Free taken numbers; return and remove their keys."""
        parts, of = self.map.parts, self._keys
        keys: list[OffloadKey] = []
        for number in numbers:
            key = of[number]
            del parts[key[0] + key[LAST_HASH_BYTE]][key]
            keys.append(key)
        return keys

    def items(self) -> list[tuple[OffloadKey, int]]:
        """Return every key with its number, sorted by number."""
        return sorted(self.map.items(), key=itemgetter(1))

    def clear(self) -> None:
        """Free all numbers."""
        self.map.clear()
        self._keys = objects(self._capacity)
