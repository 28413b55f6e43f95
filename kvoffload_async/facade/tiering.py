"""The primary tier with secondary tiers behind it: the manager that a scheduler drives."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from kvoffload_async.facade.driver import PlannerDriver
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.types import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    SlidingWindow,
    as_block_ids,
    counted,
)

logger = logging.getLogger(__name__)


class TieringOffloadingManager(PlannerDriver, OffloadingManager):
    """Cascades stored blocks to every secondary tier and promotes them back on a lookup.

    Not thread-safe, except `stats`; call only from the owner's (the scheduler's) thread.
    """

    @property
    def room_made(self) -> int:
        return self.planner.primary.room_made

    # -- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; its policy is REQUEST_LEVEL if any tier wants whole requests."""
        wants_all = self.begin_request(req_context)
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request; tiers are informed once no further job can be submitted for it."""
        self.planner.on_request_finished(req_context)

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        windows: Sequence[SlidingWindow] = (),
    ) -> None:
        if len(self.generation.current(keys)) == len(keys):
            self.planner.prefetch(keys, req_context, windows)

    # -- loads ----------------------------------------------------------------------------------

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        """Look blocks up as in the base class; a hit in a secondary tier queues a promotion."""
        self.begin_step()
        current = self.generation.current(keys)
        if len(current) == len(keys):
            return self.planner.lookup_many(keys, req_context, stop_at_miss=stop_at_miss)
        answers: list[LookupResult] = []
        for key in keys:
            answers.append(self.lookup(key, req_context))
            if stop_at_miss and answers[-1] is LookupResult.MISS:
                break
        return answers

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> tuple[int, bool]:
        """Look a prefix up as in the base class, at no cost per block while the request waits."""
        self.begin_step()
        if len(self.generation.current(keys)) < len(keys):
            return super().lookup_prefix(keys, req_context)
        return self.planner.lookup_prefix(keys, req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._polled_this_step:
            self.begin_step()
        if self.generation.tag and not self.generation.has(key):
            return LookupResult.MISS
        return self.planner.lookup(key, req_context)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        self.generation.require(keys)
        slots = self.planner.prepare_load(keys, req_context)
        return CPULoadStoreSpec(as_block_ids(slots), self.planner.primary.generation)

    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, generation: int | None = None
    ) -> None:
        self.planner.complete_load(keys, req_context, generation)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.planner.touch(keys, req_context)

    # -- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        if not (self._polled_this_step or self._polled_for_stores):
            self._poll_timed()
            self._polled_for_stores = True
        primary = self.planner.primary
        drops_pending = primary.drops_pending
        primary.drops_pending = drops_pending or (is_last and self._last_drops_pending)
        try:
            return self.planner.prepare_store(self.generation.current(keys), req_context)
        finally:
            primary.drops_pending = drops_pending

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        if self._closed:
            return  # a copy has ended after the shutdown
        self.planner.complete_store(keys, req_context, success=success, generation=generation)

    # -- reset ----------------------------------------------------------------------------------

    def reset_cache(self, tiers: Collection[str] = ()) -> None:
        """Empty the primary, between steps; the tiers keep their blocks unless they are named.

        Waits for running jobs, at most `drain_timeout_s` per tier. Jobs that still run then fail,
        and their slots stay reserved until the copies end. No promotion starts before
        `on_reset_flushed`. The log says what the reset has reached.

        Args:
            tiers: Names of the tiers to clear too, in the following steps; see
                `CacheManager.clear`.

        Raises:
            StateError: A name is unknown, or a tier cannot be cleared; nothing was reset.
        """
        self._ensure_open()
        if tiers:
            self.cache.clear(tiers)
        for link in self._tiers.links.values():
            link.drain(self._drain_timeout_s)
        counts = self.planner.primary.counts
        num_blocks = counts["idle"] + counts["pinned"]
        self._reset()
        names = [tier.label for tier in self.planner.tiers]
        logger.info(
            "reset: the primary is empty, which had %s; tiers that are cleared: %s; tiers that "
            "keep their blocks: %s",
            counted(num_blocks, "block"),
            ", ".join(name for name in names if name in tiers) or "none",
            ", ".join(name for name in names if name not in tiers) or "none",
        )

    def on_reset_flushed(self) -> None:
        self.planner.reset_flushed()
