"""How many bytes may be in flight in one direction of a link."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from kvoffload_async.waiting import Limiter

_FIRST_PART: Final = 8
"""A window begins as this part of its maximum: with the defaults 8 MiB, which a link of 5 MiB/s
carries before the first check of the server times out."""
_SHORTEST_S: Final = 1e-6

Departure = tuple[float, int]
"""Loop time at which a transfer began, and the bytes carried until then."""


class CongestionWindow:
    """Limits the bytes in flight of one direction, so that a check of the server is not delayed.

    A check of the server queues behind the payload in flight. So at most as many bytes are in
    flight as the link carries in `queue_s`, in addition to those of the time, up to `queue_s`, that
    a transfer takes without queueing: on a long link, these are under way and not queued. Both
    rate and time are measured. The window grows with each transfer that shows a higher rate, so
    that a fast link is in full use after a few round trips. It shrinks only if transfers take
    longer than that.

    Thread: loop.

    Attributes:
        limiter: Admits the transfers; it always admits one.
        moved_s: Loop time at which the last transfer ended with success.
    """

    def __init__(self, limiter: Limiter, queue_s: float) -> None:
        """Resize a limiter, at most to its present limit.

        Args:
            limiter: See the attributes.
            queue_s: Seconds that bytes may wait for others.
        """
        self.limiter = limiter
        self.moved_s = -math.inf
        self._most_bytes = limiter.max_bytes
        self._queue_s = queue_s
        self._carried = 0
        self._largest = 0
        self._fastest_s = 0.0
        """Shortest duration of a transfer of `_largest` bytes."""
        self._best = 0.0
        """Largest window that a transfer of the present round showed."""
        self._is_slow = False
        self._round_ends_s = 0.0
        limiter.resize(max(1, self._most_bytes // _FIRST_PART))

    def began(self) -> Departure:
        """Return what `ended` needs, at the beginning of a transfer."""
        return asyncio.get_running_loop().time(), self._carried

    def ended(self, departure: Departure, num_bytes: int) -> None:
        """Record a transfer that succeeded; one of no bytes measures nothing."""
        self.moved_s = now_s = asyncio.get_running_loop().time()
        if not num_bytes:
            return
        began_s, carried = departure
        seconds = max(now_s - began_s, _SHORTEST_S)
        self._carried += num_bytes
        if num_bytes > self._largest:
            self._largest, self._fastest_s = num_bytes, seconds
        elif num_bytes == self._largest:
            self._fastest_s = min(self._fastest_s, seconds)
        most_s = min(self._fastest_s, self._queue_s) + self._queue_s
        self._best = max(self._best, (self._carried - carried) / seconds * most_s)
        self._is_slow |= seconds > most_s
        is_over = now_s >= self._round_ends_s
        if self._best > self.limiter.max_bytes or (is_over and self._is_slow):
            self.limiter.resize(min(self._most_bytes, int(self._best)))
        if is_over:
            self._best, self._is_slow = 0.0, False
            self._round_ends_s = now_s + self._queue_s
