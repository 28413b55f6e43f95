"""The engine's view of one secondary tier: its answers to lookups, its health, its load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.breaker import Breaker, BreakerEvent
from kvoffload_async.errors import BlockMissingError, CorruptBlockError, TierFullError
from kvoffload_async.types import (
    JobMetadata,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
)

_FAULT_OF_ONE_BLOCK = (BlockMissingError, CorruptBlockError, TierFullError)


class TierLookup(Protocol):
    """What the engine asks a tier in the middle of a lookup: a question to memory, no I/O."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT, MISS or RETRY at once."""
        ...


@dataclass(slots=True)
class TierCounters:
    """What a tier has done for the engine so far."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed_jobs: int = 0
    failed_loads: int = 0
    dropped_blocks: int = 0


class TierSlot:
    """One tier in the configured order.

    Thread: owner.
    """

    def __init__(
        self,
        name: str,
        source: TierLookup,
        breaker: Breaker,
        *,
        medium: Medium = Medium.STORAGE,
        locality: Locality = Locality.LOCAL,
        backpressure: Backpressure | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self.breaker = breaker
        self.medium = medium
        self.locality = locality
        self.backpressure = backpressure
        self.cascading_blocks = 0
        self.counters = TierCounters()

    def may_load(self, ctx: ReqContext, now_s: float) -> bool:
        """Tell whether a request may be promoted from here now."""
        return self.breaker.permits(now_s) and any(
            matcher.matches(self.medium, self.locality) for matcher in ctx.load_tier_filter
        )

    def takes_store(self, now_s: float) -> bool:
        """Tell whether one more cascade may be submitted now."""
        if not self.breaker.permits(now_s):
            return False
        return self.backpressure is None or not self.backpressure.drops_store(now_s)

    def submitted(self, job: JobMetadata, now_s: float) -> None:
        """Note a job on its way to the tier."""
        self.breaker.note(BreakerEvent.TRIED, now_s)
        if not job.is_promotion:
            self.cascading_blocks += len(job.keys)

    def ended(self, job: JobMetadata, result: JobResult, now_s: float) -> None:
        """Note a job's result."""
        worked = result.success or isinstance(result.error, _FAULT_OF_ONE_BLOCK)
        self.breaker.note(BreakerEvent.WORKED if worked else BreakerEvent.FAULTED, now_s)
        self.counters.failed_jobs += not result.success
        self.counters.failed_loads += job.is_promotion and not result.success
        num_bytes = result.transfer_bytes or 0
        landed = len(job.keys) if result.success else len(result.successful_keys or ())
        if job.is_promotion:
            self.counters.loaded_bytes += num_bytes
            self.counters.loaded_blocks += landed
            return
        if not result.disowned:
            self.cascading_blocks -= len(job.keys)
        self.counters.stored_bytes += num_bytes
        self.counters.stored_blocks += landed
        if self.backpressure is None:
            return
        if result.success:
            self.backpressure.store_ended(result.transfer_time or 0.0, num_bytes, now_s)
        else:
            self.backpressure.store_failed(now_s)

    def released(self, job: JobMetadata) -> None:
        """Note that a disowned job's copy has ended: until then it counts as under way."""
        if not job.is_promotion:
            self.cascading_blocks -= len(job.keys)
