"""How a replay went, moment by moment: the statistics at a bounded number of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvoffload_async.replay.tally import Tally
from kvoffload_async.statistics import OffloadingStatistics

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
