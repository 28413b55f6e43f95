"""The figures of one pass of a replay, and its course: statistics at a bounded number of steps."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.replay.device import Prompt
from kvoffload_async.statistics import OffloadingStatistics

DEVICE: Final = "device"
"""What the device is called among the tiers."""
PRIMARY: Final = "primary"
"""What the primary tier is called among the tiers."""


@dataclass(slots=True)
class Tally:
    """What a replay has come to; of requests that have ended.

    Attributes:
        hits: Block references found, by the tier they came from.
        owner_ns: Nanoseconds of the owner's thread, a step.
    """

    requests: int = 0
    block_refs: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    loaded_blocks: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    stores_refused: int = 0
    preemptions: int = 0
    owner_ns: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of_tiers(cls, names: Sequence[str], *, device_keeps: bool) -> Tally:
        """Return a tally that names every place where hits may come from."""
        places = (*((DEVICE,) if device_keeps else ()), PRIMARY, *names)
        return cls(hits=Counter(dict.fromkeys(places, 0)))

    def end(self, prompt: Prompt) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.block_refs += prompt.refs
        if prompt.found_on_device or prompt.found_beyond:
            prompt.count_hits(self.hits, DEVICE, PRIMARY)


MAX_SAMPLES: Final = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a pass.

    Attributes:
        at_s: Seconds since the pass began.
        block_refs: Block references of the requests that had ended, and `hits` those found, by
            where they came from.
        stats: What the manager said of itself.
    """

    at_s: float
    block_refs: int
    hits: Mapping[str, int]
    stats: OffloadingStatistics


class Timeline:
    """Takes a sample every few steps; when there are too many, drops every other one.

    What remains is evenly spread over the steps, whatever their number is.

    Thread: owner.
    """

    def __init__(
        self,
        read: Callable[[], OffloadingStatistics],
        tally: Tally,
        *,
        most: int = MAX_SAMPLES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with a first sample.

        Args:
            read: Returns the statistics of the manager.
            tally: What the requests have come to.
            most: How many samples are kept beside the last one; an even number.
            clock: Seconds.
        """
        self._read = read
        self._tally = tally
        self._most = most
        self._clock = clock
        self._start_s = clock()
        self._steps = 0
        self._stride = 1
        self._samples: list[Sample] = []
        self.note_step()

    def note_step(self) -> None:
        """Take a sample, if this step is one of those that count."""
        if self._steps % self._stride == 0:
            if len(self._samples) == self._most:
                del self._samples[1::2]
                self._stride *= 2
            self._samples.append(self._sample())
        self._steps += 1

    def finish(self) -> tuple[Sample, ...]:
        """Return the samples, with one of this moment at the end."""
        return (*self._samples, self._sample())

    def _sample(self) -> Sample:
        return Sample(
            self._clock() - self._start_s,
            self._tally.block_refs,
            dict(self._tally.hits),
            self._read(),
        )


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
