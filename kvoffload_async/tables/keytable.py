"""Keys with numbers, found both ways."""

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
    """Keys that have a number below `capacity`, which the caller chooses; a number has one key.

    Bytes a key: those of `KeyMap`, and 8 for a number, taken or not.

    Attributes:
        map: Key -> number; to be read only.
        get: Returns a key's number, None if it is absent.
        find: The same of several keys.
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
        """Return the key that has a number, or had it last."""
        key: OffloadKey = self._keys[number]
        return key

    def keys_of(self, numbers: Sequence[int]) -> list[OffloadKey]:
        """Return the keys that have these numbers, or had them last."""
        keys = self._keys
        return [keys[number] for number in numbers]

    def keys_in(self, numbers: range) -> list[OffloadKey]:
        """Return the same of numbers that follow each other; several times as fast."""
        keys: list[OffloadKey] = self._keys[numbers.start : numbers.stop].tolist()
        return keys

    def add(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Give absent keys numbers that are free."""
        parts, of = self.map.parts, self._keys
        for key, number in zip(keys, numbers, strict=True):
            parts[key[0] + key[LAST_HASH_BYTE]][key] = number
            of[number] = key

    def fill(self, keys: Sequence[OffloadKey], numbers: npt.NDArray[np.int64]) -> None:
        """Do what `add` does with many keys: fast where those of a part follow each other."""
        self.map.fill(keys, numbers.tolist())
        self._keys[numbers] = keys

    def remove(self, numbers: Sequence[int]) -> list[OffloadKey]:
        """Free numbers that are taken; return their keys, which are absent from now on."""
        parts, of = self.map.parts, self._keys
        keys: list[OffloadKey] = []
        for number in numbers:
            key = of[number]
            del parts[key[0] + key[LAST_HASH_BYTE]][key]
            keys.append(key)
        return keys

    def items(self) -> list[tuple[OffloadKey, int]]:
        """Return every key with its number, in the order of these."""
        return sorted(self.map.items(), key=itemgetter(1))

    def clear(self) -> None:
        """Free every number."""
        self.map.clear()
        self._keys = objects(self._capacity)
