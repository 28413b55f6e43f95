"""What the whole engine counts, in vLLM's own names where vLLM has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvoffload_async.core.planner import Planner
from kvoffload_async.integrations.vllm import convert

_COUNTERS: Final = {
    TieringOffloadingMetrics.PROMOTION_ALLOCATION_FAILURES: (
        "Promotions that were not made, as the primary had no room for them."
    ),
    "vllm:kvoffload_async_failed_stores": (
        "Blocks that a worker could not copy to the primary; they were forgotten."
    ),
    "vllm:kvoffload_async_expired_deferrals": (
        "Requests that had waited for blocks too long, and were computed instead."
    ),
}
_TIER_COUNTERS: Final = {
    TieringOffloadingMetrics.READ_BYTES: "Bytes read from a secondary tier.",
    TieringOffloadingMetrics.WRITE_BYTES: "Bytes written to a secondary tier.",
    "vllm:kvoffload_async_loaded_blocks": "Blocks promoted from a secondary tier.",
    "vllm:kvoffload_async_stored_blocks": "Blocks cascaded to a secondary tier.",
    "vllm:kvoffload_async_failed_tier_jobs": "Jobs of a secondary tier with a failed block.",
    "vllm:kvoffload_async_dropped_blocks": "Blocks that a secondary tier was spared.",
}
_GAUGES: Final = {
    CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC: "Share of the primary that is in use by copies.",
    CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC: "Share of the primary that is being written.",
    CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC: "Share of the primary that is being read.",
}
_ALLOCATIONS: Final = CPUOffloadingMetrics.CPU_ALLOCATION_SIZE
CONFIG_INFO_KEYS: Final = (
    "kvoffload_async_version",
    "kvoffload_async_primary_blocks",
    "kvoffload_async_tiers",
)


def definitions() -> dict[str, Any]:
    """Return vLLM's definitions of everything that `EngineCounts` tells."""
    return (
        convert.counter_definitions(_COUNTERS, ())
        | convert.counter_definitions(_TIER_COUNTERS, ("tier",))
        | convert.gauge_definitions(_GAUGES)
        | convert.block_histogram_definition(
            _ALLOCATIONS, "Blocks that one call of prepare_store was granted."
        )
    )


class EngineCounts:
    """What an engine has counted since it was last asked.

    Attributes:
        allocations: Blocks that each `prepare_store` was granted; the caller adds to it.
        failed_stores: Blocks that did not arrive; the caller adds to it.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._told: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.allocations: list[int] = []
        self.failed_stores = 0

    def take_stats(self) -> Any:  # noqa: ANN401 - vLLM's stats have no type of ours
        """Return the increments since the last call, and the present state, in vLLM's form."""
        now = self._totals()
        increments = now - self._told
        self._told = now
        allocations, self.allocations = self.allocations, []
        counts = self._planner.primary.counts
        writing = counts["writing"] / self._planner.primary.num_slots
        reading = counts["pinned"] / self._planner.primary.num_slots
        return convert.engine_stats(
            [(name, labels, amount) for (name, labels), amount in increments.items()],
            dict(zip(_GAUGES, (writing + reading, writing, reading), strict=True)),
            {_ALLOCATIONS: allocations},
        )

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """Return the labels of this engine, by `CONFIG_INFO_KEYS`."""
        tiers = ",".join(tier.name for tier in self._planner.tiers)
        blocks = self._planner.primary.num_slots
        values = (version("kvoffload-async"), blocks, tiers)
        return [dict(zip(CONFIG_INFO_KEYS, values, strict=True))]

    def _totals(self) -> Counter[tuple[str, tuple[str, ...]]]:
        counters = self._planner.counters
        values = (counters.promotions_refused, self.failed_stores, counters.deferrals_expired)
        totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for name, value in zip(_COUNTERS, values, strict=True):
            totals[name, ()] = value
        for tier in self._planner.tiers:
            own = tier.counters
            values_of_tier = (
                own.loaded_bytes,
                own.stored_bytes,
                own.loaded_blocks,
                own.stored_blocks,
                own.failed_jobs,
                own.dropped_blocks,
            )
            # Several tiers may have one name: their figures add up.
            for name, value in zip(_TIER_COUNTERS, values_of_tier, strict=True):
                totals[name, (tier.name,)] += value
        return totals
