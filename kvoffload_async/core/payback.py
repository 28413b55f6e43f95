"""From how many blocks on loading from a tier takes less time than computing them.

Loading n blocks takes `latency + n * block_s`, computing them `n * compute_s`: loading pays from
`latency / (compute_s - block_s)` blocks on, and never where a block takes no less time to load
than to compute.

What is measured is what a request goes through under the present load, queues included. Its blocks
come in one job, so the time of whole jobs counts, from their arrival in the tier's queue to their
end, and not the tier's throughput: where several jobs run at once, each takes longer than its share
of that. A line through the recent jobs' times over their blocks (least squares, neither part of it
negative, each job weighing nine tenths of the next) tells what grows with the blocks; what does not
is latency, and so is the mean time of a probe. Recent jobs that are all about as large determine no
line. What they allow for is taken at its best then, so that other sizes are tried, and measured:
for fewer blocks that the time is all the blocks', for more that none of it is.

Sources: the line is the linear cost model of a message (R. Hockney, "The communication challenge
for MPP", Parallel Computing 20, 1994); its running sums are those of T. Finch, "Incremental
calculation of weighted mean and variance" (2009), with decay.
"""

from __future__ import annotations

import math
from typing import Final

FRESH_S: Final = 30.0
"""Without a sample for so long what was measured is old: a request may explore, and the next sample
counts alone."""
EXPLORATION_PAUSE_S: Final = 5.0
"""After an exploration that has found nothing to load, the next one begins so much later."""
MOST_BLOCKS: Final = 1 << 40
"""Nobody misses more."""

_LEAST_BLOCK_S: Final = 1e-12
_DECAY: Final = 0.9
_LEAST_SPREAD: Final = 1 / 16
"""Of the jobs' blocks, the square of the deviation over that of the mean: a quarter either way."""


class Payback:
    """Measures a tier's probes and loads; says how many blocks have to be missed.

    Thread: owner.

    Attributes:
        explorations: Requests that were let through to measure anew.
    """

    def __init__(self, prefill_blocks_per_s: float) -> None:
        """Start without a measurement: until there is one, any number of blocks pays.

        Args:
            prefill_blocks_per_s: Blocks that the accelerator computes in a second of prefill.
        """
        self.explorations = 0
        self._compute_s = 1 / prefill_blocks_per_s
        self._now_s = 0.0
        self._probe_s = 0.0
        self._probed_at_s = -math.inf
        self._loads = _Line()
        self._loaded_at_s = -math.inf
        self._explored_at_s = -math.inf
        self._is_exploring = False

    # -- measuring ------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Note the time, once a step; what comes in until the next time has happened then."""
        self._now_s = now_s

    def probe_ended(self, seconds: float, *, worked: bool) -> None:
        """Take in how long a probe took.

        One that failed says only that it may take longer than is known, as at its deadline; what
        fails is the breaker's.
        """
        is_first = self._is_old(self._probed_at_s)
        if not worked and (is_first or seconds <= self._probe_s):
            return
        if is_first:
            self._probe_s = seconds
        else:
            self._probe_s += (1 - _DECAY) * (seconds - self._probe_s)
        self._probed_at_s = self._now_s

    def load_ended(self, num_blocks: int, seconds: float) -> None:
        """Take in how long a load of some blocks took that has brought all of them."""
        if self._is_old(self._loaded_at_s):
            self._loads = _Line()
        self._loads.add(num_blocks, seconds)
        self._loaded_at_s = self._now_s

    # -- what follows ---------------------------------------------------------------------------

    @property
    def needed_blocks(self) -> float:
        """The least number of blocks that pays; infinity: none does."""
        if not self._loads.weight:
            return 0
        blocks = self._break_even(self._best())
        return math.ceil(blocks) if blocks <= MOST_BLOCKS else math.inf

    @property
    def latency_s(self) -> float | None:
        """What loading takes however few the blocks are; None: no load was measured."""
        return self._probe_s + self._best()[0] if self._loads.weight else None

    @property
    def blocks_per_s(self) -> float | None:
        """How fast the rest of it goes; None: no load was measured, or it is all latency."""
        block_s = self._best()[1] if self._loads.weight else 0.0
        return 1 / block_s if block_s > _LEAST_BLOCK_S else None

    # -- exploring ------------------------------------------------------------------------------

    @property
    def may_explore(self) -> bool:
        """Whether what was measured is old, and nobody measures it anew."""
        pause_s = FRESH_S if self._is_exploring else EXPLORATION_PAUSE_S
        began_ago_s = self._now_s - self._explored_at_s
        return self._is_old(self._loaded_at_s) and began_ago_s >= pause_s

    def explore(self) -> None:
        """Let a request through."""
        self.explorations += 1
        self._explored_at_s = self._now_s
        self._is_exploring = True

    def exploration_ended(self) -> None:
        """Note that the request that was let through has ended; no other waits for it any more."""
        self._is_exploring = False

    # -- inside ---------------------------------------------------------------------------------

    def _is_old(self, sampled_at_s: float) -> bool:
        return self._now_s - sampled_at_s >= FRESH_S

    def _break_even(self, line: tuple[float, float]) -> float:
        fixed_s, block_s = line
        gain_s = self._compute_s - block_s
        return (self._probe_s + fixed_s) / gain_s if gain_s > 0 else math.inf

    def _best(self) -> tuple[float, float]:
        return min(self._loads.candidates(), key=self._break_even)


class _Line:
    """Seconds over blocks, of the recent loads."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._blocks = 0.0
        self._seconds = 0.0
        self._blocks_squared = 0.0
        """The sum of the squares of what is away from the mean, as is the one below."""
        self._product = 0.0

    def add(self, num_blocks: int, seconds: float) -> None:
        self.weight = _DECAY * self.weight + 1
        away = num_blocks - self._blocks
        self._blocks += away / self.weight
        self._seconds += (seconds - self._seconds) / self.weight
        self._blocks_squared = _DECAY * self._blocks_squared + away * (num_blocks - self._blocks)
        self._product = _DECAY * self._product + away * (seconds - self._seconds)

    def candidates(self) -> tuple[tuple[float, float], ...]:
        """Return (what does not grow with the blocks, seconds a block): one, or the extremes."""
        blocks, seconds = self._blocks, self._seconds
        squares = self.weight * blocks * blocks
        if self._blocks_squared < _LEAST_SPREAD * squares:
            return (seconds, 0.0), (0.0, seconds / blocks)
        block_s = max(0.0, self._product / self._blocks_squared)
        fixed_s = seconds - block_s * blocks
        if fixed_s >= 0:
            return ((fixed_s, block_s),)
        # The best line through the origin.
        through = self._product + self.weight * blocks * seconds
        return ((0.0, through / (self._blocks_squared + squares)),)
