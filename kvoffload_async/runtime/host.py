"""What a set of tiers runs on: one loop thread and one bridge; owned, never global."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.loop_thread import LoopThread


class RuntimeHost:
    """Owns the loop thread; a context manager.

    Thread: owner.
    """

    def __init__(self) -> None:
        """Start a loop thread."""
        self._loop_thread = LoopThread()
        self.bridge = Bridge(self._loop_thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop; idempotent. The tiers' pools are closed with their links."""
        self._loop_thread.close(timeout_s)
