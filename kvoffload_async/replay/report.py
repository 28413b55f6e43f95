"""The figures of one pass of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.replay.tally import Tally
from kvoffload_async.replay.timeline import Sample

_TIER_FIGURES: Final = (
    *("stored_blocks", "loaded_blocks", "stored_bytes", "loaded_bytes"),
    *("failed_jobs", "failed_loads", "failed_blocks"),
    *("dropped_blocks", "late_blocks", "failed_store_blocks"),
)
"""What depends on the requests alone, and not on how often somebody asks for a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay has shown.

    Attributes:
        interrupted: Whether it ended before the requests did.
        requests: Requests that ended, and `block_refs` their blocks, repeated ones included.
        hits: Block references found, by where they came from; see `drivers`.
        verified_blocks: Loaded blocks that were compared, and `corrupt_blocks` those that differed.
        bytes_stored: Bytes of the primary's rows that requests have written, and `bytes_loaded` of
            those that they have read.
        bytes_to_device: Bytes that were copied to the device, and `bytes_from_device` from it.
        preemptions: How often a request lost its device blocks and started again.
        device_blocks: Blocks that the device has room for, and `layers` its tensors.
        engine: `"sync"` for scheduler adapter and workers, `"async"` for `OffloadEngine`.
        owner_us_per_step: Microseconds in the adapter's calls, over the steps: p50, p99, max. With
            the async engine a step is a request, and the time is the processor time of the loop's
            thread, without computing and comparing blocks.
        leaked_pins: Slots pinned, being written or held after everything has come to rest.
        evictions: Blocks that left the primary to make room.
        stores_refused: Requests that the primary had no room for at all.
        row_bytes: A block's bytes in the primary, over all workers and padded to whole pages.
        tiers: The engine's counters of each tier, and the `requests` that it has made to a server.
        samples: How it went, if that was asked for; not among the figures of `to_dict`.
    """

    interrupted: bool
    requests: int
    block_refs: int
    hits: dict[str, int]
    hit_ratio: float
    jobs_submitted: int
    job_results: int
    job_failures: int
    verified_blocks: int
    corrupt_blocks: int
    bytes_stored: int
    bytes_loaded: int
    bytes_to_device: int
    bytes_from_device: int
    preemptions: int
    wall_s: float
    block_refs_per_s: float
    owner_us_per_step: dict[str, float]
    leaked_pins: int
    steps: int
    evictions: int
    stores_refused: int
    promotions_refused: int
    deferrals_expired: int
    policy: str
    primary_blocks: int
    block_bytes: int
    row_bytes: int
    concurrency: int
    engine: str
    device_blocks: int
    layers: int
    tiers: dict[str, dict[str, int]]
    samples: tuple[Sample, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the figures."""
        figures = asdict(replace(self, samples=()))
        del figures["samples"]
        return figures

    @property
    def complaints(self) -> list[str]:
        """What must never happen, and did."""
        lost = self.jobs_submitted - self.job_results
        return [
            text
            for is_so, text in (
                (self.corrupt_blocks, f"{self.corrupt_blocks} loaded blocks had wrong bytes"),
                (self.leaked_pins, f"{self.leaked_pins} slots were never given back"),
                (lost, f"{lost} jobs got no result"),
            )
            if is_so
        ]


def build_report(
    spec: TieringOffloadingSpec,
    manager: TieringOffloadingManager,
    tier_names: Sequence[str],
    tally: Tally,
    *,
    wall_s: float,
    concurrency: int,
    interrupted: bool,
    engine: str,
    device_blocks: int,
    layers: int,
    samples: tuple[Sample, ...] = (),
) -> Report:
    """Gather the figures, once the engine is at rest."""
    core = manager.planner
    slots = core.primary.counts
    counters = core.counters
    promoted = sum(tier.counters.loaded_blocks for tier in core.tiers)
    copied_bytes = spec.config.block_bytes * spec.config.num_workers
    resident = slots["idle"] + slots["pinned"]
    return Report(
        interrupted=interrupted,
        requests=tally.requests,
        block_refs=tally.block_refs,
        hits=dict(tally.hits),
        hit_ratio=tally.hits.total() / max(1, tally.block_refs),
        jobs_submitted=counters.jobs_submitted,
        job_results=counters.job_results,
        job_failures=counters.job_failures,
        verified_blocks=tally.verified_blocks,
        corrupt_blocks=tally.corrupt_blocks,
        bytes_stored=tally.stored_blocks * spec.stride_bytes,
        bytes_loaded=tally.loaded_blocks * spec.stride_bytes,
        bytes_to_device=tally.loaded_blocks * copied_bytes,
        bytes_from_device=tally.stored_blocks * copied_bytes,
        preemptions=tally.preemptions,
        wall_s=wall_s,
        block_refs_per_s=tally.block_refs / max(wall_s, 1e-9),
        owner_us_per_step=_percentiles_us(tally),
        leaked_pins=slots["pinned"] + slots["writing"] + slots["held"],
        steps=len(tally.owner_ns),
        evictions=tally.stored_blocks + promoted - resident,
        stores_refused=tally.stores_refused,
        promotions_refused=counters.promotions_refused,
        deferrals_expired=counters.deferrals_expired,
        policy=spec.config.eviction_policy,
        primary_blocks=spec.num_blocks,
        block_bytes=spec.config.block_bytes,
        row_bytes=spec.stride_bytes,
        concurrency=concurrency,
        engine=engine,
        device_blocks=device_blocks,
        layers=layers,
        tiers={
            name: {figure: getattr(tier.counters, figure) for figure in _TIER_FIGURES}
            | {"requests": int(read.gauges.get("requests", 0))}
            for name, tier, read in zip(tier_names, core.tiers, manager.stats().tiers, strict=True)
        },
        samples=samples,
    )


def _percentiles_us(tally: Tally) -> dict[str, float]:
    steps_us = np.array(tally.owner_ns or [0], dtype=np.int64) / 1000
    p50, p99 = np.percentile(steps_us, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(steps_us.max())}
