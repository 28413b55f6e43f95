"""The engine's metrics under vLLM, with vLLM's metric names where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import repeat
from typing import Any, Final

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvoffload_async.core.planner import Planner
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.statistics import OffloadingStatistics, TierStatistics
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext

_PREFIX: Final = "vllm:kvoffload_async_"


def _named_as_fields(**texts: str) -> dict[str, tuple[str, str]]:
    return {_PREFIX + field: (text, field) for field, text in texts.items()}


_COUNTERS: Final = {
    TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES: (
        "Promotions refused because the primary had no room."
    ),
    f"{_PREFIX}failed_stores": (
        "Blocks dropped because a worker failed to copy them to the primary, or vLLM only in part."
    ),
    f"{_PREFIX}lost_tails": "Blocks of requests that ended before the primary had room for them.",
    f"{_PREFIX}expired_deferrals": "Requests computed because they had waited too long for blocks.",
    f"{_PREFIX}withheld_blocks": (
        "Blocks not stored because of their request's max_offload_tokens."
    ),
    f"{_PREFIX}applied_hints": "Hints of requests that were applied.",
    f"{_PREFIX}ignored_hints": "Hints of requests that were ignored: unknown or invalid.",
}
_TIER_COUNTERS: Final = {
    TieringOffloadingMetrics.READ_BYTES: ("Bytes read from a secondary tier.", "loaded_bytes"),
    TieringOffloadingMetrics.WRITE_BYTES: ("Bytes written to a secondary tier.", "stored_bytes"),
    TieringOffloadingMetrics.PROMOTION_JOB_FAILURES: (
        "Promotions with a failed block.",
        "failed_loads",
    ),
    f"{_PREFIX}failed_tier_jobs": ("Jobs of a secondary tier with a failed block.", "failed_jobs"),
    **_named_as_fields(
        loaded_blocks="Blocks promoted from a secondary tier.",
        stored_blocks="Blocks cascaded to a secondary tier.",
        dropped_blocks=(
            "Blocks that waited for room in the tier and were dropped: evicted from the primary, "
            "reset with it, deleted, or not stored when the tier was closed."
        ),
        corrupt_blocks="Blocks of a secondary tier whose checksum did not match.",
        missing_blocks="Blocks to load that a secondary tier did not have.",
        evicted_blocks="Blocks whose removal a secondary tier announced.",
        deleted_blocks="Blocks whose deletion a secondary tier has confirmed.",
        failed_store_blocks="Blocks given up after failed stores.",
        prefetched_blocks="Blocks promoted before the first lookup of their request.",
        unused_prefetched_blocks="Prefetched blocks that no request has loaded.",
    ),
}
"""Metric -> its help text and its field of `TierStatistics`."""
_DERIVED_COUNTERS: Final = {
    TieringOffloadingMetrics.CASCADE_JOB_FAILURES: "Cascades with a failed block.",
    TieringOffloadingMetrics.CHUNK_QUERIES: "Blocks looked up in a tier, once per request.",
    TieringOffloadingMetrics.CHUNK_HITS: "Looked-up blocks found in a tier.",
}
"""Metric of a tier that is derived from its statistics -> its help text."""
_GAUGES: Final = {
    CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC: "Share of the primary in use by transfers.",
    CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC: "Share of the primary being written.",
    CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC: "Share of the primary being read.",
}
_TIER_GAUGES: Final = {
    TieringOffloadingMetrics.ACTIVE_PROMOTION_JOBS: ("Promotions in flight.", "loads_in_flight"),
    f"{_PREFIX}open": (
        "1 if the tier is open, 0 if it could not be opened or was closed.",
        "is_open",
    ),
    **_named_as_fields(
        used_bytes="Bytes used by a secondary tier, if it reports them.",
        capacity_bytes="Capacity of a secondary tier in bytes, if it reports it.",
        queued_jobs="Jobs that a secondary tier has not started.",
        overdue_jobs="Jobs reported at their deadline whose copies still run.",
        pending_blocks="Blocks that wait for room in a secondary tier.",
    ),
}
_DERIVED_GAUGES: Final = {
    TieringOffloadingMetrics.ACTIVE_CASCADE_JOBS: "Cascades in flight.",
    TieringOffloadingMetrics.PRIMARY_WRITE_USAGE_PERC: "Share of the primary in promotion.",
    TieringOffloadingMetrics.PRIMARY_READ_USAGE_PERC: "Share of the primary in cascade.",
    f"{_PREFIX}suspended_directions": (
        "Directions, of loads and stores, in which a tier is suspended."
    ),
}
_ALLOCATIONS: Final = CPUOffloadingMetrics.CPU_ALLOCATION_SIZE
CONFIG_INFO_KEYS: Final = (
    "kvoffload_async_version",
    "kvoffload_async_primary_blocks",
    "kvoffload_async_tiers",
)


def definitions() -> dict[str, Any]:
    """Return vLLM's definitions of all metrics of `EngineCounts`."""
    tier_counters = _texts(_TIER_COUNTERS) | _DERIVED_COUNTERS
    tier_gauges = _texts(_TIER_GAUGES) | _DERIVED_GAUGES
    allocations = base.OffloadingHistogramMetadata(
        documentation="Blocks granted by one call of prepare_store.",
        buckets=tuple(float(4**power) for power in range(10)),
    )
    return (
        convert.definitions(base.OffloadingCounterMetadata, _COUNTERS)
        | convert.definitions(base.OffloadingCounterMetadata, tier_counters, "tier")
        | convert.definitions(base.OffloadingGaugeMetadata, _GAUGES)
        | convert.definitions(base.OffloadingGaugeMetadata, tier_gauges, "tier")
        | {_ALLOCATIONS: allocations}
    )


