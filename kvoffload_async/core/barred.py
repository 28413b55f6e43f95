"""Keys that are being deleted at one place: no lookup finds them there, and no copy adds them."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_async.types import OffloadKey


class BarredKeys:
    """The keys of the deletions under way at the primary or at one tier.

    A deletion bars all of its keys at once, at no cost per key. Not thread-safe; call only from
    the owner's thread.

    Attributes:
        sets: The keys of each deletion; empty while there is none, which callers test first.
            Read-only.
    """

    __slots__ = ("sets",)

    def __init__(self) -> None:
        """Start without barred keys."""
        self.sets: list[frozenset[OffloadKey]] = []

    def __contains__(self, key: object) -> bool:
        return any(key in keys for keys in self.sets)

    def among(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Return those of the keys that are barred."""
        return set().union(*(each.intersection(keys) for each in self.sets))

    def without(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that are not barred."""
        barred = self.among(keys)
        return [key for key in keys if key not in barred]
