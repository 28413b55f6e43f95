"""Dictionaries from keys to integers that grow in small parts, and bidirectional tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from kvoffload_async.errors import StateError
from kvoffload_async.tables.arrays import PART_BITS, PART_MASK, Objects
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_PARTS: Final = 256

LAST_HASH_BYTE: Final = -5
"""Index of the last byte of a key's block hash: 4 bytes of the group follow.

The sum of the first and last byte of the hash selects the part of its key: one of them varies even
if hashes are counters, of either byte order.
"""

LEAST_KEY_BYTES: Final = -LAST_HASH_BYTE
MAX_KEY_BYTES: Final = 96
"""Maximum key length of all tiers: hashes of 92 bytes, or of 84 with a generation tag."""

_KEY_LENGTHS: Final = frozenset(range(LEAST_KEY_BYTES, MAX_KEY_BYTES + 1))

_KEYS_PER_PART: Final = 4096

_ends = itemgetter(0, LAST_HASH_BYTE)


class KeyMap(Collection[OffloadKey]):
    """Maps keys to integers, unordered.

    A dictionary copies all entries when it is resized, as it grows and repeatedly as keys come and
    go: this one is resized one part at a time, of 4,000 entries at a million keys. Bytes per key:
    27 to 54 (38 at a million, 30 at ten million), and up to twice that after many removals (75 at a
    million), in addition to the key itself (33 and its length) and the integer (28, none up to
    256).
    """

    __slots__ = ("distinct", "parts")

    def __init__(self, capacity: int = MOST_PARTS * _KEYS_PER_PART) -> None:
        """Create an empty map; `capacity` determines the number of parts, and may be exceeded."""
        num_parts = 1  # a divisor of 256; few parts with many keys are fastest
        while num_parts < MOST_PARTS and num_parts * _KEYS_PER_PART < capacity:
            num_parts *= 2
        self.distinct: list[dict[OffloadKey, int]] = [{} for _ in range(num_parts)]
        """The dictionaries that make up the map."""
        self.parts = self.distinct * (2 * MOST_PARTS // num_parts)
        """The part for each sum of two hash bytes; the list and its parts are never replaced."""

    def __len__(self) -> int:
        return sum(map(len, self.distinct))

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]  # a collection takes any object

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain.from_iterable(self.distinct)

    def get(self, key: OffloadKey) -> int | None:
        """Return a key's integer, None if absent.

        Raises:
            StateError: The key is too short; also raised by the other methods.
        """
        try:
            return self.parts[key[0] + key[LAST_HASH_BYTE]].get(key)
        except IndexError:
            raise too_short([key]) from None

    def find(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return each key's integer, None for absent keys."""
        parts = self.parts
        numbers: list[int | None] = []
        try:
            for key in keys:
                part = parts[key[0] + key[LAST_HASH_BYTE]]
                numbers.append(part.get(key))
        except IndexError:
            raise too_short(keys) from None
        return numbers

    def update(self, keys: Sequence[OffloadKey], numbers: Iterable[int]) -> None:
        """Set the integers of keys, present or not."""
        parts = self.parts
        try:
            for key, number in zip(keys, numbers, strict=False):  # the integers may be infinite
                parts[key[0] + key[LAST_HASH_BYTE]][key] = number
        except IndexError:
            raise too_short(keys) from None

    def fill(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Set the integers of many keys: fast if keys of the same part are adjacent."""
        try:
            ends = np.fromiter(map(_ends, keys), dtype=(np.int16, 2), count=len(keys))
        except IndexError:
            raise too_short(keys) from None
        starts = np.flatnonzero(np.diff(ends.sum(axis=1) % MOST_PARTS, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(keys)], strict=False):
            part = self.parts[sum(_ends(keys[start]))]
            part.update(zip(keys[start:stop], numbers[start:stop], strict=True))

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys; absent ones are ignored."""
        parts = self.parts
        for key in keys:
            parts[key[0] + key[LAST_HASH_BYTE]].pop(key, None)

    def discard_present(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Remove keys; return those that were present."""
        parts = self.parts
        return [
            key for key in keys if parts[key[0] + key[LAST_HASH_BYTE]].pop(key, None) is not None
        ]

    def pop(self, count: int) -> list[tuple[OffloadKey, int]]:
        """Remove and return `count` keys, or all that are left, each with its integer."""
        popped: list[tuple[OffloadKey, int]] = []
        for part in filter(None, self.distinct):
            if len(part) <= count - len(popped):
                popped += part.items()
                part.clear()  # unlike `popitem`, it frees the memory
            while part and len(popped) < count:
                popped.append(part.popitem())
        return popped

    def change(self, keys: Iterable[OffloadKey], number: int) -> list[OffloadKey]:
        """Set keys to one integer; return those that had another integer or were absent."""
        parts = self.parts
        changed: list[OffloadKey] = []
        for key in keys:
            part = parts[key[0] + key[LAST_HASH_BYTE]]
            if part.get(key) != number:
                part[key] = number
                changed.append(key)
        return changed

    def following(self, key: OffloadKey | None, count: int) -> list[OffloadKey]:
        """Return the next `count` keys, or all that are left, in an order fixed for all keys.

        Its cost depends on `count` and the size of a part, not on the number of keys before.

        Args:
            key: The key after which to begin, present or not; None: begin with the first one.
            count: Maximum number of keys.
        """
        found: list[OffloadKey] = []
        first = 0 if key is None else sum(_ends(key)) % len(self.distinct)
        for part in self.distinct[first:]:
            if len(found) >= count:
                break
            found += sorted(part if key is None else [one for one in part if one > key])
            key = None
        return found[:count]

    def items(self) -> Iterator[tuple[OffloadKey, int]]:
        """Yield every key with its integer."""
        return chain.from_iterable(part.items() for part in self.distinct if part)

    def copy(self) -> KeyMap:
        """Return an independent copy."""
        copied = KeyMap(0)
        copied.distinct = [part.copy() for part in self.distinct]
        copied.parts = copied.distinct * (2 * MOST_PARTS // len(copied.distinct))
        return copied

    def clear(self) -> None:
        """Remove all keys."""
        for part in self.distinct:
            part.clear()


def require_keys(keys: Collection[OffloadKey]) -> None:
    """Raise StateError unless each key has a valid length."""
    if _KEY_LENGTHS.issuperset(map(len, keys)):  # one pass, as most calls are with good keys
        return
    if min(map(len, keys)) < LEAST_KEY_BYTES:
        raise too_short(keys)
    long = max(keys, key=len)
    raise StateError(
        f"a key of {len(long)} bytes ({long[:8].hex()}...) is too long: at most "
        f"{MAX_KEY_BYTES}, with the group's 4 and a generation's 8; use a shorter block hash"
    )


def too_short(keys: Iterable[OffloadKey]) -> StateError:
    """Return the error for the shortest of the keys."""
    short = min(keys, key=len)
    return StateError(
        f"{short!r} is too short: a key is a block hash followed by 4 bytes; see make_offload_key"
    )


def key_of_cursor(cursor: str | None) -> OffloadKey | None:
    """Return the key after which a listing continues; None for None.

    Raises:
        StateError: The cursor is not a key in hexadecimal digits.
    """
    if cursor is None:
        return None
    with contextlib.suppress(ValueError):
        if len(key := OffloadKey(bytes.fromhex(cursor))) >= LEAST_KEY_BYTES:
            return key
    raise StateError(f"cursor: {cursor!r} is not valid; give one that a listing has returned")


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
