"""A manager that asks for whole requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.types import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)


class RequestLevelManager(OffloadingManager):
    """Another manager, but every request is offered for storing from its head on.

    What a request has found is then neither evicted by what it adds, nor loses its rank.

    Attributes:
        refused: Requests that there was no room for when they were offered last.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self.refused: set[str] = set()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._manager.on_new_request(req_context)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._manager.lookup(key, req_context)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return self._manager.prepare_load(keys, req_context)

    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, generation: int | None = None
    ) -> None:
        self._manager.complete_load(keys, req_context, generation)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        granted = self._manager.prepare_store(keys, req_context)
        if granted is None:
            self.refused.add(req_context.req_id)
        else:
            self.refused.discard(req_context.req_id)
        return granted

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        self._manager.complete_store(keys, req_context, success, generation)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._manager.touch(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._manager.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        self._manager.on_schedule_end(context)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._manager.take_events()

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    def reset_cache(self) -> None:
        self._manager.reset_cache()

    def on_reset_flushed(self) -> None:
        self._manager.on_reset_flushed()

    def shutdown(self, timeout: float | None = None) -> None:
        self._manager.shutdown(timeout)
