"""The interface between a scheduler and a manager of offloaded blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from kvoffload_async.facade.generation import Generation
from kvoffload_async.facade.tenants import Tenants
from kvoffload_async.types import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SlidingWindow,
)


class OffloadingManager(ABC):
    """Tracks offloaded blocks on behalf of a scheduler.

    Only `reset_cache` and `shutdown` block. Misuse raises `StateError` at the call; a failed
    transfer never raises.

    Not thread-safe; call only from the owner's (the scheduler's) thread.

    Attributes:
        generation: Creates the blocks' keys. Read it once when a request begins, and use it for
            all keys of that request.
        tenants: The tenants, which tag the keys that `generation` creates; None: the option
            `tenants` is not given.
    """

    generation = Generation()
    tenants: Tenants | None = None

    @property
    @abstractmethod
    def room_made(self) -> int:
        """Number of times that a slot became free, evictable, or no longer withheld from stores.

        After a `prepare_store` that left blocks out, at most as many of them can be placed as this
        has grown since.
        """

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; call exactly once, before any other call for the request."""

    def prefetch(  # noqa: B027
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        windows: Sequence[SlidingWindow] = (),
    ) -> None:
        """Have a queued request's blocks promoted before its first lookup, while there is room.

        A hint: a manager without secondary tiers ignores it, and it has no effect on a request that
        has been looked up.

        Args:
            keys: The keys of its prompt, first block first.
            req_context: The request.
            windows: The groups with sliding-window attention, if `keys` are those of full
                attention. Their blocks have as many tokens.
        """

    @abstractmethod
    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool = False
    ) -> Sequence[LookupResult]:
        """Look blocks up; return the answers in key order. Pins nothing; may queue promotions.

        Args:
            keys: The keys. If there is room for some promotions only, the first ones get it.
            req_context: The request.
            stop_at_miss: Whether the answers end with the first MISS, as for a prefix: the keys
                behind it are not looked up.
        """

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the answer of `lookup_many` for one key."""
        return self.lookup_many((key,), req_context)[0]

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> tuple[int, bool]:
        """Look up a prompt's blocks, in prompt order, up to the first MISS.

        Returns:
            How many blocks precede it, and whether to ask again in the next step, because some of
            them are on their way or undecided. If not, all of them are HIT.
        """
        # Most prompts are new: their first block alone decides.
        answers = [*self.lookup_many(keys[:1], req_context, stop_at_miss=True)]
        if answers and answers[0] is not LookupResult.MISS:
            answers += self.lookup_many(keys[1:], req_context, stop_at_miss=True)
        length = len(answers) - answers.count(LookupResult.MISS)
        return length, answers.count(LookupResult.HIT) < length

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks that were HIT earlier in this step; return their slots, in key order."""

    @abstractmethod
    def complete_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        generation: int | None = None,
    ) -> None:
        """Release the pins of one `prepare_load`, whether or not the copy succeeded.

        Args:
            keys: The blocks.
            req_context: The request that called `prepare_load`.
            generation: `generation` of the spec returned by `prepare_load`; the call is ignored if
                a reset came in between. None: there was no reset, or the request has prepared no
                load of these blocks since.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the blocks that are not in the primary; None if there is no room.

        With None, nothing is stored and nothing evicted. If only a prefix fits, it may be granted
        alone; offer the keys in `keys_left_out` again when `room_made` has grown. Never waits.

        Args:
            keys: Grouped by KV-cache group, in prompt order within each;
                `ReqContext.key_positions` relates the positions of the groups.
            req_context: The request. It is being computed, so it no longer waits for loads.
            is_last: Whether the request offers nothing again, as it has ended. Then blocks that
                tiers have still to store may be evicted for it; see `OffloadConfig.write_back`.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        """Make stored blocks readable or, after a failed copy, drop them.

        Ready and unknown keys are ignored. For `generation` see `complete_load`.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of blocks, given in prompt order; affects recency only."""

    @abstractmethod
    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request; call exactly once. Its transfers may end later."""

    @abstractmethod
    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a scheduler step; must be the step's last call. Submits deferred work."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Remove and return the events of stored and removed blocks since the last call.

        Calling it is optional and has no effect on caching.
        """

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Return whether the scheduler must run steps even if it has no request to schedule."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Empty the primary, between steps; persistent tiers keep their blocks. May block."""

    @abstractmethod
    def on_reset_flushed(self) -> None:
        """Report that all copies that started before the reset have ended."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the manager down; idempotent. Blocks at most about `timeout` seconds per tier."""
