"""How many bytes may be in flight in one direction of a link."""

from __future__ import annotations

import asyncio
import math
from typing import Final, NamedTuple

from kvoffload_async.waiting import Limiter

_FIRST_PART: Final = 8
"""A window begins as this part of its maximum."""
_HOLD_S: Final = 60.0
"""Seconds after slow transfers in which the window grows only with the rate."""
_SHORTEST_S: Final = 1e-6


class Departure(NamedTuple):
    """The state as a transfer or round began: the loop time, the bytes in flight and carried."""

    began_s: float
    in_flight: int
    carried: int


class CongestionWindow:
    """Limits the bytes in flight of one direction, so that a check of the server is not delayed.

    A check of the server queues behind the payload in flight. So at most as many bytes are in
    flight as are carried in the time that a transfer takes alone, and `queue_s` more. Both time and
    rate are measured. The window grows with each transfer that shows a higher rate, so that a fast
    link is in full use after a few round trips; and by one transfer at a time while none takes
    longer than alone, as of a store that is slow to answer, or limits each connection. It shrinks
    if transfers take longer than that, or time out.

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
        self._alone_s = math.inf
        """The most that a transfer of `_largest` bytes takes without queueing, as far as known."""
        self._best = 0.0
        """Largest window that a transfer of the present round showed. A round ends when a window
        of bytes has passed, or transfers were slow; not before `queue_s`."""
        self._is_slow = False
        self._grows_s = -math.inf
        self._round = Departure(-math.inf, 0, 0)
        limiter.resize(max(1, self._most_bytes // _FIRST_PART))

    def began(self) -> Departure:
        """Return what `ended` needs, at the beginning of a transfer."""
        now_s = asyncio.get_running_loop().time()
        return Departure(now_s, self.limiter.bytes_in_flight, self._carried)

    def ended(self, departure: Departure, num_bytes: int) -> None:
        """Record a transfer that succeeded; one of no bytes measures nothing."""
        self.moved_s = now_s = asyncio.get_running_loop().time()
        if not num_bytes:
            return
        self._carried += num_bytes
        carried = self._carried - departure.carried
        seconds = max(now_s - departure.began_s, _SHORTEST_S)
        in_flight = max(departure.in_flight, self.limiter.bytes_in_flight, carried)
        self._note_alone(seconds, num_bytes, is_alone=in_flight <= num_bytes)
        most_s = self._alone_s + self._queue_s
        self._best = max(self._best, carried / seconds * most_s)
        self._is_slow |= seconds > most_s
        max_bytes, wanted = self.limiter.max_bytes, self._best
        has_passed = self._carried - self._round.carried + self._largest > max_bytes
        is_full = departure.in_flight + self._largest > max_bytes
        is_over = now_s - self._round.began_s >= self._queue_s and (has_passed or self._is_slow)
        if is_over and self._is_slow:
            self._grows_s = now_s + _HOLD_S
        elif is_over and is_full and now_s >= self._grows_s:
            wanted = max(wanted, max_bytes + self._largest)
        if wanted > max_bytes or (is_over and self._is_slow):
            self.limiter.resize(min(self._most_bytes, int(wanted)))
        if is_over:
            self._best, self._is_slow, self._round = 0.0, False, self.began()

    def timed_out(self) -> None:
        """Halve the window after a transfer that did not end in time, and so showed no rate."""
        self.limiter.resize(self.limiter.max_bytes // 2)

    def _note_alone(self, seconds: float, num_bytes: int, *, is_alone: bool) -> None:
        if num_bytes > self._largest:
            self._alone_s *= num_bytes / max(1, self._largest)
            self._largest = num_bytes
        self._alone_s = min(self._alone_s, seconds * self._largest / num_bytes)
        if is_alone:  # the store itself is as slow as that now
            self._alone_s = max(self._alone_s, seconds)
