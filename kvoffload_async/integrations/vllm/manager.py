"""Scheduler side of the engine under vLLM: vLLM's manager interface over this package's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload import base
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload_async.errors import OffloadError
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.integrations.vllm.engine_metrics import EngineCounts
from kvoffload_async.integrations.vllm.internals import take_positions
from kvoffload_async.integrations.vllm.worker import FAILED
from kvoffload_async.runtime.bridge import KEYS_A_STEP
from kvoffload_async.types import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    SlidingWindow,
    get_offload_group_idx,
)


def hold_removals(
    events: Sequence[OffloadingEvent], is_resident: Callable[[OffloadKey], bool]
) -> tuple[list[OffloadingEvent], list[OffloadingEvent]]:
    """Separate the removals of blocks that are resident again, to be announced with their stores.

    vLLM records a block's metadata when it schedules the block's write. If the removal of the
    block's previous copy is announced after that, vLLM's tracker drops the new metadata, and the
    block would be announced without it. So the removal waits for the event of the new copy.

    Args:
        events: Events of the primary and the tiers, oldest first, preceded by those held back.
        is_resident: Returns whether a block is in the primary, or being written there, or is
            announced there by a later event.

    Returns:
        The events to announce now, and those to pass in again with the next events.
    """
    ready: list[OffloadingEvent] = []
    held: list[OffloadingEvent] = []
    stored: set[OffloadKey] = set()
    for event in reversed(events):
        keys = event.keys
        if event.ownership is None and not event.metadata_only:
            if not event.removed:
                stored.update(keys)
            elif waiting := {key for key in keys if is_resident(key) and key not in stored}:
                held.append(replace(event, keys=waiting))
                keys = [key for key in keys if key not in waiting]
        if keys:
            ready.append(event if keys is event.keys else replace(event, keys=keys))
    return ready[::-1], held[::-1]


_vllms_log = init_logger("vllm.kvoffload_async")  # which vLLM shows
logger = logging.getLogger(__name__)

_VLLM_TELLS_OF_FLUSH = hasattr(base.OffloadingManager, "on_reset_flushed")
"""Whether vLLM reports when transfers from before a reset have ended: 0.33 does, 0.32 not."""


class KVOffloadManager(base.OffloadingManager):
    """Adapts vLLM's manager interface to this package's manager.

    Not thread-safe; call only from the scheduler's thread.

    Attributes:
        manager: The adapted manager, for tests and inspection.
        offers_again: Whether the connector offers again what `take_left_out` returns.
        ended: Ids of the requests whose next store is their last; set by such a connector.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        slot_flags: memoryview,
        close: Callable[[], None],
        window_groups: Collection[int] = (),
        *,
        offers_again: bool = False,
    ) -> None:
        """Create the adapter of `manager`.

        Args:
            manager: The manager; owned by this object.
            slot_flags: See `SharedBuffer`; the workers flag the slots of failed stores.
            close: Closes the manager and the resources below it.
            window_groups: Indices of the KV-cache groups whose requests let blocks go as they run.
            offers_again: Whether the connector offers again what a store has left out, until the
                request ends.
        """
        self.manager = manager
        self._slot_flags = slot_flags
        self._close = close
        self._is_closed = False
        self._window_groups = frozenset(window_groups)
        self.offers_again = offers_again
        self.ended: Collection[str] = ()
        self._left_out: dict[str, Sequence[OffloadKey]] = {}
        self._running: dict[str, ReqContext] = {}
        self._stale_until: dict[str, int] = {}
        """Prompt positions at the last reset, of the requests that were running then."""
        self._promoted: dict[str, set[OffloadKey]] = {}
        self._promotion_source = _source_of(tier.medium for tier in manager.planner.tiers)
        self._jobs_in_flight = 0
        self._awaits_flush = False
        self._counts = EngineCounts(manager)
        self._retained_removals: list[OffloadingEvent] = []

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Begin a request."""
        request = self._running[req_context.req_id] = convert.request_of(req_context)
        context = self.manager.on_new_request(request)
        self._counts.lookups.began(req_context.req_id)
        return convert.offloading_context(context)

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        req_context: base.ReqContext,
        windows: Sequence[SlidingWindow] = (),
    ) -> None:
        """Have a queued request's blocks promoted; see `OffloadingManager.prefetch`."""
        self.manager.prefetch(keys, convert.request_of(req_context), windows)

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """End a request; its transfers may still be running."""
        for of_request in (self._promoted, self._running, self._stale_until):
            of_request.pop(req_context.req_id, None)
        self._counts.lookups.scheduled((req_context.req_id,))
        self.manager.on_request_finished(convert.request_of(req_context))

    # -- loads ----------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        """Look a block up; a hit in a secondary tier queues its promotion."""
        request = convert.request_of(req_context)
        answer = self.manager.lookup(key, request)
        self._counts.lookups.looked_up((key,), request, (answer,))
        return convert.lookup_result(answer)

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: base.ReqContext
    ) -> Sequence[LookupResult]:
        """Look blocks up; return this package's answers, in the order of `keys`."""
        request = convert.request_of(req_context)
        answers = self.manager.lookup_many(keys, request)
        self._counts.lookups.looked_up(keys, request, answers)
        return answers

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: base.ReqContext
    ) -> tuple[int, bool]:
        """Look a prompt's blocks up; see `OffloadingManager.lookup_prefix`."""
        request = convert.request_of(req_context)
        found, is_deferred = self.manager.lookup_prefix(keys, request)
        self._counts.lookups.looked_up_prefix(keys, request, found, is_deferred=is_deferred)
        return found, is_deferred

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        """Pin blocks that were hits in this step; return their slots, in the order of `keys`."""
        request = convert.request_of(req_context)
        keys = self._positioned(keys, req_context, request)
        state = self.manager.planner.requests.get(request)
        ticket = {} if state is None else state.ticket
        promoted = {key for key in keys if ticket.get(key)}
        spec = self.manager.prepare_load(keys, request)
        self._promoted[request.req_id] = promoted
        self._jobs_in_flight += 1
        return convert.load_store_spec(spec)

    def complete_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Unpin the blocks of one `prepare_load`."""
        self._job_ended()
        self.manager.complete_load(list(keys), convert.request_of(req_context))

    def get_load_source(self, key: OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        """Return the kind of tier in which a request's first lookup found a loaded block."""
        if key in self._promoted.get(req_context.req_id, ()):
            return self._promotion_source
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Record a use of blocks, first block first."""
        self.manager.touch(list(keys), convert.request_of(req_context))

    # -- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Reserve slots for the blocks of `keys` not in the primary; None if there is no room.

        vLLM's scheduler offers a refused store again in the next step, but not the rest of one of
        which a prefix was granted. So a prefix is granted only to a connector that does. At the end
        of a request, what does not fit is lost.

        After a reset, vLLM's scheduler offers the blocks of running requests again, also those
        that a sliding window has let go of, and that belong to other requests since. None of the
        window's keys from before the reset is stored.
        """
        request = convert.request_of(req_context)
        ordered = self._positioned(keys, req_context, request)
        until = self._stale_until.get(request.req_id)
        if until is not None:
            ordered = [
                key
                for key in ordered
                if get_offload_group_idx(key) not in self._window_groups
                or request.key_positions.get(key, 0) > until
            ]
        is_last = request.req_id in self.ended
        output = self.manager.prepare_store(ordered, request, is_last=is_last)
        if output is None:
            if is_last:
                found = self.manager.planner.primary.lookup_many(ordered)
                self._counts.lost_tails += found.count(LookupResult.MISS)
            return None
        self._counts.allocations.append(len(output.keys_to_store))
        if not self.offers_again or is_last:
            self._counts.lost_tails += len(output.keys_left_out)
        elif output.keys_left_out:
            self._left_out[request.req_id] = output.keys_left_out
        if output.keys_to_store:
            self._jobs_in_flight += 1
            for slot in output.store_spec.block_ids.tolist():
                self._slot_flags[slot] = 0
        return convert.prepare_store_output(output)

    def take_left_out(self) -> Mapping[str, Sequence[OffloadKey]]:
        """Return the keys that stores have left out since the last call, by request."""
        left_out, self._left_out = self._left_out, {}
        return left_out

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """Make stored blocks readable, except those whose copy failed in a worker."""
        if self._is_closed:
            return
        self._job_ended()
        request = convert.request_of(req_context)
        positions = request.key_positions
        ordered = sorted(keys, key=lambda key: positions.get(key, 0))
        flags = self._flags(ordered)
        failed = set(ordered) if not success else flags.keys()
        if failed:
            self._counts.failed_stores += len(failed)
            if not success or FAILED in flags.values():
                logger.error(
                    "request %s: %d of %d blocks could not be stored",
                    request.req_id,
                    len(failed),
                    len(ordered),
                )
            self.manager.complete_store(list(failed), request, success=False)
        self.manager.complete_store([key for key in ordered if key not in failed], request)

    # -- steps ----------------------------------------------------------------------------------

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """End a scheduler step."""
        self.manager.on_schedule_end(convert.schedule_end(context))
        self._counts.lookups.scheduled(context.new_req_ids)

    def has_pending_work(self) -> bool:
        """Return whether steps are needed although no request is scheduled."""
        return self.manager.has_pending_work()

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Remove and return pending events of the primary and all tiers, a batch of each."""
        events = [*self._retained_removals, *self.manager.take_events(KEYS_A_STEP)]
        ready, self._retained_removals = hold_removals(events, self._is_resident)
        return convert.events(ready)

    # -- blocking calls --------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the primary; the tiers keep their blocks.

        Promotions are paused until no worker can still access a slot from before the reset. vLLM
        0.32 does not report that. But its workers finish earlier jobs before they start new ones,
        so the end of any later job implies it.
        """
        self.manager.reset_cache()
        names = [tier.label for tier in self.manager.planner.tiers]
        _vllms_log.info(
            "kvoffload_async: the primary is empty; tiers that keep their blocks: %s",
            ", ".join(names) or "none",
        )
        self.manager.announce_anew()  # vLLM tells consumers of events that everything is gone
        self._promoted.clear()
        if self._window_groups:
            for req_id, request in self._running.items():
                self._stale_until[req_id] = max(request.key_positions.values(), default=0)
        if _VLLM_TELLS_OF_FLUSH:
            return
        self._awaits_flush = self._awaits_flush or self._jobs_in_flight > 0
        self._jobs_in_flight = 0
        if not self._awaits_flush:
            self.manager.on_reset_flushed()

    def on_reset_flushed(self) -> None:
        """Resume promotions, since all copies from before the reset have ended."""
        self.manager.on_reset_flushed()

    def shutdown(self) -> None:
        """Close the tiers and release the memory; idempotent. Errors are logged."""
        if self._is_closed:
            return
        self._is_closed = True
        self._slot_flags = memoryview(b"")
        try:
            self._close()
        except OffloadError:
            logger.exception("the offload engine did not shut down cleanly")

    # -- monitoring ------------------------------------------------------------------------

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return vLLM's stats: the increments since the last call."""
        return self._counts.take_stats()

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """Return the constant labels that describe the engine, one mapping per engine."""
        return self._counts.config_info()

    # -- inside ---------------------------------------------------------------------------------

    @staticmethod
    def _positioned(
        keys: Collection[OffloadKey], context: base.ReqContext, request: ReqContext
    ) -> list[OffloadKey]:
        """Return the keys as a list, and copy their prompt positions, which determine eviction."""
        ordered = list(keys)
        take_positions(ordered, context, request)
        return ordered

    def _flags(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return the non-zero flags that workers have set for slots being written, by key."""
        primary = self.manager.planner.primary
        written = filter(self._is_being_written, keys)
        flags = {key: self._slot_flags[primary.slot_of(key)] for key in written}
        return {key: flag for key, flag in flags.items() if flag}

    def _is_resident(self, key: OffloadKey) -> bool:
        primary = self.manager.planner.primary
        return primary.lookup(key) is not LookupResult.MISS or primary.event_log.will_announce(key)

    def _is_being_written(self, key: OffloadKey) -> bool:
        return self.manager.planner.primary.lookup(key) is LookupResult.HIT_PENDING

    def _job_ended(self) -> None:
        self._jobs_in_flight -= 1
        if self._awaits_flush:
            self._awaits_flush = False
            self.manager.on_reset_flushed()


def _source_of(media: Iterable[Medium]) -> CacheHitSource:
    """Return vLLM's hit source of blocks promoted from tiers with these media."""
    kinds = set(media)
    if kinds == {Medium.STORAGE}:
        return CacheHitSource.DISK
    return CacheHitSource.HOST if kinds <= {Medium.CPU} else CacheHitSource.EXTERNAL_UNSPECIFIED
