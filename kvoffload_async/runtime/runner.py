"""What the owner needs of the loop: hand something over, wait with a deadline, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class LoopRunner(Protocol):
    """An event loop as its owner's thread sees it."""

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Have the loop call back; never waits.

        Raises:
            ClosedError: The loop is gone.
        """
        ...

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine to its end and return its result. For opening and closing only.

        Raises:
            TimeoutError: It did not end in time, and was cancelled.
            StateError: Called on the loop's own thread, which it would deadlock.
        """
        ...

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_done()`, asked again after every `notify`; False at the deadline."""
        ...

    def notify(self) -> None:
        """Wake whoever waits in `wait_until`. Thread: any."""
        ...

    def now_s(self) -> float:
        """Return this runner's monotonic time."""
        ...

    def close(self, timeout_s: float) -> None:
        """Stop the loop. Idempotent."""
        ...
