"""Keys that are being deleted at one place: no lookup finds them there, and no copy adds them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

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
        self.sets: list[AbstractSet[OffloadKey]] = []

    def __contains__(self, key: object) -> bool:
        return any(key in keys for keys in self.sets)

    def without(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys that are not barred."""
        return [key for key in keys if key not in self]
