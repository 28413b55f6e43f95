"""The engine's metrics under vLLM, with vLLM's metric names where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import repeat
from typing import Any, Final

from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvoffload_async.core.planner import Planner
from kvoffload_async.core.tier_state import TierLookup, TierState
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.types import LookupResult, OffloadKey, ReqContext

_COUNTERS: Final = {
    TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES: (
        "Promotions refused because the primary had no room."
    ),
    "vllm:kvoffload_async_failed_stores": (
        "Blocks dropped because a worker failed to copy them to the primary, or vLLM only in part."
    ),
    "vllm:kvoffload_async_lost_tails": (
        "Blocks of requests that ended before the primary had room for them."
    ),
    "vllm:kvoffload_async_expired_deferrals": (
        "Requests computed because they had waited too long for blocks."
    ),
}
_LOOKUP_COUNTERS: Final = {
    TieringOffloadingMetrics.CHUNK_QUERIES: "Blocks looked up in a tier, once per request.",
    TieringOffloadingMetrics.CHUNK_HITS: "Looked-up blocks found in a tier.",
}
_TIER_COUNTERS: Final = {
    TieringOffloadingMetrics.READ_BYTES: "Bytes read from a secondary tier.",
    TieringOffloadingMetrics.WRITE_BYTES: "Bytes written to a secondary tier.",
    TieringOffloadingMetrics.PROMOTION_JOB_FAILURES: "Promotions with a failed block.",
    TieringOffloadingMetrics.CASCADE_JOB_FAILURES: "Cascades with a failed block.",
    "vllm:kvoffload_async_loaded_blocks": "Blocks promoted from a secondary tier.",
    "vllm:kvoffload_async_stored_blocks": "Blocks cascaded to a secondary tier.",
    "vllm:kvoffload_async_failed_tier_jobs": "Jobs of a secondary tier with a failed block.",
    "vllm:kvoffload_async_dropped_blocks": (
        "Blocks that waited for room in the tier and were dropped: evicted from the primary, reset "
        "with it, or not stored when the tier was closed."
    ),
}
_GAUGES: Final = {
    CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC: "Share of the primary in use by transfers.",
    CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC: "Share of the primary being written.",
    CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC: "Share of the primary being read.",
}
_TIER_GAUGES: Final = {
    TieringOffloadingMetrics.ACTIVE_PROMOTION_JOBS: "Promotions in flight.",
    TieringOffloadingMetrics.ACTIVE_CASCADE_JOBS: "Cascades in flight.",
    TieringOffloadingMetrics.PRIMARY_WRITE_USAGE_PERC: "Share of the primary in promotion.",
    TieringOffloadingMetrics.PRIMARY_READ_USAGE_PERC: "Share of the primary in cascade.",
}
_OBSERVED_COUNTERS: Final = {
    "corrupt_blocks": "Blocks of a secondary tier whose checksum did not match.",
    "missing_blocks": "Blocks to load that a secondary tier did not have.",
    "evicted_blocks": "Blocks whose removal a secondary tier announced.",
    "failed_store_blocks": "Blocks given up after failed stores.",
}
"""Counters of `TierStatistics` that are exported under their own names."""
_OBSERVED_GAUGES: Final = {
    "used_bytes": "Bytes used by a secondary tier, if it reports them.",
    "capacity_bytes": "Capacity of a secondary tier in bytes, if it reports it.",
    "queued_jobs": "Jobs that a secondary tier has not started.",
    "overdue_jobs": "Jobs reported at their deadline whose copies still run.",
    "pending_blocks": "Blocks that wait for room in a secondary tier.",
}
"""Gauges of `TierStatistics` that are exported under their own names."""
_STATE_GAUGES: Final = {
    "vllm:kvoffload_async_suspended_directions": (
        "Directions, of loads and stores, in which a tier is suspended."
    ),
    "vllm:kvoffload_async_open": (
        "1 if the tier is open, 0 if it could not be opened or was closed."
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
    return (
        convert.counter_definitions(_COUNTERS, ())
        | convert.counter_definitions(_LOOKUP_COUNTERS | _TIER_COUNTERS, ("tier",))
        | convert.gauge_definitions(_GAUGES, ())
        | convert.counter_definitions(_named(_OBSERVED_COUNTERS), ("tier",))
        | convert.gauge_definitions(
            _TIER_GAUGES | _named(_OBSERVED_GAUGES) | _STATE_GAUGES, ("tier",)
        )
        | convert.block_histogram_definition(
            _ALLOCATIONS, "Blocks granted by one call of prepare_store."
        )
    )


class LookupCounts:
    """Lookups and hits of blocks per tier; a block counts once per request.

    As in vLLM, the first answer that is a hit or a miss counts, until the request is scheduled.
    """

    def __init__(self, planner: Planner) -> None:
        """Observe all lookup answers of the planner's tiers from now on."""
        self._primary = planner.primary
        self._labels = [("0:primary",), *map(_label, range(len(planner.tiers)), planner.tiers)]
        self._hits = [0] * len(self._labels)
        self._queries = [0] * len(self._labels)
        self._open: dict[str, dict[int, set[OffloadKey]]] = {}
        """Unscheduled request -> keys already counted, by tier; 0: primary."""
        self._asked: set[OffloadKey] = set()
        """Keys that a tier was asked for since the last call of `looked_up`."""
        planner.sources[:] = [
            _Observed(source, partial(self._answered, index))
            for index, source in enumerate(planner.sources, 1)
        ]

    def began(self, req_id: str) -> None:
        """Record a new request."""
        self._open[req_id] = {}

    def scheduled(self, req_ids: Iterable[str]) -> None:
        """Record that requests were scheduled or finished; their later lookups are not counted."""
        for req_id in req_ids:
            self._open.pop(req_id, None)

    def looked_up(
        self, keys: Sequence[OffloadKey], req_id: str, answers: Sequence[LookupResult]
    ) -> None:
        """Record the engine's answers and derive the primary's from them."""
        asked, self._asked = self._asked, set()
        counted = self._open.get(req_id)
        if counted is None:
            return
        hits: list[OffloadKey] = []
        misses: list[OffloadKey] = []
        for key, answer in zip(keys, answers, strict=False):
            if key in asked:  # so the primary missed
                misses.append(key)
            elif answer is LookupResult.HIT:
                hits.append(key)
            elif self._primary.lookup(key) is LookupResult.MISS:
                misses.append(key)
        self._count(0, counted, hits, misses)

    def looked_up_prefix(
        self, keys: Sequence[OffloadKey], req_id: str, found: int, *, is_deferred: bool
    ) -> None:
        """Record how many blocks of a prompt precede the first one that was missed.

        While that is deferred, only what the tiers were asked for is counted.
        """
        if is_deferred:
            keys = tuple(self._asked)
            self.looked_up(keys, req_id, [LookupResult.MISS] * len(keys))
        else:
            self.looked_up(keys, req_id, [*[LookupResult.HIT] * found, LookupResult.MISS])

    def totals(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """Return the counts by counter and labels."""
        totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for label, hits, queries in zip(self._labels, self._hits, self._queries, strict=True):
            totals[TieringOffloadingMetrics.CHUNK_HITS, label] = hits
            totals[TieringOffloadingMetrics.CHUNK_QUERIES, label] = queries
        return totals

    def _answered(
        self,
        index: int,
        keys: Sequence[OffloadKey],
        req_id: str,
        answers: Sequence[LookupResult],
    ) -> None:
        """Record a tier's answers."""
        keys = keys[: len(answers)]
        self._asked.update(keys)
        counted = self._open.get(req_id)
        if counted is not None:
            pairs = list(zip(keys, answers, strict=True))
            hits = [key for key, answer in pairs if answer is LookupResult.HIT]
            misses = [key for key, answer in pairs if answer is LookupResult.MISS]
            self._count(index, counted, hits, misses)

    def _count(
        self,
        index: int,
        counted: dict[int, set[OffloadKey]],
        hits: Sequence[OffloadKey],
        misses: Sequence[OffloadKey],
    ) -> None:
        known = counted.setdefault(index, set())
        num_known = len(known)
        known.update(hits)
        num_found = len(known)
        known.update(misses)
        self._hits[index] += num_found - num_known
        self._queries[index] += len(known) - num_known


class _Observed:
    """Forwards lookups to a tier and reports the answers to a callback."""

    __slots__ = ("_answered", "_source")

    def __init__(
        self,
        source: TierLookup,
        answered: Callable[[Sequence[OffloadKey], str, Sequence[LookupResult]], None],
    ) -> None:
        self._source = source
        self._answered = answered

    def lookup_many(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, stop_at_miss: bool
    ) -> list[LookupResult]:
        answers = self._source.lookup_many(keys, req_context, stop_at_miss=stop_at_miss)
        self._answered(keys, req_context.req_id, answers)
        return answers


class EngineCounts:
    """Counts since the last `take_stats`.

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
        tiers = self._manager.stats().tiers
        now = self._totals(tiers)
        increments = now - self._reported
        self._reported = now
        allocations, self.allocations = self.allocations, []
        counts = self._planner.primary.counts
        writing = counts["writing"] / self._planner.primary.num_slots
        reading = counts["pinned"] / self._planner.primary.num_slots
        return convert.engine_stats(
            [(name, labels, amount) for (name, labels), amount in increments.items()],
            [
                *zip(_GAUGES, repeat(()), (writing + reading, writing, reading), strict=False),
                *self._transfers(),
                *self._observed(tiers),
            ],
            {_ALLOCATIONS: allocations},
        )

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """Return the engine's labels, keyed by `CONFIG_INFO_KEYS`."""
        tiers = ",".join(tier.name for tier in self._planner.tiers)
        blocks = self._planner.primary.num_slots
        values = (version("kvoffload-async"), blocks, tiers)
        return [dict(zip(CONFIG_INFO_KEYS, values, strict=True))]

    def _totals(self, tiers: Sequence[TierStatistics]) -> Counter[tuple[str, tuple[str, ...]]]:
        counters = self._planner.counters
        values = (
            counters.promotions_refused,
            self.failed_stores,
            self.lost_tails,
            counters.deferrals_expired,
        )
        totals = self.lookups.totals()
        for name, value in zip(_COUNTERS, values, strict=True):
            totals[name, ()] = value
        for index, tier in enumerate(self._planner.tiers):
            own, label = tier.counters, _label(index, tier)
            values_of_tier = (
                own.loaded_bytes,
                own.stored_bytes,
                own.failed_loads,
                own.failed_jobs - own.failed_loads,
                own.loaded_blocks,
                own.stored_blocks,
                own.failed_jobs,
                own.dropped_blocks,
            )
            for name, value in zip(_TIER_COUNTERS, values_of_tier, strict=True):
                totals[name, label] = value
            for field in _OBSERVED_COUNTERS:
                totals[_name_of(field), label] = getattr(tiers[index], field)
        return totals

    def _observed(
        self, tiers: Sequence[TierStatistics]
    ) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield each tier's gauges that come from its statistics."""
        for index, (tier, state) in enumerate(zip(tiers, self._planner.tiers, strict=True)):
            label = _label(index, state)
            for field in _OBSERVED_GAUGES:
                value = getattr(tier, field)
                if value is not None:
                    yield _name_of(field), label, value
            suspended = sum(word != "closed" for word in tier.breakers.values())
            yield from zip(_STATE_GAUGES, repeat(label), (suspended, tier.is_open), strict=False)

    def _transfers(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield each tier's gauges of transfers in flight."""
        jobs = [[0, 0] for _ in self._planner.tiers]
        blocks = [[0, 0] for _ in self._planner.tiers]
        for index, job in self._planner.jobs.values():
            jobs[index][not job.is_promotion] += 1
            blocks[index][not job.is_promotion] += len(job.keys)
        slots = self._planner.primary.num_slots
        for index, tier in enumerate(self._planner.tiers):
            values = (*jobs[index], *(count / slots for count in blocks[index]))
            yield from zip(_TIER_GAUGES, repeat(_label(index, tier)), values, strict=False)


def _name_of(field: str) -> str:
    return f"vllm:kvoffload_async_{field}"


def _named(documentation: Mapping[str, str]) -> dict[str, str]:
    return {_name_of(field): text for field, text in documentation.items()}


def _label(index: int, tier: TierState) -> tuple[str]:
    """Return vLLM's label for a tier; the primary has number 0."""
    return (f"{index + 1}:{tier.name}",)
