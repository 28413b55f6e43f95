"""What is known of blocks' order, and of the objects that they are in."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Final

from kvoffload_async.types import OffloadKey

MOST_REMEMBERED: Final = 1 << 17
"""Bound on each kind of fact: the oldest are forgotten first."""


def is_lead(key: OffloadKey, spacing: int) -> bool:
    """Tell whether a pack begins with this block wherever it is packed: one of `spacing` is so.

    Every host cuts at the same blocks then, whatever its jobs are, and a reader knows where to
    look. What leads with a wider spacing does so with every narrower one.

    Args:
        key: Of which block.
        spacing: A power of two.
    """
    return not zlib.crc32(key) & (spacing - 1)


class Chains:
    """Which block follows which, as probes have said, and the first block of each one's object.

    What is forgotten costs a block its place in a pack, or a miss, and no wrong byte.

    Thread: loop.
    """

    def __init__(self) -> None:
        self._previous: dict[OffloadKey, OffloadKey] = {}
        self._firsts: dict[OffloadKey, OffloadKey] = {}

    def saw_chain(self, chain: Sequence[OffloadKey]) -> None:
        """Note the order of a chain, head to tail."""
        _remember(self._previous, ((key, before) for before, key in pairwise(chain)))

    def follows(self, before: OffloadKey, key: OffloadKey) -> bool:
        """Tell whether a block is known to come right behind another."""
        return self._previous.get(key) == before

    def saw_object(self, keys: Sequence[OffloadKey]) -> None:
        """Note which blocks an object has; it is called after the first of them, if any."""
        _remember(self._firsts, ((key, keys[0]) for key in keys))

    def first_of(self, key: OffloadKey) -> OffloadKey | None:
        """Return after which block the object is called that a block is in, if that is known."""
        return self._firsts.get(key)

    def name_of(self, key: OffloadKey) -> OffloadKey:
        """Return after which block a block's object is called: itself, unless more is known."""
        return self._firsts.get(key, key)

    def lost_object(self, name: OffloadKey, keys: Iterable[OffloadKey]) -> None:
        """Forget that some blocks are in an object."""
        for key in keys:
            if self._firsts.get(key) == name:
                del self._firsts[key]

    def length_at(self, chain: Sequence[OffloadKey], index: int) -> int:
        """Return how many blocks of a chain, from this one on, the object called after it has."""
        first = chain[index]
        end = index + 1
        while end < len(chain) and self._firsts.get(chain[end]) == first:
            end += 1
        return end - index

    def __len__(self) -> int:
        return len(self._previous) + len(self._firsts)


def _remember(
    facts: dict[OffloadKey, OffloadKey], new: Iterable[tuple[OffloadKey, OffloadKey]]
) -> None:
    for key, fact in new:
        facts.pop(key, None)
        facts[key] = fact
    for key in list(islice(facts, max(0, len(facts) - MOST_REMEMBERED))):
        del facts[key]
