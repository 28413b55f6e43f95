"""The contract of a cache policy: which blocks the primary or a bounded secondary tier evicts.

A policy ranks *slots*, integers below its capacity: small integers need no object per block, and
the state of a slot fits into arrays. A policy knows nothing of pins, requests or bytes, and sees
keys only in `make_room` and `admit`. Batches are atomic: `make_room` either evicts all its victims
or changes nothing.

Wrap a policy into a `KeyRanking` for blocks that have keys but no slots.

Every policy honours the hints of requests, as the primary applies them around it:

1. Of blocks to be evicted first, it chooses the victims itself, and calls `discard`.
2. `make_room` is called with an `is_evictable` that rejects retained blocks.
3. If that returns None, the primary ends retentions, calls `released` with their slots, and calls
   `make_room` again. A retention that ends otherwise is followed by `released`, too.

So hints change the order of eviction and never refuse one; among blocks with equal hints, the order
is the policy's. A policy that follows requests can also read `ReqContext.hints`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from kvoffload_async.types import OffloadKey, ReqContext


class CachePolicy(ABC):
    """Ranks the occupied slots of a cache with `capacity_blocks` slots, numbered from 0.

    Guaranteed by the caller: `admit` gets free slots and absent keys, `access` and `discard`
    occupied slots, without duplicates; `make_room` precedes the `admit` of the same keys within one
    operation; `released` names every slot that `is_evictable` rejected and that may now be evicted;
    one thread at a time.

    The implementation is responsible for: atomicity of `make_room`; amortised cost independent of
    the cache's size and of the number of unevictable slots; bounded memory, including keys
    remembered after eviction. For millions of blocks it must not create an object per block that
    the garbage collector traverses (set, `OrderedDict`, own classes): use arrays by slot and the
    structures in `kvoffload_async.tables`; `RankedLists` skips unevictable slots.

    Thread: owner.
    """

    name: ClassVar[str]
    """The value of `eviction_policy` that selects this policy."""

    follows_requests: ClassVar[bool] = False
    """Whether the primary calls `declines` and `request_ended`; a tier never does."""

    def __init__(self, capacity_blocks: int) -> None:
        """Create an empty ranking of at most `capacity_blocks` resident keys."""
        self.capacity_blocks = capacity_blocks

    def declines(
        self,
        request: ReqContext,
        keys: Sequence[OffloadKey],
        missing: Sequence[OffloadKey],
        free: int | None,
        is_evictable: Callable[[int], bool],
    ) -> Collection[OffloadKey]:
        """Return the blocks of a store that are worth less than those it would evict.

        Asked before every store of a request, if the policy follows requests; `make_room` and
        `admit` of the other blocks come next, unless the store is refused for lack of room. By
        default, none is declined.

        Args:
            request: The request; its `key_positions` describe the whole prompt.
            keys: The keys of the offer, from the prompt's head to its tail, resident ones included.
            missing: The absent ones, in the same order.
            free: Number of free slots. None: no block may be declined.
            is_evictable: See `make_room`.
        """
        return ()

    @abstractmethod
    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        """Choose and evict `count` slots so that `incoming` can be admitted.

        Args:
            incoming: The absent keys that will be admitted next, in order, without duplicates; at
                least `count` of them. A policy with a history of evicted keys adapts here.
            count: Number of victims; with 0, only adaptation happens.
            is_evictable: Whether the block in a slot may be evicted now (neither pinned, nor being
                written, nor protected by the operation, nor retained by a hint). Constant during
                the call. A slot once rejected stays unevictable until `released`, so it need not be
                checked again before.

        Returns:
            The victims' slots in eviction order, now free; or None if too few slots are evictable,
            and then nothing has changed.
        """

    def released(self, slots: Sequence[int]) -> None:  # noqa: B027 - optional, see below
        """Mark slots as evictable again. They keep their rank, whether or not they were skipped.

        Optional for a policy that checks every slot in each `make_room`; but that is slow with
        thousands of pinned blocks at the eviction end.
        """

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """Occupy free slots with absent keys, pairwise; the last key is the most recent."""

    @abstractmethod
    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        """Record one request's logical accesses, ordered from the prompt's head to its tail.

        Apply them tail first, so that the head ends most recent: a prefix cache can use only a
        contiguous head, so tails must be evicted before heads.

        Args:
            slots: Slots of the blocks that the request used and that are still resident.
            reused: For each slot, whether the request found the block (a hit, which counts towards
                frequency) or stored it (already counted at admission, so only recency changes).
        """

    def request_ended(
        self,
        request: ReqContext,
        keys: Sequence[OffloadKey],
        slots: Sequence[int | None],
        reused: Sequence[bool],
    ) -> None:
        """Record the blocks that a request has used, at its end; by default, calls `access`.

        Called in place of `access` if the policy follows requests and the request has keys.

        Args:
            request: The request; its `key_positions` describe the whole prompt.
            keys: The blocks that it used, ordered from the prompt's head to its tail.
            slots: Their slots; None for a block that was declined or is no longer resident.
            reused: See `access`.
        """
        present = [
            (slot, again) for slot, again in zip(slots, reused, strict=True) if slot is not None
        ]
        self.access([slot for slot, _ in present], [again for _, again in present])

    @abstractmethod
    def discard(self, slots: Sequence[int]) -> None:
        """Free slots whose write failed or whose block vanished; they leave no history."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, including adaptation."""

    @abstractmethod
    def resident(self) -> Iterable[int]:
        """Return every occupied slot, best victim first. For invariants and inspection."""

    def skipped(self) -> Iterable[int]:
        """Return the slots that `make_room` skips until they are released.

        For invariants and inspection.
        """
        return ()

    def violations(self) -> Iterable[str]:
        """Return descriptions of the policy's violated invariants. For inspection."""
        return ()
