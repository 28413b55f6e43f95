"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvoffload_async.abc.policy import CachePolicy

if TYPE_CHECKING:
    from kvoffload_async.types import OffloadKey


class LruPolicy(CachePolicy):
    """Evicts the keys whose last access is the longest ago.

    Order lives apart from pinning: a victim search skips what may not go and moves nothing, so a
    key that is unpinned late still has the rank of its last access.

    Thread: owner.
    """

    name = "lru"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        # Linked, not a plain dict: a dict scanned from its front walks over every key that ever
        # left from there.
        self._oldest_first: OrderedDict[OffloadKey, None] = OrderedDict()

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[OffloadKey], bool],
    ) -> list[OffloadKey] | None:
        victims = list(islice(filter(is_evictable, self._oldest_first), count))
        if len(victims) < count:
            return None
        self.discard(victims)
        return victims

    def admit(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._oldest_first[key] = None

    def access(
        self,
        keys: Sequence[OffloadKey],
        reused: Callable[[OffloadKey], bool],
    ) -> None:
        present, move_to_end = self._oldest_first.__contains__, self._oldest_first.move_to_end
        for key in filter(present, reversed(keys)):
            move_to_end(key)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._oldest_first.pop(key, None)

    def clear(self) -> None:
        self._oldest_first.clear()

    def resident(self) -> Iterable[OffloadKey]:
        return tuple(self._oldest_first)
