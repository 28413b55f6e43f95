"""The contract between a scheduler and whatever manages its offloaded blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from kvoffload_async.facade.generation import Generation
from kvoffload_async.types import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)


class OffloadingManager(ABC):
    """Accounts for offloaded blocks on behalf of a scheduler.

    No method blocks but `reset_cache` and `shutdown`. Misuse raises `StateError` at the call; a
    failed transfer never raises.

    Thread: owner, the scheduler's, for all of it.

    Attributes:
        generation: Makes the keys of blocks; one that is read at a request's begin makes all its.
    """

    generation = Generation()

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; once, before anything else is said of it."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return what is known of a block; pins nothing, may queue its promotion."""

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
        """Undo one `prepare_load`, whether or not the copy succeeded.

        Args:
            keys: The blocks.
            req_context: The request that prepared it.
            generation: That of the grant: nothing happens if a reset came in between. None: it did
                not, or the request has prepared no load of these blocks since.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserve slots for the missing ones of `keys`; None if there is no room.

        With None nothing is stored and nothing evicted. If there is room for a head only, that may
        be granted: what `keys_left_out` names is to be offered again.

        Args:
            keys: Grouped by KV-cache group, head to tail in each; `ReqContext.key_positions` tells
                where those of several groups lie.
            req_context: The request, which is computed now: it waits for no loads any more.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        """Make stored blocks readable or, after a failed copy, forget them.

        Keys that are ready already or unknown are ignored. For the generation see
        `complete_load`.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Note a use, head to tail: recency only."""

    @abstractmethod
    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request; once. Its transfers may still end afterwards."""

    @abstractmethod
    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a scheduler step: the last call of a step, which hands over deferred work."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Detach and return what appeared and disappeared since the last call.

        Purely an observation: never calling it changes nothing else.
        """

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Tell whether steps are needed although no request is scheduled."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Empty the primary, between steps; persistent tiers keep their blocks. May wait."""

    @abstractmethod
    def on_reset_flushed(self) -> None:
        """Learn that no copy from before the reset touches the primary any more."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End everything; idempotent. Waits at most about `timeout` seconds a tier."""
