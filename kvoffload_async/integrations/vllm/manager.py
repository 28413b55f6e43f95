"""The scheduler's side of the whole engine: vLLM's manager contract over this package's manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vllm.v1.kv_offload import base
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload_async.core.primary import BlockState
from kvoffload_async.errors import OffloadError
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.integrations.vllm import convert, metrics
from kvoffload_async.integrations.vllm.engine_metrics import EngineCounts
from kvoffload_async.integrations.vllm.positions import take_positions
from kvoffload_async.integrations.vllm.worker import FAILED
from kvoffload_async.types import Medium, OffloadingEvent, OffloadKey, ReqContext


def hold_removals(
    events: Sequence[OffloadingEvent], is_rewritten: Callable[[OffloadKey], bool]
) -> tuple[list[OffloadingEvent], list[OffloadingEvent]]:
    """Separate the primary's removals that must wait.

    vLLM records a block's metadata when the block is to be written. Told only then of an eviction
    before that, its tracker drops the new metadata, and the block would be announced without any.
    So the removal is announced together with the end of the write.

    Args:
        events: Events of the primary and the tiers, oldest first; those that waited come first.
        is_rewritten: Whether the primary is writing a block just now.

    Returns:
        The events to announce, and those to be given again with the next ones.
    """
    ready: list[OffloadingEvent] = []
    held: dict[OffloadKey, None] = {}
    for event in reversed(events):
        keys = event.keys
        if event.removed and event.ownership is None and not event.metadata_only:
            waiting = {key for key in keys if is_rewritten(key) and key not in held}
            keys = tuple(key for key in keys if key not in waiting) if waiting else keys
            held.update(dict.fromkeys(waiting))
        if keys:
            ready.append(event if keys is event.keys else replace(event, keys=keys))
    ready.reverse()
    waiting_event = OffloadingEvent(tuple(held), Medium.CPU, removed=True)
    return ready, [waiting_event] if held else []


logger = logging.getLogger(__name__)

_VLLM_TELLS_OF_FLUSH = hasattr(base.OffloadingManager, "on_reset_flushed")
"""Whether vLLM says when what was in flight at a reset has ended: 0.33 does, 0.32 does not."""


class KVOffloadManager(base.OffloadingManager):
    """Translates between vLLM's scheduler and this package's manager.

    Thread: the scheduler's.

    Attributes:
        manager: What does the work. For tests and inspection.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        slot_flags: memoryview,
        close: Callable[[], None],
    ) -> None:
        """Start empty.

        Args:
            manager: What does the work; owned from now on.
            slot_flags: See `SharedBuffer`; the workers flag slots that a store has failed to fill.
            close: Closes the manager and what it stands on.
        """
        self.manager = manager
        self._slot_flags = slot_flags
        self._close = close
        self._is_closed = False
        self._promoted: dict[str, set[OffloadKey]] = {}
        self._promotion_source = _source_of(tier.medium for tier in manager.planner.tiers)
        self._jobs_in_flight = 0
        self._awaits_flush = False
        self._counts = EngineCounts(manager)
        self._retained_removals: list[OffloadingEvent] = []

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Begin a request."""
        context = self.manager.on_new_request(convert.request_of(req_context))
        self._counts.lookups.began(req_context.req_id)
        return convert.offloading_context(context)

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """End a request; its transfers may still end afterwards."""
        self._promoted.pop(req_context.req_id, None)
        self._counts.lookups.scheduled((req_context.req_id,))
        self.manager.on_request_finished(convert.request_of(req_context))

    # -- loads ----------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        """Return what is known of a block; a hit in a secondary tier queues its promotion."""
        answer = self.manager.lookup(key, convert.request_of(req_context))
        self._counts.lookups.looked_up(key, req_context.req_id, answer)
        return convert.lookup_result(answer)

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        """Pin blocks that were hits in this step; return their slots, in key order."""
        request = convert.request_of(req_context)
        keys = self._positioned(keys, req_context, request)
        state = self.manager.planner.requests.get(request)
        retained = {} if state is None else state.retained
        promoted = {key for key in keys if retained.get(key)}
        spec = self.manager.prepare_load(keys, request)
        self._promoted[request.req_id] = promoted
        self._jobs_in_flight += 1
        return convert.load_store_spec(spec)

    def complete_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Undo one `prepare_load`."""
        self._job_ended()
        self.manager.complete_load(list(keys), convert.request_of(req_context))

    def get_load_source(self, key: OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        """Return where a block that was loaded lay when its request first asked for it."""
        if key in self._promoted.get(req_context.req_id, ()):
            return self._promotion_source
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Note a use of blocks, head to tail."""
        self.manager.touch(list(keys), convert.request_of(req_context))

    # -- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Reserve slots for the missing ones of `keys`; None if there is no room.

        What a head was granted beside is lost: vLLM's scheduler moves on past all of it.
        """
        request = convert.request_of(req_context)
        output = self.manager.prepare_store(self._positioned(keys, req_context, request), request)
        if output is None:
            return None
        self._counts.allocations.append(len(output.keys_to_store))
        self._counts.lost_tails += len(output.keys_left_out)
        if output.keys_to_store:
            self._jobs_in_flight += 1
            for slot in output.store_spec.block_ids.tolist():
                self._slot_flags[slot] = 0
        return convert.prepare_store_output(output)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """Make stored blocks readable, but for those whose copy has failed in some worker."""
        if self._is_closed:
            return
        self._job_ended()
        request = convert.request_of(req_context)
        positions = request.key_positions
        ordered = sorted(keys, key=lambda key: positions.get(key, 0))
        failed = set(ordered) if not success else self._failed(ordered)
        if failed:
            self._counts.failed_stores += len(failed)
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
        """End a step."""
        self.manager.on_schedule_end(convert.schedule_end(context))
        self._counts.lookups.scheduled(context.new_req_ids)

    def has_pending_work(self) -> bool:
        """Tell whether steps are needed although no request is scheduled."""
        return self.manager.has_pending_work()

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Detach and return the events of the primary and of every tier."""
        events = [*self._retained_removals, *self.manager.take_events()]
        ready, self._retained_removals = hold_removals(events, self._is_being_written)
        return convert.events(ready)

    # -- the calls that wait --------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Empty the primary; the tiers keep their blocks.

        Promotions are held back until no worker can still touch a slot from before. vLLM 0.32 does
        not say when that is. Its workers end what was in flight before they begin anything new, so
        the end of any later job tells as much.
        """
        self.manager.reset_cache()
        self.manager.announce_anew()  # vLLM tells consumers of events that everything is gone
        self._promoted.clear()
        if _VLLM_TELLS_OF_FLUSH:
            return
        self._awaits_flush = self._awaits_flush or self._jobs_in_flight > 0
        self._jobs_in_flight = 0
        if not self._awaits_flush:
            self.manager.on_reset_flushed()

    def on_reset_flushed(self) -> None:
        """Learn that no copy from before the reset touches the primary any more."""
        self.manager.on_reset_flushed()

    def shutdown(self) -> None:
        """Close the tiers and let go of the memory; idempotent. A failure is logged."""
        if self._is_closed:
            return
        self._is_closed = True
        self._slot_flags = memoryview(b"")
        try:
            self._close()
        except OffloadError:
            logger.exception("the offload engine did not shut down cleanly")

    # -- what people see ------------------------------------------------------------------------

    def get_stats(self) -> metrics.Stats | None:
        """Return what was counted since the last call."""
        return self._counts.take_stats()

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """Return what stays as it is while the process runs, one mapping a tier."""
        return self._counts.config_info()

    # -- inside ---------------------------------------------------------------------------------

    @staticmethod
    def _positioned(
        keys: Collection[OffloadKey], context: base.ReqContext, request: ReqContext
    ) -> list[OffloadKey]:
        """Take over where in the prompt the keys lie, for the order of eviction."""
        ordered = list(keys)
        take_positions(ordered, context, request)
        return ordered

    def _failed(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        primary = self.manager.planner.primary
        return {
            key
            for key in keys
            if self._is_being_written(key) and self._slot_flags[primary.slot_of(key)] == FAILED
        }

    def _is_being_written(self, key: OffloadKey) -> bool:
        return self.manager.planner.primary.state_of(key) is BlockState.WRITING

    def _job_ended(self) -> None:
        self._jobs_in_flight -= 1
        if self._awaits_flush:
            self._awaits_flush = False
            self.manager.on_reset_flushed()


def _source_of(media: Iterable[Medium]) -> CacheHitSource:
    """Return what promoted blocks are counted as; tiers of different kinds cannot be told apart."""
    kinds = set(media)
    if kinds == {Medium.STORAGE}:
        return CacheHitSource.DISK
    return CacheHitSource.HOST if kinds <= {Medium.CPU} else CacheHitSource.EXTERNAL_UNSPECIFIED
