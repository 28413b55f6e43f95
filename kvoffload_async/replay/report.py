"""Results of one replay pass, and samples of the statistics over its course."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvoffload_async.replay.device import DEVICE, PRIMARY, Prompt
from kvoffload_async.statistics import OffloadingStatistics


@dataclass(slots=True)
class Tally:
    """Counts of a replay, over ended requests.

    Attributes:
        tier_names: Names of the secondary tiers, in lookup order.
        hits: Block references found, by the tier they came from.
        owner_ns: Nanoseconds on the owner's thread, one entry per step.
        waited_s: Seconds in the queue, one entry per started request.
    """

    tier_names: Sequence[str] = ()
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
    waited_s: array[float] = field(default_factory=lambda: array("d"))

    @classmethod
    def of_tiers(cls, names: Sequence[str], *, device_keeps: bool) -> Tally:
        """Return an empty tally with an entry for each source of hits."""
        sources = (*((DEVICE,) if device_keeps else ()), PRIMARY, *names)
        return cls(names, hits=Counter(dict.fromkeys(sources, 0)))

    def end(self, prompt: Prompt) -> None:
        """Count an ended request."""
        self.requests += 1
        self.block_refs += prompt.references.total()
        prompt.count_hits(self.hits)

    @property
    def owner_us_per_step(self) -> dict[str, float]:
        """Microseconds on the owner's thread per step: p50, p99, max."""
        return _spread(np.array(self.owner_ns or [0], dtype=np.int64) / 1000)

    @property
    def queued_s(self) -> dict[str, float]:
        """Seconds from a request's arrival to its start: p50, p99, max."""
        return _spread(np.array(self.waited_s or [0.0]))


def _spread(values: npt.NDArray[np.float64]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(values.max())}


MAX_SAMPLES: Final = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """Statistics of a replay at one moment of a pass.

    Attributes:
        at_s: Seconds since the pass began.
        block_refs: Block references of ended requests; `hits` are those found, by tier.
        stats: The manager's statistics.
    """

    at_s: float
    block_refs: int
    hits: Mapping[str, int]
    stats: OffloadingStatistics


class Timeline:
    """Samples the statistics every few steps; drops every other sample when there are too many.

    The samples are evenly spaced over the steps, however many there are.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self,
        read: Callable[[], OffloadingStatistics],
        tally: Tally,
        *,
        most: int = MAX_SAMPLES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin a timeline with a first sample.

        Args:
            read: Returns the manager's statistics.
            tally: Counts of the requests.
            most: Maximum number of samples before the last one; an even number.
            clock: Returns seconds.
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
        """Count a step, and take a sample if one is due."""
        if self._steps % self._stride == 0:
            if len(self._samples) == self._most:
                del self._samples[1::2]
                self._stride *= 2
            self._samples.append(self._sample())
        self._steps += 1

    def finish(self) -> tuple[Sample, ...]:
        """Return the samples, followed by a sample of the current statistics."""
        return (*self._samples, self._sample())

    def _sample(self) -> Sample:
        return Sample(
            self._clock() - self._start_s,
            self._tally.block_refs,
            dict(self._tally.hits),
            self._read(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of one replay pass.

    Attributes:
        interrupted: Whether it ended before the requests did.
        requests: Ended requests; `block_refs` are their blocks, repeated ones included.
        hits: Block references found in the heads of prompts, by tier; see `drivers`.
        block_hits: Blocks found anywhere in the prompts, once per request; those on the device
            are not included.
        verified_blocks: Loaded blocks compared; `corrupt_blocks` of them differed.
        bytes_stored: Bytes that requests wrote to the primary; `bytes_loaded`: bytes that they
            read from it.
        bytes_to_device: Bytes copied to the device; `bytes_from_device`: bytes copied from it.
        preemptions: Times that a request lost its device blocks and restarted.
        device_blocks: Blocks that fit on the device; `layers`: its tensors.
        engine: `"sync"` for the connector's scheduler and workers, `"async"` for `OffloadEngine`.
        owner_us_per_step: Microseconds in the connector's calls per step: p50, p99, max. With the
            async engine a step is a request, and the value is the CPU time of the loop's thread
            without computing and comparing blocks.
        arrivals: `ReplayOptions.arrivals`; `prefetch` likewise.
        queued_s: Seconds from the requests' arrival to their start: p50, p99, max; None without
            `arrivals`.
        leaked_pins: Slots still pinned, being written or held after the engine became idle.
        evictions: Blocks evicted from the primary.
        stores_refused: Requests of which no block fitted in the primary.
        row_bytes: Bytes per block in the primary, over all workers, padded to whole pages.
        tiers: The engine's counters per tier, and `requests` sent to its server.
        samples: Samples of the course, if requested; not included in `to_dict`.
    """

    interrupted: bool
    requests: int
    block_refs: int
    hits: dict[str, int]
    hit_ratio: float
    block_hits: int
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
    arrivals: float | None
    prefetch: bool
    queued_s: dict[str, float] | None
    engine: str
    device_blocks: int
    layers: int
    tiers: dict[str, dict[str, int]]
    samples: tuple[Sample, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a dictionary."""
        figures = asdict(replace(self, samples=()))
        del figures["samples"]
        return figures

    @property
    def prefetch_counts(self) -> tuple[int, int, int]:
        """Blocks prefetched, used by a request, and prefetched in vain, over all tiers."""
        prefetched = sum(tier["prefetched_blocks"] for tier in self.tiers.values())
        unused = sum(tier["unused_prefetched_blocks"] for tier in self.tiers.values())
        return prefetched, prefetched - unused, unused

    @property
    def complaints(self) -> list[str]:
        """Errors found: corrupt blocks, leaked pins and the like."""
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