class LookupCounts:
    """Counts the lookups of blocks by tier; a block counts once per request and tier.

    As in vLLM, the first answer that is a hit or a miss counts, until the request is scheduled.

    Attributes:
        queries: Blocks that were looked up, by tier; the primary counts as tier 0.
        hits: Those of them that were hits.
    """

    def __init__(self, planner: Planner) -> None:
        """Observe all lookups in the planner's tiers from now on."""
        self.queries = [0] * (len(planner.tiers) + 1)
        self.hits = self.queries.copy()
        self._planner = planner
        self._open: dict[str, list[set[OffloadKey]]] = {}
        """Unscheduled request -> keys already counted, by tier."""
        planner.search.on_answers = self._answered

    def began(self, req_id: str) -> None:
        """Record a new request, whose lookups are counted."""
        self._open[req_id] = [set() for _ in self.queries]

    def scheduled(self, req_ids: Iterable[str]) -> None:
        """Record that requests were scheduled or finished; their later lookups are not counted."""
        for req_id in req_ids:
            self._open.pop(req_id, None)

    def looked_up(
        self, keys: Sequence[OffloadKey], request: ReqContext, answers: Sequence[LookupResult]
    ) -> None:
        """Record the engine's lookup results, from which the primary's are derived."""
        counted = self._open.get(request.req_id)
        if counted is None:
            return
        primary, searched = self._planner.primary, self._planner.requests[request].searched
        hits: list[OffloadKey] = []
        misses: list[OffloadKey] = []
        for key, answer in zip(keys, answers, strict=False):
            if key in counted[0]:
                continue
            if answer is LookupResult.HIT:
                hits.append(key)
            elif key in searched or primary.lookup(key) is LookupResult.MISS:
                misses.append(key)
        self._count(0, counted, hits, misses)

    def looked_up_prefix(
        self, keys: Sequence[OffloadKey], request: ReqContext, found: int, *, is_deferred: bool
    ) -> None:
        """Record how many blocks of a prompt precede the first block that was missed.

        While that is deferred, only what the tiers were searched for is counted.
        """
        answers = [*[LookupResult.HIT] * found, LookupResult.MISS]
        if is_deferred:
            keys = tuple(self._planner.requests[request].searched)
            answers = [LookupResult.RETRY] * len(keys)
        self.looked_up(keys, request, answers)

    def _answered(
        self,
        index: int,
        request: ReqContext,
        hits: Sequence[OffloadKey],
        misses: Sequence[OffloadKey],
    ) -> None:
        """Record the results of a lookup in a tier."""
        if (counted := self._open.get(request.req_id)) is not None:
            self._count(index + 1, counted, hits, misses)

    def _count(
        self,
        number: int,
        counted: Sequence[set[OffloadKey]],
        hits: Sequence[OffloadKey],
        misses: Sequence[OffloadKey],
    ) -> None:
        known = counted[number]
        before = len(known)
        known.update(hits)
        self.hits[number] += len(known) - before
        known.update(misses)
        self.queries[number] += len(known) - before


