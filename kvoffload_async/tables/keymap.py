"""A dictionary from keys to integers that grows in small parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Final

import numpy as np

from kvoffload_async.errors import StateError
from kvoffload_async.types import OffloadKey

MOST_PARTS: Final = 256

LAST_HASH_BYTE: Final = -5
"""Where a key's block hash ends: 4 bytes of its group follow.

The first and the last byte of a hash choose the part of its key by their sum: one of them varies
also where hashes are counters, of either byte order.
"""

LEAST_KEY_BYTES: Final = -LAST_HASH_BYTE
MAX_KEY_BYTES: Final = 96
"""What every tier can keep: hashes of 92 bytes, or of 84 with the tag of a generation."""

_KEYS_PER_PART: Final = 4096

_ends = itemgetter(0, LAST_HASH_BYTE)


class KeyMap(Collection[OffloadKey]):
    """Keys and their integers, in no order.

    A dictionary moves all its entries whenever it is rebuilt, which happens as it grows and, under
    keys that come and go, ever again: this one is rebuilt a part at a time, of 4,000 entries at a
    million keys. Bytes a key: 27 to 54 (38 at a million, 30 at ten), and up to twice that once keys
    have come and gone (75 at a million), besides the key itself (33 and its length) and the integer
    (28, none up to 256).
    """

    __slots__ = ("distinct", "parts")

    def __init__(self, capacity: int = MOST_PARTS * _KEYS_PER_PART) -> None:
        """Start empty; more keys than the capacity have room, in parts that are larger."""
        num_parts = 1  # a divisor of the values of a byte; few parts of many keys are the fastest
        while num_parts < MOST_PARTS and num_parts * _KEYS_PER_PART < capacity:
            num_parts *= 2
        self.distinct: list[dict[OffloadKey, int]] = [{} for _ in range(num_parts)]
        """The parts."""
        self.parts = self.distinct * (2 * MOST_PARTS // num_parts)
        """The part for each sum of a hash's two ends; always the same list and parts."""

    def __len__(self) -> int:
        return sum(map(len, self.distinct))

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]  # a collection takes any object

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain.from_iterable(self.distinct)

    def get(self, key: OffloadKey) -> int | None:
        """Return a key's integer, None if it is absent.

        Raises:
            StateError: It is too short to be a key. So for all the others.
        """
        try:
            return self.parts[key[0] + key[LAST_HASH_BYTE]].get(key)
        except IndexError:
            raise too_short([key]) from None

    def find(self, keys: Sequence[OffloadKey]) -> list[int | None]:
        """Return each key's integer, None for those that are absent."""
        parts = self.parts
        try:
            return [parts[key[0] + key[LAST_HASH_BYTE]].get(key) for key in keys]
        except IndexError:
            raise too_short(keys) from None

    def update(self, keys: Sequence[OffloadKey], numbers: Iterable[int]) -> None:
        """Give keys, which may be there, their integers."""
        parts = self.parts
        try:
            for key, number in zip(keys, numbers, strict=False):  # the integers may be endless
                parts[key[0] + key[LAST_HASH_BYTE]][key] = number
        except IndexError:
            raise too_short(keys) from None

    def fill(self, keys: Sequence[OffloadKey], numbers: Sequence[int]) -> None:
        """Give many keys their integers: fast where those of one part follow each other."""
        try:
            ends = np.fromiter(map(_ends, keys), dtype=(np.int16, 2), count=len(keys))
        except IndexError:
            raise too_short(keys) from None
        starts = np.flatnonzero(np.diff(ends.sum(axis=1) % MOST_PARTS, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(keys)], strict=False):
            part = self.parts[sum(_ends(keys[start]))]
            part.update(zip(keys[start:stop], numbers[start:stop], strict=True))

    def set(self, key: OffloadKey, number: int) -> None:
        """Give a key, which may be there, an integer."""
        self.parts[key[0] + key[LAST_HASH_BYTE]][key] = number

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Take keys out; absent ones are ignored."""
        parts = self.parts
        for key in keys:
            parts[key[0] + key[LAST_HASH_BYTE]].pop(key, None)

    def discard_present(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Take keys out; return those that were there."""
        parts = self.parts
        return [
            key for key in keys if parts[key[0] + key[LAST_HASH_BYTE]].pop(key, None) is not None
        ]

    def change(self, keys: Iterable[OffloadKey], number: int) -> list[OffloadKey]:
        """Give keys an integer; return those that had another one, or none."""
        parts = self.parts
        changed: list[OffloadKey] = []
        for key in keys:
            part = parts[key[0] + key[LAST_HASH_BYTE]]
            if part.get(key) != number:
                part[key] = number
                changed.append(key)
        return changed

    def take(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Take keys out, which are there; return their integers."""
        parts = self.parts
        return [parts[key[0] + key[LAST_HASH_BYTE]].pop(key) for key in keys]

    def items(self) -> Iterator[tuple[OffloadKey, int]]:
        """Yield every key with its integer."""
        return chain.from_iterable(part.items() for part in self.distinct if part)

    def copy(self) -> KeyMap:
        """Return a map of its own with the same keys and integers."""
        copied = KeyMap(0)
        copied.distinct = [part.copy() for part in self.distinct]
        copied.parts = copied.distinct * (2 * MOST_PARTS // len(copied.distinct))
        return copied

    def merge(self, other: KeyMap) -> None:
        """Take in another's keys, with their integers."""
        for key, number in other.items():
            self.set(key, number)

    def clear(self) -> None:
        """Take every key out."""
        for part in self.distinct:
            part.clear()


def require_keys(keys: Collection[OffloadKey]) -> None:
    """Raise StateError unless each has the length of a key."""
    if keys and min(map(len, keys)) < LEAST_KEY_BYTES:
        raise too_short(keys)
    if keys and max(map(len, keys)) > MAX_KEY_BYTES:
        long = max(keys, key=len)
        raise StateError(
            f"a key of {len(long)} bytes ({long[:8].hex()}...) is too long: {MAX_KEY_BYTES} are "
            "the most, with the group's 4 and a generation's 8; use a shorter block hash"
        )


def too_short(keys: Iterable[OffloadKey]) -> StateError:
    """Return the error about the shortest of the keys."""
    short = min(keys, key=len)
    return StateError(
        f"{short!r} is no key: it needs a block hash and 4 bytes behind it; see make_offload_key"
    )
