"""The contract of a cache policy: which blocks leave the primary tier, or a bounded secondary.

A policy ranks keys; it knows no slots, pins, requests or bytes. Everything about a batch is
atomic: `make_room` either takes its victims or changes nothing at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from kvoffload_async.types import OffloadKey


class CachePolicy(ABC):
    """Ranks the resident keys of a cache with `capacity_blocks` places.

    Guaranteed by the caller: keys are admitted at most once while resident; `make_room` precedes
    the `admit` of the same keys within one operation; one thread at a time.

    The implementation is responsible for: atomicity of `make_room`; amortised cost that does not
    grow with the cache; bounded memory (ghosts included).

    Thread: owner.
    """

    name: ClassVar[str]
    """The value of `eviction_policy` that selects this policy."""

    def __init__(self, capacity_blocks: int) -> None:
        """Rank at most `capacity_blocks` resident keys."""
        self.capacity_blocks = capacity_blocks

    @abstractmethod
    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[OffloadKey], bool],
    ) -> list[OffloadKey] | None:
        """Choose and remove `count` resident keys so that `incoming` can be admitted.

        Args:
            incoming: The absent keys that will be admitted next, in order, without duplicates;
                at least `count` of them. A policy with ghosts adapts to them here.
            count: How many victims; may be 0, and then only adaptation happens.
            is_evictable: Whether a resident key may go now (neither pinned, nor being written,
                nor protected by the operation). Constant during the call.

        Returns:
            The victims in the order of eviction, no longer resident, or None if there are not
            that many evictable keys: then nothing has changed.
        """

    @abstractmethod
    def admit(self, keys: Iterable[OffloadKey]) -> None:
        """Make absent keys resident, the last one most recent."""

    @abstractmethod
    def access(self, keys: Sequence[OffloadKey], reused: Callable[[OffloadKey], bool]) -> None:
        """Commit one request's logical accesses, ordered from the prompt's head to its tail.

        Applied tail first, so that the head ends most recent: a prefix cache can use only a
        contiguous head, so tails must go before heads. Keys that are not resident are ignored.

        Args:
            keys: Without duplicates.
            reused: Whether the request found the key (a hit, which counts towards frequency) or
                stored it (its admission counted already, so it only moves).
        """

    @abstractmethod
    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Forget resident keys whose write failed, or which vanished; they leave no ghost."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, ghosts and adaptation included."""

    @abstractmethod
    def resident(self) -> Iterable[OffloadKey]:
        """Return every resident key, the best victim first. For laws and inspection."""

    def violations(self) -> Iterable[str]:
        """Return which invariants of the policy's own do not hold, in words. For laws."""
        return ()
