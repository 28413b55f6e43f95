"""Tenants of vLLM's requests.

vLLM makes the keys of blocks and knows no tenants. So keys are tagged where vLLM's scheduler passes
them to the manager, and lose their tags where it gets them back: the results of `prepare_store`,
what a store has left out, and events. The engine and its tiers have tagged keys only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload import base
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload_async.facade.tenants import Tenants, untagged
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.types import LookupResult, OffloadKey, SlidingWindow


@dataclass(frozen=True, slots=True)
class _TenantOfRequest:
    """A request's tenant, in the state of vLLM's context; None: nothing is stored nor loaded."""

    index: int | None


class TenantManager(KVOffloadManager):
    """Stores and finds each request's blocks under the keys of its tenant.

    A request that vLLM has not announced with `on_new_request` has no tenant, and no blocks.

    Attributes:
        salts: Id -> `cache_salt` of the request about to be announced; set by the connector.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - as below
        tenants: Tenants,
        parameter: str | None,
        **kwargs: Any,  # noqa: ANN401 - those of `KVOffloadManager`
    ) -> None:
        """Create the adapter of a manager.

        Args:
            *args: See `KVOffloadManager`.
            tenants: The tenants.
            parameter: The one of `kv_transfer_params` that names the tenant; None: `cache_salt`.
            **kwargs: See `KVOffloadManager`.
        """
        super().__init__(*args, **kwargs)
        self.salts: dict[str, str | None] = {}
        self._tenants = tenants
        self._parameter = parameter

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Begin a request, and resolve its tenant."""
        name = self.salts.pop(req_context.req_id, None)
        if self._parameter is not None:
            name = (req_context.kv_transfer_params or {}).get(self._parameter)
        req_context.set_state(_TenantOfRequest(self._tenants.index_of(name)))
        convert.request_of(req_context).key_positions = {}  # vLLM's own has keys without tags
        return super().on_new_request(req_context)

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        req_context: base.ReqContext,
        windows: Sequence[SlidingWindow] = (),
    ) -> None:
        own = [
            SlidingWindow(self._tagged(window.keys, req_context), window.num_blocks)
            for window in windows
        ]
        super().prefetch(self._tagged(keys, req_context), req_context, own)

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        for own in self._tagged((key,), req_context):
            return super().lookup(own, req_context)
        return base.LookupResult.MISS

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: base.ReqContext
    ) -> Sequence[LookupResult]:
        own = self._tagged(keys, req_context)
        return super().lookup_many(own, req_context) if own else [LookupResult.MISS] * len(keys)

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: base.ReqContext
    ) -> tuple[int, bool]:
        return super().lookup_prefix(self._tagged(keys, req_context), req_context)

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.LoadStoreSpec:
        return super().prepare_load(self._tagged(keys, req_context), req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        super().complete_load(self._tagged(keys, req_context), req_context)

    def get_load_source(self, key: OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        for own in self._tagged((key,), req_context):
            return super().get_load_source(own, req_context)
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        super().touch(self._tagged(keys, req_context), req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        own = self._tagged(keys, req_context)
        if not own:
            self.manager.planner.primary.counters.unknown_tenant_blocks += len(keys)
        output = super().prepare_store(own, req_context)
        if output is not None:
            output.keys_to_store = list(map(untagged, output.keys_to_store))
            output.evicted_keys = list(map(untagged, output.evicted_keys))
        return output

    def take_left_out(self) -> Mapping[str, Sequence[OffloadKey]]:
        left_out = super().take_left_out()
        return {req_id: list(map(untagged, keys)) for req_id, keys in left_out.items()}

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: base.ReqContext, success: bool = True
    ) -> None:
        super().complete_store(self._tagged(keys, req_context), req_context, success)

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Remove and return pending events, without blocks of tenants that this engine has not."""
        return self._untagged(super().take_events())

    def _tagged(self, keys: Iterable[OffloadKey], req_context: base.ReqContext) -> list[OffloadKey]:
        """Return the keys of a tenant's blocks; none if nothing of the request is stored."""
        tenant = req_context.get_state(_TenantOfRequest)
        if tenant is None or tenant.index is None:
            return []
        positions = convert.request_of(req_context).key_positions
        tagged: list[OffloadKey] = []
        for key in keys:
            own = self._tenants.tagged(key, tenant.index)
            position = req_context.get_offload_key_position(key)
            if position is not None:
                positions[own] = position
            tagged.append(own)
        return tagged

    def _untagged(self, events: Iterable[base.OffloadingEvent]) -> Iterator[base.OffloadingEvent]:
        tenants = self._tenants
        for event in events:
            known = (key for key in event.keys if tenants.owns(key, tenants.tenant_of(key)))
            event.keys = list(map(untagged, known))
            if event.keys:
                yield event
