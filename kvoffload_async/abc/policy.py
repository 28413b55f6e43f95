"""The contract of a cache policy: which blocks leave the primary tier, or a bounded secondary.

A policy ranks *slots*, the numbers below its capacity: small integers cost a million blocks no
object each, and what is known of a slot goes into an array. It knows no pins, requests or bytes,
and of keys only what it is told when one is admitted. Everything about a batch is atomic:
`make_room` either takes its victims or changes nothing at all.

Who has keys and no slots wraps a policy into a `KeyRanking`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from kvoffload_async.types import OffloadKey


class CachePolicy(ABC):
    """Ranks the occupied slots of a cache with `capacity_blocks` of them, numbered from 0.

    Guaranteed by the caller: `admit` names free slots and absent keys, `access` and `discard`
    occupied slots, none of them twice; `make_room` precedes the `admit` of the same keys within one
    operation; `released` names every slot that `make_room` was refused and that may go again; one
    thread at a time.

    The implementation is responsible for: atomicity of `make_room`; amortised cost that grows
    neither with the cache nor with what must stay in it; bounded memory (what it keeps of keys that
    left included). At a million blocks, nothing a block that the garbage collector walks: no set,
    `OrderedDict` or object of its own kind, but arrays by slot and the structures in
    `kvoffload_async.tables`, of which `RankedLists` skips what must stay.

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
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        """Choose and give up `count` slots so that `incoming` can be admitted.

        Args:
            incoming: The absent keys that will be admitted next, in order, without duplicates;
                at least `count` of them. A policy that remembers who left adapts to them here.
            count: How many victims; may be 0, and then only adaptation happens.
            is_evictable: Whether the block in a slot may go now (neither pinned, nor being
                written, nor protected by the operation). Constant during the call; and what must
                stay now must stay until it is released, so there is no need to ask again before.

        Returns:
            The victims' slots in the order of eviction, free now, or None if there are not that
            many evictable ones: then nothing has changed.
        """

    def released(self, slots: Sequence[int]) -> None:  # noqa: B027 - see the second sentence
        """Learn that blocks may go again; they keep their rank, and may have been skipped or not.

        A policy that asks about every slot in every `make_room` can do without; but thousands of
        pinned blocks at the victims' end make that slow.
        """

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Occupy free slots with absent keys, one each; the last one is the most recent."""

    @abstractmethod
    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        """Commit one request's logical accesses, ordered from the prompt's head to its tail.

        To be applied tail first, so that the head ends most recent: a prefix cache can use only a
        contiguous head, so tails must go before heads.

        Args:
            slots: Where the blocks lie that the request used and that are still resident.
            reused: Parallel: whether the request found the block (a hit, which counts towards
                frequency) or stored it (its admission counted already, so it only moves).
        """

    @abstractmethod
    def discard(self, slots: Sequence[int]) -> None:
        """Free slots whose write failed, or whose block vanished; they leave no trace."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, adaptation included."""

    @abstractmethod
    def resident(self) -> Iterable[int]:
        """Return every occupied slot, the best victim first. For invariants and inspection."""

    def skipped(self) -> Iterable[int]:
        """Return the slots about which `make_room` does not ask until they are released.

        For invariants and inspection.
        """
        return ()

    def violations(self) -> Iterable[str]:
        """Return which invariants of the policy's own do not hold, in words. For inspection."""
        return ()
