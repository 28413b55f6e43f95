"""How far a long job has come."""

from __future__ import annotations

from collections.abc import Callable


class Gauge:
    """Counts what is done of what is to be done; both grow.

    Attributes:
        on_change: Called after every change.
    """

    def __init__(self) -> None:
        self._total = 0
        self._done = 0
        self.on_change: Callable[[], None] = lambda: None

    def expect(self, amount: int) -> None:
        """There is more to do."""
        self._total += amount
        self.on_change()

    def advance(self, amount: int) -> None:
        """Some of it is done."""
        self._done += amount
        self.on_change()

    @property
    def fraction_done(self) -> float:
        """The share, from 0 to 1; 0 while nothing is known."""
        return self._done / self._total if self._total else 0.0
