"""Least recently used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.tables.ranked import RankedLists

if TYPE_CHECKING:
    from kvoffload_async.types import OffloadKey


class LruPolicy(CachePolicy):
    """Evicts the least recently used blocks. Memory per slot: 12 bytes.

    Pinning does not change the order: a block that was skipped because it was pinned keeps the rank
    of its last access.

    Thread: owner.
    """

    name = "lru"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._oldest_first = RankedLists(capacity_blocks)

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        return self._oldest_first.take_first(count, is_evictable) if count else []

    def released(self, slots: Sequence[int]) -> None:
        self._oldest_first.release(slots)

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self._oldest_first.append(slots)

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        self._oldest_first.move_to_end(slots[::-1])

    def discard(self, slots: Sequence[int]) -> None:
        self._oldest_first.remove(slots)

    def clear(self) -> None:
        self._oldest_first.clear()

    def resident(self) -> Iterable[int]:
        return tuple(self._oldest_first.walk())

    def skipped(self) -> Iterable[int]:
        return tuple(self._oldest_first.skipped())

    def violations(self) -> Iterable[str]:
        return self._oldest_first.violations()
