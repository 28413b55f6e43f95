"""The control law for the bytes in flight of one direction of a remote tier.

Two bounds apply, and the smaller one holds:

* The *model*, after BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue
  14(5), 2016): the measured rate times the seconds that a transfer may take, which are those of a
  transfer alone and the tolerated queue. As in CoDel (RFC 8289), calls queue if even the fastest
  transfer of a round took longer than that; slow single transfers are no queue.
* The *ceiling*: additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the
  increase and decrease algorithms for congestion avoidance in computer networks", 1989). It is
  halved if the server says "slow down", or a call times out, or a check of the server is late.

Pure: the caller passes the time.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

FIRST_BYTES: Final = 8 << 20
"""Bytes in flight before anything is measured."""
_HOLD_S: Final = 60.0
"""Seconds after calls queued in which the model grows only if the measured rate does, and after
which a ceiling ends."""
_ALONES: Final = 2.0
"""Tolerated queue, as a multiple of the seconds that a transfer takes alone..."""
_LEAST_QUEUE: Final = 1 / 8
"""... but at least this part of the longest tolerated queue."""
_GROWTH: Final = 1 / 4
"""Part by which the model grows in a round without a queue; at least by one transfer."""
_SHORTEST_S: Final = 1e-6


class Departure(NamedTuple):
    """State at the start of a transfer.

    Attributes:
        began_s: The start.
        since_s: Time from which `carried` is measured: the last arrival, if others are in flight.
        carried: Bytes that had arrived.
        number: Number of transfers begun, with this one.
        is_alone: Whether no other is in flight.
    """

    began_s: float
    since_s: float
    carried: int
    number: int
    is_alone: bool


class Window:
    """Limits the bytes in flight of one direction to those that its link carries in time.

    A round ends when a window of bytes has arrived that departed after the round's first arrival,
    so that they were in flight with as many others as are allowed in this round.

    Not thread-safe.
    """

    def __init__(self, most_bytes: int, queue_s: float, first_bytes: int = FIRST_BYTES) -> None:
        """Start with `first_bytes`, as nothing is measured.

        Args:
            most_bytes: Maximum of the window.
            queue_s: Longest tolerated queue, in seconds.
            first_bytes: The window before anything is measured.
        """
        self._most_bytes = self._ceiling = most_bytes
        self._model = min(float(most_bytes), first_bytes)
        self._queue_s = queue_s
        self._carried = self._begun = 0
        self._since_s = -math.inf
        self._largest = 0
        self._alone_s = math.inf
        """Estimated seconds that a transfer of `_largest` bytes takes alone."""
        self._grows_s = self._backed_off_s = -math.inf
        self._best = 0.0
        """Largest window derived from a transfer of the round, by the model."""
        self._fastest_s = math.inf
        """Seconds of the fastest transfer of the round's window."""
        self._was_full = False
        self._round_carried = self._round_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """The present limit; one transfer may be in flight even if it is larger."""
        return int(min(self._model, self._ceiling))

    def departs(self, now_s: float, *, is_alone: bool) -> Departure:
        """Return the state at the start of a transfer, to be passed to `arrives`."""
        self._begun += 1
        if is_alone:
            self._since_s = now_s
        return Departure(now_s, self._since_s, self._carried, self._begun, is_alone)

    def arrives(self, departure: Departure, num_bytes: int, in_flight: int, now_s: float) -> None:
        """Record a transfer that succeeded.

        Args:
            departure: Its start.
            num_bytes: Its bytes, at least 1.
            in_flight: Bytes in flight, with those of this one.
            now_s: The time.
        """
        self._since_s = now_s
        self._carried += num_bytes
        seconds = max(now_s - departure.began_s, _SHORTEST_S)
        self._note_alone(
            seconds, num_bytes, is_alone=departure.is_alone and departure.number == self._begun
        )
        allowed_s = self._allowed_s()
        rate = (self._carried - departure.carried) / max(now_s - departure.since_s, _SHORTEST_S)
        self._best = max(self._best, rate * allowed_s)
        self._was_full |= in_flight + self._largest > self.limit_bytes
        self._model = min(max(self._model, self._best), self._most_bytes)
        if departure.carried <= self._round_carried:
            return
        self._round_bytes += num_bytes
        self._fastest_s = min(self._fastest_s, seconds)
        if self._round_bytes < min(self.limit_bytes, in_flight):
            return
        if self._fastest_s > allowed_s:
            self._model = min(self._best, self._most_bytes)
            self._grows_s = now_s + _HOLD_S
        elif self._was_full and now_s >= self._grows_s:
            grown = self._model + max(self._largest, self._model * _GROWTH)
            self._model = min(grown, self._most_bytes)
        if now_s - self._backed_off_s >= _HOLD_S:
            self._ceiling = self._most_bytes
        elif departure.began_s >= self._backed_off_s:
            self._ceiling = min(self._ceiling + self._largest, self._most_bytes)
        self._start_round()

    def back_off(self, began_s: float, now_s: float) -> None:
        """Halve the window, because a call that began at `began_s` found too many in flight.

        Of the calls in flight at the same time, only the first one counts.
        """
        if began_s >= self._backed_off_s:
            self._ceiling = self.limit_bytes // 2
            self._backed_off_s = now_s

    def _allowed_s(self) -> float:
        """Return the seconds that a transfer of `_largest` bytes may take."""
        queue_s = max(_ALONES * self._alone_s, _LEAST_QUEUE * self._queue_s)
        return self._alone_s + min(queue_s, self._queue_s)

    def _note_alone(self, seconds: float, num_bytes: int, *, is_alone: bool) -> None:
        if num_bytes > self._largest:
            self._alone_s *= num_bytes / max(1, self._largest)
            self._largest = num_bytes
        self._alone_s = min(self._alone_s, seconds * self._largest / num_bytes)
        if is_alone:  # the store itself is as slow as that now
            self._alone_s = max(self._alone_s, seconds)

    def _start_round(self) -> None:
        self._round_carried, self._round_bytes = self._carried, 0
        self._best, self._fastest_s, self._was_full = 0.0, math.inf, False
