"""Manager of a primary tier without secondary tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Final

from kvoffload_async.core.admission import Admission, AdmissionFilter
from kvoffload_async.core.primary import PRIMARY_FIGURES, Primary, Tenancy, read_primary
from kvoffload_async.errors import ClosedError, ConfigError
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.hints import read_hints
from kvoffload_async.policies.hd import GHOSTS_PER_BLOCK, LEAST_GHOSTS, HdPolicy
from kvoffload_async.policies.reuse import ReuseModel
from kvoffload_async.policies.tenants import TenantPolicies
from kvoffload_async.registry import create_policy
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.statistics import OffloadingStatistics
from kvoffload_async.types import (
    CPULoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    as_block_ids,
)

MOST_KNOWN: Final = 1 << 20
"""Maximum number of recently used blocks that an admission remembers, in at most 190 MB."""


def create_admission(primary: Primary, capacities: Sequence[float | None]) -> Admission:
    """Return the admission policy for tiers of these capacities; see `Admission`.

    If no tier stores everything, HD may decline in the primary what no tier stores.
    """
    policy = primary.policy
    if isinstance(policy, HdPolicy):
        admission = Admission(policy.model, capacities, feeds=False)
        if None not in capacities:
            policy.tiers_store = admission.stores
            primary.may_decline = True
        return admission
    finite = [int(capacity) for capacity in capacities if capacity not in {None, inf}]
    wanted = GHOSTS_PER_BLOCK * max([primary.num_slots, *finite])
    num_known = min(max(LEAST_GHOSTS, wanted), MOST_KNOWN)
    return Admission(ReuseModel(0, num_known), capacities, feeds=True)


class CPUPrimaryTierOffloadingManager(OffloadingManager):
    """A bounded cache of blocks in host memory, with pins and an eviction policy.

    Use it alone, or as the primary of a `TieringOffloadingManager`, which is then its only caller.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        cache_policy: str = "lru",
        buffer: PrimaryBuffer | None = None,
        accept_prefix: bool = True,
        store_threshold: int = 0,
        enable_events: bool = False,
        tenancy: Tenancy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty primary.

        Args:
            num_blocks: Capacity in blocks.
            cache_policy: Name of the eviction policy.
            buffer: Memory of the slots, owned by the manager. None: no memory, accounting only.
            accept_prefix: If a batch does not fit, store its longest prefix that does, across all
                KV-cache groups, instead of nothing; for callers that offer the rest again.
            store_threshold: Store a block at its n-th offer; 0 and 1 mean the first.
            enable_events: Record events for `take_events`.
            tenancy: The slots of each tenant, who then evicts its own blocks only.
            clock: Monotonic seconds, for retentions; a `TieringOffloadingManager` has its own.

        Raises:
            ConfigError: `num_blocks` is below 1, or the policy is unknown.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks: {num_blocks} is not valid; it must be at least 1")
        admission = AdmissionFilter(store_threshold) if store_threshold > 1 else None
        policy = partial(create_policy, cache_policy)
        self.core = Primary(
            num_blocks,
            policy(num_blocks)
            if tenancy is None
            else TenantPolicies(num_blocks, list(map(policy, tenancy.quotas)), tenancy.tenant_of),
            accept_prefix=accept_prefix,
            admission=admission,
            enable_events=enable_events,
            tenancy=tenancy,
        )
        """The block accounting, for `TieringOffloadingManager`, invariant checks and inspection."""
        self._buffer = buffer
        self._clock = clock
        self.row_bytes = 0 if buffer is None else buffer.view.nbytes // num_blocks
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else primary_text(self.core)
        return f"<{type(self).__name__}: {state}>"

    def get_primary_kv_view(self) -> memoryview:
        """Return the slots' memory, shape `[num_slots, slot_bytes]` uint8, C-contiguous.

        Raises:
            ClosedError: The manager has no memory or is shut down.
        """
        if self._buffer is None or self._closed:
            raise ClosedError("this manager has no buffer")
        return self._buffer.view

    @property
    def room_made(self) -> int:
        return self.core.room_made

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        read_hints(req_context, self.core.counters.hints)
        self.core.open_request(req_context)
        return RequestOffloadingContext()

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool = False
    ) -> list[LookupResult]:
        answers = self.core.lookup_many(keys)
        if stop_at_miss and LookupResult.MISS in answers:
            answers = answers[: answers.index(LookupResult.MISS) + 1]
        self.core.counters.count_lookups(answers)
        return answers

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(
            as_block_ids(self.core.prepare_load(req_context, keys)), self.core.generation
        )

    def complete_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, generation: int | None = None
    ) -> None:
        self.core.complete_load(req_context, keys, generation)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        return self.core.prepare_store(req_context, keys)

    def complete_store(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
        generation: int | None = None,
    ) -> None:
        self.core.complete_store(req_context, keys, success=success, generation=generation)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.core.touch(req_context, keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.core.begin_step(self._clock())
        self.core.close_request(req_context)

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End retentions: a primary alone has no deferred work."""
        self.core.begin_step(self._clock())

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.core.take_events()

    def has_pending_work(self) -> bool:
        return False

    def stats(self) -> OffloadingStatistics:
        """Return counters and gauges of the primary, also after shutdown."""
        primary = read_primary(PRIMARY_FIGURES.take(self.core), self.row_bytes)
        return OffloadingStatistics(primary=primary)

    def reset_cache(self) -> None:
        self.core.reset()

    def on_reset_flushed(self) -> None:
        """Do nothing: without secondary tiers, no copies between tiers access the slots."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Release the memory; idempotent."""
        self._closed = True
        if self._buffer is not None:
            counts = self.core.counts  # pinned or written blocks may be in use by the device
            self._buffer.release(is_idle=not (counts["pinned"] or counts["writing"]))


def primary_text(primary: Primary) -> str:
    """Return the usage of a primary as text."""
    return f"{primary.num_slots - primary.pool.unused.count:,} of {primary.num_slots:,} slots used"