class EngineCounts:
    """Counts the engine's metrics since the last `take_stats`.

    Attributes:
        lookups: See `LookupCounts`; updated by the caller.
        allocations: Blocks granted per `prepare_store`; appended by the caller.
        failed_stores: Blocks that could not be stored; incremented by the caller.
        lost_tails: Blocks left out of a store and not offered again; incremented by the caller.
    """

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._manager = manager
        self._planner = planner = manager.planner
        self.lookups = LookupCounts(planner)
        self._reported: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.allocations: list[int] = []
        self.failed_stores = 0
        self.lost_tails = 0

    def take_stats(self) -> Any:  # noqa: ANN401 - vLLM's stats have no type of ours
        """Return the increments since the last call, and the current gauges, as vLLM's stats."""
        stats = self._manager.stats()
        now = self._totals(stats)
        increments = now - self._reported
        self._reported = now
        allocations, self.allocations = self.allocations, []
        return convert.engine_stats(
            [(name, labels, amount) for (name, labels), amount in increments.items()],
            self._gauges(stats),
            {_ALLOCATIONS: allocations},
        )

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """Return the constant labels that describe the engine, keyed by `CONFIG_INFO_KEYS`."""
        tiers = ",".join(tier.name for tier in self._planner.tiers)
        blocks = self._planner.primary.num_slots
        values = (version("kvoffload-async"), blocks, tiers)
        return [dict(zip(CONFIG_INFO_KEYS, values, strict=True))]

    def _totals(self, stats: OffloadingStatistics) -> Counter[tuple[str, tuple[str, ...]]]:
        counters, hints = self._planner.counters, stats.primary.hints
        values = (
            counters.promotions_refused,
            self.failed_stores,
            self.lost_tails,
            counters.deferrals_expired,
            stats.primary.withheld_blocks,
            hints["applied"],
            hints["unknown"] + hints["invalid"],
        )
        totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for name, value in zip(_COUNTERS, values, strict=True):
            totals[name, ()] = value
        for label, tier in self._labelled(stats.tiers):
            for name, (_, field) in _TIER_COUNTERS.items():
                totals[name, label] = getattr(tier, field)
            failed_stores = tier.failed_jobs - tier.failed_loads
            totals[TieringOffloadingMetrics.CASCADE_JOB_FAILURES, label] = failed_stores
        labels = [("0:primary",), *(label for label, _ in self._labelled(stats.tiers))]
        for label, queries, hits in zip(
            labels, self.lookups.queries, self.lookups.hits, strict=True
        ):
            totals[TieringOffloadingMetrics.CHUNK_QUERIES, label] = queries
            totals[TieringOffloadingMetrics.CHUNK_HITS, label] = hits
        return totals

    def _gauges(self, stats: OffloadingStatistics) -> Iterator[tuple[str, tuple[str, ...], float]]:
        slots, num_slots = stats.primary.slots, stats.primary.num_slots
        writing, reading = slots.writing / num_slots, slots.pinned / num_slots
        yield from zip(_GAUGES, repeat(()), (writing + reading, writing, reading), strict=False)
        for label, tier in self._labelled(stats.tiers):
            for name, (_, field) in _TIER_GAUGES.items():
                if (value := getattr(tier, field)) is not None:
                    yield name, label, value
            derived = (
                tier.jobs_in_flight - tier.loads_in_flight,
                tier.promoting_blocks / num_slots,
                tier.cascading_blocks / num_slots,
                sum(word != "closed" for word in tier.breakers.values()),
            )
            yield from zip(_DERIVED_GAUGES, repeat(label), derived, strict=False)

    def _labelled(
        self, tiers: Sequence[TierStatistics]
    ) -> Iterator[tuple[tuple[str], TierStatistics]]:
        """Yield the tiers' statistics with vLLM's labels; the primary counts as tier 0."""
        for number, (state, tier) in enumerate(zip(self._planner.tiers, tiers, strict=True), 1):
            yield (f"{number}:{state.name}",), tier


def _texts(metrics: Mapping[str, tuple[str, object]]) -> dict[str, str]:
    return {name: text for name, (text, _) in metrics.items()}
