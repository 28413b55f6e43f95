"""What is known of blocks' order, and of the objects that they are in."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final, TypeVar

from kvoffload_async.types import OffloadKey

Fact = TypeVar("Fact")

MOST_REMEMBERED: Final = 1 << 17
"""Bound on each kind of fact, with which all of them take 54 MiB at most for keys of 36 bytes.

The oldest are forgotten first."""


def is_lead(key: OffloadKey, spacing: int) -> bool:
    """Tell whether a pack begins with this block wherever it is packed: one of `spacing` is so.

    Every host cuts at the same blocks then, whatever its jobs are, and a reader knows where to
    look. What leads with a wider spacing does so with every narrower one.

    Args:
        key: Of which block.
        spacing: A power of two.
    """
    return not zlib.crc32(key) & (spacing - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object as it was seen once."""

    first: OffloadKey
    num_blocks: int


class Chains:
    """Which block follows which, as probes have said, and which object each one is in.

    Of an object holds what was seen of it last. What is forgotten costs a block its place in a
    pack, or a miss, and no wrong byte.

    Thread: loop.
    """

    def __init__(self) -> None:
        self._previous: dict[OffloadKey, OffloadKey] = {}
        self._objects: dict[OffloadKey, _Object] = {}
        """By what they are called after."""
        self._places: dict[OffloadKey, _Object] = {}
        """By block; one that is not in `_objects` any more is out of date."""

    def saw_chain(self, chain: Sequence[OffloadKey]) -> None:
        """Note the order of a chain, head to tail."""
        _remember(self._previous, zip(chain[1:], chain, strict=False))

    def follows(self, before: OffloadKey, key: OffloadKey) -> bool:
        """Tell whether a block is known to come right behind another."""
        return self._previous.get(key) == before

    def saw_object(self, keys: Sequence[OffloadKey]) -> None:
        """Note all blocks that an object has, after the first of which it is called."""
        seen = _Object(keys[0], len(keys))
        _remember(self._objects, [(seen.first, seen)])
        _remember(self._places, zip(keys, repeat(seen)))

    def lost_object(self, name: OffloadKey) -> None:
        """Forget an object: it has gone, or is not right."""
        self._objects.pop(name, None)

    def first_of(self, key: OffloadKey) -> OffloadKey | None:
        """Return after which block the object is called that a block is in, if that is known."""
        found = self._object_of(key)
        return None if found is None else found.first

    def name_of(self, key: OffloadKey) -> OffloadKey:
        """Return after which block a block's object is called: itself, unless more is known."""
        found = self._object_of(key)
        return key if found is None else found.first

    def blocks_beside(self, key: OffloadKey) -> int:
        """Return how many blocks the object has that a block is in, itself among them."""
        found = self._object_of(key)
        return 1 if found is None else found.num_blocks

    def length_at(self, chain: Sequence[OffloadKey], index: int) -> int:
        """Return how many blocks of a chain, from this one on, the object called after it has."""
        found = self._objects.get(chain[index])
        end = index + 1
        while found is not None and end < len(chain) and self._places.get(chain[end]) is found:
            end += 1
        return end - index

    def __len__(self) -> int:
        return len(self._previous) + len(self._objects) + len(self._places)

    def _object_of(self, key: OffloadKey) -> _Object | None:
        found = self._places.get(key)
        return found if found is not None and self._objects.get(found.first) is found else None


def _remember(facts: dict[OffloadKey, Fact], new: Iterable[tuple[OffloadKey, Fact]]) -> None:
    for key, fact in new:
        facts.pop(key, None)
        facts[key] = fact
    for key in list(islice(facts, max(0, len(facts) - MOST_REMEMBERED))):
        del facts[key]
